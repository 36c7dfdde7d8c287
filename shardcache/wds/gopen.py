"""WebDataset's ``gopen``, reading shards through a cache: for pipelines that cannot be changed.

Only the reading of shards is taken over. Everything else, such as writing and local files, goes to
the function that was there before. Where WebDataset has none, as for ``s3``, small files such as
timm's ``_info.json`` are read from their origin and not stored.

WebDataset's users pass handlers that skip whatever fails, without a word. So each kind of error is
logged once per process before a handler gets it.
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
#: Kinds of errors that were logged in this process, or in the one that it was forked from.
_logged: set[type[Exception]] = set()


def register(scheme: str, cache: Cache) -> None:
    """Let ``cache`` open the shards of one scheme, such as ``s3``, in WebDataset's own ``gopen``.

    The table lives in this process: forked workers inherit it, spawned ones must call this in
    ``worker_init_fn``. ``shardcache run`` reaches all of them. Writing, and files that are no
    archives, are left to the handler that the scheme had before.
    """
    from webdataset import gopen_schemes

    before = gopen_schemes.get(scheme)
    before = getattr(before, "before", before)  # registering again replaces the cache
    before = before or _uncached(lambda: cache, gopen_schemes["__default__"])
    gopen_schemes[scheme] = _reader(lambda: cache, before)


def read_through_cache(module: Any) -> None:
    """Replace ``gopen`` in the module `webdataset.gopen`; the environment describes the cache."""
    schemes, rewrite = module.gopen_schemes, module.rewrite_url
    schemes["__default__"] = _uncached(default_cache, schemes["__default__"])
    module.gopen = _reader(default_cache, module.gopen, rewrite)


def _reader(
    cache_of: Callable[[], Cache], before: _Gopen, rewrite: Callable[[str], str] = str
) -> _Gopen:
    """A ``gopen`` that reads shards from a cache, and leaves everything else to ``before``."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        try:
            if mode == "rb" and _is_shard(found := rewrite(url), cache := cache_of()):
                return cache.open(found)
        except Exception as exn:
            log_once(exn, url)
            raise
        return before(url, mode, bufsize, **options)

    gopen.before = before  # type: ignore[attr-defined]
    return gopen


def _uncached(cache_of: Callable[[], Cache], before: _Gopen) -> _Gopen:
    """A handler of schemes that WebDataset has none for: it stores nothing."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        if mode == "rb" and url.partition(":")[0] in DEFAULT_SCHEMES:
            cache = cache_of()
            return cache.opener.stream(cache.parse(url))
        return before(url, mode, bufsize, **options)

    return gopen


def _is_shard(url: str, cache: Cache) -> bool:
    """Whether the cache reads what WebDataset asks for."""
    try:
        shard = cache.parse(url)
    except ConfigError:
        if url.partition(":")[0] in DEFAULT_SCHEMES:
            raise
        return False  # a command, or a scheme that somebody else has registered
    if (shard.is_local or url.startswith("pipe:")) and _is_secured():
        return False  # WebDataset refuses them
    return not cache.opener.is_in_place(shard) and SHARD.search(shard.basename) is not None


def _is_secured() -> bool:
    """Whether ``WDS_SECURE`` or the program forbids local files and commands; WebDataset 1.0."""
    from webdataset import utils

    return bool(getattr(utils, "enforce_security", False))


def log_once(exn: Exception, url: str) -> None:
    """Log an error that a handler may hide, once per kind and process."""
    if type(exn) in _logged:
        return
    _logged.add(type(exn))
    text, shown = str(exn).rstrip("."), redact(url)
    where = "" if shown in text else f"{shown}: "
    advice = "Handlers that ignore errors skip what fails so, and this is not said again."
    logger.error("%s%s. %s", where, text, advice)
