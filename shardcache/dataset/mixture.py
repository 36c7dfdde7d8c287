"""`Mixture`: several data sets, from which an epoch takes samples in proportion to weights."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcache.dataset.dataset import Batch, SampleIndex, item, refuse_batches
from shardcache.dataset.order import WHOLE, checked_int
from shardcache.errors import ConfigError
from shardcache.units import counted

if TYPE_CHECKING:
    from shardcache.dataset.dataset import TarDataset

logger = logging.getLogger(__name__)

#: The weight of a part; or several, each with the first epoch to which it applies.
Weight = float | Mapping[int, float]


class Mixture:
    """Several data sets, for a `ShardBatchSampler` that takes from each in proportion to a weight.

        data = Mixture({"web": (web, 0.7), "books": (books, 0.3)}, samples=1_000_000)
        sampler = ShardBatchSampler(data, global_batch=1024)

    The first samples of each lane have the proportions at every position, to within one sample per
    part. Each part has an order of its own. It continues where the last epoch of the mixture ended,
    and no sample comes again before all others of its part, in that lane, have come.

    Args:
        parts: the name of each part, and its data set with its weight. Only the proportions of the
            weights count. ``{0: 0.7, 10: 0.5}`` is a weight of 0.7 from epoch 0 on, and of 0.5 from
            epoch 10 on. All parts use one cache.
        samples: the number of samples of an epoch, of all parts and ranks together.

    Attributes:
        parts: the name of each part, and its data set.
        samples: the number of samples of an epoch.
        shards, counts, cache: as those of `TarDataset`, for all parts.

    Raises:
        ConfigError: an argument is not valid, or the parts use several caches.
    """

    def __init__(self, parts: Mapping[str, tuple[TarDataset, Weight]], *, samples: int) -> None:
        pairs = [pair for pair in getattr(parts, "values", tuple)() if isinstance(pair, tuple)]
        caches = {data.cache for data, _ in pairs}
        if len(pairs) != len(parts) or len(caches) != 1:
            raise ConfigError(
                "A Mixture needs data sets that share one cache, each with a weight: "
                "Mixture({'web': (web, 0.7), 'books': (books, 0.3)}, samples=1_000_000)."
            )
        every = [data for data, _ in pairs]
        # A data set that is two parts has a window for each.
        self.parts = {
            name: data if every.count(data) == 1 else copy.copy(data)
            for name, (data, _) in parts.items()
        }
        self.samples = checked_int("samples", samples, 1)
        (self.cache,) = caches
        weights = {
            name: dict(weight) if isinstance(weight, Mapping) else {0: weight}
            for name, (_, weight) in parts.items()
        }
        #: The first epochs of periods with equal weights, and the shares of the parts in each.
        epochs = sorted({0}.union(*weights.values()))
        self.schedule = [(epoch, _shares(weights, epoch)) for epoch in epochs]
        sets = self.parts.values()
        self.shards = tuple(shard for data in sets for shard in data.shards)
        self.counts = np.concatenate([data.counts for data in sets])
        self._firsts = [0, *accumulate(map(len, sets))]
        self._first_shards = [0, *accumulate(len(data.shards) for data in sets)]

    def __repr__(self) -> str:
        return f"<Mixture: {', '.join(self.parts)}, {counted(self.samples, 'sample')} per epoch>"

    def __len__(self) -> int:
        """Return the number of samples of all parts; an epoch has ``samples``."""
        return self._firsts[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, or a list of samples; see `TarDataset.__getitem__`."""
        return item(self, index)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of a batch. PyTorch's DataLoader calls this.

        If the stages of a part drop a sample, the part's next sample takes its place.

        Raises:
            The errors of `TarDataset.__getitems__`.
        """
        refuse_batches(indices)
        is_ours = all(isinstance(index, SampleIndex) for index in indices)
        if not is_ours and self.cache.process.notices.is_new("weights"):
            text = "the weights of a mixture, and its number of samples, hold only for a loader "
            logger.warning(text + "with batch_sampler=ShardBatchSampler(mixture, ...)")
        numbers = [range(len(self))[index] for index in indices]  # refuses those out of range
        owners = (np.searchsorted(self._firsts, numbers, "right") - 1).tolist()
        in_use = getattr(indices, "shards", ())
        batches, errors = list[Iterator[Any]](), list[Exception]()
        for part, data in enumerate(self.parts.values()):
            first, shards = self._firsts[part], range(*self._first_shards[part : part + 2])
            part_indices = [
                SampleIndex(number - first, getattr(index, "epoch", 0))
                for index, number, owner in zip(indices, numbers, owners, strict=True)
                if owner == part
            ]
            open_ = [shard - shards.start for shard in in_use if shard in shards]
            batch, error = data.read(Batch(part_indices, open_)) if part_indices else ([], None)
            batches.append(iter(batch))
            errors += [error] if error is not None else []
        samples = [sample for owner in owners for sample in islice(batches[owner], 1)]
        if errors and not samples:
            raise errors[0]
        return samples

    def fingerprint(self) -> str:
        """Return a digest of the names of the parts, their fingerprints and ``samples``."""
        text = [f"{data.fingerprint()} {name}\n" for name, data in self.parts.items()]
        return hashlib.blake2b(
            f"{self.samples}\n{''.join(text)}".encode(), digest_size=16
        ).hexdigest()


def _shares(weights: Mapping[str, Mapping[int, float]], epoch: int) -> list[int]:
    """Return each part's share, in an epoch, of what the parts before it leave."""
    current = []
    for name, by_epoch in weights.items():
        first = max((first for first in by_epoch if first <= epoch), default=None)
        weight = math.nan if first is None else by_epoch[first]
        if not 0 <= weight < math.inf:
            raise ConfigError(
                f"The part {name!r} of the mixture has no weight of 0 or more in epoch {epoch}."
            )
        current.append(weight)
    if not 0 < (total := sum(current)) < math.inf:
        raise ConfigError(f"The weights of the mixture add up to {total} in epoch {epoch}.")
    left = [sum(current[part:]) for part in range(len(current))]
    pairs = zip(current, left, strict=True)
    return [round(WHOLE * own / rest) if rest else 0 for own, rest in pairs]
