"""``python -m tests.stress.crash``: SIGKILL before every system call that touches a cache.

A first run of each scenario under strace lists the system calls that touch the cache directory.
For each of these calls, another run on a fresh copy of the directory is killed before the call.
Then a new process must read every shard from the cache at once, before a sweep and after one. No
incomplete entry may look complete, and a sweep must leave only entries and locks.

The exit code is 1 after a violation, and 77 if strace does not work. ``--every N`` takes one call
in N. test_netfs.py injects errors into file operations.

Runs are forked from this process, which has imported all modules, so that a run takes
milliseconds. strace counts calls per thread. A killed call has no effect.
"""

import argparse
import contextlib
import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardcache import Cache
from tests.stress.storm import leftovers
from tests.support.storetools import PATIENCE, Child, Parent, age, forked, payload, room
from tests.support.tars import tar_of

MIB = 1 << 20
BIG = "big.tar"
#: The first has several blocks, the others one.
_SIZES = {BIG: 3 * MIB + 4321, "a.tar": 5000, "b.tar": 10_000, "c.tar": 15_000, "d.tar": 20_000}
SHARDS = {name: tar_of([("000000.bin", payload(size))]) for name, size in _SIZES.items()}


@dataclass(frozen=True)
class Place:
    """A cache directory, and the directory of the original shards."""

    root: Path
    origin: Path
    options: dict[str, Any]

    def url(self, name: str) -> str:
        return f"file://{self.origin}/{name}"

    def cache(self, **options: Any) -> Cache:
        usual = {"min_free": 0, "cache_local": True, "attempts": 1, "prefetch": 0}
        return Cache(self.root, **{**usual, **self.options, **options})

    def read(self, *names: str, **options: Any) -> list[str]:
        """Read and check shards; returns those that were streamed past the cache."""
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
    """A process to kill, and what came before."""

    act: Act  # the process to kill
    reads: tuple[str, ...]  # shards that the next process must read at once
    #: Earlier processes. If one was killed, it was before the middle one of the calls whose name
    #: and text contain these strings.
    before: tuple[tuple[Act, tuple[str, str] | None], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def _reading(*names: str) -> Act:
    return lambda place: place.read(*names)


def _old(place: Place) -> None:
    age(place.root / "v1" / "objects")


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


def _room(*names: str) -> int:
    return room(Path(tempfile.gettempdir()), *(len(SHARDS[name]) for name in names))


_WROTE, _UNLINKS = ("write", ".tar"), ("unlink", "")
_ABC = ("a.tar", "b.tar", "c.tar")
_HAVE = ((_reading(*_ABC), None), (_old, None))
_RANKS = {"isolation": "rank"}
SCENARIOS = {
    "first use of a directory": Scenario(_reading("a.tar"), ("a.tar",)),
    "fetch of several blocks": Scenario(_reading(BIG), (BIG,), ((_reading("a.tar"), None),)),
    "hit": Scenario(_reading("a.tar"), ("a.tar",), ((_reading("a.tar"), None),)),
    "resume": Scenario(_reading(BIG), (BIG,), ((_reading(BIG), _WROTE),)),
    "damaged entry": Scenario(_reading("a.tar"), ("a.tar",), (*_HAVE, (_cut, None))),
    "link to a sibling's": Scenario(_rank(1), ("a.tar",), ((_rank(0), None),), _RANKS),
    "room is made": Scenario(_reading("d.tar"), ("d.tar",), _HAVE, {"max_size": _room(*_ABC)}),
    "remove": Scenario(_remove, ("a.tar",), _HAVE),
    "clean to a limit": Scenario(_clean(max_size=_room("c.tar")), _ABC, _HAVE),
    "sweep": Scenario(
        _clean(orphans=True), (BIG, *_ABC), (*_HAVE, (_remove, _UNLINKS), (_reading(BIG), _WROTE))
    ),
}


#: Starts the child's work. strace does not report waits for a signal.
_GO = signal.SIGUSR1
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h; -1 lets any process of the same user trace this one


class Call(NamedTuple):
    """The ``number``-th system call of a name in a thread, as strace prints it."""

    name: str
    number: int
    text: str


@dataclass
class Run:
    """The result of a traced function."""

    calls: list[Call]  # those that touch the watched directory
    killed: bool = False
    answer: Any = None  # the value that the function returned
    error: str | None = None  # the traceback of its exception


def trace(watched: Path, function: Callable[[], Any], strike: Call | None = None) -> Run:
    """Run a function in a child under strace, and kill it before the call ``strike``.

    Raises:
        RuntimeError: strace cannot attach.
    """

    def work(parent: Parent) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1))
        parent.say("ready")
        if signal.sigtimedwait({_GO}, PATIENCE) is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {_GO})
            parent.say(function())

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {_GO})
    with forked(work) as child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        child.hear()
        return _trace(child, str(watched), strike)


def _trace(child: Child, watched: str, strike: Call | None) -> Run:
    run, counts, messages, attached = Run([]), Counter[tuple[str, str]](), [], False
    output, theirs = os.pipe()
    command = f"timeout {PATIENCE} strace -f -y -s 0 -e signal=none -p {child.pid}"
    command += f" -o /dev/fd/{theirs} -e trace={strike.name if strike else '%file,%desc'}"
    if strike is not None:
        command += f" -e inject={strike.name}:signal=KILL:when={strike.number}"
    options = {"stdin": subprocess.DEVNULL, "stderr": theirs, "pass_fds": [theirs]}
    with (
        subprocess.Popen(command.split(), **options) as strace,
        open(output, errors="replace") as lines,
    ):
        os.close(theirs)
        for line in lines:
            if line.startswith("strace: Process ") and line.endswith("attached\n"):
                if not attached:
                    os.kill(child.pid, _GO)
                attached = True
            elif line.startswith("strace:"):
                messages.append(line)
            elif begun := re.match(r"(\d+)\s+(\w+)\(", line):
                counts[begun.groups()] += 1
                if watched in line:
                    text = line.split(maxsplit=1)[1].rstrip()
                    run.calls.append(Call(begun[2], counts[begun.groups()], text))
    if not attached:
        raise RuntimeError(" ".join(messages) or "strace did not attach")
    if strace.returncode == 124:  # set by timeout
        run.error = "it hung"
        return run
    run.killed = child.wait() == -signal.SIGKILL
    try:
        run.answer = None if run.killed else child.hear()
    except AssertionError as exn:
        run.error = str(exn)
    return run


class Point(NamedTuple):
    """A call at which to kill the process of a scenario."""

    scenario: str
    place: Place  # before the scenario
    call: Call


@contextlib.contextmanager
def copied(place: Place) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir=place.origin.parent, prefix="run-") as directory:
        copy = Place(Path(directory, "cache"), place.origin, place.options)
        if place.root.exists():
            shutil.copytree(place.root, copy.root, symlinks=True)
        yield copy


def prepare(home: Path, name: str) -> Iterator[Point]:
    """Run what comes before a scenario, trace the scenario, and yield every point."""
    scenario = SCENARIOS[name]
    place = Place(home / "prepared" / name.replace(" ", "-"), home / "origin", scenario.options)
    for act, killed in scenario.before:
        strike = None
        if killed:
            with copied(place) as copy:
                calls = trace(copy.root, lambda act=act, copy=copy: act(copy)).calls
            fit = [c for c in calls if killed[0] in c.name and killed[1] in c.text]
            strike = fit[len(fit) // 2]
        run = trace(place.root, lambda act=act: act(place) and None, strike)
        if run.error or run.killed != bool(killed):
            raise RuntimeError(f"{name} cannot be prepared: {run.error or run}")
    for _ in range(2):  # import the same modules here, so that later runs make the same calls
        run, wrong = strike_at(name, place, None)
        if wrong:
            raise RuntimeError(f"{name} fails by itself: {wrong}")
        for module in run.answer:
            with contextlib.suppress(ModuleNotFoundError):  # Cython makes modules without files
                importlib.import_module(module)
    for call in {call[:2]: call for call in run.calls}.values():  # once for all threads
        yield Point(name, place, call)


def strike_at(name: str, prepared: Place, call: Call | None) -> tuple[Run, list[str]]:
    """Kill one run on a fresh copy; returns the run and all violations."""
    scenario = SCENARIOS[name]
    with copied(prepared) as place:
        planted = set(inspect(place.root))
        run = trace(place.root, lambda: _act(scenario, place), call)
        wrong = [f"it ended with {run.error}"] if run.error else []
        wrong += [text for text in inspect(place.root) if text not in planted]
        with copied(place) as twin:
            for step in (_read, _sweep):
                wrong += _alone(step, scenario, twin)
        for step in (_sweep, _read, _sweep) if run.killed else ():
            wrong += _alone(step, scenario, place)
        return run, wrong


def _act(scenario: Scenario, place: Place) -> set[str]:
    """Do what the process to kill does; returns the modules that it imported."""
    known = set(sys.modules)
    scenario.act(place)
    return set(sys.modules) - known


def inspect(root: Path) -> Iterator[str]:
    """Yield the faults of visible entries: each must be complete."""
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
    """Read all shards at once from the cache; returns violations."""
    streamed = place.read(*scenario.reads, strict=True, lock_timeout=5.0, fill="complete")
    return [f"{name} was streamed, not cached" for name in streamed] + list(inspect(place.root))


def _sweep(scenario: Scenario, place: Place) -> list[str]:
    if not (place.root / "manifest.json").exists():
        return []  # not a cache yet
    for path in place.root.glob("v1/**/partial"):  # a sweep keeps young partials
        age(path)
    with place.cache() as cache:
        cache.clean(orphans=True)
    return [f"the sweep left {path.relative_to(place.root)}" for path in leftovers(place.root)]


def _alone(step: Callable[[Scenario, Place], list[str]], *given: Any) -> list[str]:
    """Run a step in its own process; returns violations."""
    try:
        with forked(lambda parent: parent.say(step(*given))) as child:
            return list(child.hear())
    except (AssertionError, EOFError) as exn:
        return [f"the next process failed: {exn!r}"]


def sweep(names: list[str], every: int) -> list[tuple[Point, bool, list[str]]]:
    """Kill at one point in ``every`` of some scenarios, and at all points that publish."""
    draw = random.Random(every)
    with tempfile.TemporaryDirectory(prefix="shardcache-crash-") as directory:
        home = Path(directory).resolve()
        (home / "origin").mkdir()
        for name, data in SHARDS.items():
            (home / "origin" / name).write_bytes(data)
        points = []
        for point in [point for name in names for point in prepare(home, name)]:
            publishes = point.call.name.startswith("rename") and "/objects/" in point.call.text
            if publishes or draw.randrange(every) == 0:
                points.append(point)
        gc.freeze()  # otherwise every child copies the pages that the collector touches
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            runs = pool.starmap(strike_at, points, chunksize=1)
        return [(point, run.killed, bad) for point, (run, bad) in zip(points, runs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.crash", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS))
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample of the points")
    given = parser.parse_args()
    try:
        trace(Path("/"), lambda: None)
    except (RuntimeError, FileNotFoundError) as exn:
        print(f"skipped: strace is missing or not allowed: {exn}")
        return 77
    logging.disable()  # warnings are expected
    results = sweep(given.scenario or list(SCENARIOS), given.every)
    print("| scenario | kills |\n|---|--:|")
    for name, count in Counter(point.scenario for point, _, _ in results).items():
        print(f"| {name} | {count} |")
    bad = [(point, wrong) for point, _, wrong in results if wrong]
    for point, wrong in bad[:20]:
        print(f"\n{point.scenario}: {point.call.text}", *wrong)
    missed = sum(not killed for _, killed, _ in results)
    print(f"\n{len(results)} points, {missed} not reached, {len(bad)} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    for variable in [v for v in os.environ if v.startswith(("SHARDCACHE_", "AWS_", "SLURM_"))]:
        del os.environ[variable]
    sys.exit(main())
