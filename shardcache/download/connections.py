"""The connections of one process: how many it may use, and for which shards.

A worker holds one connection until its shard is complete. Helpers fetch other parts, while there
are parts left and connections to spare. A worker that waits for its first connection takes
precedence over helpers, so every shard gets its first bytes before any shard gets its last.
`docs/design.md` explains how many connections a process uses.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardcache import clock, files, threads
from shardcache.errors import ConfigError
from shardcache.faults import ignoring
from shardcache.layout import Layout
from shardcache.origins.resolve import Origins
from shardcache.units import format_rate, parse_bytes

__all__ = ["LEAST", "NODE", "Connections", "PartQueue", "Throttle", "parse_rate"]

#: Bytes that one request asks for. Smaller parts are slower over an S3-like link, and larger ones
#: are no faster.
PART = 16 << 20
#: Connections to start with. With a fast server nearby, more do not help, and with TLS they cost a
#: fifth of the throughput.
_FEW = 2
#: Seconds. If the first response takes `_FAR` or more, like S3's, all connections are used until a
#: response within `_NEAR` shows that the first one was late for another reason.
_FAR, _NEAR = 0.020, 0.005
#: The few connections are doubled after this many seconds in which they were in use for a quarter
#: of the time, while the process needed less than `_BUSY` of a processor. If the origin is not the
#: bottleneck, a process needs 0.6 or more.
_INTERVAL, _BUSY = 0.1, 0.5
#: Connections of all processes of a node together, unless one process may have more. Over an
#: S3-like link, 64 are hardly faster than 32.
NODE = 64
#: Open connections that a process without downloads keeps for its next one.
_KEPT = 2
#: Seconds between two checks of a waiting worker.
_CHECK_EVERY = 1.0
#: Number of bytes to choose from, large enough that no two downloaders choose the same byte.
_BYTES = 1 << 30
#: `struct flock` of 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
#: F_OFD_GETLK and F_OFD_SETLK, which a Python that was built on an old system does not name.
_OFD_GETLK, _OFD_SETLK = 36, 37
#: Seconds between counts. A count takes a system call or two for each downloader.
_RECOUNT = 0.25


@dataclass(eq=False, repr=False)
class PartQueue:
    """The parts of one shard that still have to be fetched, by its worker and helpers."""

    #: Fetches a part in a helper's thread. It must not raise.
    fetch: Callable[[range], None] | None
    parts: deque[range] = field(default_factory=deque)
    helpers: int = 0  #: that fetch a part at the moment

    def count(self, helpers: int) -> None:
        """Count helpers that begin (1) or end (-1) to fetch a part."""
        self.helpers += helpers

    def clear(self) -> None:
        self.parts.clear()
        self.fetch = None  # breaks the reference cycle between the queue and its transfer


class Connections:
    """Hands out up to ``most`` connections of a process to workers and helpers.

    Safe between threads. ``part`` is the number of bytes of one request; None stands for `PART`.
    ``node`` returns the node's namespace. ``origins`` close their idle connections.
    """

    def __init__(
        self, most: int, part: int | None, node: Callable[[], Layout], origins: Origins
    ) -> None:
        self.lock = threading.Lock()
        self.part = part or PART
        self._most = most
        self._origins = origins
        self._downloaders = NodeDownloaders(node)
        self._fastest = math.inf  # seconds of the fastest response so far
        self._useful = _FEW  # connections that bring more than they cost
        self._busy = 0
        self._used = 0.0  # sum of the seconds that each connection was in use, until `_since`
        self._since = clock.monotonic()
        self._measured = self._since, 0.0, 0.0  # time, `_used` and `_processor_seconds`
        self._waiting = 0
        self._queues: deque[PartQueue] = deque()
        self._free = threading.Condition(self.lock)  # notified if a connection is free
        self._fetched = threading.Condition(self.lock)  # notified if a helper has fetched a part

    @property
    def allowed(self) -> int:
        """How many connections this process may use at the moment."""
        return min(self._most, self._useful, self._share)

    @property
    def _share(self) -> int:
        """The share of this process; without the connection that requests checksums."""
        return max(1, max(NODE, self._most) // self._downloaders.count() - 1)

    @property
    def crowded(self) -> bool:
        """Whether the share of this process is a single connection, and it is already in use."""
        return self._busy > 0 and self._share == 1

    @property
    def known(self) -> bool:
        """Whether an origin has responded, so that `allowed` is based on a measurement."""
        return self._fastest < math.inf

    @property
    def near(self) -> bool:
        """Whether an origin has responded, and a few connections keep this process busy."""
        return self.known and self._useful <= _FEW

    def answered(self, seconds: float) -> None:
        """Note after how many seconds the first byte of a response arrived; 0 if unknown."""
        with self.lock:
            if seconds >= _FAR and not self.known:
                self._useful = self._most
            elif 0 < seconds <= _NEAR < self._fastest:
                self._useful = _FEW
            self._fastest = min(self._fastest, seconds or math.inf)
            self._measure()
        self.hand_out()

    def _measure(self) -> None:
        """Double `_useful` if this process waits for its origins. Call with the lock held."""
        self._use(0)
        then, used_then, needed_then = self._measured
        seconds = self._since - then
        if seconds < _INTERVAL:
            return
        used, needed = self._used, _processor_seconds()
        self._measured = self._since, used, needed
        # If a thread has ended, the time that it waited for a processor is lost.
        is_idle = 0 <= needed - needed_then < _BUSY * seconds
        if is_idle and used - used_then >= self._useful * seconds / 4:
            self._useful = min(2 * self._useful, self._most)

    @contextmanager
    def hold(self, check: Callable[[], None]) -> Iterator[None]:
        """Hold a connection in the body; first wait while this process is at its `allowed`.

        A wait calls ``check``, which may raise, every second.
        """
        with self.lock:
            self._waiting += 1
            try:
                # The first connection needs no `allowed`, which counts the downloaders.
                while self._busy and self._busy >= self.allowed:
                    self._free.wait(_CHECK_EVERY)
                    check()
                    self._measure()  # all connections may be stuck
                self._use(1)
            finally:
                self._waiting -= 1
        try:
            self._origins.limit_open(self._most)
            self.hand_out()
            yield
        finally:
            self._release()

    def _release(self) -> None:
        """Stop using a connection, and give it to another shard."""
        with self.lock:
            self._use(-1)
            most = self.allowed if self._busy else _KEPT
        self._origins.limit_open(most)
        self.hand_out()

    def offer(self, queue: PartQueue) -> None:
        with self.lock:
            self._queues.append(queue)
        self.hand_out()

    def take(self, queue: PartQueue) -> range | None:
        """Return the next part for the worker of a shard, or None if no part is left."""
        self.hand_out()  # the share of this process may have grown
        with self.lock:
            return queue.parts.popleft() if queue.parts else None

    def end(self, queue: PartQueue, seconds: float | None = None) -> None:
        """Drop the remaining parts, and wait up to ``seconds`` for helpers that still fetch one."""
        with self.lock:
            queue.clear()
            self._fetched.wait_for(lambda: not queue.helpers, seconds)

    def hand_out(self) -> None:
        """Give a free connection to a waiting worker, or start a helper if no worker waits."""
        with self.lock:
            if not self._waiting and self._next() is None:
                return
            if self._busy >= self.allowed:
                return
            if self._waiting:
                self._free.notify()
                return
            self._use(1)
        try:
            # Not under the lock, because starting waits until the new thread runs.
            threads.start(self._help, "shardcache-part")
        except threads.NoThreadError:  # the workers fetch alone
            with self.lock:
                self._use(-1)
                self._queues.clear()

    def _use(self, count: int) -> None:
        """Use ``count`` connections more, and update `_used`. Call with the lock held."""
        now = clock.monotonic()
        self._used += self._busy * (now - self._since)
        self._since = now
        if count and not self._busy:
            self._downloaders.join()
        self._busy += count
        if count and not self._busy:
            self._downloaders.leave()

    def _next(self) -> PartQueue | None:
        """Return the parts of the first shard that has any left, or None if no shard has."""
        while self._queues and not self._queues[0].parts:
            self._queues.popleft()
        return self._queues[0] if self._queues else None

    def _help(self) -> None:
        """Fetch parts until none is left, a worker needs the connection, or too many are in use."""
        while True:
            with self.lock:
                yields = self._waiting or self._busy > self.allowed
                queue = None if yields else self._next()
                if queue is None:
                    break
                fetch, part = queue.fetch, queue.parts.popleft()
                queue.count(1)
            self.hand_out()
            try:
                assert fetch is not None
                fetch(part)
            finally:
                with self.lock:
                    queue.count(-1)
                    self._fetched.notify_all()
            del queue, fetch
        self._release()


class NodeDownloaders:
    """Registers a cache as a downloader of its node, and counts the node's downloaders.

    A downloader holds a record lock on one random byte of ``downloads.lock``. The lock belongs to
    the open file (F_OFD_SETLK), so two caches of one process count as two. Where such locks do not
    work, each cache counts only itself. Only one thread at a time may call `join` or `leave`.
    """

    def __init__(self, node: Callable[[], Layout]) -> None:
        self._node = node
        self._file: io.FileIO | None = None  # open from `join` to `leave`
        self._count = 1
        self._due = 0.0

    def join(self) -> None:
        self._count, self._due, layout = 1, 0.0, self._node()
        with ignoring(OSError):  # a read-only disk, or one without such locks
            path, flags = layout.named_lock("downloads"), os.O_RDWR | os.O_CREAT
            self._file = files.open_exclusive(path, flags, layout.modes)
            # Not from `random`, because forked workers may seed it alike.
            byte = int.from_bytes(os.urandom(4), "big") % _BYTES
            lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            fcntl.fcntl(self._file.fileno(), _OFD_SETLK, lock)

    def leave(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with ignoring(OSError):
                file.close()  # frees the lock, because forked children have closed the file

    def count(self) -> int:
        """Return the number of downloaders, including this one. It may be old by a moment."""
        file, now = self._file, clock.monotonic()
        if file is not None and now >= self._due:
            with ignoring(OSError, ValueError):  # `leave` has closed the file
                self._count = 1 + _count_others(file)
            # Set this last: otherwise, another thread would return the previous count.
            self._due = now + _RECOUNT
        return self._count


def _count_others(file: io.FileIO) -> int:
    count, ranges = 0, [(0, _BYTES)]
    while ranges:
        start, stop = ranges.pop()
        if start < stop:
            # The kernel describes one lock in the range, not always the first: search both sides.
            lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
            kind, _, at, _, _ = _FLOCK.unpack(fcntl.fcntl(file.fileno(), _OFD_GETLK, lock))
            if kind != fcntl.F_UNLCK:
                count += 1
                ranges += [(start, at), (at + 1, stop)]
    return count


def _processor_seconds() -> float:
    """Return for how long this process has run on processors, or its threads waited for one."""
    waited = 0
    with ignoring(OSError):  # too many files are open
        for path in Path("/proc/self/task").glob("*/schedstat"):
            with ignoring(OSError, IndexError):  # it has ended, or the kernel has no figures
                waited += int(path.read_bytes().split()[1])
    return time.process_time() + waited / 1e9


#: Lowest accepted rate, in bytes per second. With less, a request would take minutes.
LEAST = 64_000
#: Largest burst after a pause, as the number of seconds in which ``rate`` allows that many bytes.
_BURST = 0.1


def parse_rate(value: str | int | float) -> int:
    """Return the bytes per second for a number, or for text such as ``50MB`` or ``50MB/s``.

    Raises:
        ConfigError: ``value`` is not a rate, or is less than `LEAST`.
    """
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    rate = parse_bytes(text, "MB")
    if rate < LEAST:
        raise ConfigError(f"{value!r} is too slow: the lowest rate is {format_rate(LEAST)}")
    return rate


class Throttle:
    """A token bucket that limits several downloads to ``rate`` bytes per second together."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        #: Most bytes to receive at once, so that data arrives at an even rate.
        self.most = max(4096, int(rate * _BURST))
        self._paid = 0.0
        self._guard = threading.Lock()

    def spend(self, count: int) -> float:
        """Note ``count`` received bytes, and return the seconds to wait before receiving more."""
        with self._guard:
            now = time.monotonic()
            self._paid = max(self._paid, now - _BURST) + count / self.rate
            return max(0.0, self._paid - now)
