"""Hooks for Lightning: directories, the first shards, and what the cache did, in the logger.

    hooks = shardcache.lightning.ShardCacheCallback(cache, "s3://bucket/train-{0000..2047}.tar")
    trainer = Trainer(callbacks=[hooks])

Works with ``lightning`` and with ``pytorch_lightning``: the callback derives from ``Callback`` of
whichever is imported when it is first used. Without either, call the hooks by hand
(`ShardCacheHooks`).

No hook stops a run: what cannot be prewarmed or counted is a warning. Hooks run in every rank; only
the first one of a node prewarms, and only rank 0 logs. Nothing is closed, because workers of the
loaders go on after every hook.
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
from shardcache.ranks import detect
from shardcache.stats.database import NO_RANK, Sample
from shardcache.stats.summary import summed

if TYPE_CHECKING:
    from shardcache.cache import Cache

logger = logging.getLogger(__name__)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class ShardCacheHooks:
    """The hooks of ``ShardCacheCallback``, for training loops without Lightning.

    Args:
        cache: the cache of the loaders.
        shards: one WebDataset specification or several, in the order in which they are read.
        prewarm: how many of the shards to fetch before training begins; None fetches all.
        makedirs: directories to make before training begins.

    Raises:
        ConfigError: ``prewarm`` is no number of shards.
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
        self._before: Counter[str] | None = None

    def setup(self, trainer: Any = None, pl_module: Any = None, stage: str | None = None) -> None:
        """Make the directories; the first rank of a node fetches the first shards.

        Raises:
            OSError: a directory cannot be made; see `sync.makedirs`.
        """
        for path in self.makedirs:
            sync.makedirs(path)
        if stage in (None, "fit"):
            local_rank = getattr(trainer, "local_rank", detect().local_rank)
            if local_rank in (None, 0) and self.shards and self.prewarm != 0:
                self._warm()
            self._before = self._counted()

    def on_train_epoch_end(self, trainer: Any = None, pl_module: Any = None) -> None:
        """Log `metrics` of the epoch."""
        if pl_module is not None and (metrics := self.metrics()):
            pl_module.log_dict(metrics, rank_zero_only=True)

    def metrics(self) -> dict[str, float]:
        """What the node's processes did since the last call, or since `setup`.

        Lightning starts the loader before it says that an epoch begins, so an epoch counts from
        the end of the one before. Workers write down their counts once a second; the last ones
        may be logged with the next epoch.
        """
        before, self._before = self._before, self._counted()
        if self._before is None or before is None:
            return {}
        stats = summed([Sample(0, 0, NO_RANK, self._before - before)])
        found = {
            "shardcache/opens": stats.opens,
            "shardcache/hit_rate": stats.hit_rate,
            "shardcache/bytes_read": stats.bytes_opened + stats.bytes_bypassed,
            "shardcache/bytes_fetched": stats.bytes_origin,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _counted(self) -> Counter[str] | None:
        try:
            return Counter(self.cache.stats().counters)
        except (OSError, ShardCacheError) as exn:
            logger.warning("this epoch's metrics are missing: %s", exn)
            return None

    def _warm(self) -> None:
        from shardcache.prewarm import expand

        try:
            urls = expand(self.shards, self.cache)[: self.prewarm]
            self.cache.prewarm(map(self.cache.parse, urls), best_effort=True)
        except (OSError, ShardCacheError) as exn:
            logger.warning("the first shards are not prewarmed: %s", exn)


if TYPE_CHECKING:

    class ShardCacheCallback(ShardCacheHooks):
        """A ``Callback`` of Lightning with these hooks; see `ShardCacheHooks` for the arguments."""

else:

    def __getattr__(name: str) -> Any:
        """Make `ShardCacheCallback` when it is first used: Lightning is slow to import."""
        if name != "ShardCacheCallback":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for package in sorted(_PACKAGES, key=lambda package: package not in sys.modules):
            with contextlib.suppress(ImportError):
                bases = (ShardCacheHooks, importlib.import_module(package).Callback)
                described = {"__module__": __name__, "__doc__": ShardCacheHooks.__doc__}
                return globals().setdefault(name, type(name, bases, described))
        raise ConfigError(
            "ShardCacheCallback is a callback of Lightning, which is not installed: pip install "
            "lightning. ShardCacheHooks has the same hooks for other loops."
        )
