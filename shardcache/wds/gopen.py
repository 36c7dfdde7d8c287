"""Replace WebDataset's ``gopen``, for pipelines that cannot be changed.

Only shards are read through the cache. Other calls, such as writes and local files, go to the
original function. WebDataset has no function for some schemes, such as ``s3``: other files with
these schemes, such as timm's ``_info.json``, are read from their origin and not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from shardcache.cache import Cache, default_cache
from shardcache.errors import ConfigError
from shardcache.origins.listing import SHARD
from shardcache.urls import DEFAULT_SCHEMES, redact

logger = logging.getLogger(__name__)

_Gopen = Callable[..., Any]
#: Types of errors that this process, or its parent before the fork, has logged. Many users pass
#: handlers that silently skip errors.
_logged: set[type[Exception]] = set()


def register(scheme: str, cache: Cache) -> None:
    """Let WebDataset's ``gopen`` read the shards of one scheme, such as ``s3``, through ``cache``.

    Affects this process and its forked workers. Spawned workers must call this function in their
    ``worker_init_fn``; ``shardcache run`` reaches all workers. Writes, and files that are not tar
    archives, go to the function that the scheme had before.
    """
    from webdataset import gopen_schemes

    original = gopen_schemes.get(scheme)
    original = getattr(original, "original", original)  # a second call replaces the cache
    original = original or _uncached(lambda: cache, gopen_schemes["__default__"])
    gopen_schemes[scheme] = _cached(lambda: cache, original)


def read_through_cache(module: Any) -> None:
    """Replace ``gopen`` in the module `webdataset.gopen`, to read through the default cache."""
    schemes, rewrite = module.gopen_schemes, module.rewrite_url
    schemes["__default__"] = _uncached(default_cache, schemes["__default__"])
    module.gopen = _cached(default_cache, module.gopen, rewrite)


def _cached(
    cache_of: Callable[[], Cache], original: _Gopen, rewrite: Callable[[str], str] = str
) -> _Gopen:
    """Return a ``gopen`` that reads shards through a cache; other calls go to ``original``."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        try:
            if mode == "rb" and _is_shard(rewritten := rewrite(url), cache := cache_of()):
                return cache.open(rewritten)
        except Exception as exn:
            log_once(exn, url)
            raise
        return original(url, mode, bufsize, **options)

    gopen.original = original  # type: ignore[attr-defined]
    return gopen


def _uncached(cache_of: Callable[[], Cache], original: _Gopen) -> _Gopen:
    """Return a ``gopen`` that reads files from their origin, for schemes unknown to WebDataset."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        if mode == "rb" and url.partition(":")[0] in DEFAULT_SCHEMES:
            cache = cache_of()
            return cache.opener.stream(cache.parse(url))
        return original(url, mode, bufsize, **options)

    return gopen


def _is_shard(url: str, cache: Cache) -> bool:
    """Return whether to read a URL through the cache."""
    from webdataset import utils

    try:
        shard = cache.parse(url)
    except ConfigError:
        if url.partition(":")[0] in DEFAULT_SCHEMES:
            raise
        return False  # a command, or a scheme of another program
    # WebDataset 1.0 refuses local files and commands if WDS_SECURE or the program says so.
    is_forbidden = getattr(utils, "enforce_security", False)
    if is_forbidden and (shard.is_local or url.startswith("pipe:")):
        return False
    return not cache.opener.is_in_place(shard) and SHARD.search(shard.basename) is not None


def log_once(exn: Exception, url: str) -> None:
    """Log an error that a handler may hide, once per type of error and process."""
    if type(exn) in _logged:
        return
    _logged.add(type(exn))
    text, shown = str(exn).rstrip("."), redact(url)
    where = "" if shown in text else f"{shown}: "
    note = "If a handler ignores errors, it skips such shards; further ones are not logged."
    logger.error("%s%s. %s", where, text, note)
