"""The stream that users read: the bytes of a shard, from the cache or from the origin.

    DownloadReader: the partial up to its watermark --- the end ---> Opened: the entry's file
             | the cache fails                                         | its disk fails
             '------------> OriginReader, from the same byte on <------'

The watermark is the end of the bytes of a partial that may be read. When a reader ends or fails,
the stream continues at the same byte with another reader of the same version. If there is none, it
stays failed: `io.BufferedReader` drops its buffer on an error, so later reads would skip bytes.
"""

from __future__ import annotations

import errno
import io
import os
from typing import TYPE_CHECKING

from shardcache.errors import ShardCacheError
from shardcache.faults import ignoring, os_error
from shardcache.reading.fallback import next_reader
from shardcache.reading.readers import DownloadReader, OriginReader
from shardcache.store.digest import BLOCK
from shardcache.store.entry import Opened

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from shardcache.process import ProcessCache
    from shardcache.reading.readers import Reader
    from shardcache.urls import ShardURL


class ShardStream(io.RawIOBase):
    """A stream of one version of a shard. For one thread at a time, as `io.BufferedReader` ensures.

    Args:
        cache: the cache to read through.
        shard: the shard to read.
        reader: the first reader, which the stream closes.

    Attributes:
        name: the local path, or the canonical URL while there is no local file.
    """

    mode = "rb"
    # Class attributes, because streams are made by the million, and setting these takes time.
    _version_fixed = False  # because bytes or the size were delivered
    _error: Exception | None = None

    def __init__(self, cache: ProcessCache, shard: ShardURL, reader: Reader) -> None:
        self.name = reader.path or str(shard)
        self._cache = cache
        self._counters = cache.counters  # a forked child adds to a copy, which nothing writes
        self._shard = shard
        self._reader = reader
        self._position = 0

    def wait(self, *, whole: bool) -> None:
        """Wait for a partial or, with ``whole``, for the entry. Raises the errors of `readinto`."""
        while self._error is None and isinstance(reader := self._reader, DownloadReader):
            if not reader.wait(whole=whole):
                return
            self._advance(reader)

    # -- io --------------------------------------------------------------------

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase.seekable`."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See `io.RawIOBase.readinto`; waits for bytes that are still being downloaded.

        Raises:
            TransferError, IntegrityError, ShardNotFoundError, AccessDeniedError: the origin
                cannot deliver the shard, or no longer has this version.
            CacheFullError, LockTimeoutError, OSError: with ``strict`` only.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        while self._error is None:
            reader = self._reader
            try:
                count = reader.readinto(buffer, self._position)
            except (ShardCacheError, os_error()) as exn:
                self._replace(exn)
            else:
                if count is not None:
                    self._count_read(count)
                    self._position += count  # last: a signal handler may raise after any call
                    return count
                assert isinstance(reader, DownloadReader)
                self._advance(reader)
        raise self._error

    def readall(self) -> bytes:
        """See `io.RawIOBase.readall`. Raises the errors of `readinto`."""
        reader, data = self._reader, b""
        if isinstance(reader, Opened) and self._error is None and not self.closed:
            left = max(0, reader.size - self._position)  # in one system call, if less than 2 GiB
            with ignoring(OSError):  # `readinto` gets the same error, and falls back
                data = os.pread(reader.file.fileno(), left, self._position)
                self._count_read(len(data))
                self._position += len(data)
            if len(data) == left:
                return data
        return b"".join([data, *iter(lambda: self.read(BLOCK) or b"", b"")])

    def _count_read(self, count: int) -> None:
        self._version_fixed = self._version_fixed or count > 0
        is_past = isinstance(self._reader, OriginReader)
        self._counters.read(count, "bytes_streamed" if is_past else "bytes_opened")

    def tell(self) -> int:
        """See `io.IOBase.tell`."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`; a seek from the end waits until the size is known.

        Raises:
            io.UnsupportedOperation: the origin does not state the size.
            The errors of `readinto`.
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
        self._version_fixed = True
        return size

    def fileno(self) -> int:
        """See `io.IOBase.fileno`.

        Raises:
            io.UnsupportedOperation: the bytes do not come from the file of an entry, or not yet.
        """
        if not isinstance(self._reader, Opened):
            raise io.UnsupportedOperation("the shard is not, or not yet, read from a local file")
        return self._reader.file.fileno()

    def close(self) -> None:
        """Release the entry for eviction, leave the download, or close the connection."""
        if not self.closed:
            if isinstance(self._reader, DownloadReader) and self._error is None:
                self._count_open(self._reader)
            self._reader.close()
        super().close()

    # -- from reader to reader ---------------------------------------------------

    def _advance(self, reader: DownloadReader) -> None:
        """Wait a moment for the download, and switch to its entry once that is published."""
        try:
            entry = reader.advance(self._position)
        except (ShardCacheError, os_error()) as exn:
            self._replace(exn)
        else:
            if entry is not None:
                self._count_open(reader)
                self._use(entry)

    def _count_open(self, reader: DownloadReader) -> None:
        """Count how the shard was obtained. Hits and bypasses are counted elsewhere."""
        self._counters.opened(reader.outcome, reader.waited)

    def _replace(self, fault: ShardCacheError | OSError) -> None:
        """Continue with the reader that replaces the failed one. Raises if there is none."""
        try:
            reader, position, fixed = self._reader, self._position, self._version_fixed
            self._use(next_reader(self._cache, self._shard, reader, fault, position, fixed))
        except (ShardCacheError, os_error()) as exn:
            self._error = exn
            self._reader.close()
            raise

    def _use(self, reader: Reader) -> None:
        failed, self._reader = self._reader, reader
        failed.close()
        self.name = reader.path or self.name
