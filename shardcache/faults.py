"""Which errors are faults of the disk, and how many of them pause its use.

full            the disk or its quota is full: room is made, or the shard is streamed
disk fault      the disk is broken, read-only or missing: three in a row pause its use
local error     any other error of the disk or of this process, such as too many open files
all others      errors of an origin or of shardcache
"""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable
from typing import Any, TypeGuard

from shardcache import clock
from shardcache.config import Config
from shardcache.errors import ShardCacheError
from shardcache.units import format_duration

#: Errors of a full disk or quota. They are no faults.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Errors of a disk that is broken, read-only, missing or another user's. The last three rows come
#: from network filesystems, FUSE and the block layer (blk_errors in the kernel's block/blk-core.c).
DISK_FAULTS = frozenset(
    {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.EACCES, errno.EPERM}
    | {errno.ESTALE, errno.EBADMSG, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNABORTED}
    | {errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENOLINK, errno.ETIMEDOUT, errno.EILSEQ}
    | {errno.ENODATA}
)
#: Seconds for which a failing disk is not used: long enough to remount it, but short for a job.
_PAUSE = 60.0


class _NoError(OSError):
    """Is never raised."""


def system_error() -> type[OSError]:
    """Return OSError, or a class that matches nothing if the current error has no ``errno``.

    With ``except system_error():``, an error that a signal handler raised passes: a handler of an
    alarm may raise a TimeoutError, without an ``errno``, in any call.
    """
    return OSError if getattr(sys.exc_info()[1], "errno", None) is not None else _NoError


class ignoring(contextlib.suppress):  # noqa: N801 - used like its base class
    """Ignores exceptions, but lets errors of a signal handler pass."""

    def __exit__(self, *raised: Any) -> bool:
        if raised[1] is None or (isinstance(raised[1], OSError) and raised[1].errno is None):
            return False
        return super().__exit__(*raised)


def is_local_error(exn: BaseException) -> TypeGuard[OSError]:
    """Return whether an error is an ``OSError`` of the disk or process, not one of shardcache's."""
    is_own = isinstance(exn, ShardCacheError)
    return isinstance(exn, OSError) and exn.errno is not None and not is_own


def is_disk_fault(exn: BaseException) -> TypeGuard[OSError]:
    """Return whether an error comes from a failing local disk, and not from an origin."""
    return is_local_error(exn) and exn.errno in DISK_FAULTS


def fault_kind(exn: OSError) -> str:
    """Return the name of an error, such as ``EIO``. shardcache warns once of each name."""
    return errno.errorcode.get(exn.errno or 0, type(exn).__name__)


class Breaker:
    """A circuit breaker: after ``threshold`` faults in a row, a disk is not used for a minute.

    It has no lock, because the garbage collector may close a stream, which reports a success, at
    any moment. A race counts one fault too many or too few.
    """

    def __init__(self, threshold: int = 3) -> None:
        self._threshold = threshold
        self.faults = 0  # in a row
        self.is_tripped = False  # whether there are as many faults as the threshold
        self._until = 0.0

    @property
    def left(self) -> float:
        """Seconds until the disk may be used again, or 0 if it may be used now."""
        return max(0.0, self._until - clock.monotonic())

    def failed(self, *, at_once: bool = False) -> bool:
        """Count a fault; if ``at_once``, open the breaker. Return whether the fault opened it."""
        if self.left:
            return False  # the call began before the pause, so its fault does not prolong the pause
        was_tripped = self.is_tripped
        self.faults += self._threshold if at_once else 1
        self.is_tripped = self.faults >= self._threshold
        if self.is_tripped:
            self._until = clock.monotonic() + _PAUSE
        return self.is_tripped and not was_tripped

    def succeeded(self) -> None:
        """Reset the count of faults after a success, unless it is of a call before the pause."""
        if not self.left:
            self.faults, self.is_tripped = 0, False


class PausedError(OSError):
    """The disk has failed, and is not used until a pause of a minute is over."""


class Disk:
    """Counts the faults of a disk in one process: those of ``reading`` and those of ``writing``."""

    def __init__(self, config: Config, warn: Callable[..., None]) -> None:
        self.reading = Breaker()
        self.writing = Breaker()
        self._config = config
        self._warn = warn  # `Notices.warn`

    @property
    def is_well(self) -> bool:
        """Whether the disk is read and written, and not paused after faults."""
        return not (self.reading.is_tripped or self.writing.is_tripped)

    def check(self, breaker: Breaker, *, insist: bool = False) -> None:
        """Raise PausedError while the disk is paused, unless ``insist`` or ``strict`` is set."""
        if breaker.is_tripped and breaker.left and not (insist or self._config.strict):
            raise PausedError(errno.EIO, f"the disk failed; next attempt in {breaker.left:.0f} s")

    def failed(self, breaker: Breaker, exn: OSError) -> None:
        """Count an error if it is a fault of the disk, and warn when it pauses the disk."""
        # A read-only disk stays read-only, so a single EROFS is enough.
        if is_disk_fault(exn) and breaker.failed(at_once=exn.errno == errno.EROFS):
            text = "%s: %s. It will not be %s for %s; until then, %s are streamed."
            use, shards = "read", "shards"
            if breaker is self.writing:
                use, shards = "written", "shards that are not cached"
            facts = self._config.dir, exn.strerror or exn, use, format_duration(breaker.left)
            self._warn(fault_kind(exn), text, *facts, shards)
