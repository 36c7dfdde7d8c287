"""Making room on request: what ``Cache.clean`` and ``shardcache clean`` do.

The plan is made first and carried out as it is, so a dry run tells the truth. Safe beside running
jobs: what is pinned, being read or in flight stays, and so does what running jobs used, unless
``everything`` is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardcache import clock, threads
from shardcache.errors import LockTimeoutError
from shardcache.space.budget import Space
from shardcache.space.eviction import ENTRY_INODES, Limits, Reason, Removal, apply, sweep
from shardcache.space.pins import remove_expired
from shardcache.space.tiers import Tier
from shardcache.stats import database
from shardcache.store.store import Store
from shardcache.units import format_bytes

__all__ = ["CleanReport", "CleanStatus", "Housekeeper", "clean", "joined", "remove"]

logger = logging.getLogger(__name__)

#: Seconds between two rounds of a node, and from a process's first use of the cache to its own
#: first look whether one is due.
INTERVAL = 300.0
_FIRST = 60.0
#: Seconds between two looks at how much memory is left.
_GLANCE = 2.0
#: Seconds for which the partials of dead processes stay: an interrupted prewarm resumes them.
_KEEP_PARTIALS = 3600.0
#: The part of ``max_size`` that a round leaves.
_SOFT = 0.95
#: Seconds that the end of a process waits for a round.
_FAREWELL = 2.0


@dataclass(frozen=True, slots=True, repr=False)
class CleanReport:
    """What was removed, or would be."""

    removed: tuple[Removal, ...]  #: entries and leftovers, in order
    kept: int  #: number of entries that stay
    kept_bytes: int  #: bytes of those
    missing: int  #: bytes that could not be found because the rest is in use
    dry_run: bool  #: whether nothing was touched
    missing_inodes: int = 0  #: likewise inodes

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
    """How far a clean is; it writes, others read."""

    victims: int | None = None  #: entries that are to go; None until that was found out
    victim_bytes: int = 0  #: bytes of those
    done: int = 0  #: how many of them went, or turned out to be in use
    done_bytes: int = 0  #: bytes of those


def clean(
    space: Space,
    limits: Limits,
    *,
    orphans: bool = False,
    dry_run: bool = False,
    status: CleanStatus | None = None,
) -> CleanReport:
    """Bring the cache within ``limits`` and sweep what dead processes left.

    Args:
        space: of the tier.
        limits: what must hold afterwards.
        orphans: also remove the partials that dead processes left within the last hour.
        dry_run: touch nothing, tell what would go.
        status: is kept up to date.
    """
    status = status or CleanStatus()
    removed: list[Removal] = []
    keep = 0.0 if orphans or limits.everything else _KEEP_PARTIALS
    for store in space.stores():
        removed += sweep(store, keep=keep, dry_run=dry_run)
    # Leftovers count as in flight, and their bytes come free, in a dry run too.
    reserved = sum(flight.reserved for flight in space.flights())
    if dry_run:
        reserved -= sum(one.size for one in removed if one.reason is Reason.ORPHAN)
    limits = replace(
        limits,
        free_needed=max(0, limits.free_needed - sum(one.size for one in removed)),
        inodes_needed=max(0, limits.inodes_needed - ENTRY_INODES * len(removed)),
    )
    chosen = space.plan(limits, reserved=reserved, protect=not limits.everything)
    kept, kept_bytes = chosen.kept, chosen.kept_bytes
    status.victims = (status.victims or 0) + len(chosen.victims)
    status.victim_bytes += chosen.freed
    for victim in chosen.victims:
        path = victim.entries[0].path
        if dry_run or any(apply(space.stores()[0], [victim])):
            if not dry_run:
                space.evicted(victim)
            removed.append(Removal(str(path), victim.size, victim.reason))
        elif path.exists():  # came into use since the plan
            kept += 1
            kept_bytes += victim.size
        status.done += 1
        status.done_bytes += victim.size
    if not dry_run:
        now = clock.time()
        space.recount()
        remove_expired(space.node, now)
        try:
            database.compact(space.node, now)
        except OSError as exn:
            logger.info("statistics are compacted another time: %s", exn)
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
    """Remove every version of one shard that nobody uses; with ``pinned``, none.

    Returns:
        What was removed, and how many entries stay because they are pinned or in use.
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


class Housekeeper:
    """Cleans beside a job, so that a node without cron stays within its bounds.

    Every few minutes one of the processes that use a cache does what ``shardcache clean`` does, in
    a thread of its own, under the same lock, and only if nobody else has done so lately. It goes a
    little below the limits, so that whoever makes room for a shard seldom has to list all entries.
    A RAM disk is looked at every few seconds: as the job's own memory grows, the cgroup leaves less
    for the disk, and the kernel would kill the job, not ask the cache. A disk that fails is no
    error of the job's here: whoever reads or writes finds it.
    """

    def __init__(self, tier: Tier) -> None:
        self.due = 0.0  #: when to look again, of the monotonic clock
        self._tier = tier
        self._next = clock.monotonic() + _FIRST
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin a round if one is due. Costs a look at the clock."""
        now = clock.monotonic()
        if now < self.due:
            return
        self.due = now + _GLANCE  # first of all, for other threads
        try:
            pressed, is_round = self._tier.space().is_pressed, now >= self._next
            if is_round:
                self._next = now + INTERVAL
            if pressed is None:
                self.due = self._next
            if is_round or pressed:
                self._thread = threads.start(lambda: self._work(is_round), "shardcache-clean")
        except (OSError, RuntimeError) as exn:  # gone, or a limit of processes
            logger.debug("no cleaning: %s", exn)

    def _work(self, is_round: bool) -> None:
        try:
            if is_round:
                self._clean()
            else:
                freed = self._tier.space().relieve()
                logger.info("gave %d bytes of %s back to the job", freed, self._tier.config.dir)
        except LockTimeoutError as exn:
            logger.debug("%s", exn)
        except OSError as exn:
            logger.info("cleaning beside the job failed: %s", exn)

    def _clean(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            # Who cleans writes to the lock's file.
            last = os.lstat(self._tier.namespaces.node.named_lock("clean")).st_mtime
            if 0 <= clock.time() - last < INTERVAL:
                return
        space = self._tier.space()
        with space.sole_cleaner(wait=False):
            limits = space.limits()
            if limits.max_size is not None:
                limits = replace(limits, max_size=int(limits.max_size * _SOFT))
            report = clean(space, limits)
        if report.removed:
            logger.info("cleaned: %d removed, %d bytes", len(report.removed), report.freed)

    def close(self) -> None:
        """End with the process: a round that is under way may be left at any point."""
        if self._thread is not None:
            self._thread.join(_FAREWELL)
