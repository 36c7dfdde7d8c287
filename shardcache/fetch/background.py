"""Fetches that go on in the background of a process, and how many there still want them.

    join ----> a thread fetches, or waits for whoever does
      | many may join one          | tells of its partial, which they read
    leave, leave, ... the last ----> called off, unless it is to be finished, or almost is

The last to leave is often the garbage collector, in any thread and at any moment. So one reentrant
lock guards all fetches of a process, and nobody waits for anything else while holding it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from shardcache import threads
from shardcache.fetch.coordinator import Obtained
from shardcache.fetch.status import FetchStatus
from shardcache.urls import ShardURL

__all__ = ["Fetching", "Fetchings"]

logger = logging.getLogger(__name__)


#: Bytes that are fetched sooner than a second fetch would begin: one request's.
_ALMOST = 16 << 20

#: Fetches a shard and keeps the status; the answer is None where it was not to wait for others.
Fetch: TypeAlias = Callable[[FetchStatus], Obtained | None]


class Fetching:
    """One shard on its way; made by `Fetchings.join`.

    Attributes:
        shard: which.
        status: how far it is.
        done: whether it ended.
        obtained: what it ended with, the entry pinned until the last has left; None also where
            it was not to wait for somebody else.
        error: what it ended with, if that was an error.
        changes: how often there was more.
    """

    def __init__(self, shard: ShardURL, table: Fetchings) -> None:
        self.shard = shard
        self.status = FetchStatus(listener=self._notify)
        self.done = False
        self.obtained: Obtained | None = None
        self.error: BaseException | None = None
        self.changes = 0
        self.wanted = 0
        self.finish = False
        self._table = table
        self._pid = os.getpid()
        self._changed = threading.Condition(table.guard)

    @property
    def alive(self) -> bool:
        """Whether it goes on, or has ended, in this process: in a forked child it does not."""
        return self._pid == os.getpid()

    def wait(self, over: Callable[[], bool], seconds: float | None = None) -> None:
        """Until something is so, or the time is over."""
        with self._changed:
            self._changed.wait_for(over, seconds)

    def leave(self) -> None:
        """Want it no longer; called once for each `Fetchings.join`."""
        with self._table.guard:
            self.wanted -= 1
            if self.wanted:
                return
            if self.done:
                self._drop()
                return
            size = self.status.size
            almost = size is not None and size - self.status.written <= _ALMOST
            if not (self.finish or almost):
                self._table.cancel(self)

    def run(self, fetch: Fetch) -> None:
        """Fetch, in a thread of its own."""
        try:
            self.obtained = fetch(self.status)
        except BaseException as exn:  # noqa: BLE001 - raised by whoever waits for it
            self.error = exn
        self.end()

    def end(self) -> None:
        """Tell all who wait that it is over."""
        with self._table.guard:
            self._table.remove(self)
            self.done = True
            unheard = None if self.wanted else self.error
            if not self.wanted:
                self._drop()
            self._notify()
            # The two refer to one another; the entry must not stay pinned until a collection.
            self.status.listener = None
        if unheard is not None:  # nobody is left to raise it
            logger.info("%s: not fetched in the background: %s", self.shard, unheard)

    def _drop(self) -> None:
        """Let go of the entry, and of an answer, after the last has left."""
        obtained, self.obtained = self.obtained, None
        if obtained is not None:
            obtained.opened.close()
        if self.status.answers:
            self.status.drop_answer()

    def _notify(self) -> None:
        """Wake all who wait."""
        with self._changed:
            self.changes += 1
            self._changed.notify_all()


class Fetchings:
    """The background fetches of one process, at most one per shard."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self._running: dict[str, Fetching] = {}

    def join(self, shard: ShardURL, fetch: Fetch, *, finish: bool = False) -> tuple[Fetching, bool]:
        """Add a reader of a shard, and start its fetch if none is running.

        Args:
            shard: the shard to fetch.
            fetch: fetches it.
            finish: fetch all of it, even if all readers leave.

        Returns:
            The fetch, and whether it was started.

        Raises:
            OSError: the process must not have more threads.
        """
        with self.guard:
            fetching = self._running.get(shard.key)
            begun = fetching is None
            if fetching is None:
                fetching = self._running[shard.key] = Fetching(shard, self)
            fetching.wanted += 1
            fetching.finish |= finish
        if begun:
            # Not under the lock: starting waits for the new thread, which may want the lock.
            try:
                threads.start(lambda: fetching.run(fetch), f"shardcache-{shard.key[:8]}-fetch")
            except RuntimeError as exn:
                fetching.error = error = OSError(errno.EAGAIN, str(exn))
                fetching.end()
                fetching.leave()
                raise error from exn
        return fetching, begun

    def close(self) -> None:
        """Cancel the fetches that have no reader, also those that were to be finished."""
        with self.guard:
            for fetching in self.unfinished():
                if not fetching.wanted:
                    self.cancel(fetching)

    def unfinished(self) -> list[Fetching]:
        """What is on its way, or is waited for."""
        with self.guard:
            return list(self._running.values())

    def cancel(self, fetching: Fetching) -> None:
        """End a fetch now. A reader that joins later begins another one, which resumes."""
        fetching.status.cancel()
        self.remove(fetching)

    def remove(self, fetching: Fetching) -> None:
        """Let nobody join it any more."""
        if self._running.get(fetching.shard.key) is fetching:
            del self._running[fetching.shard.key]
