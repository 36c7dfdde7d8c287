"""The shards that a pipeline will ask for next, fetched before it does.

A `Lookahead` takes the next few items off the list of URLs and begins to fetch their shards in
the background; what is there already is opened, so that it stays. Nothing waits: a shard that
another process has in hand is left to it. The list may be endless. When the consumer stops, so
does all of this.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from shardcache.errors import ShardCacheError
from shardcache.store.entry import Opened
from shardcache.streams.opener import Opener
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.background import Share

    Held: TypeAlias = "Opened | Share | None"

__all__ = ["Lookahead"]

_END = object()


class Lookahead:
    """The items of a list in their order, with the next ``prefetch`` shards on their way.

    What the list raises is raised in its place, after the items before it. For one thread.

    Args:
        opener: opens shards, and begins to fetch them.
        data: the list; it is asked for items earlier than without a look ahead.
        shard_of: tells the shard of an item.
    """

    def __init__(
        self, opener: Opener, data: Iterable[Any], shard_of: Callable[[Any], ShardURL]
    ) -> None:
        self._opener = opener
        self._data = iter(data)
        self._shard_of = shard_of
        self._coming: deque[tuple[Any, Held]] = deque()
        self._error: Exception | None = None  # of the list
        self._item: Any = None
        self._held: Held = None

    def __iter__(self) -> Iterator[Any]:
        """The items; `open` opens the shard of the last one."""
        try:
            while self._coming or self._take(begin=False):
                self._item, self._held = self._coming.popleft()
                yield self._item
                _drop(self._held)
        finally:
            for held in (self._held, *(held for _, held in self._coming)):
                _drop(held)
        if self._error is not None:
            raise self._error

    def open(self) -> tuple[BinaryIO, str | None]:
        """Open it, then begin to fetch what comes next: what is read now goes first.

        As `Opener.open`, whose fetch ends when the stream is dropped.
        """
        item, held = self._item, self._held
        self._item = self._held = None  # whoever has it decides how long its stream lives
        opened = self._opener.open(self._shard_of(item), finish=False, ahead=held)
        while len(self._coming) < self._opener.config.prefetch and self._take(begin=True):
            pass
        return opened

    def _take(self, *, begin: bool) -> bool:
        """Take the next item off the list, and perhaps begin with it; False at the end."""
        try:
            item = next(self._data, _END)
        except Exception as exn:  # noqa: BLE001 - raised when its turn comes
            self._error, item = exn, _END
        if item is _END:
            self._data = iter(())
            return False
        held = None
        with contextlib.suppress(ShardCacheError):  # whoever opens it is told
            held = self._opener.fetch_ahead(self._shard_of(item)) if begin else None
        self._coming.append((item, held))
        return True


def _drop(held: Held) -> None:
    """Want it no longer."""
    if isinstance(held, Opened):
        held.close()
    elif held is not None:
        held.leave()
