"""Making room on request: what ``Cache.clean`` and ``shardcache clean`` do.

The plan is made first and carried out as it is, so a dry run tells the truth.
Safe beside running jobs: what is pinned, being read, or in flight stays, and so
does what was used since the oldest running job began, unless ``everything`` is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardcache.space.budget import Space
from shardcache.space.eviction import ENTRY_INODES, Limits, Reason, Removal, apply, sweep
from shardcache.store.store import Store
from shardcache.units import format_bytes

__all__ = ["CleanReport", "CleanStatus", "clean", "joined", "remove"]


@dataclass(frozen=True, slots=True, repr=False)
class CleanReport:
    """What was removed, or would be.

    Attributes:
        removed: entries and leftovers, in order.
        kept: number of entries that stay.
        kept_bytes: bytes of those.
        missing: bytes that could not be found because the rest is in use.
        missing_inodes: likewise inodes.
        dry_run: whether nothing was touched.
    """

    removed: tuple[Removal, ...]
    kept: int
    kept_bytes: int
    missing: int
    dry_run: bool
    missing_inodes: int = 0

    def __repr__(self) -> str:
        verbs = ("would remove", "would keep") if self.dry_run else ("removed", "kept")
        return (
            f"<CleanReport: {verbs[0]} {len(self.removed):,} things, {format_bytes(self.freed)}; "
            f"{verbs[1]} {self.kept:,} shards, {format_bytes(self.kept_bytes)}>"
        )

    @property
    def freed(self) -> int:
        """Bytes of all that was removed."""
        return sum(removal.size for removal in self.removed)

    def count(self, reason: Reason) -> int:
        """How many things were removed for ``reason``."""
        return sum(removal.reason is reason for removal in self.removed)


@dataclass(slots=True)
class CleanStatus:
    """How far a clean is; it writes, others read.

    Attributes:
        victims: entries that are to go; None until that was found out.
        victim_bytes: bytes of those.
        done: how many of them went, or turned out to be in use.
        done_bytes: bytes of those.
        listener: told of each thing that was removed, as it goes.
    """

    victims: int | None = None
    victim_bytes: int = 0
    done: int = 0
    done_bytes: int = 0
    listener: Callable[[Removal], None] | None = None

    def planned(self, count: int, size: int) -> None:
        """So many more are to go: of another tier."""
        self.victims = (self.victims or 0) + count
        self.victim_bytes += size

    def passed(self, size: int) -> None:
        """One of them went, or stays."""
        self.done += 1
        self.done_bytes += size

    def went(self, removal: Removal) -> None:
        """Something was removed."""
        if self.listener is not None:
            self.listener(removal)


def clean(
    space: Space,
    stores: Sequence[Store],
    limits: Limits,
    *,
    orphans: bool = True,
    dry_run: bool = False,
    status: CleanStatus | None = None,
) -> CleanReport:
    """Bring the cache within ``limits`` and sweep what dead processes left.

    Args:
        space: of the tier.
        stores: its namespaces.
        limits: what must hold afterwards.
        orphans: sweep what dead processes left.
        dry_run: touch nothing, tell what would go.
        status: is kept up to date.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    status = status or CleanStatus()
    removed: list[Removal] = []
    if orphans or limits.everything:
        for store in stores:
            for removal in sweep(store, dry_run=dry_run):
                removed.append(removal)
                status.went(removal)
    # Leftovers count as in flight, and their bytes come free, in a dry run too.
    swept = {reason: sum(r.size for r in removed if r.reason is reason) for reason in Reason}
    reserved = space.reserved() - (swept[Reason.ORPHAN] if dry_run else 0)
    limits = replace(
        limits,
        free_needed=max(0, limits.free_needed - sum(swept.values())),
        inodes_needed=max(0, limits.inodes_needed - ENTRY_INODES * len(removed)),
    )
    chosen = space.plan(limits, reserved=max(0, reserved), protect=not limits.everything)
    kept, kept_bytes = chosen.kept, chosen.kept_bytes
    status.planned(len(chosen.victims), chosen.freed)
    for victim in chosen.victims:
        if dry_run or any(apply(stores[0].owning(victim.entry), [victim])):
            if not dry_run:
                space.evicted(victim)
            removed.append(Removal(str(victim.entry.path), victim.entry.size, victim.reason))
            status.went(removed[-1])
        elif victim.entry.path.exists():  # came into use since the plan
            kept += 1
            kept_bytes += victim.entry.size
        status.passed(victim.entry.size)
    if not dry_run:
        space.something_went()
        space.date(chosen.undated)
        space.forget_expired_pins()
        space.compact_counts()
    return CleanReport(
        tuple(removed), kept, kept_bytes, chosen.missing, dry_run, chosen.missing_inodes
    )


def joined(reports: Sequence[CleanReport]) -> CleanReport:
    """Those of several tiers as one."""
    return CleanReport(
        tuple(removal for report in reports for removal in report.removed),
        sum(report.kept for report in reports),
        sum(report.kept_bytes for report in reports),
        sum(report.missing for report in reports),
        all(report.dry_run for report in reports),
        sum(report.missing_inodes for report in reports),
    )


def remove(
    stores: Sequence[Store], key: str, *, pinned: bool = False, dry_run: bool = False
) -> tuple[list[Removal], int]:
    """Remove every version of one shard that nobody uses.

    Args:
        stores: all namespaces.
        key: of the shard.
        pinned: whether somebody pinned it; then it stays.
        dry_run: touch nothing.

    Returns:
        What was removed, and how many entries stay because they are pinned or in use.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    removed: list[Removal] = []
    in_use = 0
    for store in stores:
        for entry in store.entries_of(key):
            if pinned:
                free = False
            else:
                free = not store.is_pinned(entry) if dry_run else store.evict(entry)
            if free:
                removed.append(Removal(str(entry.path), entry.size, Reason.ASKED))
            elif entry.path.exists():
                in_use += 1
    return removed, in_use
