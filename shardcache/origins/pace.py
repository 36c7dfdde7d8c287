"""Limit the rate of requests to a bucket or web server that throttles this process.

    throttled ---> half as many requests at once, after a pause that doubles each time
    served ------> twice as many per round up to half of the old number, then one more per round

This is TCP's congestion control (RFC 5681) with requests in place of segments. All shards that a
process reads from one bucket or web server share a `Pace`: one request probes an overloaded store,
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

#: Seconds of the first and the longest pause. After a store has recovered, a process loses at most
#: one longest pause.
_FIRST, _LONGEST = 0.25, 8.0
#: Longest pause in seconds that a server may request with Retry-After.
RETRY_AFTER_CAP = 60.0
#: Seconds after which a waiting request checks again whether it may be sent.
_POLL = 0.25
_ANNOUNCE_EVERY = 60.0


class Pace:
    """The requests of one process to one bucket or web server. Threads may share it.

    Args:
        server: its name in logs, such as ``s3://bucket``.
        patience: seconds to wait for a server that throttles; 0 turns the limit off.
    """

    def __init__(self, server: str, patience: float) -> None:
        self._server = server
        self._patience = patience
        self._guard = threading.Lock()
        self._busy = 0  # requests under way
        self._limit = math.inf  # requests at once
        self._goal = math.inf  # below it the limit doubles per round
        self._full = 0  # requests under way when the throttling began; then the limit ends
        self._pauses = 0  # in a row
        self._next = 0.0  # no request before this time of the monotonic clock
        self._since: float | None = None  # when the throttling began
        self._served = 0.0  # when the server last served a request, or the throttling began
        self._announced = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the server has only throttled for ``patience`` seconds."""
        return self._since is not None and clock.monotonic() - self._served >= self._patience

    @contextmanager
    def turn(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Wait for a turn and send a request within; ``sleep`` waits, and may raise to cancel."""
        while True:
            with self._guard:
                seconds = 0.0 if self._since is None else self._wait()
                if seconds <= 0:
                    self._busy += 1
                    break
            sleep(seconds)
        level, message = logging.INFO, ""
        try:
            yield
            if self._since is not None:
                with self._guard:
                    message = self._speed_up()
        except TransientError as exn:
            if exn.patient and self._patience:
                with self._guard:
                    level, message = logging.WARNING, self._slow_down(exn)
            raise
        finally:
            with self._guard:
                self._busy -= 1
            if message:
                extra = {"event": "throttled", "place": self._server}
                logger.log(level, "%s %s", self._server, message, extra=extra)

    def _wait(self) -> float:
        """Return the seconds until a request may be sent, while the server throttles."""
        if self.is_over:
            return 0.0
        if self._busy >= self._limit:
            return _POLL * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        return self._next - clock.monotonic()

    def _slow_down(self, exn: TransientError) -> str:
        """Halve the limit and set the next pause; return the text to log, or ""."""
        now = clock.monotonic()
        if self._since is None:
            self._since, self._full = now, self._busy
            self._served = now
            self._goal = self._full / 2
        if now >= self._next:  # the refusals of one round count once
            self._limit = max(1, min(self._limit, self._busy) // 2)
            pause = min(_LONGEST, _FIRST * 2**self._pauses) * random.uniform(0.5, 1.0)  # noqa: S311
            self._next = now + max(pause, min(exn.retry_after or 0.0, RETRY_AFTER_CAP))
            self._pauses += 1
        for_now = now - self._since
        if for_now and now - self._announced < _ANNOUNCE_EVERY:
            return ""
        self._announced = now
        passed = f" (for {format_duration(for_now)} by now)" if for_now >= _ANNOUNCE_EVERY else ""
        patience = format_duration(self._patience)
        return f"is not ready: {exn}; requests wait for up to {patience}{passed}"

    def _speed_up(self) -> str:
        """Raise the limit; return the text to log, or ""."""
        if self._since is None or math.isinf(self._limit):
            return ""
        self._pauses, self._served = 0, clock.monotonic()
        self._limit += 1 if self._limit < self._goal else 1 / self._limit
        if self._limit < self._full:
            return ""
        passed = clock.monotonic() - self._since
        self._since, self._limit, self._goal = None, math.inf, math.inf
        return f"answers again, after {format_duration(passed)}"
