"""Cleaning: `Cache.clean`, ``shardcache clean``, and cleaning in the background of a job.

Shards that are pinned, being read or in flight always stay. Shards that the policy keeps for
running jobs stay, too, unless `Limits.everything` is set.
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
from shardcache.faults import os_error
from shardcache.space.budget import Space
from shardcache.space.eviction import CleanReport, Limits, Removal, remove_expired, sweep
from shardcache.space.memory import ram_disk
from shardcache.space.tiers import Tier
from shardcache.stats import database

logger = logging.getLogger(__name__)

#: Seconds between two cleanings of a node, and seconds that a process waits before its first
#: cleaning, because many processes end earlier.
INTERVAL = 300.0
_FIRST = 60.0
#: Seconds between two checks of the memory that a RAM disk leaves to the job.
_MEMORY_INTERVAL = 2.0
#: Seconds for which partials of dead processes stay, so that the next prewarm can resume them.
_KEEP_PARTIALS = 3600.0
#: Seconds that a process waits at its end for a running cleaning. After that, the process ends in
#: the middle of the cleaning, which does no harm.
_CLOSE_TIMEOUT = 2.0


def clean(
    space: Space, limits: Limits, *, orphans: bool = False, dry_run: bool = False
) -> CleanReport:
    """Evict until the limits hold, and remove the partials and sessions of dead processes.

    With ``orphans``, also remove partials that are younger than an hour.
    """
    keep = 0.0 if orphans or limits.everything else _KEEP_PARTIALS
    leftovers = list[Removal]()
    for store in space.stores():
        leftovers += sweep(store, space.allocated, keep=keep, dry_run=dry_run)
    swept = sum(removal.size for removal in leftovers)
    # A dry run has not removed the leftovers, so `flights` still counts them.
    reserved = sum(flight.reserved for flight in space.flights()) - (swept if dry_run else 0)
    limits = replace(limits, free_needed=max(0, limits.free_needed - swept))
    entries = [entry for store in space.stores() for entry in store.entries()]
    planned = space.plan(entries, limits, reserved=reserved, jobs=not limits.everything)
    if dry_run:
        return replace(planned, removed=(*leftovers, *planned.removed))
    gone, now = space.evict(planned.removed), clock.time()
    space.forget_refusal()
    remove_expired(space.node, now)
    try:
        database.expire(space.node, now)
    except os_error() as exn:
        logger.info("old statistics were not merged: %s", exn)
    return replace(
        planned,
        removed=(*leftovers, *gone),
        kept=planned.kept + len(planned.removed) - len(gone),
        kept_bytes=planned.kept_bytes + planned.freed - sum(removal.size for removal in gone),
        dry_run=False,
    )


def merged(reports: Sequence[CleanReport]) -> CleanReport:
    """Merge the reports of several tiers into one."""
    removed = tuple(removal for report in reports for removal in report.removed)
    names = "kept", "kept_bytes", "missing", "pinned"
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return CleanReport(removed, dry_run=all(report.dry_run for report in reports), **sums)


class Housekeeper:
    """Cleans in the background of a job, so that a node without cron stays within its limits.

    Every five minutes, one of the processes that use a cache does the same as ``shardcache clean``.
    Each of them checks a RAM disk every two seconds, and gives back what the job's memory needs.
    """

    def __init__(self, tier: Tier) -> None:
        self.due = 0.0  #: when `check` must act again, on the monotonic clock
        self._tier = tier
        self._next = clock.monotonic() + _FIRST
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Start a cleaning in a thread if one is due. Otherwise, this only reads the clock."""
        if (now := clock.monotonic()) < self.due:
            return
        self.due = now + _MEMORY_INTERVAL  # set first, so that other threads return above
        if self._thread is not None and self._thread.is_alive():  # it may wait for a lock
            return
        try:
            space = self._tier.space
            is_due, in_memory = now >= self._next, ram_disk(space.node.base) is not None
            if is_due:
                self._next = now + INTERVAL
            if not in_memory:
                self.due = self._next
            if is_due or (in_memory and space.limits().free_needed):
                self._thread = threads.start(lambda: self._work(space, is_due), "shardcache-clean")
        except (os_error(), RuntimeError) as exn:  # the directory is gone, or too many threads run
            logger.debug("no cleaning: %s", exn)

    def _work(self, space: Space, is_due: bool) -> None:
        try:
            if not is_due:
                freed = space.relieve()
                logger.info("evicted %d bytes from %s for the job's memory", freed, space.node.base)
                return
            with contextlib.suppress(FileNotFoundError):  # the cache was never cleaned
                # Each cleaning writes to the lock.
                last = os.lstat(space.node.named_lock("clean")).st_mtime
                if 0 <= clock.time() - last < INTERVAL:
                    return
            with space.sole_cleaner(wait=False):
                report = clean(space, space.limits())
            if report.removed:
                logger.info("cleaned: %d removed, %d bytes", len(report.removed), report.freed)
        except LockTimeoutError as exn:
            logger.debug("%s", exn)
        except os_error() as exn:
            logger.info("background cleaning failed: %s", exn)

    def close(self) -> None:
        """Wait up to two seconds for a running cleaning to end."""
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT)
