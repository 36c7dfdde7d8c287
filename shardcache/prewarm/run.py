"""The workers of one prewarm, and the thread that watches over them.

* Only the calling thread reports events; workers fetch and hand over results.
* Every shard ends up in the results exactly once, whatever happened to it.
* One shard's failure does not stop the others, unless every shard would meet
  it: after some refusals (credentials, endpoint, configuration, local disk)
  without a single success, the rest of that bucket is not tried.
* As many shards at a time as bring the bytes fastest: many from far away, few from
  nearby, where more threads only get into each other's way (`climb`).
* A run that is cut short waits until its fetches have let go of their partials,
  so that the next one can resume them; but not for ever.

A `Run` is used once. `Run.run` may be stopped from any thread.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache import threads
from shardcache.clock import SYSTEM_CLOCK
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    FetchCancelledError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.fetch.connections import Climb
from shardcache.fetch.transfer import FetchStatus
from shardcache.prewarm.crew import Crew
from shardcache.prewarm.plan import PrewarmPlan
from shardcache.prewarm.report import (
    Event,
    Finished,
    Outcome,
    ShardResult,
    Started,
    Stopped,
    Stopping,
    is_full,
    plan_failure,
)
from shardcache.ranks import detect
from shardcache.store.store import Namespaces
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.fetch.connections import Throttle

__all__ = ["Run"]

#: Refusals by one bucket, without a success, that are taken for all of it. One
#: would be too few: to credentials without s3:ListBucket a missing object is a 403.
_REFUSALS = 3
#: Seconds between two looks at stop requests and the deadline.
_TICK = 0.1
#: After so many events at once, no look for so many seconds.
_MANY = 3
_PACE = 0.02
#: Shards at a time per process, to begin with and at least.
_BEGIN = 4
_LEAST = 2
#: Seconds that a number of shards at a time is tried for, after as many to settle.
_TRIAL = 0.1
#: Seconds that running fetches have to end once they are called off. They take
#: milliseconds, unless they are still connecting or wait for another process:
#: then there is nothing of theirs to be kept, and less patience will do.
_FAREWELL = 10.0
_FAREWELL_UNBEGUN = 2.0
#: What `Cache.fetch_shard` says, in our words.
_OUTCOMES = {
    "hit": Outcome.CACHED,
    "coalesced": Outcome.COALESCED,
    "linked": Outcome.LINKED,
    "fetched": Outcome.FETCHED,
}
#: The scope of a fault that is ours rather than some bucket's.
_HERE = ""


class Run:
    """See the module; arguments as those of `prewarm.prewarm`.

    Attributes:
        stopped: why no further shard was started, or None.
    """

    def __init__(
        self,
        cache: Cache,
        plan: PrewarmPlan,
        *,
        jobs: int,
        max_failures: int | None,
        best_effort: bool,
        emit: Callable[[Event], None],
        end: float | None,
        stop: threading.Event,
        crew: Crew,
        throttle: Throttle | None = None,
    ) -> None:
        self._cache = cache
        self._crew = crew
        self._throttle = throttle
        self._plan = plan
        self._max_failures = max_failures
        self._best_effort = best_effort
        self._emit: Callable[[Event], None] = emit
        self._end = end
        self._stop = stop
        done = plan.left_out | plan.unconfirmed.keys()
        self._todo = deque(shard for shard in plan.shards if shard.key not in done)
        self._working = self._jobs = min(jobs, len(self._todo))
        self._climb = Climb(self._jobs)
        self._climb.start(min(self._jobs, _LEAST * crew.size))
        self._climb.limit = min(self._jobs, _BEGIN * crew.size)
        self._received = 0  # of shards that are done
        self._trial: tuple[float, int] | None = None
        self._look_at = 0.0
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._running: dict[str, tuple[ShardURL, FetchStatus, float]] = {}
        self._results = {
            shard.key: plan_failure(plan, shard)
            for shard in plan.shards
            if shard.key in plan.unconfirmed
        }
        self._guard = threading.Lock()  # of all below
        self._changed = threading.Condition(self._guard)
        self._busy = 0
        self._alone = False
        self._refused: Counter[tuple[str, bool]] = Counter()  # (scope, whether of the transfer)
        self._good: set[str] = set()
        self._given_up: set[str] = set()
        self._failures = 0
        self._no_room = 0
        self._cut_at: float | None = None
        self.stopped: Stopped | None = None

    def run(self) -> None:
        """Work until everything is done or the run is stopped.

        Raises:
            KeyboardInterrupt, and what ``emit`` raises: once the fetches have let go.
        """
        self._touch_cached()
        try:
            for number in range(self._jobs):
                threads.start(self._work, f"shardcache-prewarm-{number}")
            self._attend()
        except BaseException:
            self._emit = lambda event: None
            with self._guard:
                self._halt(Stopped.REQUESTED, cut=True)
            self._attend()
            raise

    def _touch_cached(self) -> None:
        """Use what is there already, so that no fetch of ours makes room at its cost."""
        store = Namespaces(self._cache.config, detect()).own
        now = SYSTEM_CLOCK.time()
        for entry in self._plan.cached.values():
            store.touch(str(entry.path), now)

    def results(self) -> tuple[ShardResult, ...]:
        """One per shard, in the order they were asked for."""
        return tuple(self._results.get(s.key) or self._not_tried(s) for s in self._plan.shards)

    def _not_tried(self, shard: ShardURL) -> ShardResult:
        size = self._plan.size_of(shard)
        running = self._running.get(shard.key)
        if running is not None:
            _, status, begun = running
            error = FetchCancelledError(
                f"{shard}: the fetch did not end when it was called off; "
                "what was fetched is kept. Run it again.",
                url=str(shard),
            )
            seconds = SYSTEM_CLOCK.monotonic() - begun
            return _result(shard, Outcome.CANCELLED, status, size, seconds, error)
        if shard.key in self._plan.left_out or self._no_room >= _REFUSALS:
            return ShardResult(str(shard), Outcome.LEFT_OUT, size)
        return ShardResult(str(shard), Outcome.NOT_STARTED, size)

    # -- the calling thread ----------------------------------------------------

    def _attend(self) -> None:
        announced = self.stopped
        while self._working:
            if self._take_notes() >= _MANY:
                # Small shards: to be woken by each would cost as much as fetching some.
                self._stop.wait(_PACE)
            self._watch()
            self._measure()
            if self.stopped is not announced and self.stopped is not None:
                announced = self.stopped
                self._emit(Stopping(announced))
            if self._cut_at is not None:
                # Again and again: a fetch may begin between two of these calls.
                self._cache.cancel()
                if SYSTEM_CLOCK.monotonic() - self._cut_at > self._farewell():
                    return

    def _take_notes(self) -> int:
        """Report what has happened, waiting for a moment if nothing has; how much it was."""
        count = 0
        timeout = _TICK
        while self._working:
            try:
                event = self._events.get(timeout=timeout) if timeout else self._events.get_nowait()
            except queue.Empty:
                break
            timeout = 0.0
            count += 1
            if event is None:
                self._working -= 1
            else:
                self._take_note(event)
        return count

    def _farewell(self) -> float:
        begun = any(status.size is not None for _, status, _ in self._running.values())
        return _FAREWELL if begun else min(_FAREWELL, _FAREWELL_UNBEGUN)

    def _take_note(self, event: Event) -> None:
        if isinstance(event, Started):
            begun = SYSTEM_CLOCK.monotonic()
            self._running[event.shard.key] = (event.shard, event.status, begun)
        elif isinstance(event, Finished):
            self._running.pop(event.shard.key, None)
            self._results[event.shard.key] = event.result
            self._received += event.result.received
        self._emit(event)

    def _measure(self) -> None:
        """Find out how many shards at a time are best."""
        now = SYSTEM_CLOCK.monotonic()
        if now < self._look_at:
            return
        received = self._received + sum(s.received for _, s, _ in self._running.values())
        if self._trial is None or self._busy < self._climb.limit:
            self._trial = (now, received)
            self._look_at = now + _TRIAL
            return
        begun, before = self._trial
        limit = self._climb.limit
        rate = (received - before) / (now - begun)
        self._climb.told(rate, now, wanted=bool(self._todo))
        self._trial = None
        self._look_at = max(now + _TRIAL, self._climb.rest_until)
        if self._climb.limit > limit:
            with self._guard:
                self._changed.notify_all()

    def _watch(self) -> None:
        with self._guard:
            if self._cut_at is not None:
                return
            if self._stop.is_set():
                self._halt(Stopped.REQUESTED, cut=True)
            elif self._end is not None and SYSTEM_CLOCK.monotonic() >= self._end:
                self._halt(Stopped.DEADLINE, cut=True)

    def _halt(self, reason: Stopped, *, cut: bool) -> None:
        """Start nothing more; ``cut`` ends what is running. Call with the guard held."""
        self.stopped = self.stopped or reason
        self._todo.clear()
        self._changed.notify_all()
        if cut and self._cut_at is None:
            self._cut_at = SYSTEM_CLOCK.monotonic()

    # -- the workers -----------------------------------------------------------

    def _work(self) -> None:
        try:
            while (taken := self._next()) is not None:
                shard, alone = taken
                status = FetchStatus(
                    listed=self._plan.size_of(shard),
                    outdated=self._plan.outdated.get(shard.key, frozenset()),
                    throttle=self._throttle,
                )
                self._events.put(Started(shard, status))
                result = self._fetch(shard, status)
                with self._guard:
                    self._busy -= 1
                    if is_full(result.error) and not alone and self._cut_at is None:
                        self._todo.appendleft(shard)
                        self._alone = True
                        self._changed.notify_all()
                        continue
                    self._judge(shard, result)
                self._events.put(Finished(shard, result))
        finally:
            self._events.put(None)

    def _next(self) -> tuple[ShardURL, bool] | None:
        """The next shard, and whether nothing else of ours is in flight beside it.

        A shard that is just being published is counted as in flight and as there.
        So the first that finds no room is tried again alone before it is believed.
        """
        with self._guard:
            while self._todo and not (self._alone and self._busy):
                if self._busy >= self._climb.limit:
                    self._changed.wait()
                    continue
                shard = self._todo.popleft()
                if shard.key in self._plan.cached or not (self._given_up & {_HERE, _bucket(shard)}):
                    self._busy += 1
                    return shard, self._alone
                self.stopped = self.stopped or Stopped.REFUSED
            self._changed.notify_all()  # whoever waits has nothing to wait for
            return None

    def _fetch(self, shard: ShardURL, status: FetchStatus) -> ShardResult:
        begun = SYSTEM_CLOCK.monotonic()
        size = self._plan.size_of(shard)
        error: Exception | None = None
        try:
            size, how = self._crew.fetch_shard(shard, status)
            outcome = _OUTCOMES[how]
        except FetchCancelledError as exn:
            outcome, error = Outcome.CANCELLED, exn
        except Exception as exn:  # noqa: BLE001 - an error of one shard belongs into its result
            room = self._best_effort and is_full(exn)
            outcome, error = (Outcome.LEFT_OUT if room else Outcome.FAILED), exn
        seconds = SYSTEM_CLOCK.monotonic() - begun
        return _result(shard, outcome, status, size, seconds, error)

    def _judge(self, shard: ShardURL, result: ShardResult) -> None:
        """Draw conclusions for the shards to come. Call with the guard held."""
        error = result.error
        if result.outcome is Outcome.CANCELLED:
            self._halt(Stopped.REQUESTED, cut=True)
        elif result.outcome is Outcome.LEFT_OUT:
            self._no_room += 1
            if self._no_room >= _REFUSALS:
                self._halt(Stopped.FULL, cut=False)
        elif error is None:
            if result.outcome is not Outcome.CACHED:
                self._good |= {_HERE, _bucket(shard)}
        elif is_full(error):
            self._halt(Stopped.FULL, cut=False)
        else:
            self._refuse(shard, error)
            self._failures += 1
            if self._max_failures is not None and self._failures > self._max_failures:
                self._halt(Stopped.FAILURES, cut=True)

    def _refuse(self, shard: ShardURL, error: Exception) -> None:
        scope, patience = _bucket(shard), _REFUSALS
        if isinstance(error, TransferError):
            patience = max(_REFUSALS, self._climb.limit)  # all of the first wave, at least
        elif isinstance(error, ShardNotFoundError):
            return
        elif isinstance(error, OSError) and not isinstance(error, ShardCacheError):
            scope = _HERE
        elif not isinstance(error, AccessDeniedError | ConfigError):
            return
        kind = isinstance(error, TransferError)
        self._refused[scope, kind] += 1
        if self._refused[scope, kind] >= patience and scope not in self._good:
            self._given_up.add(scope)


def _bucket(shard: ShardURL) -> str:
    """What credentials and endpoints are valid for: scheme and bucket or host."""
    return "/".join(shard.canonical.split("/")[:3])


def _result(
    shard: ShardURL,
    outcome: Outcome,
    status: FetchStatus,
    size: int | None,
    seconds: float,
    error: Exception | None,
) -> ShardResult:
    size = status.size if size is None else size
    return ShardResult(str(shard), outcome, size, seconds, status.received, status.retries, error)
