"""What a prewarm tells: events while it runs, a result per shard, totals.

All are frozen values, safe to hand to any thread, with one exception: the thread that fetches
goes on writing the `FetchStatus` of a `Started` event.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum

from shardcache.fetch.transfer import FetchStatus
from shardcache.prewarm.plan import PrewarmPlan
from shardcache.units import format_duration
from shardcache.urls import ShardURL

__all__ = [
    "Event",
    "Finished",
    "Outcome",
    "Planned",
    "PrewarmReport",
    "ShardResult",
    "Started",
    "Stopped",
    "Stopping",
    "is_full",
]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


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
