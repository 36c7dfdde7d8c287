"""One version of one object on its way into one partial: parts, blocks, checks.

    part -> requests, one after the other until it is complete -> blocks of 1 MiB
    block: received -> hashed while it is in the processor's cache -> written -> recorded

A `Job` is used once, by the thread that made it, and helper threads of `connections` fetch parts
beside it. A helper may still wait for its origin after the job was cancelled. It holds a descriptor
of its own and touches nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from shardcache import clock, threads
from shardcache.errors import (
    FetchCancelledError,
    IntegrityError,
    ShardCacheError,
)
from shardcache.fetch.connections import Connections, Work
from shardcache.fetch.status import FetchStatus
from shardcache.origins.base import (
    Body,
    Origin,
    TransientError,
    VersionChangedError,
    skip,
)
from shardcache.origins.retry import Attempts
from shardcache.stats.counters import Counters
from shardcache.store.digest import BLOCK, MismatchError, block_digest, compare, tree_digest
from shardcache.store.partial import Partial
from shardcache.urls import ShardURL

__all__ = ["Fetched", "Job"]

logger = logging.getLogger(__name__)

#: Bytes that make an attempt count as progress.
_PROGRESS = 64 * 1024
#: Bytes of a shard that are worth telling its reader of: a sample, as samples go. At the
#: 80 MB/s that S3 gives a connection a whole block would keep the first one waiting for 13 ms.
_EARLY = 128 * 1024
#: Seconds that a shard whose bytes are all there waits for what the origin states of it. An
#: answer takes milliseconds; the checksum is one more proof, and readers wait for the shard.
_LAST_ANSWER = 5.0
#: Seconds that a caller whose fetch failed waits for its helpers to notice.
_FAREWELL = 5.0
#: Seconds until a thread that sleeps notices that the work has ended.
_SLICE = 0.1


@dataclass(frozen=True, slots=True)
class Fetched:
    """A complete, checked, unpublished shard.

    Attributes:
        partial: where it is; the caller publishes and closes it.
        size: bytes.
        digest: tree digest.
        checked: the origin's checksum algorithm that the bytes matched, or None.
        proven: whether the origin's answers prove that nothing is missing.
    """

    partial: Partial
    size: int
    digest: str
    checked: str | None
    proven: bool


class CancelledError(Exception):
    """Another thread of the same fetch failed."""


class _Buffer(threading.local):
    """The block that a thread receives into: memory is bounded whatever the shard's size."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK))


_buffer = _Buffer()


class _Part:
    """A range of bytes, and how far it is.

    Attributes:
        stop: behind its last byte; None for an object of unknown size.
        next: where the block in the buffer begins.
        filled: bytes of that block.
        shown: bytes of the shard's first block that may be read before it is whole.
        body: an answer that already delivers this part.
    """

    __slots__ = ("body", "complete", "filled", "next", "shown", "stop")

    def __init__(self, start: int, stop: int | None, body: Body | None = None) -> None:
        self.next = start
        self.stop = stop
        self.body = body
        self.filled = self.shown = 0
        self.complete = start == stop

    @property
    def position(self) -> int:
        """Offset of the next byte wanted."""
        return self.next + self.filled


class Job:
    """See the module; ``described``: the origin has said all that it states of the object."""

    def __init__(
        self,
        connections: Connections,
        origin: Origin,
        url: ShardURL,
        partial: Partial,
        attempts: Attempts,
        status: FetchStatus,
        counters: Counters,
        *,
        described: bool,
    ) -> None:
        self._connections = connections
        self._origin = origin
        self._url = url
        self._partial = partial
        self._pin = partial.metadata.info
        self._attempts = attempts
        self._status = status
        self._counters = counters
        self._counter = "bytes_upstream" if status.upstream else "bytes_origin"
        self._described = described or not origin.states_checksums
        self._checksum = self._pin.checksum  # as the origin states it
        self._proven = True
        self._failed = False
        self._error: BaseException | None = None
        self._bodies: set[Body] = set()  # answers that are being received
        self._describer: threading.Thread | None = None
        self._work = Work(connections, self._help)
        status.own = True
        status.size = self._pin.size
        status.written = partial.written
        status.grows_in(partial.path)
        status.on_cancel = self.cancel

    def receive(self, first: Body | None) -> None:
        """Fetch what is missing; with a connection, which is needed no more afterwards.

        Args:
            first: an answer that already delivers the object's first bytes.
        """
        lead = None
        if first is not None:
            lead = _Part(0, self._stop_of(first), first)
        self._work.parts.extend(self._parts(lead))
        if not self._described:
            self._begin_description()
        if self._work.parts:
            self._connections.offer(self._work)
        try:
            # This thread closes the partial itself, after that.
            fd = self._partial.fd
            if lead is not None:
                self._receive(lead, fd)
            while (part := self._work.take()) is not None:
                self._receive(_Part(part.start, part.stop), fd)
        except CancelledError:
            logger.debug("%s: cancelled", self._url)
        except BaseException as exn:
            self.fail(exn)  # before the connection is given to a helper, who would ask for more
            raise

    def finish(self) -> Fetched:
        """Wait for the helpers, and check what came.

        Raises:
            As `Fetcher.fetch`.
        """
        self._work.end()
        self._status.on_cancel = None
        if self._describer is not None:
            self._describer.join(_LAST_ANSWER)
        if self._error is not None:
            raise self._error
        if not self._origin.pins:
            self._attempts.call(self._compare_version, sleep=self._sleep)
        partial = self._partial
        size, digests = partial.written, partial.digests
        whole = len(digests) == -(-size // BLOCK) and self._pin.size in (None, size)
        if not whole:
            raise IntegrityError(  # cannot happen; if it does, nothing is published
                f"{self._url}: {size} of {self._pin.size} bytes arrived, in pieces. "
                "Please report this.",
                url=str(self._url),
            )
        checked = compare(partial.fd, self._checksum)
        return Fetched(partial, size, tree_digest(digests), checked, self._proven)

    def abandon(self, exn: BaseException) -> None:
        """End all threads and close the partial, or discard it if nothing of it can be used."""
        self.fail(exn)
        self._status.on_cancel = None  # it knows this fetch: a cycle would keep what should go
        useless = isinstance(exn, (VersionChangedError, MismatchError, IntegrityError))
        local = isinstance(exn, OSError) and not isinstance(exn, ShardCacheError)
        try:
            self._work.end(_FAREWELL)
        finally:  # a second interrupt must not leave the partial locked
            if useless or local or self._pin.size is None:
                self._partial.discard()
            else:
                self._partial.close()
            self._error = None  # it knows this frame: likewise

    # -- parts -------------------------------------------------------------------

    def _stop_of(self, first: Body) -> int | None:
        """Where the part ends that an answer brings; what else it brings is not read."""
        size, stop = self._pin.size, first.stop
        if size is not None and self._status.roomless and stop == size and self._pin.identifiable:
            return min(size, self._connections.part)
        return stop if size is None or stop is None else min(stop, size)

    def _parts(self, lead: _Part | None) -> Iterator[range]:
        """What else is missing, cut into parts."""
        if self._pin.size is None or (lead is not None and lead.stop is None):
            return  # one answer is all
        missing = self._partial.missing() if lead is None else [(lead.stop, self._pin.size)]
        for start, stop in missing:
            assert start is not None
            for at in range(start, stop, self._connections.part):
                yield range(at, min(stop, at + self._connections.part))

    def _help(self, part: range) -> None:
        """One part, in a helper's thread."""
        try:
            self._check()
            # A descriptor of its own: before this thread notices that the job was cancelled, the
            # partial may be closed and its descriptor's number used for another file.
            with self._partial.handle() as file:
                self._receive(_Part(part.start, part.stop), file.fileno())
        except CancelledError:
            logger.debug("%s: a helper was cancelled", self._url)
        except BaseException as exn:  # noqa: BLE001 - raised by the caller's thread
            self.fail(exn)

    def _receive(self, part: _Part, fd: int) -> None:
        """Receive one part, over as many requests in turn as it takes."""
        while not part.complete:
            self._attempts.call(lambda: self._attempt(part, fd), sleep=self._sleep)
        if part.body is not None:  # of an empty object
            part.body.close()
            part.body = None

    def _attempt(self, part: _Part, fd: int) -> None:
        before = part.position
        body, part.body = part.body, None
        try:
            if body is None:
                body = self._ask(part)
            self._drain(body, part, fd)
        except TransientError as exn:
            self._check()
            if not self._pin.identifiable:
                # What comes next may be of another version; this is its only part.
                self._partial.restart()
                part.next = part.filled = part.shown = 0
                raise
            if part.position - before < _PROGRESS:
                raise
            self._attempts.retries += 1
            logger.info("%s: %s; going on at byte %d", self._url, exn, part.position)
        finally:
            self._status.retries = self._attempts.retries

    def _ask(self, part: _Part) -> Body:
        """Ask for the rest of a part."""
        # An object of unknown size is sent from its start, whatever is asked.
        pin = self._pin if self._pin.size is not None else None
        body = self._origin.open(self._url, part.position, part.stop, pin)
        try:
            if body.info.version != self._pin.version:
                raise VersionChangedError(str(self._url))
            if not self._partial.confirmed:
                if not self._origin.pins:  # then its answer says nothing of the version
                    self._compare_version()
                self._partial.confirm()
        except Exception:
            body.close()
            raise
        return body

    def _compare_version(self) -> None:
        if self._origin.stat(self._url).version != self._pin.version:
            raise VersionChangedError(str(self._url))

    def _drain(self, body: Body, part: _Part, fd: int) -> None:
        """Receive from one answer until its part is complete or it breaks.

        In few calls: while Python is at one block, the threads of all other connections wait.
        """
        self._bodies.add(body)
        try:
            self._check()  # after that: `fail` sets its mark before it looks at the answers
            if passed := skip(body, part.position):
                self._counters.read(passed, self._counter)
            self._proven &= body.proven or part.stop is not None
            buffer, status, throttle = _buffer.block, self._status, self._status.throttle
            while not part.complete:
                if self._failed or status.called_off:
                    self._check()
                length = want = BLOCK if part.stop is None else min(BLOCK, part.stop - part.next)
                if part.next == 0:  # the first bytes early
                    want = min(want, part.filled + max(_EARLY, part.filled))
                if throttle is not None:
                    want = min(want, part.filled + throttle.most)
                count = body.readinto(buffer[part.filled : want])
                status.received += count
                self._counters.read(count, self._counter)
                part.filled += count
                if part.filled == length or (count == 0 and part.stop is None):
                    self._write(part, buffer[: part.filled], fd)
                elif count == 0:
                    raise TransientError("the origin ended early")
                elif part.next == 0 and part.filled >= part.shown + _EARLY:
                    self._show(part, buffer[: part.filled], fd)
                if self._attempts.end is not None and not part.complete:
                    self._attempts.check()
                if throttle is not None and (seconds := throttle.take(count)):
                    self._sleep(seconds)
                    self._attempts.extend(seconds)
        finally:
            self._bodies.discard(body)
            body.close()

    def _write(self, part: _Part, block: memoryview, fd: int) -> None:
        """A block is there, or the last of an object of unknown size, which may be empty."""
        index, count, status = part.next // BLOCK, len(block), self._status
        if count:
            digest = block_digest(block)
            # An aborted connection delivers bytes that are not the object's: with TLS,
            # ciphertext. A process that resumes the partial would believe them.
            if self._failed:
                self._check()
            self._partial.write(part.next, block, fd)
            self._partial.record(index, digest, count)
            status.written = self._partial.written
            if status.listener is not None:
                status.listener()
        part.next += count
        part.filled = 0
        part.complete = count < BLOCK if part.stop is None else part.next == part.stop

    def _show(self, part: _Part, block: memoryview, fd: int) -> None:
        """Let readers have the beginning of the shard's first block."""
        if self._pin.identifiable:  # or it may begin again as another version
            self._check()
            self._partial.write(0, block, fd)
            self._partial.show(part.filled)
            part.shown = part.filled
            self._status.notify()

    # -- what the origin states ----------------------------------------------------

    def _begin_description(self) -> None:
        """Ask what the origin states of the whole object, beside the transfer.

        Not by a helper: all connections may be busy, and nothing but this waits for the answer.
        """
        with contextlib.suppress(RuntimeError):  # a limit of processes: then nothing is compared
            self._describer = threads.start(self._describe, "shardcache-checksum")

    def _describe(self) -> None:
        """Once: a checksum is one more proof, and not worth a shard that waits for it."""
        try:
            stated = self._origin.stat(self._url)
        except VersionChangedError as exn:
            self.fail(exn)
            return
        except (ShardCacheError, TransientError) as exn:
            # Describing may be forbidden, or not be known, where reading is allowed.
            logger.info("%s: no checksum to compare with: %s", self._url, exn)
            return
        if stated.version == self._pin.version:
            self._checksum = stated.checksum or self._checksum
        elif stated.etag or not self._pin.etag:  # gateways may name versions only beside bytes
            self.fail(VersionChangedError(str(self._url)))

    # -- its end -------------------------------------------------------------------

    def cancel(self) -> None:
        """End the work, in any thread and also out of the garbage collector."""
        try:
            self._status.check(str(self._url))
        except FetchCancelledError as exn:
            self.fail(exn)

    def fail(self, exn: BaseException) -> None:
        """End the work of all threads with an error, unless another one came first.

        Takes no lock: the garbage collector may call it in a thread that holds one.
        """
        if self._error is None:
            self._error = exn
        self._failed = True
        for body in self._bodies.copy():
            body.abort()

    def _check(self) -> None:
        """Raise CancelledError if the work has ended."""
        if self._status.called_off and not self._failed:
            self.cancel()
        if self._failed:
            raise CancelledError

    def _sleep(self, seconds: float) -> None:
        """Sleep in slices; raises as `_check`."""
        end = clock.monotonic() + seconds
        while (left := end - clock.monotonic()) > 0:
            clock.sleep(min(left, _SLICE))
            self._check()
