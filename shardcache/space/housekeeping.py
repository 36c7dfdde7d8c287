"""Cleaning beside a job, so that a node without cron stays within its bounds.

Every few minutes one of the processes that use a cache removes what dead ones left and brings it
within its limits, in a thread of its own, and a little below them: so who has to make room for a
shard seldom has to look at all entries first. It does what ``shardcache clean`` does, under the
same lock, and only if nobody else has done so lately. What running jobs use stays.

A RAM disk is looked at every few seconds: as the job's own memory grows, the cgroup leaves less for
the disk than it had when it was filled, and the kernel would kill the job, not ask the cache.

It takes little of a processor (`_PAUSE`), and what it meets is no error of the job's: a disk that
fails is found by who reads or writes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardcache import threads
from shardcache.clock import Clock
from shardcache.errors import LockTimeoutError
from shardcache.space.clean import clean
from shardcache.space.tiers import Tier
from shardcache.store.store import Entry

__all__ = ["Housekeeper"]

logger = logging.getLogger(__name__)

#: Seconds between two rounds of a node, and from a process's first use of the cache to its own
#: first look whether one is due.
INTERVAL = 300.0
_FIRST = 60.0
#: Seconds between two looks at how much memory is left.
_GLANCE = 2.0
#: The part of ``max_size`` that a round leaves.
_SOFT = 0.95
#: So many entries are looked at in a row (about 4 ms), then so many seconds nothing is done.
_ROW = 200
_PAUSE = 0.02
#: Seconds that the end of a process waits for a round; what it was at can be left at any point.
_FAREWELL = 2.0


class _EndError(Exception):
    """The process ends."""


class Housekeeper:
    """Sees to it that a round is made. Safe between the threads of one process.

    Args:
        tier: what is cleaned.
        clock: time.

    Attributes:
        due: when to look again, of the monotonic clock; before that it is of no use.
    """

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._next = clock.monotonic() + _FIRST
        self.due = 0.0
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin a round if one is due. Costs a look at the clock."""
        if self._clock.monotonic() < self.due or not self._guard.acquire(blocking=False):
            return
        try:
            now = self._clock.monotonic()
            pressed, self.due = self._glance(), now + _GLANCE
            if now >= self._next:
                self._next = now + INTERVAL
                self._start(self._run)
            elif pressed:
                self._start(self._relieve)
            elif pressed is None:
                self.due = self._next
        finally:
            self._guard.release()

    def _start(self, work: Callable[[], None]) -> None:
        try:
            thread = threads.start(work, "shardcache-clean")
        except RuntimeError as exn:  # a limit of processes
            logger.debug("no cleaning: %s", exn)
        else:
            self._thread = thread

    def _glance(self) -> bool | None:
        """Whether memory is short; None where that is not the question."""
        try:
            return self._tier.space().is_pressed
        except OSError as exn:
            logger.debug("whether memory is short is not known: %s", exn)
            return None

    def _relieve(self) -> None:
        try:
            freed = self._tier.space(through=self._gently).relieve()
        except _EndError:
            logger.debug("the process ended while memory was given back")
        except OSError as exn:
            logger.info("no memory was given back: %s", exn)
        else:
            logger.info("gave %d bytes of %s back to the job", freed, self._tier.config.dir)

    def close(self) -> None:
        """End a round that is under way."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_FAREWELL)

    def _run(self) -> None:
        try:
            if self._is_due():
                self._round()
        except _EndError:
            logger.debug("cleaning was ended with the process")
        except LockTimeoutError as exn:
            logger.debug("%s", exn)
        except OSError as exn:
            logger.info("cleaning beside the job failed: %s", exn)

    def _is_due(self) -> bool:
        """Whether nobody has cleaned the root lately: who does writes to the lock's file."""
        try:
            last = os.lstat(self._tier.namespaces.node.named_lock("clean")).st_mtime
        except FileNotFoundError:
            return True
        return not 0 <= self._clock.time() - last < INTERVAL

    def _round(self) -> None:
        space = self._tier.space(through=self._gently)
        with space.sole_cleaner(wait=False):
            limits = space.limits()
            if limits.max_size is not None:
                limits = replace(limits, max_size=int(limits.max_size * _SOFT))
            report = clean(space, self._tier.stores(), limits)
        if report.removed:
            logger.info("cleaned: %d removed, %d bytes", len(report.removed), report.freed)

    def _gently(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        for number, entry in enumerate(entries, 1):
            yield entry
            if number % _ROW == 0 and self._ended.wait(_PAUSE):
                raise _EndError
