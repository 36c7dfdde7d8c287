"""Provide the fsspec protocol ``shardcache``, for URLs such as ``shardcache::s3://bucket/a.tar``.

With these URLs, pandas, Arrow, Hugging Face datasets and other users of fsspec read through the
default cache, or through a cache that the storage options describe::

    fsspec.open("shardcache::s3://bucket/a.tar", shardcache={"dir": "/local/nvme/shards"})

Files are seekable. Listings come from the target: the filesystem of the URL after ``shardcache::``.
They return names such as ``shardcache://s3://bucket/a.tar``, which also open through the cache.
With ``detail=True``, they return the target's own names, as Arrow and Hugging Face datasets expect.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.chained import ChainedFileSystem

from shardcache.errors import ConfigError
from shardcache.store.directory import DamagedError
from shardcache.urls import redact

if TYPE_CHECKING:
    from shardcache.cache import Cache

#: Options that fsspec and its users pass to every filesystem, so they are not options of the cache.
_FSSPEC_OPTIONS = frozenset(
    [
        *("fo", "target_protocol", "skip_instance_cache", "asynchronous", "loop", "batch_size"),
        *("block_size", "default_block_size", "cache_type", "default_cache_type"),
        *("cache_options", "use_listings_cache", "listings_expiry_time", "max_paths"),
    ]
)


class ShardCacheFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """A read-only view of another filesystem through a cache, for any thread or process.

    Args:
        target_protocol: the protocol of the other filesystem, such as ``s3``.
        target_options: storage options of that filesystem, which the cache uses as well.
        target: protocol and options from a URL such as ``shardcache://s3://...``.
        **options: options of a `Cache`. Without any options, the default cache is used.

    Raises:
        ConfigError: the URL after ``shardcache::`` is missing.
    """

    protocol = "shardcache"

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        target: tuple[str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if target_protocol is None and target is not None:
            target_protocol, in_url = target
            # As in a chain of URLs, options for the target are passed under the target's protocol.
            target_options = {**in_url, **options.pop(target_protocol, {})}
        if target_protocol is None:
            raise ConfigError("Write the URL of the origin after shardcache::, as in s3://...")
        self._target_protocol = target_protocol
        self._target_options = target_options or {}
        self._options = {k: v for k, v in options.items() if k not in _FSSPEC_OPTIONS}
        if self._target_options:
            self._options.setdefault("storage_options", self._target_options)

    @property
    def fs(self) -> Any:
        """The target filesystem. After a fork, fsspec creates a new one."""
        return fsspec.filesystem(self._target_protocol, **self._target_options)

    @functools.cached_property
    def cache(self) -> Cache:
        """The cache that this filesystem reads through. Raises ConfigError for invalid options."""
        from shardcache.cache import Cache, default_cache

        return Cache(**self._options) if self._options else default_cache()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix("shardcache::").removeprefix("shardcache://")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        url = path.removeprefix("shardcache://")
        protocol, separator, _ = url.partition("://")
        if not (protocol and separator) or "/" in protocol:
            return {}  # the target is the next part of the chain
        options = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(url)
        return {"target": (protocol, options)}

    def _path(self, path: str) -> str:
        return str(self.fs._strip_protocol(self._strip_protocol(path)))

    def _url(self, path: str) -> str:
        return str(self.fs.unstrip_protocol(self._strip_protocol(path)))

    def unstrip_protocol(self, name: str) -> str:
        """Return the full URL of a file: ``shardcache://s3://...``."""
        return f"shardcache://{self._url(name)}"

    def _names(self, found: Any, detail: bool) -> Any:
        return found if detail else [self.unstrip_protocol(name) for name in found]

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> io.BufferedIOBase:
        if mode != "rb":
            text = f"{redact(path)} cannot be opened in mode {mode!r}: a cache is read-only. "
            raise ConfigError(f"{text}Write to the URL without shardcache::.")
        stream = self.cache.open(self._url(path))
        assert isinstance(stream, io.BufferedIOBase)
        return stream

    def info(self, path: str, **options: Any) -> Any:
        """Return the info of the cached shard, or the target's info if the shard is not cached."""
        cache, entry = self.cache, None  # outside `suppress`, so that invalid options raise
        with contextlib.suppress(ConfigError):  # not a shard's URL; the target may accept it
            entry = cache.entry(self._url(path))
        if entry is None:
            return self.fs.info(self._path(path), **options)
        found = {"name": self._path(path), "size": entry.size, "type": "file"}
        # Hugging Face datasets identify versions by the ETag, so the ETag must be the same whether
        # or not the shard is cached.
        with contextlib.suppress(OSError, DamagedError):  # the entry was evicted
            if etag := entry.metadata().info.etag:
                found["ETag"] = etag
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """Return the listing of a directory of the target filesystem."""
        return self._names(self.fs.ls(self._path(path), detail=detail, **options), detail)

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """Return the files below a path. The target may need fewer listings than a generic walk."""
        options |= {"maxdepth": maxdepth, "withdirs": withdirs, "detail": detail}
        return self._names(self.fs.find(self._path(path), **options), detail)

    def glob(self, path: str, maxdepth: int | None = None, **options: Any) -> Any:
        """Return the files that match a pattern."""
        found = super().glob(self._path(path), maxdepth, **options)
        return self._names(found, options.get("detail", False))

    def walk(self, path: str, *args: Any, **options: Any) -> Iterator[Any]:
        """Yield each directory below a path, with the names of its directories and files."""
        for root, directories, files in super().walk(self._path(path), *args, **options):
            yield self.unstrip_protocol(root), directories, files

    def expand_path(self, path: Any, *args: Any, **options: Any) -> list[str]:
        """Return the matching paths in the target's form, because fsspec compares the paths."""
        return sorted({self._path(found) for found in super().expand_path(path, *args, **options)})

    def modified(self, path: str) -> Any:
        """Return the file's modification time, which DuckDB's Parquet reader needs."""
        return self.fs.modified(self._path(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget the target filesystem's cached listings. Cached shards stay."""
        self.fs.invalidate_cache(None if path is None else self._path(path))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """Return bytes ``start`` to ``end`` of a shard; negative offsets count from the end."""
        with self._open(path) as stream:
            first, last, _ = slice(start, end).indices(stream.seek(0, io.SEEK_END))
            stream.seek(first)
            return stream.read(max(0, last - first))
