"""`ShardBatchSampler` gives the samples of a `TarDataset` to the ranks, and resumes exactly.

A state is a position in the order of `shardcache.dataset.order`. The workers of a DataLoader have
no state, so the world size, the batch size and the workers may change at every resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shardcache.dataset.order import VERSION, Epoch, Order
from shardcache.errors import ConfigError
from shardcache.ranks import detect
from shardcache.reading.lookahead import Prefetcher
from shardcache.space.memory import Volume
from shardcache.sync import job
from shardcache.threads import lazy
from shardcache.units import format_bytes

if TYPE_CHECKING:
    from shardcache.dataset.dataset import TarDataset

__all__ = ["SampleIndex", "ShardBatchSampler"]

logger = logging.getLogger(__name__)

#: Default number of segments in the windows of all lanes together, and the minimum per lane. If the
#: shards are sorted by class, a batch of 256 has 51 of 100 classes with 64 segments, 10 with 10.
_MIXED, _MIXED_PER_LANE = 64, 10
#: Numbers the samplers of this process, so that the same sampler has the same number on all ranks.
_numbers = itertools.count()


class SampleIndex(int):
    """The number of a sample in its data set, and the ``epoch`` in which it is read."""

    epoch: int

    def __new__(cls, number: int, epoch: int) -> SampleIndex:  # noqa: D102 - as the class says
        self = super().__new__(cls, number)
        self.epoch = epoch
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleIndex, (int(self), self.epoch)


class Batch(list[int]):
    """The numbers of a batch, and the positions of the shards that its lanes mix now."""

    shards: frozenset[int] = frozenset()


class ShardBatchSampler:
    """Yields the indices of this rank's part of each global batch, for ``batch_sampler``.

    All ranks have the same number of batches. After a complete iteration, the next one begins the
    next epoch. After one that ended early, the next one begins at `epoch` and `batch` again.

    Args:
        data: the data set.
        global_batch: samples per batch, of all ranks together.
        shuffle: number of shards that each lane mixes; 0 keeps the order of the data set. The
            default is 64 divided among the lanes, but at least 10.
        lanes: number of parts of the data set. Each batch has the same number of samples from each,
            so ranks that share a part should share a node. The default is the number of nodes; 1
            if the launcher does not state it, and with ``shuffle=0``.
        seed: the seed of the order, the same on all ranks.
        drop_last: whether to leave out samples that fill no batch. If not, the last batch is filled
            with the first samples of the epoch.
        rank, world_size: this process and the number of processes, by default those of
            torch.distributed or the launcher. Pass the data-parallel ones if ranks share batches.

    Raises:
        ConfigError: the numbers do not fit each other, or ``data`` is not a `TarDataset`.
    """

    def __init__(
        self,
        data: TarDataset,
        global_batch: int,
        *,
        shuffle: int | None = None,
        lanes: int | None = None,
        seed: int = 0,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not all(hasattr(data, name) for name in ("shards", "counts", "cache")):
            raise ConfigError(
                f"ShardBatchSampler takes a TarDataset, not {type(data).__name__}. To use a part "
                "of the data, make a TarDataset of some of its shards."
            )
        self.data, self.global_batch, self.drop_last = data, global_batch, drop_last
        self._seed = seed
        self._given: dict[str, Any] = {"seed": seed, "lanes": lanes, "shuffle": shuffle}
        is_launched = rank is None and world_size is None
        self.rank = job.rank() if rank is None else rank
        self.world_size = job.world_size() if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is not from 0 to {self.world_size - 1}.")
        # Ranks that the user passes may be a part of those of the launcher.
        local = detect().local_size if is_launched else None
        self._nodes = self.world_size // local if local and self.world_size % local == 0 else 1
        if lanes is None and shuffle != 0 and self.world_size > 1 and not local and self.rank == 0:
            text = "the launcher does not state the number of nodes, so each node may download all "
            logger.warning(text + "shards. If there are several, pass lanes=NODES.")
        if lanes is None:
            lanes = self._nodes if shuffle != 0 else 1
        self._arrange(lanes, shuffle)
        # Epochs, and samples taken from each lane: where the next iteration begins, and where the
        # last one is. An iteration ends when workers still read its batches, so these may differ.
        self._start = self._taken = 0, 0
        self._ahead = Prefetcher(data.cache.opener)
        self._is_checked = False  # whether `_check_room` was called
        self._number = next(_numbers) if is_launched else None  # None: ranks need no comparison

    @property
    def sampler(self) -> ShardBatchSampler:
        """Itself, because Lightning and accelerate call ``batch_sampler.sampler.set_epoch``."""
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration, from 0."""
        return self._start[0]

    @property
    def batch(self) -> int:
        """The number of the first batch of the next iteration, from 0."""
        return self._start[1] // self.share

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with ``epoch``, or continue it if it is the unfinished one."""
        if epoch != self._start[0]:
            self._start = epoch, 0
        if epoch != self._taken[0]:
            self._taken = self._start

    def __len__(self) -> int:
        return self._batches(0)

    def __iter__(self) -> Iterator[list[int]]:
        self._compare_ranks()
        return _Iteration(self, *self._start)

    # -- states --------------------------------------------------------------------

    def state_dict(self, batch: int | None = None) -> dict[str, int | str]:
        """Return the state, which is the same on all ranks.

        Args:
            batch: number of batches of this epoch that were trained. The default is the number that
                was yielded, which is larger with the workers of a plain DataLoader.
        """
        epoch, taken = self._taken
        if batch is not None:
            taken = taken % self.share + batch * self.share
        return self._state(*((epoch, taken) if self._batches(taken) else (epoch + 1, 0)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the position of a state.

        Raises:
            ConfigError: the state has other shards or options, or the batch cannot be divided.
        """
        epoch, taken = self._restore(state)
        self._start = self._taken = (epoch, taken) if self._batches(taken) else (epoch + 1, 0)

    def _state(self, epoch: int, taken: int) -> dict[str, int | str]:
        """Return the state of a position."""
        state = {"version": VERSION, "epoch": epoch, "taken": taken, "seed": self._seed}
        state |= {"lanes": self.order.lanes, "shuffle": self.shuffle}
        return {**state, "global_batch": self.global_batch, "data": self._fingerprint}

    def _restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Adopt the lanes and the window of a state, and return its position."""
        for name, own in {"version": VERSION, "data": self._fingerprint, **self._given}.items():
            if own is not None and (saved := state.get(name)) != own:
                what = "shards or counts of samples" if name == "data" else name
                raise ConfigError(
                    f"the state was saved with other {what}: {name} was {saved} and is {own}. "
                    "Resume with the same, or start without the state."
                )
        self._arrange(state["lanes"], state["shuffle"])
        return state["epoch"], state["taken"]

    @lazy
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update("\n".join(map(str, self.data.shards)).encode("utf-8", "surrogateescape"))
        digest.update(np.asarray(self.data.counts, dtype="<i8").tobytes())
        return digest.hexdigest()

    def _compare_ranks(self) -> None:
        """Check once that the ranks agree. No rank waits for another."""
        store = None if self._number is None else job.torch_store()
        if store is None:
            return
        own = {**self._state(*self._start), "world_size": self.world_size}
        with contextlib.suppress(RuntimeError):  # the rank that serves the store has ended
            name = f"shardcache/order/{self._number}"
            other = json.loads(store.compare_set(name, "", json.dumps(own)))
            differ = [f"{n} {own[n]} and {other[n]}" for n in own if own[n] != other[n]]
            if differ:
                text = (
                    f"the ranks differ: {', '.join(differ)}. Pass the same arguments on all ranks."
                )
                raise ConfigError(text)
        self._number = None

    # -- the order -----------------------------------------------------------------

    def _arrange(self, lanes: int, shuffle: int | None) -> None:
        """Make the order, if it fits the batch and the ranks."""
        size, world = self.global_batch, self.world_size
        if lanes < 1 or size < 1 or (shuffle or 0) < 0:
            raise ConfigError("global_batch and lanes must be at least 1, and shuffle 0 or more.")
        unit = math.lcm(lanes, world)
        if size % unit:
            worlds = [str(n) for n in range(1, world) if size % math.lcm(lanes, n) == 0]
            near = size // unit * unit
            raise ConfigError(
                f"global_batch={size} cannot be divided among {lanes} lanes and {world} ranks. Use "
                f"{f'{near} or ' if near else ''}{near + unit}"
                f"{', or a world size of ' + ', '.join(worlds) if worlds else ''}."
            )
        if shuffle is None:
            shuffle = max(_MIXED_PER_LANE, -(-_MIXED // lanes))
        order = Order(self.data.counts, seed=self._seed, lanes=lanes, shuffle=shuffle)
        if not order.batches(size // lanes, drop_last=self.drop_last):
            most = order.total // lanes * lanes // unit * unit
            advice = f"Use global_batch={most}, or drop_last=False." if most else ""
            raise ConfigError(f"{order.total} samples fill no batch of {size}. {advice}")
        self.order, self.shuffle, self.share = order, shuffle, size // lanes
        self.part = self.rank * size // world, (self.rank + 1) * size // world
        if shuffle and self._nodes > lanes and self.rank == 0:
            text = "%d nodes read %d lanes, so several nodes download the same shards"
            logger.warning(text, self._nodes, lanes)

    def _batches(self, taken: int) -> int:
        return self.order.batches(self.share, taken, drop_last=self.drop_last)

    # -- the cache -----------------------------------------------------------------

    def _check_room(self, size: int) -> None:
        """Log a warning if this node uses more shards of ``size`` bytes at a time than fit."""
        self._is_checked, cache, order = True, self.data.cache, self.order
        config, lanes = cache.config, -(-order.lanes // self._nodes)  # of this node
        # One more than the sampler wants, because workers still read the one that left the window.
        stored = -(-len(self.data.shards) * lanes // order.lanes)
        needed = min(stored, lanes * (order.window + config.prefetch + 1))
        with contextlib.suppress(OSError):  # a directory of the cache is gone
            volumes = [(tier, Volume.of(tier.dir)) for tier in config.by_tier()]
            limit = sum(volume.budget(tier) or volume.size for tier, volume in volumes)
            if needed * size <= limit or not cache.opener.here().is_new("room"):
                return
            text = "%s may hold %s, but this node uses %d shards at a time, about %s. Some will be "
            text += "downloaded or streamed repeatedly. Raise max_size, or pass a smaller shuffle."
            sizes = format_bytes(limit), needed, format_bytes(needed * size)
            logger.warning(text, config.dir, *sizes)


class _Iteration:
    """The rest of an epoch. torchdata's StatefulDataLoader saves its position."""

    def __init__(self, sampler: ShardBatchSampler, number: int, taken: int) -> None:
        self._sampler, self._number, self._taken = sampler, number, taken
        self._epoch: Epoch | None = None
        self._wanted: list[int] = []

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        sampler, start = self._sampler, self._taken
        if not sampler._batches(start):
            sampler._start = self._number + 1, 0
            raise StopIteration
        if self._epoch is None:
            self._epoch = Epoch(sampler.order, self._number)
            self._wanted = []
            sampler._ahead.clear()  # what remains of an iteration that ended early
        found = self._epoch.batch(start, sampler.share, *sampler.part)
        wanted = self._epoch.shards(sampler.data.cache.config.prefetch)
        if wanted != self._wanted:
            self._wanted = wanted
            sampler._ahead.want(sampler.data.shards[n] for n in wanted)
        if not sampler._is_checked and (size := sampler._ahead.size):
            sampler._check_room(size)
        self._taken = start + sampler.share
        sampler._taken = self._number, self._taken
        if not sampler._batches(self._taken):  # Trainer does not request another one
            sampler._start = self._number + 1, 0
        batch = Batch(SampleIndex(number, self._number) for number in found.tolist())
        batch.shards = frozenset(self._epoch.shards(0))
        return batch

    def state_dict(self) -> dict[str, int | str]:
        return self._sampler._state(self._number, self._taken)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._number, self._taken = self._sampler._restore(state)
        self._epoch = None
