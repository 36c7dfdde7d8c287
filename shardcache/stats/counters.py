"""Count the events of one process in memory, and add the counts to the node's database.

While bytes are read, a thread writes the counts every second. Any other event writes them if the
last write was at least a second ago, and the process writes them when it ends. If the database
cannot be written, nothing else fails.

Counting is reentrant: the garbage collector may close a stream while the same thread is counting,
and the closed stream is counted as well.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty

from shardcache import clock, threads
from shardcache.faults import ignoring, system_error
from shardcache.layout import Layout
from shardcache.ranks import Ranks, run_of_this_process
from shardcache.stats import database
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)


#: Seconds between two writes to the database.
_INTERVAL = 1.0
#: Seconds to wait while other processes write to the database: during reads, and at the end.
_BUSY, _LAST_BUSY = 0.1, 2.0
#: Outcome of an open -> its counter, and the counter of the time waited.
_OUTCOMES = {
    "hit": ("hits", "wait_us_disk"),
    "linked": ("linked", "wait_us_disk"),
    "coalesced": ("coalesced", "wait_us_lock"),
    "fetched": ("misses", "wait_us_network"),
}


class Counters:
    """The counters of one process. Outside any job, it has no ``ranks``.

    ``where`` returns the node's namespace, which has the database, and ``allowed`` whether the disk
    may be written. Only with ``is_job`` are opens counted: those of a command train nothing.
    """

    def __init__(
        self,
        where: Callable[[], Layout],
        ranks: Ranks | None = None,
        allowed: Callable[[], bool] = lambda: True,
        *,
        is_job: bool = True,
    ) -> None:
        self._where: Callable[[], Layout] | None = where  # None in a forked child
        self._rank = database.NO_RANK if ranks is None or ranks.launcher == "none" else ranks.rank
        self._allowed, self._is_job = allowed, is_job
        self._run = run_of_this_process()[1]
        self._guard, self._writing = threading.RLock(), threading.RLock()
        self._counted: defaultdict[str, int] = defaultdict(int)
        # The counts that are already in the database of the node, and in that of the run.
        self._written, self._written_of_run = Counter[str](), Counter[str]()
        self._due = 0.0  # time of the next write, on the monotonic clock
        self._soon = False  # whether a thread is about to write
        self._flushed = threads.Queue[None]()  # ends that thread

    def add(self, counts: Mapping[str, int]) -> None:
        if self._where is None:
            return
        with self._guard:
            for name, count in counts.items():
                self._counted[name] += count
        if not self._soon and clock.monotonic() >= self._due:
            self._write(wait=0.0)

    def read(self, count: int, name: str = "bytes_opened") -> None:
        """Add bytes that a reader has just read to a counter.

        May start a thread, so code that the garbage collector may run must not call this method.
        """
        if self._where is None:
            return
        with self._guard:
            self._counted[name] += count
        if not self._soon:
            self._soon = True
            try:
                threads.start(self._write_soon, "shardcache-stats")
            except BaseException as exn:
                self._soon = False
                if not isinstance(exn, threads.NoThreadError):  # a signal handler raised
                    raise
                self.add({})  # write in this thread

    def opened(self, outcome: str, seconds: float, tier: int | None = None) -> None:
        """Count an open with its outcome, and the seconds that its reader waited.

        ``tier`` is the number, from 0, of the tier that had the shard; None if there are no tiers.
        The third tier and all later ones are counted together.
        """
        # Repeats `add` instead of calling it: a hit must not cost much more than an open().
        if self._where is None or not self._is_job:
            return
        name, wait = _OUTCOMES[outcome]
        with self._guard:
            counted = self._counted
            counted[name] += 1
            counted[wait] += int(seconds * 1e6)
            if tier is not None:
                counted[f"hits_tier_{min(tier, 2) + 1}"] += 1
        if not self._soon and clock.monotonic() >= self._due:
            self._write(wait=0.0)

    def fetched(
        self, shard: ShardURL, *, size: int, seconds: float, retries: int, upstream: bool
    ) -> None:
        """Count and log a download that ended. Its bytes were counted as they arrived."""
        if logger.isEnabledFor(logging.INFO):
            source = "upstream" if upstream else "origin"
            extra = {"event": "fetched", "shard": str(shard), "bytes": size, "seconds": seconds}
            extra |= {"retries": retries, "source": source}
            took = format_bytes(size), source, format_duration(seconds)
            logger.info("%s: fetched %s from its %s in %s", shard, *took, extra=extra)
        counts = {"fetches": 1, "fetches_upstream": int(upstream), "bytes_stored": size}
        self.add({**counts, "retries": retries})

    def flush(self) -> None:
        self._write(_LAST_BUSY)
        if self._soon:
            self._flushed.put(None)

    def snapshot(self) -> Counter[str]:
        with self._guard:
            return Counter(self._counted)

    def _write_soon(self) -> None:
        """Write the counts every second, until nothing was counted for a second."""
        seen, has_ended = None, False
        while not has_ended:
            with contextlib.suppress(Empty):
                self._flushed.get(timeout=_INTERVAL)
                has_ended = True
            with self._guard:  # `read` starts another thread if it counts after this
                has_ended |= self._counted == seen
                self._soon, seen = not has_ended, self.snapshot()
            self._write(wait=0.0)

    def _write(self, wait: float) -> None:
        """Add the counts since the last write to the database.

        They stay in memory if the disk failed recently, or if others write longer than ``wait``.
        """
        self._due = clock.monotonic() + _INTERVAL  # set first, so that other threads do not write
        try:
            if not self._writing.acquire(wait > 0, wait or -1):
                return
            counted, patience = self.snapshot(), max(_BUSY, wait)
            # The summary of `shardcache run` must count no other jobs.
            if self._run and self._where and (row := counted - self._written_of_run):
                with ignoring(OSError):  # the command has ended, or runs on another node
                    database.add(Layout(Path(self._run).parent), self._rank, 0, row, patience)
                    self._written_of_run = counted
            if self._where and (row := counted - self._written) and self._allowed():
                database.add(self._where(), self._rank, clock.time(), row, patience)
                self._written = counted
        except system_error() as exn:
            logger.debug("the counts could not be written yet: %s", exn)
        finally:
            try:  # noqa: SIM105 - a signal handler could raise before `suppress` does anything
                self._writing.release()
            except RuntimeError:  # another thread writes
                pass

    def disown(self) -> None:
        """Count nothing from now on, in a forked child: the parent writes these counts."""
        self._where = None
