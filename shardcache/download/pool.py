"""The connections of one process: how many it may use, and for which shards.

The thread that fetches a shard holds one connection until the shard is complete. Helper threads
fetch other parts; they exist only while there are parts to fetch and connections to spare. A
thread that waits for its first connection goes before helpers, so each shard gets its first bytes
before another one gets its last.

The time that the origin takes to answer decides how many connections a process uses. S3 gives one
connection 50 to 100 MB/s, whatever the link can take, and answers after 30 ms. A server in the same
room fills the link over a few connections (figures: docs/design.md, "Connections"). Processes of a
node that download at the same time share the connections of the node equally.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from shardcache import threads
from shardcache.errors import ConfigError
from shardcache.locks.downloaders import Downloaders
from shardcache.units import format_rate, parse_bytes

__all__ = ["LEAST", "Connections", "Throttle", "Work", "parse_rate"]

#: Bytes of one request. 32 connections brought 1,488 MB/s in parts of 8 MiB over an S3-like link,
#: 1,647 in parts of 16 MiB, 1,633 in parts of 64 MiB.
PART = 16 << 20
#: Connections to an origin that answers within `_NEAR` seconds. 32 instead of 8 cost a tenth of
#: the speed with TLS, and bring nothing.
_FEW = 8
_NEAR = 0.005
#: Connections of all processes of a node. Over an S3-like link, 64 brought 1,671 MB/s, 32 brought
#: 1,647.
_NODE = 64
#: Seconds after which a caller that waits for a connection looks whether its process may use more.
_PATIENCE = 1.0


class Work:
    """The parts of one shard that no thread fetches yet, for the worker and helpers.

    Args:
        connections: the connections of the process, whose lock guards the parts.
        fetch: fetches one part, and does not raise.
    """

    def __init__(self, connections: Connections, fetch: Callable[[range], None]) -> None:
        self.parts: deque[range] = deque()
        self._fetch: Callable[[range], None] | None = fetch
        self._helpers = 0
        self._ended = threading.Condition(connections.lock)
        self._connections = connections

    def take(self) -> range | None:
        """Return the next part for the worker; None if there is none."""
        self._connections.hand_out()  # the share of this process may have grown
        with self._connections.lock:
            return self.parts.popleft() if self.parts else None

    def start_helper(self) -> Callable[[], None]:
        """Return what fetches the next part. The caller holds the lock."""
        assert self._fetch is not None
        self._helpers += 1
        return partial(self._fetch, self.parts.popleft())

    def end_helper(self) -> None:
        """Count one helper less."""
        with self._connections.lock:
            self._helpers -= 1
            self._ended.notify_all()

    def end(self, seconds: float | None = None) -> None:
        """Take the parts away, and wait for the helpers, at most for this long."""
        with self._connections.lock:
            self.parts.clear()
            self._fetch = None  # it refers to the transfer, and that to this: a cycle
            self._ended.wait_for(lambda: self._helpers == 0, seconds)


class Connections:
    """See the module.

    Args:
        most: most connections of this process.
        part: bytes of one request; None for `PART`.
        downloaders: of the node. This process is one while it uses a connection.
    """

    def __init__(self, most: int, part: int | None, downloaders: Downloaders) -> None:
        self.lock = threading.Lock()
        self.part = part or PART
        self._most = most
        self._downloaders = downloaders
        self._answer: float | None = None  # seconds, the fastest so far
        self._busy = 0
        self._waiting = 0
        self._work: deque[Work] = deque()
        self._free = threading.Condition(self.lock)

    @property
    def limit(self) -> int:
        """How many connections this process may use."""
        near = self._answer is None or self._answer <= _NEAR
        return min(self._most, _FEW if near else self._most, self._share)

    @property
    def _share(self) -> int:
        """This process's part of the node's connections: at least one."""
        return max(1, max(_NODE, self._most) // self._downloaders.count())

    @property
    def crowded(self) -> bool:
        """Whether the node leaves this process a single connection, and that is in use."""
        return self._busy > 0 and self._share == 1

    @property
    def known(self) -> bool:
        """Whether an origin has answered, so that `limit` stays what it is."""
        return self._answer is not None

    def answered(self, seconds: float) -> None:
        """Note how many seconds the first byte of a response took; 0 if unknown."""
        if self._answer is None or seconds < self._answer:
            self._answer = seconds
            self.hand_out()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Hold a connection; wait for it if this process uses all that it may."""
        with self.lock:
            self._waiting += 1
            try:
                # A process may always use one, so the first does not count the downloaders.
                while self._busy and self._busy >= self.limit:
                    self._free.wait(_PATIENCE)
                self._take()
            finally:
                self._waiting -= 1
        try:
            self.hand_out()
            yield
        finally:
            with self.lock:
                self._release()
            self.hand_out()

    def offer(self, work: Work) -> None:
        """Let helpers fetch parts of a shard."""
        with self.lock:
            self._work.append(work)
        self.hand_out()

    def hand_out(self) -> None:
        """Give a free connection to a caller that waits, else to a helper."""
        with self.lock:
            if not self._waiting and self._next() is None:
                return
            if self._busy >= self.limit:
                return
            if self._waiting:
                self._free.notify()
                return
            self._take()
        try:
            # Without the lock: it waits for the new thread, and all the others would wait, too.
            threads.start(self._help, "shardcache-part")
        except RuntimeError:  # a limit of processes: callers fetch alone
            with self.lock:
                self._release()
                self._work.clear()

    def _take(self) -> None:
        """Use one more connection. The caller holds the lock."""
        if not self._busy:
            self._downloaders.join()
        self._busy += 1

    def _release(self) -> None:
        """Use one connection less. The caller holds the lock."""
        self._busy -= 1
        if not self._busy:
            self._downloaders.leave()

    def _next(self) -> Work | None:
        """The first shard that has parts left."""
        while self._work and not self._work[0].parts:
            self._work.popleft()
        return self._work[0] if self._work else None

    def _help(self) -> None:
        """Fetch parts until none is left, a caller needs the connection, or the limit sank."""
        while True:
            with self.lock:
                yields = self._waiting or self._busy > self.limit
                work = None if yields else self._next()
                if work is None:
                    self._release()
                    break
                fetch = work.start_helper()
            self.hand_out()
            try:
                fetch()
            finally:
                work.end_helper()
            del work, fetch
        self.hand_out()


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
