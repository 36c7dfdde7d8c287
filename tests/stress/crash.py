"""``python -m tests.stress.crash``: a process killed before every system call that touches a cache.

For each scenario one run under strace tells which system calls touch the cache directory. Then it
is run anew for each of them, on a fresh copy of the directory, and its process is killed (SIGKILL)
before the call.

Then a new process must read every shard at once, from the cache, with the right bytes, whether a
sweep comes first or not; no entry may look complete that is not; a sweep must leave nothing but
entries and locks. Exit 1 if anything is wrong, 77 where nothing can be traced. ``--every N`` takes
one point in N. What a failing disk answers at each call is tried in test_netfs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardcache import Cache
from tests.stress.strace import Call, Run, trace, unavailable
from tests.support.storetools import forked, payload
from tests.support.tars import tar_of

MIB = 1 << 20
BIG = "big.tar"
#: The first has several blocks, the others one.
SHARDS = {
    name: tar_of([("000000.bin", payload(size))])
    for name, size in {
        BIG: 3 * MIB + 4321,
        "a.tar": 5000,
        "b.tar": 10_000,
        "c.tar": 15_000,
        "d.tar": 20_000,
    }.items()
}


@dataclass(frozen=True)
class Place:
    """A cache directory, and the directory that its shards come from."""

    root: Path
    origin: Path
    options: dict[str, Any]

    def url(self, name: str) -> str:
        return f"file://{self.origin}/{name}"

    def cache(self, **options: Any) -> Cache:
        usual = {"min_free": 0, "cache_local": True, "attempts": 1, "prefetch": 0}
        return Cache(self.root, **{**usual, **self.options, **options})

    def read(self, *names: str, **options: Any) -> list[str]:
        """Read shards; which of them were not read from a file of the cache."""
        with self.cache(**options) as cache:
            streamed = []
            for name in names:
                with cache.open(self.url(name)) as stream:
                    assert stream.read() == SHARDS[name], f"{name} has other bytes"
                    streamed += [] if Path(str(stream.name)).is_absolute() else [name]
            return streamed


Act = Callable[[Place], Any]


@dataclass(frozen=True)
class Scenario:
    """One job to be struck."""

    act: Act  # what the struck process does
    reads: tuple[str, ...]  # what the next process must be able to read at once
    #: What others did, each with the call at which it was killed, if it was: part of the name,
    #: part of the text; the one in the middle of all that fit.
    before: tuple[tuple[Act, tuple[str, str] | None], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def _reading(*names: str) -> Act:
    return lambda place: place.read(*names)


def _old(place: Place) -> None:
    for path in place.root.rglob("meta.json"):
        os.utime(path, (time.time() - 1e6,) * 2)


def _cut(place: Place) -> None:
    (data,) = place.root.glob("v1/objects/*/*/*/a.tar")
    data.chmod(0o600)
    os.truncate(data, 1000)
    data.chmod(0o400)


def _rank(number: int) -> Act:
    def act(place: Place) -> None:
        os.environ["SHARDCACHE_RANK"] = str(number)
        place.read("a.tar")

    return act


def _remove(place: Place) -> None:
    with place.cache() as cache:
        cache.remove(place.url("a.tar"))


def _clean(**options: Any) -> Act:
    def act(place: Place) -> None:
        with place.cache() as cache:
            cache.clean(**options)

    return act


_WROTE, _UNLINKS = ("write", ".tar"), ("unlink", "")
_ABC = ("a.tar", "b.tar", "c.tar")
_HAVE = ((_reading(*_ABC), None), (_old, None))
SCENARIOS = {
    "first use of a directory": Scenario(_reading("a.tar"), ("a.tar",)),
    "fetch of several blocks": Scenario(_reading(BIG), (BIG,), ((_reading("a.tar"), None),)),
    "hit": Scenario(_reading("a.tar"), ("a.tar",), ((_reading("a.tar"), None),)),
    "resume": Scenario(_reading(BIG), (BIG,), ((_reading(BIG), _WROTE),)),
    "damaged entry": Scenario(
        _reading("a.tar"), ("a.tar",), ((_reading("a.tar"), None), (_cut, None))
    ),
    "link to a sibling's": Scenario(
        _rank(1), ("a.tar",), ((_rank(0), None),), {"isolation": "rank"}
    ),
    "room is made": Scenario(
        _reading("d.tar"), ("d.tar",), _HAVE, {"max_size": sum(len(SHARDS[n]) for n in _ABC)}
    ),
    "remove": Scenario(_remove, ("a.tar",), _HAVE),
    "clean to a limit": Scenario(_clean(max_size=len(SHARDS["c.tar"]) + 1000), _ABC, _HAVE),
    "sweep": Scenario(
        _clean(orphans=True),
        (BIG, *_ABC),
        (*_HAVE, (_remove, _UNLINKS), (_reading(BIG), _WROTE)),
    ),
}


# -- one attempt -----------------------------------------------------------------------


class Result(NamedTuple):
    """What became of an attempt; ``struck`` is None if the run did not come to the call."""

    scenario: str
    struck: Call | None
    wrong: list[str]


class Stage:
    """Where scenarios run, in processes without threads."""

    def __init__(self, home: Path) -> None:
        self._home = home
        (home / "origin").mkdir()
        for name, data in SHARDS.items():
            (home / "origin" / name).write_bytes(data)

    def prepare(self, name: str) -> Run:
        """Make what the scenario finds, and watch it without striking it."""
        place = self._place(SCENARIOS[name], self._home / "prepared" / name.replace(" ", "-"))
        for act, killed in SCENARIOS[name].before:
            strike = None
            if killed:
                with self._copy(place) as copy:
                    calls = trace(copy.root, lambda act=act, copy=copy: act(copy)).calls
                fit = [c for c in calls if killed[0] in c.name and killed[1] in c.text]
                strike = fit[len(fit) // 2]
            run = trace(place.root, lambda act=act: act(place) and None, strike)
            if run.error or run.killed != bool(killed):
                raise RuntimeError(f"{name} cannot be prepared: {run.error or run}")
        while True:  # what it imports is imported here, so that later runs make the same calls
            run, wrong = self.strike(name, None)
            if wrong:
                raise RuntimeError(f"{name} fails by itself: {wrong}")
            if not (new := [m for m in run.answer["imported"] if m not in sys.modules]):
                return run
            for module in new:
                importlib.import_module(module)

    def _place(self, scenario: Scenario, root: Path) -> Place:
        return Place(root, self._home / "origin", scenario.options)

    @contextlib.contextmanager
    def _copy(self, place: Place) -> Iterator[Place]:
        with tempfile.TemporaryDirectory(dir=self._home, prefix="run-") as directory:
            copy = Place(Path(directory, "cache"), place.origin, place.options)
            if place.root.exists():
                shutil.copytree(place.root, copy.root, symlinks=True)
            yield copy

    def strike(self, name: str, strike: Call | None) -> tuple[Run, list[str]]:
        """One attempt on a fresh copy: what happened, and what was wrong."""
        scenario = SCENARIOS[name]
        prepared = self._place(scenario, self._home / "prepared" / name.replace(" ", "-"))
        with self._copy(prepared) as place:
            planted = set(inspect(place.root))
            run = trace(place.root, lambda: _act(scenario, place), strike)
            wrong = [] if run.killed or run.answer else [f"it ended with {run.error}"]
            wrong += [text for text in inspect(place.root) if text not in planted]
            with self._copy(place) as twin:
                for step in (_read, _sweep):
                    wrong += _alone(step, scenario, twin)
            for step in (_sweep, _read, _sweep) if run.killed else ():
                wrong += _alone(step, scenario, place)
            return run, wrong

    def attempt(self, point: tuple[str, Call]) -> Result:
        run, wrong = self.strike(*point)
        if run.struck is None and run.killed:
            wrong.append("it was killed, but not by us")
        return Result(point[0], run.struck, wrong)


def _act(scenario: Scenario, place: Place) -> dict[str, list[str]]:
    """What the struck process does; what it imported."""
    known = set(sys.modules)
    scenario.act(place)
    return {"imported": sorted(set(sys.modules) - known)}


def inspect(root: Path) -> Iterator[str]:
    """What is wrong with the entries: what is visible must be complete."""
    for entry in root.glob("v1/**/objects/*/*/*"):
        names = {path.name for path in entry.iterdir()}
        data = names & set(SHARDS)
        if len(data) != 1 or names != {*data, "meta.json"}:
            yield f"an entry is not complete, or has more: {entry.name}: {sorted(names)}"
        elif (entry / min(data)).read_bytes() != SHARDS[min(data)]:
            yield f"an entry has other bytes than the origin: {entry.name}"
        elif (entry / min(data)).stat().st_mode & 0o222:
            yield f"an entry can be written: {entry.name}"


def _read(scenario: Scenario, place: Place) -> list[str]:
    """A process that was not there before reads everything, at once and from the cache."""
    streamed = place.read(*scenario.reads, strict=True, lock_timeout=5.0, fill="complete")
    return [f"{name} was streamed, not cached" for name in streamed] + list(inspect(place.root))


def _sweep(scenario: Scenario, place: Place) -> list[str]:
    if not (place.root / "manifest.json").exists():
        return []  # not ours to sweep
    for path in place.root.glob("v1/**/partial/**/*"):  # it may be kept for a while
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    with place.cache() as cache:
        cache.clean(orphans=True)
    kinds = ("partial", "sessions")
    left = [path for kind in kinds for path in place.root.glob(f"v1/**/{kind}/*")]
    left += [path for path in place.root.rglob(".*") if path not in left]
    return [f"the sweep left {path.relative_to(place.root)}" for path in left]


def _alone(step: Callable[[Scenario, Place], list[str]], *given: Any) -> list[str]:
    """What a step finds wrong, in a process of its own."""
    try:
        with forked(lambda parent: parent.say(step(*given))) as child:
            return list(child.hear())
    except (AssertionError, EOFError) as exn:
        return [f"the next process failed: {exn!r}"]


# -- all of them -----------------------------------------------------------------------


def sweep(names: list[str], every: int) -> list[Result]:
    """Try one point in so many of these scenarios; those that publish are in every sample."""
    draw = random.Random(every)
    with tempfile.TemporaryDirectory(prefix="shardcache-crash-") as home:
        stage = Stage(Path(home).resolve())
        points = []
        for name in names:
            calls = {call[:2]: call for call in stage.prepare(name).calls}  # of several threads
            for call in calls.values():
                publishes = call.name.startswith("rename") and "/objects/" in call.text
                if publishes or draw.randrange(every) == 0:
                    points.append((name, call))
        gc.freeze()  # or every child copies what the collector touches
        context = multiprocessing.get_context("fork")
        with context.Pool(os.cpu_count()) as pool:
            return list(pool.imap(stage.attempt, points))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.crash", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample of the points")
    given = parser.parse_args()
    if reason := unavailable():
        print(f"skipped: {reason}")
        return 77
    logging.getLogger().addHandler(logging.NullHandler())  # warnings are part of the play
    begun = time.monotonic()
    results = sweep(given.scenario or list(SCENARIOS), given.every)
    points = Counter(result.scenario for result in results)
    print(f"{time.monotonic() - begun:.0f} s\n\n| scenario | kills |\n|---|--:|")
    for name, count in points.items():
        print(f"| {name} | {count} |")
    bad = [result for result in results if result.wrong]
    for name, call, wrong in bad[:20]:
        print(f"\n{name}: {call and call.text}", *wrong)
    missed = sum(result.struck is None for result in results)
    print(f"\n{len(results)} points, {missed} not reached, {len(bad)} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    for variable in [v for v in os.environ if v.startswith(("SHARDCACHE_", "AWS_", "SLURM_"))]:
        del os.environ[variable]
    sys.exit(main())
