"""How fast one bucket or web server may be asked, after it told this process to slow down.

    throttled ---> half as many requests at once, after a pause that doubles each time
    answered ----> twice as many per round up to half of what there was, then one more per round

This is TCP's congestion control (RFC 5681) with requests in place of segments. All shards of a
process that come from one place share a `Pace`, so one request probes a store that is overloaded,
and the others wait for it.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardcache import clock
from shardcache.origins.base import TransientError
from shardcache.units import format_duration

logger = logging.getLogger(__name__)

#: Seconds of the first pause and of the longest. A process loses one longest pause at most after
#: the store has recovered.
_FIRST, _LONGEST = 0.25, 8.0
#: A server may ask for a longer pause; requests wait no longer than this for it.
RETRY_AFTER_CAP = 60.0
#: Seconds between two looks of a request that waits for its turn.
_LOOK = 0.25
_ANNOUNCE_EVERY = 60.0


class Pace:
    """The requests of one process to one place; safe between threads.

    Args:
        place: the place as logs name it, such as ``s3://bucket``.
        patience: seconds to wait for a place that throttles; then its errors are final. With 0,
            nothing slows down.
    """

    def __init__(self, place: str, patience: float) -> None:
        self._place = place
        self._patience = patience
        self._guard = threading.Lock()
        self._busy = 0  # requests under way
        self._limit = math.inf  # requests at once
        self._goal = math.inf  # below it the limit doubles per round
        self._full = 0  # requests under way when the throttling began; no more are needed
        self._pauses = 0  # in a row
        self._next = 0.0  # of the monotonic clock: no request before
        self._since: float | None = None  # when the throttling began
        self._answered = 0.0  # when the place last answered, or the throttling began
        self._announced = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the place has throttled, and answered nothing, for the time of the patience."""
        return self._since is not None and clock.monotonic() - self._answered >= self._patience

    @contextmanager
    def turn(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Send a request within, when it is its turn; ``sleep`` waits, and may raise to cancel."""
        while (seconds := self._begin()) > 0:
            sleep(seconds)
        throttled, is_answered = None, False
        try:
            yield
            is_answered = True
        except TransientError as exn:
            throttled = exn if exn.patient and self._patience else None
            raise
        finally:
            self._end(throttled, is_answered)

    def _begin(self) -> float:
        """Begin a request, or return for how many seconds it has to wait."""
        with self._guard:
            if not self.is_over:
                if self._busy >= self._limit:
                    return _LOOK * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
                if (wait := self._next - clock.monotonic()) > 0:
                    return wait
            self._busy += 1
            return 0.0

    def _end(self, throttled: TransientError | None, is_answered: bool) -> None:
        said = ""
        with self._guard:
            self._busy -= 1
            if throttled is not None:
                said = self._slow_down(throttled)
            elif is_answered:
                said = self._speed_up()
        if said:
            level = logging.INFO if throttled is None else logging.WARNING
            say = {"event": "throttled", "place": self._place}
            logger.log(level, "%s %s", self._place, said, extra=say)

    def _slow_down(self, exn: TransientError) -> str:
        """Take back what the place cannot bear; returns what to log."""
        now = clock.monotonic()
        if self._since is None:
            self._since, self._full = now, self._busy + 1
            self._answered = now
            self._goal = self._full / 2
        if now >= self._next:  # one answer counts; those sent with it say the same
            self._limit = max(1, min(self._limit, self._busy + 1) // 2)
            pause = min(_LONGEST, _FIRST * 2**self._pauses) * random.uniform(0.5, 1.0)  # noqa: S311
            self._next = now + max(pause, min(exn.retry_after or 0.0, RETRY_AFTER_CAP))
            self._pauses += 1
        for_now = now - self._since
        if for_now and now - self._announced < _ANNOUNCE_EVERY:
            return ""
        self._announced = now
        wait = f"requests wait for up to {format_duration(self._patience)}"
        passed = f" (for {format_duration(for_now)} by now)" if for_now >= _ANNOUNCE_EVERY else ""
        return f"is not ready: {exn}; {wait}{passed}"

    def _speed_up(self) -> str:
        if self._since is None or math.isinf(self._limit):
            return ""
        self._pauses, self._answered = 0, clock.monotonic()
        self._limit += 1 if self._limit < self._goal else 1 / self._limit
        if self._limit < self._full:
            return ""
        passed = clock.monotonic() - self._since
        self._since, self._limit, self._goal = None, math.inf, math.inf
        return f"answers again, after {format_duration(passed)}"
