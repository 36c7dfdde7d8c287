"""What a cache has done for a node: opens, bytes, waits, evictions, as one sum.

    opens = hits + coalesced + linked + misses + bypassed + failed

A hit found the shard; a coalesced open waited for a fetch that somebody else had begun, in this
process or another one; a linked one took a sibling namespace's copy; a miss was fetched by whoever
asked; a bypass was streamed and not stored; a failed one raised.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.clock import utc
from shardcache.stats.counters import BUCKETS, COUNTERS, WAITS, Counts, bucket_range
from shardcache.stats.database import NO_RANK, Sample
from shardcache.units import format_bytes, format_duration

__all__ = ["OUTCOMES", "Stats", "Waits", "by_hour", "by_rank", "rank_records", "summed"]

#: What an open can come to, in the order in which it is shown.
OUTCOMES = ("hits", "coalesced", "linked", "misses", "bypassed", "failed")
_PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Waits:
    """How long readers waited."""

    buckets: Mapping[int, int]  #: bucket (`counters.bucket_range`) -> how many
    seconds: float = 0.0  #: all of them together

    @property
    def count(self) -> int:
        """How many waits there were."""
        return sum(self.buckets.values())

    def percentile(self, share: float) -> float | None:
        """Seconds that this share of the waits took at most, within a bucket; None without any."""
        left = share * self.count
        for bucket, count in sorted(self.buckets.items()):
            left -= count
            if count and left <= 0:
                return bucket_range(bucket)[1]
        return None


@dataclass(frozen=True, repr=False)
class Stats(Counts):
    """What processes counted between two moments.

    Attributes:
        since: the first, in seconds since the epoch; None if nothing was counted.
        until: the last, likewise.
        waits: how long readers waited, by what they waited for: disk, lock or network.
    """

    since: float | None
    until: float | None
    waits: Mapping[str, Waits]

    @property
    def counters(self) -> dict[str, int]:
        """All counters by their names, in the order of `counters.COUNTERS`."""
        return {name: getattr(self, name) for name in COUNTERS}

    @property
    def opens(self) -> int:
        """Shards that were asked for."""
        return self.hits + self.coalesced + self.linked + self.misses + self.bypassed + self.failed

    @property
    def hit_rate(self) -> float | None:
        """Hits per open; None without opens."""
        return self.hits / self.opens if self.opens else None

    @property
    def evicted(self) -> int:
        """Entries that were evicted or removed, for whatever reason."""
        return sum(n for name, n in self.counters.items() if name.startswith("evicted_"))

    @property
    def errors(self) -> int:
        """Errors of the origin, the disk and the locks."""
        return sum(n for name, n in self.counters.items() if name.startswith("errors_"))

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came to be stored: all that came but was not streamed."""
        return max(0, self.bytes_origin + self.bytes_upstream - self.bytes_bypassed)

    @property
    def bytes_saved(self) -> int:
        """Bytes that would have come from the origin without the cache."""
        return max(0, self.bytes_opened + self.bytes_bypassed - self.bytes_origin)

    @property
    def all_waits(self) -> Waits:
        """The waits of every kind together."""
        total: Counter[int] = Counter()
        for found in self.waits.values():
            total.update(found.buckets)
        return Waits(total, sum(found.seconds for found in self.waits.values()))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times, numbers of things, bytes and seconds."""
        names = ("opens", "hit_rate", "bytes_saved", "evicted", "errors")
        return {
            "since": None if self.since is None else utc(self.since),
            "until": None if self.until is None else utc(self.until),
            **{name: getattr(self, name) for name in names},
            **{name: n for name, n in self.counters.items() if not name.startswith("wait_us_")},
            "waits": {
                wait: {
                    "count": found.count,
                    "seconds": found.seconds,
                    **{f"p{share * 100:g}": found.percentile(share) for share in _PERCENTILES},
                }
                for wait, found in {**self.waits, "all": self.all_waits}.items()
            },
        }

    def __repr__(self) -> str:
        rate = "no opens" if self.hit_rate is None else f"{self.hit_rate:.2%} hits"
        saved = format_bytes(self.bytes_saved)
        waited = self.all_waits.percentile(0.99)
        wait = "" if waited is None else f", 99 % waited less than {format_duration(waited)}"
        past = f", {self.bypassed} streamed ({format_bytes(self.bytes_bypassed)})"
        return f"{self.opens} opens, {rate}{past if self.bypassed else ''}, {saved} saved{wait}"


def summed(samples: Iterable[Sample]) -> Stats:
    """All samples as one."""
    samples = list(samples)
    counters: Counter[str] = Counter()
    for sample in samples:
        counters.update(sample.counters)
    waits = {}
    for wait in WAITS:
        buckets = {bucket: counters[f"{wait}:{bucket}"] for bucket in range(BUCKETS)}
        waits[wait] = Waits(+Counter(buckets), counters[f"wait_us_{wait}"] / 1e6)
    return Stats(
        min((sample.start for sample in samples), default=None),
        max((sample.start + sample.seconds for sample in samples), default=None),
        waits,
        **{name: counters[name] for name in COUNTERS},
    )


def by_rank(samples: Iterable[Sample]) -> dict[str, Stats]:
    """A sum for each rank, by its number; ``-`` where there is none."""
    found = _grouped(samples, lambda sample: sample.rank)
    return {"-" if rank == NO_RANK else str(rank): each for rank, each in found.items()}


def rank_records(ranks: Mapping[str, Stats]) -> list[dict[str, Any]]:
    """For JSON: the sums of `by_rank`; a rank is a number, or None."""
    return [
        {"rank": None if rank == "-" else int(rank), **found.as_dict()}
        for rank, found in ranks.items()
    ]


def by_hour(samples: Iterable[Sample]) -> dict[int, Stats]:
    """A sum for each hour, by its start in seconds since the epoch."""
    return _grouped(samples, lambda sample: sample.start // 3600 * 3600)


def _grouped(samples: Iterable[Sample], key: Callable[[Sample], int]) -> dict[int, Stats]:
    ordered = sorted(samples, key=key)
    return {each: summed(group) for each, group in itertools.groupby(ordered, key)}
