"""`TarDataset`: the samples of many shards as a map-style data set."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import operator
import os
import re
import shlex
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardcache import clock
from shardcache.cache import Cache, default_cache
from shardcache.dataset.index import (
    OpenShard,
    OpenShards,
    count_samples,
    read_index_file,
    refuse_compressed,
)
from shardcache.dataset.order import chained, hashes
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    IntegrityError,
    ShardCacheError,
    ShardNotFoundError,
)
from shardcache.origins.listing import spec_list
from shardcache.prewarm.plan import expand
from shardcache.ranks import detect
from shardcache.units import counted
from shardcache.urls import redact, shown_url
from shardcache.wds import reraise

if TYPE_CHECKING:
    from shardcache.cache import Handler

logger = logging.getLogger(__name__)

#: Seconds without a read after which a shard is closed as soon as another one is opened, so that
#: it may be evicted. A worker that needs a shard less often can open it again, which takes 50 us.
_IDLE = 0.5
#: Open shards of a data set, which cannot be evicted.
_MOST = 1024
#: Seconds after which a shard that was refused is requested again.
_REPEATED = 60.0
#: Filters of WebDataset that need a stream of samples, and what to use in their place.
_REFUSED = {
    "batched": "The DataLoader makes the batches: pass batch_size or a batch_sampler to it",
    "shuffle": "The sampler decides the order: pass shuffle=True or a sampler to the DataLoader",
}
#: Matches the path or URL of an index file.
_INDEX = re.compile(r"\.json\Z|https?:[^?#]*\.json[?#]", re.IGNORECASE)


class SampleIndex(int):
    """The number of a sample in its data set, and the ``epoch`` in which it is read."""

    epoch: int

    def __new__(cls, number: int, epoch: int = 0) -> SampleIndex:
        """Return the number as an int with one more attribute, which pickles keep."""
        index = super().__new__(cls, number)
        index.epoch = epoch
        return index


class Batch(list[int]):
    """The numbers of a batch, and the positions of the shards that its lanes mix now."""

    def __init__(self, indices: Iterable[int] = (), shards: Iterable[int] = ()) -> None:
        super().__init__(indices)
        self.shards = frozenset(shards)


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
        handler: called with the exception if a sample, or a file of it, cannot be read. It returns
            True to leave that out; otherwise the exception is raised, as by default.

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
        if not isinstance(cache, Cache | None):
            raise ConfigError(f"cache is a Cache, such as Cache({cache!r:.80}).")
        self.cache = cache or default_cache()
        self.stages = (stages,) if callable(stages) else tuple(stages)
        self.handler = handler
        for stage in self.stages:
            name = getattr(getattr(stage, "f", None), "__name__", "").removeprefix("_")
            if name in _REFUSED:
                raise ConfigError(f"{name} cannot be a stage of a TarDataset. {_REFUSED[name]}.")
        self._index_file = ""
        counts = None
        shards = os.fspath(shards) if isinstance(shards, os.PathLike) else shards
        if isinstance(shards, str) and _INDEX.search(shards):
            self._index_file = redact(shards)  # for errors
            parsed, counts = read_index_file(self.cache, shards)
        else:
            specs = [*map(str, spec_list(shards))]
            parsed = [self.cache.parse(url) for url in expand(specs, self.cache)]
        if not parsed:
            raise ConfigError("TarDataset needs at least one shard.")
        self.shards = tuple(parsed)
        for shard in self.shards:
            refuse_compressed(shard)
        self.counts = np.array(self._count(specs) if counts is None else counts, np.int64)
        self._ends = list(accumulate(self.counts.tolist()))  # of the samples of all shards
        self._selected: NDArray[np.int64] | None = None
        self._splits = 0  # how many times it was split off
        self._open = OpenShards()  # of this data set and its parts
        # When an origin refused a shard, so that not each of its samples costs another request.
        self._refused = dict[int, tuple[float, ShardCacheError]]()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_refused": {}}

    def _count(self, specs: Sequence[str]) -> list[int]:
        """Count the samples of all shards, which downloads those that are not cached."""
        ranks = detect()
        shown = [*map(shown_url, specs[:3]), *(["..."] if specs[3:] else [])]
        command = shlex.join(["shardcache", "index", *shown, "-o", "train.json"])
        if ranks.world_size > (ranks.local_size or ranks.world_size):
            raise ConfigError(
                "without an index file, each node would download all shards to count their "
                f"samples. Run `{command}` once, and pass the file: TarDataset('train.json')."
            )
        is_cached = all(shard in self.cache for shard in self.shards)
        if not is_cached and self.cache.process.notices.is_new("counting"):
            logger.warning(
                "counting the samples of %s, which downloads those that are not cached. To do so "
                "only once, run `%s`, and pass the file: TarDataset('train.json').",
                *(counted(len(self.shards), "shard"), command),
            )
        # The ranks of a node begin at different shards, so that each shard is counted by one rank.
        first = len(self.shards) * (ranks.local_rank or 0) // (ranks.local_size or 1)
        counts = [0] * len(self.shards)
        for number, result in count_samples(self.cache, self.shards[first:] + self.shards[:first]):
            if not isinstance(result, Exception):
                counts[(first + number) % len(counts)] = result[0]
            elif not self.handler(result):
                raise result
        return counts

    def __repr__(self) -> str:
        samples = counted(len(self), "sample")
        return f"<TarDataset: {samples} in {counted(len(self.shards), 'shard')}>"

    def __len__(self) -> int:
        return int(self.counts.sum())

    def select(self, indices: Sequence[int] | NDArray[Any]) -> TarDataset:
        """Return a data set of some samples of this one, in their order here.

            first = data.select(range(1000))

        Their ``__index__`` is still the one in the whole data set.

        Args:
            indices: the numbers of the samples, each once.

        Raises:
            ConfigError: there is no number, one is no integer, or one comes twice.
            IndexError: there is no such sample.
        """
        numbers = np.unique(np.asarray(indices))
        if not 0 < len(numbers) == len(indices) or numbers.dtype.kind not in "iu":
            raise ConfigError("select takes one or more numbers of samples, each of them once.")
        if numbers[0] < 0 or numbers[-1] >= len(self):
            raise IndexError(f"the data set has {len(self)} samples")
        part = copy.copy(self)
        part._selected = numbers if self._selected is None else self._selected[numbers]
        part.counts = np.diff(np.searchsorted(part._selected, [0, *self._ends]))
        return part

    def split(self, fractions: Sequence[float], *, seed: int = 0) -> list[TarDataset]:
        """Return data sets with random fractions of the samples, none of them in two.

            train, validation = data.split([0.95, 0.05])

        Whether a sample belongs to a part depends only on the seed, the name of its shard and its
        number there. So it stays in its part if shards are added, and no part has exactly its
        fraction. A part may be split again.

        Raises:
            ConfigError: the fractions are not positive, or exceed 1 together; or a part is empty.
        """
        shares = np.atleast_1d(fractions)
        ends = np.cumsum(shares)
        if not shares.size or shares.min() <= 0 or ends[-1] > 1 + 1e-9:
            raise ConfigError(f"split takes positive fractions of 1 in all, not {fractions!r:.80}.")
        ends[-1] = 1 if math.isclose(ends[-1], 1) else ends[-1]
        draws = [np.empty(0)]
        for shard, count in zip(self.shards, np.diff([0, *self._ends]).tolist(), strict=True):
            key = chained(0, seed, zlib.crc32(shard.basename.encode()), *[1] * self._splits) or 0
            draws.append((hashes(count, key) >> np.uint64(11)) / 2**53)  # from 0 to 1
        every = np.concatenate(draws)
        drawn = every if self._selected is None else every[self._selected]
        part_of = np.searchsorted(ends, drawn, "right")
        parts = [np.flatnonzero(part_of == part) for part in range(len(ends))]
        if not all(map(len, parts)):
            raise ConfigError(f"{len(self)} samples are too few for the fractions {fractions!r}.")
        selected = [self.select(part) for part in parts]
        for each in selected:
            each._splits = self._splits + 1
        return selected

    def fingerprint(self) -> str:
        """Return a digest of the shards, their numbers of samples, and the selection."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join(map(str, self.shards)).encode("utf-8", "surrogateescape"))
        digest.update(np.asarray(self.counts, dtype="<i8").tobytes())
        if self._selected is not None:
            digest.update(self._selected.astype("<i8").tobytes())
        return digest.hexdigest()

    def locate(self, index: int) -> tuple[str, int]:
        """Return the URL of the shard that holds a sample, and the sample's number in the shard.

        Raises:
            IndexError: there is no such sample.
        """
        _, position, number = self._locate(index)
        return str(self.shards[position]), number

    def _locate(self, index: int) -> tuple[int, int, int]:
        """Return the number in all shards, the position of the shard, and the number there."""
        index = operator.index(index)
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"the data set has {len(self)} samples")
        if self._selected is not None:
            index = int(self._selected[index])
        position = bisect_right(self._ends, index)
        return index, position, index - (self._ends[position - 1] if position else 0)

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, after the stages; for a slice or several indices, a list of samples.

        Raises:
            TypeError: an index is no whole number, such as those of a boolean mask.
            The errors of `__getitems__`.
        """
        return item(self, index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch, after the stages. PyTorch's DataLoader calls this.

        Raises:
            IndexError: there is no such sample.
            IntegrityError: a sample is damaged, or the index file does not fit its shard.
            ConfigError: the stages left nothing of the batch.
            The errors of `Cache.open`, if a shard cannot be read.
        """
        batch, error = self.read(indices)
        if error is not None and not batch:  # a batch cannot be empty
            raise error
        return batch

    def read(self, indices: Sequence[int]) -> tuple[list[Any], Exception | None]:
        """Return samples after the stages, or no sample and the reason why none is left."""
        samples, error, size = [], None, 0
        refuse_batches(indices)
        for index in indices:
            place, position, number = self._locate(index)
            try:
                opened = self._shard(position)
                sample = opened.sample(number, lambda exn: self.handler(exn) or reraise(exn))
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
            if opened.is_cached:  # otherwise, its stream counts
                size += opened.offsets[number + 1] - opened.offsets[number]
        if in_use := getattr(indices, "shards", None):  # a batch of a ShardBatchSampler
            self._open.keep(self, in_use)
        self.cache.process.counters.read(size)
        if error is not None and not samples:
            return [], error  # the handler left out all of them
        results: Iterable[Any] = (left := iter(samples))
        try:
            for stage in self.stages:
                results = stage(iter(results))
            batch = list(results)
        except Exception as exn:
            last = samples[len(samples) - operator.length_hint(left) - 1]
            url = shown_url(str(last.get("__url__")))
            exn.add_note(f"in the stages, at {last.get('__key__')} of {url}")
            if "iterator" in str(exn):
                exn.add_note("a stage gets an iterator of samples: write wds.map(f) for a function")
            raise
        if samples and not batch:
            shards = dict.fromkeys(self.locate(index)[0] for index in indices)
            error = ConfigError(
                f"the stages left none of {len(samples)} samples of {', '.join(shards)}. A batch "
                "cannot be empty: let the stages keep these samples, or make larger batches."
            )
        return batch, error

    def _shard(self, position: int) -> OpenShard:
        """Return an open shard, which is downloaded if necessary.

        Nothing is closed here: a shard closes when no thread refers to it any more.
        """
        opened = self._open.pop(position, None)
        if opened is None or opened.is_lost:
            self._open.make_room(clock.monotonic() - _IDLE, _MOST)
            self.cache.process.stop_keeping_used()
            when, refused = self._refused.get(position, (-math.inf, None))
            if refused is not None and clock.monotonic() - when < _REPEATED:
                raise type(refused)(refused.message, url=str(self.shards[position]))
            try:
                opened = OpenShard(self.cache, self.shards[position])
            except (ShardNotFoundError, AccessDeniedError, IntegrityError) as exn:
                # A copy without the traceback.
                self._refused[position] = clock.monotonic(), type(exn)(exn.message)
                raise
            stated = self._ends[position] - (self._ends[position - 1] if position else 0)
            if len(opened) != stated:
                source = self._index_file or "the count at the start"
                raise IntegrityError(
                    f"{self.shards[position]} has {len(opened)} samples, but {source} states "
                    f"{stated}, so samples would have other numbers. Run `shardcache index` again.",
                    url=str(self.shards[position]),
                )
        self._open[position] = opened
        return opened


def refuse_batches(indices: Sequence[Any]) -> None:
    """Raise ConfigError for batches in place of the numbers of samples."""
    if any(isinstance(index, Batch) for index in indices):
        text = "a ShardBatchSampler yields batches: pass it as batch_sampler=, not as sampler=."
        raise ConfigError(f"{text} Or pass batch_size=None as well.")


def item(data: Any, index: Any) -> Any:
    """Return one sample of a data set or mixture; for a slice or several indices, a list."""
    if type(index) is int:
        return data.__getitems__([index])[0]
    if isinstance(index, slice):
        index = range(len(data))[index]
    first = index[0] if np.ndim(index) and len(index) else index
    if "bool" in str(getattr(index, "dtype", type(first))):  # True is 1 for Python and PyTorch
        raise TypeError("boolean masks are not supported; pass numpy.flatnonzero(mask)")
    return data.__getitems__(index) if np.ndim(index) else data.__getitems__([index])[0]
