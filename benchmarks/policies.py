"""Which policy hits how often: ``python -m benchmarks.policies``.

Plays traces (`benchmarks.traces`) on caches of 10 to 90 % of the data: ``working-set`` by the
library's own planner, LRU, FIFO, random eviction, and the clairvoyant optimum, which knows what
will be read and may leave a newcomer out (Belady's MIN with bypass: for shards of one size no
policy hits more often). With ``--real`` the same traces are played on the real program: a process
for each job reads through a cache with ``max_size``, from an S3-like server. Prints tables;
``--write`` makes docs/policies.md and its plots of them.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import logging
import random
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.buckets import BUCKET, archive
from benchmarks.links import ROOT, Target, link
from benchmarks.peers import clean_environment
from benchmarks.plots import Line, line_charts
from benchmarks.results import Row, end_in_order, load, machine, save, say, table
from benchmarks.traces import TRACES, Trace
from shardcache import Cache
from shardcache.space.eviction import Limits, plan
from shardcache.space.policy import Policy
from shardcache.store.store import Entry

__all__ = ["MODELS", "main", "play", "play_for_real"]

SHARES = tuple(percent / 100 for percent in range(10, 100, 10))
#: 2026-01-01: a date that `policy` believes. Every step takes a millisecond.
_BEGUN = 1_767_225_600.0
_STEP = 0.001
_PATIENCE = 120.0
_DOCS = ROOT / "docs"


class Model(Protocol):
    """A cache of so many shards."""

    def __init__(self, capacity: int, trace: Trace) -> None: ...

    def begin(self, job: str, at: int) -> None:
        """A job begins at that step."""
        ...

    def end(self, job: str, at: int) -> None:
        """It ends."""
        ...

    def read(self, job: str, shard: int, at: int) -> bool:
        """Whether a read is a hit."""
        ...


class _Simple:
    """A policy that knows nothing of jobs."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        self._capacity = capacity
        self._resident: OrderedDict[int, None] = OrderedDict()
        self._chance = random.Random(4)

    def begin(self, job: str, at: int) -> None:
        pass

    def end(self, job: str, at: int) -> None:
        pass

    def read(self, job: str, shard: int, at: int) -> bool:
        if shard in self._resident:
            self._hit(shard)
            return True
        if len(self._resident) >= self._capacity:
            self._evict()
        self._resident[shard] = None
        return False

    def _hit(self, shard: int) -> None:
        pass

    def _evict(self) -> None:
        self._resident.popitem(last=False)


class Fifo(_Simple):
    """What came first goes first."""


class Lru(_Simple):
    """What was used longest ago goes first."""

    def _hit(self, shard: int) -> None:
        self._resident.move_to_end(shard)


class Random(_Simple):
    """Any goes."""

    def _evict(self) -> None:
        del self._resident[self._chance.choice(list(self._resident))]


class Optimum(_Simple):
    """What is read again last goes first, if need be the newcomer itself."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        super().__init__(capacity, trace)
        self._reads: dict[int, list[int]] = {}
        for number, step in enumerate(trace.steps):
            if step.what == "read":
                self._reads.setdefault(step.shard, []).append(number)

    def read(self, job: str, shard: int, at: int) -> bool:
        if shard in self._resident:
            return True
        self._resident[shard] = None
        if len(self._resident) > self._capacity:
            last = max(self._resident, key=lambda one: self._next(one, at))
            del self._resident[last]
        return False

    def _next(self, shard: int, at: int) -> float:
        reads = self._reads[shard]
        number = bisect.bisect_right(reads, at)
        return reads[number] if number < len(reads) else float("inf")


class WorkingSet:
    """What the library does: its own plan for every newcomer."""

    def __init__(self, capacity: int, trace: Trace) -> None:
        self._capacity = capacity
        self._entries: dict[str, Entry] = {}
        self._live: dict[str, float] = {}

    def begin(self, job: str, at: int) -> None:
        self._live[job] = _date(at)

    def end(self, job: str, at: int) -> None:
        del self._live[job]

    def read(self, job: str, shard: int, at: int) -> bool:
        key, now = f"{shard:032x}", _date(at)
        hit = key in self._entries
        if hit or self._has_room(now):
            self._entries[key] = Entry(f"/{key}", key, "0" * 24, 1, now)
        return hit

    def _has_room(self, now: float) -> bool:
        if len(self._entries) < self._capacity:
            return True
        policy = Policy(since=min(self._live.values()))
        limits = Limits(max_size=self._capacity)
        chosen = plan(self._entries.values(), limits, now, reserved=1, policy=policy)
        if chosen.suffices:
            for victim in chosen.victims:
                del self._entries[victim.entries[0].key]
        return chosen.suffices


def _date(step: int) -> float:
    return _BEGUN + step * _STEP


#: In the order of tables.
MODELS: dict[str, type[Model]] = {
    "working-set": WorkingSet,
    "lru": Lru,
    "fifo": Fifo,
    "random": Random,
    "optimum": Optimum,
}


def play(trace: Trace, policy: str, share: float) -> dict[str, float]:
    """The hit ratio of each phase in a cache for ``share`` of the trace's shards."""
    model = MODELS[policy](_capacity(trace, share), trace)
    hits = []
    for number, (what, job, shard) in enumerate(trace.steps):
        hits.append(what == "read" and model.read(job, shard, number))
        if what == "begin":
            model.begin(job, number)
        elif what == "end":
            model.end(job, number)
    return _by_phase(trace, hits)


def _by_phase(trace: Trace, hits: Sequence[bool]) -> dict[str, float]:
    found = {}
    for phase in trace.phases:
        span = range(phase.start, phase.stop)
        mine = [hits[number] for number in span if trace.steps[number].job == phase.job]
        found[_name(phase.title, phase.job)] = sum(mine) / len(mine)
    return found


def _capacity(trace: Trace, share: float) -> int:
    return max(1, round(trace.shards * share))


def _name(title: str, job: str) -> str:
    return title if title.endswith("on") else f"{title}: {job}"


# -- the real program -----------------------------------------------------------------


def play_for_real(
    trace: Trace, policy: str, share: float, target: Target, place: Path, size: int
) -> dict[str, float]:
    """As `play`, by processes that read through a cache.

    Args:
        trace, policy, share: as for `play`; ``policy`` is one of the library's.
        target: where the shards are, as ``<number>.tar``.
        place: where the cache goes.
        size: bytes of a shard.
    """
    options = {"max_size": _capacity(trace, share) * size, "policy": policy}
    hits = []
    with contextlib.ExitStack() as stack:
        jobs: dict[str, subprocess.Popen[str]] = {}
        for what, job, shard in trace.steps:
            hits.append(what == "read" and _ask(jobs[job], f"{shard:05d}.tar"))
            if what == "begin":
                jobs[job] = stack.enter_context(_job(target, place, options))
            elif what == "end":
                _end(jobs.pop(job))
    return _by_phase(trace, hits)


@contextlib.contextmanager
def _job(target: Target, place: Path, options: Row) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.policies", "--job", str(place), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=clean_environment(target),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _ask(process: subprocess.Popen[str], key: str) -> bool:
    """Have a shard read; whether it was there."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{key}\n")
    process.stdin.flush()
    said = process.stdout.readline().strip()
    if said not in ("hit", "miss"):
        raise RuntimeError(f"a job failed; it said {said!r}")
    return said == "hit"


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if process.wait(_PATIENCE):
        raise RuntimeError(f"a job ended with exit code {process.returncode}")


def _be_a_job(place: str, options: dict[str, Any]) -> None:
    """Read what standard input names, one shard at a time."""
    logging.getLogger("shardcache").setLevel(logging.ERROR)  # of what is streamed, often
    with Cache(place, min_free=0, touch_interval=0, **options) as cache:
        for line in sys.stdin:
            url = f"s3://{BUCKET}/{line.strip()}"
            there = url in cache
            with cache.open(url) as stream:
                while stream.read(1 << 20):
                    pass
            print("hit" if there else "miss", flush=True)


# -- the report -----------------------------------------------------------------------


def simulate(shards: int, epochs: int) -> list[Row]:
    """Every trace, policy and share."""
    return [
        {"trace": name, "policy": policy, "share": share, "phase": phase, "ratio": ratio}
        for name, make in TRACES.items()
        for policy in MODELS
        for share in SHARES
        for phase, ratio in play(make(shards, epochs), policy, share).items()
    ]


def measure(
    shards: int, epochs: int, size: int, shares: Sequence[float], traces: Sequence[str] = ()
) -> list[Row]:
    """The same with the real program, under those policies that it has."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shardcache-bench-") as name:
        home = Path(name)
        (home / BUCKET).mkdir()
        for number in range(shards):
            (home / BUCKET / f"{number:05d}.tar").write_bytes(b"".join(archive(str(number), size)))
        for trace in (TRACES[name](shards, epochs) for name in traces or TRACES):
            for policy in ("working-set", "lru", "fifo"):
                for share in shares:
                    place = home / "cache"
                    with link(home, home) as target:
                        found = play_for_real(trace, policy, share, target, place, size)
                    with Cache(place) as cache:
                        cache.clean(everything=True)
                    for phase, ratio in found.items():
                        say(f"  {trace.name}, {policy}, {share:.0%}, {phase}: {ratio:.3f}")
                        rows.append(
                            {
                                "trace": trace.name,
                                "policy": policy,
                                "share": share,
                                "phase": phase,
                                "ratio": ratio,
                            }
                        )
    return rows


def report(facts: Row) -> str:
    """The tables of a result, in Markdown."""
    parts = []
    for trace in TRACES:
        for phase in dict.fromkeys(r["phase"] for r in facts["model"] if r["trace"] == trace):
            title = TRACES[trace](2, 2).title
            parts += [f"### {title.capitalize()}: {phase}", "", _table(facts, trace, phase), ""]
    return "\n".join(parts)


def _table(facts: Row, trace: str, phase: str) -> str:
    def ratios(kind: str, policy: str) -> dict[float, float]:
        return {
            row["share"]: row["ratio"]
            for row in facts.get(kind, ())
            if (row["trace"], row["policy"], row["phase"]) == (trace, policy, phase)
        }

    rows = []
    for policy in MODELS:
        rows.append([policy, *_cells(ratios("model", policy))])
        if real := ratios("real", policy):
            rows.append([f"{policy}, the program", *_cells(real)])
    return table(["cache, part of the data", *(f"{share:.0%}" for share in SHARES)], rows)


def _cells(ratios: dict[float, float]) -> list[str]:
    return [f"{ratios[share]:.2f}" if share in ratios else "" for share in SHARES]


def plots(facts: Row) -> dict[str, str]:
    """A chart of each trace: name of the file to SVG."""
    charts = {}
    for trace in TRACES:
        phases = dict.fromkeys(r["phase"] for r in facts["model"] if r["trace"] == trace)
        panels = {
            phase: [
                Line(
                    policy,
                    [
                        (row["share"], row["ratio"])
                        for row in facts["model"]
                        if (row["trace"], row["policy"], row["phase"]) == (trace, policy, phase)
                    ],
                    [
                        (row["share"], row["ratio"])
                        for row in facts.get("real", ())
                        if (row["trace"], row["policy"], row["phase"]) == (trace, policy, phase)
                    ],
                )
                for policy in MODELS
            ]
            for phase in phases
        }
        title = f"Hit ratio, shards {TRACES[trace](2, 2).title}"
        charts[f"policies-{trace}"] = line_charts(title, "cache, part of the data", panels)
    return charts


_ABOUT = """\
<!-- Generated by `python -m benchmarks.policies --real --write`. Not to be edited. -->

# Policies

What part of the reads is served from a cache that is smaller than the data. Every row is a policy
in a model of {shards} shards and {epochs} epochs (`benchmarks/policies.py`); "the program" is the
real one on the same traces with {real_shards} shards.
The optimum knows what will be read; nothing can do better.
"""


def write(facts: Row, folder: Path) -> None:
    """Make the page and its plots."""
    parts = [_ABOUT.format(**facts["sizes"])]
    for name, chart in plots(facts).items():
        (folder / f"{name}.svg").write_text(chart, "utf-8")
        parts.append(f"![{name}]({name}.svg)\n")
    parts.append(report(facts))
    (folder / "policies.md").write_text("\n".join(parts).rstrip("\n") + "\n", "utf-8")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="store_true", help="play on the real program, too")
    parser.add_argument("--write", action="store_true", help="write docs/policies.md and plots")
    parser.add_argument("--quick", action="store_true", help="few shards, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--load", type=Path, metavar="FILE", help="take figures from there")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        _be_a_job(arguments.job[0], json.loads(arguments.job[1]))
        return
    end_in_order()
    if arguments.load:
        facts = load(arguments.load)
    else:
        shards, epochs = (20, 3) if arguments.quick else (200, 10)
        real = (10, 3) if arguments.quick else (40, 6)
        shares = (0.5,) if arguments.quick else (0.1, 0.3, 0.5, 0.7, 0.9)
        facts = {
            "machine": machine(),
            "sizes": {"shards": shards, "epochs": epochs, "real_shards": real[0]},
            "model": simulate(shards, epochs),
        }
        if arguments.real:
            facts["real"] = measure(*real, size=204_800, shares=shares)
        save(arguments.json, facts)
    print(report(facts))
    if arguments.write:
        write(facts, _DOCS)


if __name__ == "__main__":
    main()
