"""What to remove, and removing it.

`plan` is pure: the same entries, limits and time give the same plan, so a dry
run shows exactly what a run would do. `apply` carries a plan out and reports
what really went: an entry that somebody began to read in between stays.

What is being read is never a victim, and what else stays and what goes first is said by a
`policy.Policy`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shardcache.locks.sessions import remove_dead_sessions, remove_dead_waits
from shardcache.space.policy import Policy, is_dated, tells_time
from shardcache.space.uses import remove_stale_maps
from shardcache.store.store import Entry, Store
from shardcache.store.sweeping import (
    InFlight,
    in_flight,
    remove_dead_leases,
    remove_free_locks,
    remove_leftover,
    remove_quarantined,
    remove_temporaries,
    remove_unnamed,
)

__all__ = ["ENTRY_INODES", "EvictionPlan", "Limits", "Reason", "Removal", "Victim"]
__all__ += ["apply", "plan", "sweep"]

logger = logging.getLogger(__name__)

#: A directory, the data, the sidecar. The key's directory goes too if it was its last one.
ENTRY_INODES = 3


class Reason(StrEnum):
    """Why something is removed."""

    MAX_SIZE = "max_size"
    MIN_FREE = "min_free"
    INODES = "inodes"
    MAX_AGE = "max_age"
    ALL = "all"
    ASKED = "asked"
    ORPHAN = "orphan"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cache may occupy; None means no such limit.

    Attributes:
        max_size: bytes of entries and fetches in flight together.
        free_needed: bytes to remove so that the filesystem keeps its free space.
        inodes_needed: inodes to free; an entry has `ENTRY_INODES`.
        max_age: seconds since the last use.
        everything: remove all that may be removed.
    """

    max_size: int | None = None
    free_needed: int = 0
    inodes_needed: int = 0
    max_age: float | None = None
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Victim:
    """An entry to remove, and why."""

    entry: Entry
    reason: Reason


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What would be removed and kept.

    Attributes:
        victims: in the order in which they go.
        kept: number of entries that stay.
        kept_bytes: bytes of those.
        missing: bytes that cannot be found; 0 when every limit is met.
        missing_inodes: likewise inodes.
        undated: those that stay and were last used in the future; dated now, their age
            begins to count.
    """

    victims: tuple[Victim, ...]
    kept: int
    kept_bytes: int
    missing: int
    undated: tuple[Entry, ...] = ()
    missing_inodes: int = 0

    @property
    def suffices(self) -> bool:
        """Whether every limit is met when the victims are gone."""
        return not self.missing and not self.missing_inodes

    @property
    def freed(self) -> int:
        """Bytes of all victims."""
        return sum(victim.entry.size for victim in self.victims)


@dataclass(frozen=True, slots=True)
class Removal:
    """Something that was removed (or would be): which directory, how big, why."""

    name: str
    size: int
    reason: Reason


def plan(
    entries: Iterable[Entry],
    limits: Limits,
    now: float,
    *,
    reserved: int = 0,
    policy: Policy = Policy(),  # noqa: B008 - immutable
    in_use: Callable[[Entry], bool] = lambda entry: False,
) -> EvictionPlan:
    """Choose victims: superseded, undated and too old first, then the policy's, until limits hold.

    Args:
        entries: everything published.
        limits: what must hold afterwards.
        now: seconds since the epoch.
        reserved: bytes of fetches in flight, and of the one that needs room.
        policy: what goes first, and what stays.
        in_use: asked only of entries that would otherwise go.
    """
    found = list(entries)
    total = sum(entry.size for entry in found)
    over = max(0, total + reserved - limits.max_size) if limits.max_size is not None else 0
    short = limits.free_needed
    inodes = limits.inodes_needed
    asked = limits.everything or limits.max_age is not None
    if not asked and max(over, short, inodes) <= 0:  # nobody goes, whoever would be the first
        ahead = [e for e in found if not is_dated(e.used, now)] if tells_time(now) else []
        return EvictionPlan((), len(found), total, 0, tuple(ahead))
    # The path last: two namespaces may have one version each, of the same age.
    superseded = policy.superseded(found)
    in_order = sorted(
        found,
        key=lambda e: (
            *(e not in superseded, is_dated(e.used, now)),
            *(policy.order(e), e.key, e.version, e.directory),
        ),
    )
    victims: list[Victim] = []
    undated: list[Entry] = []
    for entry in in_order:
        if not is_dated(entry.used, now) and tells_time(now):
            undated.append(entry)
        reason = _reason(entry, limits, now, over, short, inodes)
        if reason is None:
            continue
        kept = entry not in superseded and policy.keeps(entry, now)
        if kept or in_use(entry):
            continue
        victims.append(Victim(entry, reason))
        over -= entry.size
        short -= entry.size
        inodes -= ENTRY_INODES
    gone = {victim.entry for victim in victims}
    freed = sum(entry.size for entry in gone)
    return EvictionPlan(
        tuple(victims),
        len(in_order) - len(victims),
        total - freed,
        max(0, over, short),
        tuple(entry for entry in undated if entry not in gone),
        max(0, inodes),
    )


def _reason(
    entry: Entry, limits: Limits, now: float, over: int, short: int, inodes: int
) -> Reason | None:
    if limits.everything:
        return Reason.ALL
    if limits.max_age is not None and now - entry.used > limits.max_age:
        return Reason.MAX_AGE
    if over > 0:
        return Reason.MAX_SIZE
    if short > 0:
        return Reason.MIN_FREE
    return Reason.INODES if inodes > 0 else None


def apply(store: Store, chosen: Sequence[Victim]) -> Iterator[Victim]:
    """Evict; yields what really went, as it goes.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    for victim in chosen:
        if store.evict(victim.entry):
            logger.info(
                "evicted %s, %d bytes (%s)",
                victim.entry.key,
                victim.entry.size,
                victim.reason.value,
                extra={
                    "event": "evicted",
                    "key": victim.entry.key,
                    "bytes": victim.entry.size,
                    "reason": victim.reason.value,
                },
            )
            yield victim


def sweep(
    store: Store, *, dry_run: bool = False, only: Callable[[InFlight], bool] = lambda found: True
) -> Iterator[Removal]:
    """Remove what dead processes left, quarantined entries, and lock files of idle keys.

    Yields what had bytes of its own; lock files and sessions of dead processes
    go without saying.

    Args:
        store: where.
        dry_run: only say what would go.
        only: which leftovers; the default is all.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    layout = store.layout
    for found in in_flight(layout):
        if found.live or not only(found):
            continue
        if dry_run or remove_leftover(layout, found.path):
            yield Removal(str(found.path), found.occupied, Reason.ORPHAN)
    for path, size in remove_quarantined(layout, dry_run=dry_run):
        yield Removal(str(path), size, Reason.QUARANTINED)
    if not dry_run:
        sessions = remove_dead_sessions(layout)
        remove_stale_maps(layout, sessions)
        removed = remove_temporaries(layout) + remove_unnamed(layout)
        removed += remove_free_locks(layout) + remove_dead_leases(layout)
        removed += remove_dead_waits(layout)
        logger.debug("removed %d files and directories without bytes", removed)
