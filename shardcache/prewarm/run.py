"""One prewarm: expand, plan, refuse what cannot fit, fetch, report.

    wanted_shards -> make_plan -> does it fit? -> threads: fetch, fetch, ... -> report

* Only the calling thread reports events; the other threads fetch and hand over results.
* Every shard ends up in the results exactly once, whatever happened to it.
* The failure of one shard does not stop the others, unless all shards would fail alike: after
  some refusals (credentials, endpoint, configuration, local disk) without a success the rest of
  that bucket is not tried.
* A run that is cut short waits until its fetches have released their partials, so that the next
  run can resume them. It does not wait forever.

Any number of prewarms in any number of processes may run on one cache; like all readers they
share the fetches.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardcache import clock, threads
from shardcache.config import __version__
from shardcache.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    FetchCancelledError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.fetch.connections import Throttle, parse_rate
from shardcache.fetch.status import FetchStatus
from shardcache.files import Modes
from shardcache.layout import Layout
from shardcache.origins.listing import Listing
from shardcache.prewarm.helpers import Channel, Helper
from shardcache.prewarm.plan import Share, make_plan, wanted_shards
from shardcache.results import (
    Event,
    Finished,
    Outcome,
    Planned,
    PrewarmPlan,
    PrewarmReport,
    ShardResult,
    Started,
    Stopped,
    Stopping,
    is_full,
)
from shardcache.store.root import make_root
from shardcache.units import format_bytes
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache

logger = logging.getLogger(__name__)

#: Shards at a time unless the caller says otherwise.
JOBS = 32
#: So many refusals by one bucket, without a success, are believed for all of it. One would be
#: too few: to credentials without s3:ListBucket a missing object is a 403.
_REFUSALS = 3
#: Modules of the engine that `import shardcache` leaves out; the client of S3 among them.
_ENGINE = ("fetch.coordinator", "fetch.background", "space.clean", "stats.database", "origins.s3")
#: Seconds between two looks at events, stop requests and the deadline.
_TICK = 0.1
#: Likewise until the origin has answered once.
_FIRST_TICK = 0.01
#: Seconds that running fetches have to end once they are cancelled. They take milliseconds,
#: unless they still connect or wait for another process.
_FAREWELL = 5.0
#: What `Opener.fetch` says -> outcome.
_OUTCOMES = {
    "hit": Outcome.CACHED,
    "coalesced": Outcome.COALESCED,
    "linked": Outcome.LINKED,
    "fetched": Outcome.FETCHED,
}
#: The scope of a fault that is this machine's rather than some bucket's.
_HERE = ""


def prewarm(
    cache: Cache,
    urls: str | Iterable[str | ShardURL],
    *,
    share: Share | None = None,
    jobs: int = JOBS,
    check: bool = False,
    dry_run: bool = False,
    deadline: float | None = None,
    max_failures: int | None = None,
    best_effort: bool = False,
    limit_rate: int | str | None = None,
    refresh: bool = False,
    processes: int = 1,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> PrewarmReport:
    """Bring shards into the cache before they are needed.

    Args:
        cache: where to.
        urls: one shard specification or several, see `expand`: URLs, ``{braces}``, globs and
            prefixes. What `Cache.parse` returned is not expanded.
        share: only the shards that one node's ranks read.
        jobs: most shards at a time.
        check: only tell which shards are cached.
        dry_run: only tell what would be done.
        deadline: seconds after which no shard is started and running fetches are cut short.
        max_failures: stop at the next failure after so many; None goes on.
        best_effort: leave out what does not fit instead of refusing everything.
        limit_rate: most bytes per second of all connections together: a number, or text such
            as ``"50MB"``.
        refresh: ask origins for the cached shards, and fetch those that they have replaced.
            Running jobs go on with the version that they read.
        processes: so many share the work; the others are forked at once, so for programs without
            threads only.
        on_event: called with each event, in the calling thread; must not block.
        stop: set it, from any thread or signal handler, to end early.

    Returns:
        What became of each shard.

    Raises:
        ConfigError: a URL or option that cannot work, or an unusable directory.
        CacheFullError: it does not fit; nothing was fetched.
        ShardNotFoundError: nothing matches a prefix or a pattern.
        AccessDeniedError, TransferError: a prefix or a pattern cannot be listed.
        OSError: the directory cannot be read or made.
        KeyboardInterrupt: passed on once the fetches have ended.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}. Give at least 1.", option="jobs")
    rate = None if limit_rate is None else parse_rate(limit_rate)
    began = clock.monotonic()
    looking = check or dry_run
    count = 0 if looking else min(processes, jobs) - 1
    if count:
        for name in _ENGINE:  # once, not in each process
            importlib.import_module(f"shardcache.{name}")
    helpers = [Helper(lambda channel: _serve(cache, channel)) for _ in range(count)]
    try:
        listing = Listing(cache.config)
        shards = wanted_shards(cache, [urls] if isinstance(urls, str) else urls, listing, share)
        if not looking:
            _prepare(cache)
        plan = make_plan(
            cache, shards, listing, best_effort=best_effort, ask_sizes=not check, refresh=refresh
        )
        run = _Run(
            cache,
            plan,
            jobs=jobs,
            max_failures=max_failures,
            best_effort=best_effort,
            rate=rate,
            end=None if deadline is None else began + deadline,
            emit=on_event or (lambda event: None),
            stop=stop or threading.Event(),
        )
        run.emit(Planned(plan))
        if not looking:
            _refuse_too_much(cache, plan, best_effort)
            run.run(helpers)
    finally:
        for helper in helpers:
            helper.close()
    results = run.results(Outcome.MISSING if looking else Outcome.NOT_STARTED)
    return PrewarmReport(plan, results, clock.monotonic() - began, run.stopped)


def _refuse_too_much(cache: Cache, plan: PrewarmPlan, best_effort: bool) -> None:
    if plan.missing and not best_effort:
        raise CacheFullError(
            f"{format_bytes(plan.fetch_bytes)} to fetch, {format_bytes(plan.missing)} more "
            f"than there is room for in {cache.dir}. Raise max_size, free the disk, ask for "
            "fewer shards, or take what fits (best_effort, --best-effort).",
            needed=plan.fetch_bytes,
            missing=plan.missing,
        )


def _serve(cache: Cache, channel: Channel) -> None:
    """A share of a prewarm, in a helper."""
    plan, options = channel.task()

    def emit(event: Event) -> None:
        if isinstance(event, Started):
            channel.send("started", event.shard)
        elif isinstance(event, Finished):
            channel.send("finished", *event)

    with cache:
        run = _Run(cache, plan, **options, emit=emit, stop=channel.stop)
        run.on_tick = lambda: channel.send("progress", run.progress())
        run.run()
    channel.send("end", run.stopped)


def _prepare(cache: Cache) -> None:
    """Make the directory, so that its faults are told once and not per shard."""
    try:
        make_root(cache.dir, __version__, Modes.of(cache.config.shared_group))
        if not os.access(Layout.of_root(cache.dir).partial, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except OSError as exn:
        if is_full(exn) or isinstance(exn, ShardCacheError):
            raise
        raise ConfigError(
            f"{cache.dir} cannot be used for the cache: {exn.strerror or exn}. "
            "Give a directory that this user may write to.",
            dir=cache.dir,
        ) from exn


@dataclass(eq=False)
class _Run:
    """The threads of one prewarm; see the module. Used once.

    ``end`` is in monotonic seconds, ``stopped`` says why no further shard was started. The other
    attributes are what `prewarm` was told.
    """

    cache: Cache
    plan: PrewarmPlan
    jobs: int
    max_failures: int | None
    best_effort: bool
    rate: int | None
    end: float | None
    emit: Callable[[Event], None]
    stop: threading.Event
    stopped: Stopped | None = None

    def __post_init__(self) -> None:
        done = self.plan.left_out | self.plan.unconfirmed.keys()
        self._todo = deque(shard for shard in self.plan.shards if shard.key not in done)
        self.jobs = min(self.jobs, len(self._todo))
        self._events: deque[Event] = deque()
        self._idle = threading.Event()
        self._guard = threading.Lock()  # of all below
        self._working = self._following = self._failures = self._left_out = 0
        self._running: dict[str, tuple[FetchStatus, float]] = {}
        self._results: dict[str, ShardResult] = {}
        self._refused: Counter[tuple[str, bool]] = Counter()  # (scope, was it a TransferError)
        self._succeeded: set[str] = set()
        self._given_up: set[str] = set()
        self._cut_at: float | None = None
        self._most = 0  # threads
        self._throttle = None if self.rate is None else Throttle(self.rate)
        self._helpers: list[Helper] = []
        self.on_tick: Callable[[], None] = lambda: None

    def run(self, helpers: Sequence[Helper] = ()) -> None:
        """Work until everything is done or the run is stopped; ``helpers`` do a share of it.

        Raises:
            KeyboardInterrupt, and what ``emit`` raises: once the fetches have ended.
        """
        process, now = self.cache.processes.here(), clock.time()
        process.coordinator()
        self._connections = process.fetcher.connections
        for entry in self.plan.cached.values():  # now none is evicted to make room for others
            process.store_of(entry).touch(entry.directory, now)
        try:
            self._share(helpers)
            self._work_with(self.jobs)
            if self._todo:  # of a helper that died last
                self._work_with(self.jobs)
        except BaseException:
            self.emit = lambda event: None
            with self._guard:
                self._halt(Stopped.REQUESTED, cut=True)
            self._attend()
            raise

    def results(self, otherwise: Outcome) -> tuple[ShardResult, ...]:
        """One per shard, in the order they were asked for; most are ``otherwise`` if not tried."""
        return tuple(
            self._results.get(shard.key) or self._not_done(shard, otherwise)
            for shard in self.plan.shards
        )

    def _not_done(self, shard: ShardURL, otherwise: Outcome) -> ShardResult:
        plan, key = self.plan, shard.key
        if running := self._running.get(key):
            error = FetchCancelledError(
                f"{shard}: the fetch did not end when it was called off; "
                "what was fetched is kept. Run it again.",
                url=str(shard),
            )
            return self._result(shard, Outcome.CANCELLED, *running, error)
        outcome = otherwise
        if key in plan.unconfirmed:
            outcome = Outcome.FAILED
        elif key in plan.left_out or self._left_out >= _REFUSALS:
            outcome = Outcome.LEFT_OUT
        elif key in plan.cached and otherwise is Outcome.MISSING:
            outcome = Outcome.CACHED
        size = plan.size_of(shard)
        return ShardResult(str(shard), outcome, size, error=plan.unconfirmed.get(key))

    # -- the calling thread ----------------------------------------------------

    def _work_with(self, count: int) -> None:
        self._idle.clear()
        self._most = count
        self._start_threads()
        self._attend()

    def _start_threads(self) -> None:
        """Have a thread for each connection: more of them would only wait for each other."""
        while self._working - self._following < min(self._most, self._connections.limit):
            with self._guard:
                if not self._todo:
                    return
                self._working += 1
            threads.start(self._work, "shardcache-prewarm")

    def _attend(self) -> None:
        """Report events, and watch for reasons to stop, until all threads have ended."""
        announced = self.stopped
        while self._working:
            # A wait for each event would cost more than all else that is done here. The first
            # answer of an origin says how many connections there are.
            self._idle.wait(_TICK if self._connections.known else _FIRST_TICK)
            self._start_threads()
            self._watch()
            self.on_tick()
            self._report()
            if self.stopped is not announced and self.stopped is not None:
                announced = self.stopped
                self.emit(Stopping(announced))
            if self._cut_at is not None:
                # Again and again: a fetch may begin between two of these calls.
                self.cache.processes.here().cancel()
                for helper in self._helpers:
                    helper.stop()
                if clock.monotonic() - self._cut_at > _FAREWELL:
                    break
        self._report()

    def _report(self) -> None:
        while self._events:
            self.emit(self._events.popleft())

    def _watch(self) -> None:
        with self._guard:
            if self._cut_at is not None:
                return
            if self.stop.is_set():
                self._halt(Stopped.REQUESTED, cut=True)
            elif self.end is not None and clock.monotonic() >= self.end:
                self._halt(Stopped.DEADLINE, cut=True)

    def _halt(self, reason: Stopped, *, cut: bool) -> None:
        """Start nothing more; ``cut`` ends what is running. Call with the guard held."""
        self.stopped = self.stopped or reason
        self._todo.clear()
        if cut and self._cut_at is None:
            self._cut_at = clock.monotonic()

    def progress(self) -> dict[str, tuple[int | None, int, int, int]]:
        """How far the shards are that are being fetched, by key; see `_follow`."""
        running = {key: status for key, (status, _) in list(self._running.items())}
        return {key: (s.size, s.written, s.received, s.retries) for key, s in running.items()}

    # -- helpers -----------------------------------------------------------------

    def _share(self, helpers: Sequence[Helper]) -> None:
        """Give each helper an equal share, and follow it in a thread."""
        count = 1 + min(len(helpers), max(0, self.jobs - 1))
        todo, self._todo = list(self._todo), deque(list(self._todo)[::count])
        jobs, self.jobs = self.jobs, -(-self.jobs // count)
        if self.rate is not None:
            self.rate //= count
            self._throttle = Throttle(self.rate)
        options = {
            "jobs": max(1, jobs // count),
            "max_failures": self.max_failures,
            "best_effort": self.best_effort,
            "rate": self.rate,
            "end": self.end,
        }
        for number, helper in zip(range(1, count), helpers, strict=False):
            share = todo[number::count]
            keys = {shard.key for shard in share}
            plan = replace(
                self.plan,
                shards=tuple(share),
                cached={},
                sizes={key: size for key, size in self.plan.sizes.items() if key in keys},
                outdated={key: them for key, them in self.plan.outdated.items() if key in keys},
                left_out=frozenset(),
                unconfirmed={},
            )
            with suppress(OSError):  # it died: seen below
                helper.begin(plan, options)
            self._working += 1
            self._following += 1
            self._helpers.append(helper)
            threads.start(partial(self._follow, helper, share), "shardcache-prewarm-helper")

    def _follow(self, helper: Helper, share: list[ShardURL]) -> None:
        """Note what a helper does, as if it were done here."""
        left = {shard.key: shard for shard in share}
        stopped: Stopped | None = None
        ended = False
        for kind, *news in helper.messages():
            if kind == "started":
                status = FetchStatus(listed=self.plan.size_of(news[0]))
                self._running[news[0].key] = status, clock.monotonic()
                self._events.append(Started(news[0], status))
            elif kind == "progress":
                for key, numbers in news[0].items():
                    if key in self._running:
                        status = self._running[key][0]
                        status.size, status.written, status.received, status.retries = numbers
            elif kind == "finished":
                shard, result = news
                left.pop(shard.key)
                with self._guard:
                    self._running.pop(shard.key)
                    self._results[shard.key] = result
                    self._judge(shard, result)
                self._events.append(Finished(shard, result))
            else:
                ended, stopped = True, news[0]
        with self._guard:
            if not ended and self._cut_at is None:
                logger.warning("a process of this prewarm died; its shards are fetched here")
                self._todo.extend(left.values())
                for key in left:
                    self._running.pop(key, None)
            self.stopped = self.stopped or stopped
            self._working -= 1
            self._following -= 1
            if not self._working:
                self._idle.set()

    # -- the other threads -----------------------------------------------------

    def _work(self) -> None:
        try:
            while (shard := self._next()) is not None:
                key, began = shard.key, clock.monotonic()
                status = FetchStatus(
                    listed=self.plan.size_of(shard),
                    outdated=self.plan.outdated.get(key, frozenset()),
                    throttle=self._throttle,
                )
                self._running[key] = status, began
                self._events.append(Started(shard, status))
                result = self._fetch(shard, status, began)
                with self._guard:
                    del self._running[key]
                    self._results[key] = result
                    self._judge(shard, result)
                self._events.append(Finished(shard, result))
        finally:
            with self._guard:
                self._working -= 1
                if not self._working:
                    self._idle.set()

    def _next(self) -> ShardURL | None:
        with self._guard:
            while self._todo:
                shard = self._todo.popleft()
                if not self._given_up or shard.key in self.plan.cached:
                    return shard
                if not self._given_up & {_HERE, _bucket(shard)}:
                    return shard
                self.stopped = self.stopped or Stopped.REFUSED
            return None

    def _fetch(self, shard: ShardURL, status: FetchStatus, began: float) -> ShardResult:
        error: Exception | None = None
        try:
            entry, how = self.cache.opener.fetch(shard, status)
            status.size = entry.size
            outcome = _OUTCOMES[how]
        except FetchCancelledError as exn:
            outcome, error = Outcome.CANCELLED, exn
        except Exception as exn:  # noqa: BLE001 - the error of one shard belongs into its result
            room = self.best_effort and is_full(exn)
            outcome, error = (Outcome.LEFT_OUT if room else Outcome.FAILED), exn
        return self._result(shard, outcome, status, began, error)

    def _result(
        self,
        shard: ShardURL,
        outcome: Outcome,
        status: FetchStatus,
        began: float,
        error: Exception | None,
    ) -> ShardResult:
        size = self.plan.size_of(shard) if status.size is None else status.size
        seconds = clock.monotonic() - began
        received, retries = status.received, status.retries
        return ShardResult(str(shard), outcome, size, seconds, received, retries, error)

    def _judge(self, shard: ShardURL, result: ShardResult) -> None:
        """Draw conclusions for the shards to come. Call with the guard held."""
        error = result.error
        if result.outcome is Outcome.CANCELLED:
            self._halt(Stopped.REQUESTED, cut=True)
        elif result.outcome is Outcome.LEFT_OUT:
            self._left_out += 1
            if self._left_out >= _REFUSALS:
                self._halt(Stopped.FULL, cut=False)
        elif error is None:
            if result.outcome is not Outcome.CACHED:
                self._succeeded |= {_HERE, _bucket(shard)}
        elif is_full(error):
            self._halt(Stopped.FULL, cut=False)
        else:
            self._count_refusal(shard, error)
            self._failures += 1
            if self.max_failures is not None and self._failures > self.max_failures:
                self._halt(Stopped.FAILURES, cut=True)

    def _count_refusal(self, shard: ShardURL, error: Exception) -> None:
        """Give a bucket up after so many errors that all of its shards will meet."""
        scope, patience = _bucket(shard), _REFUSALS
        broken = isinstance(error, TransferError)
        if broken:
            patience = max(_REFUSALS, self.jobs)  # all of the first wave, at least
        elif isinstance(error, ShardNotFoundError):
            return
        elif isinstance(error, OSError) and not isinstance(error, ShardCacheError):
            scope = _HERE
        elif not isinstance(error, AccessDeniedError | ConfigError):
            return
        self._refused[scope, broken] += 1
        if self._refused[scope, broken] >= patience and scope not in self._succeeded:
            self._given_up.add(scope)


def _bucket(shard: ShardURL) -> str:
    """What credentials and endpoints are valid for: scheme and bucket or host."""
    return "/".join(shard.canonical.split("/")[:3])
