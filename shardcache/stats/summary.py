"""What a cache has done for a node: opens, bytes, waits, evictions, as one sum.

    opens = hits + coalesced + linked + misses + bypassed + failed

A hit found the shard; a coalesced open waited for a fetch that somebody else had begun, in this
process or another one; a linked one took a sibling namespace's copy; a miss was fetched by whoever
asked; a bypass was streamed and not stored; a failed one raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from shardcache.clock import utc
from shardcache.stats.counters import COUNTERS, WAITS, bucket_range
from shardcache.stats.database import Sample
from shardcache.units import format_bytes, format_duration

__all__ = ["OUTCOMES", "Stats", "Waits", "by_hour", "by_rank", "rank_records", "summed"]

#: What an open can come to, in the order in which it is shown.
OUTCOMES = ("hits", "coalesced", "linked", "misses", "bypassed", "failed")
#: Counters of microseconds begin so; JSON has seconds.
_MICROSECONDS = "wait_us_"
_PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Waits:
    """How long readers waited.

    Attributes:
        buckets: bucket (`counters.bucket_range`) -> how many.
    """

    buckets: Mapping[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many waits there were."""
        return sum(self.buckets.values())

    def percentile(self, share: float) -> float | None:
        """Seconds that this share of the waits took at most, to a quarter; None without any."""
        left = share * self.count
        for bucket, count in sorted(self.buckets.items()):
            left -= count
            if count and left <= 0:
                return bucket_range(bucket)[1]
        return None


class _Counter:
    """One of `counters.COUNTERS`, under its own name.

    Args:
        about: what it counts; the JSON schemas say so, too.
    """

    def __init__(self, about: str) -> None:
        self.__doc__ = about
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, stats: None, owner: type) -> _Counter: ...
    @overload
    def __get__(self, stats: Stats, owner: type) -> int: ...
    def __get__(self, stats: Stats | None, owner: type) -> _Counter | int:
        return self if stats is None else stats.counters[self._name]


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """A sum; see the module.

    Each counter is an attribute, too: `stats.hits`.

    Attributes:
        since: when the first of it was counted, seconds since the epoch; None if nothing was.
        until: when the last of it was.
        counters: by the names of `counters.COUNTERS`, all of them.
        waits: by what was waited for (`counters.WAITS`).
    """

    since: float | None
    until: float | None
    counters: Mapping[str, int]
    waits: Mapping[str, Waits]

    hits = _Counter("Opens that found the shard.")
    coalesced = _Counter("Opens that waited for a fetch which somebody else had begun.")
    linked = _Counter("Opens that took the copy of another rank or job.")
    misses = _Counter("Opens that fetched the shard.")
    bypassed = _Counter("Opens that were streamed and not stored.")
    failed = _Counter("Opens that raised.")
    bytes_opened = _Counter("Bytes of shards opened through the cache.")
    bytes_bypassed = _Counter("Bytes of shards streamed and not stored.")
    fetches = _Counter("Shards fetched from the origin.")
    fetches_upstream = _Counter("Shards fetched from an upstream.")
    fetches_failed = _Counter("Fetches that failed.")
    bytes_origin = _Counter("Bytes that came from the origin.")
    bytes_upstream = _Counter("Bytes that came from upstreams.")
    retries = _Counter("Requests that were repeated.")
    evicted_max_size = _Counter("Entries evicted for max_size.")
    evicted_min_free = _Counter("Entries evicted for min_free.")
    evicted_inodes = _Counter("Entries evicted for want of inodes.")
    evicted_max_age = _Counter("Entries evicted for max_age.")
    evicted_all = _Counter("Entries removed because all were to go.")
    evicted_asked = _Counter("Entries removed by name.")
    bytes_evicted = _Counter("Bytes of entries evicted or removed.")
    errors_origin = _Counter("Errors of the origin.")
    errors_integrity = _Counter("Shards that were damaged.")
    errors_disk = _Counter("Errors of the local disk.")
    bypassed_full = _Counter("Opens that were bypassed for want of room.")
    errors_lock = _Counter("Errors of locks, and waits that were given up.")
    hits_tier_1 = _Counter("Hits in the first tier.")
    hits_tier_2 = _Counter("Hits in the second tier.")
    hits_tier_3 = _Counter("Hits in the third tier.")
    wait_us_disk = _Counter("Microseconds that readers waited for the disk.")
    wait_us_lock = _Counter("Microseconds that they waited for somebody else's fetch.")
    wait_us_network = _Counter("Microseconds that they waited for their own.")
    bytes_stored = _Counter("Bytes of entries that were stored.")

    @property
    def opens(self) -> int:
        """Shards that were asked for."""
        return sum(self.counters[name] for name in OUTCOMES)

    @property
    def hit_rate(self) -> float | None:
        """Hits per open; None without opens."""
        return self.counters["hits"] / self.opens if self.opens else None

    @property
    def evicted(self) -> int:
        """Entries that were evicted or removed, for whatever reason."""
        return sum(n for name, n in self.counters.items() if name.startswith("evicted_"))

    @property
    def errors(self) -> int:
        """Errors of the origin, the disk and the locks."""
        return sum(n for name, n in self.counters.items() if name.startswith("errors_"))

    @property
    def bytes_saved(self) -> int:
        """Bytes that would have come from the origin without the cache."""
        asked = self.counters["bytes_opened"] + self.counters["bytes_bypassed"]
        return max(0, asked - self.counters["bytes_origin"])

    @property
    def all_waits(self) -> Waits:
        """Of every kind."""
        total: Counter[int] = Counter()
        for found in self.waits.values():
            total.update(found.buckets)
        return Waits(total)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times, numbers of things, bytes and seconds."""
        counters = self.counters.items()
        return {
            "since": None if self.since is None else utc(self.since),
            "until": None if self.until is None else utc(self.until),
            "opens": self.opens,
            "hit_rate": self.hit_rate,
            **{name: n for name, n in counters if not name.startswith(_MICROSECONDS)},
            "bytes_saved": self.bytes_saved,
            "evicted": self.evicted,
            "errors": self.errors,
            "waits": {
                wait: {
                    "count": found.count,
                    "seconds": self._waited(wait),
                    **{f"p{share * 100:g}": found.percentile(share) for share in _PERCENTILES},
                }
                for wait, found in (*self.waits.items(), ("all", self.all_waits))
            },
        }

    def _waited(self, wait: str) -> float:
        """Seconds, all of them together."""
        names = [_MICROSECONDS + name for name in WAITS if wait in (name, "all")]
        return sum(self.counters[name] for name in names) / 1e6

    def _repr_html_(self) -> str:
        """What notebooks show."""
        rate = "-" if self.hit_rate is None else f"{self.hit_rate:.2%}"
        rows = [("opens", f"{self.opens:,}"), ("hit rate", rate)]
        rows += [(name, f"{self.counters[name]:,}") for name in OUTCOMES if self.counters[name]]
        rows += [
            ("read through the cache", format_bytes(self.counters["bytes_opened"])),
            ("fetched", format_bytes(self.counters["bytes_origin"])),
            ("saved", format_bytes(self.bytes_saved)),
        ]
        cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
        return f"<table>{cells}</table>"

    def __repr__(self) -> str:
        return f"<shardcache Stats: {self}>"

    def __str__(self) -> str:
        rate = "no opens" if self.hit_rate is None else f"{self.hit_rate:.2%} hits"
        saved = format_bytes(self.bytes_saved)
        waited = self.all_waits.percentile(0.99)
        wait = "" if waited is None else f", 99 % waited less than {format_duration(waited)}"
        return f"{self.opens} opens, {rate}, {saved} saved{wait}"


def summed(samples: Iterable[Sample]) -> Stats:
    """All samples as one."""
    counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
    waits: dict[str, Counter[int]] = {wait: Counter() for wait in WAITS}
    since = until = None
    for sample in samples:
        counters.update({name: n for name, n in sample.counters.items() if name in counters})
        for wait, found in sample.waits.items():
            if wait in waits:
                waits[wait].update(found)
        since = sample.start if since is None else min(since, sample.start)
        end = sample.start + sample.seconds
        until = end if until is None else max(until, end)
    return Stats(since, until, counters, {wait: Waits(found) for wait, found in waits.items()})


def by_rank(samples: Iterable[Sample]) -> dict[str, Stats]:
    """A sum for each rank, by its number; ``-`` where there is none."""
    found = _grouped(samples, lambda sample: -1 if sample.rank is None else sample.rank)
    return {"-" if rank < 0 else str(rank): summed(found[rank]) for rank in sorted(found)}


def rank_records(ranks: Mapping[str, Stats]) -> list[dict[str, Any]]:
    """For JSON: the sums of `by_rank`; a rank is a number, or None."""
    return [
        {"rank": None if rank == "-" else int(rank), **found.as_dict()}
        for rank, found in ranks.items()
    ]


def by_hour(samples: Iterable[Sample]) -> dict[int, Stats]:
    """A sum for each hour, by its start in seconds since the epoch."""
    found = _grouped(samples, lambda sample: sample.start // 3600 * 3600)
    return {hour: summed(found[hour]) for hour in sorted(found)}


def _grouped(samples: Iterable[Sample], key: Callable[[Sample], int]) -> dict[int, list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return groups
