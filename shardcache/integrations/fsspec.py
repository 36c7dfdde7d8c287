"""The fsspec way in: ``shardcache::s3://bucket/shard.tar``.

For pandas, Arrow, Hugging Face datasets and everything else that opens URLs through fsspec. Reads
go through the default cache or one named in storage options::

    fsspec.open("shardcache::s3://bucket/a.tar", shardcache={"dir": "/local/nvme/shards"})

Files are whole, local and seekable; listing is the target filesystem's business.
"""

from __future__ import annotations

import contextlib
import functools
import io
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.chained import ChainedFileSystem

from shardcache.errors import ConfigError
from shardcache.store.directory import DamagedError
from shardcache.urls import redact

if TYPE_CHECKING:
    from shardcache.cache import Cache

#: Options of every filesystem; Hugging Face's datasets set ``block_size=0``.
_FSSPEC_OPTIONS = frozenset(
    [
        *("fo", "target_protocol", "skip_instance_cache", "asynchronous", "loop", "batch_size"),
        *("block_size", "default_block_size", "cache_type", "default_cache_type"),
        *("cache_options", "use_listings_cache", "listings_expiry_time", "max_paths"),
    ]
)


class ShardCacheFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """A read-only view of another filesystem through a cache, for threads, pickles and forks.

    Args:
        target_protocol: what the chain goes on with, such as ``s3``.
        target_options: storage options of that filesystem; also given to the cache.
        **options: options of the `Cache`; without any, the default cache is used.

    Raises:
        ConfigError: an option that cannot work.
    """

    protocol = "shardcache"

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if target_protocol is None:
            raise ConfigError("shardcache:: needs the origin's URL: shardcache::s3://...")
        self._target_protocol = target_protocol
        self._target_options = target_options or {}
        self._options = {k: v for k, v in options.items() if k not in _FSSPEC_OPTIONS}
        if self._target_options:
            self._options.setdefault("storage_options", self._target_options)

    @property
    def fs(self) -> Any:
        """The target filesystem; fsspec keeps one for each process, which a fork needs."""
        return fsspec.filesystem(self._target_protocol, **self._target_options)

    @functools.cached_property
    def cache(self) -> Cache:
        """The cache behind this filesystem."""
        from shardcache.cache import Cache, default_cache

        return Cache(**self._options) if self._options else default_cache()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix("shardcache::").removeprefix("shardcache://")

    def _path(self, path: str) -> str:
        """As the target filesystem names it, whichever way it was given."""
        return str(self.fs._strip_protocol(self._strip_protocol(path)))

    def _url(self, path: str) -> str:
        return str(self.fs.unstrip_protocol(self._strip_protocol(path)))

    def unstrip_protocol(self, name: str) -> str:
        """The URL that leads back here: ``shardcache::s3://...``."""
        return f"shardcache::{self._url(name)}"

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> io.BufferedIOBase:
        if mode != "rb":
            text = f"{redact(path)}: the cache reads shards; mode {mode!r} is not supported"
            raise ConfigError(text)
        stream = self.cache.open(self._url(path))
        assert isinstance(stream, io.BufferedIOBase)
        return stream

    def info(self, path: str, **options: Any) -> Any:
        """As the target filesystem; of the version that is cached where there is one."""
        cache, entry = self.cache, None  # what is wrong with its options is not the URL's fault
        with contextlib.suppress(ConfigError):  # a bucket, a chain: the target may know it
            entry = cache.entry(self._url(path))
        if entry is None:
            return self.fs.info(self._path(path), **options)
        found = {"name": self._path(path), "size": entry.size, "type": "file"}
        # Readers tell versions apart by it (Hugging Face's datasets their own cache), so it
        # must not come and go with ours.
        with contextlib.suppress(OSError, DamagedError):  # evicted meanwhile
            if etag := entry.metadata().info.etag:
                found["ETag"] = etag
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """As the target filesystem."""
        return self.fs.ls(self._path(path), detail=detail, **options)

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        """As the target filesystem, for which it may be one listing where a walk needs many."""
        return self.fs.find(self._path(path), *args, **options)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget the target filesystem's listings; shards stay."""
        self.fs.invalidate_cache(None if path is None else self._path(path))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """Bytes of a shard; negative offsets count from the end."""
        with self._open(path) as stream:
            first, last, _ = slice(start, end).indices(stream.seek(0, io.SEEK_END))
            stream.seek(first)
            return stream.read(max(0, last - first))
