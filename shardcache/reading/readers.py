"""The readers of a `stream.ShardStream`, except that of a cached shard, `store.entry.OpenEntry`.

Each reader delivers the bytes of one version. Its ``readinto(buffer, position)`` returns a count, 0
at the end of the shard, or None while there are no bytes yet. A reader ends with its first error,
and `stream.ShardStream` chooses the next reader.

In a forked child, a reader drops the parent's download and sockets, and continues with its own.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shardcache import clock
from shardcache.download.download import Download, State
from shardcache.errors import IntegrityError, ShardCacheError, TransferError
from shardcache.faults import system_error
from shardcache.origins.base import (
    Body,
    ObjectInfo,
    Origin,
    TransientError,
    VersionChangedError,
    compare_version,
    skip,
)
from shardcache.origins.retry import LEAST_PROGRESS
from shardcache.store.digest import BLOCK, TreeDigest
from shardcache.store.directory import DamagedError
from shardcache.store.entry import OpenEntry
from shardcache.store.partial import OpenPartial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

    from shardcache.process import ProcessCache
    from shardcache.urls import ShardURL

    Reader: TypeAlias = "OpenEntry | DownloadReader | OriginReader"
    Version: TypeAlias = tuple[str, int | None]  # of an object, and its size

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between two polls of another process's partial: about the time of a block from S3.
_FOREIGN_POLL = 0.005
#: The same for a download of this process. It can be long, because the download notifies readers.
_OWN_POLL = 0.25


class DownloadReader:
    """Reads a shard while this process or another one downloads it.

    The last block is withheld until the entry is published, because its digest and checksum were
    verified by then. ``finish`` and ``ahead`` are as for `ProcessCache.start_download`.
    """

    path = None

    def __init__(
        self, process: ProcessCache, shard: ShardURL, *, finish: bool = False, ahead: bool = False
    ) -> None:
        self.waited = 0.0  #: seconds
        self._process, self._shard, self._finish = process, shard, finish
        self._seen: Path | None = None  # the last partial that this reader tried to open
        self._partial: OpenPartial | None = None
        self._read = 0  # offset after the last byte that was read
        self._is_version_fixed = False  # whether the caller has seen bytes or the size
        self._watermark = 0  # offset after the last byte that may be read
        self._download, self._has_started = process.start_download(
            shard, finish=finish, ahead=ahead
        )

    def promote(self) -> bool:
        """Begin to read a shard downloaded ahead. Return False if the caller must open it again."""
        return self._download.pid != os.getpid() or self._download.promote()

    @property
    def outcome(self) -> str:
        """How the shard is obtained; "coalesced" if another reader started the download."""
        return self._download.outcome if self._has_started else "coalesced"

    @property
    def version(self) -> Version | None:
        """The version of the object and its size, or None until there is a partial."""
        partial = self._partial
        return None if partial is None else (partial.info.version, partial.info.size)

    @property
    def size(self) -> int | None:
        """The size of the shard in bytes, once known. Then only this version is read."""
        self._is_version_fixed |= self._partial is not None
        return None if self._partial is None else self._partial.info.size

    def take_response(self) -> Body | None:
        """Return the origin's open response for a shard without room, or None if there is none."""
        is_own = self._download.pid == os.getpid()  # otherwise, the connection is the parent's
        return self._download.take_response() if is_own else None

    def wait(self, *, complete: bool) -> bool:
        """Wait for a partial, or if ``complete``, for the end; return whether that has come."""
        download = self._joined()
        self.waited += download.wait(
            lambda: download.ended or not (complete or download.partial_path is None)
        )
        return download.ended

    def readinto(self, buffer: WriteableBuffer, position: int) -> int | None:
        """Read below the watermark. Return None if there are no bytes yet; then call `advance`."""
        view = memoryview(buffer).cast("B")[: max(0, self._watermark - position)]
        if not view or self._partial is None:
            return None if memoryview(buffer).nbytes else 0
        count = os.preadv(self._partial.data.fileno(), (view,), position)
        if count == 0:
            raise OSError(errno.EIO, f"the partial ends at byte {position}")
        self._read, self._is_version_fixed = max(self._read, position + count), True
        return count

    def advance(self, position: int) -> OpenEntry | None:
        """Wait a moment for bytes after ``position``; return the entry once it is published.

        Raises the error that ended the download, or if the entry has other bytes than were read.
        """
        download = self._joined()
        changes = download.changes  # before the checks below: a later change ends the wait
        opened = download.result()
        is_own = download.state is not State.WAITING
        if opened is None and self._partial is not None and self._partial.sealed and not is_own:
            opened = self._process.lookup(self._shard)
        if opened is not None:
            self._check(opened)
        elif not self._has_grown(download.partial_path, position):
            seconds = _OWN_POLL if is_own else _FOREIGN_POLL
            self.waited += download.wait(lambda: download.changes != changes, seconds)
        return opened

    def _joined(self) -> Download:
        """Return the download. A forked child joins one of its own first."""
        if self._download.pid != os.getpid():
            process, finish = self._process, self._finish
            self._download, has_started = process.start_download(self._shard, finish=finish)
            self._has_started |= has_started
        return self._download

    def _has_grown(self, path: Path | None, position: int) -> bool:
        """Update the watermark, and return whether there are new bytes after ``position``."""
        # Then a new partial is not opened: only the entry can continue the version.
        if path is not None and path != self._seen and not self._is_version_fixed:
            try:
                partial = OpenPartial(path, self._shard.basename)
                if self._partial is not None:
                    self._partial.close()
                self._partial, self._watermark, self._seen = partial, 0, path
            except FileNotFoundError:  # it is being created, or was published
                pass
            except DamagedError as exn:
                logger.debug("%s: %s cannot be followed: %s", self._shard, path.name, exn)
                self._seen = path
        if self._partial is None:
            return False
        watermark = self._partial.watermark()
        if self._watermark == 0 and watermark > 0:
            from shardcache.archive import check_archive  # it imports tarfile

            check_archive(self._partial.data.fileno(), self._shard.basename, str(self._shard))
        has_grown = watermark > max(self._watermark, position)
        self._watermark = watermark
        return has_grown

    def _check(self, opened: OpenEntry) -> None:
        """Close the entry and raise if it does not have the bytes that were read.

        It is the same file, unless the partial was lost or damaged, or an upstream failed. Its
        version may differ from that of the upstream's copy.
        """
        if not self._is_version_fixed or self._partial is None:
            return
        old, new = self._partial.data.fileno(), opened.file.fileno()
        if os.path.sameopenfile(old, new):
            return
        url, info = str(self._shard), self._partial.info
        parts = [(min(BLOCK, self._read - at), at) for at in range(0, self._read, BLOCK)]
        try:
            is_version = info.is_of(opened.entry.version, opened.size)
            may_be_same = is_version or opened.size == info.size
            if may_be_same and all(os.pread(old, *part) == os.pread(new, *part) for part in parts):
                return
            if not is_version:
                text = "was replaced while it was read, and the bytes read so far are old"
                raise TransferError(f"{url} {text}. Read the shard again.", url=url)
            text = "bytes that were read were damaged on their way, and the shard was "
            raise IntegrityError(f"{url}: {text}downloaded again. Read it again.", url=url)
        except Exception:
            opened.close()
            raise

    def close(self) -> None:
        """Leave the download and close the partial. The garbage collector may call this."""
        if self._partial is not None:
            self._partial.close()
        # A forked child must not even refer to the parent's download, which has open files.
        download: Download | None = vars(self).pop("_download", None)
        if download is not None and download.pid == os.getpid():
            download.leave()


class UnversionedError(TransferError):
    """The origin names no version, so that no other response can continue the first one."""


class OriginReader:
    """Reads one version of a shard from an upstream or its origin, bypassing the cache.

    Requests are retried as in a download, so an error is final. After a failure of an upstream, the
    next source continues at the same byte, if it has the same version. So does a forked child, over
    a connection of its own.

    Args:
        position: offset of the first byte to read.
        version: the version to insist on.
        response: an open response of the origin that begins with the first byte of the shard.
    """

    path = None

    def __init__(
        self,
        process: ProcessCache,
        shard: ShardURL,
        position: int = 0,
        *,
        version: Version | None = None,
        response: Body | None = None,
    ) -> None:
        self._process, self._shard = process, shard
        self._retries = process.resources.retry_limits.started(str(shard))
        self._position = position  # offset of the next byte
        # The version to insist on, because bytes or the size were told, and the size, once known.
        self._version: str | None = version and version[0]
        self._size: int | None = version and version[1]
        self._info: ObjectInfo | None = None  # of the version that is read, once it is known
        # The digest that an upstream states, and that of the bytes so far.
        self._proof: tuple[str, TreeDigest] | None = None
        self._body: Body | None = None
        if response is None:
            self._use_sources(process.origins.sources(shard))
            self._body = self._call(self._open)
        else:
            self._use_sources(iter([process.origins.of(shard)]))
            self._body, self._info, self._size = response, response.info, response.info.size
        self._read_at = clock.monotonic()

    def _use_sources(self, sources: Iterator[Origin]) -> None:
        self._pid, self._sources = os.getpid(), sources
        self._use_next_source()

    def _use_next_source(self) -> None:
        self._origin = origin = next(self._sources)
        self._counter = "bytes_upstream" if origin.upstream else "bytes_origin"
        self._retries.use(self._process.resources.retry_limits, once=bool(origin.upstream))
        self._received = 0  # bytes of `_body`
        self._has_failed = False  # whether the last attempt failed
        if self._version is None:
            self._info = self._size = None
            self._proof = (origin.digest, TreeDigest()) if origin.digest else None

    @property
    def size(self) -> int | None:
        """The bytes of the shard, once known. Then only this version is read."""
        if self._size is not None and self._info is not None:
            self._version = self._info.version
        return self._size

    def _leave_parent(self) -> None:
        self._body = None  # not closed: that would end a connection or command of the parent
        if self._info is not None and self._info.identifiable:
            self._version = self._info.version
        elif self._position:
            raise UnversionedError(
                f"{self._shard} can only be read on by the process that opened it, because its "
                "origin names no version. Open it in the forked process.",
                url=str(self._shard),
            )
        self._use_sources(self._process.origins.sources(self._shard))

    def _call(self, function: Callable[[], T]) -> T:
        """Call ``function`` for one source after the other, until it succeeds."""
        while True:
            try:
                return self._retries.call(function, sleep=clock.sleep)
            except VersionChangedError as exn:
                if not self._origin.upstream:
                    raise TransferError(
                        f"{self._shard} was replaced while it was streamed; the bytes read so far "
                        f"are of the old version ({self._version}). Read the shard again.",
                        url=str(self._shard),
                    ) from exn
            except (ShardCacheError, system_error()) as exn:
                if not self._origin.upstream:
                    raise
                self._origin.ended(exn)
            self._use_next_source()

    def readinto(self, buffer: WriteableBuffer, position: int) -> int:
        """Read bytes at ``position``; return 0 at the end. A seek costs a new request."""
        if self._pid != os.getpid():
            self._leave_parent()
        view = memoryview(buffer).cast("B")
        if position != self._position:
            self.close()
            self._position = position
        if self._size is not None and position >= self._size:
            self.close()
            return 0
        if not view:
            return 0
        # Time that the caller spent between two reads does not count towards the deadline.
        self._retries.extend(clock.monotonic() - self._read_at)
        count = self._call(lambda: self._receive(view))
        assert self._info is not None
        if count == 0:
            self._size = self._position
        if self._proof is not None:
            self._prove(view[:count], *self._proof)
        self._version = self._version or self._info.version
        self._process.counters.read(count, self._counter)
        if self._position == self._size:
            self._origin.ended()
            self.close()  # so that the connection is free before the stream is closed
        self._read_at = clock.monotonic()
        return count

    def _prove(self, data: memoryview, stated: str, digest: TreeDigest) -> None:
        """Raise IntegrityError before the last bytes if all do not have the stated digest."""
        if digest.length + len(data) != self._position:
            self._proof = None  # after a seek
            return
        digest.update(data)
        if self._position == self._size and digest.value() != stated:
            raise IntegrityError(
                f"{self._shard}: its copy in an upstream is damaged, and the bytes read so far are "
                "from it. Remove the copy, and read the shard again.",
                url=str(self._shard),
            )

    def _receive(self, view: memoryview) -> int:
        """Receive bytes, and move the position. After a failure, receive `LEAST_PROGRESS` or fail.

        Compares the version of the object before its last bytes are delivered.
        """
        least = min(len(view), LEAST_PROGRESS) if self._has_failed else 1
        if self._body is not None and self._position == self._body.stop:
            self.close()  # the response was limited to a part, so request the rest
        # After any exception, the body is dropped: it may have lost bytes to a signal handler.
        body, self._body = self._body, None
        try:
            if body is None:
                body, self._received = self._open(), 0
            count = 0
            while count < least and (more := body.readinto(view[count:])):
                count += more
            end = self._position + count
            if count < least and self._size is not None and end not in (self._size, body.stop):
                raise TransientError("the origin ended early")
            if not self._origin.proves_version and (count == 0 or end == self._size):
                assert self._info is not None
                compare_version(self._origin, self._shard, self._info)
            self._retries.check()
        except BaseException as exn:
            if body is not None:
                body.close()
            self._has_failed = isinstance(exn, TransientError)
            if self._has_failed and self._retries.note_progress(self._received):
                self._received = 0
                return self._receive(view)
            raise
        self._position = end
        self._body, self._received, self._has_failed = body, self._received + count, False
        return count

    def _open(self) -> Body:
        """Request the bytes after the position, of the version that was read so far, if any."""
        if self._version is None:
            self._info = None
        elif self._info is not None and not self._origin.proves_version:
            compare_version(self._origin, self._shard, self._info)
        info = self._info if self._info is not None and self._info.size is not None else None
        body = self._origin.open(self._shard, self._position, None, info)
        try:
            if self._version is not None and not body.info.identifiable:
                raise UnversionedError(
                    f"{self._shard} cannot be continued at byte {self._position}, because its "
                    "origin names no version (ETag or Last-Modified). Read the shard again.",
                    url=str(self._shard),
                )
            # The size that is part of the version, and not the one that the end has shown.
            size = self._size if self._info is None else self._info.size
            if self._version and not body.info.is_of(self._version, size):
                raise VersionChangedError(str(self._shard))
            if passed := skip(body, self._position):
                self._process.counters.read(passed, self._counter)
        except BaseException:
            body.close()
            raise
        self._info = self._info or body.info
        self._size = self._size if self._info.size is None else self._info.size
        return body

    def close(self) -> None:
        """Give the connection back. Takes no lock, because the garbage collector may call this."""
        body, self._body = self._body, None
        if body is not None and self._pid == os.getpid():
            body.close()
