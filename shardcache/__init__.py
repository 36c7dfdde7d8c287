"""Cache training shards on the local disk, so that a node downloads each shard once.

import shardcache

cache = shardcache.Cache("/local/nvme/shards", max_size="800GB")
cache.attach(dataset)  # a WebDataset or DataPipeline
"""

import importlib
from typing import TYPE_CHECKING, Any

from shardcache.errors import (
    REMOVED,
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
    TransferTimeoutError,
)

if TYPE_CHECKING:
    from shardcache import sync, wds
    from shardcache.cache import Cache, attach, default_cache, url_opener
    from shardcache.config import __version__
    from shardcache.dataset.dataset import TarDataset
    from shardcache.dataset.mixture import Mixture
    from shardcache.dataset.sampler import ShardBatchSampler
    from shardcache.prewarm import expand

__all__ = [
    "AccessDeniedError",
    "Cache",
    "CacheFullError",
    "ConfigError",
    "IntegrityError",
    "LockTimeoutError",
    "Mixture",
    "ShardBatchSampler",
    "ShardCacheError",
    "ShardNotFoundError",
    "TarDataset",
    "TransferError",
    "TransferTimeoutError",
    "__version__",
    "attach",
    "default_cache",
    "expand",
    "sync",
    "url_opener",
    "wds",
]

#: Public names that are imported on first use. This keeps `import shardcache` fast.
_ON_FIRST_USE = {
    "Cache": "shardcache.cache",
    "Mixture": "shardcache.dataset.mixture",
    "ShardBatchSampler": "shardcache.dataset.sampler",
    "TarDataset": "shardcache.dataset.dataset",
    "__version__": "shardcache.config",
    "attach": "shardcache.cache",
    "default_cache": "shardcache.cache",
    "expand": "shardcache.prewarm.plan",
    "sync": "shardcache.sync",
    "url_opener": "shardcache.cache",
    "wds": "shardcache.wds",
}


if not TYPE_CHECKING:  # type checkers would accept any misspelt name if they saw __getattr__

    def __getattr__(name: str) -> Any:
        if (full := f"shardcache.{name}") in REMOVED:
            raise ConfigError(f"{full} was removed. {REMOVED[full]}")
        if name not in _ON_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_ON_FIRST_USE[name])
        is_module = module.__name__.endswith(f".{name}")
        return globals().setdefault(name, module if is_module else getattr(module, name))


def __dir__() -> list[str]:
    return sorted(__all__)
