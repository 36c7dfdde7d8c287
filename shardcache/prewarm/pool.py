"""Download the shards of a plan with threads, in this process and in helper processes.

* In the end, each shard that was tried has one result, and the other shards have none.
* The failure of one shard does not stop the others, unless they would all fail alike: after some
  refusals (credentials, endpoint, configuration, local disk) without a success, the pool skips the
  remaining shards of that bucket.
* A pool that is stopped waits, up to a limit, until its downloads have released their partials, so
  that the next run can resume them.

For small shards, one interpreter is the bottleneck. On loopback, with two cores shared with the
server, 2,000 shards of 100 KiB took 2.8 s with one process and 1.4 s with two, 256 of 4 MiB 1.05
and 0.67 s, 48 of 64 MiB 1.39 and 1.18 s (medians of 3, November 2026). So the main process, the
owner, forks helpers before it starts threads. All of them take shards from one queue. A helper ends
when the queue is empty or the owner has died. At each tick, it sends the owner its events, log
records and progress, and the reason if it stopped. If a helper dies, the owner downloads the shards
that the helper had taken.
"""

from __future__ import annotations

import importlib
import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from shardcache import clock, threads
from shardcache.download.download import Download, Progress
from shardcache.download.pool import Throttle
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    FetchCancelledError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.faults import is_local_error
from shardcache.results import (
    Finished,
    Outcome,
    PrewarmPlan,
    ShardResult,
    Started,
    Stopped,
    is_full,
)
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from shardcache.cache import Cache

logger = logging.getLogger(__name__)
T = TypeVar("T")

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
#: Seconds to wait for cancelled downloads. Most end within milliseconds.
_CANCEL_TIMEOUT = 5.0
#: Modules that are imported before the helpers are forked, so that they need not import them again.
_ENGINE = ("shardcache.download.fetch", "shardcache.space.clean", "shardcache.stats.database")
#: Takes the place of a bucket's name for faults of this machine, such as of its disk.
_THIS_MACHINE = ""


@dataclass(eq=False)
class Pool:
    """Downloads the shards of one plan, once.

    Attributes:
        cache, plan, stop, jobs, best_effort, max_failures, skip_missing: as for `prewarm`.
        rate: bytes per second for all connections together; None sets no limit.
        deadline: when to stop, on the monotonic clock.
        results: the result of each shard that was tried, by key. Shards that have one when the pool
            is made are not tried.
        stopped: the reason why no further shard is started, or None.
    """

    cache: Cache
    plan: PrewarmPlan
    stop: threading.Event
    jobs: int
    best_effort: bool = False
    max_failures: int | None = None
    skip_missing: bool = False
    rate: int | None = None
    deadline: float = math.inf
    results: dict[str, ShardResult] = field(default_factory=dict)
    stopped: Stopped | None = None

    def __post_init__(self) -> None:
        for shard in self.plan.shards:  # with `refresh`: cached, but no longer at the origin
            error = self.plan.unconfirmed.get(shard.key)
            if self.skip_missing and isinstance(error, ShardNotFoundError):
                self.results[shard.key] = ShardResult(str(shard), Outcome.SKIPPED, error=error)
        self._queue = _Queue(self._missing())
        self.jobs = min(self.jobs, len(self._queue))
        self._throttle = None if self.rate is None else Throttle(self.rate)
        self._events: SimpleQueue[Started | Finished] = SimpleQueue()
        self._cancelled_at: float | None = None
        self._running: dict[str, Download] = {}
        self._helped = defaultdict[str, Progress](Progress)  # by key, of the helpers' shards
        self._helpers: list[Helper] = []  # that have not ended
        self._forked: list[Helper] = []
        self._threads = self._failures = 0
        self._misfits = 0  # shards in a row that found no room
        self._refused: Counter[str] = Counter()  # by bucket, or _THIS_MACHINE
        self._succeeded: set[str] = set()
        self._changed = threading.Condition()  # guards all of the above

    def run(self, report: Callable[[list[Started | Finished]], None]) -> None:
        """Download the shards until all are done or the pool is stopped.

        ``report`` is called in the calling thread with the events since its last call. Its
        exceptions, and KeyboardInterrupt, are raised after the downloads have ended.
        """
        for helper in self._forked:
            try:
                threads.start(partial(self._follow, helper), "shardcache-prewarm-helper")
            except RuntimeError:  # the limit of threads is reached
                self._helpers.remove(helper)
        try:
            self._supervise(report)
            if self._forked and not self.stopped and (lost := self._missing()):
                text = "a helper process died; the main process downloads its %d shards"
                logger.warning(text, len(lost))
                self._queue.refill(lost)
                self._supervise(report)
        except BaseException:
            with self._changed:
                self._halt(Stopped.REQUESTED)
            self._supervise(lambda events: None)
            raise

    # -- the calling thread ----------------------------------------------------

    def _supervise(self, report: Callable[[list[Started | Finished]], None]) -> None:
        """Start threads, report events and watch for reasons to stop, until all work is done."""
        connections = self.cache.process.engine.connections
        while self._start_threads(connections.limit):
            with self._changed:
                tick = _TICK if connections.known else _FIRST_TICK
                self._changed.wait_for(lambda: not (self._threads or self._helpers), tick)
                if self.stop.is_set():
                    self._halt(Stopped.REQUESTED)
                elif clock.monotonic() >= self.deadline:
                    self._halt(Stopped.DEADLINE)
            report(_drain(self._events))
            if self._cancelled_at is not None:
                for download in list(self._running.values()):
                    download.cancel()
                for helper in list(self._helpers):
                    helper.stop()
                if clock.monotonic() - self._cancelled_at > _CANCEL_TIMEOUT:
                    break
        report(_drain(self._events))

    def _start_threads(self, count: int) -> bool:
        """Start threads until there are ``count``.

        If no thread can be started, download a shard in this one. Return False if all work is done.
        """
        while self._queue and self._threads < min(self.jobs, count):
            with self._changed:
                self._threads += 1
            try:
                threads.start(self._download_shards, "shardcache-prewarm")
            except RuntimeError:  # the limit of threads is reached
                with self._changed:
                    self._threads -= 1
                if not self._threads:
                    self._download_next()
                break
        return bool(self._threads or self._helpers or self._queue)

    # -- helpers ---------------------------------------------------------------

    def fork(self, count: int) -> None:
        """Fork helpers, so that up to ``count`` processes download. To be called before `run`.

        In a process with other threads, this does nothing: a lock that another thread holds would
        stay locked in the helper.
        """
        count = min(count, self.jobs)
        if count < 2 or threading.active_count() > 1:
            return
        for name in _ENGINE:
            importlib.import_module(name)
        with suppress(ConfigError):  # the downloads raise it
            self.cache.process.origins.prepare(self._missing()[0])
        if self.rate is not None:
            self.rate //= count
            self._throttle = Throttle(self.rate)
        jobs, self.jobs = self.jobs, self.jobs // count
        with suppress(OSError):  # the limit of processes is reached, so fewer download
            for _ in range(count - 1):
                self._forked.append(Helper(self))
        self._helpers = self._forked.copy()
        self.jobs = jobs - self.jobs * len(self._forked)

    def close(self) -> None:
        """Stop the helpers, and wait until they have ended."""
        for helper in self._forked:
            helper.close()

    def help(self, owner: Connection[Any, Any]) -> None:
        """Download shards in a helper process, until the owner sends a message or none is left.

        Log records go to the owner, so that only one process writes to the terminal.
        """
        from logging.handlers import QueueHandler  # here, because the owner does not need it

        self._forked.clear()  # earlier helpers, which are children of the owner
        self.stop, records = threading.Event(), SimpleQueue[logging.LogRecord]()
        logging.getLogger("shardcache").handlers[:] = [QueueHandler(records)]

        def report(events: list[Started | Finished]) -> None:
            if owner.poll():
                owner.recv()
                self.stop.set()
            portable = [
                Started(event.shard, Progress)
                if isinstance(event, Started)
                else event._replace(result=event.result.portable())
                for event in events
            ]
            progress = {key: each.progress() for key, each in list(self._running.items())}
            owner.send((portable, _drain(records), progress, self.stopped))

        with self.cache:
            self.run(report)

    def _follow(self, helper: Helper) -> None:
        """Receive the events, log records and progress of a helper until it ends."""
        stopped: Stopped | None = None
        with suppress(EOFError, OSError, pickle.UnpicklingError):  # the helper has ended
            while True:
                events, records, progress, stopped = helper.channel.recv()
                for record in records:
                    logging.getLogger(record.name).handle(record)
                for event in events:
                    if isinstance(event, Started):
                        progress_of = partial(self._helped.__getitem__, event.shard.key)
                        self._events.put(Started(event.shard, progress_of))
                    else:
                        self._finish(event)
                self._helped |= progress
        with self._changed:
            self.stopped = self.stopped or stopped
            self._helpers.remove(helper)
            self._changed.notify()

    # -- the threads of the pool -----------------------------------------------

    def _download_shards(self) -> None:
        try:
            while self._download_next():
                pass
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify()

    def _download_next(self) -> bool:
        """Download the next shard. Return False if there is none."""
        if (download := self._next()) is not None:
            self._finish(Finished(download.shard, self._run(download)))
        return download is not None

    def _next(self) -> Download | None:
        """Return a download of the next shard, skipping given-up buckets, or None at the end."""
        with self._changed:
            while (shard := self._queue.take()) is not None:
                if self._is_hopeless(_THIS_MACHINE) or self._is_hopeless(_bucket(shard)):
                    self.stopped = self.stopped or Stopped.REFUSED
                    continue
                outdated = self.plan.outdated.get(shard.key, frozenset())
                listed = self.plan.size_of(shard)
                rate = self._throttle
                download = Download(shard, listed=listed, outdated=outdated, throttle=rate)
                self._running[shard.key] = download
                self._events.put(Started(shard, download.progress))
                return download
            return None

    def _run(self, download: Download) -> ShardResult:
        start, size = clock.monotonic(), download.listed
        error: Exception | None = None
        try:
            opened = self.cache.process.obtain(download)
            opened.close()
            size, how = opened.size, download.outcome
            outcome = Outcome.CACHED if how == "hit" else Outcome(how)
        except FetchCancelledError as exn:
            outcome, error = Outcome.NOT_STARTED, exn
        except Exception as exn:  # noqa: BLE001 - the result of the shard reports it
            outcome, error = Outcome.FAILED, exn
            if self.best_effort and is_full(exn):
                outcome = Outcome.LEFT_OUT
            elif self.skip_missing and isinstance(exn, ShardNotFoundError):
                outcome = Outcome.SKIPPED
        progress, seconds = download.progress(), clock.monotonic() - start
        if error is not None and progress.size is not None:
            size = progress.size
        return ShardResult(
            *(str(download.shard), outcome, size, seconds),
            *(progress.received, progress.retries, error),
        )

    def _finish(self, event: Finished) -> None:
        """Record a result, and stop the pool if further shards are not worth a try."""
        shard, result = event
        error = result.error
        with self._changed:
            self._running.pop(shard.key, None)
            self._helped.pop(shard.key, None)
            self.results[shard.key] = result
            if result.outcome is Outcome.NOT_STARTED:
                self._halt(Stopped.REQUESTED)
            elif is_full(error):
                self._misfits += 1
                if not self.best_effort or self._misfits >= _MISFITS:
                    self._halt(Stopped.FULL)
            elif result.outcome is Outcome.FAILED:
                if isinstance(error, AccessDeniedError | ConfigError | TransferError):
                    self._refused[_bucket(shard)] += 1
                elif error is not None and is_local_error(error):
                    self._refused[_THIS_MACHINE] += 1
                self._failures += 1
                if self.max_failures is not None and self._failures > self.max_failures:
                    self._halt(Stopped.FAILURES)
            elif result.outcome not in (Outcome.CACHED, Outcome.SKIPPED):
                self._misfits = 0
                self._succeeded |= {_THIS_MACHINE, _bucket(shard)}
        self._events.put(event)

    def _missing(self) -> list[ShardURL]:
        """Return the shards that are to be downloaded and have no result yet."""
        done = self.plan.left_out | self.plan.unconfirmed.keys() | self.results.keys()
        return [shard for shard in self.plan.shards if shard.key not in done]

    def _is_hopeless(self, scope: str) -> bool:
        limit = max(_REFUSALS, self._threads)
        return self._refused[scope] >= limit and scope not in self._succeeded

    def _halt(self, reason: Stopped) -> None:
        """Start no further shard, and cancel the running downloads unless the cache is full.

        When it is full, running downloads may already have reserved room, so they can complete.
        """
        self.stopped = self.stopped or reason
        self._queue.clear()
        if reason is not Stopped.FULL and self._cancelled_at is None:
            self._cancelled_at = clock.monotonic()


class _Queue:
    """A queue of shards, from which this process and the helpers that it forks take."""

    def __init__(self, shards: Sequence[ShardURL]) -> None:
        self._shards = shards
        # The offset of this file is the position in the queue. Forked processes share it, and the
        # kernel changes it in one step, so no lock is needed that a killed process could hold.
        self._fd = os.memfd_create("shardcache-prewarm")

    def __del__(self) -> None:
        os.close(self._fd)

    def take(self) -> ShardURL | None:
        """Return the next shard, or None if none is left."""
        position = os.lseek(self._fd, 1, os.SEEK_CUR) - 1
        return self._shards[position] if position < len(self._shards) else None

    def clear(self) -> None:
        """Drop the shards that are left, for all processes."""
        os.lseek(self._fd, len(self._shards), os.SEEK_SET)

    def refill(self, shards: Sequence[ShardURL]) -> None:
        """Replace the shards. Not while other processes take from the queue."""
        self._shards = shards
        os.lseek(self._fd, 0, os.SEEK_SET)

    def __len__(self) -> int:
        return max(0, len(self._shards) - os.lseek(self._fd, 0, os.SEEK_CUR))


def _drain(queue: SimpleQueue[T]) -> list[T]:
    """Return the items that a queue holds now. Never blocks, even if other threads add items."""
    return [queue.get() for _ in range(queue.qsize())]


def _bucket(shard: ShardURL) -> str:
    """Return the scheme and the bucket or host, for which credentials and endpoints are valid."""
    return "/".join(shard.canonical.split("/")[:3])


# -- helper processes ------------------------------------------------------------


class Helper:
    """A forked process that takes shards from the queue of a pool and downloads them."""

    def __init__(self, pool: Pool) -> None:
        self.channel, owner = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_run_helper, args=(pool, owner, self.channel), daemon=True
        )
        self._process.start()
        owner.close()

    def stop(self) -> None:
        """Tell the helper to stop. Does nothing if it has ended."""
        with suppress(OSError):
            self.channel.send(None)

    def close(self) -> None:
        """Tell the helper to stop, and wait until it has ended; kill it if it takes too long."""
        self.stop()
        self._process.join(_CANCEL_TIMEOUT)
        if self._process.is_alive():  # its partials can be resumed
            self._process.kill()
            self._process.join()
        self.channel.close()


def _run_helper(pool: Pool, owner: Connection[Any, Any], owners_end: Connection[Any, Any]) -> None:
    owners_end.close()  # otherwise the helper would not notice that its owner has died
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner sends a message to stop the helper
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # After an error, the owner downloads the shards that have no result, and reports the error if
    # it recurs.
    with suppress(Exception):
        pool.help(owner)
