"""One fetch of a key for all nodes that share a directory on a network filesystem.

A lease is a marker file beside the entries, by `filelock.SoftFileLease`, which its holder
touches every few seconds and which another node may take when it has not seen that for
`LEASE_SECONDS` of its own monotonic clock. A lease does not exclude: a holder that was
stopped and wakes goes on. That is all a fetch needs, for locks only save bandwidth.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from typing import TYPE_CHECKING

from shardcache.layout import Layout, replace_file
from shardcache.locks.flock import Holder

if TYPE_CHECKING:
    from filelock import LeaseCompromise, SoftFileLease

logger = logging.getLogger(__name__)

#: After the death of a node the others wait so long. NFS clients may show a file's
#: times up to 60 s late (acregmax, nfs(5)): below that a live holder would look dead.
LEASE_SECONDS = 90.0


class KeyLease:
    """The right to fetch one key, among all nodes; has the methods of `KeyLock`.

    One object must be used for all attempts of a caller: it remembers since when it
    has not seen the holder's touch. Not for several threads.

    Args:
        layout: the namespace.
        key: of the shard.
        seconds: how long a lease is believed without a touch.
    """

    def __init__(self, layout: Layout, key: str, seconds: float = LEASE_SECONDS) -> None:
        self.path = layout.lease(key)
        self._record = layout.holder(key)
        self._seconds = seconds
        self._modes = layout.modes
        self._via = layout.partial
        self._lease: SoftFileLease | None = None
        self._held = False

    def try_acquire(self, holder: Holder) -> bool:
        """Take the lease if it is free or expired, and say who we are.

        A filesystem that cannot do what a lease needs grants it to everybody.

        Raises:
            OSError: the directory cannot be made (read-only, full, denied).
        """
        from filelock import Timeout

        lease = self._lease = self._lease or self._make()
        try:
            self._modes.make_directory(self.path.parent, levels=1)
            lease.acquire(blocking=False)
        except Timeout:
            return False
        except OSError as exn:
            if exn.errno in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT):
                raise
            logger.warning("%s: going on without a lease: %s", self.path, exn)
            return True
        except ValueError as exn:  # another version of the library with another duration
            logger.warning("%s: going on without a lease: %s", self.path, exn)
            return True
        self._held = True
        self.update(holder)
        return True

    def _make(self) -> SoftFileLease:
        from filelock import SoftFileLease

        return SoftFileLease(
            self.path,
            lease_duration=self._seconds,
            on_compromise=_report,
            thread_local=False,
            mode=self._modes.file,
        )

    def update(self, holder: Holder) -> None:
        """Replace the record of a lease that is held."""
        if not self._held:
            return
        try:
            replace_file(self._record, holder.encode(), self._modes.file, via=self._via)
        except OSError as exn:  # it is meant for people
            logger.debug("%s: cannot say who fetches: %s", self._record, exn)

    def release(self) -> None:
        """Let the next one go on; harmless when the lease is not held, and twice."""
        lease = self._lease
        if lease is None or not self._held:
            self._lease = None
            return
        with contextlib.suppress(OSError):  # it is meant for people
            self._record.unlink()
        try:
            lease.release()
        except OSError as exn:  # expires by itself
            logger.info("%s: the lease could not be given back: %s", self.path, exn)
        self._held = False
        self._lease = None


def _report(compromise: LeaseCompromise) -> None:
    # The fetch goes on: what it publishes is the same version, whoever else fetches it.
    logger.info("%s: the lease was lost (%s)", compromise.lock_file, compromise.reason)
