"""SIGKILL before every change that a process makes to a cache on the disk.

A filesystem kills the process before its n-th change, and refuses all later ones. Then no
incomplete entry may look complete, a new process must read every shard from the cache at once,
before a sweep and after one, and a sweep must leave only entries and locks.
"""

import itertools
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardcache import Cache
from tests.stress.fuse import CHANGES, Shim
from tests.stress.harness import swept
from tests.support.storetools import age, forked, payload, room
from tests.support.tars import tar_of

#: The test kills before one change in this many, from a random one on.
EVERY = 10 if os.environ.get("FUZZ", "1") == "1" else 1
BIG = "big.tar"
#: The first has several blocks, the others one.
_SIZES = {BIG: (3 << 20) + 4321, "a.tar": 5000, "b.tar": 10_000, "c.tar": 15_000, "d.tar": 20_000}
SHARDS = {name: tar_of([("000000.bin", payload(size))]) for name, size in _SIZES.items()}


@dataclass
class Place:
    """A cache directory, and the directory of the original shards."""

    root: Path
    origin: Path
    options: dict[str, Any]

    def url(self, name: str) -> str:
        return f"file://{self.origin}/{name}"

    def cache(self, **options: Any) -> Cache:
        usual = {"min_free": 0, "cache_local": True, "attempts": 1, "prefetch": 0}
        return Cache(self.root, locks="flock", **{**usual, **self.options, **options})

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
    #: Earlier processes; a `Rule` kills some of them.
    before: tuple[tuple[Act, dict[str, Any]], ...] = ()
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


_ABC = ("a.tar", "b.tar", "c.tar")
_HAVE = ((_reading(*_ABC), {}), (_old, {}))
_WRITING = (_reading(BIG), {"ops": "write", "pattern": "*.tar", "skip": 2})
_REMOVING = (_remove, {"ops": "unlink", "skip": 1})
_RANKS = {"isolation": "rank"}
SCENARIOS = {
    "first use of a directory": Scenario(_reading("a.tar"), ("a.tar",)),
    "fetch of several blocks": Scenario(_reading(BIG), (BIG,), ((_reading("a.tar"), {}),)),
    "hit": Scenario(_reading("a.tar"), ("a.tar",), ((_reading("a.tar"), {}),)),
    "resume": Scenario(_reading(BIG), (BIG,), (_WRITING,)),
    "damaged entry": Scenario(_reading("a.tar"), ("a.tar",), (*_HAVE, (_cut, {}))),
    "link to a sibling's": Scenario(_rank(1), ("a.tar",), ((_rank(0), {}),), _RANKS),
    "room is made": Scenario(_reading("d.tar"), ("d.tar",), _HAVE, {"max_size": _room(*_ABC)}),
    "remove": Scenario(_remove, ("a.tar",), _HAVE),
    "clean to a limit": Scenario(_clean(max_size=_room("c.tar")), _ABC, _HAVE),
    "sweep": Scenario(_clean(orphans=True), (BIG, *_ABC), (*_HAVE, _REMOVING, _WRITING)),
}


def _alone(act: Act, place: Place) -> Any:
    """Return the result of an act in a process of its own, or None if the process was killed."""
    with forked(lambda parent: parent.say(act(place))) as child:
        try:
            return child.hear()
        except EOFError:
            assert child.wait() == -signal.SIGKILL
            return None


def _faults(root: Path) -> Iterator[str]:
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


def _sweep(place: Place) -> list[Path]:
    """Sweep a cache, unless the directory is not one yet; returns what is left."""
    is_made = (place.root / "manifest.json").exists()
    return swept(place.root, place.cache()) if is_made else []


def _check(scenario: Scenario, place: Place, planted: set[str]) -> None:
    """Check that new processes read from the cache at once, and that a sweep leaves nothing."""
    assert set(_faults(place.root)) <= planted
    twin = Place(place.root.with_name("twin"), place.origin, place.options)
    shutil.copytree(place.root, twin.root, symlinks=True)

    def read(place: Place) -> list[str]:
        streamed = place.read(*scenario.reads, lock_timeout=5.0, fill="complete", strict=True)
        return [*streamed, *_faults(place.root)]

    for step, at in ((read, twin), (_sweep, twin), (_sweep, place), (read, place), (_sweep, place)):
        assert _alone(step, at) == []
    shutil.rmtree(twin.root)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ops", [CHANGES, "rename"], ids=["changes", "renames"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_process_killed_before_any_change_leaves_a_sound_cache(name, ops, shim: Shim, tmp_path):
    scenario, origin, prepared = SCENARIOS[name], tmp_path / "origin", shim.backing / "prepared"
    origin.mkdir()
    for shard, data in SHARDS.items():
        (origin / shard).write_bytes(data)
    place = Place(shim.root / "prepared", origin, scenario.options)
    for act, kill in scenario.before:
        rule = shim.fail(**kill, kill=True, times=-1) if kill else None
        _alone(act, place)
        assert rule is None or shim.struck(rule)
        shim.heal()
    planted = set(_faults(prepared))
    step = EVERY if ops == CHANGES else 1
    place.root = shim.root / "run"
    for skip in itertools.count(random.randrange(step), step):
        if prepared.exists():
            shutil.copytree(prepared, shim.backing / "run", symlinks=True)
        rule = shim.fail(ops, kill=True, times=-1, skip=skip)
        _alone(scenario.act, place)
        killed = shim.struck(rule)
        shim.heal()
        print(f"killed before change {skip}" if killed else f"{skip} changes")
        if place.root.exists():
            _check(scenario, place, planted)
            shutil.rmtree(place.root)
        if not killed:
            return
