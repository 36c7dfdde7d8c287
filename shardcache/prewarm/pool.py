"""Threads that fetch the shards of a plan, here and in helper processes.

* Every shard has exactly one result in the end, or none if it was not tried.
* The failure of one shard does not stop the others, unless all shards would fail alike: after
  some refusals (credentials, endpoint, configuration, local disk) without a success the rest of
  that bucket is not tried.
* A pool that is stopped waits until its fetches have released their partials, so that the next
  run can resume them, but not forever.

A helper runs a pool of its own for its share, and sends its owner the events of each tick. If it
dies, its owner does the rest of that share.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shardcache import clock, threads
from shardcache.download.download import Download, Progress
from shardcache.download.pool import Throttle
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    FetchCancelledError,
    ShardCacheError,
    TransferError,
)
from shardcache.prewarm.helpers import Channel, Helper
from shardcache.results import (
    Event,
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
    from shardcache.cache import Cache

__all__ = ["Pool", "serve"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: So many refusals by one bucket, without a success, are believed for all of it, or as many as
#: there are threads. One would be too few: to credentials without s3:ListBucket a missing object
#: is a 403.
_REFUSALS = 3
#: So many shards in a row, of unknown size, that find no room under best effort are believed for
#: the rest: of each, an answer has begun to arrive.
_MISFITS = 32
#: Seconds between two looks at events, stop requests and the deadline; a wait for each event would
#: cost more than all else that is done for it. And until an answer told how many connections there
#: are.
_TICK, _FIRST_TICK = 0.1, 0.01
#: Seconds that running fetches have to end once they are cancelled. They take milliseconds,
#: unless they still connect.
_FAREWELL = 5.0
#: The scope of a fault that is this machine's rather than some bucket's.
_HERE = ""


@dataclass(eq=False)
class Pool:
    """The threads of one prewarm; see the module. Used once.

    Attributes:
        cache: where to.
        plan: what to fetch.
        stop: set from outside, in order to stop.
        jobs: most shards at a time.
        best_effort: whether a shard that finds no room is left out and has not failed.
        max_failures: stop at the next failure after so many; None goes on.
        rate: most bytes per second; None for no limit.
        end: when to stop, of the monotonic clock.
        results: of each shard that was tried, by key.
        stopped: why no further shard was started, or None.
    """

    cache: Cache
    plan: PrewarmPlan
    stop: threading.Event
    jobs: int
    best_effort: bool = False
    max_failures: int | None = None
    rate: int | None = None
    end: float = math.inf
    results: dict[str, ShardResult] = field(default_factory=dict)
    stopped: Stopped | None = None

    def __post_init__(self) -> None:
        done = self.plan.left_out | self.plan.unconfirmed.keys()
        self._todo = deque(shard for shard in self.plan.shards if shard.key not in done)
        self.jobs = min(self.jobs, len(self._todo))
        self._throttle = None if self.rate is None else Throttle(self.rate)
        self._events: deque[Event] = deque()
        self._cut_at: float | None = None  # when running fetches were called off
        self._running: dict[str, Download] = {}
        self._helped: dict[str, Progress] = {}  # of the shards that helpers download
        self._helpers: list[Helper] = []
        self._working = self._failures = 0  # threads that fetch; shards that failed
        self._misfits = 0  # shards in a row that found no room
        self._refused: Counter[str] = Counter()  # by scope: a bucket, or this machine
        self._succeeded: set[str] = set()
        self._ended = threading.Condition()  # guards all of the above

    def work(self, report: Callable[[list[Event]], None]) -> None:
        """Fetch until everything is done or the pool is stopped.

        ``report`` is called in the calling thread, with the events since its last call.

        Raises:
            KeyboardInterrupt, and what ``report`` raises: once the fetches have ended.
        """
        process, now = self.cache.processes.here(), clock.time()
        process.site()
        for entry in self.plan.cached.values():  # now none is evicted to make room for others
            process.tier_of(entry.directory).store.touch(entry.directory, now)
        try:
            self._attend(report)
        except BaseException:
            with self._ended:
                self._halt(Stopped.REQUESTED)
            self._attend(lambda events: None)
            raise

    def progress(self) -> dict[str, Progress]:
        """Return how far the shards are that are being downloaded, by key."""
        return {key: download.progress() for key, download in list(self._running.items())}

    # -- the calling thread ----------------------------------------------------

    def _attend(self, report: Callable[[list[Event]], None]) -> None:
        """Start threads, report events and watch for reasons to stop, until all is done."""
        connections = self.cache.processes.here().engine.connections
        while self._start_threads(connections.limit):
            with self._ended:
                tick = _TICK if connections.known else _FIRST_TICK
                self._ended.wait_for(lambda: not (self._working or self._helpers), tick)
                if self.stop.is_set():
                    self._halt(Stopped.REQUESTED)
                elif clock.monotonic() >= self.end:
                    self._halt(Stopped.DEADLINE)
            report(_taken(self._events))
            if self._cut_at is not None:
                for download in list(self._running.values()):
                    download.cancel()
                for helper in list(self._helpers):
                    helper.send(None)
                if clock.monotonic() - self._cut_at > _FAREWELL:
                    break
        report(_taken(self._events))

    def _start_threads(self, connections: int) -> bool:
        """Have a thread for each connection: more of them would only wait for each other.

        False if there is nothing left to do or to wait for.
        """
        while self._todo and self._working < min(self.jobs, connections):
            with self._ended:
                self._working += 1
            threads.start(self._work, "shardcache-prewarm")
        return bool(self._working or self._helpers or self._todo)

    # -- helpers -----------------------------------------------------------------

    def share(self, helpers: Sequence[Helper]) -> None:
        """Give each helper an equal share, and follow it in a thread. Call before `work`."""
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
            sizes = self.plan.sizes
            known = {shard.key: sizes[shard.key] for shard in share if shard.key in sizes}
            outdated = self.plan.outdated
            plan = PrewarmPlan(tuple(share), {}, known, 0, 0, 0, outdated=outdated)
            # Pickled shards lack their secrets, and the helper downloads with them.
            helper.send((plan, [shard.raw for shard in share], options))
            self._helpers.append(helper)
            threads.start(partial(self._follow, helper, share), "shardcache-prewarm-helper")

    def _follow(self, helper: Helper, share: list[ShardURL]) -> None:
        """Note what a helper does, as if it were done here."""
        left = {shard.key: shard for shard in share}
        stopped: Stopped | None = None
        for events, records, progress, stopped in helper.messages():  # noqa: B007 - the last one
            for record in records:
                logging.getLogger(record.name).handle(record)
            for event in events:
                if isinstance(event, Started):
                    key = event.shard.key
                    self._events.append(Started(event.shard, partial(self._progress_of, key)))
                else:
                    del left[event.shard.key]
                    self._finish(event)
            self._helped |= progress
        with self._ended:
            if left and not (stopped or self.stopped):
                logger.warning("a process of this prewarm died; its shards are fetched here")
                self._todo.extend(left.values())
            self.stopped = self.stopped or stopped
            self._helpers.remove(helper)
            self._ended.notify()

    # -- the other threads -----------------------------------------------------

    def _work(self) -> None:
        try:
            while (download := self._next()) is not None:
                result = self._fetch(download)
                self._finish(Finished(download.shard, result))
        finally:
            with self._ended:
                self._working -= 1
                self._ended.notify()

    def _next(self) -> Download | None:
        """Begin with a shard, unless its bucket is given up."""
        with self._ended:
            while self._todo:
                shard = self._todo.popleft()
                if self._is_hopeless(_HERE) or self._is_hopeless(_bucket(shard)):
                    self.stopped = self.stopped or Stopped.REFUSED
                    continue
                outdated = self.plan.outdated.get(shard.key, frozenset())
                listed = self.plan.size_of(shard)
                download = Download(
                    shard, listed=listed, outdated=outdated, throttle=self._throttle
                )
                self._running[shard.key] = download
                self._events.append(Started(shard, download.progress))
                return download
            return None

    def _fetch(self, download: Download) -> ShardResult:
        size = download.listed
        began = clock.monotonic()
        error: Exception | None = None
        try:
            opened, how = self.cache.opener.obtain(download)
            opened.close()
            size = opened.size
            outcome = Outcome.CACHED if how == "hit" else Outcome(how)
        except FetchCancelledError as exn:
            outcome, error = Outcome.NOT_STARTED, exn
        except Exception as exn:  # noqa: BLE001 - the error of one shard belongs into its result
            room = self.best_effort and is_full(exn)
            outcome, error = (Outcome.LEFT_OUT if room else Outcome.FAILED), exn
        progress, seconds = download.progress(), clock.monotonic() - began
        if error is not None and progress.size is not None:
            size = progress.size
        return ShardResult(
            *(str(download.shard), outcome, size, seconds),
            *(progress.received, progress.retries, error),
        )

    def _progress_of(self, key: str) -> Progress:
        """How far a helper is with a shard."""
        return self._helped.get(key, Progress())

    def _finish(self, event: Finished) -> None:
        """Note a result, and draw conclusions for the shards to come."""
        shard, result = event
        error = result.error
        with self._ended:
            self._running.pop(shard.key, None)
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
                elif isinstance(error, OSError) and not isinstance(error, ShardCacheError):
                    self._refused[_HERE] += 1
                self._failures += 1
                if self.max_failures is not None and self._failures > self.max_failures:
                    self._halt(Stopped.FAILURES)
            elif result.outcome is not Outcome.CACHED:
                self._misfits = 0
                self._succeeded |= {_HERE, _bucket(shard)}
        self._events.append(event)

    def _is_hopeless(self, scope: str) -> bool:
        patience = max(_REFUSALS, self._working)
        return self._refused[scope] >= patience and scope not in self._succeeded

    def _halt(self, reason: Stopped) -> None:
        """Start nothing more; call off what is running, unless it may find room."""
        self.stopped = self.stopped or reason
        self._todo.clear()
        if reason is not Stopped.FULL and self._cut_at is None:
            self._cut_at = clock.monotonic()


def _taken(found: deque[T]) -> list[T]:
    """What is in a deque, which other threads may go on to fill."""
    return [found.popleft() for _ in range(len(found))]


def _bucket(shard: ShardURL) -> str:
    """What credentials and endpoints are valid for: scheme and bucket or host."""
    return "/".join(shard.canonical.split("/")[:3])


# -- in a helper ---------------------------------------------------------------


class _Forward(logging.Handler):
    """Has the owner log what a helper logs: one process writes to the terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.records: deque[logging.LogRecord] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        self.records.append(record)


def serve(cache: Cache, owner: Channel) -> None:
    """Do a share of a prewarm, in a helper: the owner sends the task, and then when to stop."""
    if (task := owner.recv()) is None:
        return
    plan, raws, options = task
    shards = tuple(replace(each, raw=raw) for each, raw in zip(plan.shards, raws, strict=True))
    plan = replace(plan, shards=shards)
    stop, log = threading.Event(), _Forward()
    logging.getLogger("shardcache").handlers[:] = [log]
    pool = Pool(cache, plan, stop, **options)

    def report(events: list[Event]) -> None:
        if owner.poll():
            owner.recv()
            stop.set()
        records = _taken(log.records)
        owner.send((list(map(_portable, events)), records, pool.progress(), pool.stopped))

    with cache:
        pool.work(report)


def _portable(event: Event) -> Event:
    """An event that can be pickled."""
    if isinstance(event, Started):
        return Started(event.shard, Progress)
    return Finished(event.shard, event.result.portable()) if isinstance(event, Finished) else event
