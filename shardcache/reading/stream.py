"""Open a shard, and the stream that users read: its bytes from the cache or from the origin.

    look for the entry ----- the disk cannot be read ---------> OriginReader
      | miss           `---- hit ----> Opened, the entry's file     ^  ^
      v                                 ^       |                   |  |
    DownloadReader: the partial up to   |       '--- its disk fails-'  |
    its watermark ---- the end ---------'                              |
          '---- the cache fails ---------------------------------------'

The watermark is the end of the bytes of a partial that may be read. When a reader ends or fails,
the stream continues at the same byte with another reader of the same version. If there is none, it
stays failed: `io.BufferedReader` drops its buffer on an error, so later reads would skip bytes.

With ``strict``, the cache is never bypassed, and its faults are raised. The same holds for
`pin_shard`, whose caller needs a local path.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from typing import TYPE_CHECKING, BinaryIO

from shardcache import clock
from shardcache.download.download import Download
from shardcache.errors import LockTimeoutError, ShardCacheError, ShardNotFoundError
from shardcache.faults import os_error
from shardcache.files import is_file
from shardcache.process import ProcessCache
from shardcache.reading.fallback import next_reader, read_nearest, read_past
from shardcache.reading.readers import DownloadReader, OriginReader
from shardcache.store.digest import BLOCK
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Opened
from shardcache.urls import ShardURL, advise_scheme, unexpanded

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from shardcache.reading.readers import Reader

logger = logging.getLogger(__name__)

#: Seconds between attempts to pin an entry while a stopped process is about to evict it.
_STUCK_POLL = 0.25
#: Bytes of a stream's buffer. WebDataset reads 10 KiB at a time, and with Python's default buffer
#: each read would be a system call.
BUFFER = 1 << 18


def open_shard(
    cache: ProcessCache,
    shard: ShardURL,
    *,
    finish: bool = True,
    whole: bool = False,
    ahead: Opened | DownloadReader | None = None,
) -> BinaryIO:
    """Return a stream of the shard.

    Args:
        finish: whether to complete a download even if the stream is closed earlier.
        whole: whether to wait until the shard is complete, even with ``fill="follow"``. Then the
            stream has a descriptor (``fileno``), unless it bypasses the cache.
        ahead: an entry or a download that a look-ahead began; the stream takes it over.

    Raises the errors of `Cache.open`.
    """
    if shard.scheme == "file" and cache.is_in_place(shard):
        return _open_in_place(shard)
    started = clock.monotonic()
    if isinstance(ahead, DownloadReader) and not ahead.attend():
        ahead.close()
        ahead = None
    opened = ahead if isinstance(ahead, Opened) else None
    try:
        if ahead is None:
            directories = cache.directories
            if directories is None or cache.disk.reading.faults:
                opened = cache.lookup(shard)
            else:  # hot path: keep the number of calls small
                try:
                    opened = directories.open(shard.key, shard.basename)
                except (DamagedError, os_error()):
                    opened = cache.lookup(shard)
        reader = opened or ahead or DownloadReader(cache, shard, finish=finish)
    except (ShardCacheError, os_error()) as exn:
        return _buffered(cache, shard, read_past(cache, shard, exn))
    if opened is None:
        return _buffered(cache, shard, reader, whole=whole)
    stream = ShardStream(cache, shard, reader)
    cache.touch(opened, started)
    tiers = cache.tiers
    tier = tiers.index(cache.tier_of(opened.directory)) if len(tiers) > 1 else None
    cache.counters.opened("hit", clock.monotonic() - started, tier)
    if logger.isEnabledFor(logging.DEBUG):
        facts = {"event": "hit", "shard": str(shard), "bytes": opened.size}
        logger.debug("%s: hit", shard, extra=facts)
    return io.BufferedReader(stream, BUFFER)


def _buffered(
    cache: ProcessCache, shard: ShardURL, reader: Reader, *, whole: bool = False
) -> BinaryIO:
    stream = ShardStream(cache, shard, reader)
    stream.wait(whole=whole or cache.config.fill == "complete")
    return io.BufferedReader(stream, BUFFER)


def stream_file(cache: ProcessCache, file: ShardURL) -> BinaryIO:
    """Return a stream of a file without storing it. Raises the errors of `Cache.open`."""
    return _buffered(cache, file, read_nearest(cache, file))


def pin_shard(cache: ProcessCache, shard: ShardURL) -> Opened:
    """Return an entry that stays at its path until closed; see `ProcessCache.obtain`."""
    started = clock.monotonic()
    while True:
        opened = cache.obtain(download := Download(cache.downloads, shard))
        waited = clock.monotonic() - started
        if not opened.stuck and is_file(opened.path, opened.fd):
            cache.counters.opened(download.outcome, waited)
            cache.counters.read(opened.size)  # assume that the caller reads the whole file
            return opened
        opened.close()  # the entry was evicted before it was pinned, or is being evicted
        if opened.stuck:
            if waited >= cache.config.lock_timeout:
                raise LockTimeoutError(
                    f"{shard} is being evicted by a process that does not continue. Look for "
                    "one that is stopped, or read the shard with open().",
                    url=str(shard),
                )
            clock.sleep(_STUCK_POLL)


def _open_in_place(shard: ShardURL) -> BinaryIO:
    path = str(shard.local_path)
    try:
        return open(path, "rb")
    except FileNotFoundError as exn:
        raise unexpanded(shard) or ShardNotFoundError(
            f"{path} does not exist. {advise_scheme(shard, 'Check the pattern.')}", url=str(shard)
        ) from exn


class ShardStream(io.RawIOBase):
    """A stream of one version of a shard. For one thread at a time, as `io.BufferedReader` ensures.

    Its ``name`` is the local path, or the canonical URL while there is no local file.
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
            try:
                data = os.pread(reader.file.fileno(), left, self._position)
            except os_error() as exn:
                self._replace(exn)
            else:
                self._version_fixed = self._version_fixed or bool(data)
                self._counters.read(len(data))
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

        Raises io.UnsupportedOperation if the origin does not state it, and as `readinto`.
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
        """See `io.IOBase.fileno`; UnsupportedOperation while no entry is read."""
        if not isinstance(self._reader, Opened):
            raise io.UnsupportedOperation("the shard is not, or not yet, read from a local file")
        return self._reader.file.fileno()

    def close(self) -> None:
        """Release the entry for eviction, leave the download, or close the connection."""
        if not self.closed:
            reader = self._reader
            if isinstance(reader, DownloadReader) and self._error is None:
                self._counters.opened(reader.outcome, reader.waited)
            reader.close()
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
                self._counters.opened(reader.outcome, reader.waited)
                self._use(entry)

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
