"""Lightning hooks that create directories, prewarm the first shards and log cache metrics.

    hooks = shardcache.lightning.ShardCacheCallback(cache, "s3://bucket/train-{0000..2047}.tar")
    trainer = Trainer(callbacks=[hooks])

The hooks run in every rank, but only the first rank of each node prewarms, and only rank 0 logs the
metrics. A fault of the cache is logged as a warning, and does not stop the run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcache import sync
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.prewarm import expand
from shardcache.ranks import detect
from shardcache.stats.summary import stats_of

if TYPE_CHECKING:
    from shardcache.cache import Cache

logger = logging.getLogger(__name__)


class ShardCacheHooks:
    """The hooks of ``ShardCacheCallback``, for training loops without Lightning.

    Args:
        cache: the cache that the data loaders read through.
        shards: one or several WebDataset specifications, in reading order.
        prewarm: the number of shards to download before training starts; None means all shards.
        makedirs: directories to create before training starts.

    Raises:
        ConfigError: ``prewarm`` is neither None nor a number of shards.
    """

    def __init__(
        self,
        cache: Cache,
        shards: str | Iterable[str] = (),
        *,
        prewarm: int | None = 8,
        makedirs: Iterable[str | Path] = (),
    ) -> None:
        if prewarm is not None and (not isinstance(prewarm, int) or prewarm < 0):
            raise ConfigError(f"prewarm is {prewarm!r}. Give a number of shards, or None for all.")
        self.cache = cache
        self.shards = (shards,) if isinstance(shards, str) else tuple(shards)
        self.prewarm = prewarm
        self.makedirs = tuple(map(Path, makedirs))
        self._counters: Counter[str] | None = None  # of the last call of `metrics`

    def setup(self, trainer: Any = None, pl_module: Any = None, stage: str | None = None) -> None:
        """Create the directories; in the first rank of each node, prewarm the first shards.

        Raises:
            OSError: `sync.makedirs` cannot create a directory.
        """
        for path in self.makedirs:
            sync.makedirs(path)
        if stage not in (None, "fit"):
            return
        local_rank = getattr(trainer, "local_rank", detect().local_rank)
        if local_rank in (None, 0) and self.shards and self.prewarm != 0:
            try:
                urls = expand(self.shards, self.cache)[: self.prewarm]
                self.cache.prewarm(map(self.cache.parse, urls), best_effort=True)
            except (OSError, ShardCacheError) as exn:
                logger.warning("the first shards are not prewarmed: %s", exn)
        self.metrics()

    def on_train_epoch_end(self, trainer: Any = None, pl_module: Any = None) -> None:
        """Log the `metrics` of the epoch that ends."""
        if pl_module is not None and (metrics := self.metrics()):
            pl_module.log_dict(metrics, rank_zero_only=True)

    def metrics(self) -> dict[str, float]:
        """Return this node's metrics by name, counted since the last call or since `setup`.

        The first call returns none, nor does a call that cannot read the counters. Processes write
        their counters once a second, so the last reads of an epoch may be counted in the next one.
        """
        before, self._counters = self._counters, None
        try:
            self._counters = Counter(self.cache.stats().counters)
        except (OSError, ShardCacheError) as exn:
            logger.warning("the cache metrics of this epoch are missing: %s", exn)
        if before is None or self._counters is None:
            return {}
        stats = stats_of(self._counters - before)
        metrics = {
            "shardcache/opens": stats.opens,
            "shardcache/hit_rate": stats.hit_rate,
            "shardcache/bytes_read": stats.bytes_opened + stats.bytes_bypassed,
            "shardcache/bytes_fetched": stats.bytes_origin,
        }
        return {name: float(value) for name, value in metrics.items() if value is not None}


def __getattr__(name: str) -> Any:
    """Define ``ShardCacheCallback`` on first use, because Lightning is slow to import.

    The class combines `ShardCacheHooks` with ``Callback`` of ``lightning`` or
    ``pytorch_lightning``; of the two packages, one that is already imported comes first.
    """
    if name != "ShardCacheCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    packages = ["lightning.pytorch", "pytorch_lightning"]
    for package in sorted(packages, key=lambda package: package not in sys.modules):
        with contextlib.suppress(ImportError):
            bases = (ShardCacheHooks, importlib.import_module(package).Callback)
            return globals().setdefault(name, type(name, bases, {"__module__": __name__}))
    raise ConfigError(
        "ShardCacheCallback needs Lightning, which is not installed: pip install lightning. "
        "ShardCacheHooks has the same hooks for other loops."
    )
