"""Locks, and who holds them: flock(2), which the kernel frees when their holder dies.

They only save bandwidth. Every caller stays correct when flock is refused, lies, or its file
vanishes: bytes are pinned to a version and published by rename, whoever wrote them. Order: key,
then budget, then single entries without waiting.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from shardcache.files import FULL, PRIVATE, Modes, open_exclusive, open_file, set_mode, unlock
from shardcache.layout import (
    IDLE_GRACE,
    Layout,
    is_directory,
    is_key,
    is_lease_name,
    is_lock_name,
    list_names,
    read_file,
    remove_old,
)

logger = logging.getLogger(__name__)

#: What a filesystem answers that does not do flock at all. Such a lock is treated as granted:
#: duplicates cost bandwidth, refusing would cost the run.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
#: Seconds between attempts at a lock that is taken: planning an eviction holds it for
#: microseconds, the writer for as long as it takes to let go after publishing.
_PATIENCE = (0.001, 0.01, 0.02)
#: A lock's file, or its directory, may be swept between two of our calls, not this often in a row.
_ATTEMPTS = 100
#: Bytes of a record, so that writing one replaces the last one in a single call; and most of one
#: that names a long URL.
_RECORD, _MAX_RECORD = 2048, 16 << 10


def try_flock(fd: int, *, shared: bool = False) -> bool | None:
    """Take the exclusive (or a shared) lock of an open file without waiting.

    Returns:
        False if somebody else has it; None where nobody can tell: without flock.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as exn:
        if exn.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if exn.errno in _UNSUPPORTED:
            return None
        raise
    return True


def wait_flock(fd: int, *, shared: bool = False) -> bool | None:
    """As `try_flock`, but outwait those who hold the lock for a moment."""
    for seconds in _PATIENCE:
        if (taken := try_flock(fd, shared=shared)) is not False:
            return taken
        time.sleep(seconds)
    return try_flock(fd, shared=shared)


def is_file(path: str | Path, fd: int) -> bool:
    """Whether an open file is the one under ``path``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


@dataclass(frozen=True, slots=True)
class Holder:
    """Who fetches a key, or waits for it, as they wrote it into a file.

    For people and for finding the partial: nothing rests on its truth.
    """

    pid: int  #: in the holder's own pid namespace
    host: str
    rank: int | None  #: in its job, if it has one
    job: str | None
    started: float  #: seconds since the epoch
    partial: str | None = None  #: directory name of the partial it writes, once there is one
    url: str | None = None  #: of the shard, without credentials, if it waits

    @classmethod
    def this_process(cls, *, rank: int | None, job: str | None, now: float) -> Holder:
        """A record of the calling process."""
        return cls(os.getpid(), socket.gethostname(), rank, job, now)

    def encode(self) -> bytes:
        """As `decode` reads it."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(record).encode().ljust(_RECORD)

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """What `encode` wrote; None for anything else."""
        try:
            holder = cls(**json.loads(data))
            # It is shown on terminals, with its age, and others may write it.
            typed = isinstance(holder.pid, int) and holder.host.isprintable()
            typed = typed and 0 <= holder.started < 1e11 and isinstance(holder.rank, int | None)
            texts = holder.job, holder.partial, holder.url
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return holder if typed and all(isinstance(each, str | None) for each in texts) else None

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host}"
        return text if self.rank is None else f"{text} (rank {self.rank})"


def read_holder(path: Path) -> Holder | None:
    """The record in a file, or None if there is none that makes sense."""
    try:
        return Holder.decode(read_file(path, _MAX_RECORD))
    except OSError:
        return None


class KeyLock:
    """The right to fetch one key on this node; one object per attempt.

    ``left`` is the record of the holder before, once the lock was acquired: of a fetch that was
    killed it names the partial. A forked child's copy is closed before any of its code runs.
    """

    def __init__(self, path: Path, modes: Modes = PRIVATE) -> None:
        self.path = path
        self.left: Holder | None = None
        self._modes = modes
        self._file: io.FileIO | None = None
        self._is_spent = False  # whether no process needs the file after `release`

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lock if it is free, and say in it who we are.

        A filesystem without flock, or without room for the file, grants it to everybody.

        Raises:
            OSError: the lock file cannot be made (read-only, denied).
        """
        for _ in range(_ATTEMPTS):
            try:
                file = open_exclusive(self.path, os.O_RDWR | os.O_CREAT, self._modes)
            except FileNotFoundError:
                # Made on demand, because most keys never need one: <locks>, or <locks>/<aa>.
                parent = self.path.parent
                self._modes.make_directory(parent, int(parent.name != "locks"))
                continue
            except PermissionError:
                if not os.path.lexists(self.path):
                    raise
                time.sleep(_PATIENCE[0])  # another member's gets its mode right after its name
                continue
            except OSError as exn:
                if exn.errno in FULL:
                    break
                raise
            self._file = file
            if try_flock(file.fileno()) is False:
                self.release()
                return False
            if os.fstat(file.fileno()).st_nlink:
                with contextlib.suppress(OSError):  # somebody has put a pipe there: it locks, too
                    self.left = Holder.decode(os.pread(file.fileno(), _MAX_RECORD, 0))
                self.update(holder)
                return True
            self.release()  # swept between our open and our flock
        logger.info("going on without %s", self.path)
        return True

    def update(self, holder: Holder) -> None:
        """Replace the record in a lock that is held; it is meant for people, so it may fail."""
        file = self._file
        if file is None or file.closed:
            return  # not held, or the parent's
        self._is_spent = is_lock_name(self.path.name) is not None and holder.partial is None
        try:
            with contextlib.suppress(PermissionError):  # another member's
                set_mode(file.fileno(), self._modes.file)
            os.pwrite(file.fileno(), holder.encode(), 0)
        except OSError as exn:
            logger.debug("%s: no record of its holder: %s", self.path, exn)

    def release(self) -> None:
        """Let the next one go on; harmless when the lock is not held, or is the parent's.

        This removes the file of a key unless its record names a partial. The file takes a block of
        the disk, and a shard that is small or was streamed does not need it again.
        """
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                if self._is_spent and not file.closed and os.fstat(file.fileno()).st_nlink:
                    self.path.unlink()
            with contextlib.suppress(OSError):  # closed all the same
                if not file.closed:  # in a forked child it is, and the lock is the parent's
                    unlock(file.fileno())
                file.close()


def remove_locks(layout: Layout) -> None:
    """Remove lock files and leases of keys that no process fetches.

    They cost an inode for every large shard that was ever fetched. A live lease is touched every
    half a minute; one that is wrongly taken for dead costs a second fetch.
    """
    for place in {layout.locks, layout.base / "locks"}:
        for prefix in list_names(place):
            directory = place / prefix
            if not is_key(prefix * 16) or not is_directory(directory):
                continue
            for name in list_names(directory):
                if name.startswith(prefix):
                    if is_lock_name(name):
                        _remove_free_lock(layout, directory / name)
                    elif is_lease_name(name):
                        remove_old(directory / name, layout.grace or IDLE_GRACE)
            with contextlib.suppress(OSError):  # not empty: in use
                directory.rmdir()


def _remove_free_lock(layout: Layout, path: Path) -> None:
    left = read_holder(path)
    if left is not None and left.partial and is_directory(layout.partial / left.partial):
        return  # it tells where a killed fetch can be resumed
    with contextlib.suppress(OSError), open_file(path) as file:
        # Only under its own lock, and the name may be that of a newer file by now.
        if try_flock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            path.unlink()
