"""What one process counts: plain integers in memory, written to the node's database now and then.

A hit adds to four integers. Whoever counts something a second after the last write writes
(`database`); so does the end of the process. A process that is killed loses what it counted since
its last write. Nothing here fails: where the database cannot be written, statistics are lost and
nothing else.

Safe between threads. Safe within one thread, too: the garbage collector may close a stream in the
midst of counting, and that is counted as well. A forked child makes its own `Counters`; those of
its parent ignore it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping

from shardcache.clock import Clock
from shardcache.layout import Layout
from shardcache.ranks import Ranks
from shardcache.stats import database
from shardcache.stats.database import Fetch
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

__all__ = ["BUCKETS", "COUNTERS", "WAITS", "Counters", "blank", "bucket_of", "bucket_range"]
__all__ += ["wait_index"]

logger = logging.getLogger(__name__)

#: What is counted, each under the name that the database has, too.
COUNTERS = (
    "hits",
    "coalesced",
    "linked",
    "misses",
    "bypassed",
    "failed",
    "bytes_opened",
    "bytes_bypassed",
    "fetches",
    "fetches_upstream",
    "fetches_failed",
    "bytes_origin",
    "bytes_upstream",
    "retries",
    "evicted_max_size",
    "evicted_min_free",
    "evicted_inodes",
    "evicted_max_age",
    "evicted_all",
    "evicted_asked",
    "bytes_evicted",
    "errors_origin",
    "errors_integrity",
    "errors_disk",
    "bypassed_full",
    "errors_lock",
    "hits_tier_1",
    "hits_tier_2",
    "hits_tier_3",
    "wait_us_disk",
    "wait_us_lock",
    "wait_us_network",
    "bytes_stored",
)
#: What readers wait for: the disk (a hit), another process's fetch, their own fetch.
WAITS = ("disk", "lock", "network")
#: Of a histogram: powers of two of a microsecond, each in two halves, up to nineteen hours.
BUCKETS = 72

#: Seconds between two writes.
_INTERVAL = 1.0
#: Seconds to wait for the database while others write, for a reader and at the end of a process.
_BUSY = 0.1
_LAST_BUSY = 2.0
#: Minutes that are kept in memory while the database cannot be written.
_MINUTES = 60
_FETCHES = 10_000

_INDEX = {name: number for number, name in enumerate(COUNTERS)}
_HITS, _OPENED, _DISK_US = _INDEX["hits"], _INDEX["bytes_opened"], _INDEX["wait_us_disk"]
_FIRST_TIER, _TIERS = _INDEX["hits_tier_1"], 3
_NAMES = (*COUNTERS, *(f"{wait}:{bucket}" for wait in WAITS for bucket in range(BUCKETS)))
#: How an open ended -> its counter, and what its reader waited for.
_OUTCOMES = {
    "hit": ("hits", "disk"),
    "linked": ("linked", "disk"),
    "coalesced": ("coalesced", "lock"),
    "fetched": ("misses", "network"),
}


def bucket_of(seconds: float) -> int:
    """The bucket of a histogram that a wait belongs to."""
    microseconds = int(seconds * 1e6)
    if microseconds < 2:
        return max(0, microseconds)
    length = microseconds.bit_length()
    return min(BUCKETS - 1, 2 * (length - 1) + (microseconds >> (length - 2) & 1))


def bucket_range(bucket: int) -> tuple[float, float]:
    """The shortest wait of a bucket, and the shortest one that is too long for it; seconds."""
    if bucket < 2:
        return bucket / 1e6, (bucket + 1) / 1e6
    octave, half = divmod(bucket, 2)
    low = (2 + half) * 2 ** (octave - 1)
    return low / 1e6, (low + 2 ** (octave - 1)) / 1e6


def blank() -> list[int]:
    """Zeros for everything: the counters in the order of `COUNTERS`, then the histograms."""
    return [0] * len(_NAMES)


def wait_index(wait: str) -> int:
    """The position at which the histogram of a wait begins in such a list."""
    return len(COUNTERS) + WAITS.index(wait) * BUCKETS


_DISK = wait_index("disk")


class Counters:
    """See the module.

    Args:
        where: the node's namespace of the root; None counts nothing.
        clock: time.
        ranks: who we are; None outside any job.
        allowed: whether the disk may be written; a failing one is left alone for a while.
    """

    def __init__(
        self,
        where: Callable[[], Layout] | None,
        clock: Clock,
        ranks: Ranks | None = None,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._where = where
        self._clock = clock
        self._rank = None if ranks is None or ranks.source == "none" else ranks.rank
        self._job = None if ranks is None else ranks.job
        self._allowed = allowed
        self._pid = os.getpid()
        self._guard = threading.RLock()
        self._writing = threading.Lock()
        self._row = blank()
        self._total = blank()  # of all rows before this one
        self._minute = 0  # of the row, in seconds since the epoch
        self._due = 0.0  # when to write, of the monotonic clock
        self._unwritten: dict[int, Counter[str]] = {}
        self._fetches: list[Fetch] = []
        if where is not None:
            _flush_at_exit(self)

    def hit(self, size: int, seconds: float, now: float, tier: int | None = None) -> None:
        """Count a hit.

        Args:
            size: bytes of the shard.
            seconds: how long it took to open.
            now: `Clock.monotonic`.
            tier: in which of several tiers the shard was, from 0.
        """
        if self._where is None or self._foreign:
            return
        with self._guard:
            if due := now >= self._due:
                self._begin(now)
            row = self._row
            row[_HITS] += 1
            row[_OPENED] += size
            row[_DISK + bucket_of(seconds)] += 1
            row[_DISK_US] += int(seconds * 1e6)
            if tier is not None and tier < _TIERS:
                row[_FIRST_TIER + tier] += 1
        if due:
            self._write(wait=0.0)

    def add(self, counts: Mapping[str, int], wait: str | None = None, seconds: float = 0.0) -> None:
        """Count what happened, and how long somebody waited for it.

        Args:
            counts: by the names of `COUNTERS`.
            wait: what was waited for, of `WAITS`.
            seconds: how long.
        """
        if self._where is None or self._foreign:
            return
        now = self._clock.monotonic()
        with self._guard:
            if due := now >= self._due:
                self._begin(now)
            row = self._row
            for name, count in counts.items():
                row[_INDEX[name]] += count
            if wait is not None:
                row[wait_index(wait) + bucket_of(seconds)] += 1
                row[_INDEX[f"wait_us_{wait}"]] += int(seconds * 1e6)
        if due:
            self._write(wait=0.0)

    def opened(self, outcome: str, size: int, seconds: float) -> None:
        """Count an open.

        Args:
            outcome: "hit", "linked", "coalesced" or "fetched".
            size: bytes of the shard.
            seconds: how long its reader waited.
        """
        name, wait = _OUTCOMES[outcome]
        self.add({name: 1, "bytes_opened": size}, wait, seconds)

    def fetched(
        self,
        shard: ShardURL,
        *,
        size: int,
        received: int,
        seconds: float,
        retries: int,
        upstream: bool,
        done: bool,
    ) -> None:
        """Count a fetch of this process, and log it.

        Args:
            shard: which.
            size: bytes of the shard.
            received: bytes that came over the network.
            seconds: how long it took.
            retries: requests that were repeated.
            upstream: whether it came from an upstream and not from its origin.
            done: whether the shard is stored now.
        """
        if done:
            source = "upstream" if upstream else "origin"
            logger.info(
                "%s: fetched %s from %s in %s",
                shard,
                format_bytes(size),
                "an upstream" if upstream else "its origin",
                format_duration(seconds),
                extra={
                    "event": "fetched",
                    "shard": str(shard),
                    "bytes": size,
                    "seconds": seconds,
                    "retries": retries,
                    "source": source,
                },
            )
            if self._where is not None and len(self._fetches) < _FETCHES:
                fetch = Fetch(self._clock.time(), size, seconds, self._rank, str(shard))
                self._fetches.append(fetch)
        self.add(
            {
                "fetches" if done else "fetches_failed": 1,
                "fetches_upstream": int(done and upstream),
                "bytes_upstream" if upstream else "bytes_origin": received,
                "retries": retries,
                "bytes_stored": size if done else 0,
            }
        )

    def evicted(self, reason: str, size: int) -> None:
        """Count a shard that was evicted, and its bytes."""
        self.add({f"evicted_{reason}": 1, "bytes_evicted": size})

    def flush(self, wait: float = _LAST_BUSY) -> None:
        """Write what is not written yet.

        Args:
            wait: seconds to wait for others who write.
        """
        if self._where is not None and not self._foreign:
            self._write(wait)

    def snapshot(self) -> list[int]:
        """Everything counted so far, written or not, in the order of `blank`."""
        with self._guard:
            return [one + other for one, other in zip(self._total, self._row, strict=True)]

    @property
    def _foreign(self) -> bool:
        """Whether these are the parent's: its streams may be closed in a forked child, too.

        Asked before the lock is taken, which another thread of the parent may have held.
        """
        return self._pid != os.getpid()

    def _begin(self, now: float) -> None:
        self._due = now + _INTERVAL
        minute = int(self._clock.time() // 60) * 60
        if minute != self._minute:
            self._stage()
            self._minute = minute

    def _stage(self) -> None:
        """Move the row to what is to be written for its minute; under the guard."""
        fresh = blank()
        row, self._row = self._row, fresh  # the collector does not run in between
        found: Counter[str] = Counter()
        for number, count in enumerate(row):
            if count:
                self._total[number] += count
                found[_NAMES[number]] = count
        if found:
            self._put_back({self._minute: found}, [])

    def _put_back(self, rows: Mapping[int, Counter[str]], fetches: list[Fetch]) -> None:
        for minute, found in rows.items():
            self._unwritten.setdefault(minute, Counter()).update(found)
        while len(self._unwritten) > _MINUTES:
            del self._unwritten[min(self._unwritten)]
        self._fetches[:0] = fetches

    def _write(self, wait: float) -> None:
        """Write what is not written yet, unless another thread does so or the disk fails."""
        if not self._allowed() or not self._writing.acquire(wait > 0, wait or -1):
            return
        try:
            with self._guard:
                self._stage()
                rows, self._unwritten = self._unwritten, {}
                fetches, self._fetches = self._fetches, []
            if not rows and not fetches:
                return
            assert self._where is not None
            try:
                layout = self._where()
                database.add(layout, self._rank, self._job, rows, fetches, busy=max(_BUSY, wait))
            except OSError as exn:
                logger.debug("what was counted is not kept yet: %s", exn)
                with self._guard:
                    self._put_back(rows, fetches)
        finally:
            self._writing.release()


def _flush_at_exit(counters: Counters) -> None:
    """Write what is left when the process ends, if it ends in an orderly way."""
    held = weakref.ref(counters)

    def flush() -> None:
        found = held()
        if found is not None:
            found.flush()

    atexit.register(flush)
    # The children of multiprocessing end without what is registered there.
    if (util := sys.modules.get("multiprocessing.util")) is not None:
        util.Finalize(None, flush, exitpriority=0)
