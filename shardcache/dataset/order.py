"""The order of the samples of an epoch: a pure function of counts, seed, epoch and position.

    shards, permuted once per run ----> their samples, one after another, cut into equal lanes
    a lane's segments, permuted per epoch ----> steps of a sliding window ----> a lane's samples
    a global batch: an equal share of every lane, lane after lane

A segment is the part of a shard that lies in a lane. The window covers ``shuffle`` segments and
moves on by one segment per turn; it never leaves the lane, so the first and the last turn mix as
many segments as all others. A segment is permuted and cut into one slice per turn that covers it.
A step is the slices of one turn, permuted.

A lane of a mixture takes its next sample from one part or another, in proportion to their weights.
Each part has an order of its own, which continues from one epoch of the mixture to the next.

All sizes have a closed form, so a position is found without making what precedes it. Jobs store
positions, so the order must stay the same for ever: every change of it needs a new `VERSION`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardcache.errors import ConfigError

#: Version of the order, which states record.
VERSION = 1

Samples = NDArray[np.int64]
#: A key of the hash. None stands for the order of the data set, without a permutation.
Key = int | None

#: Purposes of the keys of a lane.
_SEGMENTS, _SAMPLES, _STEP = 1, 2, 3
#: Samples of a step on average. Sorting the hashes of 1 M takes 0.1 s, and of 20 M it took 6 s.
_STEP_MAX = 1 << 20
#: Samples of a window whose segments are permuted, because a job that resumes permutes all of them
#: first: 8 M take 0.7 s. A larger segment is cut into slices without a permutation.
_WINDOW_MAX = 1 << 23
#: The whole of which a mixture takes shares. Its product with a position must fit into 64 bits,
#: which it does for lanes of 500 G samples.
WHOLE = 1 << 24

# The constants of splitmix64 (Steele, Lea and Flood 2014).
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def checked_int(
    name: str, value: Any, least: float = -math.inf, most: float = (1 << 63) - 1
) -> int:
    """Return an integer of any type as an int. Raise ConfigError for another value."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)
        if least <= number <= most and not isinstance(value, bool):
            return number
    raise ConfigError(f"{name}={value!r:.80} is not a whole number from {least} to {most}.")


def chained(key: Key, *parts: int) -> Key:
    """Return the key for a purpose or a place below ``key``.

    Sums would not do: seed 1 in epoch 2 must differ from seed 2 in epoch 1.
    """
    if key is None:
        return None
    for part in parts:
        key = ((key ^ (part & _MASK)) + _GAMMA) & _MASK
        key = (key ^ key >> 30) * _FIRST & _MASK
        key = (key ^ key >> 27) * _SECOND & _MASK
        key ^= key >> 31
    return key


def hashes(count: int, key: int) -> NDArray[np.uint64]:
    """Return a hash of each number below ``count``. They are all different.

    The streams of numpy's generators may change between its versions.
    """
    hashes = np.arange(1, count + 1, dtype=np.uint64)
    hashes *= np.uint64(_GAMMA)
    hashes += np.uint64(key)
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(_FIRST)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(_SECOND)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def permutation(count: int, key: Key) -> Samples:
    """Return the numbers below ``count`` in the order of their hashes."""
    return np.arange(count) if key is None else np.argsort(hashes(count, key))


class Order:
    """The order of a data set's samples in every epoch; with ``shuffle=0``, that of its shards."""

    def __init__(
        self, counts: Sequence[int] | Samples, *, seed: int, lanes: int, shuffle: int
    ) -> None:
        sizes = np.asarray(counts, dtype=np.int64)
        self.lanes = lanes
        self.window = max(1, shuffle)
        self._key = None if shuffle == 0 else chained(0, seed)
        self._shards = permutation(len(sizes), self._key)
        self._firsts = (np.cumsum(sizes) - sizes)[self._shards]  # each shard's first sample
        self._ends = np.cumsum(sizes[self._shards])
        self.total = int(self._ends[-1]) if len(sizes) else 0

    def bounds(self, lane: int) -> tuple[int, int]:
        """Return where a lane begins and ends in the sequence of all samples."""
        return lane * self.total // self.lanes, (lane + 1) * self.total // self.lanes

    def lane(self, number: int, epoch: int) -> Lane:
        low, high = self.bounds(number)
        first, last = np.searchsorted(self._ends, low, "right"), np.searchsorted(self._ends, high)
        inside = slice(first, last + 1)
        ends = self._ends[inside]
        starts = np.concatenate([[low], ends[:-1]])
        sizes = np.minimum(ends, high) - starts
        # Only the first segment may begin inside of its shard.
        firsts = self._firsts[inside].copy()
        if low < high:
            before = self._ends[inside.start - 1] if inside.start else 0
            firsts[0] += low - before
        some = sizes > 0  # empty shards are no segments
        key = chained(self._key, epoch, number)
        return Lane(self._shards[inside][some], firsts[some], sizes[some], self.window, key)

    def mixed(self, epoch: int, position: int) -> str:
        """Return what a mixture took from each part before a position; "" for one data set."""
        return ""

    def batches(self, share: int, offset: int = 0, *, drop_last: bool) -> int:
        """Return the number of global batches of an epoch after ``offset`` samples of each lane.

        Each batch has ``share`` samples from each lane.
        """
        full = max(0, (self.total // self.lanes - offset) // share)
        has_rest = self.lanes * (offset + full * share) < self.total
        return full + (has_rest and not drop_last)


class Epoch:
    """One epoch of an order. It makes the lanes that its batches need."""

    def __init__(self, order: Order, number: int) -> None:
        self._order = order
        self._number = number
        self.lanes: dict[int, Lane | MixedLane] = {}  # the lanes made so far, by number

    def batch(self, start: int, share: int, low: int, high: int) -> Samples:
        """Return a part of a global batch, as numbers of samples.

        The batch has ``share`` samples from each lane, from the position ``start`` on. If the lanes
        have no full share left, their rests are the batch. It is filled with the samples of the
        first batch, as often as necessary. The part are the numbers from ``low`` to ``high - 1``.
        """
        numbers, bounds = range(self._order.lanes), self._order.bounds
        parts: Iterable[tuple[int, int, int]] = ((lane, start, share) for lane in numbers)
        if start + share > self._order.total // self._order.lanes:
            sizes = [end - begin for begin, end in map(bounds, numbers)]
            rest = [(lane, start, sizes[lane] - start) for lane in numbers]
            first = [(lane, 0, min(share, sizes[lane])) for lane in numbers]
            parts = itertools.chain(rest, itertools.cycle(first))
        taken, at = [np.empty(0, np.int64)], 0
        for lane, begin, count in parts:
            skip, stop = max(0, low - at), min(count, high - at)
            if skip < stop:
                if lane not in self.lanes:
                    self.lanes[lane] = self._order.lane(lane, self._number)
                taken.append(self.lanes[lane].take(begin + skip, stop - skip))
            at += count
            if at >= high:
                break
        return np.concatenate(taken)

    def shards(self, ahead: int) -> list[int]:
        """Return the shards of the windows, and those that enter in the next ``ahead`` turns."""
        return [shard for lane in self.lanes.values() for shard in lane.shards(ahead)]


class Lane:
    """The samples of one lane in one epoch, made of segments: their shards, firsts and sizes."""

    def __init__(
        self, shards: Samples, firsts: Samples, sizes: Samples, window: int, key: Key
    ) -> None:
        order = permutation(len(sizes), chained(key, _SEGMENTS))
        self._key = key
        self._shards, self._firsts, self._sizes = shards[order], firsts[order], sizes[order]
        self._before = np.concatenate([[0], np.cumsum(self._sizes)])  # samples before a segment
        self._window = min(window, len(sizes))
        self._last = len(sizes) - self._window  # the last turn
        # Steps per turn. A turn is as large as a segment on average, and larger in short lanes.
        largest = max(int(sizes.max(initial=0)), int(self._before[-1]) // (self._last + 1))
        self._divisor = max(1, -(-largest // _STEP_MAX))
        self._start, self._step = 0, np.empty(0, np.int64)  # the current step
        self._permuted: dict[int, NDArray[np.int32]] = {}  # the window's segments
        self.turn = 0  # the last one that samples were taken of

    def take(self, position: int, count: int) -> Samples:
        taken = []
        while count > 0:
            if not 0 <= position - self._start < len(self._step):
                self._enter(position)
            taken.append(self._step[position - self._start :][:count])
            position += len(taken[-1])
            count -= len(taken[-1])
        return np.concatenate(taken)

    def shards(self, ahead: int) -> list[int]:
        """Return the shards of the window and of the next ``ahead`` turns."""
        found: list[int] = self._shards[self.turn : self.turn + self._window + ahead].tolist()
        return found

    def _enter(self, position: int) -> None:
        steps = range((self._last + 1) * self._divisor)
        step = bisect_right(steps, position, key=lambda segment: self._cut(segment)[0]) - 1
        self._start, segments, begins, ends = self._cut(step)
        self.turn = max(self.turn, step // self._divisor)
        kept = self._permuted
        self._permuted = {}
        parts = []
        for segment, begin, end in zip(segments, begins, ends, strict=True):
            size, first = int(self._sizes[segment]), self._firsts[segment]
            key = chained(self._key, _SAMPLES, int(first))
            if size * self._window > _WINDOW_MAX and key is not None:
                parts.append(first + _spread(size, key, begin, end))
                continue
            if segment not in kept:
                kept[segment] = permutation(size, key).astype(np.int32)
            self._permuted[segment] = kept[segment]
            parts.append(first + kept[segment][begin:end])
        samples = np.concatenate(parts)
        self._step = samples[permutation(len(samples), chained(self._key, _STEP, step))]

    def _cut(self, step: int) -> tuple[int, list[int], list[int], list[int]]:
        """Return the number of samples before a step, and which part of which segments it takes."""
        turn = step // self._divisor
        segments = np.arange(turn, turn + self._window)
        # Segment i is in the window from turn i - window + 1 on, and until turn i.
        entered = np.maximum(0, segments - self._window + 1)
        slices = (np.minimum(segments, self._last) - entered + 1) * self._divisor
        sizes, given = self._sizes[segments], step - entered * self._divisor
        begins, ends = given * sizes // slices, (given + 1) * sizes // slices
        start = int(self._before[turn] + begins.sum())
        return start, segments.tolist(), begins.tolist(), ends.tolist()


def _spread(size: int, key: int, begin: int, end: int) -> Samples:
    """Return a slice of a segment that is too large to permute: samples from all parts of it.

    Multiples of the golden ratio are spread evenly. An offset differs per epoch.
    """
    factor = size * _GAMMA >> 64
    while math.gcd(factor, size) > 1:
        factor += 1
    return (np.arange(begin, end) * factor + key % size) % size


def split(position: Any, shares: Sequence[int]) -> list[Any]:
    """Return how many of the first ``position`` samples of a mixture come from each part.

    Args:
        position: a number of samples, or an array of such numbers.
        shares: each part's share of what the parts before it leave; `WHOLE` is all of it.
    """
    counts, left = [], position
    for share in shares:
        counts.append(left * share // WHOLE)
        left = left - counts[-1]
    return counts


class MixedOrder(Order):
    """The order of a mixture's samples in every epoch.

    ``parts`` has the number of samples per shard of each part, and ``schedule`` the first epochs of
    periods with equal weights, from 0 on, and the shares of the parts in each, as `split` takes
    them. Raises ConfigError if a part has fewer samples than there are lanes.
    """

    def __init__(
        self,
        parts: Mapping[str, Samples],
        schedule: Sequence[tuple[int, Sequence[int]]],
        samples: int,
        *,
        seed: int,
        lanes: int,
        shuffle: int,
    ) -> None:
        super().__init__([samples], seed=seed, lanes=lanes, shuffle=shuffle)
        self._names, self._schedule = tuple(parts), schedule
        self.parts = []
        for name, counts in parts.items():
            part_seed = chained(0, seed, zlib.crc32(name.encode())) or 0
            self.parts.append(Order(counts, seed=part_seed, lanes=lanes, shuffle=shuffle))
            if (total := self.parts[-1].total) < lanes:
                raise ConfigError(
                    f"The part {name!r} of the mixture has {total} samples, fewer than the {lanes} "
                    "lanes. Leave it out, or pass fewer lanes."
                )
        self.window = sum(part.window for part in self.parts)
        #: The first sample and the first shard of each part.
        self.firsts = [0, *accumulate(part.total for part in self.parts)]
        self.first_shards = [0, *accumulate(map(len, parts.values()))]

    def lane(self, number: int, epoch: int) -> MixedLane:  # type: ignore[override]
        return MixedLane(self, number, epoch)

    def shares(self, epoch: int) -> Sequence[int]:
        return [shares for first, shares in self._schedule if first <= epoch][-1]

    def given(self, lane: int, epoch: int, position: int) -> list[int]:
        """Return how many samples a lane took from each part, in all epochs, up to a position."""
        begin, end = self.bounds(lane)
        given = split(position, self.shares(epoch))
        afters = [*(first for first, _ in self._schedule[1:]), epoch]
        for (first, shares), after in zip(self._schedule, afters, strict=True):
            epochs = max(0, min(epoch, after) - first)
            whole = split(end - begin, shares)
            given = [n + epochs * more for n, more in zip(given, whole, strict=True)]
        return given

    def mixed(self, epoch: int, position: int) -> str:
        """Return what the first lane took from each part up to a position, as text."""
        given = self.given(0, epoch, position)
        return ", ".join(f"{name} {n}" for name, n in zip(self._names, given, strict=True))


class MixedLane:
    """The samples of one lane of a mixture in one epoch."""

    def __init__(self, order: MixedOrder, number: int, epoch: int) -> None:
        self._order, self._number = order, number
        self._shares, self._before = order.shares(epoch), order.given(number, epoch, 0)
        self._sizes = [end - begin for begin, end in (part.bounds(number) for part in order.parts)]
        #: The number of each part -> its own epoch, and its lane in that epoch.
        self._lanes: dict[int, tuple[int, Lane]] = {}
        for part, whole in enumerate(split(WHOLE, self._shares)):
            if whole:  # so that `shards` has the windows of all parts that the epoch mixes
                self._take(part, self._before[part], 1)

    def take(self, position: int, count: int) -> Samples:
        samples = np.empty(count, np.int64)
        taken = split(np.arange(position, position + count + 1), self._shares)
        for part, numbers in enumerate(taken):
            start = self._before[part] + int(numbers[0])
            is_from_part = np.diff(numbers) > 0
            samples[is_from_part] = self._take(part, start, int(is_from_part.sum()))
        return samples

    def shards(self, ahead: int) -> list[int]:
        """Return the shards of the windows, and those that enter in the next ``ahead`` turns."""
        return [
            self._order.first_shards[part] + shard
            for part, (_, lane) in self._lanes.items()
            for shard in lane.shards(ahead)
        ]

    def _take(self, part: int, position: int, count: int) -> Samples:
        """Return samples of a part from a position on, which counts from the start of the run."""
        taken = [np.empty(0, np.int64)]
        while count > 0:
            epoch, start = divmod(position, self._sizes[part])
            if self._lanes.get(part, (None,))[0] != epoch:
                self._lanes[part] = epoch, self._order.parts[part].lane(self._number, epoch)
            samples = self._lanes[part][1].take(start, min(count, self._sizes[part] - start))
            taken.append(samples)
            position += len(samples)
            count -= len(samples)
        return np.concatenate(taken) + self._order.firsts[part]
