"""The `Process` of whoever asks: a cache is one object, in however many processes.

One is made per process, on first use, and shared by its threads. A forked child leaves the
one of its parent alone and gets its own.
"""

from __future__ import annotations

import os

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.ranks import Ranks
from shardcache.runtime import Process
from shardcache.stats.statfile import blank

__all__ = ["Processes"]


class Processes:
    """The `Process` of whoever asks: one for all threads, none that came over a fork.

    Without a lock: a fork could leave it held.

    Args:
        config, ranks, clock, started: as for `Process`.
    """

    def __init__(self, config: Config, ranks: Ranks, clock: Clock, started: float) -> None:
        self._parts = config, ranks, clock, started
        self._made: dict[int, Process] = {}
        #: Whose it is, and what those had counted that were closed.
        self._counted: tuple[int, list[int]] = os.getpid(), blank()

    def here(self) -> Process:
        """The calling process's own, made if need be."""
        pid = os.getpid()
        process = self._made.get(pid)
        if process is None:
            process = self._made.setdefault(pid, Process(*self._parts))
            for other in [p for p in self._made if p != pid]:
                self._made.pop(other, None)  # the parent's; copies of its sockets go with it
        return process

    def made(self) -> Process | None:
        """The calling process's own, if it was made."""
        return self._made.get(os.getpid())

    def close(self) -> None:
        """Close the calling process's own; the next one is made anew."""
        process = self._made.pop(os.getpid(), None)
        if process is not None:
            process.close()
            self._counted = os.getpid(), _sum(self._closed(), process.counters.snapshot())

    def counted(self) -> list[int]:
        """What the calling process has counted, as the values of a row (`statfile`)."""
        process = self.made()
        closed = self._closed()
        return closed if process is None else _sum(closed, process.counters.snapshot())

    def _closed(self) -> list[int]:
        pid, values = self._counted
        return values if pid == os.getpid() else blank()


def _sum(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]
