"""What one process has of a cache: its tiers, session, clients, connections and counters.

A `Process` is made on first use. A forked child makes its own: this is the only module that
compares process ids.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache import clock, threads
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.files import Breaker, fault_kind, is_disk_fault
from shardcache.ranks import Ranks
from shardcache.space.tiers import Tier
from shardcache.stats import notices
from shardcache.stats.counters import Counters
from shardcache.stats.database import NO_RANK, Sample
from shardcache.stats.summary import summed
from shardcache.store.entry import DamagedError, Entry, Opened, Store
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.background import Fetchings
    from shardcache.fetch.coordinator import Coordinator
    from shardcache.fetch.transfer import Fetcher
    from shardcache.origins.resolve import Origins
    from shardcache.space.clean import Housekeeper
    from shardcache.space.eviction import Removal

__all__ = ["Process", "Processes"]

logger = logging.getLogger(__name__)

#: Seconds that closing waits for copies to upstreams: a shard or two to a NAS. A job that ends is
#: not to be kept by an upstream that hangs, and what is not copied is fetched from the origin.
LAST_COPIES = 5.0


class Process:
    """What the process that made it has of a cache; safe between its threads.

    Args:
        config: options.
        ranks: which process of which job this is.
        started: when the job began to use the cache, for the session; None for a command.

    Attributes:
        tiers: fastest first; the last one is ``dir``, where locks are.
        ready: the coordinator, once there is one; with it there are ``fetchings``, ``origins`` and
            ``fetcher``.
        reading, writing: count the disk's faults.
    """

    fetchings: Fetchings
    origins: Origins
    fetcher: Fetcher

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        self._config = config
        self._ranks = ranks
        self._guard = threading.Lock()
        self._warned: set[str] = set()
        parts = ranks, started, self.warn, self._count_eviction
        self.tiers = [Tier(each, *parts) for each in config.by_tier()]
        self.ready: Coordinator | None = None
        self.reading = Breaker()
        self.writing = Breaker()
        where = (lambda: self.home.node) if config.stats else None
        self.counters = Counters(where, ranks, lambda: self._is_well)
        self._housekeepers: list[Housekeeper] = []
        self.clean_due = 0.0  # of the monotonic clock: when to call `clean_if_due` again
        self._touched: dict[str, float] = {}
        self._copying: list[threading.Thread] = []
        self._told: Counter[str] = Counter()  # what `end` has said
        # Of a job that no launcher started there is one `Cache`, in copies: they know its start.
        launched = ranks.source != "none"
        self._job = ranks.job or ("local" if launched else f"{started or 0.0:.6f}")
        _all.add(self)
        # The children of multiprocessing end without what is registered with atexit.
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util.Finalize(None, _end_all, exitpriority=0)

    # -- tiers -------------------------------------------------------------------

    @property
    def home(self) -> Tier:
        """The tier that is always there."""
        return self.tiers[-1]

    @property
    def present(self) -> list[Tier]:
        """The tiers that are caches by now, and the last one."""
        return [tier for tier in self.tiers if tier.present or tier is self.home]

    def stores(self) -> list[Store]:
        """Every namespace of every tier."""
        return [store for tier in self.present for store in tier.stores()]

    def tier_of(self, directory: str) -> Tier:
        """The tier that an entry is in."""
        return next((tier for tier in self.tiers if tier.owns(directory)), self.home)

    # -- the engine --------------------------------------------------------------

    def coordinator(self) -> Coordinator:
        """The way to entries; on the first call the directories are made.

        Raises:
            ConfigError: the directory must not be used.
            OSError: it cannot be made or written; with ``strict`` only.
        """
        if self.ready is None:
            with self._guard:
                if self.ready is None:
                    self.ready = self._begin(self.tiers)
        return self.ready

    def check_root(self) -> None:
        """Begin anew where a tier is no longer the directory that we began with.

        A disk may be unmounted, mounted again or emptied while a job runs. Asked on
        misses only: what is gone is a miss.

        Raises:
            OSError: it cannot be made again, or must not be used.
        """
        if self.changed_tiers():
            with self._guard:
                if changed := self.changed_tiers():  # another thread may have been quicker
                    self.ready = self._begin(changed)

    def changed_tiers(self) -> list[Tier]:
        """The tiers whose directory is not what it was; the last one also if it was never made."""
        return [t for t in self.tiers if (t.made or t is self.home) and t.changed()]

    def _begin(self, tiers: Sequence[Tier]) -> Coordinator:
        """Make the directories of these tiers, and what works with all that can be used."""
        # Not at the top: these bring filelock, and `import shardcache` stays light.
        from shardcache.fetch.background import Fetchings
        from shardcache.fetch.connections import Connections
        from shardcache.fetch.coordinator import Coordinator
        from shardcache.fetch.transfer import Fetcher
        from shardcache.locks.downloaders import Downloaders
        from shardcache.origins.resolve import Origins
        from shardcache.origins.retry import RetryPolicy
        from shardcache.space.clean import Housekeeper

        for tier in tiers:
            self._make(tier)
        config = self._config
        if self.ready is None:
            self.fetchings, self.origins = Fetchings(), Origins(config)
            policy = RetryPolicy(config.attempts, config.deadline, config.patience)
            downloaders = Downloaders(lambda: self.home.node)
            connections = Connections(config.connections, config.part_size, downloaders)
            self.fetcher = Fetcher(policy, self.counters, connections)
        usable = [tier for tier in self.tiers if tier.made or tier is self.home]
        self._end_housekeeping()
        self._housekeepers = [Housekeeper(tier) for tier in usable]
        self.clean_due = 0.0
        self._touched.clear()
        return Coordinator(
            usable,
            fetcher=self.fetcher,
            origins=self.origins,
            config=config,
            ranks=self._ranks,
            on_fault=lambda exn: self.disk_failed(self.reading, exn),
            warn=self.warn,
        )

    def _make(self, tier: Tier) -> None:
        path, is_first = tier.config.dir, self.ready is None
        if tier.made and not is_first:
            text = "%s is gone, or another directory than before (unmounted?); it is begun anew"
            self.warn(f"root of {path}", text, path)
        try:
            tier.make()
        except (OSError, ConfigError) as exn:
            # What was wrong from the beginning is a mistake that somebody has to correct.
            if self._config.strict or (is_first and isinstance(exn, ConfigError)):
                raise
            reason = exn.message if isinstance(exn, ConfigError) else exn.strerror or exn
            if tier is not self.home:
                text = "the tier %s cannot be used (%s); shards go to the next one"
                self.warn(f"tier {path}", text, path, reason)
            elif isinstance(exn, ConfigError):
                # Somebody else's: not even what is in it may be read.
                self.reading.failed(at_once=True)
                self.writing.failed(at_once=True)
                raise OSError(errno.EPERM, exn.message, str(path)) from exn
            elif not is_first:
                raise
            else:
                self.disk_failed(self.writing, exn)

    # -- what is noted -----------------------------------------------------------

    def warn(
        self, kind: str, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Log a warning the first time in this process, for this kind; INFO afterwards."""
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, text, *args, extra=extra)

    def warn_streamed(self, shard: ShardURL, reason: str, extra: Mapping[str, object]) -> None:
        """Say that a shard finds no room: a warning once per job and node, else at INFO."""
        text = "%s is streamed, not cached: %s"
        if "full" not in self._warned:
            self._warned.add("full")
            self.counters.flush()  # what was streamed before this
            if notices.claim(self.home.node, self._job):
                config = self._config
                most = "" if config.max_size is None else f"max_size {config.max_size}, "
                logger.warning(
                    "%s is full (%smin_free %s): shards that find no room are streamed each time "
                    "they are read, the first is %s. Raise max_size or free the disk to cache "
                    "them. This is said once per job; `shardcache stats` counts them.",
                    *(config.dir, most, config.min_free, shard),
                    extra=extra,
                )
                return
        logger.info(text, shard, reason, extra=extra)

    def touch(self, opened: Opened) -> None:
        """Note a use of an entry, on its first use here and then at most every interval."""
        now, directory = clock.monotonic(), opened.directory
        last = self._touched.get(directory)
        if now >= self.clean_due:
            self.clean_if_due()
        if last is None or now - last >= self._config.touch_interval:
            self._touched[directory] = now
            self.tier_of(directory).store.touch(directory, clock.time())

    def clean_if_due(self) -> None:
        """Have the cache cleaned in the background if that is due; see `space.clean`."""
        if self._is_well:
            for housekeeper in self._housekeepers:
                housekeeper.check()
            self.clean_due = min((one.due for one in self._housekeepers), default=0.0)

    def write_back(self, shard: ShardURL, path: str, *, wait: bool) -> None:
        """Copy a shard that was fetched to the upstreams that are to have it.

        Without ``wait`` in a thread of its own, which a reader is not to wait for.
        """

        if not self.origins.writes_back:
            return
        data = Path(path)

        def copy() -> None:
            try:
                sidecar = Entry.at(data.parent).metadata().encode()
                self.origins.write_back(shard, data, sidecar)
            except (OSError, DamagedError) as exn:  # it was evicted
                logger.info("%s: not copied to an upstream: %s", shard, exn)

        if wait:
            copy()
            return
        self._copying = [thread for thread in self._copying if thread.is_alive()]
        try:
            self._copying.append(threads.start(copy, "shardcache-copy"))
        except RuntimeError as exn:  # a limit of processes
            logger.info("%s: not copied to an upstream: %s", shard, exn)

    def _count_eviction(self, removal: Removal) -> None:
        size = removal.entries[0].size
        self.counters.add({f"evicted_{removal.reason}": 1, "bytes_evicted": size})

    # -- a failing disk ----------------------------------------------------------

    @property
    def _is_well(self) -> bool:
        """Whether the disk is not left alone since it failed."""
        return self.reading.closed and self.writing.closed

    def disk_failed(self, breaker: Breaker, exn: OSError) -> None:
        """Count a fault, if it is one of the disk; after too many it is left alone for a while."""
        # Of what is read-only one is enough.
        if is_disk_fault(exn) and breaker.failed(at_once=exn.errno == errno.EROFS):
            self.warn(
                fault_kind(exn),
                "%s: %s. It is not %s for %s, then tried again; shards are streamed meanwhile.",
                self._config.dir,
                exn.strerror or exn,
                "written" if breaker is self.writing else "read",
                format_duration(breaker.left),
            )

    # -- ending ------------------------------------------------------------------

    def close(self) -> None:
        """End the session and the fetches that nobody reads; with its next use all begins anew."""
        self._end_housekeeping()
        if self.ready is not None:
            self.ready = None
            self.fetchings.close()
            end = clock.monotonic() + LAST_COPIES
            for thread in self._copying:
                thread.join(max(0.0, end - clock.monotonic()))
        self.end()

    def end(self) -> None:
        """Write what was counted, end the session, and say what this process has done."""
        self.counters.flush()
        for tier in self.tiers:
            tier.end_session()
        counted = self.counters.snapshot()
        found, self._told = summed([Sample(0, 0, NO_RANK, counted - self._told)]), counted
        if found.opens:
            extra = {"event": "ended", "dir": str(self._config.dir), "opens": found.opens}
            extra |= {"hits": found.hits, "bypassed": found.bypassed}
            extra |= {"bytes_saved": found.bytes_saved}
            logger.info("%s: this process had %r", self._config.dir, found, extra=extra)
        if self.home.made and (streamed := notices.withdraw(self.home.node, self._job)):
            shards, size = streamed
            text = "%s: this job streamed %d shards without room, %s, on this node"
            logger.info(text, self._config.dir, shards, format_bytes(size))

    def _end_housekeeping(self) -> None:
        for housekeeper in self._housekeepers:
            housekeeper.close()
        self._housekeepers = []


#: Those of this process, for its end.
_all: weakref.WeakSet[Process] = weakref.WeakSet()


def _end_all() -> None:
    for process in list(_all):
        process.end()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_all.clear)


class Processes:
    """The `Process` of whoever asks: one for all threads, none that came over a fork.

    Without a lock: a fork could leave it held. Arguments as for `Process`.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        self._parts = config, ranks, started
        self._made: dict[int, Process] = {}

    def here(self) -> Process:
        """The calling process's own, made if need be."""
        pid = os.getpid()
        process = self._made.get(pid)
        if process is None:
            process = self._made.setdefault(pid, Process(*self._parts))
            for other in [p for p in list(self._made) if p != pid]:
                self._made.pop(other, None)  # the parent's; copies of its sockets go with it
        return process

    def made(self) -> Process | None:
        """The calling process's own, if it was made."""
        return self._made.get(os.getpid())
