"""shardcache: each training shard crosses the network once per node.

import shardcache, webdataset as wds

cache = shardcache.Cache("/local/nvme/shards", max_size="800GB")
ds = cache.attach(wds.WebDataset("s3://bucket/train-{0000..2047}.tar", shardshuffle=100))
"""

from shardcache.cache import Cache
from shardcache.defaults import default_cache, url_opener
from shardcache.errors import (
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
from shardcache.version import __version__

__all__ = [
    "AccessDeniedError",
    "Cache",
    "CacheFullError",
    "ConfigError",
    "IntegrityError",
    "LockTimeoutError",
    "ShardCacheError",
    "ShardNotFoundError",
    "TransferError",
    "TransferTimeoutError",
    "__version__",
    "default_cache",
    "url_opener",
]
