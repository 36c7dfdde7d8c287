"""How many connections a process uses at once: as many as it takes to fill the link.

S3 gives one connection some 50 to 100 MB/s, whatever the link can take; on a fast LAN one
connection takes nearly all there is, and more of them cost processor time (figures:
docs/design.md, "Connections"). So the first megabyte of each shard is timed, and there
are as many lanes as connections of that speed make up `_GOAL`.

A lane is what lets one request go. Safe between threads.
"""

from __future__ import annotations

import math
import threading

__all__ = ["Lanes"]

#: Bytes per second that are enough: what this engine takes in at most on two cores.
_GOAL = 2.5e9
#: Of a fast link: one connection would wait whenever its thread hashes and writes.
_LEAST = 4
#: Before any shard told.
_UNKNOWN = 8
#: Weight of the newest figure: a shard that came slowly for once is forgotten soon.
_WEIGHT = 0.5


class Lanes:
    """The connections of one process.

    Args:
        most: never more.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._limit = min(most, _UNKNOWN)
        self._rate: float | None = None
        self._taken = 0
        self._changed = threading.Condition()

    @property
    def limit(self) -> int:
        """How many there are now."""
        return self._limit

    def saw(self, count: int, seconds: float) -> None:
        """Note how fast one connection brought its first bytes.

        Args:
            count: bytes, a block or more.
            seconds: since its answer began.
        """
        rate = count / max(seconds, 1e-6)
        with self._changed:
            before = self._rate
            self._rate = rate if before is None else before + _WEIGHT * (rate - before)
            wanted = math.ceil(_GOAL / self._rate)
            self._limit = min(self.most, max(_LEAST, wanted))
            self._changed.notify_all()

    def acquire(self, timeout: float | None = None) -> bool:
        """Take a lane; False if none was free for ``timeout`` seconds."""
        with self._changed:
            free = self._changed.wait_for(lambda: self._taken < self._limit, timeout)
            self._taken += free
            return free

    def release(self) -> None:
        """Give it back."""
        with self._changed:
            self._taken -= 1
            self._changed.notify()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()
