"""Prewarm a cache: expand shard specifications, make a plan, refuse what cannot fit, download.

A pool that is stopped waits, up to a limit, until its downloads have released their partials, so
that the next run can resume them. The main process, the owner, and its helpers take shards from one
queue. If a helper dies, the owner downloads the shards that the helper had taken.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from shardcache import clock, threads
from shardcache.cache import PrewarmOptions
from shardcache.download.connections import NODE, Throttle, parse_rate
from shardcache.download.download import Download, Progress
from shardcache.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    ShardCacheError,
    TransferError,
)
from shardcache.faults import ignoring, is_local_error, system_error
from shardcache.origins.listing import Listing, spec_list
from shardcache.prewarm.plan import confirm, make_plan, outcome_of, wanted_shards
from shardcache.prewarm.results import (
    Event,
    Finished,
    Outcome,
    Planned,
    PrewarmPlan,
    PrewarmReport,
    ShardResult,
    Started,
    Stopped,
    is_full,
)
from shardcache.store.digest import BLOCK
from shardcache.store.root import is_read_only, make_root, not_writable, unusable
from shardcache.units import format_bytes
from shardcache.urls import ShardURL, server_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from shardcache.cache import Cache, Specs

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: How many shards are downloaded at the same time by default.
JOBS = 32
#: Connections that keep one process busy: S3 sends 80 MB/s over each, and one core reads about
#: 0.7 GB/s over TLS.
_CONNECTIONS = 8
#: Shards from which a prewarm in a program uses several processes. For 50, one is as fast as two.
_MANY = 100
#: Refusals without a success after which the pool gives up a bucket; or the number of threads, if
#: that is higher. One would be too few: without s3:ListBucket, a missing object is also a 403.
_REFUSALS = 3
#: With ``best_effort``, the pool stops when this many shards of unknown size in a row found no
#: room, because each of them costs a request and the beginning of its response.
_MISFITS = 32
#: Seconds between checks for events, stop requests and the deadline. Waking up for each event would
#: cost more than handling it. Ticks are short until the first response, because its delay decides
#: how many connections, and therefore threads, are used.
_TICK, _FIRST_TICK = 0.1, 0.01
#: Seconds to wait for cancelled downloads, most of which end within milliseconds.
_CANCEL_TIMEOUT = 5.0
#: Takes the place of a server for faults of this machine, such as of its disk.
_THIS_MACHINE = ""


def most_processes(cache: Cache) -> int:
    """Return how many processes a prewarm may use, so that the node's connections keep all busy."""
    connections = max(NODE, cache.config.connections)
    return min(connections // _CONNECTIONS, len(os.sched_getaffinity(0)))


def prewarm(cache: Cache, urls: Specs, **options: Unpack[PrewarmOptions]) -> PrewarmReport:
    """Download shards into the cache before they are needed.

    Args:
        cache: the cache to fill.
        urls: one shard specification or several (URLs, ``{braces}``, globs and prefixes; see
            `expand`), or results of `Cache.parse`, which are not expanded.
        share: the share of one node; shards that its ranks do not read are not downloaded.
        jobs: how many shards to download at the same time (default: 32).
        check: download nothing; only report which shards are cached.
        dry_run: download nothing; only report the plan.
        deadline: seconds after which no shard is started and running downloads are cancelled.
        max_failures: stop when more shards than this have failed; None never stops.
        best_effort: leave out shards that do not fit instead of refusing all of them. A job that
            reads those first may evict the others before it reads them; `Cache.pin` keeps these.
        skip_missing: do not count shards that their origins do not have (404) as failed.
        limit_rate: bytes per second for all connections together: a number, or text such as
            ``"50MB"``.
        refresh: query the origins for newer versions of the cached shards, and download these.
            Streams that are open continue with the version that they read.
        processes: how many processes share the work; None for as many as are useful. The
            additional ones are forked, so a program with threads of its own uses only one.
        sources: files, by the key of the shard, to import in place of downloads (`Cache.add`).
        on_event: called in the calling thread with each event; must not block.
        stop: an event that any thread or signal handler may set, to stop early.

    Returns:
        The plan, and the result of each shard.

    Raises:
        ConfigError: a URL or an option is invalid, or the directory cannot be used.
        CacheFullError: the shards do not fit; nothing was downloaded.
        ShardNotFoundError: nothing matches a prefix or a pattern.
        AccessDeniedError, TransferError: a prefix or a pattern cannot be listed.
        OSError: the directory cannot be read or created.
        KeyboardInterrupt: raised after the downloads have ended.
    """
    check_options(options)
    start, on_event = clock.monotonic(), options.get("on_event")

    def report(events: Iterable[Event]) -> None:
        for event in events:
            if on_event is not None:
                on_event(event)

    listing = Listing(cache.config)
    shards = wanted_shards(cache, spec_list(urls), listing, options.get("share"))
    only_plans = options.get("check") or options.get("dry_run")
    if not only_plans:
        _make_directory(cache)
    plan = make_plan(cache, shards, listing, options)
    if only_plans:
        report([Planned(plan)])
        return PrewarmReport(plan, tuple(plan.results.values()), clock.monotonic() - start)
    if plan.missing and not options.get("best_effort"):
        report([Planned(plan)])
        raise CacheFullError(
            f"the shards to download need {format_bytes(plan.needed)} of disk, "
            f"{format_bytes(plan.missing)} more than {cache.dir} has room for. "
            "Raise max_size, free the disk, name fewer shards, or take those that fit "
            "(best_effort, --best-effort).",
            needed=plan.needed,
            missing=plan.missing,
        )
    stop = options.get("stop") or threading.Event()
    events = list(confirm(cache, plan, stop))
    if options.get("sources"):
        events.clear()  # files are compared with cached shards, too
    known = {event.shard.key: event.result for event in events if isinstance(event, Finished)}
    deadline = options.get("deadline")
    end = math.inf if deadline is None else start + deadline
    pool = Pool(cache, plan, options, stop, end, known)
    with contextlib.closing(pool):
        pool.fork()  # before `report`, which may start a thread
        report([Planned(plan), *events])
        pool.run(report)
    full = options.get("best_effort") and pool.stopped is Stopped.FULL
    otherwise = Outcome.LEFT_OUT if full else Outcome.NOT_STARTED
    results = [
        result._replace(outcome=otherwise) if result.outcome is Outcome.MISSING else result
        for result in {**plan.results, **pool.results}.values()
    ]
    return PrewarmReport(plan, tuple(results), clock.monotonic() - start, pool.stopped)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError if `prewarm` has no such option; ConfigError if its value is wrong."""
    if unknown := options.keys() - PrewarmOptions.__annotations__.keys():
        raise TypeError(f"prewarm() has no option {', '.join(sorted(unknown))}")
    if (jobs := options.get("jobs", JOBS)) < 1:
        raise ConfigError(f"jobs is {jobs}. Give at least 1.", option="jobs")
    _rate_of(options)


def _rate_of(options: Mapping[str, Any]) -> int | None:
    limit = options.get("limit_rate")
    return None if limit is None else parse_rate(limit)


def _make_directory(cache: Cache) -> None:
    """Create the cache directory; raise one error if it is unusable, instead of one per shard."""
    try:
        make_root(cache.config)
        if is_read_only(cache.dir):
            raise not_writable(cache.dir)
    except system_error() as exn:
        if is_full(exn) or isinstance(exn, ShardCacheError):
            raise
        raise unusable(cache.dir, exn) from exn


# -- the pool ----------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Pool:
    """Downloads the shards of one plan, once."""

    cache: Cache
    plan: PrewarmPlan
    options: PrewarmOptions
    stop: threading.Event
    deadline: float  #: on the monotonic clock
    #: The results of the shards by key. Those that have one when the pool is made are not tried.
    results: dict[str, ShardResult]
    stopped: Stopped | None = None  #: why no further shard is started

    def __post_init__(self) -> None:
        self._queue = self._missing()
        # The numbers of this process. `fork` gives its helpers a part of both.
        self._jobs = min(self.options.get("jobs", JOBS), len(self._queue))
        self._rate = _rate_of(self.options)
        self._sources = self.options.get("sources") or {}
        # The offset of this file is the position in the queue. Helpers share it, and the kernel
        # changes it in one step, so no lock is needed that a killed process could hold. It does so
        # only for a regular file that was opened by its name, such as Python's, which is not read.
        self._position = os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._position).atexit = False  # threads may run on
        self._events: SimpleQueue[Started | Finished] = SimpleQueue()
        self._cancelled_at: float | None = None
        self._running: dict[str, Download] = {}
        self._helped = defaultdict[str, Progress](Progress)  # by key, of the helpers' shards
        self._helpers: dict[Connection[Any, Any], BaseProcess] = {}
        # Seconds for which each helper that has not ended has sent nothing.
        self._silent: dict[Connection[Any, Any], float] = {}
        self._threads = self._failures = 0
        self._misfits = 0  # shards in a row that found no room
        self._is_small = False  # whether the last shard had at most one block
        self._has_stalled = False  # whether no shard has started or ended during a tick
        # By server, or _THIS_MACHINE; after a success, minus infinity.
        self._refusals = defaultdict[str, float](float)
        self._lock = threading.RLock()  # guards all of the above
        # Gets an item when a thread ends. Not a `Condition`: if a signal handler raises in its
        # methods, it keeps or loses the lock.
        self._ended = threads.Queue[None]()

    def run(self, report: Callable[[list[Started | Finished]], None]) -> None:
        """Download the shards until all are done or the pool is stopped; ``report`` the events.

        Exceptions of ``report``, and KeyboardInterrupt, are raised after the downloads have ended.
        """
        self._throttle = None if self._rate is None else Throttle(self._rate)
        try:
            for channel in self._helpers:
                self._silent[channel] = 0.0
                with ignoring(OSError):  # the helper has died
                    channel.send(True)
            self._supervise(report)
            if self._helpers and not self.stopped and (lost := self._missing()):
                text = "a helper process ended early; the main process downloads its %d shards"
                logger.warning(text, len(lost))
                self._queue = lost
                os.lseek(self._position, 0, os.SEEK_SET)
                self._supervise(report)
        except BaseException:
            self._halt(Stopped.REQUESTED)
            self._supervise(lambda events: None)
            raise

    # -- the calling thread ----------------------------------------------------

    def _supervise(self, report: Callable[[list[Started | Finished]], None]) -> None:
        """Start threads, report events and watch for reasons to stop, until all work is done."""
        connections = self.cache.process.resources.connections
        while self._start_threads(self._useful_threads()):
            tick, began = _TICK if connections.known else _FIRST_TICK, clock.monotonic()
            with suppress(Empty):
                if self._threads:
                    self._ended.get(timeout=tick)
                elif self._silent:
                    from multiprocessing.connection import wait

                    wait(list(self._silent), tick)
            # Less if this process was stopped, too, and so heard nothing.
            passed = min(clock.monotonic() - began, 2 * _TICK)
            for channel in list(self._silent):
                self._receive(channel, passed)
            if self.stop.is_set():
                self._halt(Stopped.REQUESTED)
            elif clock.monotonic() >= self.deadline:
                self._halt(Stopped.DEADLINE)
            report(events := _drain(self._events))
            # A shard stalls, and others must not wait for it.
            if not events and clock.monotonic() - began >= _TICK:
                self._has_stalled = True
            if self._cancelled_at is not None:
                for download in list(self._running.values()):
                    download.cancel_unless_shared()
                self._stop_helpers()
                if clock.monotonic() - self._cancelled_at > _CANCEL_TIMEOUT:
                    break
        report(_drain(self._events))

    def _start_threads(self, count: int) -> bool:
        """Start up to ``count`` threads, or download in this one. Return False if all is done."""
        while self._has_shards() and self._threads < min(self._jobs, count):
            with self._lock:
                self._threads += 1
            try:
                threads.start(self._download_shards, "shardcache-prewarm")
            except threads.NoThreadError:
                with self._lock:
                    self._threads -= 1
                if not self._threads and (download := self._next()):
                    self._run(download)
                break
        return bool(self._threads or self._silent or self._has_shards())

    def _useful_threads(self) -> int:
        connections = self.cache.process.resources.connections
        # Two threads that wait for the interpreter need half as much processor time again as one.
        is_enough = self._is_small and not self._has_stalled and connections.near
        # A thread that waits for another process's download needs no connection.
        waiting = sum(download.is_waiting for download in list(self._running.values()))
        return waiting + (1 if is_enough else connections.allowed)

    def _has_shards(self) -> bool:
        return os.lseek(self._position, 0, os.SEEK_CUR) < len(self._queue)

    # -- helpers ---------------------------------------------------------------

    def fork(self) -> None:
        """Fork helpers, so that several processes download. Call this before `run`."""
        count = self.options.get("processes")
        if count is None:
            # A hook may note what it has checked, which the caller sees only in this process.
            is_large = len(self._queue) >= _MANY and self.cache.config.validate is None
            count = most_processes(self.cache) if is_large else 1
        count = min(count, self._jobs)
        # A lock that another thread holds would stay locked in the helper.
        if count < 2 or not threads.is_alone():
            return
        from multiprocessing import Pipe, get_context  # here: few have helpers

        with suppress(ConfigError):  # the downloads raise it
            self.cache.process.origins.of(self._queue[0]).prepare()
        jobs, self._jobs = self._jobs, self._jobs // count
        rate, self._rate = self._rate, self._rate and self._rate // count
        # No signal handler may raise before this process and the helper know of each other.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for _ in range(count - 1):
                channel, end = Pipe()
                process = get_context("fork").Process(
                    target=self._help, args=(channel, end), daemon=True
                )
                process.start()
                end.close()
                self._helpers[channel] = process
        # The limit of processes, the end of the program, or a process that may have no children,
        # such as a DataLoader's worker.
        except (OSError, RuntimeError, AssertionError) as exn:
            logger.debug("fewer processes download: %s", exn)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._jobs = jobs - self._jobs * len(self._helpers)
        self._rate = rate and rate - rate // count * len(self._helpers)

    def _stop_helpers(self) -> None:
        for channel in self._helpers:
            with ignoring(OSError):  # it has ended
                channel.send(False)

    def close(self) -> None:
        """Stop the helpers, wait until they have ended, and kill those that take too long."""
        self._stop_helpers()
        for channel, process in self._helpers.items():
            process.join(_CANCEL_TIMEOUT)
            process.kill()  # if it is alive; its partials can be resumed
            process.join()
            channel.close()

    def _help(self, channel: Connection[Any, Any], owner: Connection[Any, Any]) -> None:
        """Download shards in a helper, from the owner's first message to the second, or its end.

        The owner gets events, log records (only one process writes to the terminal) and progress.
        """
        from logging.handlers import QueueHandler  # here, because the owner does not need it

        channel.close()  # otherwise the helper would not notice that its owner has died
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):  # also of Ctrl-C: the owner handles signals
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or commands would have no exit status
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._helpers.clear()  # children of the owner
        self.stop, records = threading.Event(), SimpleQueue[logging.LogRecord]()
        for name, other in logging.root.manager.loggerDict.items():
            if name.startswith("shardcache") and isinstance(other, logging.Logger):
                other.handlers[:], other.propagate = [], True
        library = logging.getLogger("shardcache")
        library.handlers[:], library.propagate = [QueueHandler(records)], False

        def report(events: list[Started | Finished]) -> None:
            if owner.poll():
                self.stop.set()
            progress = {key: running.progress() for key, running in list(self._running.items())}
            owner.send((events, _drain(records), progress, self.stopped))

        # After an error, the owner downloads the shards that have no result, and reports the error
        # if it recurs.
        with suppress(Exception), self.cache:
            if owner.recv():
                self.run(report)

    def _receive(self, channel: Connection[Any, Any], passed: float) -> None:
        """Take the events, log records and progress that a helper has sent.

        ``passed`` are the seconds since the last call in which this process has run.
        """
        silent = self._silent.pop(channel) + passed  # put back below, unless the helper has ended
        with ignoring(EOFError, OSError):
            while channel.poll():
                silent = 0.0
                try:
                    events, records, progress, stopped = channel.recv()
                except OSError as exn:
                    if "end of file" in str(exn):  # it was killed amid a message; no errno says so
                        return
                    raise
                for record in records:
                    logging.getLogger(record.name).handle(record)
                for event in events:
                    if isinstance(event, Started):
                        progress_of = partial(self._helped.__getitem__, event.shard.key)
                        self._events.put(Started(event.shard, progress_of))
                    else:
                        self._finish(event)
                self._helped |= progress
                if stopped is not Stopped.REFUSED:  # another process may have read shards
                    self.stopped = self.stopped or stopped
            if silent > self.cache.config.stale_after:
                self._helpers[channel].kill()  # it is stopped
            self._silent[channel] = silent

    # -- the threads of the pool -----------------------------------------------

    def _download_shards(self) -> None:
        try:
            while self._threads <= self._useful_threads() and (download := self._next()):
                self._run(download)
        finally:
            with self._lock:
                self._threads -= 1
            self._ended.put(None)

    def _next(self) -> Download | None:
        """Return a download of the next shard of a bucket that was not given up, if any."""
        with self._lock:
            while (number := os.lseek(self._position, 1, os.SEEK_CUR)) <= len(self._queue):
                shard = self._queue[number - 1]
                scopes = _THIS_MACHINE, server_of(str(shard))
                if max(map(self._refusals.__getitem__, scopes)) >= max(_REFUSALS, self._threads):
                    self.stopped = self.stopped or Stopped.REFUSED
                    continue
                download = Download(
                    self.cache.process.downloads,
                    shard,
                    listed=self.plan.results[shard.key].size,
                    outdated=self.plan.outdated.get(shard.key, frozenset()),
                    throttle=self._throttle,
                    file=self._sources.get(shard.key),
                )
                self._running[shard.key] = download
                self._events.put(Started(shard, download.progress))
                return download
            return None

    def _run(self, download: Download) -> None:
        start, size = clock.monotonic(), download.listed
        error: Exception | None = None
        try:
            opened = self.cache.process.fetch(download)
            opened.close()
            size = opened.size
            known = Outcome.CACHED if download.shard.key in self.plan.cached else Outcome.COALESCED
            outcome = known if download.outcome == "hit" else Outcome(download.outcome)
        except Exception as exn:  # noqa: BLE001 - the result of the shard reports it
            error, size = exn, size if download.size is None else download.size
            outcome = outcome_of(exn, self.options)
        seconds = clock.monotonic() - start
        counts = download.received, download.retries
        result = ShardResult(str(download.shard), outcome, size, seconds, *counts, error)
        self._finish(Finished(download.shard, result))

    def _finish(self, event: Finished) -> None:
        """Record a result, and stop the pool if further shards are not worth a try."""
        shard, result = event
        error = result.error
        with self._lock:
            self._running.pop(shard.key, None)
            self._helped.pop(shard.key, None)
            self.results[shard.key] = result
            if result.outcome is Outcome.NOT_STARTED:
                self._halt(Stopped.REQUESTED)
            elif is_full(error):
                self._misfits += 1
                if not self.options.get("best_effort") or self._misfits >= _MISFITS:
                    self._halt(Stopped.FULL)
            elif result.outcome is Outcome.FAILED:
                if isinstance(error, AccessDeniedError | ConfigError | TransferError):
                    self._refusals[server_of(str(shard))] += 1
                elif error is not None and is_local_error(error):
                    self._refusals[_THIS_MACHINE] += 1
                self._failures += 1
                most = self.options.get("max_failures")
                if most is not None and self._failures > most:
                    self._halt(Stopped.FAILURES)
            elif result.outcome not in (Outcome.CACHED, Outcome.SKIPPED):
                self._is_small = result.size is not None and result.size <= BLOCK
                self._misfits = 0
                succeeded = _THIS_MACHINE, server_of(str(shard))
                self._refusals |= dict.fromkeys(succeeded, -math.inf)
        self._events.put(event)

    def _missing(self) -> list[ShardURL]:
        """Return the shards that are to be downloaded or opened, and have no result yet."""
        kinds, planned = (Outcome.CACHED, Outcome.MISSING), self.plan.results
        shards = (s for s in self.plan.shards if planned[s.key].outcome in kinds)
        return [shard for shard in shards if shard.key not in self.results]

    def _halt(self, reason: Stopped) -> None:
        """Start no further shard, and cancel the running downloads unless the cache is full.

        When it is full, running downloads may already have reserved room, so they can complete.
        """
        with self._lock:
            self.stopped = self.stopped or reason
            os.lseek(self._position, len(self._queue), os.SEEK_SET)
            if reason is not Stopped.FULL and self._cancelled_at is None:
                self._cancelled_at = clock.monotonic()


def _drain(queue: SimpleQueue[T]) -> list[T]:
    """Return the items that a queue holds now. Never blocks, even if other threads add items."""
    return [queue.get() for _ in range(queue.qsize())]
