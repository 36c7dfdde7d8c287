"""Provide the fsspec protocol ``shardcache``, for URLs such as ``shardcache::s3://bucket/a.tar``.

With these URLs, pandas, Arrow, Hugging Face datasets and other users of fsspec read through the
default cache, or through a cache that the storage options describe::

    fsspec.open("shardcache::s3://bucket/a.tar", shardcache={"dir": "/local/nvme/shards"})

Files are seekable. Listings come from the target: the filesystem of the URL after ``shardcache::``.
Names are the target's, as in fsspec's own caches: ``bucket/a.tar``. Only `unstrip_protocol` returns
``shardcache://s3://bucket/a.tar``, which opens through the cache in any program.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, NoReturn

import fsspec
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.utils import stringify_path, tokenize

from shardcache.errors import ConfigError
from shardcache.faults import ignoring
from shardcache.origins.filesystem import described
from shardcache.reading.stream import BUFFER, ShardStream
from shardcache.store.directory import DamagedError
from shardcache.threads import lazy
from shardcache.urls import redact

if TYPE_CHECKING:
    from shardcache.cache import Cache

#: Options that fsspec and its users pass to every filesystem or to `open`. The cache ignores them.
_FSSPEC_OPTIONS = frozenset(
    [
        *("fo", "asynchronous", "loop", "batch_size", "block_size", "default_block_size"),
        *("cache_type", "default_cache_type", "cache_options", "default_cache", "fill_cache"),
        *("size", "autocommit", "use_listings_cache", "listings_expiry_time", "max_paths"),
    ]
)
#: The caches of this process, by their options. fsspec keeps a filesystem for each thread.
_caches: dict[str, Cache] = {}


class ShardFile(io.BufferedReader):
    """A file that is open for reading through the cache.

    fsspec's block cache requires ``blocksize``, ``path`` and ``_fetch_range``, and sets ``closed``.
    """

    blocksize = BUFFER

    def __init__(self, raw: io.RawIOBase, path: str) -> None:
        super().__init__(raw, BUFFER)
        self.path = path

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes; all that are left for any number below zero, as fsspec's files do."""
        return super().read(-1 if size is None or size < 0 else size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.seek(start)
        return self.read(end - start)

    @property
    def closed(self) -> bool:
        return super().closed

    @closed.setter
    def closed(self, is_closed: bool) -> None:
        pass  # `close` has closed the file

    @property
    def size(self) -> int | None:
        """The size in bytes, once the origin has stated it; None if the origin does not."""
        if not isinstance(self.raw, ShardStream):  # a file that is read in place
            return os.fstat(self.fileno()).st_size
        try:
            return self.raw.size()
        except io.UnsupportedOperation:
            return None

    def fileno(self) -> int:
        """Return a descriptor of the shard's file; waits until the shard is complete."""
        if isinstance(self.raw, ShardStream) and not self.closed:
            self.raw.wait(complete=True)
        return super().fileno()


class ShardCacheFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """A read-only view of another filesystem through a cache, for any thread or process.

    Args:
        target_protocol: the protocol of the other filesystem, such as ``s3``.
        target_options: storage options of that filesystem, which the cache uses as well.
        target: protocol and options from a URL such as ``shardcache://s3://...``.
        fs: the other filesystem itself, instead of its protocol and options.
        **options: options of a `Cache`. Without any options, the default cache is used.

    Raises:
        ConfigError: the URL after ``shardcache::`` is missing.
    """

    protocol = "shardcache"
    _strip_tokenize_options = ("fo",)  # one instance for all paths

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        target: tuple[str, dict[str, Any]] | None = None,
        fs: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if target_protocol is None and target is not None:
            target_protocol, in_url = target
            # As in a chain of URLs, options for the target are passed under the target's protocol.
            target_options = {**in_url, **options.pop(target_protocol, {})}
        anon = options.pop("anon", None)  # pandas repeats a request that was refused with it
        if anon and target_protocol == "s3":
            target_options = {**(target_options or {}), "anon": anon}
        if (fs is None) == (target_protocol is None):
            text = "Write the URL of the origin after shardcache::, or pass only fs=..., or as in "
            raise ConfigError(f"{text}fsspec.filesystem('shardcache', target_protocol='s3').")
        if getattr(fs, "storage_args", ()):
            raise ConfigError(f"Pass the arguments of {type(fs).__name__} by name.")
        self._fs = fs or fsspec.filesystem(target_protocol, **(target_options or {}))
        self._pid = os.getpid()
        self._options = {k: v for k, v in options.items() if k not in _FSSPEC_OPTIONS}
        if of_target := self._fs.storage_options:
            names = self._fs.protocol  # one, or several
            tables = dict.fromkeys([names] if isinstance(names, str) else names, of_target)
            self._options.setdefault("storage_options", tables)
        # As in fsspec's caches: the form of a path depends on the target of the instance.
        self._strip_protocol = self._target_path  # type: ignore[method-assign]

    @property
    def fs(self) -> Any:
        """The target filesystem. A forked child makes its own: s3fs needs a thread."""
        if self._pid != os.getpid():
            self._fs = type(self._fs)(*self._fs.storage_args, **self._fs.storage_options)
            self._pid = os.getpid()
        return self._fs

    @lazy
    def cache(self) -> Cache:
        """The cache that this filesystem reads through. Raises ConfigError for invalid options."""
        from shardcache.cache import Cache, default_cache

        if not self._options:
            return default_cache()
        key = tokenize(self._options)
        try:
            return _caches.get(key) or _caches.setdefault(key, Cache(**self._options))
        except ConfigError as exn:
            advice = " Options of the origin go into a table of its protocol, such as s3={...}."
            is_unknown = exn.message.startswith("unknown option")
            raise ConfigError(exn.message + advice * is_unknown) from None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        url = _without_protocol(path)
        protocol = _protocol(url)
        return fsspec.get_filesystem_class(protocol)._strip_protocol(url) if protocol else url

    def _target_path(self, path: Any) -> Any:
        if isinstance(path, list):
            return [self._target_path(item) for item in path]
        return self.fs._strip_protocol(_without_protocol(path))

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        url = _without_protocol(path)
        if (protocol := _protocol(url)) is None:
            return {}  # the target is the next part of the chain
        options = fsspec.get_filesystem_class(protocol)._get_kwargs_from_urls(url)
        return {"target": (protocol, options)}

    def _url(self, path: str, version_id: str | None = None) -> str:
        url = str(self.fs.unstrip_protocol(self._strip_protocol(path)))
        if version_id is None:
            return url
        if not url.startswith("s3://"):
            raise ConfigError(f"{redact(url)} has no version_id: only objects of S3 have one.")
        return f"{url}?versionId={version_id}"

    def unstrip_protocol(self, name: str) -> str:
        """Return the full URL of a file: ``shardcache://s3://...``."""
        return f"shardcache://{self._url(name)}"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> ShardFile:
        if mode != "rb":
            self._refuse(f"to open {redact(path)} in mode {mode!r}")
        version_id = options.pop("version_id", None)
        if unknown := sorted(options.keys() - _FSSPEC_OPTIONS):
            raise ConfigError(f"{redact(path)} cannot be opened with {', '.join(unknown)}.")
        stream: Any = self.cache.open(self._url(path, version_id))
        return ShardFile(stream.detach(), path)

    def info(self, path: str, **options: Any) -> Any:
        """Return the target's info or, of a cached shard, what its download recorded."""
        cache, entry = self.cache, None  # outside `suppress`, so that invalid options raise
        path = self._strip_protocol(path)
        # Not a shard's URL, which the target may accept, or the disk fails.
        with ignoring(ConfigError, OSError):
            entry = cache.entry(self._url(path, options.get("version_id")))
        if entry is None:
            return self._ask("info", path, **options)
        info = {"name": path, "size": entry.size, "type": "file"}
        # A cached shard needs no network. Without an ETag, it came from a target that has fields of
        # its own, such as a disk; they describe the shard unless it was replaced since.
        with ignoring(OSError, DamagedError):  # the entry was evicted
            recorded = entry.metadata().info
            if recorded.etag is None:
                listed = self.fs.info(path, **options)
                return listed if listed["size"] == entry.size else info
            info |= {"ETag": recorded.etag, "VersionId": recorded.version_id}
            with contextlib.suppress(ValueError):  # s3fs has another format
                info["LastModified"] = parsedate_to_datetime(recorded.modified or "")
        return info

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """Return the listing of a directory of the target filesystem."""
        return self._ask("ls", path, detail=detail, **options)

    def ukey(self, path: str) -> str:
        """Return a hash of the version of a file, the same whether or not the file is cached."""
        return described(self.info(path)).version

    def checksum(self, path: str) -> int:
        return int(self.ukey(path), 16)

    def _ask(self, method: str, path: Any = None, *args: Any, **options: Any) -> Any:
        """Call a method of the target. It removes its own protocol from the path."""
        path = path and _without_protocol(path)
        return _redacting(lambda: getattr(self.fs, method)(path, *args, **options))

    def walk(self, path: str, *args: Any, **options: Any) -> Any:
        """Yield the directories, like the target's method."""
        found = self._ask("walk", path, *args, **options)
        while (directory := _redacting(next, found, None)) is not None:
            yield directory

    def expand_path(self, *args: Any, **options: Any) -> Any:
        """Return the files that paths or patterns stand for."""
        return _redacting(super().expand_path, *args, **options)

    def _refuse(self, action: str, *_args: Any, **_options: Any) -> NoReturn:
        advice = "Write to the URL without shardcache::."
        raise ConfigError(f"A cache is read-only: it refuses {action}. {advice}")


def _redacting(function: Any, *args: Any, **options: Any) -> Any:
    """Call a function, and raise its error without secrets."""
    try:
        return function(*args, **options)
    except Exception as exn:
        if redact(str(exn)) == str(exn):
            raise
        is_absent = isinstance(exn, FileNotFoundError)
        error = (FileNotFoundError if is_absent else OSError)(redact(str(exn)))
    raise error


def _without_protocol(path: Any) -> str:
    return str(stringify_path(path)).removeprefix("shardcache::").removeprefix("shardcache://")


def _protocol(url: str) -> str | None:
    protocol, separator, _ = url.partition("://")
    return protocol if protocol and separator and "/" not in protocol else None


def _add(method: Any, names: str) -> None:
    for name in names.split():
        setattr(ShardCacheFileSystem, name, functools.partialmethod(method, name))


_LISTING = "_parent created du find glob invalidate_cache modified sign"
_WRITING = "copy cp_file makedirs mkdir mv pipe pipe_file put put_file rm rm_file rmdir touch"
_add(ShardCacheFileSystem._ask, _LISTING)
_add(ShardCacheFileSystem._refuse, _WRITING)  # other names, such as `delete`, call these
