"""`ProcessCache`: a cache as one process uses it.

It opens entries that are cached (`lookup`), and downloads those that are not (`fetch`, or `join` in
a background thread). A forked child begins anew, with connections and locks of its own.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache import clock, threads
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.faults import fault_kind, ignoring, os_error
from shardcache.layout import Layout
from shardcache.locks.notices import Notices, log_unusable
from shardcache.ranks import RUN_VARIABLE, Ranks
from shardcache.stats.counters import Counters
from shardcache.stats.summary import stats_of
from shardcache.store.directory import DamagedError
from shardcache.store.disk import Disk
from shardcache.store.entry import Entry, Opened, Store
from shardcache.store.root import UnusableError, unusable
from shardcache.urls import ShardURL, advise_scheme

if TYPE_CHECKING:
    from shardcache.download.download import Download, Result
    from shardcache.space.clean import Housekeeper
    from shardcache.space.tiers import Directories, Tier

logger = logging.getLogger(__name__)

#: Seconds that closing waits for copies to upstreams, enough for a shard or two to a NAS. An
#: upstream that hangs must not delay the end of a job; the next job uses the origin instead.
LAST_COPIES = 5.0
#: Seconds between two records of a last use by one process. A hit must not write to the disk each
#: time, and with leases an entry may be evicted an hour (`IDLE_GRACE`) after the last record.
_TOUCH_INTERVAL = 600.0


class ProcessCache:
    """A cache as one process uses it. Safe to share between its threads, and across forks.

    Args:
        config: the options of the cache.
        ranks: the job and rank of this process.
        started: when the job began to use the cache, for the session; None for a command.

    Attributes:
        tiers: the tiers, fastest first; the last one is ``dir``, which holds the locks.
        directories: the `Directories` that were found, or None until `prepare` has made them.
        disk: counts faults of the disk, and pauses its use.
        engine: the connections, retries and counters that all transfers share.
        origins, counters, notices: the origins, counters and warnings of this process.
        downloads: the downloads of this process.
        clean_due: when to call `clean_if_due` again, on the monotonic clock.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        self.config = config
        self._ranks = ranks
        self._started = started
        # Without a launcher, the processes of a job have copies of one `Cache`, which began at the
        # same time, so that time identifies the job.
        was_launched = ranks.source != "none"
        by_launcher = "local" if was_launched else f"{started or 0.0:.6f}"
        self._job = ranks.job or os.environ.get(RUN_VARIABLE) or by_launcher
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Make the parts that belong to a process. A forked child calls this again."""
        # Imported here, because these modules would slow `import shardcache`.
        from shardcache.download.download import Downloads
        from shardcache.download.pool import Connections
        from shardcache.download.transfer import Engine
        from shardcache.locks.downloaders import Downloaders
        from shardcache.origins.resolve import Origins
        from shardcache.origins.retry import RetryPolicy
        from shardcache.space.tiers import Tier

        config, ranks = self.config, self._ranks
        self._lock = threading.Lock()  # held while the directories are made
        self.notices = Notices(self._job, self._node_of_session)
        self.disk = Disk(config, self.notices)
        self.counters = Counters(lambda: self.home.node, ranks, lambda: self.disk.is_well)
        parts = ranks, self._started, self.notices, self.counters, config.dir
        self.tiers = [Tier(each, *parts) for each in config.by_tier()]
        self.origins = Origins(config, self.notices.is_new)
        downloaders = Downloaders(lambda: self.home.node)
        self.engine = Engine(
            config,
            RetryPolicy(config.attempts, config.deadline, config.patience),
            self.counters,
            Connections(config.connections, config.part_size, downloaders),
            self.origins,
            self.notices,
        )
        self.downloads = Downloads()
        self.directories: Directories | None = None
        self._housekeepers: list[Housekeeper] = []
        self.clean_due = 0.0
        self._touched: dict[str, float] = {}
        self._copying: list[threading.Thread] = []
        self._logged: Counter[str] = Counter()  # the counts that `end` has already logged

    # -- directories -------------------------------------------------------------

    @property
    def home(self) -> Tier:
        """The last tier, which all `Directories` include."""
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

    def prepare(self) -> Directories:
        """Return the directories; the first call makes them.

        Raises:
            ConfigError: the directory must not be used as a cache; without ``strict``, this is an
                UnusableError.
            OSError: the directory cannot be created or written; with ``strict`` only.
        """
        if (found := self.directories) is not None:
            return found
        with self._lock:
            if self.directories is None:
                self.directories = self._make_directories(self.tiers)
            return self.directories

    def check(self) -> Directories:
        """Return the directories; make them again if one of them was replaced.

        A disk may be unmounted, mounted again or emptied while a job runs. Only misses need this
        check, because a shard whose directory is gone is a miss.

        Raises:
            OSError: the directory cannot be created again, or must not be used.
        """
        found = self.prepare()
        if self._changed_tiers():
            with self._lock:
                if changed := self._changed_tiers():  # unless another thread made them already
                    self.directories = self._make_directories(changed)
                found = self.directories or found
        return found

    def _changed_tiers(self) -> list[Tier]:
        """Return the tiers whose directory was replaced; the last one also if it was never made."""
        return [t for t in self.tiers if (t.made or t is self.home) and t.changed()]

    def _make_directories(self, tiers: list[Tier]) -> Directories:
        """Create the directories of these tiers, and return `Directories` of all usable tiers."""
        from shardcache.space.clean import Housekeeper
        from shardcache.space.tiers import Directories

        for tier in tiers:
            self._make(tier)
        usable = [tier for tier in self.tiers if tier.made or tier is self.home]
        self._end_housekeeping()
        self._housekeepers = [Housekeeper(tier) for tier in usable]
        self.clean_due = 0.0
        self._touched.clear()
        # Child processes of multiprocessing end without running atexit handlers.
        if self.directories is None and (util := sys.modules.get("multiprocessing.util")):
            util.Finalize(None, _end_all, exitpriority=0)
        return Directories(usable, self._ranks, self.disk, self.notices)

    def _make(self, tier: Tier) -> None:
        path, is_first = tier.config.dir, self.directories is None
        if tier.made and not is_first:
            text = "%s is gone or was replaced (unmounted?); creating it again"
            self.notices.warn(f"root of {path}", text, path)
        try:
            tier.make()
        except (os_error(), ConfigError) as exn:
            if self.config.strict:
                raise
            reason = exn.message if isinstance(exn, ConfigError) else exn.strerror or exn
            if tier is not self.home:
                text = "the tier %s cannot be used (%s); shards go to the next one"
                self.notices.warn(f"tier {path}", text, path, reason)
            elif isinstance(exn, ConfigError):
                # The directory may belong to another user now, so its entries may not be read.
                self.disk.reading.failed(at_once=True)
                self.disk.writing.failed(at_once=True)
                log_unusable(exn, path, self._ranks)
                raise UnusableError(exn.message) from exn
            elif not is_first:
                raise
            else:
                self.disk.writing.failed(at_once=True)
                self.notices.skip(fault_kind(exn))  # later attempts fail in the same way
                log_unusable(unusable(path, exn), path, self._ranks)

    def _node_of_session(self) -> Layout:
        """Return the node's namespace, after this process has begun its session there.

        A note stays only as long as there are sessions that began before it.
        """
        with ignoring(ConfigError, OSError):
            self.prepare()
        return self.home.node

    def evict_lru(self) -> None:
        """Follow the policy ``lru`` in place of ``working-set`` from now on.

        Random access calls this: the shards that leave its window are the best to evict.
        """
        for tier in self.tiers:
            if tier.config.policy == "working-set":
                tier.evict_lru()

    # -- shards ------------------------------------------------------------------

    def lookup(
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
        disk = self.disk
        disk.check(disk.reading, insist=insist)
        directories = self.prepare()
        try:
            if not disk.reading.closed:
                directories = self.check()  # another user may own the directory now
            opened = directories.lookup(shard, outdated)
        except os_error() as exn:
            disk.failed(disk.reading, exn)
            raise
        if opened is not None and disk.reading.faults:  # opening does not prove that it is readable
            with ignoring(OSError):  # the stream gets the same error, and falls back
                os.pread(opened.fd, 1, 0)
                disk.reading.succeeded()
        return opened

    def obtain(self, download: Download) -> Result:
        """Return the shard's entry, which the calling thread downloads if necessary.

        The caller needs a local file, so the disk is used even while it is paused after faults. The
        caller must close the entry. This does not count as an open.

        Raises:
            The errors of `Cache.open` with ``strict``.
        """
        from shardcache.download.download import Result

        shard = download.shard
        self.refuse_in_place(shard)
        opened = self.lookup(shard, download.outdated, insist=True)
        result = None if opened is None else Result(opened, "hit")
        if result is None:
            fetch = partial(self.fetch, download, insist=True)
            try:  # in a thread in which no signal handler can raise
                main = threads.is_main()
                result = threads.call(fetch, None, "shardcache-fetch") if main else fetch()
            except BaseException:
                download.cancel()
                raise
            assert result is not None  # only a download ahead gives way
        self.touch(result.opened)
        facts = {"event": result.outcome, "shard": str(shard)}
        logger.debug("%s: %s", shard, result.outcome, extra=facts)
        return result

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
            result = self.fetch(download)
        except BaseException as exn:  # noqa: BLE001 - its readers raise it
            if not download.end(None, exn):
                logger.info("%s: not downloaded in the background: %s", download.shard, exn)
        else:
            download.end(result)

    def fetch(self, download: Download, *, insist: bool = False) -> Result | None:
        """Fetch a shard in the calling thread, return its entry, and count the downloaded bytes.

        This is the only loop over attempts at a shard. `download.fetch.Recovery` ends it.

        Args:
            download: the worker's download, or one that no other thread shares.
            insist: use the disk even while it is paused, and wait for copies to upstreams.

        Returns:
            The open entry, or None if a download ahead gave way.

        Raises:
            PausedError: the disk is paused after faults.
            The errors of `download.fetch.fetch`.
        """
        from shardcache.download.fetch import Recovery, fetch

        started, writing = clock.monotonic(), self.disk.writing
        if started >= self.clean_due:
            self.clean_if_due()
        self.disk.check(writing, insist=insist)
        result, recovery = None, Recovery(self.engine, download)
        try:
            while True:
                directories = self.check()
                try:
                    result = fetch(directories, self.engine, download, recovery)
                    break
                except Exception as exn:
                    unmounted = bool(self._changed_tiers())
                    if not recovery.recover(exn, directories, unmounted=unmounted):
                        raise
        except os_error() as exn:
            self.disk.failed(writing, exn)
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
            if writing.faults:
                writing.succeeded()
            self._write_back(download.shard, result.opened.path, wait=insist)
        return result

    def touch(self, opened: Opened) -> None:
        """Record that an entry is used: on first use by this process, then at intervals."""
        now, directory = clock.monotonic(), opened.directory
        last = self._touched.get(directory)
        if now >= self.clean_due:
            self.clean_if_due()
        if last is None or now - last >= _TOUCH_INTERVAL:
            self._touched[directory] = now
            self.tier_of(directory).store.touch(directory, clock.time())

    def clean_if_due(self) -> None:
        """Start a cleaning of the cache in the background if one is due."""
        if self.disk.is_well:
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

    # -- files that are not cached -------------------------------------------------

    def is_in_place(self, shard: ShardURL) -> bool:
        """Return whether a shard is a local file that is read in place and not cached."""
        return shard.is_local and not self.config.cache_local

    def refuse_in_place(self, shard: ShardURL) -> None:
        """Raise ConfigError for a shard that is read in place."""
        if self.is_in_place(shard):
            raise ConfigError(
                f"{shard.local_path} is opened where it is and not cached. "
                f"{advise_scheme(shard, 'Set cache_local if it lies on a slow mount.')}",
                url=str(shard),
            )

    # -- ending ------------------------------------------------------------------

    def close(self) -> None:
        """End the session, and cancel downloads without readers. The next use begins another."""
        self._end_housekeeping()
        if self.directories is not None:
            self.directories = None
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


#: All `ProcessCache` objects of this process: it ends them when it exits, and a forked child begins
#: them anew.
_all: weakref.WeakSet[ProcessCache] = weakref.WeakSet()


def _end_all() -> None:
    for cache in list(_all):
        cache.end()


def _begin_all() -> None:
    for cache in list(_all):
        cache._begin()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_begin_all)
