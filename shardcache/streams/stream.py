"""The one stream that users read: a shard's bytes, wherever they are.

    FetchSource: the partial up to its watermark --- it ends ---> Opened: the entry's file
             | the cache fails                                       | its disk fails
             '------------> OriginSource, from the same byte on <----'

When a source ends or fails, the stream goes on at its position from the next one, of the same
version. Where there is none, it fails and stays failed: `io.BufferedReader` drops what it holds
when an error passes through it, so that a reader who went on would miss bytes.
"""

from __future__ import annotations

import errno
import io
import os
from typing import TYPE_CHECKING

from shardcache.errors import ShardCacheError
from shardcache.store.digest import BLOCK
from shardcache.store.entry import Opened
from shardcache.streams.sources import FetchSource, OriginSource

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from shardcache.stats.counters import Counters
    from shardcache.streams.opener import Opener
    from shardcache.streams.sources import Source
    from shardcache.urls import ShardURL

__all__ = ["ShardStream"]


class ShardStream(io.RawIOBase):
    """The bytes of one version of a shard; for one thread, as `io.BufferedReader` sees to.

    It begins with ``source``, and closes it; ``opener`` says what comes after one that fails,
    ``counters`` count what is read. Its ``name`` is the local path, or the canonical URL while
    there is none.
    """

    # Here and not in __init__: streams are made by the million, and fail rarely.
    _begun = False  # bytes, or the size, were given: from now on it is this version or none
    _error: Exception | None = None

    def __init__(self, opener: Opener, shard: ShardURL, source: Source, counters: Counters) -> None:
        self.name = source.path or str(shard)
        self._opener = opener
        self._counters = counters
        self._shard = shard
        self._source = source
        self._position = 0

    def wait(self, *, whole: bool) -> None:
        """Wait until there can be bytes, or with ``whole`` all of them; raises as `readinto`."""
        while isinstance(self._source, FetchSource) and self._source.wait(whole=whole):
            self._advance(self._source)

    # -- io --------------------------------------------------------------------

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase.seekable`."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See `io.RawIOBase.readinto`; waits for bytes that are on their way.

        Raises:
            TransferError, IntegrityError, ShardNotFoundError, AccessDeniedError: the origin
                cannot serve it, or no longer this version.
            CacheFullError, LockTimeoutError, OSError: with ``strict`` only.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        while self._error is None:
            source = self._source
            try:
                count = source.readinto(buffer, self._position)
            except (ShardCacheError, OSError) as exn:
                self._replace(exn)
            else:
                if count is not None:
                    if count:
                        self._given(count)
                    return count
                assert isinstance(source, FetchSource)
                self._advance(source)
        raise self._error

    def readall(self) -> bytes:
        """See `io.RawIOBase.readall`; raises as `readinto`."""
        source = self._source
        if isinstance(source, Opened) and self._error is None and not self.closed:  # in one call
            left = max(0, source.size - self._position)
            try:
                data = os.pread(source.file.fileno(), left, self._position)
            except OSError:  # it comes again below, in its place, and is mended there
                data = b""
            if len(data) == left:
                self._given(left)
                return data
        return b"".join(iter(lambda: self.read(BLOCK) or b"", b""))

    def _given(self, count: int) -> None:
        self._position += count
        self._begun = True
        past = isinstance(self._source, OriginSource)
        self._counters.read(count, "bytes_bypassed" if past else "bytes_opened")

    def tell(self) -> int:
        """See `io.IOBase.tell`."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`; from the end it waits until the size is known.

        Raises:
            io.UnsupportedOperation: the origin does not tell the size.
            Whatever `readinto` raises.
        """
        if whence == os.SEEK_CUR:
            position += self._position
        elif whence == os.SEEK_END:
            position += self._size()
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = position
        return position

    def _size(self) -> int:
        while (size := self._source.size) is None:
            if self._error is not None:
                raise self._error
            if not isinstance(self._source, FetchSource):
                raise io.UnsupportedOperation("the origin does not say how long the shard is")
            self._advance(self._source)
        self._begun = True
        return size

    def fileno(self) -> int:
        """See `io.IOBase.fileno`.

        Raises:
            io.UnsupportedOperation: it is not read from a local file, or not yet.
        """
        if not isinstance(self._source, Opened):
            raise io.UnsupportedOperation("the shard is not, or not yet, read from a local file")
        return self._source.file.fileno()

    def close(self) -> None:
        """Let go of the shard: of the entry and its pin, of the fetch, or of the origin."""
        if not self.closed:
            self._source.close()
        super().close()

    # -- from source to source ---------------------------------------------------

    def _advance(self, source: FetchSource) -> None:
        """Let the fetch go on for a moment; read from its entry once that is there."""
        try:
            entry = source.advance(self._position)
        except (ShardCacheError, OSError) as exn:
            self._replace(exn)
        else:
            if entry is not None:
                self._use(entry)

    def _replace(self, fault: ShardCacheError | OSError) -> None:
        """Go on with what comes after a source that failed; raises what cannot be mended."""
        try:
            source, position, begun = self._source, self._position, self._begun
            self._use(self._opener.next_source(self._shard, source, fault, position, begun))
        except Exception as exn:
            self._error = exn
            self._source.close()
            raise

    def _use(self, source: Source) -> None:
        self._source.close()
        self._source = source
        self.name = source.path or self.name
