"""What becomes of a shard whose cached file fails while it is read.

The entry is set aside, so that nobody else meets it, and the reader is given the rest
from the origin. See `entrystream` for what the reader notices of that: nothing.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.breaker import fault_kind
from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import ShardCacheError
from shardcache.locks.flock import is_file
from shardcache.origins.base import ObjectInfo
from shardcache.runtime import Process
from shardcache.store.entry import DamagedError, Entry
from shardcache.store.store import Store
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.streams.bypass import OriginStream

__all__ = ["Healer"]

logger = logging.getLogger(__name__)


class Healer:
    """Keeps the streams of one cache readable (`entrystream.Keeper`).

    Args:
        config: whether faults are raised.
        here: the parts of the process that asks: a stream may have come over a fork.
        clock: time.
    """

    def __init__(self, config: Config, here: Callable[[], Process], clock: Clock) -> None:
        self._config = config
        self._here = here
        self._clock = clock

    def open_again(self, shard: ShardURL, path: str) -> io.FileIO | None:
        """See `entrystream.Keeper.open_again`."""
        opened = self._store(Path(path)).open_again(path)
        return None if opened is None else opened.file

    def give_up(
        self, shard: ShardURL, path: str, fd: int, fault: OSError, position: int
    ) -> tuple[str, ObjectInfo | None]:
        """See `entrystream.Keeper.give_up`."""
        process = self._here()
        entry = Entry.at(Path(path).parent)
        pin = _version_of(entry)
        process.disk_failed(process.reading, fault)
        self._set_aside(shard, entry, path, fd, f"{shard}: {fault.strerror}")
        if self._config.strict:
            raise fault
        process.warn(
            fault_kind(fault),
            "%s cannot be read at byte %d of %s (%s); the rest is streamed",
            shard,
            position,
            path,
            fault.strerror,
        )
        return entry.version, pin

    def rest(
        self, shard: ShardURL, start: int, pin: ObjectInfo | None, version: str | None
    ) -> OriginStream:
        """See `entrystream.Keeper.rest`."""
        return self.stream(shard, start=start, pin=pin, version=version)

    def stream(
        self,
        shard: ShardURL,
        *,
        start: int = 0,
        pin: ObjectInfo | None = None,
        version: str | None = None,
    ) -> OriginStream:
        """A shard from its origin; raises as `bypass.OriginStream`.

        From its first byte, and where any version will do, from a nearer copy if there is one.
        """
        from shardcache.streams.bypass import (  # here: they bring the engine along
            NearStream,
            OriginStream,
        )

        process = self._here()
        process.coordinator()
        fetcher = process.fetcher
        how = shard, fetcher.policy, self._clock, fetcher.timeout
        if start == 0 and pin is None and version is None:
            for near in process.origins.nearer(shard):
                try:
                    stream = NearStream(near, process.origins.of(shard), *how)
                    stream.gave = lambda count: _count(process, "bytes_upstream", count)
                    return stream
                except (ShardCacheError, OSError) as exn:
                    logger.info("%s: not from %s: %s", shard, near.name, exn)
        rest = OriginStream(process.origins.of(shard), *how, start=start, pin=pin, version=version)
        rest.gave = lambda count: _count(process, "bytes_origin", count)
        return rest

    def reassured(self) -> None:
        """See `entrystream.Keeper.reassured`."""
        process = self._here()
        process.disk_works(process.reading)

    def _store(self, path: Path) -> Store:
        return self._here().store_of(Entry.at(path.parent))

    def _set_aside(self, shard: ShardURL, entry: Entry, path: str, fd: int, reason: str) -> None:
        store = self._store(Path(path))
        try:
            with self._here().coordinator().sole(store, shard.key) as alone:
                # Whoever publishes has this lock, so what has the name now, keeps it. Is it
                # another file by now, then it did not fail.
                if alone and is_file(path, fd):
                    store.condemn(entry.path, reason)
        except OSError as exn:
            logger.info("%s: %s cannot be set aside: %s", shard, path, exn)


def _count(process: Process, source: str, count: int) -> None:
    process.counters.add({"bytes_bypassed": count, source: count})


def _version_of(entry: Entry) -> ObjectInfo | None:
    """All that is known of an entry's version, if its sidecar can be read."""
    try:
        info = entry.metadata().info
    except (DamagedError, OSError) as exn:
        logger.debug("%s: no sidecar: %s", entry.path, exn)
        return None
    return info if info.version == entry.version else None
