"""One version of one object on its way into one partial: plan, workers, checks.

A `Job` is used once, by the thread that made it; the threads it starts live no
longer than the call of `Job.run`, apart from one that an origin keeps waiting
after the job was called off: that one holds descriptors of its own and touches
nothing else.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardcache import threads
from shardcache.clock import Clock
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    FetchCancelledError,
    IntegrityError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.fetch.blocks import Blocks, FetchStatus, Pace, skip
from shardcache.fetch.connections import Lane, Lanes
from shardcache.origins.base import (
    Body,
    ObjectInfo,
    Origin,
    TransientError,
    VersionChangedError,
)
from shardcache.origins.retry import Attempts
from shardcache.store import digest as digests
from shardcache.store.digest import BLOCK, Comparison, MismatchError
from shardcache.store.partial import Partial
from shardcache.urls import ShardURL

__all__ = ["Engine", "FetchStatus", "Fetched", "Job"]

logger = logging.getLogger(__name__)


#: Bytes that make an attempt count as progress.
_PROGRESS = 64 * 1024
#: Bytes of one answer that make its speed worth knowing.
_TELLING = 4 * BLOCK
#: Seconds that a shard whose bytes are all there waits for what the origin states of it. An
#: answer takes milliseconds; the checksum is one more proof, and readers wait for the shard.
_LAST_ANSWER = 5.0
#: Seconds that an interrupted caller waits for all its workers to notice.
_FAREWELL = 5.0

Part = tuple[int, int]


class Engine(Protocol):
    """What a job needs of the `transfer.Fetcher` it runs in."""

    clock: Clock
    timeout: float
    lanes: Lanes


@dataclass(frozen=True, slots=True)
class Fetched:
    """A complete, checked, unpublished shard.

    Attributes:
        partial: where it is; the caller publishes and closes it.
        info: the version.
        size: bytes.
        digest: tree digest.
        checked: the origin's checksum algorithm that the bytes matched, or None.
    """

    partial: Partial
    info: ObjectInfo
    size: int
    digest: str
    checked: str | None


class CancelledError(Exception):
    """Another worker of the same fetch failed."""


class Job:
    """One version of one object on its way into one partial."""

    def __init__(
        self,
        engine: Engine,
        origin: Origin,
        url: ShardURL,
        partial: Partial,
        attempts: Attempts,
        status: FetchStatus,
        *,
        described: bool = False,
    ) -> None:
        self.url = url
        self.status = status
        self.guard = threading.Lock()
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self.bodies: set[Body] = set()  # answers that are being received
        self.threads: list[threading.Thread] = []  # beside the caller's
        self.engine = engine
        self.origin = origin
        self.partial = partial
        self.pin = partial.metadata.info
        self.attempts = attempts
        self.parts: deque[Part] = deque()
        self.comparison = Comparison()
        self.comparison.stated = self.pin.checksum if described else None
        self.described = described or not origin.states_checksums
        self.helpers = True  # as long as threads can be started
        self.arrived = threading.Event()  # all bytes are there, or never will be
        self.describer: threading.Thread | None = None
        self.first_stop: int | None = None
        status.size = self.pin.size
        status.written = partial.written
        status.grows_in(partial.path)

    def run(self, first: Body | None, lane: Lane) -> Fetched:
        """Fetch what is missing, check it, and return it; see `Fetcher.fetch`.

        Args:
            first: an answer that already delivers the object's first bytes.
            lane: is given back when the calling thread needs it no more.
        """
        threads = self.threads
        try:
            self._plan(first)
            if not self.described and self.spawn(self._learn_checksum):
                self.describer = threads.pop()
            self._lead(first)
            lane.give_back()
            for thread in threads:  # a helper may bring another one
                thread.join()
            self._await_checksum()
            if self.error is not None:
                raise self.error
            return self._finish()
        except BaseException as exn:
            self._abandon(threads, exn)
            if first is not None:
                first.close()
            raise

    def _plan(self, first: Body | None) -> None:
        size = self.pin.size
        self.first_stop = first.stop if first is not None else None
        if size is None:
            return  # one stream of unknown length: the first body is all
        if first is None:
            self.parts.extend(self.partial.missing())
            return
        if self.status.roomless and first.stop == size and self.pin.identifiable:
            self.first_stop = min(size, self.engine.lanes.part())
        if self.first_stop is not None and self.first_stop < size:
            self.parts.append((self.first_stop, size))

    def _bring_helpers(self) -> None:
        """Let more threads take parts, while there are some and there are lanes to spare."""
        while self.parts and self.helpers and (lane := self.engine.lanes.spare()) is not None:
            part = self._next_part()
            if part is not None and not self.spawn(functools.partial(self._work, part, lane)):
                self.parts.appendleft(part)
                self.helpers = False
            if part is None or not self.helpers:
                lane.give_back()

    def _lead(self, first: Body | None) -> None:
        """The calling thread's share of the work."""
        file = self.partial.handle()
        fd = file.fileno()
        try:
            if first is not None:
                self._receive_part(0, self.first_stop, fd, first)
            elif (part := self._next_part()) is not None:
                self._bring_helpers()  # how long the shard is was known before
                self._receive_part(*part, fd, None)
            self._take_parts(fd)
        except CancelledError:
            logger.debug("%s: called off", self.url)
        finally:
            file.close()

    def _work(self, part: Part, lane: Lane) -> None:
        """A helper's share: it came with a lane, and goes when others need that more."""
        try:
            file = self.partial.handle()
            fd = file.fileno()
            try:
                self._receive_part(*part, fd, None)
                self._take_parts(fd, until=lambda: self.engine.lanes.crowded)
            finally:
                file.close()
        finally:
            lane.give_back()

    def _take_parts(self, fd: int, until: Callable[[], bool] = lambda: False) -> None:
        while not until():
            self.check_stopped()
            part = self._next_part()
            if part is None:
                return
            self._receive_part(*part, fd, None)

    def _next_part(self) -> Part | None:
        """The next part that nobody has asked for, first in first out."""
        with self.guard:
            if not self.parts:
                return None
            start, stop = self.parts.popleft()
            left = stop - start + sum(end - begin for begin, end in self.parts)
            end = start + self.engine.lanes.part(left)
            if end < stop:
                self.parts.appendleft((end, stop))
            return start, min(end, stop)

    def _receive_part(self, start: int, stop: int | None, fd: int, body: Body | None) -> None:
        """Receive one part, over as many connections in turn as it takes."""
        blocks = Blocks(self, start, stop, fd, body)
        while not blocks.complete:
            self.attempts.call(lambda: self._attempt(blocks), sleep=self.sleep)
        if (unread := blocks.take_body()) is not None:  # of an empty object
            unread.close()

    def _attempt(self, blocks: Blocks) -> None:
        before = blocks.position
        body = blocks.take_body()
        try:
            if body is None:
                body = self._reopen(blocks)
            self._drain(body, blocks)
        except TransientError as exn:
            self.check_stopped()
            if not self.pin.identifiable:
                # What comes next may be of another version; this is its only part.
                self.partial.restart()
                blocks.rewind()
                raise
            if blocks.position - before < _PROGRESS:
                raise
            self.attempts.retries += 1
            logger.info("%s: %s; going on at byte %d", self.url, exn, blocks.position)
        finally:
            self.status.retries = self.attempts.retries

    def _reopen(self, blocks: Blocks) -> Body:
        # An object of unknown size is sent from its start, whatever is asked.
        pin = self.pin if self.pin.size is not None else None
        asked = self.engine.clock.monotonic()
        body = self.origin.open(self.url, blocks.position, blocks.stop, pin)
        self.engine.lanes.answered(self.engine.clock.monotonic() - asked)
        if body.info.version != self.pin.version:
            body.close()
            raise VersionChangedError(str(self.url))
        if not self.partial.confirmed:
            try:
                if not self.origin.pins:  # then its answer says nothing of the version
                    self._look_at_version()
                self.partial.confirm()
            except Exception:
                body.close()
                raise
        return body

    def _look_at_version(self) -> None:
        now = self.origin.stat(self.url)
        if now.version != self.pin.version:
            raise VersionChangedError(str(self.url))

    def _drain(self, body: Body, blocks: Blocks) -> None:
        """Receive from one response until its part is complete or it breaks."""
        with self.guard:
            self.bodies.add(body)
        try:
            skip(body, blocks.position)
            clock, lanes, throttle = self.engine.clock, self.engine.lanes, self.status.throttle
            pace = Pace(clock, self.engine.timeout, self.attempts)
            begun, before = clock.monotonic(), blocks.position
            while not blocks.complete:
                self.check_stopped()
                count = blocks.receive(body)
                if count == 0 and not blocks.complete:
                    raise TransientError("the origin ended early")
                self.status.received += count
                lanes.received(count)
                if not blocks.complete:
                    pace.check(count)
                if throttle is not None and (seconds := throttle.take(count)):
                    self.sleep(seconds)
                    pace.wake()  # that was not the origin's slowness
            if (total := blocks.position - before) >= _TELLING:
                lanes.part_done(total, clock.monotonic() - begun)
        finally:
            with self.guard:
                self.bodies.discard(body)
            body.close()

    def _learn_checksum(self) -> None:
        """Ask what the origin states of the whole object, beside the transfer."""
        try:
            stated = self.attempts.call(lambda: self.origin.stat(self.url), sleep=self._nap)
        except (AccessDeniedError, ConfigError, ShardNotFoundError, TransferError) as exn:
            # Describing may be forbidden, or not be known, where reading is allowed.
            logger.info("%s: no checksum to compare with: %s", self.url, exn)
            return
        if stated.version != self.pin.version:
            if self.pin.etag and not stated.etag:
                return  # a gateway that names versions only where it sends bytes
            raise VersionChangedError(str(self.url))
        self.comparison.stated = stated.checksum

    def _nap(self, seconds: float) -> None:
        """Sleep between two questions for the checksum; when all bytes are there, give up."""
        if self.arrived.wait(seconds):
            raise CancelledError

    def _await_checksum(self) -> None:
        """Wait for an answer that is on its way, and for no further one."""
        self.arrived.set()
        if self.describer is not None:
            self.describer.join(_LAST_ANSWER)

    def _finish(self) -> Fetched:
        if not self.origin.pins:
            self.attempts.call(self._look_at_version, sleep=self.sleep)
        partial = self.partial
        size = partial.watermark
        if partial.written != size or (self.pin.size is not None and size != self.pin.size):
            raise IntegrityError(  # cannot happen; if it does, nothing is published
                f"{self.url}: {partial.written} of {self.pin.size} bytes arrived, in pieces. "
                "Please report this.",
                url=str(self.url),
            )
        checked = self.comparison.compare(partial.fd, size, self.pin.checksum)
        return Fetched(partial, self.pin, size, digests.tree_digest(partial.digests), checked)

    def crc(self) -> Callable[[memoryview], int] | None:
        """See `blocks.Sink.crc`."""
        return self.comparison.crc()

    def put(self, offset: int, block: memoryview, digest: bytes, crc: int | None, fd: int) -> None:
        """See `blocks.Sink.put`."""
        # What a connection delivers after it was aborted is not the object: behind
        # TLS it is ciphertext. Whoever resumes would believe it.
        self.check_stopped()
        index = offset // BLOCK
        self.comparison.note(index, crc)
        self.partial.write(offset, block, fd)
        self.partial.record(index, digest, len(block))
        self.status.written = self.partial.written
        self.status.tell()
        self._bring_helpers()

    def early(self, begun: memoryview, fd: int) -> None:
        """See `blocks.Sink.early`."""
        if self.pin.identifiable:  # else it may begin again as another version
            self.check_stopped()
            self.partial.write(0, begun, fd)
            self.partial.show(len(begun))
            self.status.tell()

    def end(self, total: int) -> None:
        """See `blocks.Sink.end`."""
        self.partial.set_total(total)

    def _abandon(self, threads: list[threading.Thread], exn: BaseException) -> None:
        """Call off everybody and let go of the partial."""
        self.fail(exn)
        useless = isinstance(exn, (VersionChangedError, MismatchError, IntegrityError))
        local = isinstance(exn, OSError) and not isinstance(exn, ShardCacheError)
        end = time.monotonic() + _FAREWELL
        try:
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        finally:  # a second interrupt must not leave the partial locked
            if useless or local or self.pin.size is None:
                self.partial.discard()
            else:
                self.partial.close()
            self.error = None  # it knows this frame: a cycle would keep what should go

    # -- its threads ---------------------------------------------------------------

    def spawn(self, function: Callable[[], None]) -> bool:
        """Let a thread do it; False if the process must not have more."""
        name = f"shardcache-{self.url.key[:8]}"
        try:
            thread = threads.start(functools.partial(self._guarded, function), name)
        except RuntimeError as exn:  # a limit of processes; those there are do it all
            count = len(self.threads) + 1
            logger.info("%s: fetching with %d threads: %s", self.url, count, exn)
            return False
        self.threads.append(thread)
        return True

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except CancelledError:
            logger.debug("%s: a worker was called off", self.url)
        except BaseException as exn:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self.fail(exn)

    def cancel(self) -> None:
        """Call the fetch off, from any thread."""
        self.fail(
            FetchCancelledError(
                f"{self.url}: the fetch was called off; what was fetched is kept. Run it again.",
                url=str(self.url),
            )
        )

    def fail(self, exn: BaseException) -> None:
        """End the work of all with this, if it is the first; from any thread."""
        with self.guard:
            if self.error is None:
                self.error = exn
            self.stop.set()
            self.arrived.set()
            bodies = list(self.bodies)
        for body in bodies:
            body.abort()

    def check_stopped(self) -> None:
        """See whether to go on.

        Raises:
            CancelledError: the work was called off, by anybody.
        """
        if self.status.called_off and not self.stop.is_set():
            self.cancel()
        if self.stop.is_set():
            raise CancelledError

    def sleep(self, seconds: float) -> None:
        """Wait, unless the work is called off.

        Raises:
            CancelledError: it was.
        """
        if self.stop.wait(seconds):
            raise CancelledError
