"""What goes on in a cache at this moment: rates, fetches in flight, how full it is.

A `Watcher` looks now and then; rates are what changed between two looks. Looking changes nothing
and waits for nobody. For one thread.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcache.clock import Clock, utc
from shardcache.layout import parse_partial_name
from shardcache.locks.flock import Holder, read_holder
from shardcache.locks.sessions import Wait, live_sessions, live_waits
from shardcache.space.volume import Volume
from shardcache.stats.summary import Stats, by_rank, rank_records, summed
from shardcache.store.entry import DamagedError, Metadata, read_sidecar
from shardcache.store.partial import Progress, read_progress
from shardcache.store.sweeping import in_flight

if TYPE_CHECKING:
    from shardcache.cache import Cache

__all__ = ["Activity", "Flight", "TierUse", "Waiting", "Watcher", "tier_records", "tier_uses"]

#: To count what is there takes 40 us per entry: it is done again after so many times as long.
_SELDOM = 20
_LEAST = 5.0
#: Seconds over which rates are taken, if so much is known.
_SMOOTH = 5.0
#: Seconds of statistics that a look reads: what a process writes may be a minute old.
_WINDOW = 3600.0


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier is.

    Attributes:
        directory: of it.
        used: bytes of entries.
        limit: most bytes that it may have; None where free space limits it.
        entries: how many there are.
    """

    directory: str
    used: int
    limit: int | None
    entries: int


@dataclass(frozen=True, slots=True)
class Flight:
    """A fetch in flight.

    Attributes:
        url: of the shard; its key where nobody says the URL.
        written: bytes on disk.
        size: bytes that it will have, once known.
        rate: bytes per second since the last look; None on the first.
        holder: who fetches it, where that is known.
    """

    url: str
    written: int
    size: int | None
    rate: float | None
    holder: Holder | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Somebody who waits for somebody else's fetch.

    Attributes:
        wait: who, for what, since when, and for whom it was when it began.
        holder: for whom, by now; None where that is not known.
        seconds: how long by now.
        written: bytes that are there, where that is known.
        size: bytes that the shard will have, likewise.
    """

    wait: Wait
    holder: Holder | None
    seconds: float
    written: int | None
    size: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: bytes and seconds."""
        return {
            "url": self.wait.url,
            **_who(self.wait.waiter),
            "since": utc(self.wait.waiter.started),
            "seconds": self.seconds,
            "holder": None if self.holder is None else _who(self.holder),
            "written_bytes": self.written,
            "size": self.size,
        }


@dataclass(frozen=True, slots=True)
class Activity:
    """One look.

    Attributes:
        at: when, seconds since the epoch.
        seconds: over which rates are taken; None on the first look.
        processes: how many use the cache.
        total: what was counted meanwhile.
        ranks: the same by rank.
        flights: fetches in flight, the oldest first.
        tiers: how full they are.
        waits: who waits for whom, the longest first.
    """

    at: float
    seconds: float | None
    processes: int
    total: Stats
    ranks: Mapping[str, Stats]
    flights: Sequence[Flight]
    tiers: Sequence[TierUse]
    waits: Sequence[Waiting] = ()

    def rate(self, name: str) -> float:
        """How often a thing was counted per second (`counters.COUNTERS`)."""
        return self.total.counters[name] / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times, numbers of things, bytes and seconds."""
        return {
            "at": utc(self.at),
            "seconds": self.seconds,
            "processes": self.processes,
            "total": self.total.as_dict(),
            "ranks": rank_records(self.ranks),
            "fetches": [
                {
                    "url": flight.url,
                    "size": flight.size,
                    "written_bytes": flight.written,
                    "bytes_per_second": flight.rate,
                    "pid": flight.holder.pid if flight.holder else None,
                    "rank": flight.holder.rank if flight.holder else None,
                }
                for flight in self.flights
            ],
            "waits": [waiting.as_dict() for waiting in self.waits],
            "tiers": tier_records(self.tiers),
        }


class Watcher:
    """See the module.

    Args:
        cache: what is watched.
        clock: time.
    """

    def __init__(self, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._looks: deque[tuple[float, Stats, dict[str, Stats]]] = deque()
        self._looked_at = 0.0
        self._written: dict[str, int] = {}
        self._tiers: list[TierUse] = []
        self._count_at = 0.0

    def look(self) -> Activity:
        """What goes on.

        Raises:
            OSError: the directory cannot be read.
        """
        now = self._clock.monotonic()
        found = self._cache.samples(_WINDOW)
        total, ranks = summed(found), by_rank(found)
        # Processes write once a second: over a shorter time rates would jump.
        while len(self._looks) > 1 and now - self._looks[1][0] >= _SMOOTH:
            self._looks.popleft()
        before = self._looks[0] if self._looks else None
        self._looks.append((now, total, ranks))
        since, self._looked_at = self._looked_at, now
        seconds = None if before is None else max(1e-3, now - before[0])
        nothing = summed([])
        known = {} if before is None else before[2]
        changed = {
            rank: _difference(each, known.get(rank, nothing if before else each))
            for rank, each in ranks.items()
        }
        return Activity(
            at=self._clock.time(),
            seconds=seconds,
            processes=len(live_sessions(self._cache.node_layout)),
            total=_difference(total, total if before is None else before[1]),
            ranks={rank: each for rank, each in changed.items() if each.opens},
            flights=self._flights(None if before is None else max(1e-3, now - since)),
            tiers=self._full(now),
            waits=self._waits(),
        )

    def _flights(self, seconds: float | None) -> list[Flight]:
        flights, written = [], {}
        for store in self._cache.stores():
            for found in in_flight(store.layout):
                if not found.live or not found.key:
                    continue
                name = found.path.name
                done = written[name] = found.progress.written if found.progress else found.occupied
                last = self._written.get(name)
                rate = None if last is None or not seconds else max(0, done - last) / seconds
                holder = read_holder(store.layout.holder(found.key))
                size = found.progress.total if found.progress else None
                flights.append(Flight(_url(found.path, found.key), done, size, rate, holder))
        self._written = written
        return sorted(flights, key=lambda flight: (-flight.written, flight.url))

    def _waits(self) -> list[Waiting]:
        now, places = self._clock.time(), self._cache.stores()
        partials = [store.layout.partial for store in places]
        found = []
        for store in places:
            for wait in live_waits(store.layout):
                record = read_holder(store.layout.holder(wait.key))
                holder = record or wait.holder
                progress = _progress(holder, partials)
                found.append(
                    Waiting(
                        wait,
                        holder,
                        max(0.0, now - wait.waiter.started),
                        progress.written if progress else None,
                        progress.total if progress else None,
                    )
                )
        return sorted(found, key=lambda each: (-each.seconds, each.wait.url))

    def _full(self, now: float) -> list[TierUse]:
        if now >= self._count_at:
            self._tiers = tier_uses(self._cache)
            took = self._clock.monotonic() - now
            self._count_at = self._clock.monotonic() + max(_LEAST, _SELDOM * took)
        return self._tiers


def tier_uses(cache: Cache) -> list[TierUse]:
    """How full each tier is.

    Raises:
        OSError: a directory cannot be read.
    """
    configs = {os.fspath(config.dir): config for config in cache.config.by_tier()}
    sizes: dict[str, list[int]] = {directory: [] for directory in configs}
    for entry in cache.entries():
        home = next((d for d in configs if entry.directory.startswith(f"{d}/")), None)
        if home is not None:
            sizes[home].append(entry.size)
    found = []
    for directory, config in configs.items():
        there = Path(directory).is_dir()
        limit = Volume.of(Path(directory)).budget(config) if there else None
        found.append(TierUse(directory, sum(sizes[directory]), limit, len(sizes[directory])))
    return found


def _progress(holder: Holder | None, partials: Sequence[Path]) -> Progress | None:
    """How far a holder is, in whichever tier its partial grows."""
    name = holder.partial if holder else None
    if name is None or parse_partial_name(name) is None:
        return None
    return next((p for d in partials if (p := read_progress(d / name)) is not None), None)


def _who(holder: Holder) -> dict[str, Any]:
    return {
        "pid": holder.pid,
        "host": holder.host,
        "rank": holder.rank,
        "job": holder.job,
    }


def tier_records(tiers: Iterable[TierUse]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "tier": number,
            "dir": tier.directory,
            "shards": tier.entries,
            "bytes": tier.used,
            "max_size": tier.limit,
        }
        for number, tier in enumerate(tiers, 1)
    ]


def _url(path: Path, key: str) -> str:
    try:
        return Metadata.decode(read_sidecar(path)).url
    except (DamagedError, OSError):
        return key


def _difference(now: Stats, before: Stats) -> Stats:
    """What was counted between two looks; nothing is less than before, unless it was zeroed."""
    counters = {name: max(0, n - before.counters[name]) for name, n in now.counters.items()}
    less: Callable[[str], Mapping[int, int]] = lambda wait: before.waits[wait].buckets  # noqa: E731
    waits = {
        wait: type(found)({b: max(0, n - less(wait).get(b, 0)) for b, n in found.buckets.items()})
        for wait, found in now.waits.items()
    }
    return Stats(before.until, now.until, counters, waits)
