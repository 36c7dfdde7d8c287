"""Locks that give one process the right to download a shard, and records of their holders.

Locks are taken in a fixed order: the key, the budget, then single entries without waiting.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardcache import clock, files
from shardcache.faults import FULL, ignoring, system_error
from shardcache.layout import Layout, is_key, is_lease_name, is_lock_name

if TYPE_CHECKING:
    from filelock import SoftFileLease

logger = logging.getLogger(__name__)

#: Seconds between two attempts while another member of the group is setting a file's mode.
_MODE_PAUSE = 0.001
#: Attempts to open and lock a file, because a sweep may remove the file or its directory.
_OPEN_ATTEMPTS = 100
#: Length in bytes to which a record is padded, so that one write replaces the previous record.
_RECORD_BYTES = 2048
#: Seconds that other nodes wait after a node died. The holder updates its marker every 30 s, and an
#: NFS client may show a file's timestamps up to 60 s late (acregmax, nfs(5)).
LEASE_SECONDS = 90.0
#: Errors that also prevent storing a shard. After other errors, every process gets the lease.
_REFUSALS = FULL | {errno.EROFS, errno.EACCES}


class Holder(NamedTuple):
    """The record of a process that downloads a key; no decision depends on it."""

    pid: int  #: process id in the pid namespace of the process
    host: str
    rank: int | None  #: rank in the job, if the process has one
    job: str | None
    started: float  #: seconds since the epoch
    partial: str | None = None  #: directory name of the partial, once there is one

    @classmethod
    def this_process(cls, rank: int | None = None, job: str | None = None) -> Holder:
        """Return a record of the calling process that begins now."""
        return cls(os.getpid(), socket.gethostname(), rank, job, clock.time())

    def encode(self) -> bytes:
        """Return the record as JSON, padded with spaces."""
        return json.dumps(self._asdict()).encode().ljust(_RECORD_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> Holder | None:
        """Return the `Holder` that `encode` has encoded, or None for any other data."""
        try:
            holder = cls(**json.loads(data))
            # Check the record: commands print it, and other members of the group can write it.
            is_valid = isinstance(holder.pid, int) and isinstance(holder.rank, int | None)
            is_valid = is_valid and holder.host.isprintable() and 0 <= holder.started < 1e11
            texts = holder.job, holder.partial
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return holder if is_valid and all(isinstance(text, str | None) for text in texts) else None

    def __str__(self) -> str:
        text = f"process {self.pid} on {self.host}"
        return text if self.rank is None else f"{text} (rank {self.rank})"


def read_holder(path: Path) -> Holder | None:
    """Return the record in a file, or None if the file or the record is missing or damaged."""
    try:
        return Holder.decode(files.read_file(path))
    except system_error():
        return None


@dataclass(eq=False)
class Flock:
    """A lock file of a key, a node or a session. One process of the node can hold it."""

    path: Path
    _modes: files.Modes = files.PRIVATE
    #: Name of the partial of this holder; until it has its own, that of the previous holder, which
    #: a second kill must not lose.
    partial_name: str | None = None
    _file: io.FileIO | None = None

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lock if it is free, and record ``holder``. Return whether the lock was taken.

        Without flock, or without room for the file, every process gets the lock. Raises OSError if
        the lock file cannot be created (read-only, denied).
        """
        for _ in range(_OPEN_ATTEMPTS):
            try:
                file = files.open_exclusive(self.path, os.O_RDWR | os.O_CREAT, self._modes)
            except FileNotFoundError:
                # The parent is <locks> or <locks>/<aa>, and the latter is created on demand.
                parent = self.path.parent
                self._modes.make_directory(parent, int(parent.name != "locks"))
                continue
            except PermissionError:
                if not os.path.lexists(self.path):
                    raise
                time.sleep(_MODE_PAUSE)
                continue
            except system_error() as exn:
                if exn.errno in FULL:
                    break
                raise
            self._file = file
            if files.try_flock(file.fileno()) is False:
                self.release(keep=True)
                return False
            if os.fstat(file.fileno()).st_nlink:
                with ignoring(OSError):  # a pipe can be locked, but has no offsets
                    left = os.pread(file.fileno(), files.MAX_RECORD, 0)  # empty if it is new
                    if left and (previous := Holder.decode(left)):
                        holder = holder._replace(partial=previous.partial)
                self.update(holder)
                return True
            self.release()  # a sweep removed the file between open and flock
        logger.info("going on without %s", self.path)
        return True

    def update(self, holder: Holder) -> None:
        if self._file is not None and not self._file.closed:
            self.partial_name = holder.partial
            with ignoring(OSError):  # the lock works without a record
                os.pwrite(self._file.fileno(), holder.encode(), 0)

    def release(self, *, keep: bool = False) -> None:
        """Release the lock. With ``keep``, a key's file stays and its partial can be resumed."""
        file, self._file = self._file, None
        if file is not None and not file.closed:  # a forked child has closed it: the parent's lock
            with ignoring(OSError):
                is_named = self.path.parent.name == "locks"  # `Layout.named_lock`
                if not (keep or is_named) and os.fstat(file.fileno()).st_nlink:
                    self.path.unlink()
            with ignoring(OSError):  # the descriptor is closed nevertheless
                files.unlock(file.fileno())
                file.close()


class KeyLease:
    """The lease of a key, with the methods of `Flock`. One process of all nodes can hold it.

    The holder keeps updating the timestamp of its marker (`filelock.SoftFileLease`). A node that
    sees no update for `LEASE_SECONDS` of its own monotonic clock may take the lease. An object
    remembers when it last saw the marker change, so one object makes all attempts of a caller.
    """

    def __init__(self, layout: Layout, key: str, seconds: float = LEASE_SECONDS) -> None:
        self.path = layout.lease(key)
        self.partial_name: str | None = None
        self._layout = layout
        self._record = layout.holder(key)
        self._seconds = seconds
        self._lease: SoftFileLease | None = None
        self._seen: tuple[int, int] | None = None  # inode and modification time of the marker
        self._since = 0.0  # when the marker was first seen in this state, by the monotonic clock

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lease if it is free, and record ``holder``. Return whether the lease was taken.

        If the marker cannot be created, every process gets the lease, but OSError is raised if
        shards cannot be stored either (read-only, denied, full).
        """
        from filelock import SoftFileLease, Timeout

        modes = self._layout.modes
        try:
            modes.make_directory(self.path.parent, levels=1)
            lease = self._lease = self._lease or SoftFileLease(
                self.path, lease_duration=self._seconds, thread_local=False, mode=modes.file
            )
            lease.acquire(blocking=False)
        except Timeout:
            # Remove the marker of a dead holder, so that the next attempt finds the lease free.
            # filelock does so only on filesystems that can exchange two names, unlike NFS.
            with ignoring(OSError):
                status, now = self.path.stat(), time.monotonic()
                marker = (status.st_ino, status.st_mtime_ns)
                if marker != self._seen:
                    self._seen, self._since = marker, now
                elif now - self._since >= self._seconds:
                    lease.force_break()
            return False
        # ValueError: the lease has another duration. RuntimeError: no thread for the heartbeat.
        except (system_error(), ValueError, RuntimeError) as exn:
            is_other = isinstance(exn, RuntimeError) and "new thread" not in str(exn)
            if is_other or (isinstance(exn, OSError) and exn.errno in _REFUSALS):
                raise
            logger.warning("%s: going on without a lease: %s", self.path, exn)
            return True
        previous = read_holder(self._record)
        self.update(holder._replace(partial=previous.partial if previous else None))
        return True

    def update(self, holder: Holder) -> None:
        if self._lease is not None and self._lease.is_locked:
            self.partial_name = holder.partial
            with ignoring(OSError):  # the lease works without a record
                self._layout.write(self._record, holder.encode())

    def release(self, *, keep: bool = False) -> None:
        """Release the lease, if this process holds it; ``keep`` as for `Flock.release`."""
        lease, self._lease = self._lease, None
        if lease is not None and lease.is_locked:
            if not keep:
                with ignoring(OSError):  # the record is optional
                    self._record.unlink()
            with ignoring(OSError):  # the lease expires
                lease.release()


def remove_locks(layout: Layout) -> None:
    """Remove the lock files and leases of keys that no process downloads."""
    for locks in {layout.locks, layout.base / "locks"}:
        for prefix in filter(lambda name: is_key(name * 16), files.list_names(locks)):
            directory = locks / prefix
            for name in files.list_names(directory):
                if name.startswith(prefix) and is_lock_name(name):
                    _remove_free_lock(layout, directory / name)
                elif name.startswith(prefix) and is_lease_name(name):
                    files.remove_old(directory / name, layout.grace or files.IDLE_GRACE)
            if layout.grace is None:  # `KeyLease` would not make it again
                with ignoring(OSError):  # the directory is not empty
                    directory.rmdir()


def _remove_free_lock(layout: Layout, path: Path) -> None:
    previous = read_holder(path)
    # The file names the partial of a killed download. The partial may be in another tier, but no
    # partial that was not written for an hour is resumed.
    partial = previous is not None and previous.partial
    if partial and (files.is_directory(layout.partials / partial) or not files.is_idle(path)):
        return
    with ignoring(OSError), files.locked_if_free(path) as free:
        if free:
            path.unlink()
