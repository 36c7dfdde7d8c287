"""The connections of one process: how many there are, and which shard uses them.

A fetch runs in its caller's thread, which holds one connection for as long as it fetches. What a
shard has beyond its first part is offered to helper threads, which exist only while there are
parts to fetch and connections to spare. Callers come before helpers: a shard that nobody fetches
yet gets its first bytes before another one gets its last.

How many connections there are is decided by how long the origin takes to answer. S3 gives one
connection some 50 to 100 MB/s, whatever the link can take, and answers after some 30 ms; a server
in the same room gives a few connections all there is (figures: docs/design.md, "Connections").
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardcache import threads
from shardcache.errors import ConfigError
from shardcache.units import format_rate, parse_bytes

__all__ = ["LEAST", "Connections", "Throttle", "Work", "parse_rate"]

#: Bytes of one request. 32 connections brought 1,488 MB/s in parts of 8 MiB over an S3-like link,
#: 1,647 in parts of 16 MiB, 1,633 in parts of 64 MiB.
PART = 16 << 20
#: Connections to an origin that answers within `_NEAR` seconds. 32 instead of 8 cost a tenth of
#: the speed with TLS, and bring nothing.
_FEW = 8
_NEAR = 0.005


class Work:
    """What helpers can do for one shard; guarded by the lock of `Connections`.

    ``fetch`` fetches one part, and does not raise. ``parts`` are those that nobody fetches yet.
    """

    def __init__(self, connections: Connections, fetch: Callable[[range], None]) -> None:
        self.fetch = fetch
        self.parts: deque[range] = deque()
        self.helpers = 0
        self.ended = threading.Condition(connections.lock)
        self._connections = connections

    def take(self) -> range | None:
        """The next part, for the caller's own thread; None if there is none."""
        with self._connections.lock:
            return self.parts.popleft() if self.parts else None

    def end(self, seconds: float | None = None) -> None:
        """Let nobody begin another part, and wait for the helpers, so long at most."""
        with self._connections.lock:
            self.parts.clear()
            self.ended.wait_for(lambda: self.helpers == 0, seconds)


class Connections:
    """See the module; never more than ``most``, with ``part`` bytes per request (`PART`)."""

    def __init__(self, most: int, part: int | None = None) -> None:
        self.lock = threading.Lock()
        self.part = part or PART
        self._most = most
        self._answer: float | None = None  # seconds, the fastest so far
        self._busy = 0
        self._waiting = 0
        self._work: deque[Work] = deque()
        self._free = threading.Condition(self.lock)

    @property
    def limit(self) -> int:
        """How many connections there are."""
        near = self._answer is None or self._answer <= _NEAR
        return min(self._most, _FEW) if near else self._most

    @property
    def known(self) -> bool:
        """Whether an origin has answered, so that `limit` stays what it is."""
        return self._answer is not None

    def answered(self, seconds: float) -> None:
        """Note how many seconds the first byte of an answer took; 0 where nobody knows."""
        if self._answer is None or seconds < self._answer:
            self._answer = seconds
            self._hand_out()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a connection; waits for one."""
        with self.lock:
            self._waiting += 1
            try:
                self._free.wait_for(lambda: self._busy < self.limit)
                self._busy += 1
            finally:
                self._waiting -= 1
        try:
            self._hand_out()
            yield
        finally:
            with self.lock:
                self._busy -= 1
            self._hand_out()

    def offer(self, work: Work) -> None:
        """Let helpers fetch parts of a shard."""
        with self.lock:
            self._work.append(work)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give a free connection to a caller that waits, else to a helper."""
        with self.lock:
            if self._busy >= self.limit:
                return
            if self._waiting:
                self._free.notify()
                return
            if self._next() is None:
                return
            self._busy += 1
        try:
            # Without the lock: it waits for the new thread, and all the others would wait, too.
            threads.start(self._help, "shardcache-part")
        except RuntimeError:  # a limit of processes: callers fetch alone
            with self.lock:
                self._busy -= 1
                self._work.clear()

    def _next(self) -> Work | None:
        """The first shard that has parts left."""
        while self._work and not self._work[0].parts:
            self._work.popleft()
        return self._work[0] if self._work else None

    def _help(self) -> None:
        """Fetch parts until there are no more, or a caller waits for the connection."""
        while True:
            with self.lock:
                work = None if self._waiting else self._next()
                if work is None:
                    self._busy -= 1
                    break
                part = work.parts.popleft()
                work.helpers += 1
            self._hand_out()
            try:
                work.fetch(part)
            finally:
                with self.lock:
                    work.helpers -= 1
                    work.ended.notify_all()
            del work
        self._hand_out()


#: Bytes per second. With less, a fetch would look as if it were stuck.
LEAST = 64_000
#: Seconds' worth that may come at once after a while of less.
_BURST = 0.1


def parse_rate(value: str | int | float) -> int:
    """Bytes per second from a number or from text such as ``50MB`` or ``50MB/s``.

    Raises:
        ConfigError: not a rate, or less than `LEAST`.
    """
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    rate = parse_bytes(text)
    if rate < LEAST:
        raise ConfigError(f"{value!r} is too slow: the least rate is {format_rate(LEAST)}")
    return rate


class Throttle:
    """A token bucket that several fetches share: ``rate`` bytes per second."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        #: Bytes to receive at once, so that the rate looks even.
        self.most = max(4096, int(rate * _BURST))
        self._paid = 0.0
        self._guard = threading.Lock()

    def take(self, count: int) -> float:
        """Note bytes that were received; for how many seconds no more should be."""
        with self._guard:
            now = time.monotonic()
            self._paid = max(self._paid, now - _BURST) + count / self.rate
            return max(0.0, self._paid - now)
