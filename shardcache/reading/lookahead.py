"""Download the next shards of a pipeline or a sampler before they are read."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from shardcache import clock, threads
from shardcache.errors import ShardCacheError
from shardcache.faults import ignoring
from shardcache.reading.readers import DownloadReader
from shardcache.reading.stream import open_shard

if TYPE_CHECKING:
    from shardcache.download.download import Download
    from shardcache.process import ProcessCache
    from shardcache.store.entry import OpenEntry
    from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)


class Lookahead:
    """Iterates over items, while the shards of the next ``prefetch`` items are downloaded.

    The consumer never waits for these downloads. A shard that another process downloads is left to
    that process, and a cached shard is opened at once, so that it is not evicted. The downloads end
    when the consumer stops. An error of ``data`` is raised after the items before it. Without
    ``prefetch``, an item is taken when the consumer asks for it.
    """

    def __init__(
        self,
        process: ProcessCache,
        data: Iterable[Any],
        shard_of: Callable[[Any], ShardURL],
        *,
        prefetch: bool = True,
    ) -> None:
        self._process = process
        self._most = process.config.prefetch if prefetch else 0
        self._data = iter(data)
        self._shard_of = shard_of
        self._queue: deque[tuple[Any, OpenEntry | DownloadReader | None]] = deque()
        self._error: Exception | None = None  # raised by `data`, to be raised later

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the items. The consumer must call `open` once for each item."""
        try:
            while self._queue or self._take(download=False):
                yield self._queue[0][0]
        finally:
            for _, reader in self._queue:
                if reader is not None:
                    reader.close()
        if self._error is not None:
            raise self._error

    def open(self) -> BinaryIO:
        """Open the shard of the current item, then start to download the next ones."""
        item, ahead = self._queue.popleft()
        shard = self._shard_of(item)
        del item  # only the consumer keeps a reference to the item
        stream = open_shard(self._process, shard, finish=False, ahead=ahead)
        while len(self._queue) < self._most and self._take(download=True):
            pass
        return stream

    def _take(self, *, download: bool) -> bool:
        """Take the next item, and with ``download`` start its download. Return False at the end."""
        try:
            item = next(self._data)
        except StopIteration:
            return False
        except Exception as exn:  # noqa: BLE001 - raised after the preceding items
            self._error, self._data = exn, iter(())
            return False
        process, reader = self._process, None
        if download:
            with ignoring(ShardCacheError, OSError):  # `open` will raise the same error
                shard = self._shard_of(item)
                if not process.is_in_place(shard):
                    reader = process.lookup(shard) or DownloadReader(process, shard, ahead=True)
        self._queue.append((item, reader))
        return True


class Prefetcher:
    """Downloads shards in the background, ``prefetch`` at a time, for readers in other processes.

    A shard that another process downloads is left to that process, and errors are left to the
    readers. Once the prefetcher has been garbage-collected, no further download starts.

    Attributes:
        size: the size of one of the shards in bytes, or None until one is known.
    """

    def __init__(self, process: ProcessCache) -> None:
        self.size: int | None = None
        self._process = process
        self._lock = threading.Lock()
        self._queue: deque[ShardURL] = deque()
        self._running: deque[Download] = deque()
        self._has_thread = False

    def want(self, shards: Iterable[ShardURL]) -> None:
        """Download these shards after those that were wanted before.

        The least recently used shards are evicted first. So those that are cached count as used
        now, in this order, even if a reader opened them long ago or will do so only later.
        """
        wanted = dict.fromkeys(shard for shard in shards if not self._process.is_in_place(shard))
        with self._lock, contextlib.suppress(threads.NoThreadError):
            if self._process.config.prefetch:
                before = [shard for shard in self._queue if shard not in wanted]
                self._queue = deque([*before, *wanted])
            if self._queue and not self._has_thread:
                threads.start(partial(self._run, weakref.ref(self)), "shardcache-prefetch")
                self._has_thread = True

    @staticmethod
    def _run(reference: weakref.ref[Prefetcher]) -> None:
        while (prefetcher := reference()) is not None and prefetcher._begin():
            running, most = prefetcher._running, prefetcher._process.config.prefetch
            del prefetcher  # while this thread waits
            if len(running) >= most:
                running[0].wait(lambda: running[0].ended)  # noqa: B023

    def _begin(self) -> bool:
        """Begin the next download. Return False if there is none, so that the thread ends."""
        with self._lock:
            self._has_thread = bool(self._queue)
            if not self._has_thread:
                return False
            shard = self._queue.popleft()
        while self._running and self._running[0].ended:
            self.size = self._running.popleft().size or self.size
        process = self._process
        process.stop_keeping_used()
        try:
            if (opened := process.lookup(shard)) is not None:
                self.size = opened.size
                process.tier_of(opened.directory).store.touch(opened.directory, clock.time())
                opened.close()
            else:
                download, _ = process.start_download(shard, finish=True, ahead=True)
                download.leave()
                self._running.append(download)
        except Exception as exn:  # noqa: BLE001 - the reader raises it
            logger.debug("%s: not downloaded ahead: %s", shard, exn)
        return True
