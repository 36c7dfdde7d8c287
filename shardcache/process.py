"""The parts of a cache that belong to one process: tiers, clients, connections, downloads.

A `Process` is made on first use and is complete from then on; a forked child makes its own. The
directories, session and locks are a separate value, the `Site`. The first open makes the site, and
if a directory is unmounted or emptied, a new site replaces it. Commands that only inspect a cache
make no site. A tier is one directory of the cache, such as a RAM disk in front of an SSD.
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
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache import clock, threads
from shardcache.config import Config
from shardcache.errors import ConfigError, is_local_error
from shardcache.files import Breaker, fault_kind, ignoring, is_disk_fault, os_error
from shardcache.locks.sessions import leave_note
from shardcache.ranks import RUN_VARIABLE, Ranks
from shardcache.space.tiers import Tier
from shardcache.stats.counters import Counters
from shardcache.stats.summary import stats_of
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry, Opened, Store
from shardcache.store.root import unusable
from shardcache.units import format_duration
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.download.acquire import Site
    from shardcache.download.download import Download, Result
    from shardcache.space.clean import Housekeeper
    from shardcache.space.eviction import Removal

logger = logging.getLogger(__name__)

#: Seconds that closing waits for copies to upstreams, enough for a shard or two to a NAS. An
#: upstream that hangs must not delay the end of a job; the next job uses the origin instead.
LAST_COPIES = 5.0


#: The variable that names the node and a directory of which a process has logged that it cannot be
#: used. Forked and spawned children inherit it.
_LOGGED = "_SHARDCACHE_UNUSABLE"


class PausedError(OSError):
    """The disk has failed, and is not used until a pause of a minute is over."""


class UnusableError(ConfigError):
    """The directory must not be used. Shards are streamed."""


def log_unusable(error: ConfigError, directory: Path, ranks: Ranks) -> None:
    """Log that nothing will be cached: as an error once per job and node, else at INFO.

    No file on the node can be the memory of the job, because the directory cannot be used.
    """
    stated = f"{os.uname().nodename}:{directory}"
    is_first = ranks.local_rank in (None, 0) and os.environ.get(_LOGGED) != stated
    os.environ[_LOGGED] = stated
    text = "no shard will be cached, and every epoch streams all of them: %s"
    logger.log(logging.ERROR if is_first else logging.INFO, text, error.message)


class Process:
    """The parts of a cache that belong to one process. Safe to share between its threads.

    Args:
        config: the options of the cache.
        ranks: the job and rank of this process.
        started: when the job began to use the cache, for the session; None for a command.

    Attributes:
        tiers: the tiers, fastest first; the last one is ``dir``, which holds the locks.
        reading, writing: breakers, which count faults of the disk and pause its use.
        engine: the connections, retries and counters that all transfers share.
        made_site: the `Site`, or None until it is made.
        clean_due: when to call `clean_if_due` again, on the monotonic clock.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        # Imported here, because these modules would slow `import shardcache`.
        from shardcache.download.download import Downloads
        from shardcache.download.pool import Connections
        from shardcache.download.transfer import Engine
        from shardcache.locks.downloaders import Downloaders
        from shardcache.origins.resolve import Origins
        from shardcache.origins.retry import RetryPolicy

        self.config = config
        self._ranks = ranks
        self._lock = threading.Lock()  # held while the site is made
        self._warned: set[str] = set()
        parts = ranks, started, self.warn, self._count_eviction
        self.tiers = [Tier(each, *parts) for each in config.by_tier()]
        self.reading = Breaker()
        self.writing = Breaker()
        database = (lambda: self.home.node) if config.stats else None
        self.counters = Counters(database, ranks, lambda: self._is_well)
        self.origins = Origins(config, self.is_new)
        downloaders = Downloaders(lambda: self.home.node)
        self.engine = Engine(
            RetryPolicy(config.attempts, config.deadline, config.patience),
            self.counters,
            Connections(config.connections, config.part_size, downloaders),
        )
        self.downloads = Downloads()
        self.made_site: Site | None = None
        self._housekeepers: list[Housekeeper] = []
        self.clean_due = 0.0
        self._touched: dict[str, float] = {}
        self._copying: list[threading.Thread] = []
        self._logged: Counter[str] = Counter()  # the counts that `end` has already logged
        # Without a launcher, the processes of a job have copies of one `Cache`, which began at the
        # same time, so that time identifies the job.
        was_launched = ranks.source != "none"
        by_launcher = "local" if was_launched else f"{started or 0.0:.6f}"
        self._job = ranks.job or os.environ.get(RUN_VARIABLE) or by_launcher
        _all.add(self)
        # Child processes of multiprocessing end without running atexit handlers.
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util.Finalize(None, _end_all, exitpriority=0)

    # -- tiers -------------------------------------------------------------------

    @property
    def home(self) -> Tier:
        """The last tier, which every site includes."""
        return self.tiers[-1]

    @property
    def present(self) -> list[Tier]:
        """The tiers whose directory holds a cache, and always the last tier.

        Raises:
            ConfigError: a directory must not be used as a cache.
        """
        for tier in self.tiers:
            tier.check()
        return [tier for tier in self.tiers if tier.present or tier is self.home]

    def stores(self) -> list[Store]:
        """Return the stores of all namespaces of all tiers."""
        return [store for tier in self.present for store in tier.stores()]

    def tier_of(self, directory: str) -> Tier:
        """Return the tier that contains an entry's directory; the last tier if none does."""
        return next((tier for tier in self.tiers if tier.owns(directory)), self.home)

    # -- directories -------------------------------------------------------------

    def site(self) -> Site:
        """Return the site; the first call makes it and the directories.

        Raises:
            ConfigError: the directory must not be used as a cache; without ``strict``, this is an
                UnusableError.
            OSError: the directory cannot be created or written; with ``strict`` only.
        """
        if self.made_site is None:
            with self._lock:
                if self.made_site is None:
                    self.made_site = self._make_site(self.tiers)
        return self.made_site

    def evict_lru(self) -> None:
        """Follow the policy ``lru`` in place of ``working-set`` from now on.

        Random access calls this: the shards that leave its window are the best to evict.
        """
        if self.config.policy == "working-set":
            with self._lock:
                self.config = self.config.replace(policy="lru")
                if self.made_site is not None:
                    self.made_site = replace(self.made_site, config=self.config)

    def check_root(self) -> Site:
        """Return the site, or a new one if the directory of a tier was replaced.

        A disk may be unmounted, mounted again or emptied while a job runs. Only misses need this
        check, because a shard whose directory is gone is a miss.

        Raises:
            OSError: the directory cannot be created again, or must not be used.
        """
        site = self.site()
        if self._changed_tiers():
            with self._lock:
                if changed := self._changed_tiers():  # unless another thread made the site already
                    self.made_site = self._make_site(changed)
                site = self.made_site or site
        return site

    def _changed_tiers(self) -> list[Tier]:
        """Return the tiers whose directory was replaced; the last one also if it was never made."""
        return [t for t in self.tiers if (t.made or t is self.home) and t.changed()]

    def _make_site(self, tiers: list[Tier]) -> Site:
        """Create the directories of these tiers, and return a `Site` with all usable tiers."""
        from shardcache.download.acquire import Site
        from shardcache.space.clean import Housekeeper

        for tier in tiers:
            self._make(tier)
        usable = [tier for tier in self.tiers if tier.made or tier is self.home]
        self._end_housekeeping()
        self._housekeepers = [Housekeeper(tier) for tier in usable]
        self.clean_due = 0.0
        self._touched.clear()
        return Site(
            usable,
            self.engine,
            self.origins,
            self.config,
            self._ranks,
            on_read_error=lambda exn: self.disk_failed(self.reading, exn),
            warn=self.warn,
        )

    def _make(self, tier: Tier) -> None:
        path, is_first = tier.config.dir, self.made_site is None
        if tier.made and not is_first:
            text = "%s is gone or was replaced (unmounted?); creating it again"
            self.warn(f"root of {path}", text, path)
        try:
            tier.make()
        except (os_error(), ConfigError) as exn:
            if self.config.strict:
                raise
            reason = exn.message if isinstance(exn, ConfigError) else exn.strerror or exn
            if tier is not self.home:
                text = "the tier %s cannot be used (%s); shards go to the next one"
                self.warn(f"tier {path}", text, path, reason)
            elif isinstance(exn, ConfigError):
                # The directory may belong to another user now, so its entries may not be read.
                self.reading.failed(at_once=True)
                self.writing.failed(at_once=True)
                log_unusable(exn, path, self._ranks)
                raise UnusableError(exn.message) from exn
            elif not is_first:
                raise
            else:
                self.writing.failed(at_once=True)
                self._warned.add(fault_kind(exn))  # later attempts fail in the same way
                log_unusable(unusable(path, exn), path, self._ranks)

    # -- shards ------------------------------------------------------------------

    def find(
        self, shard: ShardURL, outdated: frozenset[str] = frozenset(), *, insist: bool = False
    ) -> Opened | None:
        """Open the shard's entry, or return None if it is not cached.

        Args:
            shard: the shard to look up.
            outdated: versions that must not be opened.
            insist: use the disk even while it is paused, because the caller needs a local file.

        Raises:
            PausedError: the disk is paused after faults.
            UnusableError: the directory must not be used as a cache.
            OSError: reading the disk fails.
        """
        self._gate(self.reading, insist)
        site = self.site()
        try:
            if not self.reading.closed:
                site = self.check_root()  # another user may own the directory now
            opened = site.find(shard, outdated)
        except os_error() as exn:
            self.disk_failed(self.reading, exn)
            raise
        if opened is not None and self.reading.faults:  # opening does not prove that it is readable
            with ignoring(OSError):  # the stream gets the same error, and falls back
                os.pread(opened.fd, 1, 0)
                self.reading.succeeded()
        return opened

    def join(self, shard: ShardURL, **options: bool) -> tuple[Download, bool]:
        """Call `Downloads.join`, and start the worker if the download has none.

        Raises:
            OSError: the process cannot start a thread.
        """
        download, is_new = self.downloads.join(shard, **options)
        # An older download may still lack its worker, for ever if a signal handler raised here.
        if not download.is_claimed:
            # Not under the lock of the downloads: `start` waits for the thread, which may take it.
            try:
                threads.start(partial(self._work, download), f"shardcache-{shard.key[:8]}-fetch")
            except RuntimeError as exn:
                error = OSError(errno.EAGAIN, str(exn))
                download.end(None, error)
                download.leave()
                raise error from exn
            except BaseException:  # a signal handler raised
                download.leave()
                raise
        return download, is_new

    def _work(self, download: Download) -> None:
        """Run a download in its worker's thread, and report its result or error to the readers."""
        if not download.claim():
            return
        try:
            result = self.run(download)
        except BaseException as exn:  # noqa: BLE001 - its readers raise it
            if not download.end(None, exn):
                logger.info("%s: not downloaded in the background: %s", download.shard, exn)
        else:
            download.end(result)

    def run(self, download: Download, *, insist: bool = False) -> Result | None:
        """Run `acquire` in the calling thread, return its result, and count the downloaded bytes.

        Args:
            download: the worker's download, or one that no other thread shares.
            insist: use the disk even while it is paused, and wait for copies to upstreams.

        Raises:
            PausedError: the disk is paused after faults.
            The errors of `acquire`.
        """
        from shardcache.download.acquire import acquire

        started = clock.monotonic()
        if started >= self.clean_due:
            self.clean_if_due()
        self._gate(self.writing, insist)
        result = None
        try:
            site = self.check_root()
            try:
                result = acquire(site, download)
            except os_error() as exn:  # try once more if the disk was unmounted during the call
                if not (is_local_error(exn) and self._changed_tiers()):
                    raise
                result = acquire(self.check_root(), download)
        except os_error() as exn:
            self.disk_failed(self.writing, exn)
            raise
        finally:
            is_fetched = result is not None and result.outcome == "fetched"
            progress = download.progress()
            if is_fetched or progress.received:
                self.counters.fetched(
                    download.shard,
                    size=progress.size or (progress.written if is_fetched else 0),
                    seconds=clock.monotonic() - started,
                    retries=progress.retries,
                    upstream=download.is_upstream,
                    done=is_fetched,
                )
        if result is not None and is_fetched:
            if self.writing.faults:
                self.writing.succeeded()
            self._write_back(download.shard, result.opened.path, wait=insist)
        return result

    def _gate(self, breaker: Breaker, insist: bool) -> None:
        """Raise PausedError while the disk is paused, unless ``insist`` or ``strict`` is set."""
        if breaker.left and not (insist or self.config.strict):
            raise PausedError(errno.EIO, f"the disk failed; next attempt in {breaker.left:.0f} s")

    # -- notes and warnings -------------------------------------------------------

    def warn(
        self, kind: str, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Log at WARNING the first time that this process reports ``kind``, then at INFO."""
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, text, *args, extra=extra)

    def warn_streamed(self, shard: ShardURL, reason: str, extra: Mapping[str, object]) -> None:
        """Log that a shard finds no room: at WARNING once per job and node, otherwise at INFO."""
        text = "%s is streamed, not cached: %s"
        if not self.is_new("full"):
            logger.info(text, shard, reason, extra=extra)
            return
        config = self.config
        most = "" if config.max_size is None else f"max_size {config.max_size}, "
        logger.warning(
            "%s is full (%smin_free %s): shards that find no room are streamed each time they are "
            "read; the first is %s. Raise max_size, lower min_free, or free the disk. This is "
            "logged once per job; `shardcache stats` counts them.",
            *(config.dir, most, config.min_free, shard),
            extra=extra,
        )

    def is_new(self, kind: str) -> bool:
        """Return whether this is the first call with ``kind`` in this job and on this node."""
        if kind in self._warned:
            return False
        self._warned.add(kind)
        with ignoring(ConfigError, OSError):
            self.site()  # a note stays only as long as there are sessions that began before it
        return leave_note(self.home.node, f"{self._job}-{kind}")

    def touch(self, opened: Opened) -> None:
        """Record that an entry is used: on first use by this process, then per touch interval."""
        now, directory = clock.monotonic(), opened.directory
        last = self._touched.get(directory)
        if now >= self.clean_due:
            self.clean_if_due()
        if last is None or now - last >= self.config.touch_interval:
            self._touched[directory] = now
            self.tier_of(directory).store.touch(directory, clock.time())

    def clean_if_due(self) -> None:
        """Start a cleaning of the cache in the background if one is due."""
        if self._is_well:
            for housekeeper in self._housekeepers:
                housekeeper.check()
            self.clean_due = min((one.due for one in self._housekeepers), default=0.0)

    def _write_back(self, shard: ShardURL, path: str, *, wait: bool) -> None:
        """Copy a downloaded shard to the upstreams that have ``write_back`` set.

        Without ``wait``, a thread makes the copies, so that no reader waits for them.
        """
        if not any(upstream.write_back for upstream in self.config.upstreams):
            return
        data = Path(path)

        def copy() -> None:
            try:
                sidecar = Entry.at(data.parent).metadata().encode()
                self.origins.write_back(shard, data, sidecar)
            except (os_error(), DamagedError) as exn:  # the entry was evicted
                logger.info("%s: not copied to an upstream: %s", shard, exn)

        if wait:
            copy()
            return
        self._copying = [thread for thread in self._copying if thread.is_alive()]
        try:
            self._copying.append(threads.start(copy, "shardcache-copy"))
        except RuntimeError as exn:  # the process cannot start a thread
            logger.info("%s: not copied to an upstream: %s", shard, exn)

    def _count_eviction(self, removal: Removal) -> None:
        size = removal.entries[0].size
        self.counters.add({f"evicted_{removal.reason}": 1, "bytes_evicted": size})

    # -- a failing disk ----------------------------------------------------------

    @property
    def _is_well(self) -> bool:
        """Whether the disk is used for reading and writing, and not paused after faults."""
        return self.reading.closed and self.writing.closed

    def disk_failed(self, breaker: Breaker, exn: OSError) -> None:
        """Count a fault of the disk. After three in a row, the disk is paused for a minute."""
        # A read-only disk stays read-only, so a single EROFS is enough.
        if is_disk_fault(exn) and breaker.failed(at_once=exn.errno == errno.EROFS):
            self.warn(
                fault_kind(exn),
                "%s: %s. It will not be %s for %s; until then, shards are streamed.",
                self.config.dir,
                exn.strerror or exn,
                "written" if breaker is self.writing else "read",
                format_duration(breaker.left),
            )

    # -- ending ------------------------------------------------------------------

    def close(self) -> None:
        """End the session, and cancel downloads without readers. The next use makes a new site."""
        self._end_housekeeping()
        if self.made_site is not None:
            self.made_site = None
            self.downloads.close()
            end = clock.monotonic() + LAST_COPIES
            for thread in self._copying:
                thread.join(max(0.0, end - clock.monotonic()))
        self.end()

    def end(self) -> None:
        """Write the counters, end the session, and log a summary of what this process has read."""
        self.counters.flush()
        for tier in self.tiers:
            tier.end_session()
        counted = self.counters.snapshot()
        found, self._logged = stats_of(counted - self._logged), counted
        if found.opens:
            extra = {"event": "ended", "dir": str(self.config.dir), "opens": found.opens}
            extra |= {"hits": found.hits, "bypassed": found.bypassed}
            extra |= {"bytes_saved": found.bytes_saved}
            logger.info("%s: this process had %r", self.config.dir, found, extra=extra)

    def _end_housekeeping(self) -> None:
        for housekeeper in self._housekeepers:
            housekeeper.close()
        self._housekeepers = []


#: All `Process` objects of this process, to end them when it exits.
_all: weakref.WeakSet[Process] = weakref.WeakSet()


def _end_all() -> None:
    for process in list(_all):
        process.end()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_all.clear)


class Processes:
    """Gives all threads of a process the same `Process`, and a forked child one of its own.

    Takes no lock, because a fork could copy the lock while it is held. Arguments as for `Process`.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        self._parts = config, ranks, started
        self._made: dict[int, Process] = {}

    def here(self) -> Process:
        """Return the `Process` of the calling process; the first call in a process makes it."""
        pid = os.getpid()
        process = self._made.get(pid)
        if process is None:
            process = self._made.setdefault(pid, Process(*self._parts))
            for other in [p for p in list(self._made) if p != pid]:
                self._made.pop(other, None)  # the parent's `Process`, and copies of its sockets
        return process

    def made(self) -> Process | None:
        """Return the `Process` of the calling process, or None if it was never made."""
        return self._made.get(os.getpid())
