"""Download the next shards of a pipeline before the pipeline opens them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from shardcache.errors import AccessDeniedError, ShardCacheError, ShardNotFoundError
from shardcache.reading.readers import DownloadReader

if TYPE_CHECKING:
    from shardcache.reading.opener import Opener
    from shardcache.store.entry import Opened
    from shardcache.urls import ShardURL

__all__ = ["Lookahead"]


class Lookahead:
    """Iterates over items, while the shards of the next ``prefetch`` items are downloaded.

    The consumer never waits for these downloads. A shard that another process downloads is left to
    that process, and a cached shard is opened at once, so that it is not evicted. The downloads end
    when the consumer stops. An error of ``data`` is raised after the items before it. For one
    thread.

    Args:
        opener: opens shards.
        data: the items, maybe without end. They are taken earlier than without a look-ahead.
        shard_of: returns the shard of an item.
    """

    def __init__(
        self, opener: Opener, data: Iterable[Any], shard_of: Callable[[Any], ShardURL]
    ) -> None:
        self._opener = opener
        self._data = iter(data)
        self._shard_of = shard_of
        self._coming: deque[tuple[Any, Opened | DownloadReader | None]] = deque()
        self._error: Exception | None = None  # raised by `data`, to be raised later
        #: Final refusals of the origin, by key, so that the shards are not requested again.
        self._refused: dict[str, ShardNotFoundError | AccessDeniedError] = {}

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items. The consumer must call `open` once for each item."""
        try:
            while self._coming or self._take(download=False):
                yield self._coming[0][0]
        finally:
            for _, reader in self._coming:
                if reader is not None:
                    reader.close()
        if self._error is not None:
            raise self._error

    def open(self) -> BinaryIO:
        """Open the shard of the current item, then start to download the next ones.

        Raises the errors of `Opener.open`. Dropping the stream cancels the download.
        """
        item, ahead = self._coming.popleft()
        shard = self._shard_of(item)
        del item  # only the consumer keeps a reference to the item
        if (refused := self._refused.get(shard.key)) is not None and ahead is None:
            raise type(refused)(refused.message, url=str(shard))
        try:
            stream = self._opener.open(shard, finish=False, ahead=ahead)
        except (ShardNotFoundError, AccessDeniedError) as exn:
            self._refused[shard.key] = type(exn)(exn.message)  # a copy without the traceback
            raise
        while len(self._coming) < self._opener.config.prefetch and self._take(download=True):
            pass
        return stream

    def _take(self, *, download: bool) -> bool:
        """Take the next item, and with ``download`` start its download. Return False at the end."""
        try:
            item = next(self._data)
        except Exception as exn:  # noqa: BLE001 - raised after the preceding items
            if not isinstance(exn, StopIteration):
                self._error = exn
            self._data = iter(())
            return False
        reader = None
        if download:
            with contextlib.suppress(ShardCacheError, OSError):  # `open` will raise the same error
                shard = self._shard_of(item)
                if not (self._opener.is_in_place(shard) or shard.key in self._refused):
                    here = self._opener.here
                    reader = here().find(shard) or DownloadReader(here, shard, ahead=True)
        self._coming.append((item, reader))
        return True
