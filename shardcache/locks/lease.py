"""One fetch of a key for all nodes that share a directory on a network filesystem.

A lease is a marker file beside the entries, by `filelock.SoftFileLease`, which its holder touches
and which another node may take when it has not seen that for `LEASE_SECONDS` of its own monotonic
clock. A lease does not exclude: a holder that was stopped and wakes goes on. That is all a fetch
needs, for locks only save bandwidth.
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

#: After the death of a node the others wait so long. NFS clients may show a file's
#: times up to 60 s late (acregmax, nfs(5)): below that a live holder would look dead.
LEASE_SECONDS = 90.0
#: What a fetch could not be stored with either. All else grants the lease.
_REFUSALS = frozenset({errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT})


class KeyLease:
    """The right to fetch one key, among all nodes; has the methods of `KeyLock`.

    One object must be used for all attempts of a caller: it remembers since when it has not seen
    the holder's touch. After so many ``seconds`` without one the holder counts as dead.
    """

    def __init__(self, layout: Layout, key: str, seconds: float = LEASE_SECONDS) -> None:
        self.path = layout.lease(key)
        self.left: Holder | None = None
        self._layout = layout
        self._record = layout.holder(key)
        self._seconds = seconds
        self._lease: SoftFileLease | None = None
        self._seen: tuple[int, int] | None = None  # the holder's marker, since `_since`
        self._since = 0.0

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lease if it is free or expired, and say who we are; raises as `KeyLock`.

        A filesystem that cannot do what a lease needs grants it to everybody.
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
        except (OSError, ValueError) as exn:  # or another version of the library holds it
            if isinstance(exn, OSError) and exn.errno in _REFUSALS:
                raise
            logger.warning("%s: going on without a lease: %s", self.path, exn)
            return True
        self.left = read_holder(self._record)
        self.update(holder)
        return True

    def _break_expired(self, lease: SoftFileLease) -> None:
        """Remove a marker that nobody touches any more; the next attempt finds the lease free.

        filelock itself takes over where two names can be exchanged, which NFS refuses.
        """
        with contextlib.suppress(OSError):
            found, now = self.path.stat(), time.monotonic()
            marker = (found.st_ino, found.st_mtime_ns)
            if marker != self._seen:
                self._seen, self._since = marker, now
            elif now - self._since >= self._seconds:
                lease.force_break()

    def update(self, holder: Holder) -> None:
        """Replace the record of a lease that is held."""
        if self._lease is not None and self._lease.is_locked:
            mode, via = self._layout.modes.file, self._layout.partial
            with contextlib.suppress(OSError):  # it is meant for people
                replace_file(self._record, holder.encode(), mode, via=via)

    def release(self) -> None:
        """Let the next one go on; harmless when the lease is not held, and twice."""
        lease, self._lease = self._lease, None
        if lease is not None and lease.is_locked:
            for give_back in (self._record.unlink, lease.release):
                with contextlib.suppress(OSError):  # the record is for people, the lease expires
                    give_back()
