"""Reading a shard without storing it: what remains when the cache cannot help.

`OriginStream` reads one version of an object to its end, with the same pinning and
the same retries as a fetch. Errors heal inside: the reader sees one only when the
origin is really gone. It may begin in the middle, where a cached file failed, and
then insists on the version of that file.

`NearStream` reads a copy in an upstream instead, and checks it as a fetch does.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, TypeVar

from shardcache.clock import Clock
from shardcache.errors import IntegrityError, ShardCacheError, TransferError
from shardcache.fetch.blocks import Pace, skip
from shardcache.origins.base import Body, ObjectInfo, Origin, TransientError, VersionChangedError
from shardcache.origins.retry import RetryPolicy
from shardcache.store.digest import BLOCK, block_digest, tree_digest
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import WriteableBuffer

    from shardcache.origins.upstream import UpstreamOrigin

__all__ = []


T = TypeVar("T")

__all__ = ["NearStream", "OriginStream", "open_stream"]

#: WebDataset reads 10 KiB at a time; a buffer of this size keeps that from
#: becoming one system call each.
_BUFFER = 1 << 18


class OriginStream(io.RawIOBase):
    """A shard as it arrives; not seekable, for one thread.

    Args:
        origin: where from.
        url: which shard.
        policy: retries; the deadline counts from here.
        clock: time.
        timeout: seconds without enough bytes before a request is repeated.
        start: offset of the first byte.
        pin: the version to insist on.
        version: its name (`ObjectInfo.version`), where no more is known of it.
        answer: what the origin has sent already, from the first byte on.

    Attributes:
        gave: called when it is closed, with how many bytes were read.

    Raises:
        As `origin.Origin.open`, and TransferError after all retries, or if the
        object is no longer the version asked for.
    """

    def __init__(
        self,
        origin: Origin,
        url: ShardURL,
        policy: RetryPolicy,
        clock: Clock,
        timeout: float,
        *,
        start: int = 0,
        pin: ObjectInfo | None = None,
        version: str | None = None,
        answer: Body | None = None,
    ) -> None:
        super().__init__()
        self.gave: Callable[[int], None] | None = None
        self._origin = origin
        self._url = url
        self._clock = clock
        self._start = start
        self._timeout = timeout
        self._attempts = policy.started(str(url))
        self._position = start
        self._error: ShardCacheError | None = None
        self._over = False  # of an object of unknown size: its end was met
        self._body = answer  # first: a stream that fails here is closed too
        try:
            if answer is not None:
                self._info = answer.info
            elif pin is None:
                self._body = self._call(lambda: self._begin(version))
                self._info = self._body.info
            else:
                self._info = pin
                self._insist(pin, pin.version)
                self._body = self._call(self._reopen)
        except VersionChangedError as exn:
            raise self._replaced(version or (pin.version if pin else "")) from exn
        self._pace = Pace(clock, timeout, self._attempts)

    @property
    def info(self) -> ObjectInfo:
        """The version that is read."""
        return self._info

    @property
    def name(self) -> str:
        """The shard's canonical URL, as tarfile shows it in its errors."""
        return str(self._url)

    def _call(self, function: Callable[[], T]) -> T:
        return self._attempts.call(function, sleep=self._clock.sleep)

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """See `io.RawIOBase.readinto`.

        An error is final: `io.BufferedReader` drops what it holds when one passes through it, so
        that a reader who went on would miss bytes.

        Raises:
            TransferError: the origin is gone, or the object changed under us.
            IntegrityError: a copy in an upstream is damaged; another read asks the origin.
        """
        view = memoryview(buffer).cast("B")
        if self._error is not None:
            raise self._error
        try:
            return self._fill(view) if view else 0
        except ShardCacheError as exn:
            self._error = exn
            raise

    def _fill(self, view: memoryview) -> int:
        if self._ended():
            return 0
        self._pace.wake()
        try:
            count = self._call(lambda: self._attempt(view))
            if not self._origin.pins and self._position + count in (
                self._info.size,
                self._position,
            ):
                self._call(self._compare)  # before the last bytes are believed
        except VersionChangedError as exn:
            raise self._replaced(self._info.version) from exn
        self._position += count
        self._over = count == 0 and self._info.size is None
        self._ended()
        return count

    def _ended(self) -> bool:
        """Whether all was read; then the connection is given back.

        By the reader, and not when the stream is closed: see `origins.http.RangeBody.close`.
        """
        ended = self._over or self._position == self._info.size
        if ended:
            self._drop()
        return ended

    def _insist(self, info: ObjectInfo, version: str) -> None:
        # Two answers that cannot be told apart may be of two versions.
        if info.version != version or not info.identifiable:
            raise VersionChangedError(str(self._url))

    def _replaced(self, version: str) -> TransferError:
        return TransferError(
            f"{self._url} was replaced while it was streamed; the bytes read so far are of "
            f"the old version ({version}). Read the shard again.",
            url=str(self._url),
            version=version,
        )

    def _begin(self, version: str | None) -> Body:
        body = self._origin.open(self._url, self._position, None)
        try:
            if version is not None:
                self._insist(body.info, version)
            skip(body, self._position)
        except Exception:
            body.close()
            raise
        return body

    def _attempt(self, view: memoryview) -> int:
        try:
            if self._body is not None and self._position == self._body.stop:
                self._drop()  # it was a part
            if self._body is None:
                self._body = self._reopen()
            count = self._body.readinto(view)
            self._pace.check(count)
        except TransientError:
            self._drop()
            raise
        return count

    def _reopen(self) -> Body:
        if self._position and not self._info.identifiable:
            raise VersionChangedError(str(self._url))  # the rest may be of another version
        if not self._origin.pins:
            self._compare()
        pin = self._info if self._info.size is not None else None
        body = self._origin.open(self._url, self._position, None, pin)
        try:
            if body.info.version != self._info.version:
                raise VersionChangedError(str(self._url))
            skip(body, self._position)
        except Exception:
            body.close()
            raise
        self._pace = Pace(self._clock, self._timeout, self._attempts)
        return body

    def _compare(self) -> None:
        if self._origin.stat(self._url).version != self._info.version:
            raise VersionChangedError(str(self._url))

    def _drop(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()

    def close(self) -> None:
        """Give the connection back."""
        if not self.closed:
            self._drop()
            gave, self.gave = self.gave, None
            if gave is not None:
                gave(self._position - self._start)
        super().close()


class NearStream(OriginStream):
    """A shard as an upstream has it, block by block; the last one when all of it was checked.

    Where the upstream fails on the way, and its copy is known to be of the origin's version,
    the rest comes from there.

    Args:
        near: the shard in an upstream.
        beyond: its origin.
        url: which shard.
        policy: retries, for either.
        clock: time.
        timeout: seconds without enough bytes before a request is repeated.

    Raises:
        As `OriginStream`.
    """

    def __init__(
        self,
        near: UpstreamOrigin,
        beyond: Origin,
        url: ShardURL,
        policy: RetryPolicy,
        clock: Clock,
        timeout: float,
    ) -> None:
        self._near = near
        self._beyond = beyond
        self._policy = policy
        self._digests: list[bytes] = []
        self._block = memoryview(b"")
        self._checked = False
        super().__init__(near, url, policy, clock, timeout)

    def _fill(self, view: memoryview) -> int:
        if not self._block:
            self._block = self._next_block()
        count = min(len(view), len(self._block))
        view[:count], self._block = self._block[:count], self._block[count:]
        return count

    def _next_block(self) -> memoryview:
        block = memoryview(bytearray(BLOCK))
        filled = 0
        while filled < BLOCK and (count := self._read(block[filled:])):
            filled += count
        if filled:
            self._digests.append(block_digest(block[:filled]))
        if self._position == self._info.size and not self._checked:
            self._check()
            self._checked = True
        return block[:filled]

    def _read(self, view: memoryview) -> int:
        try:
            return super()._fill(view)
        except TransferError:
            if self._origin is not self._near or self._near.digest is None:
                raise
        self._drop()
        self._origin = self._beyond
        self._attempts = self._policy.started(str(self._url))
        return super()._fill(view)

    def _check(self) -> None:
        if self._near.digest in (None, tree_digest(self._digests)):
            return
        self._near.distrust()
        raise IntegrityError(
            f"{self._url}: its copy in {self._near.name} is damaged, which was seen when all of it "
            "had been read. Read it again: it will come from elsewhere.",
            url=str(self._url),
        )


def open_stream(
    origin: Origin, url: ShardURL, policy: RetryPolicy, clock: Clock, timeout: float
) -> io.BufferedReader:
    """A buffered `OriginStream`; raises as it does."""
    return io.BufferedReader(OriginStream(origin, url, policy, clock, timeout), _BUFFER)
