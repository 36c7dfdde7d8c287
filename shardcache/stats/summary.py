"""Add up the counts of a node, and print them as metrics for Prometheus.

opens = hits + coalesced + linked + misses + streamed + failed
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from shardcache import clock
from shardcache.stats.database import NO_RANK, PERIOD, Sample
from shardcache.units import counted, format_bytes, format_duration

#: The possible outcomes of an open, in the order in which tables show them.
OUTCOMES = ("hits", "coalesced", "linked", "misses", "streamed", "failed")


@dataclass(frozen=True, slots=True)
class Waits:
    """How often and how long readers waited."""

    count: int
    seconds: float  #: the sum of all waits

    @property
    def mean(self) -> float | None:
        """The average of the waits in seconds; None if no reader waited."""
        return self.seconds / self.count if self.count else None


@dataclass(frozen=True, repr=False)
class Stats:
    """The counts of several processes in a period of time."""

    since: float | None  #: start in seconds since the epoch; None if nothing was counted
    until: float | None  #: end in seconds since the epoch; None if nothing was counted
    hits: int = 0  #: opens that found the shard in the cache
    coalesced: int = 0  #: opens that waited for a download that another reader had started
    linked: int = 0  #: opens that made a hard link to another rank's or job's copy of the shard
    misses: int = 0  #: opens that downloaded the shard
    streamed: int = 0  #: opens that read the shard past the cache, which stored nothing
    failed: int = 0  #: opens that raised an error
    left: int = 0  #: failed opens after which WebDataset read the shard without the cache
    bytes_opened: int = 0  #: bytes read from cached shards and from running downloads
    bytes_streamed: int = 0  #: bytes read from streamed shards
    fetches: int = 0  #: shards downloaded, from the origin or an upstream
    fetches_upstream: int = 0  #: shards downloaded from an upstream
    fetches_failed: int = 0  #: downloads that failed
    bytes_origin: int = 0  #: bytes received from the origin
    bytes_upstream: int = 0  #: bytes received from upstreams
    retries: int = 0  #: requests that were repeated
    evicted_max_size: int = 0  #: entries (stored shards) evicted because of max_size
    evicted_min_free: int = 0  #: entries evicted because of min_free
    evicted_max_age: int = 0  #: entries evicted because of max_age
    evicted_all: int = 0  #: entries removed by `clean --all`
    evicted_asked: int = 0  #: entries that a user removed by name
    bytes_evicted: int = 0  #: bytes of the entries that were evicted or removed
    errors_origin: int = 0  #: errors of the origin
    errors_integrity: int = 0  #: damaged shards
    errors_disk: int = 0  #: errors of the local disk
    streamed_full: int = 0  #: opens that were streamed because the cache was full
    errors_lock: int = 0  #: lock errors, and timeouts of waits for other processes
    hits_tier_1: int = 0  #: hits in the first tier
    hits_tier_2: int = 0  #: hits in the second tier
    hits_tier_3: int = 0  #: hits in the third tier, and in those after it
    wait_us_disk: int = 0  #: microseconds that readers waited for the disk
    wait_us_lock: int = 0  #: microseconds that readers waited for downloads of other readers
    wait_us_network: int = 0  #: microseconds that readers waited for their own downloads
    bytes_stored: int = 0  #: bytes of the entries that were stored

    @property
    def waits(self) -> dict[str, Waits]:
        """How long readers waited for the ``disk`` (a hit), for the download of another reader
        (``lock``), and for their own download (``network``).
        """
        return {
            "disk": Waits(self.hits + self.linked, self.wait_us_disk / 1e6),
            "lock": Waits(self.coalesced, self.wait_us_lock / 1e6),
            "network": Waits(self.misses, self.wait_us_network / 1e6),
        }

    @property
    def all_waits(self) -> Waits:
        """All waits: for the disk, the lock and the network."""
        waits = self.waits.values()
        return Waits(sum(wait.count for wait in waits), sum(wait.seconds for wait in waits))

    @property
    def counters(self) -> dict[str, int]:
        """All counters by name, in the order of their declaration."""
        return {name: getattr(self, name) for name in COUNTERS}

    @property
    def opens(self) -> int:
        """Number of opens with any outcome."""
        return sum(getattr(self, outcome) for outcome in OUTCOMES)

    @property
    def hit_rate(self) -> float | None:
        """Hits per open, or None if there were no opens."""
        return self.hits / self.opens if self.opens else None

    @property
    def evicted(self) -> int:
        """Number of entries that were evicted or removed, for any reason."""
        return sum(getattr(self, name) for name in _named("evicted_").values())

    @property
    def errors(self) -> int:
        """Number of errors of any kind: origin, integrity, disk and locks."""
        return sum(getattr(self, name) for name in _named("errors_").values())

    @property
    def bytes_fetched(self) -> int:
        """Bytes received for shards that were downloaded into the cache."""
        return max(0, self.bytes_origin + self.bytes_upstream - self.bytes_streamed)

    @property
    def bytes_saved(self) -> int:
        """Bytes saved at the origin: those that readers got minus those that the origin sent."""
        return max(0, self.bytes_opened + self.bytes_streamed - self.bytes_origin)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object that ``--json`` prints: timestamps, counts, bytes and seconds."""
        names = ("opens", "hit_rate", "bytes_saved", "evicted", "errors")
        waits = {**self.waits, "all": self.all_waits}
        return {
            "since": None if self.since is None else clock.utc(self.since),
            "until": None if self.until is None else clock.utc(self.until),
            **{name: getattr(self, name) for name in names},
            **{name: n for name, n in self.counters.items() if not name.startswith("wait_us_")},
            "waits": {name: {**asdict(wait), "mean": wait.mean} for name, wait in waits.items()},
        }

    def __repr__(self) -> str:
        text = counted(self.opens, "open")
        if self.hit_rate is not None:
            text += f", {self.hit_rate:.2%} hits"
        if self.streamed:
            text += f", {self.streamed} streamed ({format_bytes(self.bytes_streamed)})"
        text += f", {format_bytes(self.bytes_saved)} saved"
        waited = self.all_waits.mean
        return text if waited is None else f"{text}, mean wait {format_duration(waited)}"


#: The names of the counters, here and in the database.
COUNTERS = tuple(field.name for field in fields(Stats))[2:]


def _named(prefix: str) -> dict[str, str]:
    """Return the counters whose names have a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): name for name in COUNTERS if name.startswith(prefix)}


def summed(samples: Iterable[Sample]) -> Stats:
    """Return the sum of the samples, for the period from the first start to the last end."""
    counters, starts = Counter[str](), list[int]()
    for sample in samples:
        counters.update(sample.counters)
        starts.append(sample.start)
    since = min(starts, default=None)
    until = min(max(starts) + PERIOD, clock.time()) if starts else None  # the last one may run
    return Stats(since, until, **{name: counters[name] for name in COUNTERS})


def by_rank(samples: Iterable[Sample]) -> dict[int | None, Stats]:
    """Add up the samples of each rank. The key None stands for processes without a rank."""
    ranks = summed_by(samples, lambda sample: sample.rank)
    return {None if rank == NO_RANK else rank: stats for rank, stats in ranks.items()}


def summed_by(samples: Iterable[Sample], key: Callable[[Sample], int]) -> dict[int, Stats]:
    """Add up the samples of each value of ``key``, in the order of the values."""
    ordered = sorted(samples, key=key)
    return {value: summed(group) for value, group in itertools.groupby(ordered, key)}


#: The families of counters, for text, charts and Prometheus. Name -> help, name of the label ("" if
#: there is one value), and value of the label -> counter. The names for Prometheus never change,
#: because dashboards depend on them: there, streamed is called bypassed.
METRICS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "opens": ("Shards opened.", "outcome", {name: name for name in OUTCOMES}),
    "hits": ("Hits in caches with tiers.", "tier", _named("hits_tier_")),
    "opened_bytes": ("Bytes read from the cache.", "", {"": "bytes_opened"}),
    "received_bytes": ("Bytes received over the network.", "source",
                       {"origin": "bytes_origin", "upstream": "bytes_upstream"}),
    "bypassed_bytes": ("Bytes streamed, not stored.", "", {"": "bytes_streamed"}),
    "stored_bytes": ("Bytes of shards stored.", "", {"": "bytes_stored"}),
    "fetches": ("Shards downloaded.", "", {"": "fetches"}),
    "fetches_failed": ("Downloads that failed.", "", {"": "fetches_failed"}),
    "retries": ("Requests that were repeated.", "", {"": "retries"}),
    "evictions": ("Entries evicted or removed.", "reason", _named("evicted_")),
    "evicted_bytes": ("Bytes of entries evicted or removed.", "", {"": "bytes_evicted"}),
    "errors": ("Errors.", "kind", _named("errors_")),
}  # fmt: skip
#: The counters of microseconds, for charts.
WAITED = {"wait_us": ("Time that readers waited.", "for", _named("wait_us_"))}

#: Name -> help, and the field of a row that has the value, which is of the moment.
GAUGES = {
    "entries": ("Shards in the cache.", "shards"),
    "entries_bytes": ("Bytes of the shards in the cache, on disk.", "disk_bytes"),
    "limit_bytes": ("Bytes on disk that the cache may hold, if max_size is set.", "max_size"),
    "free_bytes": ("Free bytes of the disk.", "free_bytes"),
    "downloads": ("Downloads that are running.", "downloads"),
    "processes": ("Processes that use the cache.", "processes"),
    "last_clean_timestamp_seconds": ("Time of the last cleaning, or creation.", "cleaned"),
}


def exposition(stats: Stats, directory: str, gauges: Sequence[Mapping[str, Any]]) -> str:
    """Return all metrics as text for the textfile collector of Prometheus' node exporter.

    The label ``dir`` is ``directory``. Each row of ``gauges`` has its own ``dir``, and fields
    of `GAUGES`. The sums never fall, except after ``stats --zero``, which Prometheus treats as
    a restart. See prometheus.io/docs/instrumenting/exposition_formats.
    """
    lines: list[str] = []

    def family(name: str, kind: str, help: str, values: Iterable[tuple[str, str, float]]) -> None:
        lines.append(f"# HELP shardcache_{name} {help}")
        lines.append(f"# TYPE shardcache_{name} {kind}")
        for suffix, labels, value in values:
            lines.append(f"shardcache_{name}{suffix}{{{labels}}} {value:.17g}")

    here = _dir_label(directory)
    for name, (about, label, counters) in METRICS.items():
        values = [
            ("", here + (label and f',{label}="{value}"'), getattr(stats, counter))
            for value, counter in counters.items()
        ]
        family(f"{name}_total", "counter", about, values)
    waits = [
        (f"_{name}", f'{here},for="{wait}"', value)
        for wait, each in stats.waits.items()
        for name, value in (("sum", each.seconds), ("count", each.count))
    ]
    family("wait_seconds", "summary", "How long readers waited for a shard, and for what.", waits)
    for name, (about, key) in GAUGES.items():
        rows = [row for row in gauges if row.get(key) is not None]
        family(name, "gauge", about, [("", _dir_label(row["dir"]), row[key]) for row in rows])
    text = "\n".join(lines) + "\n"
    return text.replace('outcome="streamed"', 'outcome="bypassed"')


def _dir_label(directory: str) -> str:
    escaped = directory.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'dir="{escaped}"'
