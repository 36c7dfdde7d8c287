"""What one process counts: plain integers in memory, written to the node's database now and then.

What was counted is written (`database`) under the minute in which it is written: a second after
bytes were read, by a thread that lives so long, by whoever counts something else a second after
the last write, and at the end of the process. So a process that is killed, as DataLoader workers
are, loses what it counted in its last second, whatever it did before: idle ones lose nothing.
Nothing here fails: where the database cannot be written, statistics are lost and nothing else.

Safe between threads. Safe within one thread, too: the garbage collector may close a stream in the
midst of counting, and that is counted as well. A forked child makes its own `Counters`; those of
its parent count nothing there.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from shardcache import clock, threads
from shardcache.layout import Layout
from shardcache.ranks import Ranks
from shardcache.stats import database
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

__all__ = ["BUCKETS", "COUNTERS", "WAITS", "Counters", "Counts", "bucket_range"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What is counted, each under the name that the database has, too."""

    hits: int = 0  #: opens that found the shard
    coalesced: int = 0  #: opens that waited for a fetch which somebody else had begun
    linked: int = 0  #: opens that took the copy of another rank or job
    misses: int = 0  #: opens that fetched the shard
    bypassed: int = 0  #: opens that were streamed and not stored
    failed: int = 0  #: opens that raised
    bytes_opened: int = 0  #: that were read from the cache, also while it fetched them
    bytes_bypassed: int = 0  #: that were read of shards streamed and not stored
    fetches: int = 0  #: shards fetched, from wherever
    fetches_upstream: int = 0  #: of those, from an upstream
    fetches_failed: int = 0  #: fetches that failed
    bytes_origin: int = 0  #: that came from the origin
    bytes_upstream: int = 0  #: that came from upstreams
    retries: int = 0  #: requests that were repeated
    evicted_max_size: int = 0  #: entries evicted for max_size
    evicted_min_free: int = 0  #: for min_free
    evicted_max_age: int = 0  #: for max_age
    evicted_all: int = 0  #: because all were to go
    evicted_asked: int = 0  #: by name
    bytes_evicted: int = 0  #: of entries evicted or removed
    errors_origin: int = 0  #: of the origin
    errors_integrity: int = 0  #: shards that were damaged
    errors_disk: int = 0  #: of the local disk
    bypassed_full: int = 0  #: opens that were bypassed for want of room
    errors_lock: int = 0  #: of locks, and waits that were given up
    hits_tier_1: int = 0  #: hits in the first tier
    hits_tier_2: int = 0  #: in the second
    hits_tier_3: int = 0  #: in the third
    wait_us_disk: int = 0  #: microseconds that readers waited for the disk
    wait_us_lock: int = 0  #: for somebody else's fetch
    wait_us_network: int = 0  #: for their own fetch
    bytes_stored: int = 0  #: of entries that were stored


COUNTERS = tuple(field.name for field in fields(Counts))
#: What readers wait for: the disk (a hit), another process's fetch, their own fetch.
WAITS = ("disk", "lock", "network")
#: Of a histogram: powers of the root of two of a microsecond, up to nineteen hours.
BUCKETS = 72

#: Seconds between two writes.
_INTERVAL = 1.0
#: Seconds to wait for the database while others write, for a reader and at the end of a process.
_BUSY = 0.1
_LAST_BUSY = 2.0

_TIERS = tuple(name for name in COUNTERS if name.startswith("hits_tier_"))
_BUCKETS = {wait: [f"{wait}:{bucket}" for bucket in range(BUCKETS)] for wait in WAITS}
#: How an open ended -> its counter, and those of what its reader waited for.
_OUTCOMES = {
    outcome: (counter, f"wait_us_{wait}", _BUCKETS[wait])
    for outcome, counter, wait in (
        ("hit", "hits", "disk"),
        ("linked", "linked", "disk"),
        ("coalesced", "coalesced", "lock"),
        ("fetched", "misses", "network"),
    )
}


def bucket_range(bucket: int) -> tuple[float, float]:
    """The shortest wait of a bucket, and the shortest one that is too long for it; seconds."""
    return 2 ** (bucket / 2) / 1e6 if bucket else 0.0, 2 ** ((bucket + 1) / 2) / 1e6


class Counters:
    """See the module.

    Args:
        where: the node's namespace of the root; None counts nothing.
        ranks: who we are; None outside any job.
        allowed: whether the disk may be written; a failing one is left alone for a while.
    """

    def __init__(
        self,
        where: Callable[[], Layout] | None,
        ranks: Ranks | None = None,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._where = where
        self._rank = database.NO_RANK if ranks is None or ranks.source == "none" else ranks.rank
        self._allowed = allowed
        self._guard = threading.RLock()
        self._writing = threading.Lock()
        self._counted: defaultdict[str, int] = defaultdict(int)
        self._written: Counter[str] = Counter()  # how much of it is in the database
        self._due = 0.0  # when to write, of the monotonic clock
        self._soon = False  # whether a thread will write
        self._flushed = threading.Event()  # which ends that thread
        _all.add(self)

    def add(self, counts: Mapping[str, int]) -> None:
        """Count what happened, by the names of `COUNTERS`."""
        if self._where is None:
            return
        with self._guard:
            for name, count in counts.items():  # in its midst a stream may be closed, and counted
                self._counted[name] += count
        if not self._soon and clock.monotonic() >= self._due:
            self._write(wait=0.0)

    def read(self, count: int, name: str = "bytes_opened") -> None:
        """Count bytes as they are read, by the name of their counter.

        Not for what the garbage collector may call: it may start a thread.
        """
        if self._where is None:
            return
        with self._guard:
            self._counted[name] += count
        if not self._soon:
            self._soon = True
            self._flushed.clear()
            try:
                threads.start(self._write_soon, "shardcache-stats")
            except RuntimeError:  # a limit of processes: as `add`
                self._soon = False
                self.add({})

    def opened(self, outcome: str, seconds: float, tier: int | None = None) -> None:
        """Count an open: what it came to (`_OUTCOMES`), and how long it took.

        ``tier`` is in which of several tiers the shard was, from 0.
        """
        # As `add`, without a table: a hit is to be little more than an open().
        if self._where is None:
            return
        name, wait_name, buckets = _OUTCOMES[outcome]
        waited = int(seconds * 1e6)
        bucket = int(2 * math.log2(waited)) if waited > 1 else 0
        with self._guard:
            counted = self._counted
            counted[name] += 1
            counted[wait_name] += waited
            counted[buckets[bucket if bucket < BUCKETS else -1]] += 1
            if tier is not None and tier < len(_TIERS):
                counted[_TIERS[tier]] += 1
        if not self._soon and clock.monotonic() >= self._due:
            self._write(wait=0.0)

    def fetched(
        self,
        shard: ShardURL,
        *,
        size: int,
        seconds: float,
        retries: int,
        upstream: bool,
        done: bool,
    ) -> None:
        """Count a fetch of this process, and log it.

        ``size`` bytes has the shard, with ``upstream`` not from its origin; they were counted as
        they came. ``done`` says whether the shard is stored now.
        """
        source = "upstream" if upstream else "origin"
        counts = {"fetches" if done else "fetches_failed": 1, "retries": retries}
        if done:
            counts |= {"fetches_upstream": int(upstream), "bytes_stored": size}
            if logger.isEnabledFor(logging.INFO):  # what it says is not made for nobody
                extra = {"event": "fetched", "shard": str(shard), "bytes": size}
                extra |= {"seconds": seconds, "retries": retries, "source": source}
                took = format_bytes(size), source, format_duration(seconds)
                logger.info("%s: fetched %s from its %s in %s", shard, *took, extra=extra)
        self.add(counts)

    def flush(self) -> None:
        """Write what is not written yet."""
        self._write(_LAST_BUSY)
        self._flushed.set()

    def snapshot(self) -> Counter[str]:
        """Everything counted so far, written or not, by the names of the database."""
        with self._guard:
            return Counter(self._counted)

    def _write_soon(self) -> None:
        self._flushed.wait(_INTERVAL)
        self._soon = False  # what is read from now on is written in another second
        self._write(wait=0.0)

    def _write(self, wait: float) -> None:
        """Write what is not written yet, unless another thread does so or the disk fails.

        Waits so many seconds for others who write.
        """
        self._due = clock.monotonic() + _INTERVAL  # first of all, for other threads
        if not self._allowed() or not self._writing.acquire(wait > 0, wait or -1):
            return
        try:
            counted = self.snapshot()
            row = counted - self._written
            if row and self._where is not None:
                minute = int(clock.time() // 60) * 60
                database.add(self._where(), self._rank, minute, row, max(_BUSY, wait))
                self._written = counted
        except OSError as exn:
            logger.debug("what was counted is not kept yet: %s", exn)
        finally:
            self._writing.release()


_all: weakref.WeakSet[Counters] = weakref.WeakSet()


def _disown() -> None:
    """In a forked child: what its parent counts is not its own to write."""
    for counters in _all:
        counters._where = None


os.register_at_fork(after_in_child=_disown)
