"""Room for a shard before its first byte is written.

The reservation is the live partial itself: it states its final size and
vanishes with its process. Admission reads what is published and what is in
flight, evicts if it must and may, and makes the partial, all under the node's
budget lock; so many processes keep one budget. Where locks do not work, each
process may overshoot by the shards that others admit at the same moment.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from shardcache.breaker import FULL
from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import CacheFullError
from shardcache.eviction import EvictionPlan, Limits, apply, plan, sweep
from shardcache.layout import Layout
from shardcache.locks import Holder, KeyLock, read_holder
from shardcache.partials import Partial
from shardcache.sessions import oldest_live_session
from shardcache.store import Entry, Store
from shardcache.sweeping import in_flight
from shardcache.units import format_bytes, format_duration
from shardcache.volume import Pending, Volume

__all__ = ["Space"]

logger = logging.getLogger(__name__)

#: Seconds to wait for the budget lock. It is held for one scan and the
#: evictions that follow; after this long something is wrong with its holder,
#: and going on without it risks only an overshoot.
_LOCK_SECONDS = 60.0
_LOCK_POLL = 0.01
_ANNOUNCE_EVERY = 10.0
#: Times that victims may come into use, or vanish, between plan and eviction.
_PLANS = 5
#: What a fetch makes at most: a partial of five names, a lock with its directory, the
#: directories of the key, the budget lock.
_FETCH_INODES = 10
#: Bytes of those beside the data, in whole blocks.
_OVERHEAD = 64 * 1024
#: There is ample room where so many shards of a size would find some, beside an eighth of the
#: volume: no node fetches more at once.
_AMPLE = 1024


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
        self._pending = Pending(node.named_lock("pending"), node.modes, clock)
        # Of this process only one thread at a time asks for the lock of all: they would
        # find each other's, and look for it again and again.
        self._turn = threading.Lock()

    def admit(self, url: str, size: int | None, make: Callable[[], Partial]) -> Partial:
        """Find room for ``size`` bytes and make the partial that reserves it.

        Raises:
            CacheFullError: there is no room and nothing may be evicted.
            OSError: the disk fails.
        """
        need = size or 0
        volume = Volume.of(self._node.base)
        limit = self._max_size(volume.size)
        if limit is not None and need > limit:
            raise CacheFullError(
                f"{url} has {format_bytes(need)}, more than the whole cache may hold "
                f"({format_bytes(limit)}). Raise max_size.",
                url=url,
            )
        if size is not None and limit is None and self._is_ample(volume, need):
            return make()
        with self._turn:
            lock = self._lock()
            try:
                self._find_room(url, need)
                return make()
            finally:
                try:
                    lock.release()
                finally:  # as in `coordination`: an interrupt may have struck the first
                    lock.release()

    def _is_ample(self, volume: Volume, need: int) -> bool:
        """Whether there is room whatever others reserve: nobody needs to be asked then.

        A look at all fetches in flight costs more than a small shard.
        """
        wanted = self._config.min_free.of(volume.size) + _AMPLE * need + volume.size // 8
        names = self._inode_floor(volume) + _AMPLE * _FETCH_INODES
        return volume.free >= wanted and not volume.lacks_inodes(names)

    def _find_room(self, url: str, need: int) -> None:
        for attempt in range(_PLANS):
            limits, reserved = self._shortage(url, need)
            if limits.max_size is None and not limits.free_needed and not limits.inodes_needed:
                return
            chosen = self.plan(limits, reserved=reserved)
            if not chosen.victims and chosen.suffices:
                return
            if attempt == 0 and self._sweep():
                continue  # what dead processes left goes first
            if not chosen.suffices:
                raise _full(url, chosen)
            if self._apply(chosen) == len(chosen.victims):
                return
            logger.info("%s: entries came into use while room was made", url)
        raise _full(url, chosen)

    def _shortage(self, url: str, need: int) -> tuple[Limits, int]:
        """(limits to keep, bytes in flight) with ``need`` bytes more."""
        volume = Volume.of(self._node.base)
        # Before the entries are listed: what is published in between counts twice,
        # not never.
        found = [f for store in self._stores() for f in in_flight(store.layout)]
        reserved = sum(f.reserved for f in found)
        unwritten = reserved - sum(f.occupied for f in found)
        floor = self._config.min_free.of(volume.size)
        short = max(0, floor + need + unwritten - volume.free)
        # Without the floor: whether it can be written at all.
        tight = need + unwritten + _OVERHEAD > volume.free
        if (short or tight) and (pending := self._pending.left(volume.free)):
            if tight:
                raise _owed(url, pending)
            short = max(0, short - pending)
        limits = Limits(
            max_size=self._max_size(volume.size),
            free_needed=short,
            inodes_needed=volume.lacks_inodes(self._inode_floor(volume) + _FETCH_INODES),
        )
        return limits, reserved + need

    def _inode_floor(self, volume: Volume) -> int:
        """Inodes that stay free: the share that stays free of the bytes."""
        min_free = self._config.min_free
        return 0 if min_free.percent is None else min_free.of(volume.inodes)

    def make_room(self, url: str, size: int) -> None:
        """Free ``size`` bytes, or inodes, after the disk said that it is full.

        Raises:
            CacheFullError: nothing may go.
            OSError: the disk fails.
        """
        lock = self._lock()
        try:
            needed = max(1, size) - self._sweep()
            volume = Volume.of(self._node.base)
            inodes = volume.lacks_inodes(_FETCH_INODES)
            if inodes:
                needed = size - volume.free  # then it is not the bytes that are short
            if needed > 0:
                pending = self._pending.left(volume.free)
                if pending >= needed:
                    raise _owed(url, pending)
                needed -= pending
            if needed > 0 or inodes:
                chosen = self.plan(Limits(free_needed=max(0, needed), inodes_needed=inodes))
                if not chosen.suffices:
                    raise _full(url, chosen)
                self._apply(chosen)
        finally:
            try:
                lock.release()
            finally:  # as in `coordination`: an interrupt may have struck the first
                lock.release()

    def _sweep(self) -> int:
        """Remove what dead processes left; returns bytes freed."""
        freed = 0
        for store in self._stores():
            for removal in sweep(store):
                logger.info("removed %s, %d bytes", removal.name, removal.size)
                freed += removal.size
        return freed

    def _apply(self, chosen: EvictionPlan) -> int:
        """Evict what was chosen; returns how many really went."""
        store = self._stores()[0]
        before = Volume.of(self._node.base).free
        gone = [v for victim in chosen.victims for v in apply(store.owning(victim.entry), [victim])]
        freed = sum(victim.entry.size for victim in gone)
        self._pending.note(freed, before, Volume.of(self._node.base).free)
        return len(gone)

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
        volume = Volume.of(self._node.base)
        return Limits(
            max_size=self._max_size(volume.size),
            free_needed=max(0, self._config.min_free.of(volume.size) - volume.free),
            inodes_needed=volume.lacks_inodes(self._inode_floor(volume)),
            max_age=self._config.max_age,
        )

    def plan(self, limits: Limits, *, reserved: int = 0, protect: bool = True) -> EvictionPlan:
        """What would have to go; see `eviction.plan`."""
        stores = self._stores()
        return plan(
            (entry for store in stores for entry in store.entries()),
            limits,
            self._clock.time(),
            reserved=reserved,
            protect_since=oldest_live_session(self._node) if protect else None,
            in_use=lambda entry: stores[0].owning(entry).is_pinned(entry),
        )

    def date(self, entries: Iterable[Entry]) -> None:
        """Say of entries that were last used in the future that it was now."""
        for entry in entries:
            self._stores()[0].touch(str(entry.path), self._clock.time())

    def _lock(self) -> KeyLock:
        lock = KeyLock(self._node.named_lock("budget"), self._node.modes)
        holder = Holder.this_process(rank=None, job=None, now=self._clock.time())
        begun = announced = self._clock.monotonic()
        while not self._take(lock, holder):
            now = self._clock.monotonic()
            stuck = now - begun >= _LOCK_SECONDS
            if stuck or now - announced >= _ANNOUNCE_EVERY:
                announced = now
                logger.warning(
                    "waiting for %s: %s holds the budget lock%s",
                    format_duration(now - begun),
                    read_holder(lock.path) or "somebody",
                    "; going on without it" if stuck else "",
                )
            if stuck:
                break
            self._clock.sleep(_LOCK_POLL)
        return lock

    @staticmethod
    def _take(lock: KeyLock, holder: Holder) -> bool:
        try:
            return lock.try_acquire(holder)
        except OSError as exn:
            if exn.errno not in FULL:
                raise
            # There is no room for its file; without it there will not be any.
            logger.info("going on without the budget lock: %s", exn)
            return True


def _full(url: str, chosen: EvictionPlan) -> CacheFullError:
    missing = []
    if chosen.missing:
        missing.append(format_bytes(chosen.missing))
    if chosen.missing_inodes:
        missing.append(f"{chosen.missing_inodes} inodes (names of files, see df -i)")
    return CacheFullError(
        f"no room for {url}: {' and '.join(missing) or 'some'} more would have to go, and "
        "the rest is in use or was used since the running jobs began. Raise max_size, "
        "free the disk, or let the shard be streamed.",
        url=url,
    )


def _owed(url: str, pending: int) -> CacheFullError:
    return CacheFullError(
        f"no room for {url}: {format_bytes(pending)} were evicted and are not free yet. Something "
        "has those files open by their paths (see lsof +L1); close it, or let the shard be "
        "streamed.",
        url=url,
    )
