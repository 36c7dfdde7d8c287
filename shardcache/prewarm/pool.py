"""Download the shards of a plan with threads, in this process and in helper processes.

* In the end, each shard that was tried has one result, and the other shards have none.
* The failure of one shard does not stop the others, unless they would all fail alike: after some
  refusals (credentials, endpoint, configuration, local disk) without a success, the pool skips the
  remaining shards of that bucket.
* A pool that is stopped waits, up to a limit, until its downloads have released their partials (the
  unfinished files), so that the next run can resume them.

For small shards, one interpreter is the bottleneck. On loopback, with two cores shared with the
server, 2,000 shards of 100 KiB took 2.8 s with one process and 1.4 s with two, 256 of 4 MiB 1.05
and 0.67 s, 48 of 64 MiB 1.39 and 1.18 s (medians of 3, November 2026). So the main process, the
owner, forks helpers before it starts threads. A helper runs its own pool for its share of the
shards, and ends when the share is done or the owner has died. At each tick, it sends the owner its
events, log records and progress, and the reason if it stopped. If a helper dies, the owner
downloads the rest of its share.
"""

from __future__ import annotations

import logging
import logging.handlers
import math
import multiprocessing
import pickle
import signal
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from shardcache import clock, threads
from shardcache.download.download import Download, Progress
from shardcache.download.pool import Connections, Throttle
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    FetchCancelledError,
    TransferError,
    is_local_error,
)
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
#: The part of a processor that a process needs at least if its interpreter is the bottleneck. One
#: thread that fetches shards of 100 KiB over loopback needs 0.7 to 0.95. With 0.7 here, 2,000 of
#: them took 3.4 s and 18 CPU s/GB; with 0.5, they took 2.8 s and 11.
_BUSY = 0.5
#: Seconds to wait for cancelled downloads. Most end within milliseconds.
_CANCEL_TIMEOUT = 5.0
#: Takes the place of a bucket's name for faults of this machine, such as of its disk.
_THIS_MACHINE = ""


@dataclass(eq=False)
class Pool:
    """Downloads the shards of one plan, once.

    Attributes:
        cache, plan, stop, jobs, best_effort, max_failures: as for `prewarm`.
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
    rate: int | None = None
    deadline: float = math.inf
    results: dict[str, ShardResult] = field(default_factory=dict)
    stopped: Stopped | None = None

    def __post_init__(self) -> None:
        done = self.plan.left_out | self.plan.unconfirmed.keys() | self.results.keys()
        self._todo = deque(shard for shard in self.plan.shards if shard.key not in done)
        self.jobs = min(self.jobs, len(self._todo))
        self._throttle = None if self.rate is None else Throttle(self.rate)
        self._events: SimpleQueue[Started | Finished] = SimpleQueue()
        self._cancelled_at: float | None = None
        self._running: dict[str, Download] = {}
        self._helped = defaultdict[str, Progress](Progress)  # by key, of the helpers' shards
        self._helpers: list[Helper] = []
        self._threads = self._failures = 0
        self._few = 1  # threads to use while the origin seems to be near
        self._measured = clock.monotonic(), 0.0  # and `_processor_seconds` at that time
        self._misfits = 0  # shards in a row that found no room
        self._refused: Counter[str] = Counter()  # by bucket, or _THIS_MACHINE
        self._succeeded: set[str] = set()
        self._changed = threading.Condition()  # guards all of the above

    def run(self, report: Callable[[list[Started | Finished]], None]) -> None:
        """Download the shards until all are done or the pool is stopped.

        ``report`` is called in the calling thread with the events since its last call. Its
        exceptions, and KeyboardInterrupt, are raised after the downloads have ended.
        """
        try:
            self._supervise(report)
        except BaseException:
            with self._changed:
                self._halt(Stopped.REQUESTED)
            self._supervise(lambda events: None)
            raise

    # -- the calling thread ----------------------------------------------------

    def _supervise(self, report: Callable[[list[Started | Finished]], None]) -> None:
        """Start threads, report events and watch for reasons to stop, until all work is done."""
        connections = self.cache.processes.here().engine.connections
        while self._start_threads(self._useful_threads(connections)):
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
                    helper.send(None)
                if clock.monotonic() - self._cancelled_at > _CANCEL_TIMEOUT:
                    break
        report(_drain(self._events))

    def _useful_threads(self, connections: Connections) -> int:
        """Return the number of threads to download with.

        It is one for each connection. From a server in the same room, however, a few threads keep
        the interpreter busy, and more would only wait for it. So their number doubles at each tick
        in which this process needed less than `_BUSY` of a processor.
        """
        if not connections.is_near:
            return connections.limit
        now, needed = clock.monotonic(), _processor_seconds()
        (since, before), self._measured = self._measured, (now, needed)
        if self._threads and needed - before < _BUSY * (now - since):
            self._few = min(2 * self._few, connections.limit)
        return min(self._few, connections.limit)

    def _start_threads(self, count: int) -> bool:
        """Start threads until there are ``count``.

        If no thread can be started, download a shard in this one. Return False if all work is done.
        """
        while self._todo and self._threads < min(self.jobs, count):
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
        return bool(self._threads or self._helpers or self._todo)

    # -- helpers ---------------------------------------------------------------

    def share(self, helpers: Sequence[Helper]) -> None:
        """Give each helper an equal share, and follow it in a thread. To be called before `run`."""
        count = min(1 + len(helpers), self.jobs)
        if count < 2:
            return
        todo, self._todo = list(self._todo), deque(list(self._todo)[::count])
        jobs, self.jobs = self.jobs // count, -(-self.jobs // count)
        if self.rate is not None:
            self.rate //= count
            self._throttle = Throttle(self.rate)
        options = {"jobs": jobs, "best_effort": self.best_effort, "rate": self.rate}
        for number, helper in enumerate(helpers[: count - 1], 1):
            share = todo[number::count]
            self._helpers.append(helper)
            try:
                threads.start(partial(self._follow, helper, share), "shardcache-prewarm-helper")
            except RuntimeError:  # the limit of threads is reached
                self._helpers.remove(helper)
                self._todo.extend(share)
                continue
            sizes, outdated = self.plan.sizes, self.plan.outdated
            known = {shard.key: sizes[shard.key] for shard in share if shard.key in sizes}
            plan = PrewarmPlan(tuple(share), {}, known, 0, 0, 0, outdated=outdated)
            # Pickling a shard removes the secrets of its URL. The helper needs them to download.
            helper.send((plan, [shard.raw for shard in share], options))

    def _follow(self, helper: Helper, share: list[ShardURL]) -> None:
        """Receive the events, log records and progress of a helper until it ends."""
        left = {shard.key: shard for shard in share}
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
                        del left[event.shard.key]
                        self._finish(event)
                self._helped |= progress
        with self._changed:
            if left and not (stopped or self.stopped):
                text = "a helper process died; the main process downloads its %d remaining shards"
                logger.warning(text, len(left))
                self._todo.extend(left.values())
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
            while self._todo:
                shard = self._todo.popleft()
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
            opened, how = self.cache.opener.obtain(download)
            opened.close()
            size = opened.size
            outcome = Outcome.CACHED if how == "hit" else Outcome(how)
        except FetchCancelledError as exn:
            outcome, error = Outcome.NOT_STARTED, exn
        except Exception as exn:  # noqa: BLE001 - the result of the shard reports it
            left_out = self.best_effort and is_full(exn)
            outcome, error = (Outcome.LEFT_OUT if left_out else Outcome.FAILED), exn
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
            elif result.outcome is not Outcome.CACHED:
                self._misfits = 0
                self._succeeded |= {_THIS_MACHINE, _bucket(shard)}
        self._events.put(event)

    def _is_hopeless(self, scope: str) -> bool:
        limit = max(_REFUSALS, self._threads)
        return self._refused[scope] >= limit and scope not in self._succeeded

    def _halt(self, reason: Stopped) -> None:
        """Start no further shard, and cancel the running downloads unless the cache is full.

        When it is full, running downloads may already have reserved room, so they can complete.
        """
        self.stopped = self.stopped or reason
        self._todo.clear()
        if reason is not Stopped.FULL and self._cancelled_at is None:
            self._cancelled_at = clock.monotonic()


def _processor_seconds() -> float:
    """Return how long the threads of this process have run on a processor, or waited for one."""
    nanoseconds = 0
    with suppress(OSError, ValueError):  # a thread has ended, or the kernel has no such figures
        for thread in Path("/proc/self/task").iterdir():
            ran, waited, _ = (thread / "schedstat").read_text("ascii").split()
            nanoseconds += int(ran) + int(waited)
    return nanoseconds / 1e9


def _drain(queue: SimpleQueue[T]) -> list[T]:
    """Return the items that a queue holds now. Never blocks, even if other threads add items."""
    return [queue.get() for _ in range(queue.qsize())]


def _bucket(shard: ShardURL) -> str:
    """Return the scheme and the bucket or host, for which credentials and endpoints are valid."""
    return "/".join(shard.canonical.split("/")[:3])


# -- helper processes ------------------------------------------------------------


class Helper:
    """A forked process that waits for its share of the shards and downloads it."""

    def __init__(self, cache: Cache) -> None:
        self.channel, owner = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_run_helper, args=(cache, owner, self.channel), daemon=True
        )
        self._process.start()
        owner.close()

    def send(self, message: Any) -> None:
        """Send a task, or None to stop the helper. Does nothing if the helper has died."""
        with suppress(OSError):
            self.channel.send(message)

    def close(self) -> None:
        """Tell the helper to stop, and wait until it has ended."""
        self.send(None)
        self._process.join()
        self.channel.close()


def _run_helper(
    cache: Cache, owner: Connection[Any, Any], owners_end: Connection[Any, Any]
) -> None:
    owners_end.close()  # otherwise the helper would not notice that its owner has died
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner sends a message to stop the helper
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # After an error, the owner downloads the rest of the share, and reports the error if it recurs.
    with suppress(Exception):
        if (task := owner.recv()) is not None:
            _download_share(cache, owner, *task)


def _download_share(
    cache: Cache,
    owner: Connection[Any, Any],
    plan: PrewarmPlan,
    raws: list[str],
    options: dict[str, Any],
) -> None:
    """Download a helper's share, until it is done or the owner sends another message.

    Log records go to the owner, so that only one process writes to the terminal.
    """
    shards = tuple(replace(each, raw=raw) for each, raw in zip(plan.shards, raws, strict=True))
    plan = replace(plan, shards=shards)
    stop, records = threading.Event(), SimpleQueue[logging.LogRecord]()
    logging.getLogger("shardcache").handlers[:] = [logging.handlers.QueueHandler(records)]
    pool = Pool(cache, plan, stop, **options)

    def report(events: list[Started | Finished]) -> None:
        if owner.poll():
            owner.recv()
            stop.set()
        portable = [
            Started(event.shard, Progress)
            if isinstance(event, Started)
            else event._replace(result=event.result.portable())
            for event in events
        ]
        progress = {key: each.progress() for key, each in list(pool._running.items())}
        owner.send((portable, _drain(records), progress, pool.stopped))

    with cache:
        pool.run(report)
