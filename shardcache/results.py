"""What `Cache.prewarm` gives back: its plan, events while it runs, a result per shard, totals.

All are frozen values, safe to hand to any thread, with one exception: the thread that fetches
goes on writing the `FetchStatus` of a `Started` event.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shardcache.fetch.transfer import FetchStatus
from shardcache.store.entry import Entry
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

__all__ = [
    "Event",
    "Finished",
    "Outcome",
    "Planned",
    "PrewarmPlan",
    "PrewarmReport",
    "ShardResult",
    "Started",
    "Stopped",
    "Stopping",
    "is_full",
]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True, repr=False)
class PrewarmPlan:
    """What is cached, what has to be fetched, and how much room there is.

    Attributes:
        shards: all wanted shards in order, each once.
        cached: the entries of those that are cached, by key.
        sizes: bytes of those to fetch, by key, as far as they are known.
        free: bytes that can be stored without removing anything.
        evict: bytes that will be evicted to make room.
        missing: bytes too many for the cache; 0 if all known sizes fit.
        left_out: keys of the shards that find no room; empty unless asked for.
        outdated: cached versions that the origin has replaced, by key. Their shards count as not
            cached. Empty unless asked for.
        unconfirmed: why it is unknown whether the origin has replaced a shard, by key.
    """

    shards: tuple[ShardURL, ...]
    cached: Mapping[str, Entry]
    sizes: Mapping[str, int]
    free: int
    evict: int
    missing: int
    left_out: frozenset[str] = frozenset()
    outdated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    unconfirmed: Mapping[str, Exception] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<PrewarmPlan: {len(self.shards):,} shards, {len(self.cached):,} cached, "
            f"{format_bytes(self.fetch_bytes)} to fetch, {format_bytes(self.free)} free>"
        )

    @property
    def to_fetch(self) -> tuple[ShardURL, ...]:
        """The shards that are not cached."""
        return tuple(shard for shard in self.shards if shard.key not in self.cached)

    @property
    def fetch_bytes(self) -> int:
        """Bytes to fetch, as far as sizes are known."""
        return sum(self.sizes.values())

    @property
    def cached_bytes(self) -> int:
        """Bytes that are cached already."""
        return sum(entry.size for entry in self.cached.values())

    @property
    def unknown(self) -> int:
        """How many shards have an unknown size."""
        return len(self.shards) - len(self.cached) - len(self.sizes)

    def size_of(self, shard: ShardURL) -> int | None:
        """Bytes of a shard, or None while unknown."""
        entry = self.cached.get(shard.key)
        return entry.size if entry is not None else self.sizes.get(shard.key)


class Outcome(StrEnum):
    """What became of one shard."""

    CACHED = "cached"
    FETCHED = "fetched"
    COALESCED = "coalesced"
    LINKED = "linked"
    FAILED = "failed"
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"
    LEFT_OUT = "left_out"
    MISSING = "missing"


class Stopped(StrEnum):
    """Why no further shard was started."""

    REQUESTED = "requested"
    DEADLINE = "deadline"
    FAILURES = "failures"
    REFUSED = "refused"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class ShardResult:
    """One shard's end.

    Attributes:
        url: canonical URL, free of credentials.
        outcome: ``missing`` is not cached, after a check or a dry run; ``left_out``
            found no room under best effort.
        size: bytes, or None where not known.
        seconds: that it took.
        received: bytes that came over the network for it.
        retries: requests repeated.
        error: why it failed or was cut short.
    """

    url: str
    outcome: Outcome
    size: int | None = None
    seconds: float = 0.0
    received: int = 0
    retries: int = 0
    error: Exception | None = None


@dataclass(frozen=True, slots=True, repr=False)
class PrewarmReport:
    """What a prewarm did.

    Attributes:
        plan: what had to be done.
        results: one per shard, in the order they were asked for.
        seconds: that it took altogether.
        stopped: why it ended early, or None.
    """

    plan: PrewarmPlan
    results: tuple[ShardResult, ...]
    seconds: float
    stopped: Stopped | None = None

    def __repr__(self) -> str:
        counts = [f"{n:,} {outcome.value}" for outcome in Outcome if (n := self.count(outcome))]
        stopped = f", stopped: {self.stopped.value}" if self.stopped else ""
        took = f"in {format_duration(self.seconds)}"
        return f"<PrewarmReport: {', '.join(counts) or 'no shards'} {took}{stopped}>"

    def count(self, *outcomes: Outcome) -> int:
        """How many shards ended in one of ``outcomes``."""
        return sum(result.outcome in outcomes for result in self.results)

    @property
    def cached(self) -> int:
        """Shards that were cached already."""
        return self.count(Outcome.CACHED)

    @property
    def fetched(self) -> int:
        """Shards that this call fetched."""
        return self.count(Outcome.FETCHED)

    @property
    def refreshed(self) -> int:
        """Shards that were fetched again because their origin had replaced them."""
        new = (Outcome.FETCHED, Outcome.COALESCED, Outcome.LINKED)
        pairs = zip(self.plan.shards, self.results, strict=True)
        return sum(s.key in self.plan.outdated and r.outcome in new for s, r in pairs)

    @property
    def coalesced(self) -> int:
        """Shards that another process fetched while we waited."""
        return self.count(Outcome.COALESCED)

    @property
    def linked(self) -> int:
        """Shards linked from another rank's or job's namespace."""
        return self.count(Outcome.LINKED)

    @property
    def failed(self) -> int:
        """Shards that could not be fetched."""
        return self.count(Outcome.FAILED)

    @property
    def not_started(self) -> int:
        """Shards that were not tried, or not finished, because the run ended early."""
        return self.count(Outcome.NOT_STARTED, Outcome.CANCELLED)

    @property
    def missing(self) -> int:
        """Shards that are not cached, after a check or a dry run."""
        return self.count(Outcome.MISSING)

    @property
    def retried(self) -> int:
        """Shards that needed more than one request per part."""
        return sum(result.retries > 0 for result in self.results)

    @property
    def bytes(self) -> int:
        """Bytes of the shards that came into the cache."""
        new = (Outcome.FETCHED, Outcome.COALESCED, Outcome.LINKED)
        return sum(r.size or 0 for r in self.results if r.outcome in new)

    @property
    def received(self) -> int:
        """Bytes that came over the network for this call."""
        return sum(result.received for result in self.results)

    @property
    def interrupted(self) -> bool:
        """Whether somebody asked for a stop before all was done."""
        return self.stopped is Stopped.REQUESTED

    @property
    def full(self) -> bool:
        """Whether a shard found no room, other than under best effort."""
        return any(is_full(r.error) for r in self.results if r.outcome is Outcome.FAILED)


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan is made; nothing was fetched yet."""

    plan: PrewarmPlan


@dataclass(frozen=True, slots=True)
class Started:
    """A thread has begun with a shard; ``status`` goes on changing until it is finished."""

    shard: ShardURL
    status: FetchStatus


@dataclass(frozen=True, slots=True)
class Finished:
    """A thread is done with a shard."""

    shard: ShardURL
    result: ShardResult


@dataclass(frozen=True, slots=True)
class Stopping:
    """No further shard will be started."""

    reason: Stopped


Event = Planned | Started | Finished | Stopping


def is_full(exn: BaseException | None) -> bool:
    """Whether a shard failed for want of room, in the budget or on the disk."""
    return isinstance(exn, OSError) and exn.errno in _FULL
