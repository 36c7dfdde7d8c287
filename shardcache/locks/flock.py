"""Locks, and who holds them.

Three uses of flock(2), all freed by the kernel when their holder dies:

* `KeyLock`: one fetch of a key per node. Through `filelock`, never blocking,
  never stolen, its file never unlinked while anybody may hold it.
* the writer's exclusive lock on a partial's data file: exact liveness for
  whoever sweeps or resumes.
* the readers' shared lock on an entry's data file, the pin: an entry that is
  being read cannot be evicted.

Locks only save bandwidth. Every caller stays correct when flock is refused,
lies, or its file vanishes: bytes are pinned to a version and published by
rename, whoever wrote them.

Order: key, then budget, then single entries without waiting.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.files import DISK_FAULTS, FULL, PRIVATE, Modes, is_alone
from shardcache.layout import is_directory, read_file

if TYPE_CHECKING:
    from filelock import FileLock

logger = logging.getLogger(__name__)

#: What a filesystem answers that does not do flock at all. Such a lock is
#: treated as granted: duplicates cost bandwidth, refusing would cost the run.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})

#: Seconds between looks at a lock that is taken: planning an eviction holds it for
#: microseconds, the writer for as long as it takes to let go after publishing.
_PATIENCE = (0.001, 0.01, 0.02)
#: A lock file's directory may be removed, as empty, between our mkdir and our open,
#: not this often in a row.
_MAKE_ATTEMPTS = 100
_MAX_RECORD = 4096
_SHARED = fcntl.LOCK_SH | fcntl.LOCK_NB
#: Whether this process has warned of one; see `_say_closed`.
_closed = False
#: A host name has up to 64 characters, a job's name as many as its user likes; a record
#: must stay below `_MAX_RECORD`.
_MAX_TEXT = 256
_MAX_COUNT = 1 << 63


def lock_shared(fd: int) -> bool:
    """Pin: take a shared lock without waiting; False if somebody has it exclusively."""
    return _flock(fd, fcntl.LOCK_SH) is not False


def lock_exclusive(fd: int) -> bool:
    """Take the exclusive lock without waiting; False if anybody has it."""
    return _flock(fd, fcntl.LOCK_EX) is not False


def is_free(fd: int, *, shared: bool = False) -> bool | None:
    """As `lock_exclusive` or `lock_shared`, but None where nobody can tell: without flock."""
    return _flock(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def _flock(fd: int, operation: int) -> bool | None:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except OSError as exn:
        if exn.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if exn.errno in _UNSUPPORTED:
            return None
        raise
    return True


def pin(fd: int, path: str) -> bool:
    """Take the shared lock; False if somebody evicts the file."""
    try:
        fcntl.flock(fd, _SHARED)  # a million times, and at once
    except OSError:
        return _pin_slowly(fd, path)
    return True


def _pin_slowly(fd: int, path: str) -> bool:
    for seconds in (0.0, *_PATIENCE):
        if lock_shared(fd):
            return True
        if not is_file(path, fd):
            return False
        time.sleep(seconds)
    return lock_shared(fd)


def seize(fd: int, path: Path) -> bool | None:
    """Take the exclusive lock; False if somebody reads the file or has just written it.

    Returns:
        None where nobody can tell: without flock.

    Raises:
        FileNotFoundError: somebody has evicted it.
    """
    for seconds in (*_PATIENCE, 0.0):
        free = is_free(fd)
        if free is not False:
            return free
        if lock_shared(fd):  # so do readers
            return is_free(fd)
        # Somebody else asks the same, evicts it, or is its writer.
        if not is_file(path, fd):
            raise FileNotFoundError(errno.ENOENT, "it was evicted", str(path))
        time.sleep(seconds)
    return False


def is_file(path: str | Path, fd: int) -> bool:
    """Whether an open file is the one under ``path``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


@dataclass(frozen=True, slots=True)
class Holder:
    """Who fetches a key, as they wrote it into the lock file.

    For people and for finding the partial: nothing rests on its truth.

    Attributes:
        pid: process id, in the holder's own pid namespace.
        host: the holder's host name.
        rank: rank in its job, if it has one.
        job: its job, if it has one.
        started: wall-clock seconds since the epoch.
        partial: directory name of the partial it writes, once there is one.
        size: bytes it expects, once known.
    """

    pid: int
    host: str
    rank: int | None
    job: str | None
    started: float
    partial: str | None = None
    size: int | None = None

    @classmethod
    def this_process(cls, *, rank: int | None, job: str | None, now: float) -> Holder:
        """A record of the calling process."""
        return cls(os.getpid(), socket.gethostname(), rank, job and _plain(job), now)

    def encode(self) -> bytes:
        """As `parse_holder` reads it."""
        # Not by `asdict`, which copies deeply: this is written twice per shard.
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host}"
        return text if self.rank is None else f"{text} (rank {self.rank})"


def read_holder(path: Path) -> Holder | None:
    """The record in a lock file, or None if there is none that makes sense."""
    try:
        return parse_holder(read_file(path, _MAX_RECORD))
    except OSError:
        return None


def parse_holder(data: bytes) -> Holder | None:
    """What `KeyLock.update` writes; None for anything else."""
    try:
        holder = Holder(**json.loads(data))
        counts = [n for n in (holder.rank, holder.size) if n is not None]
        if not all(type(n) is int and 0 <= n < _MAX_COUNT for n in (holder.pid, *counts)):
            raise ValueError("a number that cannot be")
        if not (isinstance(holder.partial, str | None) and math.isfinite(holder.started)):
            raise TypeError("a field of another type")
        return replace(
            holder,
            host=_plain(holder.host),
            job=None if holder.job is None else _plain(holder.job),
            started=float(min(max(0.0, holder.started), _MAX_COUNT)),
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None


def _plain(text: str) -> str:
    """Text that may be shown: what is in the file could be written by others."""
    if not isinstance(text, str):
        raise TypeError("no text")
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_TEXT])


def _say_closed(path: Path) -> None:
    """Warn of a lock file that is closed to this user: one is a warning, the rest is no news."""
    global _closed
    level = logging.INFO if _closed else logging.WARNING
    _closed = True
    logger.log(level, "%s is closed to this user; going on without", path)


class KeyLock:
    """The right to fetch one key on this node.

    Not reentrant; one object per attempt. Safe between threads, processes and
    forks: every object opens the lock file anew, and flock tells open files
    apart.
    """

    def __init__(self, path: Path, modes: Modes = PRIVATE) -> None:
        self.path = path
        self._modes = modes
        self._lock: FileLock | None = None
        self._fds: list[int] = []
        self._pid = os.getpid()

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lock if it is free, and say in it who we are.

        A filesystem without flock grants it to everybody (see the module).

        Raises:
            OSError: the lock file cannot be made (read-only, full, denied).
        """
        from filelock import FileLock, Timeout

        # On demand, because most keys never need one: <locks>, or <locks>/<aa>. Here, because
        # filelock would make everything that is missing, and as the umask says.
        parent = self.path.parent
        made = is_directory(parent)
        levels = int(parent.name != "locks")
        patience = iter(_PATIENCE if self._modes.group is not None else ())
        lock = FileLock(
            self.path,
            thread_local=False,
            mode=self._modes.file,
            fallback_to_soft=False,
            preserve_lock_file=True,
            # Not a method of ours: the lock is freed with its object, which a cycle would keep.
            on_acquired=self._fds.append,
        )
        for attempt in range(_MAKE_ATTEMPTS):
            try:
                if not made:
                    self._modes.make_directory(parent, levels)
                lock.acquire(blocking=False)
            except Timeout:
                return False
            except (FileNotFoundError, FileExistsError):
                # FileExistsError is what pathlib says of a directory that is there
                # for its mkdir and gone for its look at it.
                made = False
                if attempt == _MAKE_ATTEMPTS - 1:
                    raise
            except PermissionError:
                # Another member's gets its mode right after its name. If its maker was
                # killed in between, the next sweep of that user removes it.
                seconds = next(patience, None)
                if seconds is not None:
                    time.sleep(seconds)
                    continue
                if not os.path.lexists(self.path):
                    raise
                _say_closed(self.path)
                return True
            except OSError as exn:
                if exn.errno in _UNSUPPORTED:
                    return True
                raise
            else:
                break
        self._lock = lock
        try:
            self.update(holder)
        except OSError:
            self.release()
            raise
        return True

    def update(self, holder: Holder) -> None:
        """Replace the record in a lock that is held."""
        if not self._fds or self._pid != os.getpid():
            return  # in a forked child the number may be any file's
        fd = self._fds[-1]
        if not is_alone(fd):
            return  # somebody's file, linked here
        data = holder.encode()
        # Shorter records first lose their tail: a reader in between sees no
        # JSON and asks again, which is all it could do anyway.
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
        except OSError as exn:
            if exn.errno not in FULL | DISK_FAULTS | {errno.EFBIG}:
                raise
            # A full or failing disk must not fail a fetch for want of a line meant for people.
            logger.debug("%s: no record of its holder: %s", self.path, exn)

    def release(self) -> None:
        """Let the next one go on; harmless when the lock is not held, or is the parent's."""
        self._fds.clear()
        if self._lock is not None and self._pid == os.getpid():
            self._lock.release(force=True)
        self._lock = None
