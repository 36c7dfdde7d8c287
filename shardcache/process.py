"""`ProcessCache`: a cache as one process uses it.

It opens entries that are cached (`lookup`), and downloads those that are not (`fetch`, or in a
background thread `start_download`). A forked child has its own connections and locks.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import logging
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING

from shardcache import clock, threads
from shardcache.config import Config
from shardcache.download.download import TEMPORARY, Download, Downloads, State
from shardcache.errors import ConfigError, FetchCancelledError, IntegrityError, ShardCacheError
from shardcache.faults import Disk, PausedError, fault_kind, ignoring, is_local_error, system_error
from shardcache.layout import Layout
from shardcache.notices import Notices, is_logged, log_unusable
from shardcache.ranks import RUN_VARIABLE, Ranks
from shardcache.stats.counters import Counters
from shardcache.stats.database import Sample
from shardcache.store.directory import DamagedError, data_locked_if_free
from shardcache.store.entry import Entry, OpenEntry, Store
from shardcache.store.root import UnusableError, unusable
from shardcache.urls import ShardURL, refuse_in_place

if TYPE_CHECKING:
    from shardcache.tiers import Directories, Tier

logger = logging.getLogger(__name__)

#: Seconds that the end waits for copies to upstreams, enough for a shard or two to a NAS. A
#: DataLoader kills a worker after five.
LAST_COPIES = 4.0
_COPIES = 4  #: shards that one process copies to upstreams at once
#: Seconds between two records of a last use by one process. A hit must not write to the disk each
#: time, and with leases an entry may be evicted an hour (`IDLE_GRACE`) after the last record.
_TOUCH_INTERVAL = 600.0
#: Entries whose last touch a process remembers.
_REMEMBERED = 100_000
#: Seconds to wait for a cancelled worker: it ends at once, unless it hangs in another library.
_END_TIMEOUT = 5.0
#: Seconds for which a thread that has ended a download waits for the next one.
_NEXT_DOWNLOAD = 0.1
#: Seconds until a caller that waits for a shared download notices that its own was cancelled.
_POLL = 0.1


class ProcessCache:
    """A cache as one process uses it. Safe to share between its threads, and across forks.

    ``started`` is when the job began to use the cache, for the session; None for a command.
    """

    def __init__(self, config: Config, ranks: Ranks, started: float | None) -> None:
        self.config = config
        self._ranks = ranks
        self._started = started
        self.is_job = started is not None  #: and not a command, which reports its errors itself
        # Without a launcher, the processes of a job have copies of one `Cache`, which began at the
        # same time, so that time identifies the job.
        name = f"{started or 0.0:.6f}" if ranks.launcher == "none" else "local"
        self._job = ranks.job or os.environ.get(RUN_VARIABLE) or name
        # In another thread, also while that imports: a signal handler that raises in an import
        # leaves a broken module.
        for module in ("shardcache.download.transfer", "shardcache.tiers"):
            spec = getattr(sys.modules.get(module), "__spec__", None)
            if spec is None or getattr(spec, "_initializing", False):
                threads.call(partial(importlib.import_module, module), None, "shardcache-import")
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Make the parts that belong to a process. A forked child calls this again."""
        # Imported here, because these modules would slow `import shardcache`.
        from shardcache.download.connections import Connections
        from shardcache.download.transfer import Resources
        from shardcache.origins.resolve import Origins
        from shardcache.origins.retry import RetryLimits
        from shardcache.tiers import Housekeeper, Tier

        config, ranks = self.config, self._ranks
        self._lock = threading.Lock()  # held while the directories are made
        self.notices = Notices(self._job, self._node_of_session)
        if is_logged(config.dir):
            self.notices.mute(errno.errorcode[errno.EROFS])
        self.disk = Disk(config, self.notices.warn)
        self.counters = Counters(
            lambda: self.last_tier.node, ranks, lambda: self.disk.is_well, is_job=self.is_job
        )
        parts = ranks, self._started, self.notices, self.counters, config.dir
        self.tiers = [Tier(tier_config, *parts) for tier_config in config.by_tier()]
        self.last_tier = self.tiers[-1]  #: ``dir``, which holds the locks
        self.origins = Origins(config, self.notices.is_new)
        self.resources = Resources(
            config,
            RetryLimits(config.attempts, config.deadline, config.patience),
            self.counters,
            Connections(
                config.connections, config.part_size, lambda: self.last_tier.node, self.origins
            ),
            self.origins,
            self.notices,
        )
        self.downloads = Downloads()
        self.directories: Directories | None = None  #: None until `prepare` has made them
        self._housekeeper = Housekeeper(self.tiers)
        # Threads that wait for a download, and whether they have ended.
        self._idle = deque[tuple[threads.Queue[Download], threading.Event]](maxlen=64)
        self._touched: dict[str, float] = {}
        self._to_copy: deque[Callable[[], None]] = deque()
        self._copying: set[threading.Thread] = set()
        self._logged: Counter[str] = Counter()  # the counts that `_end` has already logged

    # -- directories -------------------------------------------------------------

    @property
    def present(self) -> list[Tier]:
        """The tiers with a cache, and the last tier; ConfigError if that must not be used."""
        present = []
        for tier in self.tiers:
            with self.tolerating(tier):
                if tier.check() or tier is self.last_tier:
                    present.append(tier)
        return present

    @contextlib.contextmanager
    def tolerating(self, tier: Tier) -> Iterator[None]:
        """Let the other tiers do the work of one that fails in the body, unless it is the last."""
        try:
            yield
        except (OSError, ConfigError) as exn:
            if tier is self.last_tier or not (is_local_error(exn) or isinstance(exn, ConfigError)):
                raise
            tier.failed(exn)

    def stores(self) -> list[Store]:
        return [store for tier in self.present for store in tier.stores()]

    def tier_of(self, directory: str) -> Tier:
        """Return the tier that contains an entry's directory; the last tier if none does."""
        return next((tier for tier in self.tiers if tier.owns(directory)), self.last_tier)

    def prepare(self) -> Directories:
        """Return the directories; the first call makes them.

        Raises ConfigError if they must not be used as a cache (without ``strict``, UnusableError);
        with ``strict`` also OSError, if they cannot be written.
        """
        return self.directories or self._check()

    def _check(self) -> Directories:
        """Return the directories; make them again if one of them was replaced.

        A disk may be unmounted, mounted again or emptied while a job runs. Only misses need this
        check, because a shard whose directory is gone is a miss. Raises as `prepare`, and OSError.
        """
        directories = self.directories
        if directories is None or not directories.are_intact():
            with self._lock:
                # Maybe another thread made them already.
                if (directories := self.directories) is None or not directories.are_intact():
                    directories = self.directories = self._make_directories()
        return directories

    def _make_directories(self) -> Directories:
        """Create the directories that changed, at first all, and return those that can be used."""
        from shardcache.tiers import Directories

        # Child processes of multiprocessing end without running atexit handlers.
        if not _finalizers and (util := sys.modules.get("multiprocessing.util")):
            _finalizers.append(util.Finalize(None, _end_all, exitpriority=0))
        is_first, last = self.directories is None, self.last_tier
        for tier in self.tiers:
            if is_first or ((tier.made or tier is last) and not tier.is_intact()):
                self._make(tier)
        usable = [tier for tier in self.tiers if tier.made or tier is last]
        self._touched.clear()
        return Directories(usable, self._ranks, self.disk, self.notices)

    def _make(self, tier: Tier) -> None:
        """Create a tier's directory, or let the cache do without the tier."""
        path, is_first, was_made = tier.config.dir, self.directories is None, tier.made
        try:
            with self.tolerating(tier):
                tier.make()
                if was_made and not is_first:
                    text = "a part of %s was gone, or it was replaced (unmounted?); made again"
                    self.notices.warn(f"root of {path}", text, path)
        except (system_error(), ConfigError) as exn:
            if self.config.strict:
                raise
            if isinstance(exn, ConfigError):
                # The directory may belong to another user now, so its entries may not be read.
                self.disk.reading.failed(at_once=True)
                self.disk.writing.failed(at_once=True)
                log_unusable(exn, path, self._ranks)
                raise UnusableError(exn.message) from exn
            if not is_first:
                raise
            self.disk.writing.failed(at_once=True)
            self.notices.mute(fault_kind(exn))  # later attempts fail in the same way
            log_unusable(unusable(path, exn), path, self._ranks)

    def _node_of_session(self) -> Layout | None:
        """Return the node's namespace, with the session that keeps the notes of this process."""
        with ignoring(ConfigError, OSError):
            self.prepare()
        return self.last_tier.node if self.last_tier.made else None

    def stop_keeping_used(self) -> None:
        """From now on, let shards be evicted that running jobs have used, for random access."""
        for tier in self.tiers:
            tier.stop_keeping_used()

    # -- shards ------------------------------------------------------------------

    def lookup(
        self, shard: ShardURL, outdated: frozenset[str] = frozenset(), *, insist: bool = False
    ) -> OpenEntry | None:
        """Open the shard's entry, except ``outdated`` versions; return None if it is not cached.

        Raises PausedError while the disk is paused, unless ``insist`` is set, and as `prepare`.
        """
        disk, directories = self.disk, self.directories  # hot path: keep the calls few
        if directories is None or disk.reading.faults:
            disk.check(disk.reading, insist=insist)
            directories = self.prepare()
        try:
            if disk.reading.is_tripped:
                directories = self._check()  # another user may own the directory now
            opened = directories.lookup(shard, outdated)
        except system_error() as exn:
            disk.failed(disk.reading, exn)
            raise
        if opened is not None and disk.reading.faults:  # opening does not prove that it is readable
            with ignoring(OSError):  # the stream gets the same error, and falls back
                os.pread(opened.file.fileno(), 1, 0)
                disk.reading.succeeded()
        return opened

    def fetch(self, download: Download) -> OpenEntry:
        """Return the entry of the shard of a new download, which runs only if necessary.

        This does not count as an open. Raises the errors of `Cache.open` with ``strict``.
        """
        shard, opened = download.shard, None
        refuse_in_place(shard, self.config.cache_local)
        while opened is None:
            if (opened := self.lookup(shard, download.outdated, insist=True)) is not None:
                download.note_outcome(opened, "hit")
            elif download.file is None:
                opened = self._join(download)
            else:  # readers do not join it, because it may refuse the file
                try:
                    work = partial(self._download, download)
                    opened = threads.call(work, None, "shardcache-add")
                except BaseException:
                    download.cancel()
                    raise
        file = None if download.outcome == "imported" else download.file
        if file is not None and not opened.equals(file):
            opened.close()
            raise IntegrityError(
                f"{shard}: {file} is not imported, because the shard is cached with other bytes. "
                "If the object has changed, run `shardcache prewarm --refresh` first.",
                url=str(shard),
            )
        if download.outcome != "fetched":  # then it is new
            self.note_use(opened, clock.monotonic())
        if download.outcome in ("fetched", "coalesced"):
            self._write_back(shard, opened.path, wait=True)
        facts = {"event": download.outcome, "shard": str(shard)}
        logger.debug("%s: %s", shard, download.outcome, extra=facts)
        return opened

    def _join(self, own: Download) -> OpenEntry | None:
        """Run a download, or wait for the one that other readers share, and return the entry.

        Returns None if the shared one was of no use to this caller, so that ``own`` may run next.
        """
        download = own.join()
        try:
            # A signal handler could raise in the main thread, at any step of a download.
            if not (download.is_claimed or (threads.is_main() and self._start_worker(download))):
                self._run_worker(download)
            while not download.ended:
                download.wait(lambda: download.ended, _POLL)
                if download is not own:
                    own.check()
            opened = download.result(is_leaving=True)
            # Most downloads replace nothing, and `entry` reads the disk.
            may_be_outdated = download is not own and own.outdated
            if may_be_outdated and opened is not None and opened.entry.version in own.outdated:
                opened.close()
                opened = None
        except (FetchCancelledError, PausedError):
            if download is own:
                raise
            own.check()
            opened = None
        except BaseException:
            download.cancel_unless_shared()
            if download.state is State.CANCELLED:
                download.wait(lambda: download.ended, _END_TIMEOUT)
            raise
        finally:
            download.leave()
        return opened

    def start_download(
        self, shard: ShardURL, *, finish: bool = False, ahead: bool = False
    ) -> tuple[Download, bool]:
        """Add a reader to the shard's download; return it, and whether this call started it.

        With ``finish``, it completes even if all readers leave. With ``ahead``, the reader needs
        the shard only once it calls `Download.promote`. Raises OSError if no thread can start.
        """
        new = Download(self.downloads, shard, can_bypass=True, is_ahead=ahead)
        download = new.join(finish=finish)
        try:
            # If a signal handler raised in an earlier call, that download has no worker yet.
            # Not under the lock of the downloads: `start` waits for the thread, which may take it.
            if not (download.is_claimed or self._start_worker(download)) and download.claim():
                error = OSError(errno.EAGAIN, "the process cannot start a thread")
                download.end(None, error)
                raise error
        except BaseException:
            download.leave()
            raise
        return download, download is new

    def _start_worker(self, download: Download) -> bool:
        """Let a thread run a download. Return False if the process cannot start a thread."""
        with contextlib.suppress(IndexError):
            queue, is_over = self._idle.pop()
            queue.put(download)
            if not is_over.is_set():
                return True
        with contextlib.suppress(threads.NoThreadError):
            threads.start(partial(self._work, download), "shardcache-fetch")
            return True
        return False

    def _work(self, download: Download) -> None:
        """Run a download, and those that come soon: a thread costs as much as a small shard."""
        queue, is_over = threads.Queue[Download](), threading.Event()
        with contextlib.suppress(Empty):
            while True:
                self._run_worker(download)
                del download
                self._idle.append((queue, is_over))
                download = queue.get(_NEXT_DOWNLOAD)
        is_over.set()  # from now on, `_start_worker` starts a thread
        with contextlib.suppress(Empty):
            self._run_worker(queue.get(0))

    def _run_worker(self, download: Download) -> None:
        """Run a download as its worker, and report its result or error to the readers."""
        if not download.claim():
            return
        try:
            opened = self._download(download)
        except BaseException as exn:  # noqa: BLE001 - its readers raise it
            if not download.end(None, exn):
                logger.info("%s: not downloaded in the background: %s", download.shard, exn)
        else:
            download.end(opened)

    def _download(self, download: Download) -> OpenEntry:
        """Download a shard, return its entry like `Worker.run`, and count its bytes."""
        from shardcache.download.worker import Worker

        started, writing = clock.monotonic(), self.disk.writing
        if started >= self._housekeeper.due and self.disk.is_well:
            self._housekeeper.check()
        self.disk.check(writing, insist=not download.can_bypass)
        opened, failed = None, 0
        try:
            opened = Worker(self.resources, download).run(self._check)
        except (ShardCacheError, system_error()) as exn:
            failed = int(not (download.file or isinstance(exn, (UnusableError, *TEMPORARY))))
            if isinstance(exn, OSError):
                self.disk.failed(writing, exn)
            raise
        finally:
            is_fetched = opened is not None and download.outcome == "fetched"
            if is_fetched:
                self.counters.fetched(
                    download.shard,
                    size=download.size or download.written,
                    seconds=clock.monotonic() - started,
                    retries=download.retries,
                    upstream=download.is_upstream,
                )
            elif failed or download.retries:
                self.counters.add({"fetches_failed": failed, "retries": download.retries})
        if is_fetched:
            if writing.faults:
                writing.succeeded()
            if download.can_bypass:  # otherwise, `fetch` waits for the copies, and no reader does
                self._write_back(download.shard, opened.path, wait=False)
        return opened

    def note_use(self, opened: OpenEntry, now: float) -> None:
        """Record that an entry is used: on first use by this process, then at intervals.

        ``now`` is on the monotonic clock.
        """
        directory = opened.directory
        last = self._touched.get(directory)
        # Hot path: keep the number of calls small.
        if now >= self._housekeeper.due and self.disk.is_well:
            self._housekeeper.check()
        if last is None or now - last >= _TOUCH_INTERVAL:
            if len(self._touched) >= _REMEMBERED:
                self._touched.clear()  # most of them were evicted
            self._touched[directory] = now
            self.tier_of(directory).store.touch(directory, clock.time())

    def _write_back(self, shard: ShardURL, path: str, *, wait: bool) -> None:
        """Copy a shard to the upstreams that have ``write_back`` set, in a thread or ``wait``."""
        if not any(upstream.write_back for upstream in self.config.upstreams):
            return
        data, grace = Path(path), self.tier_of(path).store.layout.grace

        def copy() -> None:
            try:
                # Not evicted while it is copied; but while it waits, because a slow upstream could
                # otherwise fill the cache with shards that must stay.
                with data_locked_if_free(data.parent, grace, data=data, shared=True):
                    sidecar = Entry.at(data.parent).metadata().encode()
                    self.origins.write_back(shard, data, sidecar)
            except (system_error(), DamagedError) as exn:  # the entry was evicted
                logger.info("%s: not copied to an upstream: %s", shard, exn)

        if wait:
            copy()
            return
        self._to_copy.append(copy)
        self._copying -= {thread for thread in list(self._copying) if not thread.is_alive()}
        if len(self._copying) < _COPIES:
            try:
                self._copying.add(threads.start(self._copy_waiting, "shardcache-copy"))
            except threads.NoThreadError as exn:
                logger.info("%s: not copied to an upstream yet: %s", shard, exn)

    def _copy_waiting(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._to_copy.popleft()()

    # -- files that are not cached -------------------------------------------------

    def is_in_place(self, shard: ShardURL) -> bool:
        """Whether a shard is a local file that is read in place and not cached."""
        return shard.is_local and not self.config.cache_local

    # -- ending ------------------------------------------------------------------

    def close(self) -> None:
        """End the session, and cancel downloads without readers. The next use begins another."""
        if self.directories is not None:
            self.directories = None
            self.downloads.close()
        self._end()
        self._finish_copies()

    def _finish_copies(self) -> None:
        end = clock.monotonic() + LAST_COPIES
        for thread in list(self._copying):
            thread.join(max(0.0, end - clock.monotonic()))
        self._copying.clear()

    def _end(self) -> None:
        """Write the counters, end the session, and log a summary of what this process has read."""
        self.counters.flush()
        for tier in self.tiers:
            tier.end_session()
        if not logger.isEnabledFor(logging.INFO):
            return
        from shardcache.stats.summary import summed  # here, because a first open must be quick

        counted = self.counters.snapshot()
        stats, self._logged = summed([Sample(0, 0, counted - self._logged)]), counted
        if stats.opens:
            names = "opens", "hits", "streamed", "bytes_saved"
            extra = {"event": "ended", "dir": str(self.config.dir)}
            extra |= {name: getattr(stats, name) for name in names}
            logger.info("%s: this process had %r", self.config.dir, stats, extra=extra)


#: All `ProcessCache` objects of this process: it ends them when it exits, and a forked child begins
#: them again.
_all: weakref.WeakSet[ProcessCache] = weakref.WeakSet()
#: The handler that ends them in a child process of multiprocessing.
_finalizers: list[object] = []


def _end_all() -> None:
    for cache in list(_all):
        cache._end()
    for cache in list(_all):
        cache._finish_copies()


def _begin_all() -> None:
    _finalizers.clear()
    for cache in list(_all):
        cache.counters.disown()  # of all, because beginning may close streams of the parent
    for cache in list(_all):
        cache._begin()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_begin_all)
