"""Shards behind any fsspec filesystem: gs, az, hf, memory, slow mounts.

fsspec has no way to insist on a version, so `FsspecOrigin.pins` is false: the
engine describes the object again after the last byte and starts over if it
changed meanwhile.

A filesystem object is made on first use, in the process that uses it: async
ones do not survive a fork.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import ObjectInfo, TransientError, VersionChangedError, unchained
from shardcache.urls import ShardURL, redact

__all__ = ["FsspecOrigin"]


#: Bytes asked for at once where every read is a request of its own (gs, az, hf).
#: Four blocks: few enough to bound memory, many enough to amortise a round trip.
_READAHEAD = 4 << 20
_VALIDATORS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "Content-MD5", "Digest")
_TIMES = (
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "updated",
    "modified",
    "created",
)


class FsspecOrigin:
    """Reads the shards of one fsspec protocol.

    Args:
        protocol: as fsspec names it.
        storage_options: for the filesystem's constructor.
    """

    pins = False
    states_checksums = False

    def __init__(self, protocol: str, storage_options: Mapping[str, Any]) -> None:
        self.protocol = protocol
        self._options = dict(storage_options)
        self._filesystem: Any = None
        self._guard = threading.Lock()

    @unchained
    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> FsspecBody:
        """See `origin.Origin.open`."""
        info = pin if pin is not None else self.stat(url)
        with self._translated(url):
            options: dict[str, Any] = {"block_size": _READAHEAD, "cache_type": "readahead"}
            if self.protocol == "file":
                options = {}
            file = self._ready().open(self._path(url), "rb", **options)
            try:
                seekable = bool(getattr(file, "seekable", lambda: False)())
                if not seekable:
                    start = 0
                elif start:
                    file.seek(start)
            except BaseException:
                file.close()
                raise
        if info.size is None or not seekable:
            stop = info.size
        else:
            stop = info.size if stop is None else min(stop, info.size)
        return FsspecBody(self, url, info, start, stop, file)

    @unchained
    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `origin.Origin.stat`."""
        with self._translated(url):
            filesystem = self._ready()
            path = self._path(url)
            filesystem.invalidate_cache()
            found = filesystem.info(path)
        if found.get("type") == "directory":
            raise ShardNotFoundError(f"{url} is a directory, not a shard.", url=str(url))
        size = found.get("size")
        return ObjectInfo(
            size=None if size is None else int(size),
            etag=_first(found, _VALIDATORS),
            modified=_first(found, _TIMES),
        )

    def _path(self, url: ShardURL) -> str:
        if url.is_local:
            return str(url.local_path)
        return str(self._ready()._strip_protocol(url.raw))

    def _ready(self) -> Any:
        with self._guard:
            if self._filesystem is None:
                import fsspec

                try:
                    # Not the shared instance: it may belong to the parent process,
                    # and its listings cache to whoever made it.
                    self._filesystem = fsspec.filesystem(
                        self.protocol, skip_instance_cache=True, **self._options
                    )
                except (ImportError, OSError, ValueError, TypeError) as exn:
                    raise ConfigError(
                        f"{self.protocol}:// cannot be read here: {redact(str(exn))}"
                    ) from None
            return self._filesystem

    @contextlib.contextmanager
    def _translated(self, url: ShardURL) -> Iterator[None]:
        # Not "from" what is caught: aiohttp and others name whole URLs, signatures included.
        try:
            yield
        except (ConfigError, ShardNotFoundError, TransientError):
            raise
        except FileNotFoundError:
            raise ShardNotFoundError(
                f"{url}: not found. Check the pattern and the path.", url=str(url)
            ) from None
        except PermissionError:
            raise _denied(url) from None
        except IsADirectoryError:
            raise ShardNotFoundError(f"{url} is a directory, not a shard.", url=str(url)) from None
        except Exception as exn:  # noqa: BLE001 - every filesystem has its own exceptions
            status = getattr(exn, "status", None) or getattr(exn, "code", None)
            if status in (401, 403):
                raise _denied(url) from None
            if status in (412, 416):
                raise VersionChangedError(str(url)) from None
            if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
                raise ConfigError(
                    f"{url}: the origin refused the request: {redact(str(exn))}", url=str(url)
                ) from None
            reason = redact(f"{type(exn).__name__}: {exn}")
            timed_out = isinstance(exn, TimeoutError)
            raise TransientError(f"reading failed: {reason}", timed_out=timed_out) from None


class FsspecBody:
    """One open file of an fsspec filesystem; see `origin.Body`."""

    def __init__(
        self,
        origin: FsspecOrigin,
        url: ShardURL,
        info: ObjectInfo,
        start: int,
        stop: int | None,
        file: Any,
    ) -> None:
        self.info = info
        self.start = start
        self.stop = stop
        self._origin = origin
        self._url = url
        self._file = file
        self._left = None if stop is None else stop - start

    @unchained
    def readinto(self, buffer: memoryview) -> int:
        """See `origin.Body.readinto`."""
        if self._left is not None:
            buffer = buffer[: self._left]
        if not buffer:
            return 0
        with self._origin._translated(self._url):
            data = self._file.read(len(buffer))
        count = len(data)
        if count == 0 and self._left:
            if self._origin.stat(self._url).version != self.info.version:
                raise VersionChangedError(f"{self._url} became shorter")
            raise TransientError(f"the origin stopped {self._left} bytes before the end")
        buffer[:count] = data
        if self._left is not None:
            self._left -= count
        return count

    def abort(self) -> None:
        """See `origin.Body.abort`; fsspec reads end by themselves, at most one readahead later."""

    def close(self) -> None:
        """See `origin.Body.close`."""
        self._file.close()


def _denied(url: ShardURL) -> AccessDeniedError:
    return AccessDeniedError(
        f"{url}: access denied. Check the credentials and storage_options.", url=str(url)
    )


def _first(found: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    for name in names:
        value = found.get(name)
        if value is not None and value != "":
            return str(value)
    return None
