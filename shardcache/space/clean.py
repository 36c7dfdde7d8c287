"""Making room on request: what ``Cache.clean`` and ``shardcache clean`` do.

The plan is made first and carried out as it is, so a dry run tells the truth.
Safe beside running jobs: what is pinned, being read, or in flight stays, and so
does what was used since the oldest running job began, unless ``everything`` is
asked for.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardcache import threads
from shardcache.clock import Clock
from shardcache.errors import LockTimeoutError
from shardcache.space.budget import Space
from shardcache.space.eviction import ENTRY_INODES, Limits, Reason, Removal, apply, sweep
from shardcache.space.pins import remove_expired
from shardcache.space.tiers import Tier
from shardcache.stats import database
from shardcache.store.store import Entry, Store
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
#: So many entries are looked at in a row (about 4 ms), then so many seconds nothing is done.
_ROW = 200
_PAUSE = 0.02
#: Seconds that the end of a process waits for a round; what it was at can be left at any point.
_FAREWELL = 2.0


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
    orphans: bool = False,
    dry_run: bool = False,
    status: CleanStatus | None = None,
) -> CleanReport:
    """Bring the cache within ``limits`` and sweep what dead processes left.

    Args:
        space: of the tier.
        stores: its namespaces.
        limits: what must hold afterwards.
        orphans: also remove the partials that dead processes left within the last hour.
        dry_run: touch nothing, tell what would go.
        status: is kept up to date.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    status = status or CleanStatus()
    removed: list[Removal] = []
    keep = 0.0 if orphans or limits.everything else _KEEP_PARTIALS
    for store in stores:
        for removal in sweep(store, keep=keep, dry_run=dry_run):
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
        path = victim.entries[0].path
        if dry_run or any(apply(stores[0], [victim])):
            if not dry_run:
                space.evicted(victim)
            removed.append(Removal(str(path), victim.size, victim.reason))
            status.went(removed[-1])
        elif path.exists():  # came into use since the plan
            kept += 1
            kept_bytes += victim.size
        status.passed(victim.size)
    if not dry_run:
        now = space.clock.time()
        for entry in chosen.undated:  # their age begins to count
            stores[0].touch(entry.directory, now)
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


class _EndError(Exception):
    """The process ends."""


class Housekeeper:
    """Cleans beside a job, so that a node without cron stays within its bounds.

    Every few minutes one of the processes that use a cache does what ``shardcache clean`` does, in
    a thread of its own, under the same lock, and only if nobody else has done so lately. It goes a
    little below the limits: so whoever makes room for a shard seldom has to list all entries first.
    A RAM disk is looked at every few seconds: as the job's own memory grows, the cgroup leaves less
    for the disk than it had when it was filled, and the kernel would kill the job, not ask the
    cache. A disk that fails is no error of the job's here: whoever reads or writes finds it.

    Safe between the threads of one process.

    Args:
        tier: what is cleaned.
        clock: time.

    Attributes:
        due: when to look again, of the monotonic clock; before that it is of no use.
    """

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._next = clock.monotonic() + _FIRST
        self.due = 0.0
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin a round if one is due. Costs a look at the clock."""
        if self._clock.monotonic() < self.due or not self._guard.acquire(blocking=False):
            return
        try:
            now = self._clock.monotonic()
            pressed, self.due = self._glance(), now + _GLANCE
            if now >= self._next:
                self._next = now + INTERVAL
                self._start(self._run)
            elif pressed:
                self._start(self._relieve)
            elif pressed is None:
                self.due = self._next
        finally:
            self._guard.release()

    def _start(self, work: Callable[[], None]) -> None:
        try:
            thread = threads.start(work, "shardcache-clean")
        except RuntimeError as exn:  # a limit of processes
            logger.debug("no cleaning: %s", exn)
        else:
            self._thread = thread

    def _glance(self) -> bool | None:
        """Whether memory is short; None where that is not the question."""
        try:
            return self._tier.space().is_pressed
        except OSError as exn:
            logger.debug("whether memory is short is not known: %s", exn)
            return None

    def _relieve(self) -> None:
        try:
            freed = self._tier.space(through=self._gently).relieve()
        except _EndError:
            logger.debug("the process ended while memory was given back")
        except OSError as exn:
            logger.info("no memory was given back: %s", exn)
        else:
            logger.info("gave %d bytes of %s back to the job", freed, self._tier.config.dir)

    def close(self) -> None:
        """End a round that is under way."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FAREWELL)

    def _run(self) -> None:
        try:
            if self._is_due():
                self._round()
        except _EndError:
            logger.debug("cleaning was ended with the process")
        except LockTimeoutError as exn:
            logger.debug("%s", exn)
        except OSError as exn:
            logger.info("cleaning beside the job failed: %s", exn)

    def _is_due(self) -> bool:
        """Whether nobody has cleaned the root lately: who does writes to the lock's file."""
        try:
            last = os.lstat(self._tier.namespaces.node.named_lock("clean")).st_mtime
        except FileNotFoundError:
            return True
        return not 0 <= self._clock.time() - last < INTERVAL

    def _round(self) -> None:
        space = self._tier.space(through=self._gently)
        with space.sole_cleaner(wait=False):
            limits = space.limits()
            if limits.max_size is not None:
                limits = replace(limits, max_size=int(limits.max_size * _SOFT))
            report = clean(space, self._tier.stores(), limits)
        if report.removed:
            logger.info("cleaned: %d removed, %d bytes", len(report.removed), report.freed)

    def _gently(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for number, entry in enumerate(entries, 1):
            yield entry
            if number % _ROW == 0 and self._ended.wait(_PAUSE):
                raise _EndError
