"""Fakes: a clock that tests advance, and an origin in memory."""

from __future__ import annotations

import base64
import hashlib
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from shardcache import clock
from shardcache.errors import ShardNotFoundError
from shardcache.origins import base
from shardcache.urls import ShardURL


class FakeClock:
    """The clock of the whole library; only a call of `sleep` advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float = 1_000_000.0) -> None:
        for name in ("monotonic", "time", "sleep"):
            monkeypatch.setattr(clock, name, getattr(self, name))
        self.now = now
        self.elapsed = 0.0
        self.naps: list[float] = []
        self.on_sleep: list = []

    def monotonic(self) -> float:
        return self.elapsed

    def time(self) -> float:
        return self.now + self.elapsed

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.elapsed += seconds
        for function in list(self.on_sleep):
            function()


NEVER = 1 << 60


@dataclass
class Fault:
    """A fault of one request."""

    after: int | None = NEVER  # bytes delivered before it strikes; None fails the request itself
    error: Exception | None = None  # the exception to raise; None ends the body early
    wait: threading.Event | None = None  # the body waits for this once, before ``error``
    corrupt: bool = False  # flips the byte at ``after`` instead of failing
    before: Callable[[], object] | None = None  # called when the request arrives


@dataclass
class MemoryOrigin(base.Origin):
    """Objects in memory, served as S3 serves them."""

    objects: dict[str, bytes] = field(default_factory=dict)  # by canonical URL
    requests: list[tuple[str, int, int | None]] = field(default_factory=list)  # url, start, stop
    stats: list[str] = field(default_factory=list)  # URLs described
    faults: deque[Fault] = field(default_factory=deque)  # one for each of the next requests
    proves_version: bool = True
    states_checksums: bool = True
    sizes: bool = True  # whether responses state the size
    etags: bool = True  # whether responses state an ETag
    checksums: dict[str, base.Checksum] = field(default_factory=dict)  # for `stat`, by URL
    chunk: int = 64 * 1024
    waited: float = 0.0  # seconds that each response states as its response time
    delivered: int = 0  # bytes
    bodies: list[MemoryBody] = field(default_factory=list)  # every response so far
    guard: threading.Lock = field(default_factory=threading.Lock)
    held: list[threading.Event] = field(default_factory=list)  # those that `hold` returned

    def hold(self, after: int) -> threading.Event:
        """Pause the next response after ``after`` bytes, until the returned event is set."""
        self.held.append(event := threading.Event())
        self.faults.append(Fault(after=after, wait=event))
        return event

    def release(self) -> None:
        """Let all responses go on."""
        for event in self.held:
            event.set()

    def state_checksum(self, url: str, data: bytes) -> None:
        """State the CRC32 of these bytes for an object."""
        value = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
        self.checksums[url] = base.Checksum("crc32", value)

    @property
    def fetches(self) -> int:
        """The number of requests that began at an object's first byte."""
        return sum(start == 0 for _, start, _ in self.requests)

    def info(self, shard: ShardURL) -> base.ObjectInfo:
        data = self.objects.get(str(shard))
        if data is None:
            raise ShardNotFoundError(f"{shard}: not found", url=str(shard))
        return base.ObjectInfo(
            size=len(data) if self.sizes else None,
            etag=f'"{hashlib.md5(data).hexdigest()}"' if self.etags else None,
            checksum=self.checksums.get(str(shard)),
        )

    def open(self, shard, start, stop, expected=None):
        with self.guard:
            self.requests.append((str(shard), start, stop))
            fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.before is not None:
            fault.before()
        if fault is not None and fault.after is None:
            raise fault.error or base.TransientError("refused")
        info = self.info(shard)
        if expected is not None and expected.etag != info.etag:
            raise base.VersionChangedError(str(shard))
        data = self.objects[str(shard)]
        stop = len(data) if stop is None or not self.sizes else min(stop, len(data))
        body = MemoryBody(self, info, start, stop, data[start:stop], fault)
        self.bodies.append(body)  # other threads append theirs
        return body

    def stat(self, shard):
        with self.guard:
            self.stats.append(str(shard))
        return self.info(shard)


class MemoryBody:
    """The response to one request."""

    def __init__(self, origin, info, start, stop, data, fault) -> None:
        self.info, self.start, self.stop = info, start, stop if origin.sizes else None
        self.waited, self.closed, self.aborted = origin.waited, False, threading.Event()
        self.proven = True
        self._origin, self._data, self._at, self._fault = origin, data, 0, fault

    def readinto(self, buffer) -> int:
        fault, end = self._fault, self._at + min(len(buffer), self._origin.chunk)
        if fault is not None and not fault.corrupt:
            if self._at < fault.after:
                end = min(end, fault.after)
            elif fault.wait is not None:
                while not fault.wait.wait(0.01):
                    if self.aborted.is_set():
                        raise base.TransientError("aborted")
                if fault.error is not None:
                    raise fault.error
                self._fault = None
            elif fault.error is not None:
                raise fault.error
            elif self.stop is not None:
                raise base.TransientError("the origin stopped early")
            else:
                return 0
        chunk = bytearray(self._data[self._at : end])
        if fault is not None and fault.corrupt and self._at <= fault.after < end:
            chunk[fault.after - self._at] ^= 0xFF
            self._fault = None
        buffer[: len(chunk)] = chunk
        self._at += len(chunk)
        with self._origin.guard:
            self._origin.delivered += len(chunk)
        return len(chunk)

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed = True
