"""Bytes on their way from a response into the blocks of a partial.

`Blocks` belongs to one worker thread; `Pace` watches one response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shardcache.clock import Clock
from shardcache.errors import TransferTimeoutError
from shardcache.origins.base import Body, TransientError
from shardcache.origins.retry import Attempts
from shardcache.store.digest import BLOCK, block_digest

if TYPE_CHECKING:
    from shardcache.fetch.connections import Throttle

__all__ = ["Blocks", "FetchStatus", "Pace", "Sink", "skip"]

#: Bytes per second under which a connection counts as stalled. Well under any
#: link that could feed training, well above a peer that only keeps alive.
_MIN_RATE = 8 * 1024
#: Bytes of a shard that are worth telling its reader of: a sample, as samples go. At the
#: 80 MB/s that S3 gives a connection a whole block would keep the first one waiting for 13 ms.
_EARLY = 128 * 1024


@dataclass(slots=True, eq=False)
class FetchStatus:
    """How far a fetch is, for whoever watches; updated by the engine.

    Attributes:
        size: bytes of the shard, once known.
        written: bytes of it on disk, resumed ones included.
        received: bytes that came over the network for it.
        retries: requests repeated.
        partial: where the shard grows: this process's partial, or that of the process which
            is waited for.
        called_off: set by whoever wants this one fetch to end: it, or the wait for another
            process's, raises `FetchCancelledError`.
        listener: called, by any thread, when there is more to read; must be quick.
        listed: bytes of the shard by a listing, which may be outdated.
        near: whether it comes from an upstream, not from its origin.
        throttle: how fast it may be, together with others.
        outdated: versions that are wanted no longer, even if they are on disk.
        roomless: whether there may be no room for it.
        answers: the origin's first answer, where the shard could not be stored: at most one.
    """

    size: int | None = None
    written: int = 0
    received: int = 0
    retries: int = 0
    partial: Path | None = None
    called_off: bool = False
    listener: Callable[[], None] | None = None
    listed: int | None = None
    near: bool = False
    throttle: Throttle | None = None
    outdated: frozenset[str] = frozenset()
    roomless: bool = False
    answers: list[Body] = field(default_factory=list)

    def grows_in(self, partial: Path) -> None:
        """From now on this is where the shard grows."""
        if partial != self.partial:
            self.partial = partial
            self.tell()

    def offer(self, answer: Body) -> None:
        """Keep an answer for whoever reads the shard past the cache."""
        self.drop_answer()
        self.answers.append(answer)

    def take_answer(self) -> Body | None:
        """The answer that was kept; the caller closes it. One of several threads gets it."""
        try:
            return self.answers.pop()
        except IndexError:
            return None

    def drop_answer(self) -> None:
        """Close the answer that nobody took."""
        if (answer := self.take_answer()) is not None:
            answer.close()

    def tell(self) -> None:
        """Say that there is more."""
        if self.listener is not None:
            self.listener()


class Sink(Protocol):
    """Where finished blocks go."""

    def crc(self) -> Callable[[memoryview], int] | None:
        """The checksum to compute beside the digest, if one is known by now."""
        ...

    def put(self, offset: int, block: memoryview, digest: bytes, crc: int | None, fd: int) -> None:
        """Write and record one block.

        Raises:
            OSError: the disk is full, read-only or failing.
        """
        ...

    def early(self, begun: memoryview, fd: int) -> None:
        """Let the shard's first bytes be read before their block is whole.

        Raises:
            As `put`.
        """
        ...

    def end(self, total: int) -> None:
        """The body of an object of unknown size ended here."""
        ...


class Blocks:
    """A cursor that fills, hashes and hands on the blocks of one part.

    Args:
        sink: takes the blocks.
        start: first byte of the part, at a block's start.
        stop: behind its last byte, or None for an object of unknown size.
        fd: the worker's own descriptor, passed on to the sink.
        body: a response that already delivers this part, if there is one.
    """

    __slots__ = (
        "_body",
        "_buffer",
        "_early",
        "_fd",
        "_filled",
        "_next",
        "_sink",
        "complete",
        "stop",
    )

    def __init__(self, sink: Sink, start: int, stop: int | None, fd: int, body: Body | None):
        self.stop = stop
        self.complete = stop is not None and start >= stop
        self._sink = sink
        self._fd = fd
        self._body = body
        most = BLOCK if stop is None else max(0, min(BLOCK, stop - start))
        self._buffer = memoryview(bytearray(most))
        self._filled = 0
        self._next = start  # where the block in the buffer begins
        self._early = 0  # bytes of the first block that were handed on before it was whole

    @property
    def position(self) -> int:
        """Offset of the next byte wanted."""
        return self._next + self._filled

    def take_body(self) -> Body | None:
        """The response given at the start, once."""
        body, self._body = self._body, None
        return body

    def rewind(self) -> None:
        """Begin again at the object's first byte."""
        self._next = self._filled = self._early = 0

    def receive(self, body: Body) -> int:
        """Take one read's worth of bytes; 0 is the end of the body.

        Raises:
            TransientError: the connection broke.
            OSError: the disk is full, read-only or failing.
        """
        want = BLOCK if self.stop is None else min(BLOCK, self.stop - self._next)
        count = body.readinto(self._buffer[self._filled : want])
        self._filled += count
        if self._filled == want or (count == 0 and self.stop is None):
            self._flush()
            self.complete = self._next == self.stop
        elif self._next == 0 and self._filled >= 2 * self._early + _EARLY:
            self._early = self._filled
            self._sink.early(self._buffer[: self._filled], self._fd)
        if count == 0 and self.stop is None:
            self._sink.end(self._next)
            self.complete = True
        return count

    def _flush(self) -> None:
        block = self._buffer[: self._filled]
        if not block:
            return
        crc = self._sink.crc()
        checksum = None if crc is None else crc(block)
        self._sink.put(self._next, block, block_digest(block), checksum, self._fd)
        self._next += self._filled
        self._filled = 0


def skip(body: Body, position: int) -> None:
    """Pass over what an origin that ignores ranges sends before ``position``.

    Raises:
        TransientError: it sends something else altogether, or breaks.
    """
    if body.start not in (0, position):
        raise TransientError(f"asked for byte {position}, the origin began at {body.start}")
    left = position - body.start
    scratch = memoryview(bytearray(min(left, BLOCK)))
    while left:
        count = body.readinto(scratch[:left])
        if count == 0:
            raise TransientError("the origin ended early")
        left -= count


class Pace:
    """Whether a connection delivers enough to be kept.

    Counts the time spent receiving: a reader who takes breaks says so with `wake`.
    """

    __slots__ = ("_attempts", "_bytes", "_clock", "_looked", "_since", "_timeout")

    def __init__(self, clock: Clock, timeout: float, attempts: Attempts) -> None:
        self._clock = clock
        self._timeout = timeout
        self._attempts = attempts
        self._since = self._looked = self._clock.monotonic()
        self._bytes = 0

    def wake(self) -> None:
        """Leave the time since the last `check` out: nobody was receiving."""
        now = self._clock.monotonic()
        self._since += now - self._looked
        if self._attempts.end is not None:
            self._attempts.end += now - self._looked
        self._looked = now

    def check(self, count: int) -> None:
        """Note bytes received.

        Raises:
            TransientError: too few in the last ``timeout`` seconds.
            TransferTimeoutError: the deadline of the whole fetch is over.
        """
        self._bytes += count
        now = self._looked = self._clock.monotonic()
        if self._attempts.end is not None and now > self._attempts.end:
            raise TransferTimeoutError(
                f"{self._attempts.what} was not fetched within the deadline of "
                f"{self._attempts.policy.deadline:g} s. Raise deadline, or run again: "
                "what was fetched is kept.",
                url=self._attempts.what,
            )
        elapsed = now - self._since
        if elapsed < self._timeout:
            return
        if self._bytes < elapsed * _MIN_RATE:
            raise TransientError(f"only {self._bytes} bytes in {elapsed:.0f} s", timed_out=True)
        self._since, self._bytes = now, 0
