"""The results of `Cache.prewarm`: the plan, the events, one result per shard, and totals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self

from shardcache.download.download import Progress
from shardcache.errors import ShardCacheError
from shardcache.faults import FULL
from shardcache.store.entry import Entry
from shardcache.units import counted, format_bytes, format_duration, format_rate
from shardcache.urls import ShardURL


class Outcome(StrEnum):
    """How the prewarm of one shard ended."""

    CACHED = "cached"  #: before the prewarm
    FETCHED = "fetched"
    COALESCED = "coalesced"  #: another reader downloaded the shard
    LINKED = "linked"  #: hard-linked to the entry of another rank or job
    IMPORTED = "imported"  #: a file of this machine, hard-linked or copied
    FAILED = "failed"
    NOT_STARTED = "not_started"  #: the download was not started, or was interrupted
    SKIPPED = "skipped"  #: ``skip_missing`` skipped the shard, because its origin does not have it
    LEFT_OUT = "left_out"  #: ``best_effort`` left the shard out because it did not fit
    MISSING = "missing"  #: a check or a dry run found that the shard is not cached


_ADDED = (Outcome.FETCHED, Outcome.COALESCED, Outcome.LINKED, Outcome.IMPORTED)


class Stopped(StrEnum):
    """Why a prewarm ended before all shards were done; ``why`` completes "not done because ..."."""

    why: str

    REQUESTED = "requested", "the run was interrupted"
    DEADLINE = "deadline", "the deadline has passed"
    FAILURES = "failures", "too many shards failed"
    REFUSED = "refused", "none of the first shards could be read"
    FULL = "full", "the cache is full"

    def __new__(cls, value: str, why: str) -> Self:
        self = str.__new__(cls, value)
        self._value_, self.why = value, why
        return self


class ShardResult(NamedTuple):
    """The result of one shard."""

    url: str  #: the canonical URL, which contains no credentials
    outcome: Outcome
    size: int | None = None  #: bytes of the shard, if known
    seconds: float = 0.0  #: time spent on the shard
    received: int = 0  #: bytes received from the network
    retries: int = 0  #: number of repeated requests
    error: Exception | None = None  #: why the shard failed or was interrupted

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardResult, (*self[:-1], self.error and portable(self.error))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PrewarmPlan:
    """The state of each shard before the downloads, and the room that the cache has.

    Room is counted in bytes on disk. Mappings identify a shard by its key.
    """

    shards: tuple[ShardURL, ...]  #: all requested shards in order, without duplicates
    #: The results if nothing is downloaded, in the same order. A shard to download is missing, or
    #: left out; one that could not be compared with its origin has failed, or is skipped.
    results: Mapping[str, ShardResult]
    cached: Mapping[str, Entry] = field(default_factory=dict)
    #: With ``refresh``: versions that the origin has replaced. They do not count as cached.
    outdated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    free: int = 0  #: free room before evictions
    evict: int = 0  #: room that evictions will make
    missing: int = 0  #: further room that the shards of known size would need
    needed: int = 0  #: room that the downloads of known size will take
    resumable: int = 0  #: bytes of these shards that interrupted downloads left on disk
    over: int = 0  #: room that the cached shards take beyond the limits

    def __repr__(self) -> str:
        """Return ``Need 2,048 shards, 1.0 TB: 1,310 cached, 738 to fetch (369.0 GB); ...``."""
        number = self.as_dict()
        fetch, unknown, left_out = number["to_fetch"], number["unknown_sizes"], number["left_out"]
        total = number["cached_bytes"] + number["to_fetch_bytes"]
        size = f", {'at least ' if unknown else ''}{format_bytes(total)}" if total else ""
        text = f"Need {counted(len(self.shards), 'shard')}{size}: {len(self.cached):,} cached"
        if not fetch:
            failed = sum(result.outcome is Outcome.FAILED for result in self.results.values())
            text += f", {failed:,} failed" if failed else ", nothing to fetch"
            over = f"; {format_bytes(self.over)} over the limits, which `shardcache clean` removes"
            return f"{text}{over if self.over else ''}"
        need = format_bytes(self.fetch_bytes)
        if unknown:
            is_all = unknown == fetch
            need = "sizes unknown" if is_all else f"{need} and {unknown:,} of unknown size"
        if self.resumable:
            need += f", {format_bytes(self.resumable)} of it on disk"
        if self.outdated:
            need += f", {len(self.outdated):,} replaced at the origin"
        text += f", {fetch:,} to fetch ({need}); free {format_bytes(self.free)}"
        if left_out:
            return f"{text}  {left_out:,} do not fit and are left out"
        if self.missing:
            text += f", {format_bytes(self.needed)} needed on disk"
            return f"{text}  does not fit: {format_bytes(self.missing)} over the limit"
        if self.evict:
            text += f", {format_bytes(self.evict)} of older shards will be evicted"
        return f"{text}  {'some may not exist' if unknown else 'ok'}"

    def as_dict(self) -> dict[str, int]:
        return {
            "shards": len(self.shards),
            "cached": len(self.cached),
            "cached_bytes": sum(entry.size for entry in self.cached.values()),
            "to_fetch": len(self.to_fetch),
            "to_fetch_bytes": self.fetch_bytes,
            "unknown_sizes": sum(result.size is None for result in self.to_fetch),
            "free_bytes": self.free,
            "evict_bytes": self.evict,
            "needed_bytes": self.needed,
            "resumable_bytes": self.resumable,
            "missing_bytes": self.missing,
            "left_out": sum(result.outcome is Outcome.LEFT_OUT for result in self.to_fetch),
            "outdated": len(self.outdated),
        }

    @property
    def to_fetch(self) -> list[ShardResult]:
        """The shards to download, also those that are left out because they do not fit."""
        kinds = Outcome.MISSING, Outcome.LEFT_OUT
        return [result for result in self.results.values() if result.outcome in kinds]

    @property
    def fetch_bytes(self) -> int:
        """Total of the known sizes of the shards to download, in bytes."""
        return sum(result.size or 0 for result in self.to_fetch)


class _Count:
    """The number of the shards of a report with one outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def __get__(self, report: PrewarmReport, owner: object = None) -> int:
        return report.count(self._outcome)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class PrewarmReport:
    """The result of a prewarm.

    ``cached``, ``fetched``, ``coalesced``, ``linked``, ``failed``, ``missing`` and ``not_started``
    are the numbers of shards with that `Outcome`.
    """

    plan: PrewarmPlan
    results: tuple[ShardResult, ...]  #: one result per shard, in the order of the plan
    seconds: float  #: duration of the prewarm
    stopped: Stopped | None = None  #: why the prewarm ended early, or None if it did not

    cached = _Count(Outcome.CACHED)
    fetched = _Count(Outcome.FETCHED)
    coalesced = _Count(Outcome.COALESCED)
    linked = _Count(Outcome.LINKED)
    failed = _Count(Outcome.FAILED)
    not_started = _Count(Outcome.NOT_STARTED)
    missing = _Count(Outcome.MISSING)

    def __repr__(self) -> str:
        """Return ``Warmed 737 of 738 shards (368.5 GB) in 2m 08s, 2.9 GB/s; 1 failed.``"""
        to_warm = len(self.results) - self.cached
        shards = counted(to_warm or self.cached, "shard")
        if not to_warm:
            every = "All " if self.cached > 1 else ""
            return f"{every}{shards} cached ({format_bytes(self.plan.as_dict()['cached_bytes'])})."
        size, received = format_bytes(self.bytes), format_bytes(self.received)
        size += f", {received} received" if received != size else ""  # the rate is that of these
        text = f"Warmed {self.count(*_ADDED):,} of {shards} ({size})"
        text += f" in {format_duration(self.seconds)}"
        if self.received and self.seconds > 0:
            text += f", {format_rate(self.received / self.seconds)}"
        notes = (
            (self.refreshed, "replaced at the origin"),
            (self.failed, "failed"),
            (self.count(Outcome.SKIPPED), "skipped, not at the origin"),
            (self.retried, "retried"),
            (self.coalesced, "fetched by other processes"),
            (self.linked, "linked"),
            (self.count(Outcome.IMPORTED), "imported"),
            (self.count(Outcome.LEFT_OUT), "left out for lack of room"),
            (self.not_started, f"not done because {self.stopped.why if self.stopped else ''}"),
        )
        remarks = ", ".join(f"{number:,} {note}" for number, note in notes if number)
        return f"{text}; {remarks}." if remarks else f"{text}."

    def as_dict(self) -> dict[str, Any]:
        return {
            "plan": self.plan.as_dict(),
            **{outcome.value: self.count(outcome) for outcome in Outcome},
            "refreshed": self.refreshed,
            "retried": self.retried,
            "bytes": self.bytes,
            "received_bytes": self.received,
            "seconds": round(self.seconds, 6),
            "stopped": self.stopped,
            "interrupted": self.stopped is Stopped.REQUESTED,
        }

    @property
    def failures(self) -> dict[str, Exception]:
        """The errors of the failed shards, by canonical URL."""
        return self.errors(Outcome.FAILED)

    def errors(self, outcome: Outcome) -> dict[str, Exception]:
        """Return the errors of the shards with an outcome, by canonical URL."""
        results = (result for result in self.results if result.outcome == outcome)
        return {result.url: result.error for result in results if result.error is not None}

    def count(self, *outcomes: Outcome) -> int:
        """Return the number of shards with one of ``outcomes``."""
        return sum(result.outcome in outcomes for result in self.results)

    @property
    def refreshed(self) -> int:
        """Number of shards that were downloaded again because the origin had replaced them."""
        pairs = zip(self.plan.shards, self.results, strict=True)
        return sum(s.key in self.plan.outdated and r.outcome in _ADDED for s, r in pairs)

    @property
    def retried(self) -> int:
        """Number of shards for which a request was repeated."""
        return sum(result.retries > 0 for result in self.results)

    @property
    def bytes(self) -> int:
        """Total size of the shards that were added to the cache, in bytes."""
        return sum(r.size or 0 for r in self.results if r.outcome in _ADDED)

    @property
    def received(self) -> int:
        """Bytes received from the network."""
        return sum(result.received for result in self.results)

    @property
    def full(self) -> bool:
        """Whether a shard failed because there was no room for it."""
        return any(map(is_full, self.failures.values()))


class Planned(NamedTuple):
    """The event that the plan is complete and no download has started yet."""

    plan: PrewarmPlan


class Started(NamedTuple):
    """The event that work on a shard has started. ``progress()`` returns the current progress."""

    shard: ShardURL
    progress: Callable[[], Progress]

    def __reduce__(self) -> tuple[Any, ...]:
        return Started, (self.shard, Progress)  # another process sees no progress


class Finished(NamedTuple):
    """The event that work on a shard has ended, with its result."""

    shard: ShardURL
    result: ShardResult


Event = Planned | Started | Finished


def portable(error: BaseException) -> Exception:
    """Return an error that any process can unpickle: ``error`` itself, or one with its text."""
    if type(error).__module__ in ("builtins", "shardcache.errors") and isinstance(error, Exception):
        return error
    return ShardCacheError(f"{type(error).__name__}: {error}")


def is_full(exn: BaseException | None) -> bool:
    """Return whether an error means that the cache or the disk has no room."""
    return isinstance(exn, OSError) and exn.errno in FULL
