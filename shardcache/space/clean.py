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
from dataclasses import replace

from shardcache import clock, threads
from shardcache.errors import LockTimeoutError
from shardcache.space.budget import Space
from shardcache.space.eviction import CleanReport, Limits, linked, sweep
from shardcache.space.pins import remove_expired
from shardcache.space.tiers import Tier
from shardcache.stats import database
from shardcache.store.entry import Store

__all__ = ["CleanReport", "Housekeeper", "clean", "joined", "remove"]

logger = logging.getLogger(__name__)

#: Seconds between two rounds of a node, and from a process's first use of the cache to the moment
#: when it asks whether one is due.
INTERVAL = 300.0
_FIRST = 60.0
#: Seconds between two questions about how much memory is left.
_MEMORY_INTERVAL = 2.0
#: Seconds for which the partials of dead processes stay: an interrupted prewarm resumes them.
_KEEP_PARTIALS = 3600.0
#: Seconds that the end of a process waits for a round.
_FAREWELL = 2.0


def clean(
    space: Space, limits: Limits, *, orphans: bool = False, dry_run: bool = False
) -> CleanReport:
    """Bring the cache within ``limits`` and sweep what dead processes left.

    Args:
        space: of the tier.
        limits: what must hold afterwards.
        orphans: also remove the partials that dead processes left within the last hour.
        dry_run: touch nothing, say what would go.
    """
    keep = 0.0 if orphans or limits.everything else _KEEP_PARTIALS
    leftovers = [
        removal
        for store in space.stores()
        for removal in sweep(store, space.allocated, keep=keep, dry_run=dry_run)
    ]
    swept = sum(one.size for one in leftovers)
    # What a dry run leaves counts as in flight.
    reserved = sum(flight.reserved for flight in space.flights()) - (swept if dry_run else 0)
    limits = replace(limits, free_needed=max(0, limits.free_needed - swept))
    chosen = space.plan(limits, reserved=reserved, jobs=not limits.everything)
    if dry_run:
        return replace(chosen, removed=(*leftovers, *chosen.removed))
    gone, now = space.evict(chosen), clock.time()
    space.recount()
    remove_expired(space.node, now)
    try:
        database.compact(space.node, now)
    except OSError as exn:
        logger.info("statistics are compacted another time: %s", exn)
    return replace(
        chosen,
        removed=(*leftovers, *gone),
        kept=chosen.kept + len(chosen.removed) - len(gone),
        kept_bytes=chosen.kept_bytes + chosen.freed - sum(one.size for one in gone),
        dry_run=False,
    )


def joined(reports: Sequence[CleanReport]) -> CleanReport:
    """Those of several tiers as one."""
    return CleanReport(
        tuple(removal for report in reports for removal in report.removed),
        sum(report.kept for report in reports),
        sum(report.kept_bytes for report in reports),
        sum(report.missing for report in reports),
        all(report.dry_run for report in reports),
    )


def remove(
    stores: Sequence[Store], key: str, *, pinned: bool = False, dry_run: bool = False
) -> tuple[int, int, int]:
    """Remove every version of one shard that nobody uses; with ``pinned``, none.

    Returns:
        How many went, their bytes, and how many stay because they are pinned or in use. What
        several namespaces link counts once.
    """
    removed = freed = in_use = 0
    store = stores[0]
    for links in linked(entry for each in stores for entry in each.entries_of(key)):
        if pinned:
            goes = False
        elif dry_run:
            goes = not any(map(store.in_use, links))
        else:
            goes = all(store.evict(entry) for entry in links)
        if goes:
            removed += 1
            freed += links[0].size
        elif any(entry.path.exists() for entry in links):
            in_use += 1
    return removed, freed, in_use


class Housekeeper:
    """Cleans beside a job, so that a node without cron stays within its bounds.

    Every few minutes one of the processes that use a cache does what ``shardcache clean`` does, in
    a thread of its own, under the same lock, and only if nobody else has done so lately.
    A RAM disk is checked every few seconds: as the job's own memory grows, the cgroup leaves less
    for the disk, and the kernel would kill the job, not ask the cache. A disk that fails is no
    error of the job's here: the next read or write finds it.
    """

    def __init__(self, tier: Tier) -> None:
        self.due = 0.0  #: when to call `check` again, of the monotonic clock
        self._tier = tier
        self._next = clock.monotonic() + _FIRST
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Begin a round if one is due. Costs a glance at the clock."""
        now = clock.monotonic()
        if now < self.due:
            return
        self.due = now + _MEMORY_INTERVAL  # first of all, for other threads
        try:
            pressed, is_round = self._tier.space().is_pressed, now >= self._next
            if is_round:
                self._next = now + INTERVAL
                self._tier.refresh_session()
            if pressed is None:
                self.due = self._next
            if is_round or pressed:
                self._thread = threads.start(lambda: self._work(is_round), "shardcache-clean")
        except (OSError, RuntimeError) as exn:  # gone, or a limit of processes
            logger.debug("no cleaning: %s", exn)

    def _work(self, is_round: bool) -> None:
        space = self._tier.space()
        try:
            if is_round:
                self._clean(space)
            else:
                logger.info("gave %d bytes of %s back to the job", space.relieve(), space.node.base)
        except LockTimeoutError as exn:
            logger.debug("%s", exn)
        except OSError as exn:
            logger.info("cleaning beside the job failed: %s", exn)

    def _clean(self, space: Space) -> None:
        with contextlib.suppress(FileNotFoundError):  # nobody has cleaned it yet
            last = os.lstat(space.node.named_lock("clean")).st_mtime  # cleaners write to it
            if 0 <= clock.time() - last < INTERVAL:
                return
        with space.sole_cleaner(wait=False):
            report = clean(space, space.limits())
        if report.removed:
            logger.info("cleaned: %d removed, %d bytes", len(report.removed), report.freed)

    def close(self) -> None:
        """End with the process: a round that is under way may be left at any point."""
        if self._thread is not None:
            self._thread.join(_FAREWELL)
