"""The parts of a cache that belong to one process: tiers, clients, connections, downloads.

A `Process` is complete when it is made, on first use. A forked child makes its own. Directories,
session and locks are a second value, its `Site`: made on the first open, and replaced as a whole if
a directory was unmounted or emptied. Commands that only look make none.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache import clock, threads
from shardcache.config import Config
from shardcache.errors import ConfigError, is_local_error
from shardcache.files import Breaker, fault_kind, is_disk_fault
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

__all__ = ["PausedError", "Process", "Processes", "UnusableError", "log_unusable"]

logger = logging.getLogger(__name__)

#: Seconds that closing waits for copies to upstreams: a shard or two to a NAS. An upstream that
#: hangs must not delay the end of a job; the next job downloads from the origin what is not copied.
LAST_COPIES = 5.0


#: The variable that names the node and a directory of which a process has logged that it cannot be
#: used. Forked and spawned children inherit it.
_LOGGED = "_SHARDCACHE_UNUSABLE"


class PausedError(OSError):
    """The disk failed a moment ago and is not tried again yet."""


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
    """The parts of a cache that belong to the process that made this; safe between its threads.

    Args:
        config: options.
        ranks: which process of which job this is.
        started: when the job began to use the cache, for the session; None for a command.

    Attributes:
        tiers: fastest first; the last one is ``dir``, where locks are.
        reading, writing: count the disk's faults.
        engine: what transfers share: connections and retries.
        made_site: the `Site`, once it is made.
        clean_due: when to call `clean_if_due` again, on the monotonic clock.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        # Not at the top: these bring filelock, and `import shardcache` stays light.
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
        self.origins = Origins(config)
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
        self._logged: Counter[str] = Counter()  # what `end` has logged
        # A job that no launcher started has one `Cache`, in copies: they know when it was made.
        was_launched = ranks.source != "none"
        by_launcher = "local" if was_launched else f"{started or 0.0:.6f}"
        self._job = ranks.job or os.environ.get(RUN_VARIABLE) or by_launcher
        _all.add(self)
        # The children of multiprocessing end without calling what atexit registered.
        if (util := sys.modules.get("multiprocessing.util")) is not None:
            util.Finalize(None, _end_all, exitpriority=0)

    # -- tiers -------------------------------------------------------------------

    @property
    def home(self) -> Tier:
        """The tier that always exists."""
        return self.tiers[-1]

    @property
    def present(self) -> list[Tier]:
        """The tiers that are caches on disk, and the last one.

        Raises:
            ConfigError: a directory must not be used.
        """
        for tier in self.tiers:
            tier.check()
        return [tier for tier in self.tiers if tier.present or tier is self.home]

    def stores(self) -> list[Store]:
        """Return every namespace of every tier."""
        return [store for tier in self.present for store in tier.stores()]

    def tier_of(self, directory: str) -> Tier:
        """Return the tier that an entry is in."""
        return next((tier for tier in self.tiers if tier.owns(directory)), self.home)

    # -- directories -------------------------------------------------------------

    def site(self) -> Site:
        """Return the site. The first call makes the directories.

        Raises:
            ConfigError: the directory must not be used; UnusableError without ``strict``.
            OSError: it cannot be made or written; with ``strict`` only.
        """
        if self.made_site is None:
            with self._lock:
                if self.made_site is None:
                    self.made_site = self._make_site(self.tiers)
        return self.made_site

    def check_root(self) -> Site:
        """Return the site, or a new one if a tier is another directory than before.

        A disk may be unmounted, mounted again or emptied while a job runs. Only misses need this: a
        shard that has vanished is a miss.

        Raises:
            OSError: the directory cannot be made again, or must not be used.
        """
        site = self.site()
        if self._changed_tiers():
            with self._lock:
                if changed := self._changed_tiers():  # another thread may have made it
                    self.made_site = self._make_site(changed)
                site = self.made_site or site
        return site

    def _changed_tiers(self) -> list[Tier]:
        """The tiers whose directory is another one; the last one also if it was never made."""
        return [t for t in self.tiers if (t.made or t is self.home) and t.changed()]

    def _make_site(self, tiers: list[Tier]) -> Site:
        """Make the directories of these tiers, and a site of all that can be used."""
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
            text = "%s is gone, or another directory than before (unmounted?); it is created again"
            self.warn(f"root of {path}", text, path)
        try:
            tier.make()
        except (OSError, ConfigError) as exn:
            if self.config.strict:
                raise
            reason = exn.message if isinstance(exn, ConfigError) else exn.strerror or exn
            if tier is not self.home:
                text = "the tier %s cannot be used (%s); shards go to the next one"
                self.warn(f"tier {path}", text, path, reason)
            elif isinstance(exn, ConfigError):
                # Such as the directory of another user: not even its entries may be read.
                self.reading.failed(at_once=True)
                self.writing.failed(at_once=True)
                log_unusable(exn, path, self._ranks)
                raise UnusableError(exn.message, dir=path) from exn
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
        """Open the shard's entry, if there is one.

        Args:
            shard: the shard to look up.
            outdated: versions that will not do.
            insist: try the disk even if it failed a moment ago, because nothing else will do.

        Raises:
            PausedError: the disk failed a moment ago.
            UnusableError: the directory must not be used.
            OSError: it fails now.
        """
        self._gate(self.reading, insist)
        site = self.site()
        try:
            if not self.reading.closed:
                site = self.check_root()  # another user may own the directory now
            opened = site.find(shard, outdated)
        except OSError as exn:
            self.disk_failed(self.reading, exn)
            raise
        if opened is not None and self.reading.faults:  # can it be read, too?
            with contextlib.suppress(OSError):  # the stream meets the error, and falls back
                os.pread(opened.fd, 1, 0)
                self.reading.succeeded()
        return opened

    def join(
        self, shard: ShardURL, *, finish: bool = False, ahead: bool = False
    ) -> tuple[Download, bool]:
        """Add a reader to the shard's download; see `Downloads.join`. Start its worker if needed.

        Raises:
            OSError: the process cannot start a thread.
        """
        download, is_new = self.downloads.join(shard, finish=finish, ahead=ahead)
        if is_new:
            # Without the lock of the downloads: starting waits for the thread, which may take it.
            try:
                threads.start(partial(self._work, download), f"shardcache-{shard.key[:8]}-fetch")
            except RuntimeError as exn:
                error = OSError(errno.EAGAIN, str(exn))
                download.end(None, error)
                download.leave()
                raise error from exn
        return download, is_new

    def _work(self, download: Download) -> None:
        """Run a shared download, in its worker's thread."""
        try:
            result = self.run(download)
        except BaseException as exn:  # noqa: BLE001 - raised by its readers
            if not download.end(None, exn):
                logger.info("%s: not fetched in the background: %s", download.shard, exn)
        else:
            download.end(result)

    def run(self, download: Download, *, insist: bool = False) -> Result | None:
        """Run a download in the calling thread; see `acquire`. Count the downloaded bytes.

        Args:
            download: the download; not in the table, or that of the worker.
            insist: try the disk even if it failed a moment ago, and wait for copies to upstreams.

        Raises:
            As `acquire`; PausedError: the disk failed a moment ago.
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
            except OSError as exn:  # the disk may have been unmounted during the call
                if not (is_local_error(exn) and self._changed_tiers()):
                    raise
                result = acquire(self.check_root(), download)
        except OSError as exn:
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
        """Raise PausedError if the disk is not to be tried yet, and the shard can be streamed."""
        if breaker.left and not (insist or self.config.strict):
            raise PausedError(errno.EIO, f"the disk failed; tried again in {breaker.left:.0f} s")

    # -- notes and warnings -------------------------------------------------------

    def warn(
        self, kind: str, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Log a warning the first time in this process, for this kind; INFO afterwards."""
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, text, *args, extra=extra)

    def warn_streamed(self, shard: ShardURL, reason: str, extra: Mapping[str, object]) -> None:
        """Log that a shard finds no room: a warning once per job and node, else at INFO."""
        text = "%s is streamed, not cached: %s"
        if not self.is_new("full"):
            logger.info(text, shard, reason, extra=extra)
            return
        config = self.config
        most = "" if config.max_size is None else f"max_size {config.max_size}, "
        logger.warning(
            "%s is full (%smin_free %s): shards that find no room are streamed each time they are "
            "read, the first is %s. Raise max_size or free the disk to cache them. This is logged "
            "once per job; `shardcache stats` counts them.",
            *(config.dir, most, config.min_free, shard),
            extra=extra,
        )

    def is_new(self, kind: str) -> bool:
        """Return whether this is the first call with this kind in the job, on this node."""
        if kind in self._warned:
            return False
        self._warned.add(kind)
        return leave_note(self.home.node, f"{self._job}-{kind}")

    def touch(self, opened: Opened) -> None:
        """Note a use of an entry, on its first use by this process and then once per interval."""
        now, directory = clock.monotonic(), opened.directory
        last = self._touched.get(directory)
        if now >= self.clean_due:
            self.clean_if_due()
        if last is None or now - last >= self.config.touch_interval:
            self._touched[directory] = now
            self.tier_of(directory).store.touch(directory, clock.time())

    def clean_if_due(self) -> None:
        """Clean the cache in the background if that is due; see `space.clean`."""
        if self._is_well:
            for housekeeper in self._housekeepers:
                housekeeper.check()
            self.clean_due = min((one.due for one in self._housekeepers), default=0.0)

    def _write_back(self, shard: ShardURL, path: str, *, wait: bool) -> None:
        """Copy a downloaded shard to the upstreams that are configured for it.

        Without ``wait``, a thread copies it, so that no reader waits.
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
        except RuntimeError as exn:  # the process cannot start a thread
            logger.info("%s: not copied to an upstream: %s", shard, exn)

    def _count_eviction(self, removal: Removal) -> None:
        size = removal.entries[0].size
        self.counters.add({f"evicted_{removal.reason}": 1, "bytes_evicted": size})

    # -- a failing disk ----------------------------------------------------------

    @property
    def _is_well(self) -> bool:
        """Whether the disk is in use, and not left alone after a fault."""
        return self.reading.closed and self.writing.closed

    def disk_failed(self, breaker: Breaker, exn: OSError) -> None:
        """Count a fault of the disk. After too many, the disk is not tried for a while."""
        # One fault is enough to know that a disk is read-only.
        if is_disk_fault(exn) and breaker.failed(at_once=exn.errno == errno.EROFS):
            self.warn(
                fault_kind(exn),
                "%s: %s. It is not %s for %s, then tried again; shards are streamed meanwhile.",
                self.config.dir,
                exn.strerror or exn,
                "written" if breaker is self.writing else "read",
                format_duration(breaker.left),
            )

    # -- ending ------------------------------------------------------------------

    def close(self) -> None:
        """End the session and the downloads that have no reader. The next use makes a new site."""
        self._end_housekeeping()
        if self.made_site is not None:
            self.made_site = None
            self.downloads.close()
            end = clock.monotonic() + LAST_COPIES
            for thread in self._copying:
                thread.join(max(0.0, end - clock.monotonic()))
        self.end()

    def end(self) -> None:
        """Write the counts, end the session, and log what this process has done."""
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


#: The objects of this process, which end with it.
_all: weakref.WeakSet[Process] = weakref.WeakSet()


def _end_all() -> None:
    for process in list(_all):
        process.end()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_all.clear)


class Processes:
    """Makes one `Process` for all threads of the calling process.

    It takes no lock, because a fork could copy one that is held. Arguments as for `Process`.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        self._parts = config, ranks, started
        self._made: dict[int, Process] = {}

    def here(self) -> Process:
        """Return the `Process` of the calling process; the first call makes it."""
        pid = os.getpid()
        process = self._made.get(pid)
        if process is None:
            process = self._made.setdefault(pid, Process(*self._parts))
            for other in [p for p in list(self._made) if p != pid]:
                self._made.pop(other, None)  # the parent's; copies of its sockets go with it
        return process

    def made(self) -> Process | None:
        """Return the `Process` of the calling process, if it was made."""
        return self._made.get(os.getpid())
