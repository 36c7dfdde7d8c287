"""Calling off what a process waits for: fetches, retries, other processes' fetches.

What begins after `Cancellation.call_off` is not affected: a cache can be used again.
Safe between threads; an interrupt handler may call off.
"""

from __future__ import annotations

from collections.abc import Callable

from shardcache.clock import Clock
from shardcache.errors import FetchCancelledError

__all__ = ["Cancellation", "Watch"]

#: Seconds until a sleeper notices.
_SLICE = 0.25


class Cancellation:
    """What the waits of one process look at."""

    def __init__(self) -> None:
        self._count = 0

    def call_off(self) -> None:
        """Let every `Watch` that was made before raise."""
        self._count += 1

    def watch(
        self, what: str, clock: Clock, called_off: Callable[[], bool] = lambda: False
    ) -> Watch:
        """For one wait that begins now.

        Args:
            what: the shard, for the error.
            clock: sleeps.
            called_off: says whether this one was, alone.
        """
        return Watch(self, self._count, what, clock, called_off)

    @property
    def count(self) -> int:
        """How often it was called off."""
        return self._count


class Watch:
    """One wait; made by `Cancellation.watch`."""

    def __init__(
        self,
        source: Cancellation,
        count: int,
        what: str,
        clock: Clock,
        called_off: Callable[[], bool],
    ) -> None:
        self._source = source
        self._called_off = called_off
        self._count = count
        self._what = what
        self._clock = clock

    def check(self) -> None:
        """Go on.

        Raises:
            FetchCancelledError: it was called off.
        """
        if self._source.count != self._count or self._called_off():
            raise FetchCancelledError(
                f"{self._what}: the fetch was called off; what was fetched is kept. Run it again.",
                url=self._what,
            )

    def sleep(self, seconds: float) -> None:
        """Sleep, unless it is called off.

        Raises:
            FetchCancelledError: it was called off.
        """
        while seconds > 0:
            self.check()
            nap = min(seconds, _SLICE)
            self._clock.sleep(nap)
            seconds -= nap
        self.check()
