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

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.layout import make_directory

if TYPE_CHECKING:
    from filelock import FileLock

__all__ = [
    "Holder",
    "KeyLock",
    "disown",
    "dup_owned",
    "is_file",
    "is_free",
    "lock_exclusive",
    "lock_shared",
    "open_owned",
    "pin",
    "read_holder",
    "seize",
]

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

# Descriptors whose flock says "this process is writing". A forked child shares
# the open file and with it the lock, so it would keep a dead writer's partial
# looking alive; the child closes them before any of its code runs. A fork waits
# for the guard, so that no descriptor is open but not yet registered. It is
# reentrant because a signal handler may fork.
_owned: set[int] = set()
_owned_guard = threading.RLock()


def open_owned(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, never through a symbolic link, that a forked child must not keep.

    Raises:
        OSError: as `os.open`.
    """
    with _owned_guard:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _owned.add(fd)
    return fd


def dup_owned(fd: int) -> int:
    """Another descriptor of an open file, which a forked child must not keep either.

    Raises:
        OSError: ``fd`` is closed, or there are too many.
    """
    with _owned_guard:
        new = os.dup(fd)
        _owned.add(new)
    return new


def disown(fd: int) -> None:
    """Close a descriptor that `open_owned` or `dup_owned` made; in a forked child, nothing."""
    with _owned_guard:
        if fd in _owned:
            _owned.discard(fd)
            os.close(fd)


def _drop_in_child() -> None:
    global _owned_guard
    _owned_guard = threading.RLock()  # the old one belongs to a thread that is not here
    for fd in _owned:
        with contextlib.suppress(OSError):  # a failing disk; the others must still be closed
            os.close(fd)
    _owned.clear()


os.register_at_fork(
    before=lambda: _owned_guard.acquire(),
    after_in_parent=lambda: _owned_guard.release(),
    after_in_child=_drop_in_child,
)


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
    for seconds in _PATIENCE:
        if lock_shared(fd):
            return True
        if not is_file(path, fd):
            return False
        time.sleep(seconds)
    return lock_shared(fd)


def seize(fd: int, path: Path) -> bool:
    """Take the exclusive lock; False if somebody reads the file or has just written it.

    Raises:
        FileNotFoundError: somebody has evicted it.
    """
    for seconds in (*_PATIENCE, 0.0):
        if lock_exclusive(fd):
            return True
        if lock_shared(fd):  # so do readers
            return lock_exclusive(fd)
        # Somebody else asks the same, evicts it, or is its writer.
        if not is_file(path, fd):
            raise FileNotFoundError(errno.ENOENT, "it was evicted", str(path))
        time.sleep(seconds)
    return False


def is_file(path: str | Path, fd: int) -> bool:
    """Whether an open file is the one under ``path``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
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
        return cls(os.getpid(), socket.gethostname(), rank, job, now)

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host}"
        return text if self.rank is None else f"{text} (rank {self.rank})"


def read_holder(path: Path) -> Holder | None:
    """The record in a lock file, or None if there is none that makes sense."""
    try:
        with open(path, "rb", buffering=0) as file:
            record = json.loads(file.read(_MAX_RECORD))
        holder = Holder(**record)
        sane = math.isfinite(holder.started)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    sane = sane and isinstance(holder.pid, int) and isinstance(holder.host, str)
    sane = sane and isinstance(holder.rank, (int, type(None)))
    sane = sane and isinstance(holder.job, (str, type(None)))
    sane = sane and isinstance(holder.size, (int, type(None)))
    return holder if sane and isinstance(holder.partial, (str, type(None))) else None


class KeyLock:
    """The right to fetch one key on this node.

    Not reentrant; one object per attempt. Safe between threads, processes and
    forks: every object opens the lock file anew, and flock tells open files
    apart.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._fd = -1
        self._pid = os.getpid()

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lock if it is free, and say in it who we are.

        A filesystem without flock grants it to everybody (see the module).

        Raises:
            OSError: the lock file cannot be made (read-only, full, denied).
        """
        from filelock import FileLock, Timeout

        lock = FileLock(
            self.path,
            thread_local=False,
            mode=0o600,
            fallback_to_soft=False,
            preserve_lock_file=True,
            on_acquired=self._remember,
        )
        for attempt in range(_MAKE_ATTEMPTS):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                return False
            except (FileNotFoundError, FileExistsError):
                # FileExistsError is what pathlib says of a directory that is there
                # for its mkdir and gone for its look at it.
                if attempt == _MAKE_ATTEMPTS - 1:
                    raise
                make_directory(self.path.parent)  # on demand: most keys never need one
            except OSError as exn:
                if exn.errno in _UNSUPPORTED:
                    return True
                raise
            else:
                break
        self._lock = lock
        self.update(holder)
        return True

    def _remember(self, fd: int) -> None:
        self._fd = fd

    def update(self, holder: Holder) -> None:
        """Replace the record in a lock that is held."""
        if self._fd < 0 or self._pid != os.getpid():
            return  # in a forked child the number may be any file's
        data = json.dumps(asdict(holder)).encode()
        # Shorter records first lose their tail: a reader in between sees no
        # JSON and asks again, which is all it could do anyway.
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)
        except OSError as exn:
            if exn.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                raise
            # A full disk must not fail a fetch for want of a line meant for people.

    def release(self) -> None:
        """Let the next one go on; harmless when the lock is not held, or is the parent's."""
        lock, self._lock, self._fd = self._lock, None, -1
        if lock is not None and self._pid == os.getpid():
            lock.release()
