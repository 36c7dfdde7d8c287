"""When to leave a failing disk alone.

A disk that answers with errors makes every call that touches it slow and every log
long. After a few faults in a row it is not asked for a while; then one caller tries,
and either all go on or the pause is doubled.

`Breaker` is pure: time comes from a clock, and what it decides is returned, not done.
It may be shared by threads; a process makes its own.
"""

from __future__ import annotations

import errno
import threading

from shardcache.clock import Clock
from shardcache.errors import ShardCacheError

__all__ = ["DISK_FAULTS", "FULL", "OWN_LIMITS", "Breaker", "fault_kind", "is_disk_fault"]

#: The disk is full, for all or for this user: no fault, but its normal state in time.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: This process or this machine has run out of something else.
OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: What a disk says that is broken, read-only, gone, or no longer ours. The second row is
#: errno(3) as network filesystems, FUSE and the block layer use it (blk_errors in the
#: kernel's block/blk-core.c).
DISK_FAULTS = frozenset(
    {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.EACCES, errno.EPERM}
    | {errno.ESTALE, errno.EBADMSG, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNABORTED}
    | {errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENOLINK, errno.ETIMEDOUT, errno.EILSEQ}
    | {errno.ENODATA}
)
#: Faults in a row that are no accident of one file.
_THRESHOLD = 3
#: Seconds without asking, the first time and at most. A minute is nothing for a training
#: run and enough for a remount; ten minutes keep a dead disk to a line per ten minutes.
_FIRST_PAUSE = 60.0
_LONGEST_PAUSE = 600.0


def is_disk_fault(exn: BaseException) -> bool:
    """Whether an error comes from a failing local disk (errors of ours, of the origin, do not)."""
    return (
        isinstance(exn, OSError)
        and not isinstance(exn, ShardCacheError)
        and exn.errno in DISK_FAULTS
    )


def fault_kind(exn: OSError) -> str:
    """What one warning is enough for: ``EIO``, ``ENOSPC``, ..."""
    return errno.errorcode.get(exn.errno or 0, type(exn).__name__)


class Breaker:
    """Counts faults in a row; closed while all is well, open during a pause.

    Attributes:
        faults: in a row, up to now. While there are none, a success is no news.

    Args:
        clock: time.
        threshold: faults in a row that open it.
        first: seconds of the first pause; each further one is twice as long.
        longest: seconds of the longest pause.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        threshold: int = _THRESHOLD,
        first: float = _FIRST_PAUSE,
        longest: float = _LONGEST_PAUSE,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first = first
        self._longest = longest
        # Reentrant: a stream that the garbage collector closes says that the disk works, at any
        # moment, so also while its thread is in here.
        self._guard = threading.RLock()
        self.faults = 0
        self._pause = 0.0  # 0 is closed
        self._until = 0.0
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether everybody may go on."""
        return self._pause == 0.0

    @property
    def left(self) -> float:
        """Seconds until somebody may try again."""
        return 0.0 if self.closed else max(0.0, self._until - self._clock.monotonic())

    def allows(self) -> bool:
        """Whether the caller may ask the disk.

        When a pause is over, one caller may. Until it tells how that went nobody else may,
        for as long as the pause was: it might never tell.
        """
        if self.closed:
            return True
        with self._guard:
            now = self._clock.monotonic()
            if not self.closed:
                if now < self._until:
                    return False
                self._trying = True
                self._until = now + self._pause
            return True

    def failed(self, *, at_once: bool = False) -> bool:
        """Note a fault; with ``at_once`` it alone is enough.

        Returns:
            Whether this began a row of pauses.
        """
        with self._guard:
            self.faults += 1
            begins = self.closed and (at_once or self.faults >= self._threshold)
            # Calls that began before a pause fail in it; that makes it no longer.
            if begins or self._trying:
                self._pause = self._first if begins else min(2 * self._pause, self._longest)
                self._until = self._clock.monotonic() + self._pause
                self._trying = False
            return begins

    def succeeded(self) -> bool:
        """Note that the disk did as it should.

        Returns:
            Whether this ended a row of pauses.
        """
        if not self.faults:
            return False
        with self._guard:
            ends = self._trying
            if self.closed or ends:  # in a pause it is the echo of an earlier call
                self.faults = 0
                self._pause = 0.0
                self._trying = False
            return ends

    def undecided(self) -> None:
        """The try ended without an answer of the disk: the next caller may."""
        if not self.closed:
            with self._guard:
                if self._trying:
                    self._trying = False
                    self._until = self._clock.monotonic()
