"""Copying what was fetched to the upstreams that are to have it, behind the readers' backs.

One thread of a process copies one entry after another; who fetches or reads waits for nothing. An
entry is pinned while it is copied. What goes wrong is the upstream's to say (`upstreams`) and is
no error: another node's fetch, or the next one of this shard, will copy it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from shardcache import threads
from shardcache.origins.resolve import Origins
from shardcache.store.entry import DamagedError
from shardcache.store.store import Entry, Store
from shardcache.urls import ShardURL

__all__ = ["Copier"]

logger = logging.getLogger(__name__)

#: Entries that may wait; what is fetched faster than it can be copied is left to others.
_MOST = 10_000


class Copier:
    """Safe between the threads of one process; it is made anew in another.

    Args:
        store_of: the store of an entry.
        origins: knows the upstreams.
    """

    def __init__(self, store_of: Callable[[Entry], Store], origins: Origins) -> None:
        self._store_of = store_of
        self._origins = origins
        self._waiting: deque[tuple[ShardURL, str]] = deque(maxlen=_MOST)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, url: ShardURL, path: str) -> None:
        """Have an entry copied.

        Args:
            url: the shard.
            path: of its data.
        """
        if not self._origins.copies:
            return
        with self._changed:
            self._waiting.append((url, path))
            if self._thread is None:
                try:
                    thread = threads.start(self._run, "shardcache-copy")
                except RuntimeError as exn:  # a limit of processes
                    logger.info("%s: not copied to an upstream: %s", url, exn)
                    self._waiting.clear()
                else:
                    self._thread = thread

    def drain(self, seconds: float) -> bool:
        """Wait until all is copied, or the time is over; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def drop(self) -> None:
        """Copy no more than what is under way."""
        with self._changed:
            self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                url, path = self._waiting.popleft()
            try:
                self._copy(url, path)
            except (OSError, DamagedError) as exn:
                logger.info("%s: not copied to an upstream: %s", url, exn)

    def _copy(self, url: ShardURL, path: str) -> None:
        entry = Entry.at(Path(path).parent)
        opened = self._store_of(entry).open_again(path)
        if opened is None:
            return  # evicted
        try:
            self._origins.write_back(url, Path(path), entry.metadata())
        finally:
            opened.close()
