"""The fsspec way in: ``shardcache::s3://bucket/shard.tar``.

For pandas, Arrow, Hugging Face datasets and everything else that opens URLs
through fsspec. Reads go through the default cache (``SHARDCACHE_DIR`` and the
configuration files) or one named in storage options::

    fsspec.open("shardcache::s3://bucket/a.tar", shardcache={"dir": "/local/nvme/shards"})

Files are whole, local and seekable; writing and listing are the target
filesystem's business.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from fsspec.implementations.chained import ChainedFileSystem

from shardcache.errors import ConfigError

if TYPE_CHECKING:
    from shardcache.cache import Cache

__all__ = ["ShardCacheFileSystem"]


class ShardCacheFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """A read-only view of another filesystem through a cache.

    Args:
        target_protocol: what the chain goes on with, such as ``s3``.
        target_options: storage options of that filesystem; also given to the cache.
        fs: an instance of it, instead of the two.
        **options: options of the `Cache`; without any, the default cache is used.

    Raises:
        ConfigError: an option that cannot work.
    """

    protocol = "shardcache"

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fs: Any = None,
        **options: Any,
    ) -> None:
        import fsspec

        super().__init__(**options)
        if fs is None:
            if target_protocol is None:
                raise ConfigError("shardcache:: needs the origin's URL: shardcache::s3://...")
            fs = fsspec.filesystem(target_protocol, **(target_options or {}))
        self.fs = fs
        self._target_options = target_options or dict(fs.storage_options)
        self._options = {
            k: v
            for k, v in options.items()
            if k not in ("fo", "target_protocol", "skip_instance_cache")
        }
        self._cache: Cache | None = None

    @property
    def cache(self) -> Cache:
        """The cache behind this filesystem."""
        if self._cache is None:
            from shardcache.cache import Cache
            from shardcache.defaults import default_cache

            options = dict(self._options)
            if self._target_options:
                options.setdefault("storage_options", self._target_options)
            self._cache = Cache(**options) if options else default_cache()
        return self._cache

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return str(path).removeprefix("shardcache::").removeprefix("shardcache://")

    def _url(self, path: str) -> str:
        return str(self.fs.unstrip_protocol(self._strip_protocol(path)))

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> io.BufferedIOBase:
        if mode != "rb":
            raise ConfigError(f"{path}: the cache reads shards; mode {mode!r} is not supported")
        stream = self.cache.open(self._url(path))
        assert isinstance(stream, io.BufferedIOBase)
        return stream

    def info(self, path: str, **options: Any) -> Any:
        """As the target filesystem; size from the cache where it has the shard."""
        entry = self.cache.entry(self._url(path))
        if entry is not None:
            return {"name": self._strip_protocol(path), "size": entry.size, "type": "file"}
        return self.fs.info(self._strip_protocol(path), **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """As the target filesystem."""
        return self.fs.ls(self._strip_protocol(path), detail=detail, **options)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_options: Any
    ) -> bytes:
        """Bytes of a shard; negative offsets count from the end."""
        with self._open(path) as stream:
            size = stream.seek(0, io.SEEK_END)
            first, last = (_offset(start, size, 0), _offset(end, size, size))
            stream.seek(first)
            return stream.read(max(0, last - first))


def _offset(value: int | None, size: int, default: int) -> int:
    if value is None:
        return default
    return max(0, size + value) if value < 0 else min(value, size)
