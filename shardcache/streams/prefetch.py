"""The shards that a pipeline will ask for next, fetched before it does.

A `Lookahead` takes the next few items off the list of URLs and begins to fetch their
shards in the background; what is there already is opened, so that it stays. Nothing
waits: a shard that another process has in hand is left to it. The list may be endless.

When the consumer stops, so does all of this. For one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from shardcache.errors import ShardCacheError
from shardcache.store.entry import Opened

if TYPE_CHECKING:
    from shardcache.fetch.background import Share

__all__ = ["Coming", "Lookahead"]

Begin = Callable[[Any], "Opened | Share | None"]
OpenItem = Callable[[Any, "Share | None"], tuple[BinaryIO, str | None]]


class Coming:
    """One item of the list, and what was begun for it.

    Attributes:
        item: as it was in the list.
    """

    def __init__(self, item: Any, begin: Begin, open_item: OpenItem) -> None:
        self.item = item
        self._begin = begin
        self._open = open_item
        self._held: Opened | Share | None = None

    def begin(self) -> None:
        """Begin to fetch it; what goes wrong is told to who opens it."""
        try:
            self._held = self._begin(self.item)
        except ShardCacheError:
            self._held = None

    def open(self) -> tuple[BinaryIO, str | None]:
        """Open the shard; as `Cache.open_shard`, whose fetch ends when the stream is dropped.

        Raises:
            As `Cache.open`.
        """
        held = self._held
        try:
            return self._open(self.item, None if isinstance(held, Opened) else held)
        finally:
            self.drop()

    def drop(self) -> None:
        """Want it no longer."""
        held, self._held = self._held, None
        if isinstance(held, Opened):
            held.close()
        elif held is not None:
            held.leave()


class Lookahead:
    """The items of a list, with the next ``count`` shards on their way.

    Args:
        data: the list; it is asked for items earlier than without a look ahead.
        begin: pins the shard of an item, or begins to fetch it.
        open_item: opens the shard of an item, given what was begun for it.
        count: how many; 0 for none.
    """

    def __init__(self, data: Iterable[Any], begin: Begin, open_item: OpenItem, count: int) -> None:
        self._data = iter(data)
        self._begin = begin
        self._open = open_item
        self._count = count
        self._coming: deque[Coming] = deque()
        self._ended: Exception | None = None

    def __iter__(self) -> Iterator[Coming]:
        """The items, in order.

        What the list raises is raised in its place, after the items before it.
        """
        try:
            while True:
                if not self._coming:
                    self._take()
                if not self._coming:
                    break
                yield self._coming.popleft()
        finally:
            self.drop()
        if not isinstance(self._ended, StopIteration):
            assert self._ended is not None
            raise self._ended

    def _take(self) -> Coming | None:
        if self._ended is not None:
            return None
        try:
            item = next(self._data)
        except Exception as exn:  # noqa: BLE001 - raised when its turn comes
            self._ended = exn
            return None
        self._coming.append(Coming(item, self._begin, self._open))
        return self._coming[-1]

    def top_up(self) -> None:
        """Begin to fetch what comes next; call after the shard before it was opened."""
        while len(self._coming) < self._count:
            coming = self._take()
            if coming is None:
                return
            coming.begin()

    def drop(self) -> None:
        """Want nothing of the list any longer."""
        while self._coming:
            self._coming.popleft().drop()
