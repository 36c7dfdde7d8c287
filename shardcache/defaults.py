"""The cache of those who name none: from the environment and configuration files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shardcache.cache import Cache

if TYPE_CHECKING:
    from shardcache.options import Handler

__all__ = ["default_cache", "url_opener"]

_default: Cache | None = None


def default_cache() -> Cache:
    """The cache that ``SHARDCACHE_DIR``, ``SHARDCACHE_CONFIG`` and the like describe.

    Made once per process; a forked child uses the same object, safely.

    Raises:
        ConfigError: no directory is set anywhere, or an option cannot work.
    """
    global _default
    if _default is None:
        _default = Cache()
    return _default


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, **kw: Any
) -> Iterator[dict[str, Any]]:
    """A drop-in for ``webdataset.tariterators.url_opener`` on the default cache."""
    return default_cache().url_opener(data, handler, **kw)
