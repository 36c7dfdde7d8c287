"""Limit the rate of requests to a bucket or web server that throttles this process.

    throttled ---> half as many requests at once, after a pause that doubles each time
    served ------> twice as many per round up to half of the old number, then one more per round

This is TCP's congestion control (RFC 5681) with requests in place of segments. All shards that a
process reads from one bucket or web server share a `Pace`, so a single request probes an overloaded
store while the others wait.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardcache import clock
from shardcache.origins.base import TransientError
from shardcache.units import format_duration

logger = logging.getLogger(__name__)

#: Length of the first and of the longest pause, in seconds. A process notices at most one longest
#: pause late that a store has recovered.
_FIRST, _LONGEST = 0.25, 8.0
#: Longest pause, in seconds, that a server can request with a Retry-After header.
RETRY_AFTER_CAP = 60.0
#: Seconds after which a waiting request checks again whether it may be sent.
_POLL = 0.25
_ANNOUNCE_EVERY = 60.0


class _Turn:
    """A request in flight."""


class Pace:
    """Limits the requests of one process to one bucket or web server. Threads may share it.

    Args:
        server: the name of the bucket or server in logs, such as ``s3://bucket``.
        patience: seconds to wait for a server that throttles; 0 never limits the requests.
    """

    def __init__(self, server: str, patience: float) -> None:
        self._server = server
        self._patience = patience
        self._guard = threading.Lock()
        # Requests in flight. They leave the set even if a signal handler raises around `turn`.
        self._turns: weakref.WeakSet[_Turn] = weakref.WeakSet()
        self._limit = math.inf  # most requests in flight at once
        self._goal = math.inf  # the limit doubles per round until it reaches this number
        self._full = 0  # requests in flight when throttling began; a limit this high is lifted
        self._pauses = 0  # pauses in a row, without a served request in between
        self._next = 0.0  # no request is sent before this time (monotonic clock)
        self._since: float | None = None  # when the throttling began; None if not throttled
        self._refused_since: float | None = None  # first refusal since the last served request
        self._announced = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the server has refused all requests for ``patience`` seconds."""
        since = self._refused_since
        return since is not None and clock.monotonic() - since >= self._patience

    @contextmanager
    def turn(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Wait until the caller may send a request; ``sleep`` waits, and may raise to cancel."""
        turn = _Turn()
        while True:
            with self._guard:
                seconds = 0.0 if self._since is None else self._wait()
                if seconds <= 0:
                    self._turns.add(turn)
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
                self._turns.discard(turn)
            if message:
                extra = {"event": "throttled", "server": self._server}
                logger.log(level, "%s %s", self._server, message, extra=extra)

    def _wait(self) -> float:
        """Return the seconds until a throttling server may get a request; 0 or less means now."""
        if self.is_over:
            return 0.0
        if len(self._turns) >= self._limit:
            return _POLL * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        return self._next - clock.monotonic()

    def _slow_down(self, exn: TransientError) -> str:
        """Halve the limit and set the next pause. Return the text to log, or "" if none is due."""
        now = clock.monotonic()
        if self._since is None:
            self._since, self._full = now, len(self._turns)
            self._goal = self._full / 2
        if self._refused_since is None:
            self._refused_since = now
        if now >= self._next:  # the refusals of one round count once
            self._limit = max(1, min(self._limit, len(self._turns)) // 2)
            pause = min(_LONGEST, _FIRST * 2**self._pauses) * random.uniform(0.5, 1.0)  # noqa: S311
            self._next = now + max(pause, min(exn.retry_after or 0.0, RETRY_AFTER_CAP))
            self._pauses += 1
        for_now = now - self._since
        if for_now and now - self._announced < _ANNOUNCE_EVERY:
            return ""
        self._announced = now
        passed = f" ({format_duration(for_now)} so far)" if for_now >= _ANNOUNCE_EVERY else ""
        patience = format_duration(self._patience)
        return f"is not ready: {exn}; requests wait for up to {patience}{passed}"

    def _speed_up(self) -> str:
        """Raise or lift the limit. Return the text to log if it was lifted, or ""."""
        self._pauses, self._refused_since = 0, None
        if self._since is None or math.isinf(self._limit):
            return ""
        self._limit += 1 if self._limit < self._goal else 1 / self._limit
        if self._limit < self._full:
            return ""
        passed = clock.monotonic() - self._since
        # A pause that is left would keep the next refusal from setting a limit.
        self._since, self._next, self._limit, self._goal = None, 0.0, math.inf, math.inf
        return f"responds again after {format_duration(passed)}"
