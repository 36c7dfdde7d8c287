"""What jobs read, in which order: the traces that policies are compared on.

Shards are of one size, and numbered. A trace is the same for the model and for the real program
(`benchmarks.policies`). The first epoch of a job finds nothing and is not counted; neither is,
where a job begins beside another, what it reads before both are under way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["TRACES", "Phase", "Step", "Trace"]


class Step(NamedTuple):
    """One thing that happens.

    Attributes:
        what: a job begins, reads a shard, or ends.
        job: its name.
        shard: which, for a read.
    """

    what: Literal["begin", "read", "end"]
    job: str
    shard: int = -1


@dataclass(frozen=True, slots=True)
class Phase:
    """Reads that are counted together.

    Attributes:
        title: what they are.
        job: whose.
        start, stop: positions in the trace.
    """

    title: str
    job: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Trace:
    """See the module.

    Attributes:
        name: for the command line.
        title: for people.
        shards: how many there are.
        steps: what happens.
        phases: what is counted.
    """

    name: str
    title: str
    shards: int
    steps: tuple[Step, ...]
    phases: tuple[Phase, ...]


def _one_job(name: str, title: str, shards: int, epochs: Sequence[Sequence[int]]) -> Trace:
    reads = [Step("read", "A", shard) for epoch in epochs for shard in epoch]
    steps = (Step("begin", "A"), *reads, Step("end", "A"))
    first = 1 + len(epochs[0])
    return Trace(name, title, shards, steps, (Phase("epochs 2 on", "A", first, len(steps) - 1),))


def sequential(shards: int, epochs: int) -> Trace:
    """Every epoch in the same order."""
    return _one_job("sequential", "in order", shards, [range(shards)] * epochs)


def shuffled(shards: int, epochs: int) -> Trace:
    """Every epoch in an order of its own, as ``shardshuffle`` does it."""
    chance = random.Random(1)
    orders = [chance.sample(range(shards), shards) for _ in range(epochs)]
    return _one_job("shuffled", "shuffled each epoch", shards, orders)


def resampled(shards: int, epochs: int) -> Trace:
    """Shards drawn with replacement, without epochs: ``resampled=True``."""
    chance = random.Random(2)
    draws = [chance.choices(range(shards), k=shards) for _ in range(epochs)]
    return _one_job("resampled", "drawn with replacement", shards, draws)


def two_jobs(shards: int, epochs: int) -> Trace:
    """A job, a second one beside it on other shards, and the second one alone.

    Each shuffles its own half of the shards; where both run they take turns.
    """
    chance = random.Random(3)
    half = shards // 2

    def epoch(first: int) -> list[int]:
        return chance.sample(range(first, first + half), half)

    def read(job: str, order: Sequence[int]) -> list[Step]:
        return [Step("read", job, shard) for shard in order]

    steps = [Step("begin", "A")]
    phases = []

    def phase(title: str, *jobs: str) -> None:
        start = len(steps)
        for _ in range(epochs):
            orders = {job: read(job, epoch(0 if job == "A" else half)) for job in jobs}
            steps.extend(step for pair in zip(*orders.values(), strict=True) for step in pair)
        for job in jobs:
            # The first epoch of a phase is the change from what was before.
            phases.append(Phase(title, job, start + half * len(jobs), len(steps)))

    phase("A alone", "A")
    steps.append(Step("begin", "B"))
    phase("both", "A", "B")
    steps.append(Step("end", "A"))
    phase("B alone", "B")
    steps.append(Step("end", "B"))
    return Trace("two-jobs", "two jobs", shards, tuple(steps), tuple(phases))


#: name -> how it is made of a number of shards and of epochs.
TRACES = {
    "sequential": sequential,
    "shuffled": shuffled,
    "resampled": resampled,
    "two-jobs": two_jobs,
}
