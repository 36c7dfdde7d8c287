"""What `Cache.prewarm` returns: its plan, events while it runs, a result per shard, totals.

All are frozen values, safe to pass to any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from shardcache.download.download import Progress
from shardcache.errors import ShardCacheError
from shardcache.files import FULL
from shardcache.store.entry import Entry
from shardcache.units import format_bytes, format_duration, format_rate
from shardcache.urls import ShardURL


class Outcome(StrEnum):
    """What became of one shard."""

    CACHED = "cached"
    FETCHED = "fetched"
    COALESCED = "coalesced"  #: another process fetched it
    LINKED = "linked"
    FAILED = "failed"
    NOT_STARTED = "not_started"  #: or cut short
    LEFT_OUT = "left_out"  #: there was no room, under best effort
    MISSING = "missing"  #: not cached, by a check or a dry run


_NEW = (Outcome.FETCHED, Outcome.COALESCED, Outcome.LINKED)


class Stopped(StrEnum):
    """Why no further shard was started."""

    REQUESTED = "requested"
    DEADLINE = "deadline"
    FAILURES = "failures"
    REFUSED = "refused"
    FULL = "full"

    @property
    def why(self) -> str:
        """The same in words."""
        return {
            "requested": "the run was interrupted",
            "deadline": "the deadline is over",
            "failures": "too many failed",
            "refused": "nothing there could be read",
            "full": "there is no room",
        }[self]


@dataclass(frozen=True, slots=True)
class ShardResult:
    """One shard's end.

    Attributes:
        url: canonical URL, free of credentials.
        outcome: what became of it.
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

    def portable(self) -> ShardResult:
        """The same, for another process: a pickle of a foreign error may not open."""
        return self if self.error is None else replace(self, error=portable(self.error))


@dataclass(frozen=True, slots=True, repr=False)
class PrewarmPlan:
    """Which shards are cached, which have to be fetched, and how much room the cache has.

    Attributes:
        shards: all wanted shards in order, each once.
        cached: the entries of those that are cached, by key.
        sizes: bytes of those to fetch, by key, as far as they are known.
        free: bytes on disk that are left without removing anything.
        evict: bytes on disk that will be evicted to make room.
        missing: bytes on disk too many for the cache; 0 if all known sizes fit.
        left_out: keys of the shards that find no room; empty unless asked for.
        outdated: cached versions that the origin has replaced, by key. Their shards count as not
            cached. Empty unless asked for.
        unconfirmed: why it is unknown whether the origin has replaced a shard, by key.
        needed: bytes on disk of the shards to fetch, as far as their sizes are known.
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
    needed: int = 0

    def __repr__(self) -> str:
        """Say it, as in ``Need 2,048 shards, 1.0 TB: 1,310 cached, 738 to fetch (369.0 GB)``."""
        total, fetch, unknown = self.cached_bytes + self.fetch_bytes, self.to_fetch, self.unknown
        size = f", {'at least ' if unknown else ''}{format_bytes(total)}" if total else ""
        shards = f"{len(self.shards):,} shard{'' if len(self.shards) == 1 else 's'}"
        text = f"Need {shards}{size}: {len(self.cached):,} cached"
        if not fetch:
            return f"{text}, nothing to fetch"
        need = format_bytes(self.fetch_bytes)
        if unknown:
            is_all = unknown == len(fetch)
            need = "sizes unknown" if is_all else f"{need} and {unknown:,} of unknown size"
        if self.outdated:
            need += f", {len(self.outdated):,} replaced at the origin"
        text += f", {len(fetch):,} to fetch ({need}); free {format_bytes(self.free)}"
        if self.left_out:
            return f"{text}  {len(self.left_out):,} do not fit and are left out"
        if self.missing:
            text += f", {format_bytes(self.needed)} needed on disk"
            return f"{text}  does not fit: {format_bytes(self.missing)} too many"
        if self.evict:
            text += f", {format_bytes(self.evict)} of older shards make room"
        return text if unknown else f"{text}  ok"  # a shard of unknown size may not exist

    def as_dict(self) -> dict[str, int]:
        """Numbers of shards, and bytes, for JSON."""
        return {
            "shards": len(self.shards),
            "cached": len(self.cached),
            "cached_bytes": self.cached_bytes,
            "to_fetch": len(self.to_fetch),
            "to_fetch_bytes": self.fetch_bytes,
            "unknown_sizes": self.unknown,
            "free_bytes": self.free,
            "evict_bytes": self.evict,
            "needed_bytes": self.needed,
            "missing_bytes": self.missing,
            "left_out": len(self.left_out),
            "outdated": len(self.outdated),
        }

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

    def results(
        self, found: Mapping[str, ShardResult], otherwise: Outcome
    ) -> tuple[ShardResult, ...]:
        """One per shard, in order: as `found` by its key, else as planned, else ``otherwise``."""

        def planned(shard: ShardURL) -> ShardResult:
            outcome, error = otherwise, self.unconfirmed.get(shard.key)
            if error is not None:
                outcome = Outcome.FAILED
            elif shard.key in self.left_out:
                outcome = Outcome.LEFT_OUT
            elif shard.key in self.cached:
                outcome = Outcome.CACHED
            return ShardResult(str(shard), outcome, self.size_of(shard), error=error)

        return tuple(found.get(shard.key) or planned(shard) for shard in self.shards)


class _Counted:
    """An attribute of a report: how many shards ended so."""

    def __init__(self, *outcomes: Outcome) -> None:
        self._outcomes = outcomes

    def __get__(self, report: PrewarmReport, owner: object = None) -> int:
        return report.count(*self._outcomes)


@dataclass(frozen=True, slots=True, repr=False)
class PrewarmReport:
    """What a prewarm did. ``cached``, ``fetched``, ``coalesced`` (another process fetched them),
    ``linked``, ``failed``, ``missing`` and ``not_started`` (or not finished) count shards.

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

    cached = _Counted(Outcome.CACHED)
    fetched = _Counted(Outcome.FETCHED)
    coalesced = _Counted(Outcome.COALESCED)
    linked = _Counted(Outcome.LINKED)
    failed = _Counted(Outcome.FAILED)
    not_started = _Counted(Outcome.NOT_STARTED)
    missing = _Counted(Outcome.MISSING)

    def __repr__(self) -> str:
        """Say it, as in ``Warmed 737 of 738 shards (368.5 GB) in 2m 08s, 2.9 GB/s; 1 failed.``"""
        wanted = len(self.results) - self.cached
        number = wanted or self.cached
        shards = f"{number:,} shard{'' if number == 1 else 's'}"
        if not wanted:
            return f"All {shards} cached ({format_bytes(self.plan.cached_bytes)})."
        text = f"Warmed {self.count(*_NEW):,} of {shards} ({format_bytes(self.bytes)})"
        text += f" in {format_duration(self.seconds)}"
        if self.received and self.seconds > 0:
            text += f", {format_rate(self.received / self.seconds)}"
        notes = (
            (self.refreshed, "replaced at the origin"),
            (self.failed, "failed"),
            (self.retried, "retried"),
            (self.coalesced, "fetched by other processes"),
            (self.linked, "linked"),
            (self.count(Outcome.LEFT_OUT), "left out for want of room"),
            (self.not_started, f"not done because {self.stopped.why if self.stopped else ''}"),
        )
        remarks = ", ".join(f"{number:,} {what}" for number, what in notes if number)
        return f"{text}; {remarks}." if remarks else f"{text}."

    def as_dict(self) -> dict[str, Any]:
        """Totals for JSON: shards by outcome, bytes, seconds."""
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
        """Why shards failed, by URL."""
        failed = [each for each in self.results if each.outcome is Outcome.FAILED]
        return {each.url: each.error for each in failed if each.error is not None}

    def count(self, *outcomes: Outcome) -> int:
        """How many shards ended in one of ``outcomes``."""
        return sum(result.outcome in outcomes for result in self.results)

    @property
    def refreshed(self) -> int:
        """Shards that were fetched again because their origin had replaced them."""
        pairs = zip(self.plan.shards, self.results, strict=True)
        return sum(s.key in self.plan.outdated and r.outcome in _NEW for s, r in pairs)

    @property
    def retried(self) -> int:
        """Shards that needed more than one request per part."""
        return sum(result.retries > 0 for result in self.results)

    @property
    def bytes(self) -> int:
        """Bytes of the shards that came into the cache."""
        return sum(r.size or 0 for r in self.results if r.outcome in _NEW)

    @property
    def received(self) -> int:
        """Bytes that came over the network for this call."""
        return sum(result.received for result in self.results)

    @property
    def full(self) -> bool:
        """Whether a shard found no room, other than under best effort."""
        return any(is_full(r.error) for r in self.results if r.outcome is Outcome.FAILED)


class Planned(NamedTuple):
    """The plan is made; nothing was fetched yet."""

    plan: PrewarmPlan


class Started(NamedTuple):
    """A thread has begun with a shard. ``progress()`` returns how far it is at that moment."""

    shard: ShardURL
    progress: Callable[[], Progress]


class Finished(NamedTuple):
    """A thread is done with a shard."""

    shard: ShardURL
    result: ShardResult


Event = Planned | Started | Finished


def portable(error: Exception) -> Exception:
    """An error that can be pickled: one of ours, or what it says."""
    if isinstance(error, ShardCacheError | OSError):
        return error
    return ShardCacheError(f"{type(error).__name__}: {error}")


def is_full(exn: BaseException | None) -> bool:
    """Whether a shard failed for want of room, in the budget or on the disk."""
    return isinstance(exn, OSError) and exn.errno in FULL
