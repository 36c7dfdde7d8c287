"""Locks by flock(2), which the kernel frees when their holder dies, and records of their holders.

Callers stay correct if a lock is refused, is granted to two processes, or loses its file. Locks are
taken in a fixed order: first the key, then the budget, then single entries without waiting.
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
from dataclasses import dataclass, replace
from pathlib import Path

from shardcache.faults import FULL, ignoring, os_error
from shardcache.files import PRIVATE, Modes, open_exclusive, open_file, set_mode, unlock
from shardcache.layout import (
    IDLE_GRACE,
    Layout,
    is_directory,
    is_idle,
    is_key,
    is_lease_name,
    is_lock_name,
    list_names,
    read_file,
    remove_old,
)

logger = logging.getLogger(__name__)

#: Errors of a filesystem without flock. Locks there count as granted, because a second download
#: only costs bandwidth, while a refusal would end the run.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
#: Seconds between attempts to take a lock that another process holds briefly: planning an eviction
#: takes microseconds, and closing a partial after its publication takes a few milliseconds.
_PAUSES = (0.001, 0.01, 0.02)
#: Attempts to open and lock a file, because a sweep may remove the file or its directory.
_ATTEMPTS = 100
#: Length in bytes to which a record is padded, so that one write replaces the previous record, and
#: the maximum number of bytes to read, because a record may contain a long URL.
_RECORD, _MAX_RECORD = 2048, 16 << 10


def try_flock(fd: int, *, shared: bool = False) -> bool | None:
    """Try to take the exclusive (or a shared) lock of an open file, without waiting.

    Return True, or False if another process has the lock, or None if the filesystem has no flock.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except os_error() as exn:
        if exn.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if exn.errno in _UNSUPPORTED:
            return None
        raise
    return True


def wait_flock(fd: int, *, shared: bool = False) -> bool | None:
    """Call `try_flock` up to four times within 31 ms, while it returns False; return the result."""
    for seconds in _PAUSES:
        if (taken := try_flock(fd, shared=shared)) is not False:
            return taken
        time.sleep(seconds)
    return try_flock(fd, shared=shared)


def is_file(path: str | Path, fd: int) -> bool:
    """Return whether ``path`` still names the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


@dataclass(frozen=True, slots=True)
class Holder:
    """The record of a process that downloads a key or waits for the download.

    The record informs people, and names the partial (the unfinished download) that the next holder
    can resume. No decision depends on whether the record is true.
    """

    pid: int  #: process id in the pid namespace of the process
    host: str
    rank: int | None  #: rank in the job, if the process has one
    job: str | None
    started: float  #: seconds since the epoch
    partial: str | None = None  #: directory name of the partial, once there is one
    url: str | None = None  #: URL, without credentials, of the shard that the process waits for

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
        """Return the `Holder` that `encode` has encoded, or None for any other data."""
        try:
            holder = cls(**json.loads(data))
            # Check the record: commands print it, and other members of the group can write it.
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
    """Return the record in a file, or None if the file or the record is missing or damaged."""
    try:
        return Holder.decode(read_file(path, _MAX_RECORD))
    except os_error():
        return None


class KeyLock:
    """The lock of a key, which gives one process of this node the right to download the shard.

    A forked child closes the lock file, so that only the parent keeps the lock.

    Attributes:
        left: the record of the previous holder, which names the partial of a killed download.
        partial: the name of the partial in the record of this holder. Until this holder has one,
            it is that of the previous holder, so that a second kill does not lose it.
    """

    def __init__(self, path: Path, modes: Modes = PRIVATE) -> None:
        self.path = path
        self.left: Holder | None = None
        self._modes = modes
        self._file: io.FileIO | None = None
        self.partial: str | None = None

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lock if it is free, and record ``holder``. Return whether the lock was taken.

        On a filesystem without flock, or without room for the file, every process gets the lock.

        Raises:
            OSError: the lock file cannot be created (read-only, denied).
        """
        for _ in range(_ATTEMPTS):
            try:
                file = open_exclusive(self.path, os.O_RDWR | os.O_CREAT, self._modes)
            except FileNotFoundError:
                # The parent is <locks> or <locks>/<aa>, and the latter is created on demand.
                parent = self.path.parent
                self._modes.make_directory(parent, int(parent.name != "locks"))
                continue
            except PermissionError:
                if not os.path.lexists(self.path):
                    raise
                time.sleep(_PAUSES[0])  # another member of the group has not set its mode yet
                continue
            except os_error() as exn:
                if exn.errno in FULL:
                    break
                raise
            self._file = file
            if try_flock(file.fileno()) is False:
                self.release(keep=True)
                return False
            if os.fstat(file.fileno()).st_nlink:
                with ignoring(OSError):  # a pipe can be locked, but has no offsets
                    self.left = Holder.decode(os.pread(file.fileno(), _MAX_RECORD, 0))
                self.partial = self.left.partial if self.left else None
                self.update(replace(holder, partial=self.partial))
                return True
            self.release()  # a sweep removed the file between open and flock
        logger.info("going on without %s", self.path)
        return True

    def update(self, holder: Holder) -> None:
        """Replace the record in the lock file, if this process holds the lock."""
        file = self._file
        if file is None or file.closed:
            return
        self.partial = holder.partial
        try:
            with contextlib.suppress(PermissionError):  # another member of the group owns the file
                set_mode(file.fileno(), self._modes.file)
            os.pwrite(file.fileno(), holder.encode(), 0)
        except os_error() as exn:  # the lock works without a record
            logger.debug("%s: no record of its holder: %s", self.path, exn)

    def release(self, *, keep: bool = False) -> None:
        """Release the lock, if this process holds it.

        Also remove a key's lock file, which takes a disk block, unless ``keep`` is set because the
        record names a partial that can be resumed.
        """
        file, self._file = self._file, None
        if file is not None and not file.closed:  # a forked child has closed it: the parent's lock
            with ignoring(OSError):
                is_key_lock = is_lock_name(self.path.name) is not None
                if is_key_lock and not keep and os.fstat(file.fileno()).st_nlink:
                    self.path.unlink()
            with ignoring(OSError):  # the descriptor is closed nevertheless
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
            with ignoring(OSError):  # the directory is not empty
                directory.rmdir()


def _remove_free_lock(layout: Layout, path: Path) -> None:
    left = read_holder(path)
    # The file names the partial of a killed download. The partial may be in another tier, but no
    # partial that was not written for an hour is resumed.
    names_partial = left is not None and left.partial
    if names_partial and (is_directory(layout.partial / names_partial) or not is_idle(path)):
        return
    with ignoring(OSError), open_file(path) as file:
        # Remove the file only under its own lock, and only if no other process has removed it.
        if try_flock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
            path.unlink()
