"""`ShardBatchSampler` gives the samples of a `TarDataset` to the ranks, and resumes exactly.

A state is a position in the order of `shardcache.dataset.order`, so the world size, the batch size
and the workers may change at every resume.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardcache.dataset.dataset import Batch, SampleIndex
from shardcache.dataset.mixture import Mixture
from shardcache.dataset.order import VERSION, Epoch, MixedOrder, Order, checked_int
from shardcache.errors import ConfigError
from shardcache.faults import ignoring
from shardcache.ranks import HALF_STATED, detect, is_half_stated, torch_store, world_size
from shardcache.ranks import rank as own_rank
from shardcache.reading.lookahead import Prefetcher
from shardcache.space.memory import Volume
from shardcache.threads import lazy
from shardcache.units import counted, format_bytes

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from shardcache.cache import Cache
    from shardcache.dataset.dataset import TarDataset
else:
    try:
        from torch.utils.data import Sampler
    except ImportError:  # another framework iterates
        from collections.abc import Iterable as Sampler

__all__ = ["SampleIndex", "ShardBatchSampler"]

logger = logging.getLogger(__name__)

#: Default number of segments in the windows of all lanes together, and the minimum per lane. If the
#: shards are sorted by class, a batch of 256 has 51 of 100 classes with 64 segments, 10 with 10.
_MIXED, _MIXED_PER_LANE = 64, 10
#: Numbers the samplers of this process, so that the same sampler has the same number on all ranks.
_numbers = itertools.count()


class ShardBatchSampler(Sampler[list[int]]):
    """Yields the indices of this rank's part of each global batch, for ``batch_sampler``.

    All ranks have the same number of batches. After a complete iteration, the next one begins the
    next epoch. After one that ended early, the next one begins at `epoch` and `batch` again.

    Args:
        data: the data set, or a mixture of several.
        global_batch: samples per batch, of all ranks together.
        shuffle: number of shards that each lane mixes; 0 keeps the order of the data set. The
            default is 64 divided among the lanes, but at least 10.
        lanes: number of parts of the data set. Each batch has the same number of samples from each,
            so ranks that share a part should share a node. The default is the number of nodes; 1
            if the launcher does not state it, and with ``shuffle=0``.
        seed: the seed of the order, the same on all ranks.
        drop_last: whether to leave out samples that fill no batch. If not, the last batch is filled
            with the first samples of the epoch.
        rank, world_size: by default those of torch.distributed or the launcher, in the process that
            iterates. Pass the data-parallel ones if ranks share batches.

    Raises:
        ConfigError: the numbers do not fit each other, or ``data`` is of another class.
    """

    def __new__(cls, *_args: Any, **options: Any) -> ShardBatchSampler:
        """Refuse the arguments with which Lightning makes a batch sampler again."""
        if "batch_size" in options:
            raise ConfigError(
                "a ShardBatchSampler takes a global_batch, that of all ranks together, and no "
                "batch_size. If Lightning has passed it, use "
                "Trainer(use_distributed_sampler=False), and predict() with DataLoader(data, "
                "sampler=sampler, batch_size=None, collate_fn=default_collate)."
            )
        return super().__new__(cls)

    def __init__(
        self,
        data: TarDataset | Mixture,
        global_batch: int,
        *,
        shuffle: int | None = None,
        lanes: int | None = None,
        seed: int = 0,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if not all(hasattr(data, name) for name in ("fingerprint", "counts", "cache")):
            raise ConfigError(
                f"ShardBatchSampler takes a TarDataset or a Mixture, not {type(data).__name__}. "
                "To use a part of the data, pass data.select(indices)."
            )
        self.data, self.drop_last = data, drop_last
        self.global_batch = checked_int("global_batch", global_batch, 1)
        self._seed = seed = checked_int("seed", seed, most=math.inf)
        self._given: dict[str, Any] = {"seed": seed, "lanes": lanes, "shuffle": shuffle}
        self._given_ranks = rank, world_size  # as the user passed them
        self._arrange(lanes, shuffle)
        # Epochs, and samples taken from each lane: where the next iteration begins, and where the
        # last one is. A DataLoader requests batches ahead, so these may differ.
        self._start = self._taken = 0, 0
        self._is_loaded = False  # whether the next iteration begins where a state says
        self._is_checked = False  # whether `_check_room` was called
        self._is_in_order = True  # whether the last DataLoader keeps the order of the batches
        # None: the ranks are not compared
        self._number = next(_numbers) if self._given_ranks == (None, None) else None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_number": None}  # other ranks may make no copy

    @property
    def batch_size(self) -> int:
        """The number of samples that this rank reads of each batch."""
        return self.global_batch // self.world_size

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
        if (epoch := checked_int("epoch", epoch, 0)) != self._start[0]:
            if self._is_loaded:
                text = "set_epoch(%d) leaves the position that was loaded: epoch %d, batch %d"
                logger.warning(text, epoch, self.epoch, self.batch)
            self._start = self._taken = epoch, 0
        elif epoch != self._taken[0]:
            self._taken = self._start

    def __repr__(self) -> str:
        samples = counted(len(self.data), "sample")
        return f"<ShardBatchSampler: {samples}, epoch {self.epoch}, batch {self.batch}>"

    def __len__(self) -> int:
        return self._batches(0)

    def __iter__(self) -> Iterator[list[int]]:
        if (self.rank, self.world_size) != self._ranks():  # since the sampler was made
            self._arrange(self.order.lanes, self.shuffle)
        self._compare_ranks()
        self._is_loaded = False
        return _Iteration(self, *self._start)

    # -- states --------------------------------------------------------------------

    def state_dict(self, batch: int | None = None) -> dict[str, int | str]:
        """Return the state, which is the same on all ranks.

        Args:
            batch: number of batches of this epoch that were trained. The default is the number that
                the sampler or the DataLoader has returned. Pass it if others take batches ahead.

        Raises:
            ConfigError: the epoch has fewer batches, or the DataLoader has ``in_order=False``.
        """
        if not self._is_in_order:
            text = "with in_order=False, a number of batches does not say which were trained. "
            raise ConfigError(f"{text}Make the DataLoader without it.")
        epoch, taken = self._taken
        if batch is not None:
            start = taken % self.share
            taken = start + checked_int("batch", batch, 0, self._batches(start)) * self.share
        return self._state(*((epoch, taken) if self._batches(taken) else (epoch + 1, 0)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the position of a state.

        Raises:
            ConfigError: the state has other shards, other options or impossible numbers.
        """
        epoch, taken = self._restore(state)
        self._is_loaded = True
        self._start = self._taken = (epoch, taken) if self._batches(taken) else (epoch + 1, 0)

    def _state(self, epoch: int, taken: int) -> dict[str, int | str]:
        state: dict[str, int | str] = {"version": VERSION, "epoch": epoch, "taken": taken}
        state |= {"seed": self._seed, "lanes": self.order.lanes, "shuffle": self.shuffle}
        state |= {"global_batch": self.global_batch, "data": self._fingerprint}
        mixed = self.order.mixed(epoch, taken)
        return {**state, "mixed": mixed} if mixed else state

    def _restore(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Adopt the lanes and the window of a state, and return its position."""
        if not isinstance(state, Mapping) or "version" not in state:
            text = f"{state!r:.80} is not a state of a ShardBatchSampler. "
            raise ConfigError(f"{text}Pass what its state_dict() has returned.")

        def saved(name: str, *limits: int) -> int:
            return checked_int(f"the state's {name}", state.get(name), *limits)

        for name, now in {"version": VERSION, "data": self._fingerprint, **self._given}.items():
            if isinstance(found := state.get(name), bool | float):  # may equal a number
                saved(name)
            if now is not None and found != now:
                what = "shards or counts of samples" if name == "data" else name
                raise ConfigError(
                    f"the state was saved with other {what}: {name} was {found} and is {now}. "
                    "Resume with the same, or start without the state."
                )
        epoch, lanes, shuffle = saved("epoch", 0), saved("lanes", 1), saved("shuffle", 0)
        # The last batch ends after the lanes. It may have had another size.
        most = -(-(self.order.total + saved("global_batch", 1)) // lanes)
        taken, before = saved("taken", 0, most), (self.order.lanes, self.shuffle)
        self._arrange(lanes, shuffle)
        if (found := state.get("mixed", "")) != (now := self.order.mixed(epoch, taken)):
            self._arrange(*before)
            raise ConfigError(
                f"the state was saved with other weights: from each part, {found} samples had been "
                f"taken, and now {now}. Weights may change with an epoch that has not begun."
            )
        return epoch, taken

    @lazy
    def _fingerprint(self) -> str:
        return self.data.fingerprint()

    def _compare_ranks(self) -> None:
        """Check once that the ranks agree. No rank waits for another."""
        store = None if self._number is None else torch_store()
        if store is None:
            return
        mine = {**self._state(*self._start), "world_size": self.world_size}
        with contextlib.suppress(RuntimeError):  # the rank that serves the store has ended
            name = f"shardcache/order/{self._number}"
            other = json.loads(store.compare_set(name, "", json.dumps(mine)))
            differ = [f"{n} {mine[n]} and {other[n]}" for n in mine if mine[n] != other[n]]
            if differ:
                raise ConfigError(
                    f"the ranks differ: {', '.join(differ)}. Pass the same arguments on all ranks."
                )
        self._number = None

    # -- the order -----------------------------------------------------------------

    def _ranks(self) -> tuple[int, int]:
        """Return the rank and the world size, which the user gave or which this process has."""
        rank, world = self._given_ranks
        world = checked_int("world_size", world_size() if world is None else world, 1)
        return checked_int("rank", own_rank() if rank is None else rank, 0, world - 1), world

    def _arrange(self, lanes: int | None, shuffle: int | None) -> None:
        """Make the order, if it fits the batch and the ranks."""
        size, (rank, world) = self.global_batch, self._ranks()
        # Ranks that the user passes may be a part of those of the launcher.
        is_launched = self._given_ranks == (None, None)
        local = detect().local_size if is_launched else None
        self._nodes = world // local if local and world % local == 0 else 1
        if lanes is None and shuffle != 0 and world > 1 and not local and rank == 0:
            text = "the launcher does not state the number of nodes, so each node may download all "
            logger.warning(text + "shards. If there are several, pass lanes=NODES.")
        is_half = is_launched and world == 1 and is_half_stated()
        if is_half and self.data.cache.process.notices.is_new("half"):
            logger.warning(HALF_STATED)
        parts = self._nodes if shuffle != 0 else 1
        lanes = checked_int("lanes", parts if lanes is None else lanes, 1)
        mixed = max(_MIXED_PER_LANE, -(-_MIXED // lanes))
        if isinstance(shuffle, bool):
            raise ConfigError("shuffle is a number of shards to mix, such as 64; 0 mixes none.")
        shuffle = checked_int("shuffle", mixed if shuffle is None else shuffle, 0)
        unit = math.lcm(lanes, world)
        if size % unit:
            raise ConfigError(
                f"global_batch={size} cannot be divided among {lanes} lanes and {world} ranks. Use "
                f"a multiple of {unit}, or another number of lanes or ranks."
            )
        options = {"seed": self._seed, "lanes": lanes, "shuffle": shuffle}
        order: Order
        if isinstance(self.data, Mixture):
            counts = {name: part.counts for name, part in self.data.parts.items()}
            order = MixedOrder(counts, self.data.schedule, self.data.samples, **options)
        else:
            order = Order(self.data.counts, **options)
        if not order.batches(size // lanes, drop_last=self.drop_last):
            most = order.total // lanes * lanes // unit * unit
            advice = f"Use global_batch={most}, or drop_last=False." if most else ""
            raise ConfigError(f"{order.total} samples fill no batch of {size}. {advice}")
        self.order, self.shuffle, self.share = order, shuffle, size // lanes
        self.rank, self.world_size = rank, world
        self.part = rank * size // world, (rank + 1) * size // world
        if shuffle and self._nodes > lanes and rank == 0:
            text = "%d nodes read %d lanes, so several nodes download the same shards"
            logger.warning(text, self._nodes, lanes)

    def _note_loader(self, loader: Any) -> None:
        self._is_in_order = getattr(loader, "_in_order", True)

    def _note_taken(self, epoch: int, taken: int) -> None:
        """Note how many samples were taken from each lane. After the last, the epoch is over."""
        self._taken = epoch, taken
        if not self._batches(taken):  # Trainer does not request another one
            self._start = epoch + 1, 0

    def _batches(self, taken: int) -> int:
        return self.order.batches(self.share, taken, drop_last=self.drop_last)

    # -- the cache -----------------------------------------------------------------

    def _check_room(self, size: int) -> None:
        """Log a warning if this node uses more shards of ``size`` bytes at a time than fit."""
        self._is_checked, cache, order = True, self.data.cache, self.order
        config, lanes = cache.config, -(-order.lanes // self._nodes)  # of this node
        # One more than the sampler wants, because workers still read the one that left the window.
        stored = -(-len(self.data.shards) * lanes // order.lanes)
        warn_of_room(cache, min(stored, lanes * (order.window + config.prefetch + 1)), size)


def warn_of_room(cache: Cache, shards: int, size: int) -> None:
    """Log once that a node uses more shards of ``size`` bytes at a time than the cache may hold."""
    with ignoring(OSError):  # a directory of the cache is gone
        volumes = [(tier, Volume.of(tier.dir)) for tier in cache.config.by_tier()]
        limit = sum(volume.budget(tier) or volume.size for tier, volume in volumes)
        if shards * size <= limit or not cache.process.notices.is_new("room"):
            return
        text = "%s may hold %s, but this node uses %d shards at a time, about %s. Some will be "
        text += "downloaded or streamed repeatedly. Raise max_size, or pass a smaller shuffle."
        sizes = format_bytes(limit), shards, format_bytes(shards * size)
        logger.warning(text, cache.config.dir, *sizes)


class _Iteration:
    """The rest of an epoch. torchdata's StatefulDataLoader saves its position."""

    def __init__(self, sampler: ShardBatchSampler, number: int, taken: int) -> None:
        self._sampler, self._number, self._taken = sampler, number, taken
        self._epoch: Epoch | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Iteration, (self._sampler, self._number, self._taken)

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        sampler, start = self._sampler, self._taken
        if self._epoch is None:  # in the process that iterates
            self._epoch, self._pid = Epoch(sampler.order, self._number), 0
            frame: Any = sys._getframe(1)  # torch's iterator over the loader calls this
            while frame is not None and frame.f_code.co_name != "_next_index":
                frame = frame.f_back
            loader = frame and frame.f_locals.get("self")
            ahead = getattr(loader, "_num_workers", 0) * getattr(loader, "_prefetch_factor", 0)
            self._begun, self._returned = start, -ahead
            sampler._note_loader(loader)
        if not sampler._batches(start):
            self._advance(start)  # a DataLoader requests one more for each that it returns
            raise StopIteration
        if self._pid != os.getpid():  # a forked child has no thread, and locks that stay held
            self._pid, self._wanted = os.getpid(), list[int]()
            self._ahead = Prefetcher(sampler.data.cache.process)
        numbers = self._epoch.batch(start, sampler.share, *sampler.part)
        wanted = self._epoch.shards(sampler.data.cache.config.prefetch)
        if wanted != self._wanted:
            self._wanted = wanted
            self._ahead.want(sampler.data.shards[n] for n in wanted)
        if not sampler._is_checked and (size := self._ahead.size):
            sampler._check_room(size)
        self._advance(start + sampler.share)
        indices = (SampleIndex(number, self._number) for number in numbers.tolist())
        return Batch(indices, self._epoch.shards(0))

    def _advance(self, taken: int) -> None:
        """Record the positions after a request. Once all batches returned, the epoch is over."""
        self._taken = taken
        self._returned += 1
        taken = self._begun + max(0, self._returned) * self._sampler.share
        self._sampler._note_taken(self._number, taken)

    def state_dict(self) -> dict[str, int | str]:
        return self._sampler._state(self._number, self._taken)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._number, self._taken = self._sampler._restore(state)
        self._epoch = None
