"""Room for a shard before its first byte is written.

The reservation is the live partial itself: it states its final size and
vanishes with its process. Admission reads what is published and what is in
flight, evicts if it must and may, and makes the partial, all under the node's
budget lock; so many processes keep one budget. Where locks do not work, each
process may overshoot by the shards that others admit at the same moment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import CacheFullError
from shardcache.eviction import EvictionPlan, Limits, apply, plan, sweep
from shardcache.layout import Layout
from shardcache.locks import Holder, KeyLock
from shardcache.partials import Partial
from shardcache.sessions import oldest_live_session
from shardcache.store import Entry, Store
from shardcache.sweeping import in_flight
from shardcache.units import format_bytes

__all__ = ["Space"]

logger = logging.getLogger(__name__)

#: Seconds to wait for the budget lock. It is held for one scan and the
#: evictions that follow; after this long something is wrong with its holder,
#: and going on without it risks only an overshoot.
_LOCK_SECONDS = 60.0
_LOCK_POLL = 0.01
#: Times that victims may come into use, or vanish, between plan and eviction.
_PLANS = 5


class Space:
    """The budget of one root.

    Args:
        node: the node's layout, where budget lock and sessions are.
        stores: lists all namespaces of the root.
        config: limits.
        clock: time.
    """

    def __init__(
        self, node: Layout, stores: Callable[[], Sequence[Store]], config: Config, clock: Clock
    ) -> None:
        self._node = node
        self._stores = stores
        self._config = config
        self._clock = clock

    def admit(self, url: str, size: int | None, make: Callable[[], Partial]) -> Partial:
        """Find room for ``size`` bytes and make the partial that reserves it.

        Raises:
            CacheFullError: there is no room and nothing may be evicted.
            OSError: the disk fails.
        """
        need = size or 0
        total, _ = self._filesystem()
        limit = self._max_size(total)
        if limit is not None and need > limit:
            raise CacheFullError(
                f"{url} has {format_bytes(need)}, more than the whole cache may hold "
                f"({format_bytes(limit)}). Raise max_size.",
                url=url,
            )
        lock = self._lock()
        try:
            self._find_room(url, need)
            return make()
        finally:
            lock.release()

    def _find_room(self, url: str, need: int) -> None:
        for attempt in range(_PLANS):
            limits, reserved = self._shortage(need)
            if limits.max_size is None and not limits.free_needed:
                return
            chosen = self.plan(limits, reserved=reserved)
            if not chosen.victims and not chosen.missing:
                return
            if attempt == 0 and self._sweep():
                continue  # what dead processes left goes first
            if chosen.missing:
                raise _full(url, chosen.missing)
            if self._apply(chosen) == len(chosen.victims):
                return
            logger.info("%s: entries came into use while room was made", url)
        raise _full(url, need)

    def _shortage(self, need: int) -> tuple[Limits, int]:
        """(limits to keep, bytes in flight) with ``need`` bytes more."""
        total, free = self._filesystem()
        # Before the entries are listed: what is published in between counts twice,
        # not never.
        found = [f for store in self._stores() for f in in_flight(store.layout)]
        reserved = sum(f.reserved for f in found)
        unwritten = reserved - sum(f.occupied for f in found)
        floor = self._config.min_free.of(total)
        limits = Limits(
            max_size=self._max_size(total),
            free_needed=max(0, floor + need + unwritten - free),
        )
        return limits, reserved + need

    def make_room(self, url: str, size: int) -> None:
        """Free ``size`` bytes, and an inode, after the disk said that it is full.

        Raises:
            CacheFullError: nothing may go.
            OSError: the disk fails.
        """
        lock = self._lock()
        try:
            needed = max(1, size) - self._sweep()
            if needed > 0:
                chosen = self.plan(Limits(free_needed=needed))
                if chosen.missing:
                    raise _full(url, chosen.missing)
                self._apply(chosen)
        finally:
            lock.release()

    def _sweep(self) -> int:
        """Remove what dead processes left; returns bytes freed."""
        freed = 0
        for store in self._stores():
            for removal in sweep(store):
                logger.info("removed %s, %d bytes", removal.name, removal.size)
                freed += removal.size
        return freed

    @staticmethod
    def _apply(chosen: EvictionPlan) -> int:
        """Evict what was chosen; returns how many really went."""
        return sum(len(list(apply(Store.owning(v.entry), [v]))) for v in chosen.victims)

    def _max_size(self, total: int) -> int | None:
        return None if self._config.max_size is None else self._config.max_size.of(total)

    def reserved(self) -> int:
        """Bytes that the fetches in flight will occupy."""
        return sum(f.reserved for store in self._stores() for f in in_flight(store.layout))

    def limits(self) -> Limits:
        """The configured limits as they stand on this filesystem now.

        Raises:
            OSError: the filesystem does not answer.
        """
        total, free = self._filesystem()
        return Limits(
            max_size=self._max_size(total),
            free_needed=max(0, self._config.min_free.of(total) - free),
            max_age=self._config.max_age,
        )

    def plan(self, limits: Limits, *, reserved: int = 0, protect: bool = True) -> EvictionPlan:
        """What would have to go; see `eviction.plan`."""
        owners: dict[Entry, Store] = {}
        for store in self._stores():
            for entry in store.entries():
                owners[entry] = store
        return plan(
            owners,
            limits,
            self._clock.time(),
            reserved=reserved,
            protect_since=oldest_live_session(self._node) if protect else None,
            in_use=lambda entry: owners[entry].is_pinned(entry),
        )

    def _filesystem(self) -> tuple[int, int]:
        """(size, free bytes for this user) of the filesystem under the root."""
        found = os.statvfs(self._node.base)
        return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail

    def _lock(self) -> KeyLock:
        lock = KeyLock(self._node.named_lock("budget"))
        holder = Holder.this_process(rank=None, job=None, now=self._clock.time())
        end = self._clock.monotonic() + _LOCK_SECONDS
        while not lock.try_acquire(holder):
            if self._clock.monotonic() >= end:
                logger.warning("the budget lock is stuck; going on without it")
                break
            self._clock.sleep(_LOCK_POLL)
        return lock


def _full(url: str, missing: int) -> CacheFullError:
    return CacheFullError(
        f"no room for {url}: {format_bytes(missing)} more would have to go, and "
        "the rest is in use or was used since the running jobs began. Raise max_size, "
        "free the disk, or let the shard be streamed.",
        url=url,
    )
