"""What a process counts while it works: hits, bytes, waits, evictions.

    something happens --> the row of this minute, in memory --> its file (`statfile`)

The row is written with whatever is no hit, with a hit that comes a second after it was written
last, and when the process ends. One that is killed loses the hits of one second. A hit costs a
microsecond. Nothing here fails: without a disk to write to, nothing is kept.

Safe between the threads of one process; a child makes its own. Also within one thread: a stream
that the garbage collector closes tells what it came to, and the collector may run at any moment,
so also in the midst of what is done here. Whoever comes in so finds the lock its own, leaves a
note, and is counted by whoever was interrupted.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping

from shardcache.clock import Clock
from shardcache.files import random_token
from shardcache.layout import Layout
from shardcache.stats.statfile import COUNTERS, ROWS, StatFile, blank, bucket_of, wait_index

__all__ = ["SUFFIX", "Counters"]

logger = logging.getLogger(__name__)

SUFFIX = ".counts"
#: Seconds between two writes of a row, and so what a killed process loses at most.
INTERVAL = 1.0
#: Minutes after which a file counts as its process's last (`history`): then another is begun.
_STALE = ROWS

_HITS, _OPENED = COUNTERS.index("hits"), COUNTERS.index("bytes_opened")
_INDEX = {name: number for number, name in enumerate(COUNTERS)}
_DISK = wait_index("disk")
#: Tiers whose hits are counted by themselves.
_TIERS = 3
_DISK_US = _INDEX["wait_us_disk"]
_FIRST_TIER = _INDEX["hits_tier_1"]
#: What is to be counted: as the arguments of `Counters.add`.
_Note = tuple[Mapping[str, int], str | None, float]


class Counters:
    """See the module.

    Args:
        where: the node's namespace of the root, asked when a file is made; None keeps nothing.
        clock: time.
        owner: what a header says of the process, beside its host and number.
        allowed: whether the disk may be written: one that fails is left alone.
    """

    def __init__(
        self,
        where: Callable[[], Layout] | None,
        clock: Clock,
        owner: Mapping[str, object] | None = None,
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._where = where
        self._clock = clock
        self._owner = dict(owner or {})
        self._allowed = allowed
        self._pid = os.getpid()
        self._guard = threading.RLock()
        self._busy = False  # seen by who has the lock: it came in while its own thread counts
        self._notes: deque[_Note] = deque()  # what it had to count
        self._row = blank()
        self._before = blank()  # of all rows before this one
        self._minute = 0
        self._turn = 0.0  # of the monotonic clock: then the row is written, or another begun
        self._fresh = False  # whether something is not written yet
        self._file: StatFile | None = None
        self._flushes = False  # at the end of the process

    def hit(self, size: int, seconds: float, now: float, tier: int | None = None) -> None:
        """Count a hit.

        Args:
            size: bytes of the shard.
            seconds: how long it took to open.
            now: `Clock.monotonic`.
            tier: which of several it was in, from 0.
        """
        if self._where is None:
            return
        with self._guard:
            if self._busy:
                self._note_hit(size, seconds, tier)
                return
            self._busy = True
            try:
                if due := now >= self._turn:
                    self._begin(now)
                row = self._row
                row[_HITS] += 1
                row[_OPENED] += size
                row[_DISK + bucket_of(seconds)] += 1
                row[_DISK_US] += int(seconds * 1e6)
                if tier is not None and tier < _TIERS:
                    row[_FIRST_TIER + tier] += 1
                if due:
                    self._write()
                else:
                    self._fresh = True
            finally:
                self._busy = False
            if self._notes:
                self._settle()

    def add(self, counts: Mapping[str, int], wait: str | None = None, seconds: float = 0.0) -> None:
        """Count what happened, and how long somebody waited for it.

        Args:
            counts: by the names of `statfile.COUNTERS`.
            wait: what was waited for, of `statfile.WAITS`.
            seconds: how long.
        """
        if self._where is None or self._foreign:
            return
        with self._guard:
            self._notes.append((counts, wait, seconds))
            self._settle()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._foreign:
            return
        with self._guard:
            self._settle(self._flush)

    def close(self) -> None:
        """Write it; what is counted later goes into another file."""
        if self._foreign:
            return
        with self._guard:
            self._settle(self._end)

    @property
    def _foreign(self) -> bool:
        """Whether they came over a fork.

        Then the file is the parent's, and so is what is closed here and was opened there. It is
        asked before the lock is taken, which another thread of the parent may have had.
        """
        return self._pid != os.getpid()

    def snapshot(self) -> list[int]:
        """Everything counted so far, kept or not, as the values of a row (`statfile`)."""
        with self._guard:
            return [one + other for one, other in zip(self._before, self._row, strict=True)]

    def _note_hit(self, size: int, seconds: float, tier: int | None) -> None:
        counts = {"hits": 1, "bytes_opened": size}
        if tier is not None and tier < _TIERS:
            counts[f"hits_tier_{tier + 1}"] = 1
        self._notes.append((counts, "disk", seconds))

    def _settle(self, last: Callable[[], None] | None = None) -> None:
        """Count what was noted, and call ``last``; under the lock.

        Nothing where the thread is at that already: it counts before it leaves.
        """
        if self._busy:
            return
        while self._notes or last is not None:
            self._busy = True
            try:
                while self._notes:
                    self._count(*self._notes.popleft())
                if last is not None:
                    last()
                    last = None
            finally:
                self._busy = False

    def _count(self, counts: Mapping[str, int], wait: str | None, seconds: float) -> None:
        now = self._clock.monotonic()
        if now >= self._turn:
            self._begin(now)
        for name, count in counts.items():
            self._row[_INDEX[name]] += count
        if wait is not None:
            self._row[wait_index(wait) + bucket_of(seconds)] += 1
            self._row[_INDEX[f"wait_us_{wait}"]] += int(seconds * 1e6)
        self._write()  # of no weight beside what is counted here

    def _flush(self) -> None:
        if self._fresh:
            self._write()

    def _end(self) -> None:
        self._flush()
        self._next_row()
        self._file = None
        self._minute = 0
        self._turn = 0.0

    def _begin(self, now: float) -> None:
        """Begin another row if it is another minute."""
        self._turn = now + INTERVAL
        minute = int(self._clock.time() // 60)
        if minute == self._minute or not self._allowed():
            return  # what happens while a disk is left alone is counted to the minute before
        if self._fresh:
            self._write()
        self._next_row()
        file, last, self._minute = self._file, self._minute, minute
        assert self._where is not None  # or nothing would be counted
        try:
            if file is not None and 0 <= minute - last < _STALE and file.begin_row():
                return
            self._file = self._make(self._where())
        except OSError as exn:
            logger.debug("nothing is counted: %s", exn)
            self._file = None

    def _next_row(self) -> None:
        self._before = self.snapshot()
        self._row = blank()

    def _make(self, layout: Layout) -> StatFile:
        modes = layout.modes
        if modes.group is None and os.lstat(layout.base).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is another user's", os.fspath(layout.base))
        layout.mend(layout.stats)
        owner = {"host": os.uname().nodename, "pid": os.getpid(), **self._owner}
        file = StatFile(layout.stats / f"{random_token()}{SUFFIX}", modes, owner)
        file.begin_row()
        if not self._flushes:
            self._flushes = True
            _flush_at_exit(self)
        return file

    def _write(self) -> None:
        self._fresh = not self._allowed()
        if self._file is None or self._fresh:
            return
        try:
            self._file.write(self._minute, self._row)
        except OSError as exn:
            logger.debug("what was counted is not kept: %s", exn)


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
