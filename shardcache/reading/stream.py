"""The one stream that users read: a shard's bytes from the cache or from past it.

    DownloadReader: the partial up to its watermark --- the end ---> Opened: the entry's file
             | the cache fails                                         | its disk fails
             '------------> OriginReader, from the same byte on <------'

When a reader ends or fails, the stream continues at its position with the next reader, of the same
version. If there is none, the stream fails and stays failed: `io.BufferedReader` drops its buffer
when an error passes through it, so that a reader who went on would miss bytes.
"""

from __future__ import annotations

import errno
import io
import os
from typing import TYPE_CHECKING

from shardcache.errors import ShardCacheError
from shardcache.reading.fallback import next_reader
from shardcache.reading.readers import DownloadReader, OriginReader
from shardcache.store.digest import BLOCK
from shardcache.store.entry import Opened

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import WriteableBuffer

    from shardcache.process import Process
    from shardcache.reading.readers import Reader
    from shardcache.stats.counters import Counters
    from shardcache.urls import ShardURL

__all__ = ["ShardStream"]


class ShardStream(io.RawIOBase):
    """The bytes of one version of a shard; for one thread, as `io.BufferedReader` makes sure.

    Args:
        here: returns the calling process's `Process`.
        shard: the shard to read.
        reader: the first reader; the stream closes it.
        counters: those of this process. A forked child continues with a copy that is not written.

    Attributes:
        name: the local path, or the canonical URL while there is none.
    """

    # Here and not in __init__: streams are made by the million, and fail rarely.
    _has_begun = False  # bytes, or the size, were delivered: now it is this version or none
    _error: Exception | None = None

    def __init__(
        self, here: Callable[[], Process], shard: ShardURL, reader: Reader, counters: Counters
    ) -> None:
        self.name = reader.path or str(shard)
        self._here = here
        self._counters = counters
        self._shard = shard
        self._reader = reader
        self._position = 0

    def wait(self, *, whole: bool) -> None:
        """Wait until there can be bytes, or with ``whole`` all of them; raise as `readinto`."""
        while isinstance(self._reader, DownloadReader) and self._reader.wait(whole=whole):
            self._advance(self._reader)

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
                cannot deliver the shard, or no longer this version.
            CacheFullError, LockTimeoutError, OSError: with ``strict`` only.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        while self._error is None:
            reader = self._reader
            try:
                count = reader.readinto(buffer, self._position)
            except (ShardCacheError, OSError) as exn:
                self._replace(exn)
            else:
                if count is not None:
                    if count:
                        self._delivered(count)
                    return count
                assert isinstance(reader, DownloadReader)
                self._advance(reader)
        raise self._error

    def readall(self) -> bytes:
        """See `io.RawIOBase.readall`. Raises the errors of `readinto`."""
        reader = self._reader
        if isinstance(reader, Opened) and self._error is None and not self.closed:  # in one call
            left = max(0, reader.size - self._position)
            try:
                data = os.pread(reader.file.fileno(), left, self._position)
            except OSError:  # `readinto` meets it, too, and falls back
                data = b""
            if len(data) == left:
                self._delivered(left)
                return data
        return b"".join(iter(lambda: self.read(BLOCK) or b"", b""))

    def _delivered(self, count: int) -> None:
        self._position += count
        self._has_begun = True
        is_past = isinstance(self._reader, OriginReader)
        self._counters.read(count, "bytes_bypassed" if is_past else "bytes_opened")

    def tell(self) -> int:
        """See `io.IOBase.tell`."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`; from the end, it waits until the size is known.

        Raises:
            io.UnsupportedOperation: the origin does not state the size.
            As `readinto`.
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
        while (size := self._reader.size) is None:
            if self._error is not None:
                raise self._error
            if not isinstance(self._reader, DownloadReader):
                raise io.UnsupportedOperation("the origin does not say how long the shard is")
            self._advance(self._reader)
        self._has_begun = True
        return size

    def fileno(self) -> int:
        """See `io.IOBase.fileno`.

        Raises:
            io.UnsupportedOperation: the shard is not, or not yet, read from a local file.
        """
        if not isinstance(self._reader, Opened):
            raise io.UnsupportedOperation("the shard is not, or not yet, read from a local file")
        return self._reader.file.fileno()

    def close(self) -> None:
        """Release the entry and its pin, leave the download, or close the connection."""
        if not self.closed:
            if isinstance(self._reader, DownloadReader) and self._error is None:
                self._count_open(self._reader)
            self._reader.close()
        super().close()

    # -- from reader to reader ---------------------------------------------------

    def _advance(self, reader: DownloadReader) -> None:
        """Let the download continue for a moment; read its entry once there is one."""
        try:
            entry = reader.advance(self._position)
        except (ShardCacheError, OSError) as exn:
            self._replace(exn)
        else:
            if entry is not None:
                self._count_open(reader)
                self._use(entry)

    def _count_open(self, reader: DownloadReader) -> None:
        """Count how the shard was obtained. Hits and shards past the cache are counted already."""
        self._counters.opened(reader.outcome, reader.waited)

    def _replace(self, fault: ShardCacheError | OSError) -> None:
        """Continue with the reader that replaces one that failed. Raises if there is none."""
        try:
            reader, position, begun = self._reader, self._position, self._has_begun
            self._use(next_reader(self._here, self._shard, reader, fault, position, begun))
        except Exception as exn:
            self._error = exn
            self._reader.close()
            raise

    def _use(self, reader: Reader) -> None:
        self._reader.close()
        self._reader = reader
        self.name = reader.path or self.name
