"""Leases: locks of keys for all nodes that share a directory on a network filesystem.

A lease is a marker file in the cache (`filelock.SoftFileLease`), whose timestamp its holder keeps
updating. A node that sees no update for `LEASE_SECONDS` of its own monotonic clock may take the
lease. A holder that was stopped for longer continues when it wakes: the shard is fetched twice.
"""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from shardcache.faults import ignoring, os_error
from shardcache.layout import Layout, replace_file
from shardcache.locks.flock import Holder, read_holder

if TYPE_CHECKING:
    from filelock import SoftFileLease

logger = logging.getLogger(__name__)

#: Seconds that other nodes wait after a node died. The holder updates its marker every 30 s, and an
#: NFS client may show a file's timestamps up to 60 s late (acregmax, nfs(5)).
LEASE_SECONDS = 90.0
#: Errors that also prevent storing a shard, so they are raised. After any other error, every
#: process gets the lease.
_REFUSALS = frozenset({errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT})


class KeyLease:
    """The lease of a key, which gives one process among all nodes the right to download.

    It has the methods of `KeyLock`. A caller must use one object for all its attempts, because the
    object remembers when it last saw the marker change. After ``seconds`` without a change, the
    holder counts as dead.
    """

    def __init__(self, layout: Layout, key: str, seconds: float = LEASE_SECONDS) -> None:
        self.path = layout.lease(key)
        self.left: Holder | None = None
        self.partial: str | None = None
        self._layout = layout
        self._record = layout.holder(key)
        self._seconds = seconds
        self._lease: SoftFileLease | None = None
        self._seen: tuple[int, int] | None = None  # inode and modification time of the marker
        self._since = 0.0  # when the marker was first seen in this state, by the monotonic clock

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lease if it is free, and record ``holder``. Return whether the lease was taken.

        A dead holder's lease is freed for the next attempt. Where the marker cannot be created,
        every process gets the lease, but OSError is raised if shards cannot be stored there either
        (read-only, denied, full).
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
            self._break_expired(lease)
            return False
        except (os_error(), ValueError) as exn:  # ValueError: the lease has another duration
            if isinstance(exn, OSError) and exn.errno in _REFUSALS:
                raise
            logger.warning("%s: going on without a lease: %s", self.path, exn)
            return True
        self.left = read_holder(self._record)
        self.partial = self.left.partial if self.left else None
        self.update(replace(holder, partial=self.partial))
        return True

    def _break_expired(self, lease: SoftFileLease) -> None:
        """Remove the marker of a dead holder, so that the next attempt finds the lease free.

        filelock does this only on filesystems that can exchange two names, which NFS cannot.
        """
        with ignoring(OSError):
            status, now = self.path.stat(), time.monotonic()
            marker = (status.st_ino, status.st_mtime_ns)
            if marker != self._seen:
                self._seen, self._since = marker, now
            elif now - self._since >= self._seconds:
                lease.force_break()

    def update(self, holder: Holder) -> None:
        """Replace the record of a lease that this process holds."""
        if self._lease is not None and self._lease.is_locked:
            self.partial = holder.partial
            mode, via = self._layout.modes.file, self._layout.partial
            with ignoring(OSError):  # the lease works without a record
                replace_file(self._record, holder.encode(), mode, via=via)

    def release(self, *, keep: bool = False) -> None:
        """Release the lease, if this process holds it; ``keep`` as for `KeyLock.release`."""
        lease, self._lease = self._lease, None
        if lease is not None and lease.is_locked:
            with ignoring(OSError):  # the record is optional
                if not keep:
                    self._record.unlink()
            with ignoring(OSError):  # the lease expires
                lease.release()
