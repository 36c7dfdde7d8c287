"""`TarDataset`: the samples of many shards as a map-style data set."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import resource
import shlex
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcache import clock
from shardcache.cache import Cache, default_cache
from shardcache.dataset.index import OpenShard, count_samples, read_index_file, refuse_compressed
from shardcache.errors import ConfigError, IntegrityError
from shardcache.prewarm.plan import expand
from shardcache.ranks import detect
from shardcache.units import counted
from shardcache.urls import redact
from shardcache.wds import reraise

if TYPE_CHECKING:
    from shardcache.cache import Handler

logger = logging.getLogger(__name__)

#: Shards that a process keeps open, but never more than a quarter of the files that it may open.
_OPEN = 1024
#: Seconds without a read after which a shard is closed, so that it may be evicted. A worker that
#: needs a shard less often can afford to open it again, which takes 50 us.
_IDLE = 0.5
#: Filters of WebDataset that need a stream of samples, and what to use in their place.
_REFUSED = {
    "batched": "The DataLoader makes the batches: pass batch_size or a batch_sampler to it",
    "shuffle": "The sampler decides the order: pass shuffle=True or a sampler to the DataLoader",
}


class TarDataset:
    """A map-style data set of the samples in WebDataset shards, read through a cache.

    A sample equals the one that ``cache.attach(wds.WebDataset(url))`` yields, with two more fields:
    ``__index__``, its number in the data set, and ``__epoch__``, the attribute ``epoch`` of the
    index if the sampler sets one, else 0. Together they can seed an augmentation.

    Works with any sampler and ``DataLoader``, under fork and spawn. Threads may share it.

    Args:
        shards: shard specifications (URLs, ``{braces}``, globs and prefixes), each shard once; or
            the path or URL of an index file (``.json``) that ``shardcache index`` has written, or
            of a ``sizes.json``. Without an index file, all shards are downloaded to count their
            samples.
        cache: the cache to read through; the default is `default_cache`.
        stages: filters of WebDataset, such as ``wds.decode("pil")`` and ``wds.to_tuple(...)``. They
            run on the samples of each batch. A filter may drop samples, which shortens the batch.
        handler: called with the exception if a sample cannot be read. It returns True to leave the
            sample out; otherwise the exception is raised, as by default.

    Attributes:
        shards: the shards in order.
        counts: the number of samples of each shard, as a numpy array.
        cache: the cache.

    Raises:
        ConfigError: a stage cannot work on single batches, a shard is compressed, the index file is
            malformed, or there is none and the job has several nodes.
        ShardNotFoundError: nothing matches a specification.
        The errors of `Cache.open`, while samples are counted.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Iterable[str],
        *,
        cache: Cache | None = None,
        stages: Sequence[Callable[[Iterator[Any]], Iterable[Any]]] = (),
        handler: Handler = reraise,
    ) -> None:
        self.cache = cache or default_cache()
        self.stages = tuple(stages)
        self.handler = handler
        for stage in self.stages:
            name = getattr(getattr(stage, "f", None), "__name__", "").removeprefix("_")
            if name in _REFUSED:
                raise ConfigError(f"{name} cannot be a stage of a TarDataset. {_REFUSED[name]}.")
        self._index_file = ""
        counts = None
        if isinstance(shards, os.PathLike) or str(shards).lower().endswith(".json"):
            self._index_file = os.fspath(shards)  # type: ignore[arg-type]
            found, counts = read_index_file(self.cache, self._index_file)
        else:
            specs = [shards] if isinstance(shards, str) else list(shards)
            found = [self.cache.parse(url) for url in expand(specs, self.cache)]
        self.shards = tuple(found)
        for shard in self.shards:
            refuse_compressed(shard)
        self.counts = np.array(self._count(specs) if counts is None else counts, np.int64)
        self._ends = list(accumulate(self.counts.tolist()))
        self._open = OrderedDict[int, OpenShard]()  # the last one is the most recently used
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _OPEN if files < 0 else max(1, min(_OPEN, files // 4))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_open": OrderedDict()}

    def _count(self, specs: Sequence[str]) -> list[int]:
        """Count the samples of all shards, which downloads those that are not cached."""
        ranks = detect()
        shown = [*map(redact, specs[:3]), *(["..."] if specs[3:] else [])]
        command = shlex.join(["shardcache", "index", *shown, "-o", "train.json"])
        if ranks.world_size > (ranks.local_size or ranks.world_size):
            raise ConfigError(
                "without an index file, each node would download all shards to count their "
                f"samples. Run `{command}` once, and pass the file: TarDataset('train.json')."
            )
        if self.cache.process.notices.is_new("counting"):
            logger.warning(
                "counting the samples of %d shards, which downloads those that are not cached. To "
                "do so only once, run `%s`, and pass the file: TarDataset('train.json').",
                *(len(self.shards), command),
            )
        # The ranks of a node begin at different shards, so that each shard is counted by one rank.
        first = len(self.shards) * (ranks.local_rank or 0) // (ranks.local_size or 1)
        counts = [0] * len(self.shards)
        for number, found in count_samples(self.cache, self.shards[first:] + self.shards[:first]):
            if not isinstance(found, Exception):
                counts[(first + number) % len(counts)] = found[0]
            elif not self.handler(found):
                raise found
        return counts

    def __repr__(self) -> str:
        samples = counted(len(self), "sample")
        return f"<TarDataset: {samples} in {counted(len(self.shards), 'shard')}>"

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, index: int) -> tuple[str, int]:
        """Return the URL of the shard that holds a sample, and the sample's number in the shard.

        Raises:
            IndexError: there is no such sample.
        """
        _, position, number = self._locate(index)
        return str(self.shards[position]), number

    def _locate(self, index: int) -> tuple[int, int, int]:
        """Return the index from 0, the position of the shard, and the number in the shard."""
        index = operator.index(index)
        if index < 0:
            index += len(self)
        position = bisect_right(self._ends, index)
        if index < 0 or position == len(self._ends):
            raise IndexError(f"the data set has {len(self)} samples")
        return index, position, index - (self._ends[position - 1] if position else 0)

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, after the stages; for a slice or several indices, a list of samples.

        Raises:
            TypeError: an index is no whole number, such as those of a boolean mask.
            The errors of `__getitems__`.
        """
        if type(index) is int:
            return self.__getitems__([index])[0]
        if isinstance(index, slice):
            index = range(len(self))[index]
        first = index[0] if np.ndim(index) and len(index) else index
        if "bool" in str(getattr(index, "dtype", type(first))):  # True is 1 for Python and PyTorch
            raise TypeError(
                "a boolean mask has no numbers of samples: use those of numpy.flatnonzero"
            )
        return self.__getitems__(index) if np.ndim(index) else self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch, after the stages. PyTorch's DataLoader calls this.

        Raises:
            IndexError: there is no such sample.
            IntegrityError: a sample is damaged, or the index file does not fit its shard.
            ConfigError: the stages left nothing of the batch.
            The errors of `Cache.open`, if a shard cannot be read.
        """
        samples, error, size = [], None, 0
        for index in indices:
            place, position, number = self._locate(index)
            try:
                opened = self._shard(position)
                sample = opened.sample(number, self.handler)
            except Exception as exn:
                self._open.pop(position, None)  # it is opened again the next time
                exn.add_note(f"while reading sample {number} of {self.shards[position]}")
                if not self.handler(exn):
                    raise
                error = error or exn
                continue
            sample["__index__"] = place
            sample["__epoch__"] = getattr(index, "epoch", 0)
            samples.append(sample)
            if opened.size:  # otherwise, its stream counts
                size += opened.offsets[number + 1] - opened.offsets[number]
        if in_use := getattr(indices, "shards", None):  # a batch of a ShardBatchSampler
            for position in self._open.keys() - in_use:
                self._open.pop(position, None)
        self.cache.process.counters.read(size)
        if error is not None and not samples:
            raise error  # the handler left out all samples of the batch, and it cannot be empty
        results: Iterable[Any] = samples
        for stage in self.stages:
            results = stage(iter(results))
        batch = list(results)
        if samples and not batch:
            shards = dict.fromkeys(self.locate(index)[0] for index in indices)
            raise ConfigError(
                f"the stages left none of {len(samples)} samples of {', '.join(shards)}. A batch "
                "cannot be empty: let the stages keep these samples, or make larger batches."
            )
        return batch

    def _shard(self, position: int) -> OpenShard:
        """Return an open shard, which is downloaded if necessary.

        Nothing is closed here: a shard closes when no thread refers to it any more.
        """
        opened = self._open.pop(position, None)
        if opened is None or opened.is_lost:
            self._forget_idle()
            self.cache.process.evict_lru()
            opened = OpenShard(self.cache, self.shards[position])
            stated = int(self.counts[position])
            if len(opened) != stated:
                source = self._index_file or "the count at the start"
                raise IntegrityError(
                    f"{self.shards[position]} has {len(opened)} samples, but {source} states "
                    f"{stated}, so samples would have other numbers. Run `shardcache index` again.",
                    url=str(self.shards[position]),
                )
        self._open[position] = opened
        return opened

    def _forget_idle(self) -> None:
        """Forget shards that were idle, and the one that was idle longest if there are too many."""
        idle = clock.monotonic() - _IDLE
        with contextlib.suppress(KeyError, RuntimeError, StopIteration):  # another thread's change
            while len(self._open) >= self._most or next(iter(self._open.values())).used < idle:
                self._open.popitem(last=False)
