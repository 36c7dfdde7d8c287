"""Receive one version of an object into a partial, part by part.

    response -> size, version -> parts, first in, first out -> the worker and helpers
    part -> requests, one after the other until it is complete -> blocks of 1 MiB
    block: received -> hashed while it is in the processor's cache -> written -> recorded

The response to the first request states size and version, and delivers the first part. The worker
of the download receives parts itself, so small shards need no other thread; helper threads of
`connections` receive others. Each connection needs one block of memory, for a shard of any size.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import sys
import threading
from dataclasses import dataclass, field

from shardcache import clock, threads
from shardcache.clock import boot_id
from shardcache.config import Config
from shardcache.download.connections import Connections, PartQueue
from shardcache.download.download import Download
from shardcache.errors import CacheFullError, IntegrityError, ShardCacheError, UnprovenError
from shardcache.faults import is_local_error
from shardcache.notices import Notices
from shardcache.origins.base import (
    Body,
    Checksum,
    ObjectInfo,
    Origin,
    TransientError,
    VersionChangedError,
    compare_version,
    skip,
)
from shardcache.origins.resolve import Origins
from shardcache.origins.retry import Retries, RetryLimits, try_once
from shardcache.stats.counters import Counters
from shardcache.store.digest import BLOCK, MismatchError, block_digest, compare, tree_digest
from shardcache.store.directory import Metadata
from shardcache.store.partial import Partial
from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)

#: Bytes, about one sample, that readers get before the first block of a shard is complete.
_EARLY = 128 * 1024
#: Seconds that a complete shard waits for the origin's checksum, which is an additional proof.
_LAST_RESPONSE = 5.0
#: Seconds that the worker of a failed transfer waits for its helpers to end.
_END_TIMEOUT = 5.0
#: Number of folders whose largest shard is remembered.
_FOLDERS = 256


@dataclass(eq=False, repr=False)
class Resources:
    """The parts of a process that all its transfers share."""

    config: Config
    retry_limits: RetryLimits
    counters: Counters
    connections: Connections
    origins: Origins
    notices: Notices
    _largest: dict[str, int] = field(default_factory=dict)  # size of the largest shard, by folder

    def likely_size(self, download: Download) -> int | None:
        """Return the listed or probable size of a shard, or None if nothing is known about it."""
        if download.listed is not None:
            return download.listed
        return self._largest.get(download.shard.canonical.rpartition("/")[0])

    def learn_size(self, shard: ShardURL, size: int | None) -> None:
        """Note the size of a shard; None if its origin does not state it."""
        folder = shard.canonical.rpartition("/")[0]
        known = self._largest.get(folder, 0)
        if len(self._largest) >= _FOLDERS and not known:
            self._largest.clear()
        self._largest[folder] = max(known, sys.maxsize if size is None else size)


class CopyError(MismatchError):
    """The bytes, at least some of them from an upstream, do not have the digest that it states."""


class _FailedError(Exception):
    """Another thread of the same transfer has failed."""


class _Buffers(threading.local):
    """The blocks of memory of a thread; those in the cache of another core are slower than new."""

    def __init__(self) -> None:
        self.free: list[memoryview] = []


_buffers = _Buffers()


class _Part:
    """A range of bytes of the object, and how much of the range has arrived."""

    __slots__ = ("buffer", "complete", "filled", "position", "shown", "stop")

    def __init__(self, start: int, stop: int | None) -> None:
        self.position = start  # offset of the next byte to receive
        self.stop = stop  # None for an object of unknown size
        self.filled = 0  # bytes of the current block, which are in the buffer
        self.shown = 0  # bytes of an incomplete first block that readers may see
        self.complete = start == stop
        length = BLOCK if stop is None else min(BLOCK, stop - start)
        if _buffers.free:
            self.buffer = _buffers.free.pop()
        elif length < BLOCK:
            self.buffer = memoryview(bytearray(length))
        else:  # the allocator would keep a block that a thread frees, in an arena of that thread
            self.buffer = memoryview(mmap.mmap(-1, BLOCK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def add(self, count: int) -> None:
        """Note bytes that were received into the buffer."""
        self.filled += count
        self.position += count

    def note_shown(self) -> None:
        self.shown = self.filled

    def note_written(self) -> None:
        """Begin with the next block. If the size is unknown, a short block is the last one."""
        is_last = self.filled < BLOCK if self.stop is None else self.position == self.stop
        self.complete, self.filled = is_last, 0

    def restart(self) -> None:
        self.position = self.filled = self.shown = 0


class Transfer:
    """Receives one version of an object. Used once, by the thread that made it.

    The ``retries`` are those of the download.
    """

    def __init__(
        self, resources: Resources, download: Download, origin: Origin, retries: Retries
    ) -> None:
        self._resources, self._download, self._origin = resources, download, origin
        self._shard = download.shard
        self._retries = retries
        self._counter = "bytes_upstream" if origin.upstream else "bytes_origin"
        self._partial: Partial  # from `receive`, as is `_info`
        self._info: ObjectInfo
        self._first: Body | None = None  # the first response
        self._is_whole = False  # whether the first request asked for the whole object
        self._is_proven = True  # by the origin's responses: no bytes are missing
        self._error: BaseException | None = None  # the first error, which ends all threads
        self._responses: set[Body] = set()  # the responses that threads are receiving
        self._checksum_thread: threading.Thread | None = None
        self._queue = PartQueue(self._help)

    # -- the worker ----------------------------------------------------------------

    def begin(self, *, whole: bool) -> ObjectInfo:
        """Request the first part, or the ``whole`` object; return the version of the object.

        The response to a request for all of a large object is cut off after one part. Raises
        UnprovenError if nothing would show that all bytes came.
        """
        self._is_whole = whole
        self._first = self._retries.call(self._request_first, sleep=self._download.sleep)
        info = self._first.info
        self._is_proven = self._first.proven or self._first.stop is not None
        self._resources.learn_size(self._shard, info.size)
        self._download.check()
        self._check_proof(info.checksum)
        return info

    def receive(self, received: Partial) -> None:
        """Receive the missing bytes, over the caller's connection and those of helpers."""
        self._partial, self._info = received, received.metadata.info
        self._checksum = self._info.checksum  # of the object, as the origin states it
        self._download.note_running(received, bool(self._origin.upstream), self._fail)
        lead = self._queue_parts()
        try:
            self._download.check()  # `_fail` is not called for an earlier `cancel`
            # The response to a request for a whole object states the checksum.
            if self._origin.states_checksums and not self._is_whole:
                # Not a helper, which would first need a connection.
                with contextlib.suppress(threads.NoThreadError):  # then without checksum
                    self._checksum_thread = threads.start(
                        self._request_checksum, "shardcache-checksum"
                    )
            if self._queue.parts:
                self._resources.connections.offer(self._queue)
            fd = received.fd  # stays open, because only this thread closes the partial
            if lead is not None:
                self._receive(lead, fd)
            while self._queue.parts and (part := self._resources.connections.take(self._queue)):
                self._receive(_Part(part.start, part.stop), fd)
        except _FailedError:
            logger.debug("%s: another thread failed", self._shard)
        except BaseException as exn:
            self._fail(exn)  # before a helper gets the connection and sends another request
            raise

    def finish(self) -> Metadata:
        """Wait for the helpers, check the shard, and return its metadata, or raise the error."""
        self._resources.connections.end(self._queue)
        end = min(clock.monotonic() + _LAST_RESPONSE, self._retries.end or math.inf)
        thread = self._checksum_thread
        while thread and thread.is_alive() and not self._error and clock.monotonic() < end:
            thread.join(0.1)
        if self._error is not None:
            raise self._error
        received = self._partial
        if not (self._origin.proves_version and received.confirmed):
            version = self._origin, self._shard, self._info
            self._retries.call(lambda: compare_version(*version), sleep=self._download.sleep)
        size, digests = received.written, received.digests
        if len(digests) != -(-size // BLOCK) or self._info.size not in (None, size):
            raise IntegrityError(  # should be impossible; checked so that no gap is ever published
                f"{self._shard}: {size} of {self._info.size} bytes arrived, in pieces. "
                "Please report this.",
                url=str(self._shard),
            )
        checked = self._checksum and compare(received.fd, self._checksum)
        self._check_proof(checked)
        digest, stated = tree_digest(b"".join(digests)), received.metadata.digest
        if stated not in ("", digest):
            raise CopyError(Checksum("xxh3-128", stated), digest)
        now, boot = clock.time(), boot_id()
        return received.metadata._replace(
            size=size, digest=digest, checked=checked, fetched_at=now, boot=boot
        )

    def abandon(self, exn: BaseException, partial: Partial | None) -> None:
        """End all threads, and close the partial, or discard it if its bytes are useless.

        If the shard cannot be stored, a reader streams the first response.
        """
        self._fail(exn)
        self._download.note_retries(self._retries.retries)  # also those of the first request
        if (first := self._take_first()) is not None:
            is_refused = is_local_error(exn) or isinstance(exn, (CacheFullError, UnprovenError))
            if is_refused and not self._origin.upstream:
                self._download.keep(first)
            else:
                first.close()
        # If an upstream has another version, the origin may still have that of the partial.
        is_useless = isinstance(exn, (MismatchError, IntegrityError)) or (
            isinstance(exn, VersionChangedError) and not self._origin.upstream
        )
        try:
            self._resources.connections.end(self._queue, _END_TIMEOUT)
        finally:  # release the partial's lock even if the wait is interrupted
            if partial is not None:
                if is_useless or is_local_error(exn) or not partial.resumable:
                    partial.discard()
                else:
                    partial.close()
            # A helper may still be in a request. Without the traceback, there is no cycle.
            self._error = _FailedError()

    def _check_proof(self, checked: Checksum | str | None) -> None:
        """Raise UnprovenError if neither the responses nor a checksum show that all bytes came."""
        if not (self._is_proven or checked):
            text = "the response has no length and ends with the connection, so it may be "
            text += "incomplete. Let the server send a Content-Length"
            raise UnprovenError(f"{self._shard}: {text}.", url=str(self._shard))

    # -- parts -------------------------------------------------------------------

    def _take_first(self) -> Body | None:
        """Return the first response, which the caller must close; None if there is none."""
        first, self._first = self._first, None
        return first

    def _request_first(self) -> Body:
        origin, shard, part = self._origin, self._shard, self._resources.connections.part
        response = origin.open(shard, 0, None if self._is_whole else part)
        self._resources.connections.answered(response.waited)
        info = response.info
        is_single = info.size is None or not info.identifiable
        if is_single and response.stop not in (None, info.size):
            # Two parts could not be compared, so one response must have all bytes.
            response.close()
            response, self._is_whole = origin.open(shard, 0, None), True
        return response

    def _queue_parts(self) -> _Part | None:
        """Queue all missing parts, except the one that the first response delivers; return that."""
        first, size, length = self._first, self._info.size, self._resources.connections.part
        if first is None:
            lead, missing = None, self._partial.gaps()
        elif size is None or first.stop is None:  # the response has the whole object
            lead, missing = _Part(0, first.stop), iter(())
        else:
            if self._is_whole and self._info.identifiable:
                stop = min(size, length)  # other connections fetch the rest
            else:  # the response may be shorter; the next part begins with a whole block
                stop = min(-(-first.stop // BLOCK) * BLOCK, size)
            lead, missing = _Part(0, stop), iter([(stop, size)])
        for start, stop in missing:
            for at in range(start, stop, length):
                self._queue.parts.append(range(at, min(stop, at + length)))
        return lead

    def _help(self, part: range) -> None:
        try:
            self._check()
            # When the transfer fails, the worker closes the partial, and the number of its
            # descriptor may then belong to another file.
            with self._partial.handle() as file:
                self._receive(_Part(part.start, part.stop), file.fileno())
        except BaseException as exn:  # noqa: BLE001 - the worker raises the first one
            self._fail(exn)

    def _receive(self, part: _Part, fd: int) -> None:
        """Receive one part with as many consecutive requests as necessary."""
        while not part.complete:
            self._retries.call(lambda: self._request_part(part, fd), sleep=self._sleep)
        if len(part.buffer) == BLOCK:
            _buffers.free.append(part.buffer)
        if part.position == 0 and (unused := self._take_first()) is not None:  # an empty object
            unused.close()

    def _request_part(self, part: _Part, fd: int) -> None:
        before = part.position
        response = self._take_first() if before == 0 else None
        try:
            self._drain(response or self._request(part), part, fd)
        except TransientError as exn:
            self._check()
            if not self._info.identifiable:
                # The next response may be of another version, so all bytes are received again.
                self._partial.restart()
                part.restart()
                raise
            if not self._retries.note_progress(part.position - before):
                raise
            logger.info("%s: %s; continuing at byte %d", self._shard, exn, part.position)
        finally:
            if self._retries.retries:
                self._download.note_retries(self._retries.retries)

    def _request(self, part: _Part) -> Body:
        """Send a request for the rest of a part, and return the response."""
        # An object of unknown size is always sent from its start.
        expected = self._info if self._info.size is not None else None
        response = self._origin.open(self._shard, part.position, part.stop, expected)
        try:
            self._resources.connections.answered(response.waited)
            if not response.info.is_of(self._info.version, self._info.size):
                raise VersionChangedError(str(self._shard))
            if not self._partial.confirmed:
                if not self._origin.proves_version:  # the response does not prove the version
                    compare_version(self._origin, self._shard, self._info)
                self._partial.confirm()
        except Exception:
            response.close()
            raise
        return response

    def _drain(self, response: Body, part: _Part, fd: int) -> None:
        """Receive bytes from a response until the part is complete or the connection fails.

        Hot path: calls delay the threads of all connections.
        """
        self._responses.add(response)
        received = 0  # bytes since the last event
        try:
            if response.start != part.position:
                self._check()
                self._resources.counters.read(skip(response, part.position), self._counter)
            self._is_proven &= response.proven or part.stop is not None
            throttle, begun = self._download.throttle, part.position
            while not part.complete:
                # After `add`, because `_fail` sets the error first and then aborts the responses.
                if self._error is not None:
                    raise _FailedError
                at = part.position - part.filled  # offset of the block
                length = want = BLOCK if part.stop is None else min(BLOCK, part.stop - at)
                if at == 0 and self._download.is_followed:  # receive less, to show it early
                    want = min(want, part.filled + max(_EARLY, part.filled))
                if throttle is not None:
                    want = min(want, part.filled + throttle.most)
                count = response.readinto(part.buffer[part.filled : want])
                part.add(count)
                self._resources.counters.read(count, self._counter)
                received += count
                if part.filled == length or (count == 0 and part.stop is None):
                    self._write(part, fd)
                    self._download.note_bytes(received, self._partial)
                    received = 0
                elif count == 0 and begun < part.position == response.stop:
                    return  # the response had fewer bytes than the request asked for
                elif count == 0:
                    raise TransientError("the origin ended early")
                elif at == 0 and part.filled >= part.shown + _EARLY and self._info.identifiable:
                    # A transfer without a version may restart with another one.
                    self._check()
                    self._partial.write(0, part.buffer[: part.filled], fd)
                    self._partial.show(part.filled)
                    part.note_shown()
                    self._download.note_bytes(0, self._partial)
                if self._retries.end is not None and not part.complete:
                    self._retries.check()
                if throttle is not None and (seconds := throttle.spend(count)):
                    self._sleep(seconds)
                    self._retries.extend(seconds / len(self._responses))  # which all wait
        finally:
            self._responses.discard(response)
            response.close()
            if received:
                self._download.note_bytes(received)

    def _write(self, part: _Part, fd: int) -> None:
        """Hash, write and record a block. It may be empty at the end of the object."""
        at, block = part.position - part.filled, part.buffer[: part.filled]
        if block:
            digest = block_digest(block)
            self._check()  # after an abort, the buffer may hold other bytes than the object's
            self._partial.write(at, block, fd)
            self._partial.record(at // BLOCK, digest, len(block))
        part.note_written()

    # -- the origin's checksum -------------------------------------------------------

    def _request_checksum(self) -> None:
        """Request the checksum, without retries: it is not worth delaying a complete shard."""
        try:
            info = try_once(str(self._shard), lambda: self._origin.stat(self._shard))
            if info.is_of(self._info.version, self._info.size):
                self._checksum = info.checksum or self._checksum
                self._partial.confirm()
            elif info.etag or not self._info.etag:  # some gateways omit the ETag from this response
                raise VersionChangedError(str(self._shard))
        except VersionChangedError as exn:
            self._fail(exn)
        except ShardCacheError as exn:
            logger.info("%s: no checksum to compare with: %s", self._shard, exn)

    # -- the end -------------------------------------------------------------------

    def _fail(self, exn: BaseException) -> None:
        """End all threads with the first error. Takes no lock: the garbage collector may cancel."""
        if self._error is None:
            self._error = exn
        for response in self._responses.copy():
            response.abort()

    def _check(self) -> None:
        if self._error is not None:
            raise _FailedError

    def _sleep(self, seconds: float) -> None:
        clock.nap(seconds, self._check)
