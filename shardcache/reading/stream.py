"""Open a shard, and the stream that users read: its bytes from the cache or from the origin.

A hit is read from its entry. A miss is read from the partial of its download, up to the watermark,
and then from the entry. When a reader fails, another one continues at the same byte:

    failed     replacement
    entry      the entry, reopened once if its handle is stale; otherwise an upstream or the origin
    download   an upstream or the origin, bypassing the cache
    upstream   the next upstream that has the version, or the origin (`OriginReader`)
    origin     none, so the user gets the error

Once bytes were delivered, the rest must be of the same version. A stream without a replacement
stays failed: `io.BufferedReader` drops its buffer on an error, so later reads would skip bytes.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from shardcache import clock
from shardcache.download.download import Download
from shardcache.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
    UnprovenError,
)
from shardcache.faults import (
    PausedError,
    fault_kind,
    ignoring,
    is_disk_fault,
    is_local_error,
    system_error,
)
from shardcache.files import is_file
from shardcache.layout import OUTDATED
from shardcache.process import ProcessCache
from shardcache.reading.readers import DownloadReader, OriginReader
from shardcache.store.digest import BLOCK
from shardcache.store.directory import DamagedError
from shardcache.store.entry import OpenEntry, open_data, set_aside
from shardcache.store.root import UnusableError
from shardcache.urls import ShardURL, advise_scheme, unexpanded

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from shardcache.reading.readers import Reader, Version

logger = logging.getLogger(__name__)

#: Seconds between attempts to pin an entry while a stopped process is about to evict it.
_STUCK_POLL = 0.25
#: Bytes of a stream's buffer. WebDataset reads 10 KiB at a time, and with Python's default buffer
#: each read would be a system call.
BUFFER = 1 << 18
#: The counter of an error. The first class in the error's MRO that is listed here decides.
_COUNTERS = {
    CacheFullError: "streamed_full",
    LockTimeoutError: "errors_lock",
    IntegrityError: "errors_integrity",
    FetchCancelledError: None,
    UnprovenError: None,
    ShardCacheError: "errors_origin",
    PausedError: None,
    UnusableError: "errors_disk",
    OSError: "errors_disk",
}


def open_shard(
    process: ProcessCache,
    shard: ShardURL,
    *,
    finish: bool = True,
    complete: bool = False,
    ahead: OpenEntry | DownloadReader | None = None,
) -> BinaryIO:
    """Return a stream of the shard.

    Args:
        finish: whether to complete a download even if the stream is closed earlier.
        complete: whether to wait until the shard is complete, even with ``fill="follow"``. Then the
            stream has a descriptor (``fileno``), unless it bypasses the cache.
        ahead: an entry or a download that a look-ahead began; the stream takes it over.

    Raises the errors of `Cache.open`.
    """
    if shard.scheme == "file" and process.is_in_place(shard):
        return _open_in_place(shard)
    started = clock.monotonic()
    if isinstance(ahead, DownloadReader) and not ahead.promote():
        ahead.close()
        ahead = None
    opened = ahead if isinstance(ahead, OpenEntry) else None
    try:
        if ahead is None:
            opened = process.lookup(shard)
        reader = opened or ahead or DownloadReader(process, shard, finish=finish)
    except (ShardCacheError, system_error()) as exn:
        return _buffered(process, shard, _bypass(process, shard, exn))
    if opened is None:
        return _buffered(process, shard, reader, complete=complete)
    stream = ShardStream(process, shard, reader)
    process.note_use(opened, started)
    tiers = process.tiers
    tier = tiers.index(process.tier_of(opened.directory)) if len(tiers) > 1 else None
    process.counters.opened("hit", clock.monotonic() - started, tier)
    if logger.isEnabledFor(logging.DEBUG):
        facts = {"event": "hit", "shard": str(shard), "bytes": opened.size}
        logger.debug("%s: hit", shard, extra=facts)
    return io.BufferedReader(stream, BUFFER)


def _buffered(
    process: ProcessCache, shard: ShardURL, reader: Reader, *, complete: bool = False
) -> BinaryIO:
    stream = ShardStream(process, shard, reader)
    stream.wait(complete=complete or process.config.fill == "complete")
    return io.BufferedReader(stream, BUFFER)


def stream_file(process: ProcessCache, file: ShardURL) -> BinaryIO:
    """Return a stream of a file without storing it."""
    return _buffered(process, file, OriginReader(process, file))


def pin_shard(process: ProcessCache, shard: ShardURL) -> OpenEntry:
    """Return an entry that stays at its path until closed; see `ProcessCache.fetch`."""
    started = clock.monotonic()
    while True:
        opened = process.fetch(download := Download(process.downloads, shard))
        waited = clock.monotonic() - started
        if not opened.stuck and is_file(opened.path, opened.file.fileno()):
            process.counters.opened(download.outcome, waited)
            process.counters.read(opened.size)  # assume that the caller reads the whole file
            return opened
        opened.close()  # the entry was evicted before it was pinned, or is being evicted
        if opened.stuck:
            if waited >= process.config.lock_timeout:
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
            f"{path} does not exist. {advise_scheme(shard, 'Check the name.')}", url=str(shard)
        ) from exn


def _bypass(
    process: ProcessCache,
    shard: ShardURL,
    fault: Exception,
    failed: DownloadReader | None = None,
    position: int = 0,
    version: Version | None = None,
) -> OriginReader:
    """Return a reader that bypasses the cache after a fault, and count and log the fault.

    Raises ``fault`` with ``strict`` or if it is an error of the origin.
    """
    counter = next(_COUNTERS[kind] for kind in type(fault).__mro__ if kind in _COUNTERS)
    counts = {} if counter is None else {counter: 1}
    try:
        _warn(process, shard, fault)
        response = None
        if failed is not None and position == 0 and version is None:
            response = failed.take_response()
        reader = OriginReader(process, shard, position, version=version, response=response)
    except Exception as exn:
        process.counters.add({"failed": int(process.is_job), **counts})
        process.counters.flush()  # the error may end a worker, which then writes nothing
        number = getattr(fault, "errno", None)
        is_final = exn is fault or isinstance(exn, (ShardNotFoundError, AccessDeniedError))
        if is_final or number not in (errno.EMFILE, errno.ENFILE):
            raise
        raise TransferError(
            f"{shard} cannot be opened: there are too many open files ({exn}). "
            "Close streams that were read to their end, or raise the limit (ulimit -n).",
            url=str(shard),
            errno=number,
        ) from exn
    process.counters.add({"streamed": int(process.is_job), **counts})
    return reader


def _warn(process: ProcessCache, shard: ShardURL, fault: Exception) -> None:
    """Log why a shard is streamed. Raises ``fault`` if the shard must not be streamed."""
    if isinstance(fault, (CacheFullError, LockTimeoutError, UnprovenError, UnusableError)):
        kind, reason = type(fault).__name__, fault.message.removeprefix(f"{shard}: ")
    elif is_local_error(fault):
        kind, reason = fault_kind(fault), str(fault.strerror or fault)
        path = str(fault.filename or process.config.dir)
        if path not in reason:
            reason = f"{path}: {reason}"
    else:  # an error of the origin, which streaming would only repeat
        raise fault
    if process.config.strict:
        raise fault
    text = "%s is streamed, not cached: %s"
    facts = {"event": "streamed", "shard": str(shard), "reason": kind}
    if isinstance(fault, CacheFullError) and process.notices.is_new("full"):
        config = process.config
        most = "" if config.max_size is None else f"max_size {config.max_size}, "
        logger.warning(
            "%s is full (%smin_free %s): shards that find no room are streamed each time they are "
            "read; the first is %s. Raise max_size, lower min_free, or free the disk. This is "
            "logged once per job; `shardcache stats` counts them.",
            *(config.dir, most, config.min_free, shard),
            extra=facts,
        )
    elif isinstance(fault, (CacheFullError, PausedError, UnusableError)):  # logged before
        logger.info(text, shard, reason, extra=facts)
    else:
        process.notices.warn(kind, text, shard, reason, extra=facts)


class ShardStream(io.RawIOBase):
    """A stream of one version of a shard. For one thread at a time, as `io.BufferedReader` ensures.

    Its ``name`` is the local path, or the canonical URL while there is no local file.
    """

    mode = "rb"
    # Class attributes, because streams are made by the million, and setting these takes time.
    _is_version_fixed = False  # because bytes or the size were delivered
    _error: Exception | None = None

    def __init__(self, process: ProcessCache, shard: ShardURL, reader: Reader) -> None:
        self.name = reader.path or str(shard)
        self._process = process
        self._counters = process.counters  # a forked child adds to a copy, which nothing writes
        self._shard = shard
        self._reader = reader
        self._position = 0

    def wait(self, *, complete: bool) -> None:
        """Wait for a partial or, with ``complete``, for the entry."""
        while self._error is None and isinstance(reader := self._reader, DownloadReader):
            if not reader.wait(complete=complete):
                return
            self._advance(reader)

    # -- io --------------------------------------------------------------------

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See `io.RawIOBase.readinto`; waits for bytes that are still being downloaded.

        Raises the errors of `Cache.open`, and TransferError if the origin has another version.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        while self._error is None:
            reader = self._reader
            try:
                count = reader.readinto(buffer, self._position)
            except (ShardCacheError, system_error()) as exn:
                self._replace(exn)
            else:
                if count is not None:
                    self._is_version_fixed = self._is_version_fixed or count > 0
                    is_streamed = isinstance(reader, OriginReader)
                    self._counters.read(count, "bytes_streamed" if is_streamed else "bytes_opened")
                    self._position += count  # last: a signal handler may raise after any call
                    return count
                assert isinstance(reader, DownloadReader)
                self._advance(reader)
        raise self._error

    def readall(self) -> bytes:
        reader, data = self._reader, b""
        if isinstance(reader, OpenEntry) and self._error is None and not self.closed:
            left = max(0, reader.size - self._position)  # in one system call, if less than 2 GiB
            try:
                data = os.pread(reader.file.fileno(), left, self._position)
            except system_error() as exn:
                self._replace(exn)
            else:
                self._is_version_fixed = self._is_version_fixed or bool(data)
                self._counters.read(len(data))
                self._position += len(data)
                if len(data) == left:
                    return data
        return b"".join([data, *iter(lambda: self.read(BLOCK) or b"", b"")])

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`; a seek from the end waits until the size is known."""
        if whence == os.SEEK_CUR:
            position += self._position
        elif whence == os.SEEK_END:
            position += self.size()
        elif whence != os.SEEK_SET:
            raise OSError(errno.EINVAL, f"whence {whence} is not supported")
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = position
        return position

    def size(self) -> int:
        """Return the bytes of the shard; wait until they are known. Raises UnsupportedOperation."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        while (size := self._reader.size) is None:
            if self._error is not None:
                raise self._error
            if not isinstance(self._reader, DownloadReader):
                raise io.UnsupportedOperation("the origin does not say how long the shard is")
            self._advance(self._reader)
        self._is_version_fixed = True
        return size

    def fileno(self) -> int:
        """See `io.IOBase.fileno`; UnsupportedOperation while no entry is read."""
        if not isinstance(self._reader, OpenEntry):
            raise io.UnsupportedOperation("the shard is not, or not yet, read from a local file")
        fd = self._reader.file.fileno()
        os.lseek(fd, self._position, os.SEEK_SET)  # another program may read from there
        return fd

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
        except (ShardCacheError, system_error()) as exn:
            self._replace(exn)
        else:
            if entry is not None:
                self._counters.opened(reader.outcome, reader.waited)
                self._use(entry)

    def _replace(self, fault: ShardCacheError | OSError) -> None:
        """Continue with the reader that replaces the failed one. Raises if there is none."""
        failed, process, shard = self._reader, self._process, self._shard
        try:
            if isinstance(failed, OpenEntry) and is_disk_fault(fault):
                self._use(self._replace_entry(failed, fault))
            elif isinstance(failed, DownloadReader):
                version = failed.version if self._is_version_fixed else None
                self._use(_bypass(process, shard, fault, failed, self._position, version))
            else:
                raise fault  # nothing can replace the origin
        except (ShardCacheError, system_error()) as exn:
            self._error = exn
            self._reader.close()
            raise

    def _replace_entry(self, opened: OpenEntry, fault: OSError) -> Reader:
        """Reopen an entry whose handle is stale. Set any other aside, and bypass the cache."""
        process, shard, entry = self._process, self._shard, opened.entry
        if fault.errno == errno.ESTALE and not opened.reopened:
            with ignoring(DamagedError, OSError):
                grace = process.tier_of(entry.directory).store.layout.grace
                again = open_data(opened.directory, opened.path, opened.size, grace)
                if again is not None:
                    return replace(again, reopened=True)
        self._counters.add({"errors_disk": 1})
        try:
            directories = process.prepare()
            directories.read_failed(entry.directory, fault)
            with directories.key_locked(entry.path) as is_locked:
                # Publishing takes this lock, so the path names the same file until the lock is
                # released. If the path names another file now, ours was already replaced.
                if is_locked and is_file(opened.path, opened.file.fileno()):
                    set_aside(entry.path, f"{shard}: {fault.strerror}")
            for store in process.stores():  # other links to the file must not be linked again
                for link in store.entries_of(shard.key):
                    if is_file(f"{link.directory}/{shard.basename}", opened.file.fileno()):
                        link.mark(OUTDATED)
        except (ConfigError, system_error()) as exn:
            logger.info("%s: %s cannot be set aside: %s", shard, opened.path, exn)
        if process.config.strict:
            raise fault
        text = "%s cannot be read at byte %d of %s (%s); the rest is streamed"
        facts = shard, self._position, opened.path, fault.strerror
        process.notices.warn(fault_kind(fault), text, *facts)
        version = (entry.version, entry.size) if self._is_version_fixed else None
        return OriginReader(process, shard, self._position, version=version)

    def _use(self, reader: Reader) -> None:
        failed, self._reader = self._reader, reader
        failed.close()
        self.name = reader.path or self.name
