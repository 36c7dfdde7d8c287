"""What is interrupted by the crash-point sweep: small jobs on a cache directory, one each.

A scenario prepares a directory once, by real work of real processes (those that died
were killed), and says what the process does that is to be struck, and which shards it
reads. Every attempt works on a fresh copy of the directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.stress.crash.place import BIG, MIB, SHARDS, Place
from tests.stress.crash.states import (
    SlowOrigin,
    damaged,
    half_fetched,
    having,
    made,
    orphans,
    rebooted,
    sibling,
    use,
)

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job to be struck.

    Attributes:
        name: for the command line.
        about: for people.
        act: what the struck process does.
        prepare: makes the directory that it finds, in a process of its own; None for one
            that does not exist.
        reads: shards that it reads, and that the next process must be able to read.
        options: of the cache, in the struck process and in those after it.
        environment: of the same processes.
        s3: whether shards come from an S3 server, not from files.
        publishes: whether every sample has the calls around its publishing rename.
        stride: of its points, only every so-many-th is tried, always.
        maintains: it raises what the disk says, as documented, instead of reading past it.
    """

    name: str
    about: str
    act: Callable[[Place], None]
    prepare: Callable[[Place], None] | None
    reads: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    s3: bool = False
    publishes: bool = False
    stride: int = 1
    maintains: bool = False


# -- what it does --------------------------------------------------------------------


def _reading(*names: str, **options: Any) -> Callable[[Place], None]:
    def act(place: Place) -> None:
        with place.cache(**options) as cache:
            for name in names:
                place.read(cache, name)

    return act


def _read_with_threads(place: Place) -> None:
    with place.cache(connections=4, part_size=MIB) as cache:
        use(cache, SlowOrigin(others=3))
        place.read(cache, BIG)


def _remove(place: Place) -> None:
    with place.cache() as cache:
        cache.remove(place.url("a.tar"))


def _clean(place: Place) -> None:
    with place.cache() as cache:
        cache.clean(max_size=len(SHARDS["c.tar"]) + 1000)


def _sweep(place: Place) -> None:
    with place.cache() as cache:
        cache.clean(limits=False)


_OLD = 7 * 86400.0
_THREE = ("a.tar", "b.tar", "c.tar")

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first-use", "a directory becomes a cache", _reading("a.tar"), None, ("a.tar",)),
        Scenario(
            "group", "a directory becomes a group's cache", _reading("a.tar"), None, ("a.tar",),
            {"shared_group": os.getegid()}, {"SHARDCACHE_SHARED_GROUP": str(os.getegid())},
        ),
        Scenario("fetch", "two parts of two blocks, one thread", _reading(BIG), made, (BIG,)),
        Scenario(
            "follow", "read while it is fetched", _reading(BIG, fill="follow"), made, (BIG,)
        ),
        Scenario("threads", "four parts, four threads", _read_with_threads, made, (BIG,)),
        Scenario(
            "publish", "synced to the disk", _reading("a.tar"), made, ("a.tar",),
            {"fsync": "fsync"}, publishes=True,
        ),
        Scenario("hit", "a session, a use", _reading("a.tar"), having("a.tar"), ("a.tar",)),
        Scenario("boot", "verified after a boot", _reading("a.tar"), rebooted, ("a.tar",)),
        Scenario("resume", "of a killed process", _reading(BIG), half_fetched, (BIG,)),
        Scenario(
            "quarantine", "damaged, fetched again", _reading("a.tar", "b.tar"), damaged,
            ("a.tar", "b.tar"),
        ),
        Scenario(
            "link", "to a sibling's entry", _reading("a.tar"), sibling, ("a.tar",),
            {"isolation": "rank"}, {"SHARDCACHE_RANK": "1"},
        ),
        Scenario(
            "admit", "room is made for a shard", _reading("d.tar"), having(*_THREE, age=_OLD),
            ("d.tar",), {"max_size": sum(len(SHARDS[name]) for name in _THREE)},
        ),
        Scenario(
            "remove", "one shard", _remove, having("a.tar", "b.tar"), ("a.tar",), maintains=True
        ),
        Scenario("clean", "to a limit", _clean, having(*_THREE, age=_OLD), _THREE, maintains=True),
        Scenario(
            "sweep", "what six killed processes left", _sweep, orphans,
            (BIG, "a.tar", "b.tar", "c.tar", "d.tar"), maintains=True,
        ),
        Scenario(
            "s3", "from a real server, with threads",
            _reading(BIG, connections=3, part_size=MIB), made, (BIG,), s3=True, stride=4,
        ),
    )
}  # fmt: skip
