"""One download of a key for all nodes that share a directory on a network filesystem.

A lease is a marker file in the cache (`filelock.SoftFileLease`), which its holder touches. If
another node sees no touch for `LEASE_SECONDS` of its own monotonic clock, it may take the lease. A
holder that was stopped for longer goes on when it wakes, and the shard is downloaded twice.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from typing import TYPE_CHECKING

from shardcache.layout import Layout, replace_file
from shardcache.locks.flock import Holder, read_holder

if TYPE_CHECKING:
    from filelock import SoftFileLease

logger = logging.getLogger(__name__)

#: Seconds that other nodes wait after a node died. The holder touches its marker every 30 s, and an
#: NFS client may show a file's times up to 60 s late (acregmax, nfs(5)).
LEASE_SECONDS = 90.0
#: Errors that also prevent storing a shard. With any other error, every process gets the lease.
_REFUSALS = frozenset({errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT})


class KeyLease:
    """The right of one process of all nodes to download a key; has the methods of `KeyLock`.

    A caller must use one object for all its attempts, because the object remembers when it last saw
    a touch of the holder. After ``seconds`` without one, the holder counts as dead.
    """

    def __init__(self, layout: Layout, key: str, seconds: float = LEASE_SECONDS) -> None:
        self.path = layout.lease(key)
        self.left: Holder | None = None
        self._layout = layout
        self._record = layout.holder(key)
        self._seconds = seconds
        self._lease: SoftFileLease | None = None
        self._seen: tuple[int, int] | None = None  # the holder's marker: inode and time
        self._since = 0.0  # when the marker was first seen so, of the monotonic clock

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lease if it is free or expired, and record ``holder``; return whether it worked.

        On a filesystem that cannot make the marker, every process gets the lease. Raises OSError if
        shards cannot be stored there either (read-only, denied, full).
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
        except (OSError, ValueError) as exn:  # ValueError: another version of filelock has it
            if isinstance(exn, OSError) and exn.errno in _REFUSALS:
                raise
            logger.warning("%s: going on without a lease: %s", self.path, exn)
            return True
        self.left = read_holder(self._record)
        self.update(holder)
        return True

    def _break_expired(self, lease: SoftFileLease) -> None:
        """Remove the marker of a dead holder, so that the next attempt finds the lease free.

        filelock does this only where two names can be exchanged, which NFS refuses.
        """
        with contextlib.suppress(OSError):
            status, now = self.path.stat(), time.monotonic()
            marker = (status.st_ino, status.st_mtime_ns)
            if marker != self._seen:
                self._seen, self._since = marker, now
            elif now - self._since >= self._seconds:
                lease.force_break()

    def update(self, holder: Holder) -> None:
        """Replace the record of a lease that this process holds."""
        if self._lease is not None and self._lease.is_locked:
            mode, via = self._layout.modes.file, self._layout.partial
            with contextlib.suppress(OSError):  # it is for people
                replace_file(self._record, holder.encode(), mode, via=via)

    def release(self) -> None:
        """Release the lease, if this process holds it."""
        lease, self._lease = self._lease, None
        if lease is not None and lease.is_locked:
            for remove in (self._record.unlink, lease.release):
                with contextlib.suppress(OSError):  # the record is for people, the lease expires
                    remove()
