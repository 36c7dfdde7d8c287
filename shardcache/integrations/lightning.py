"""Hooks for Lightning: directories, the first shards, and what the cache did, in the logger.

    hooks = shardcache.lightning.ShardCacheCallback(cache, "s3://bucket/train-{0000..2047}.tar")
    trainer = Trainer(callbacks=[hooks])

Works with ``lightning`` and with ``pytorch_lightning``. Neither is imported by this module: a
callback derives from ``Callback`` of whichever is there when it is made. Without either, the
hooks may be called by hand (`ShardCacheHooks`).

Invariants:
    * No hook stops a run: what cannot be prewarmed or counted is a warning, and shards are
      fetched when they are read.
    * Nothing is closed: workers of the loaders go on after every hook, and each process ends
      its own session.

Hooks run in every rank; only the first one of a node prewarms, and only rank 0 logs.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shardcache import sync
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.ranks import detect
from shardcache.stats.summary import Stats

if TYPE_CHECKING:
    from shardcache.cache import Cache

__all__ = ["ShardCacheCallback", "ShardCacheHooks"]

logger = logging.getLogger(__name__)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class ShardCacheHooks:
    """The hooks themselves, for a training loop of one's own.

    Args:
        cache: what the loaders read through.
        shards: a WebDataset specification, or several, in the order in which they are read.
        prewarm: how many of them to have before training begins, the rest comes as it is
            read; 0 for none, None for all.
        makedirs: directories that the run writes to, made before it begins.
        log: whether to log after each training epoch.

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
        log: bool = True,
    ) -> None:
        if prewarm is not None and (not isinstance(prewarm, int) or prewarm < 0):
            raise ConfigError(f"prewarm is {prewarm!r}. Give a number of shards, or None for all.")
        self.cache = cache
        self.shards = (shards,) if isinstance(shards, str) else tuple(shards)
        self.prewarm = prewarm
        self.makedirs = tuple(map(Path, makedirs))
        self.log = log
        self._before: Mapping[str, int] | None = None

    def setup(self, trainer: Any = None, pl_module: Any = None, stage: str | None = None) -> None:
        """Make the directories; in the first rank of a node have the first shards.

        Raises:
            OSError: a directory cannot be made; see `sync.makedirs`.
        """
        for path in self.makedirs:
            sync.makedirs(path)
        if stage in (None, "fit"):
            if _local_rank(trainer) == 0:
                self._warm()
            self._before = self._counted()

    def on_train_epoch_end(self, trainer: Any = None, pl_module: Any = None) -> None:
        """Log what was done since the last one ended; see `metrics`."""
        metrics = self.metrics()
        if self.log and pl_module is not None and metrics:
            pl_module.log_dict(metrics, rank_zero_only=True)

    def metrics(self) -> dict[str, float]:
        """What the node's processes did since this was last asked, or since `setup`.

        From end to end of epochs, because Lightning has the loader begin before it says that
        an epoch begins. Opens, hits per open, bytes that were read through the cache, and
        bytes that came from the origin. A process writes down a hit once a second, so that the
        last ones of an epoch may be told with the next.
        """
        before, counted = self._before, self._counted()
        self._before = counted
        if counted is None or before is None:
            return {}
        stats = Stats(None, None, {n: max(0, v - before.get(n, 0)) for n, v in counted.items()}, {})
        found = {
            "shardcache/opens": stats.opens,
            "shardcache/hit_rate": stats.hit_rate,
            "shardcache/bytes_read": stats.bytes_opened + stats.bytes_bypassed,
            "shardcache/bytes_fetched": stats.bytes_origin,
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _counted(self) -> Mapping[str, int] | None:
        try:
            return self.cache.stats().counters
        except (OSError, ShardCacheError) as exn:
            logger.warning("what the cache did cannot be told: %s", exn)
            return None

    def _warm(self) -> None:
        if not self.shards or self.prewarm == 0:
            return
        from shardcache.prewarm import expand

        try:
            urls = expand(self.shards, self.cache)[: self.prewarm]
            report = self.cache.prewarm(map(self.cache.parse, urls), best_effort=True)
        except (OSError, ShardCacheError) as exn:
            logger.warning("the first shards are not prewarmed: %s", exn)
            return
        for result in report.results:
            if result.error is not None:
                logger.warning("not prewarmed: %s", result.error)


def _local_rank(trainer: Any) -> int:
    """This process's place on its node; 0 where nobody tells."""
    told = getattr(trainer, "local_rank", None)
    return told if isinstance(told, int) else detect().local_rank or 0


class ShardCacheCallback(ShardCacheHooks):
    """A ``Callback`` of Lightning with these hooks; see `ShardCacheHooks` for the arguments.

    Raises:
        ConfigError: neither ``lightning`` nor ``pytorch_lightning`` is installed.
    """

    def __new__(cls, *_args: Any, **_options: Any) -> Self:
        """An object of a class that is Lightning's `Callback`, too."""
        made: Self = object.__new__(_derived(cls))
        return made

    def __reduce__(self) -> Any:
        # The class is made on the fly, so it cannot be named in a pickle.
        return _again, (type(self).__mro__[1], self.__dict__)


def _again(cls: type[ShardCacheCallback], state: dict[str, Any]) -> ShardCacheCallback:
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made


def _derived(cls: type[ShardCacheCallback]) -> Any:
    """``cls`` and ``Callback`` as one class.

    Of the package that is in use; of both if both are, since a trainer of one takes no callback
    of the other; of the first that can be imported if none is.
    """
    bases = [sys.modules[name].Callback for name in _PACKAGES if name in sys.modules]
    for name in _PACKAGES:
        if not bases:
            try:
                bases.append(importlib.import_module(name).Callback)
            except ModuleNotFoundError as exn:
                if exn.name is None or not name.startswith(exn.name):
                    raise
    if not bases:
        raise ConfigError(
            "ShardCacheCallback is a callback of Lightning, which is not installed: pip install "
            "lightning. ShardCacheHooks has the same hooks for other loops."
        )
    return type(cls.__name__, (cls, *bases), {"__module__": cls.__module__, "__doc__": cls.__doc__})
