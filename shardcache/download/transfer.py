"""One version of one object on its way into one partial: parts, blocks, checks.

    response -> size, version -> parts, first in, first out -> the worker and helpers
    part -> requests, one after the other until it is complete -> blocks of 1 MiB
    block: received -> hashed while it is in the processor's cache -> written -> recorded

* The first range request returns size and version, so no request precedes it, and its response
  delivers the first part. All further requests insist on that version. If one part is probably
  all, by a listing or by the size of other shards in the folder, the request has no range: S3 then
  adds the checksum, and one request does for a shard.
* A thread that loses its connection continues at the byte it had reached. Progress resets the
  retries, so they bound consecutive failures.
* Memory is one block per connection, for a shard of any size.
* The worker fetches, too: small shards need no other thread, and an interrupt reaches the work
  itself. Helper threads of `pool` fetch other parts. A helper may still wait for its origin
  after the transfer has failed. It holds a descriptor of its own and touches nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardcache import clock, threads
from shardcache.download.download import Download
from shardcache.download.pool import Connections, Work
from shardcache.errors import (
    FetchCancelledError,
    IntegrityError,
    ShardCacheError,
    TransferError,
    is_local_error,
)
from shardcache.origins.base import (
    Body,
    ObjectInfo,
    Origin,
    TransientError,
    VersionChangedError,
    skip,
)
from shardcache.origins.retry import Attempts, RetryPolicy
from shardcache.stats.counters import Counters
from shardcache.store.digest import BLOCK, MismatchError, block_digest, compare, tree_digest
from shardcache.store.partial import Partial
from shardcache.urls import ShardURL

__all__ = ["Engine", "Source", "Transferred", "transfer"]

logger = logging.getLogger(__name__)

#: Bytes that make an attempt count as progress.
_PROGRESS = 64 * 1024
#: Bytes of a shard that readers see before its first block is complete: about one sample. At the
#: 80 MB/s that S3 gives a connection, a whole block would delay the first sample by 13 ms.
_EARLY = 128 * 1024
#: Seconds that a complete shard waits for the origin's checksum. A response takes milliseconds;
#: the checksum is one more proof, and readers wait for the shard.
_LAST_RESPONSE = 5.0
#: Seconds that the worker of a failed transfer waits for its helpers to notice.
_FAREWELL = 5.0
#: Seconds until a thread that sleeps notices that the transfer has failed.
_NAP = 0.1
#: Folders whose largest shard is remembered.
_FOLDERS = 256
#: An object that is rewritten faster than it can be read, this often in a row, is an error.
_VERSIONS = 4


class _Sizes:
    """The largest shard so far in each folder: the next one will probably not be larger."""

    def __init__(self) -> None:
        self._largest: dict[str, int] = {}

    def likely(self, download: Download) -> int | None:
        """Bytes that a shard probably has at most: by a listing, else by its folder."""
        if download.listed is not None:
            return download.listed
        return self._largest.get(_folder(download.shard))

    def learn(self, shard: ShardURL, size: int | None) -> None:
        """Note the size of a shard; None if its origin does not state it."""
        folder = _folder(shard)
        known = self._largest.get(folder, 0)
        if len(self._largest) >= _FOLDERS and not known:
            self._largest.clear()
        self._largest[folder] = max(known, sys.maxsize if size is None else size)


def _folder(shard: ShardURL) -> str:
    return str(shard).rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of a process that all its transfers share."""

    policy: RetryPolicy
    counters: Counters
    connections: Connections
    sizes: _Sizes = field(default_factory=_Sizes)


class Source(NamedTuple):
    """Where a transfer reads."""

    origin: Origin
    upstream: bool = False  # whether that is an upstream
    #: Whether the shard may find no room. Then the first request is for all of it, so that it can
    #: be streamed from the response. If it finds room, the response is cut off after a part.
    roomless: bool = False


@dataclass(frozen=True, slots=True)
class Transferred:
    """A complete, checked, unpublished shard.

    Attributes:
        partial: the shard's partial; the receiver publishes and closes it.
        size: bytes.
        digest: tree digest.
        checked: the origin's checksum algorithm that the bytes matched, or None.
        proven: whether the origin's responses prove that nothing is missing.
    """

    partial: Partial
    size: int
    digest: str
    checked: str | None
    proven: bool


def transfer(
    engine: Engine,
    source: Source,
    download: Download,
    begin: Callable[[ObjectInfo], Partial],
    resume: Partial | None = None,
) -> Transferred:
    """Bring one object into a partial.

    After an error the partial is released: it is kept for a later resume after a transient error,
    and removed if its bytes are of no use.

    Args:
        engine: the connections, retries and counters of the process.
        source: the origin or upstream to read from.
        download: receives the events, and may be cancelled.
        begin: makes the partial once size and version are known; it may refuse by raising.
        resume: the partial of an earlier transfer.

    Raises:
        ShardNotFoundError, AccessDeniedError, ConfigError: the origin refuses the shard for good.
        TransferError, TransferTimeoutError: all retries failed.
        IntegrityError: the bytes do not match the origin's checksum.
        OSError: the local disk failed (full, read-only, broken).
        Other errors of ``begin``.
    """
    shard = download.shard
    attempts = engine.policy.started(str(shard))
    mismatches = 0
    for _ in range(_VERSIONS):
        running = None
        if resume is not None:
            running = Transfer(engine, source, download, resume, attempts)
        response = None
        try:
            with engine.connections.one():
                download.check()
                if running is None:
                    response, described = attempts.call(
                        functools.partial(_first_response, engine, source, download),
                        sleep=download.sleep,
                    )
                    engine.sizes.learn(shard, response.info.size)
                    download.check()
                    try:
                        partial = begin(response.info)
                    except OSError:  # no room: the shard is streamed from this response
                        if not source.upstream:
                            download.keep(response)
                            response = None
                        raise
                    running = Transfer(
                        engine, source, download, partial, attempts, described=described
                    )
                running.receive(response)
            return running.finish()
        except BaseException as exn:
            if running is not None:
                running.abandon(exn)
            if response is not None:
                response.close()
            if isinstance(exn, VersionChangedError):
                logger.warning("%s changed while it was downloaded; starting over", shard)
            elif isinstance(exn, MismatchError) and mismatches == 0:
                mismatches += 1
                logger.warning("%s arrived damaged; downloading it again", shard)
            elif isinstance(exn, MismatchError):
                raise IntegrityError(
                    f"{shard}: the origin states {exn.checksum.algorithm} "
                    f"{exn.checksum.value}, but the bytes it sent twice have {exn.found}. "
                    "The object or the path to it is damaged; upload it again.",
                    url=str(shard),
                ) from None
            else:
                raise
        resume = None
    raise TransferError(
        f"{shard} changed {_VERSIONS} times while it was downloaded. "
        "Wait until the dataset is written, then try again.",
        url=str(shard),
    )


def _first_response(engine: Engine, source: Source, download: Download) -> tuple[Body, bool]:
    """The first response, and whether it has all that the origin states about the object."""
    origin, shard, part = source.origin, download.shard, engine.connections.part
    likely = engine.sizes.likely(download)
    is_small = likely is not None and 0 < likely <= part
    is_whole = is_small or source.roomless
    response = origin.open(shard, 0, None if is_whole else part)
    engine.connections.answered(response.waited)
    if not response.info.identifiable:
        if response.stop in (None, response.info.size):
            return response, is_whole
        # Two parts could be of different versions: one response must bring it all.
        response.close()
        return origin.open(shard, 0, None), True
    if is_small and not source.roomless and response.stop is not None:
        response.stop = min(response.stop, part)  # it grew: other connections take the rest
    return response, is_whole


class _FailedError(Exception):
    """Another thread of the same transfer has failed."""


class _Buffer(threading.local):
    """The block that a thread receives into."""

    def __init__(self) -> None:
        self.block = memoryview(bytearray(BLOCK))


_buffer = _Buffer()


class _Part:
    """A range of bytes, and how much of it has arrived.

    Attributes:
        stop: offset behind its last byte; None for an object of unknown size.
        next: offset at which the block in the buffer begins.
        filled: bytes of that block.
        shown: bytes of the shard's first block that readers may see before it is complete.
        response: a response that already delivers this part.
    """

    __slots__ = ("complete", "filled", "next", "response", "shown", "stop")

    def __init__(self, start: int, stop: int | None, response: Body | None = None) -> None:
        self.next = start
        self.stop = stop
        self.response = response
        self.filled = self.shown = 0
        self.complete = start == stop

    @property
    def position(self) -> int:
        """Offset of the next byte to receive."""
        return self.next + self.filled

    def take_response(self) -> Body | None:
        """Return the response that already delivers this part, once."""
        response, self.response = self.response, None
        return response

    def end_block(self) -> None:
        """Go to the next block. A short block is the last one of an object of unknown size."""
        self.next += self.filled
        self.complete = self.filled < BLOCK if self.stop is None else self.next == self.stop
        self.filled = 0

    def restart(self) -> None:
        """Go back to the first byte of the object."""
        self.next = self.filled = self.shown = 0


class Transfer:
    """One version of an object on its way; see the module. Used once, by the thread that made it.

    ``described`` says that the origin has stated all it knows about the object.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        download: Download,
        partial: Partial,
        attempts: Attempts,
        *,
        described: bool = False,
    ) -> None:
        self._connections = engine.connections
        self._counters = engine.counters
        self._counter = "bytes_upstream" if source.upstream else "bytes_origin"
        self._origin = source.origin
        self._roomless = source.roomless
        self._download = download
        self._shard = download.shard
        self._throttle = download.throttle
        self._partial = partial
        self._attempts = attempts
        self._info = partial.metadata.info
        self._checksum = self._info.checksum  # as the origin states it
        self._is_described = described or not source.origin.states_checksums
        self._is_proven = True
        self._error: BaseException | None = None  # the first one ends all threads
        self._responses: set[Body] = set()  # that are being received
        self._describer: threading.Thread | None = None
        self._work = Work(engine.connections, self._help)
        size, written = self._info.size, partial.written
        download.running(partial.path, size, written, upstream=source.upstream)

    def receive(self, first: Body | None) -> None:
        """Receive what is missing, while the caller holds a connection.

        Args:
            first: a response that already delivers the object's first bytes.
        """
        lead = None if first is None else _Part(0, self._stop_of(first), first)
        self._work.parts.extend(self._missing(lead))
        try:
            with self._download.transferring(self._cancel):
                if not self._is_described:
                    self._start_describing()
                if self._work.parts:
                    self._connections.offer(self._work)
                fd = self._partial.fd  # only this thread closes the partial, after that
                if lead is not None:
                    self._receive(lead, fd)
                while (part := self._work.take()) is not None:
                    self._receive(_Part(part.start, part.stop), fd)
        except _FailedError:
            logger.debug("%s: another thread failed", self._shard)
        except BaseException as exn:
            self._fail(exn)  # before the connection goes to a helper, who would send a request
            raise

    def finish(self) -> Transferred:
        """Wait for the helpers, and check the shard. Raises the errors of `transfer`."""
        with self._download.transferring(self._cancel):
            self._work.end()
        if self._describer is not None:
            self._describer.join(_LAST_RESPONSE)
        if self._error is not None:
            raise self._error
        if not self._origin.conditional:
            self._attempts.call(self._compare_version, sleep=self._download.sleep)
        partial = self._partial
        size, digests = partial.written, partial.digests
        is_whole = len(digests) == -(-size // BLOCK) and self._info.size in (None, size)
        if not is_whole:
            raise IntegrityError(  # cannot happen; if it does, nothing is published
                f"{self._shard}: {size} of {self._info.size} bytes arrived, in pieces. "
                "Please report this.",
                url=str(self._shard),
            )
        checked = compare(partial.fd, self._checksum)
        return Transferred(partial, size, tree_digest(digests), checked, self._is_proven)

    def abandon(self, exn: BaseException) -> None:
        """End all threads, and close the partial, or discard it if its bytes are of no use."""
        self._fail(exn)
        is_useless = isinstance(exn, (VersionChangedError, MismatchError, IntegrityError))
        try:
            self._work.end(_FAREWELL)
        finally:  # a second interrupt must not leave the partial locked
            if is_useless or is_local_error(exn) or self._info.size is None:
                self._partial.discard()
            else:
                self._partial.close()
            self._error = None  # its traceback refers to this transfer

    # -- parts -------------------------------------------------------------------

    def _stop_of(self, first: Body) -> int | None:
        """Where the first part ends; the rest of its response is not read."""
        size, stop = self._info.size, first.stop
        if size is not None and self._roomless and stop == size and self._info.identifiable:
            return min(size, self._connections.part)
        return stop if size is None or stop is None else min(stop, size)

    def _missing(self, lead: _Part | None) -> Iterator[range]:
        """The bytes that are missing apart from the first part, cut into parts."""
        if self._info.size is None or (lead is not None and lead.stop is None):
            return  # one response is all
        missing = self._partial.missing() if lead is None else [(lead.stop, self._info.size)]
        for start, stop in missing:
            assert start is not None
            for at in range(start, stop, self._connections.part):
                yield range(at, min(stop, at + self._connections.part))

    def _help(self, part: range) -> None:
        """Receive a part in a helper's thread."""
        try:
            self._check()
            # A descriptor of its own: before this thread notices that the transfer failed, the
            # partial may be closed, and the number of its descriptor be that of another file.
            with self._partial.handle() as file:
                self._receive(_Part(part.start, part.stop), file.fileno())
        except _FailedError:
            logger.debug("%s: a helper ends", self._shard)
        except BaseException as exn:  # noqa: BLE001 - raised by the worker's thread
            self._fail(exn)

    def _receive(self, part: _Part, fd: int) -> None:
        """Receive one part, by as many requests in turn as it takes."""
        while not part.complete:
            self._attempts.call(lambda: self._attempt(part, fd), sleep=self._sleep)
        if (response := part.take_response()) is not None:  # of an empty object
            response.close()

    def _attempt(self, part: _Part, fd: int) -> None:
        before = part.position
        try:
            response = part.take_response() or self._request(part)
            self._drain(response, part, fd)
        except TransientError as exn:
            self._check()
            if not self._info.identifiable:
                # The next response may be of another version; this is its only part.
                self._partial.restart()
                part.restart()
                raise
            if part.position - before < _PROGRESS:
                raise
            self._attempts.repeated()
            logger.info("%s: %s; continuing at byte %d", self._shard, exn, part.position)
        finally:
            if self._attempts.retries:
                self._download.advanced(retries=self._attempts.retries)

    def _request(self, part: _Part) -> Body:
        """Request the rest of a part."""
        # The origin sends an object of unknown size from its start, even if it is asked for a part.
        expected = self._info if self._info.size is not None else None
        response = self._origin.open(self._shard, part.position, part.stop, expected)
        try:
            if response.info.version != self._info.version:
                raise VersionChangedError(str(self._shard))
            if not self._partial.confirmed:
                if not self._origin.conditional:  # then its response says nothing about the version
                    self._compare_version()
                self._partial.confirm()
        except Exception:
            response.close()
            raise
        return response

    def _compare_version(self) -> None:
        if self._origin.stat(self._shard).version != self._info.version:
            raise VersionChangedError(str(self._shard))

    def _drain(self, response: Body, part: _Part, fd: int) -> None:
        """Receive from one response until its part is complete or the response breaks off.

        Hot path: keep the number of calls small, because all other connections wait for them.
        """
        self._responses.add(response)
        received = 0  # since the last event
        try:
            self._check()  # after that: `_fail` sets the error before it looks at the responses
            if passed := skip(response, part.position):
                self._counters.read(passed, self._counter)
            self._is_proven &= response.proven or part.stop is not None
            buffer, throttle = _buffer.block, self._throttle
            while not part.complete:
                if self._error is not None:
                    raise _FailedError
                length = want = BLOCK if part.stop is None else min(BLOCK, part.stop - part.next)
                if part.next == 0:  # the first bytes early
                    want = min(want, part.filled + max(_EARLY, part.filled))
                if throttle is not None:
                    want = min(want, part.filled + throttle.most)
                count = response.readinto(buffer[part.filled : want])
                self._counters.read(count, self._counter)
                received += count
                part.filled += count
                if part.filled == length or (count == 0 and part.stop is None):
                    self._write(part, buffer[: part.filled], fd)
                    self._download.advanced(received=received, written=self._partial.written)
                    received = 0
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
            self._responses.discard(response)
            response.close()
            if received:
                self._download.advanced(received=received)

    def _write(self, part: _Part, block: memoryview, fd: int) -> None:
        """Store a block, or the last bytes of an object of unknown size, which may be none."""
        if block:
            digest = block_digest(block)
            # An aborted connection delivers bytes that are not the object's: with TLS,
            # ciphertext. A process that resumes the partial would believe them.
            if self._error is not None:
                raise _FailedError
            self._partial.write(part.next, block, fd)
            self._partial.record(part.next // BLOCK, digest, len(block))
        part.end_block()

    def _show(self, part: _Part, block: memoryview, fd: int) -> None:
        """Let readers see the beginning of the shard's first block."""
        if self._info.identifiable:  # or it may begin again as another version
            self._check()
            self._partial.write(0, block, fd)
            self._partial.show(part.filled)
            part.shown = part.filled
            self._download.advanced(written=self._partial.written)

    # -- what the origin states ----------------------------------------------------

    def _start_describing(self) -> None:
        """Request what the origin states about the whole object, during the transfer.

        Not by a helper: all connections may be busy, and nothing else waits for this response.
        """
        with contextlib.suppress(RuntimeError):  # no more threads: then nothing is compared
            self._describer = threads.start(self._describe, "shardcache-checksum")

    def _describe(self) -> None:
        """Request it once: a checksum is one more proof, and not worth a shard that waits."""
        try:
            stated = self._origin.stat(self._shard)
        except VersionChangedError as exn:
            self._fail(exn)
            return
        except (ShardCacheError, TransientError) as exn:
            # Describing may be forbidden, or unknown, where reading is allowed.
            logger.info("%s: no checksum to compare with: %s", self._shard, exn)
            return
        if stated.version == self._info.version:
            self._checksum = stated.checksum or self._checksum
        elif stated.etag or not self._info.etag:  # gateways may state a version only with the bytes
            self._fail(VersionChangedError(str(self._shard)))

    # -- the end -------------------------------------------------------------------

    def _cancel(self) -> None:
        """End all threads, in any thread and also from the garbage collector."""
        try:
            self._download.check()
        except FetchCancelledError as exn:
            self._fail(exn)

    def _fail(self, exn: BaseException) -> None:
        """End all threads with an error, unless another one came first.

        Takes no lock: the garbage collector may call it in a thread that holds one.
        """
        if self._error is None:
            self._error = exn
        for response in self._responses.copy():
            response.abort()

    def _check(self) -> None:
        """Raise if the transfer has failed."""
        if self._error is not None:
            raise _FailedError

    def _sleep(self, seconds: float) -> None:
        """Sleep, unless the transfer fails or the download is cancelled."""
        end = clock.monotonic() + seconds
        while (left := end - clock.monotonic()) > 0:
            clock.sleep(min(left, _NAP))
            self._check()
