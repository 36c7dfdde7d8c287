"""Fetches that go on in the background of a process, and who still wants them.

    join: a `Share` of it ----> a thread fetches, or waits for whoever does
      | many may join one          | tells of its partial, which they read
    leave, leave, ... the last ----> called off, unless it is to be finished, or almost is

A fetch nobody waits for (`ahead`) does not wait either: where another process has the
shard in hand, its thread ends. Who joins while it looks makes it patient, in time or
not at all: then it has ended, and another is begun.

A share that is dropped is left, as a file that is dropped is closed: an interrupt may strike
before anybody has it. So the last to leave is often the garbage collector, in any thread and
at any moment, and leaving takes one reentrant lock that nothing else is waited for under.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from shardcache import threads
from shardcache.fetch.coordinator import Obtained
from shardcache.fetch.status import FetchStatus
from shardcache.urls import ShardURL

__all__ = ["Fetching", "Fetchings", "Share"]

logger = logging.getLogger(__name__)


#: Bytes that are fetched sooner than a second fetch would begin: one request's.
_ALMOST = 16 << 20

#: Does the work, given the status to keep and whether to wait for others: `Obtained`, or
#: None where it was not to wait.
Run = Callable[[FetchStatus, Callable[[], bool]], Obtained | None]


class Share:
    """A wish to have a shard; of `Fetchings.join`. For one thread.

    Attributes:
        fetching: what fetches it; None when it was left.
        began: whether its wish began the fetch.
    """

    def __init__(self, table: Fetchings) -> None:
        self.fetching: Fetching | None = None
        self.began = False
        self._table = table
        self._pid = os.getpid()

    @property
    def alive(self) -> bool:
        """Whether its fetch may go on: it does not in a child of the process."""
        return self.fetching is not None and self._pid == os.getpid()

    def leave(self, *, abandon: bool = False) -> None:
        """Want it no longer; with ``abandon`` it need not be finished."""
        if self.alive:
            self._table.leave(self, abandon)

    __del__ = leave


class Fetching:
    """One shard on its way; made by `Fetchings.join`.

    Attributes:
        shard: which.
        status: how far it is.
        done: whether it ended.
        obtained: the entry, pinned until the last has left.
        error: what it ended with, if that was an error.
    """

    def __init__(self, shard: ShardURL, run: Run, table: Fetchings) -> None:
        self.shard = shard
        self.status = FetchStatus(listener=self.notify)
        self.done = False
        self.error: BaseException | None = None
        self._run = run
        self._table = table
        self.obtained: Obtained | None = None
        self._changed = threading.Condition()
        self._changes = 0
        # Under the table's lock:
        self.wanted = 0
        self.patient = False
        self.finish = False

    def work(self) -> None:
        """Fetch, in a thread of its own."""
        try:
            self.obtained = self._run(self.status, lambda: self._table.is_patient(self))
        except BaseException as exn:  # noqa: BLE001 - raised by whoever waits for it
            self.error = exn
        self._table.ended(self)

    def drop(self) -> None:
        """Let go of the entry, after the last has left."""
        obtained, self.obtained = self.obtained, None
        if obtained is not None:
            obtained.opened.close()
        self.status.drop_answer()

    def notify(self) -> None:
        """Wake all who wait."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    @property
    def changes(self) -> int:
        """How often there was more, for `wait`."""
        return self._changes

    def wait(self, seen: int, seconds: float) -> None:
        """Until there is more than at ``seen`` changes, or the time is over."""
        with self._changed:
            if self._changes == seen:
                self._changed.wait(seconds)

    def wait_begun(self, *, whole: bool) -> None:
        """Until there is a partial, or with ``whole`` until it ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.done or not (whole or self.status.partial is None))

    @property
    def almost(self) -> bool:
        """Whether it is as good as there: then it is not called off."""
        size = self.status.size
        return size is not None and size - self.status.written <= _ALMOST


class Fetchings:
    """The background fetches of one process, at most one per shard."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._running: dict[str, Fetching] = {}

    def join(
        self, shard: ShardURL, run: Run, *, ahead: bool = False, finish: bool = False
    ) -> Share:
        """Want a shard, and begin to fetch it if nobody here does.

        Args:
            shard: which.
            run: does it.
            ahead: nobody waits for it yet.
            finish: fetch all of it, even if all leave.

        Raises:
            RuntimeError: the process must not have more threads.
        """
        begun = None
        share = Share(self)
        with self._guard:
            fetching = self._running.get(shard.key)
            if fetching is None:
                fetching = begun = self._running[shard.key] = Fetching(shard, run, self)
                share.began = True
            fetching.wanted += 1
            share.fetching = fetching
            fetching.patient |= not ahead
            fetching.finish |= finish
        if begun is not None:
            # Not under the lock: starting waits for the new thread, which may want the lock.
            try:
                threads.start(begun.work, f"shardcache-{shard.key[:8]}-fetch")
            except RuntimeError as exn:
                begun.error = exn
                self.ended(begun)
                share.leave(abandon=True)
                raise
        return share

    def is_patient(self, fetching: Fetching) -> bool:
        """Whether somebody waits for it; if not it is not to be joined any more."""
        with self._guard:
            if not fetching.patient:
                self._remove(fetching)
            return fetching.patient

    def ended(self, fetching: Fetching) -> None:
        """Called by the thread of a fetch when it is over."""
        with self._guard:
            self._remove(fetching)
            unheard = fetching.error if fetching.wanted == 0 else None
            if fetching.wanted == 0:
                fetching.drop()
            fetching.done = True
        if unheard is not None:  # nobody is left to raise it
            logger.info("%s: not fetched in the background: %s", fetching.shard, unheard)
        # Not under the lock: who waits may be leaving another fetch, by garbage collection.
        fetching.notify()
        # The two refer to one another; the entry must not stay pinned until a garbage collection.
        fetching.status.listener = None

    def leave(self, share: Share, abandon: bool) -> None:
        """See `Share.leave`."""
        with self._guard:
            fetching, share.fetching = share.fetching, None
            if fetching is None:
                return
            fetching.wanted -= 1
            fetching.finish &= not abandon
            if fetching.wanted:
                return
            if fetching.done:
                fetching.drop()
            elif not (fetching.finish or fetching.almost):
                fetching.status.called_off = True
                self._remove(fetching)  # who comes now begins anew, and resumes

    def close(self) -> None:
        """Call off what nobody wants any more, also where it was to be finished."""
        with self._guard:
            for fetching in list(self._running.values()):
                if fetching.wanted == 0:
                    fetching.status.called_off = True
                    self._remove(fetching)

    def unfinished(self) -> list[ShardURL]:
        """What is on its way, or is waited for."""
        with self._guard:
            return [fetching.shard for fetching in self._running.values()]

    def _remove(self, fetching: Fetching) -> None:
        if self._running.get(fetching.shard.key) is fetching:
            del self._running[fetching.shard.key]
