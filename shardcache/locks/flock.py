"""Locks by flock(2), which the kernel frees when their holder dies, and records of their holders.

Locks only save bandwidth. Callers stay correct if flock is refused, is granted to two processes, or
its file vanishes: each download is of one version, and is published by a rename. The order is key,
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

#: Errors of a filesystem without flock. Its locks count as granted: a second download costs
#: bandwidth, a refusal would cost the run.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
#: Seconds between attempts at a lock that another process has for a moment: to plan an eviction
#: takes microseconds, to close a partial after publishing some milliseconds.
_PAUSES = (0.001, 0.01, 0.02)
#: Attempts to lock a file that a sweep may remove, with its directory, between open and flock.
_ATTEMPTS = 100
#: Bytes that a record is padded to, so that one write replaces the record before, and most bytes to
#: read: a record may name a long URL.
_RECORD, _MAX_RECORD = 2048, 16 << 10


def try_flock(fd: int, *, shared: bool = False) -> bool | None:
    """Take the exclusive (or a shared) lock of an open file without waiting.

    Returns False if another process has the lock; None if the filesystem has no flock.
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
    """Call `try_flock` up to four times within 31 ms, until the lock is free."""
    for seconds in _PAUSES:
        if (taken := try_flock(fd, shared=shared)) is not False:
            return taken
        time.sleep(seconds)
    return try_flock(fd, shared=shared)


def is_file(path: str | Path, fd: int) -> bool:
    """Return whether an open file is the one that has the name ``path``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


@dataclass(frozen=True, slots=True)
class Holder:
    """The record of a process that downloads a key, or waits for it.

    It is for people, and names the partial to resume. No decision depends on its truth.
    """

    pid: int  #: in the holder's own pid namespace
    host: str
    rank: int | None  #: in its job, if it has one
    job: str | None
    started: float  #: seconds since the epoch
    partial: str | None = None  #: directory name of its partial, once there is one
    url: str | None = None  #: of the shard that it waits for, without credentials

    @classmethod
    def this_process(cls, *, rank: int | None, job: str | None, now: float) -> Holder:
        """Return a record of the calling process; ``now`` is seconds since the epoch."""
        return cls(os.getpid(), socket.gethostname(), rank, job, now)

    def encode(self) -> bytes:
        """Return the record as JSON, padded with spaces."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(record).encode().ljust(_RECORD)

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """Parse the output of `encode`; return None for anything else."""
        try:
            holder = cls(**json.loads(data))
            # Commands print it, and other users of the group may have written it.
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
    """Read the record in a file; return None if it is missing or damaged."""
    try:
        return Holder.decode(read_file(path, _MAX_RECORD))
    except OSError:
        return None


class KeyLock:
    """The right of one process of this node to download a key. A forked child closes the file.

    Attributes:
        path: the lock file.
        left: the record that the last holder left. It names the partial of a killed download.
    """

    def __init__(self, path: Path, modes: Modes = PRIVATE) -> None:
        self.path = path
        self.left: Holder | None = None
        self._modes = modes
        self._file: io.FileIO | None = None
        self._is_spent = False  # whether `release` removes the file

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lock if it is free, and write ``holder`` into it; return whether that worked.

        On a filesystem without flock, or without room for the file, every process gets the lock.

        Raises:
            OSError: the lock file cannot be made (read-only, denied).
        """
        for _ in range(_ATTEMPTS):
            try:
                file = open_exclusive(self.path, os.O_RDWR | os.O_CREAT, self._modes)
            except FileNotFoundError:
                # <locks> or <locks>/<aa>, which is made on demand.
                parent = self.path.parent
                self._modes.make_directory(parent, int(parent.name != "locks"))
                continue
            except PermissionError:
                if not os.path.lexists(self.path):
                    raise
                time.sleep(_PAUSES[0])  # another member makes it, and has not set its mode yet
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
                with contextlib.suppress(OSError):  # a pipe in its place can be locked, too
                    self.left = Holder.decode(os.pread(file.fileno(), _MAX_RECORD, 0))
                self.update(holder)
                return True
            self.release()  # a sweep removed the file between open and flock
        logger.info("going on without %s", self.path)
        return True

    def update(self, holder: Holder) -> None:
        """Replace the record in the lock file, if this process holds the lock."""
        file = self._file
        if file is None or file.closed:
            return
        self._is_spent = is_lock_name(self.path.name) is not None and holder.partial is None
        try:
            with contextlib.suppress(PermissionError):  # another member's file
                set_mode(file.fileno(), self._modes.file)
            os.pwrite(file.fileno(), holder.encode(), 0)
        except OSError as exn:  # it is for people
            logger.debug("%s: no record of its holder: %s", self.path, exn)

    def release(self) -> None:
        """Release the lock, if this process holds it.

        Also removes the lock file of a key, which takes a block of the disk, unless its record
        names a partial.
        """
        file, self._file = self._file, None
        if file is not None and not file.closed:  # closed in a forked child: it is the parent's
            with contextlib.suppress(OSError):
                if self._is_spent and os.fstat(file.fileno()).st_nlink:
                    self.path.unlink()
            with contextlib.suppress(OSError):  # it is closed nevertheless
                unlock(file.fileno())
                file.close()


def remove_locks(layout: Layout) -> None:
    """Remove the lock files and leases of keys that no process downloads."""
    for locks in {layout.locks, layout.base / "locks"}:
        for prefix in list_names(locks):
            directory = locks / prefix
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
        return  # it names the partial of a killed download, which can be resumed
    with contextlib.suppress(OSError), open_file(path) as file:
        # Only under its own lock, and unless the file was removed and made again.
        if try_flock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            path.unlink()
