"""Replace WebDataset's ``gopen``, for pipelines that cannot be changed.

Only shards are read through the cache: files that WebDataset's own readers of archives open, and
files that are named like archives. Other calls, such as writes and reads of local files, go to the
original function. So do shards that the cache cannot read but WebDataset may be able to: commands
for a shell, and ``gs://`` URLs without gcsfs or without its credentials. WebDataset has no function
for some schemes, such as ``s3``. Files with these schemes that are not shards, such as timm's
``_info.json``, are read from their origin and not stored.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from shardcache.cache import Cache, default_cache
from shardcache.errors import AccessDeniedError, ConfigError
from shardcache.origins.listing import SHARD
from shardcache.ranks import run_of_this_process
from shardcache.reading.stream import stream_file
from shardcache.urls import DEFAULT_SCHEMES, shown_url

logger = logging.getLogger(__name__)

_Gopen = Callable[..., Any]
#: The modules of WebDataset that call ``gopen`` for archives, and only for archives.
_READERS = frozenset({"webdataset.cache", "webdataset.tariterators"})
#: Schemes that WebDataset reads with programs that have credentials of their own.
_WEBDATASETS = frozenset({"gs", "hf"})
#: Kinds of messages that this process, or its parent before the fork, has logged. They are logged
#: because many users pass handlers that silently skip errors.
_logged: set[str] = set()
#: The shards that this process has left to WebDataset, without the secrets in their URLs.
_left: set[str] = set()


def register(scheme: str, cache: Cache) -> None:
    """Make WebDataset's ``gopen`` read the shards of one scheme, such as ``s3``, through ``cache``.

    Affects this process and the workers that it forks or spawns. Writes, and files that are not tar
    archives, go to the function that was registered for the scheme before.
    """
    from webdataset import gopen_schemes

    original = gopen_schemes.get(scheme)
    original = getattr(original, "original", original)  # a second call replaces the cache
    original = original or _uncached(lambda: cache, gopen_schemes["__default__"])
    gopen_schemes[scheme] = _cached(lambda: cache, original)
    inherited = vars(multiprocessing.current_process())["_config"]  # by spawned children, too
    inherited[f"shardcache {scheme}"] = _Registered(scheme, cache)


class _Registered:
    """Registers a scheme again in the process that unpickles this object."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __getstate__(self) -> dict[str, Any]:
        try:
            pickle.dumps(self._arguments)
        except Exception as exn:  # noqa: BLE001 - of an option; the process may need no shards
            text = "processes that are spawned do not read %s:// through the cache: %s"
            logger.warning(text, self._arguments[0], exn)
            return {"_arguments": ()}
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._arguments:
            register(*self._arguments)


def read_through_cache(module: Any) -> None:
    """Replace ``gopen`` in ``module``, `webdataset.gopen`, by one that uses the default cache."""
    schemes, rewrite = module.gopen_schemes, module.rewrite_url
    schemes["__default__"] = _uncached(default_cache, schemes["__default__"])
    module.gopen = _cached(default_cache, module.gopen, rewrite)


def _cached(
    cache_of: Callable[[], Cache], original: _Gopen, rewrite: Callable[[str], str] = str
) -> _Gopen:
    """Return a ``gopen`` that reads shards through a cache; other calls go to ``original``."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        cache, is_archive, is_tried = None, _is_archive_opened(), False
        try:
            if mode == "rb":
                cache, rewritten = cache_of(), rewrite(url)
                if is_tried := _is_shard(rewritten, cache, is_archive):
                    return cache.open(rewritten)
        except Exception as exn:
            scheme = url.partition(":")[0]
            has_other = scheme in _WEBDATASETS or scheme not in DEFAULT_SCHEMES
            if cache is None or not (
                has_other and isinstance(exn, (ConfigError, AccessDeniedError))
            ):
                log_once(exn, url, cache)
                raise
            if is_tried:
                cache.process.counters.add({"left": 1})
            if is_archive:
                _leave(url, str(exn), cache)
        return original(url, mode, bufsize, **options)

    gopen.original = original  # type: ignore[attr-defined]
    return gopen


def _uncached(cache_of: Callable[[], Cache], original: _Gopen) -> _Gopen:
    """Return a ``gopen`` that reads files from their origin, for schemes unknown to WebDataset."""

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> Any:
        if mode == "rb" and url.partition(":")[0] in DEFAULT_SCHEMES:
            cache = cache_of()
            return stream_file(cache.process, cache.parse(url))
        return original(url, mode, bufsize, **options)

    return gopen


def _is_archive_opened() -> bool:
    """Return whether the caller of ``gopen`` reads an archive."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "webdataset.gopen":
        frame = frame.f_back  # WebDataset's `gopen`, which calls what `register` has set
    return frame.f_globals.get("__name__") in _READERS


def _is_shard(url: str, cache: Cache, is_archive: bool) -> bool:
    """Return whether to read a URL through the cache; raise ConfigError if the cache cannot."""
    from webdataset import utils

    shard = cache.parse(url)
    # If WDS_SECURE or the program demands it, WebDataset 1.0 refuses local files and commands.
    is_forbidden = getattr(utils, "enforce_security", False)
    if is_forbidden and (shard.is_local or url.startswith("pipe:")):
        return False
    is_archive = is_archive or SHARD.search(shard.basename) is not None
    return is_archive and not cache.process.is_in_place(shard)


def _leave(url: str, reason: str, cache: Cache) -> None:
    """Log why WebDataset reads a shard, and add both to the file of `shardcache run`."""
    shown = shown_url(url)
    if shown in _left:
        return
    _left.add(shown)
    reason = reason.removeprefix(shown).lstrip(": ")
    if is_new("left", cache):
        text = "%s is not cached, and WebDataset reads it: %s Further ones are not logged."
        logger.warning(text, shown, reason)
    if path := run_of_this_process()[1]:
        with contextlib.suppress(OSError):  # no file: another node, or the command has ended
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write("\t".join(" ".join(text.split()) for text in (shown, reason)) + "\n")


def log_once(exn: Exception, url: str, cache: Cache | None) -> None:
    """Log an error that a handler may hide; each type of error once per job and node."""
    if not is_new(type(exn).__name__, cache):
        return
    text, shown = str(exn).rstrip("."), shown_url(url)
    where = "" if shown in text else f"{shown}: "
    note = "If a handler ignores errors, it skips such shards; further ones are not logged."
    logger.error("%s%s. %s", where, text, note)


def is_new(kind: str, cache: Cache | None) -> bool:
    """Return True once per kind of message, for the first process of the job on this node."""
    if kind in _logged:
        return False
    _logged.add(kind)
    return cache is None or cache.process.notices.is_new(kind)
