"""Time as the library sees it, so that tests can own it.

Durations and time-outs use ``monotonic``; ``time`` (wall clock) is for people
and for "last used" ordering only. No decision about liveness rests on either.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SystemClock", "utc"]

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
