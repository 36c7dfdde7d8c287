"""What one process has of a cache: namespaces, session, clients, connections.

Made on first use in the process that uses it, and thrown away unseen by a
forked child, which makes its own; see `processes`.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from shardcache import threads
from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.files import Breaker, fault_kind, is_disk_fault
from shardcache.ranks import Ranks
from shardcache.space.tiers import Tier
from shardcache.stats.counters import Counters, blank
from shardcache.store.store import Entry, Namespaces, Opened, Store
from shardcache.units import format_duration

if TYPE_CHECKING:
    from shardcache.fetch.background import Copier, Fetchings
    from shardcache.fetch.coordinator import Coordinator
    from shardcache.fetch.transfer import Fetcher
    from shardcache.origins.resolve import Origins
    from shardcache.space.clean import Housekeeper
    from shardcache.space.eviction import Victim

__all__ = ["Process", "Processes", "in_background"]

logger = logging.getLogger(__name__)


class Process:
    """The parts; safe between the threads of the process that made it.

    Args:
        config: options.
        ranks: who we are.
        clock: time.
        started: when the job began to use the cache, for the session.
    """

    def __init__(self, config: Config, ranks: Ranks, clock: Clock, started: float) -> None:
        self._warned: set[str] = set()
        #: Fastest first; the last one is ``dir``, where locks are.
        *faster, last = config.by_tier()
        parts = ranks, clock, started, self.warn
        self.tiers = (
            *(Tier(each, *parts) for each in faster),
            Tier(last, *parts),
        )
        self._config = config
        self._ranks = ranks
        self._clock = clock
        self._guard = threading.Lock()
        #: The coordinator, once there is one.
        self.ready: Coordinator | None = None
        self._housekeepers: list[Housekeeper] = []
        where = (lambda: self.home.namespaces.node) if config.stats else None
        self.counters = Counters(where, clock, ranks, lambda: self._is_well)
        for tier in self.tiers:
            tier.evicted = self._count_eviction
        self._look_at = 0.0  # of the monotonic clock: when they want to be asked again
        self._touched: dict[str, float] = {}
        self.reading = Breaker(clock)
        self.writing = Breaker(clock)

    @property
    def home(self) -> Tier:
        """The tier that is always there."""
        return self.tiers[-1]

    @property
    def _faster(self) -> Sequence[Tier]:
        return self.tiers[:-1]

    @property
    def usable(self) -> list[Tier]:
        """The tiers that could be made, and the last one."""
        return [tier for tier in self.tiers if tier.made or tier is self.home]

    @property
    def namespaces(self) -> Namespaces:
        """Those of the last tier."""
        return self.home.namespaces

    @property
    def present(self) -> list[Tier]:
        """The tiers that are caches by now, and the last one."""
        return [tier for tier in self.tiers if tier.present or tier is self.home]

    @property
    def unfinished(self) -> int:
        """How many shards are fetched or waited for in the background."""
        return len(self.fetchings.unfinished())

    def stores(self) -> list[Store]:
        """Every namespace of every tier."""
        return [store for tier in self.present for store in tier.stores()]

    def tier_of(self, directory: str) -> Tier:
        """The tier that an entry is in."""
        return next((tier for tier in self.tiers if tier.owns(directory)), self.home)

    def store_of(self, entry: Entry) -> Store:
        """The store of the namespace that an entry is in."""
        return self.tier_of(entry.directory).store.owning(entry)

    def coordinator(self) -> Coordinator:
        """The way to entries; on the first call the directories are made.

        Raises:
            ConfigError: the directory must not be used.
            OSError: it cannot be made or written; with ``strict`` only.
        """
        made = self.ready
        if made is None:
            with self._guard:
                made = self.ready
                if made is None:
                    self._make_directories()
                    self._assemble()
                    made = self.ready = self._make_coordinator()
        return made

    def check_root(self) -> None:
        """Begin anew where a tier is no longer the directory that we began with.

        A disk may be unmounted, mounted again or emptied while a job runs. Asked on
        misses only: what is gone is a miss.

        Raises:
            ConfigError: what is there now must not be used; with ``strict``.
            OSError: likewise, or nothing can be made there.
        """
        if not self.root_changed():
            return
        with self._guard:
            if self.root_changed():  # no other thread was quicker
                self._begin_anew()

    def root_changed(self) -> bool:
        """Whether a directory is not what it was, or the last tier's was never made."""
        return self.home.changed() or any(tier.made and tier.changed() for tier in self._faster)

    def _begin_anew(self) -> None:
        for tier in self.tiers:
            if not tier.changed():
                continue
            if tier.known:
                self.warn(
                    f"root of {tier.config.dir}",
                    "%s is gone, or another directory than before (unmounted, mounted again, "
                    "emptied?); what was in it is fetched again",
                    tier.config.dir,
                )
            if tier is not self.home:
                if tier.made:
                    self._make_faster(tier)
                continue
            try:
                tier.make()
            except ConfigError as exn:
                if self._config.strict:
                    raise
                # Somebody else's: not even what is in it may be read.
                self.reading.failed(at_once=True)
                self.writing.failed(at_once=True)
                raise OSError(errno.EPERM, exn.message, str(tier.config.dir)) from exn
        self._touched.clear()
        self.ready = self._make_coordinator()

    def _make_directories(self) -> None:
        for tier in self._faster:
            self._make_faster(tier)
        try:
            self.home.make()
        except OSError as exn:
            if self._config.strict:
                raise
            self.warn(
                fault_kind(exn),
                "%s cannot be written (%s); shards not in it are streamed",
                self._config.dir,
                exn.strerror or exn,
            )
            self.disk_failed(self.writing, exn)

    def _make_faster(self, tier: Tier) -> None:
        """Make a tier that can be done without."""
        known = tier.known
        try:
            tier.make()
        except (OSError, ConfigError) as exn:
            # What was wrong from the beginning is a mistake that somebody has to correct.
            if self._config.strict or (isinstance(exn, ConfigError) and not known):
                raise
            reason = exn.message if isinstance(exn, ConfigError) else exn.strerror or exn
            self.warn(
                f"tier {tier.config.dir}",
                "the tier %s cannot be used (%s); shards go to the next one",
                tier.config.dir,
                reason,
            )

    def _assemble(self) -> None:
        # Not at the top: these bring filelock, and `import shardcache` stays light.
        from shardcache.fetch.background import Copier, Fetchings
        from shardcache.fetch.transfer import Fetcher
        from shardcache.origins.resolve import Origins
        from shardcache.origins.retry import RetryPolicy

        config = self._config
        self.fetchings: Fetchings = Fetchings()
        self.origins: Origins = Origins(config, self._clock)
        self.copier: Copier = Copier(self.store_of, self.origins)
        policy = RetryPolicy(config.attempts, config.deadline, self._clock)
        self.fetcher: Fetcher = Fetcher(
            policy,
            self._clock,
            connections=config.connections,
            part_size=config.part_size,
            timeout=config.timeout,
        )

    def _make_coordinator(self) -> Coordinator:
        from shardcache.fetch.coordinator import Coordinator, Place
        from shardcache.space.clean import Housekeeper

        config = self._config
        for housekeeper in self._housekeepers:
            housekeeper.close()
        self._housekeepers = [Housekeeper(tier, self._clock) for tier in self.usable]
        self._look_at = 0.0
        return Coordinator(
            [Place(tier.store, tier.space()) for tier in self.usable],
            siblings=lambda: [s for tier in self.usable for s in tier.namespaces.siblings()],
            fetcher=self.fetcher,
            origins=self.origins,
            config=config,
            ranks=self._ranks,
            clock=self._clock,
            on_fault=lambda exn: self.disk_failed(self.reading, exn),
            warn=self.warn,
        )

    @property
    def _is_well(self) -> bool:
        """Whether the disk is not left alone since it failed."""
        return self.reading.closed and self.writing.closed

    def keep_house(self) -> None:
        """Have the cache cleaned in the background if that is due; see `space.clean`."""
        if not self._is_well:
            return
        for housekeeper in self._housekeepers:
            housekeeper.look()
        self._look_at = min((one.due for one in self._housekeepers), default=0.0)

    def warn(
        self, kind: str, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Log a warning the first time in this process, for this kind; INFO afterwards."""
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, text, *args, extra=extra)

    def count_hit(self, opened: Opened, begun: float) -> None:
        """Count a hit whose opening began then, of the monotonic clock."""
        now = self._clock.monotonic()
        tier = None
        if len(self.tiers) > 1:
            tier = self.tiers.index(self.tier_of(opened.directory))
        self.counters.hit(opened.size, now - begun, now, tier)

    def _count_eviction(self, victim: Victim) -> None:
        self.counters.evicted(victim.reason.value, victim.size)

    def disk_failed(self, breaker: Breaker, exn: OSError) -> None:
        """Count a fault; after too many the disk is left alone for a while.

        Args:
            breaker: `reading` or `writing`.
            exn: what it said; what is no fault of the disk does not count.
        """
        if not is_disk_fault(exn):
            breaker.undecided()
            return
        read_only = exn.errno == errno.EROFS
        if not breaker.failed(at_once=read_only):  # asking thrice would not help
            return
        text = "%s: %s. It is not %s for %s, then tried again; shards are streamed meanwhile."
        verb = "written" if breaker is self.writing else "read"
        said = (text, self._config.dir, exn.strerror or exn, verb, format_duration(breaker.left))
        if read_only:
            self.warn(fault_kind(exn), *said)
        else:
            logger.warning(*said)

    def disk_works(self, breaker: Breaker) -> None:
        """The disk did as it should: all is well again."""
        if breaker.succeeded():
            verb = "written" if breaker is self.writing else "read"
            logger.info("%s can be %s again", self._config.dir, verb)

    def touch(self, opened: Opened) -> None:
        """Note a use of an entry, on its first use here and then at most every interval."""
        now, directory = self._clock.monotonic(), opened.directory
        last = self._touched.get(directory)
        if now >= self._look_at:
            self.keep_house()
        if last is None or now - last >= self._config.touch_interval:
            self._touched[directory] = now
            self.tier_of(directory).store.touch(directory, self._clock.time())

    def cancel(self) -> None:
        """Call off all fetches of this process; they raise, and can be resumed."""
        if self.ready is not None:
            self.fetcher.cancel()
            self.copier.drop()

    def close(self) -> None:
        """End the session, and the fetches in the background that nobody reads."""
        for housekeeper in self._housekeepers:
            housekeeper.close()
        if self.ready is not None:
            self.fetchings.close()
            self.copier.close()
        for tier in self.tiers:
            tier.end_session()
        self.counters.flush()


class Processes:
    """The `Process` of whoever asks: one for all threads, none that came over a fork.

    Without a lock: a fork could leave it held.

    Args:
        config, ranks, clock, started: as for `Process`.
    """

    def __init__(self, config: Config, ranks: Ranks, clock: Clock, started: float) -> None:
        self._parts = config, ranks, clock, started
        self._made: dict[int, Process] = {}
        #: Whose it is, and what those had counted that were closed.
        self._counted: tuple[int, list[int]] = os.getpid(), blank()

    def here(self) -> Process:
        """The calling process's own, made if need be."""
        pid = os.getpid()
        process = self._made.get(pid)
        if process is None:
            process = self._made.setdefault(pid, Process(*self._parts))
            for other in [p for p in self._made if p != pid]:
                self._made.pop(other, None)  # the parent's; copies of its sockets go with it
        return process

    def made(self) -> Process | None:
        """The calling process's own, if it was made."""
        return self._made.get(os.getpid())

    def close(self) -> None:
        """Close the calling process's own; the next one is made anew."""
        process = self._made.pop(os.getpid(), None)
        if process is not None:
            process.close()
            self._counted = os.getpid(), _sum(self._closed(), process.counters.snapshot())

    def counted(self) -> list[int]:
        """What the calling process has counted, in the order of `counters.blank`."""
        process = self.made()
        closed = self._closed()
        return closed if process is None else _sum(closed, process.counters.snapshot())

    def _closed(self) -> list[int]:
        pid, values = self._counted
        return values if pid == os.getpid() else blank()


def _sum(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def in_background(function: Callable[[], object]) -> None:
    """Call ``function`` in a thread of its own. What it raises is only logged: it will be
    raised again by whoever needs what it prepares.
    """

    def run() -> None:
        try:
            function()
        except Exception as exn:  # noqa: BLE001 - see above
            logger.debug("not prepared: %s", exn)

    try:
        threads.start(run, "shardcache-prepare", whole=True)
    except RuntimeError as exn:  # a limit of processes
        logger.debug("not prepared: %s", exn)
