"""How long a shard probably is: as long as its neighbours.

Whether an object is asked for as a whole or in parts is decided with the first request, which
is the one that tells its size, unless a listing has. The shards of a dataset are of one size,
or nearly, and the last one is smaller.
"""

from __future__ import annotations

import threading

from shardcache.urls import ShardURL

__all__ = ["Sizes"]

#: Folders that are remembered.
_MOST = 256
#: So often a guess may be wrong in one folder; then there are none any more.
_MISSES = 2


class Sizes:
    """Sizes of the latest shards, by folder. Safe between threads."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}
        self._misses: dict[str, int] = {}
        self._guard = threading.Lock()

    def learn(self, url: ShardURL, size: int | None) -> None:
        """Note how long a shard is; None where nobody knows."""
        with self._guard:
            folder = _folder(url)
            self._latest.pop(folder, None)
            if size is None or self._misses.get(folder, 0) >= _MISSES:
                return
            if len(self._latest) >= _MOST:
                del self._latest[next(iter(self._latest))]
            self._latest[folder] = size

    def guess(self, url: ShardURL) -> int | None:
        """The size of the latest shard beside it; None without one."""
        return self._latest.get(_folder(url))

    def missed(self, url: ShardURL) -> None:
        """Note that what a guess said of a shard was of no use."""
        with self._guard:
            folder = _folder(url)
            self._latest.pop(folder, None)
            if len(self._misses) >= _MOST:
                self._misses.clear()
            self._misses[folder] = self._misses.get(folder, 0) + 1


def _folder(url: ShardURL) -> str:
    return str(url).rpartition("/")[0]
