"""Time as the library sees it, so that tests can own it; and which boot of the machine this is.

Durations and time-outs use ``monotonic``; ``time`` (wall clock) is for people
and for "last used" ordering only. No decision about liveness rests on either.
"""

from __future__ import annotations

import functools
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LAST_SECOND = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


class Clock(Protocol):
    """The three calls the library makes about time; seconds throughout."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def time(self) -> float:
        """Seconds since the epoch, for records and last-use ordering."""
        ...

    def sleep(self, seconds: float) -> None:
        """Give up the processor for about ``seconds``."""
        ...


class SystemClock:
    """The machine's own clocks."""

    # The function itself: a hit asks for the time, and is counted in microseconds.
    monotonic = staticmethod(time.monotonic)

    def time(self) -> float:
        """See `Clock.time`."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()


def utc(seconds: float) -> datetime:
    """Seconds since the epoch as a time; those that have no date get the nearest one."""
    # A damaged filesystem may state any time; datetime ends with the year 9999.
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECOND), UTC)


def rfc3339(seconds: float) -> str:
    """Seconds since the epoch as RFC 3339 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@functools.cache
def boot_id() -> str:
    """The kernel's id of this boot; empty where there is none (then boots are not told apart).

    No process outlives a boot.
    """
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
