"""Room for a shard before its first byte is written.

The reservation is the live partial itself: it states its final size and
vanishes with its process. Admission reads what is published and what is in
flight, evicts if it must and may, and makes the partial, all under the node's
budget lock; so many processes keep one budget. Where locks do not work, each
process may overshoot by the shards that others admit at the same moment. What is
published is not counted anew for each admission, see `ledger`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import CacheFullError
from shardcache.layout import Layout
from shardcache.space.eviction import EvictionPlan, Limits, Victim, apply, plan, sweep
from shardcache.space.ledger import Ledger, Refusal, State
from shardcache.space.pins import remove_expired
from shardcache.space.policy import Policy
from shardcache.space.shortage import fits, no_room, not_free_yet
from shardcache.space.spacelocks import budget_lock, sole_cleaner
from shardcache.space.volume import Pending, Volume, is_memory
from shardcache.stats.database import compact
from shardcache.store.partial import Partial
from shardcache.store.store import Entry, Store
from shardcache.store.sweeping import in_flight
from shardcache.units import format_bytes

__all__ = ["Space"]

logger = logging.getLogger(__name__)

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
#: Of so many entries, one goes along with those that must: otherwise a full cache would be looked
#: through for every newcomer.
_EACH = 100


class Space:
    """The budget of one root.

    Args:
        node: the node's layout, where budget lock and sessions are.
        stores: lists all namespaces of the root.
        config: limits.
        clock: time.
        through: entries are looked at through this, which may take its time.
        begun: wall and monotonic time of a moment long ago, by which it is seen if the wall
            clock is set.
        evicted: is told of every entry that went.
    """

    def __init__(
        self,
        node: Layout,
        stores: Callable[[], Sequence[Store]],
        config: Config,
        clock: Clock,
        through: Callable[[Iterator[Entry]], Iterator[Entry]] = iter,
        begun: tuple[float, float] | None = None,
        evicted: Callable[[Victim], None] = lambda victim: None,
    ) -> None:
        self._node = node
        self._stores = stores
        self._config = config
        self._clock = clock
        self._through = through
        self.evicted = evicted
        self._begun = (clock.time(), clock.monotonic()) if begun is None else begun
        self._pending = Pending(node.named_lock("pending"), node.modes, clock)
        self._ledger = Ledger(node.named_lock("ledger"), node.modes, clock)
        # Of this process only one thread at a time asks for the lock of all: they would
        # find each other's, and look for it again and again.
        self._turn = threading.Lock()

    def admit(
        self,
        url: str,
        size: int | None,
        make: Callable[[], Partial],
        *,
        reserved: bool = False,
    ) -> Partial:
        """Find room for ``size`` bytes and make the partial that reserves it.

        Args:
            url: of the shard.
            size: bytes; None where the origin does not tell.
            make: makes the partial.
            reserved: whether what ``make`` returns is live already, and reserves them.

        Raises:
            CacheFullError: there is no room and nothing may be evicted.
            OSError: the disk fails.
        """
        need = 0 if reserved else size or 0
        volume = Volume.of(self._node.base)
        limit = volume.budget(self._config)
        if limit is not None and need > limit:
            raise CacheFullError(
                f"{url} has {format_bytes(need)}, more than the whole cache may hold "
                f"({format_bytes(limit)}). Raise max_size.",
                url=url,
            )
        if size is not None and limit is None and self._is_ample(volume, need):
            return make()
        with self._turn, budget_lock(self._node, self._clock):
            self._find_room(url, need, size)
            return make()

    def _is_ample(self, volume: Volume, need: int) -> bool:
        """Whether there is room whatever others reserve: nobody needs to be asked then.

        A look at all fetches in flight costs more than a small shard.
        """
        wanted = self._config.min_free.of(volume.size) + _AMPLE * need + volume.size // 8
        names = self._inode_floor(volume) + _AMPLE * _FETCH_INODES
        return volume.free >= wanted and not volume.lacks_inodes(names)

    def refuses(self, url: str, size: int) -> CacheFullError | None:
        """Why there is no room for a shard, if that was found just now; asks nobody."""
        if self._node.grace is not None:
            return None
        return self._refused(url, size, self._ledger.read())

    def _refused(self, url: str, need: int, state: State | None) -> CacheFullError | None:
        refusal = state.refusal if state is not None else None
        if refusal is None or not refusal.covers(need, self._terms):
            return None
        return no_room(url, refusal.missing_for(need), refusal.missing_inodes)

    @property
    def _terms(self) -> str:
        config = self._config
        limits = config.max_size, config.ephemeral_limit, config.min_free
        return f"{limits} {config.policy} {config.protect_for}"

    def _find_room(self, url: str, need: int, size: int | None) -> None:
        # Nodes that share a directory do not share a ledger.
        shared = self._node.grace is not None
        for attempt in range(_PLANS):
            limits, reserved, known = self._shortage(url, need)
            if limits.max_size is None and not limits.free_needed and not limits.inodes_needed:
                return
            state = None if shared else self._ledger.read()
            if (refused := self._refused(url, need, state)) is not None:
                raise refused
            if size is not None and fits(size, limits, state):
                self._ledger.admitted(size)
                return
            chosen = self._choose(limits, reserved)
            if attempt == 0 and not (not chosen.victims and chosen.suffices) and self._sweep():
                continue  # what dead processes left goes first
            full = chosen.kept_bytes + reserved if known and size is not None else math.inf
            entries = chosen.kept + len(chosen.victims)
            if not chosen.suffices:
                missing = chosen.missing, chosen.missing_inodes
                refusal = Refusal(need, *missing, self._terms)
                self._note(State(entries, full + chosen.freed - need, refusal))
                raise no_room(url, *missing)
            if self._apply(chosen) == len(chosen.victims):
                self._note(State(entries, full))
                return
            logger.info("%s: entries came into use while room was made", url)
        raise no_room(url, chosen.missing, chosen.missing_inodes)

    def _note(self, state: State) -> None:
        if self._node.grace is None:
            self._ledger.looked(state)

    def _choose(self, limits: Limits, reserved: int) -> EvictionPlan:
        """What has to go for a newcomer, and a little more if there is much."""
        found = list(self._through(entry for store in self._stores() for entry in store.entries()))
        chosen = self.plan(limits, reserved=reserved, found=found)
        if not chosen.victims or not chosen.suffices or len(found) < _EACH:
            return chosen
        spare = (chosen.kept_bytes + chosen.freed) // _EACH
        further = replace(
            limits,
            max_size=None if limits.max_size is None else limits.max_size - spare,
            free_needed=limits.free_needed + spare if limits.free_needed else 0,
        )
        more = self.plan(further, reserved=reserved, found=found)
        return more if more.suffices else chosen

    def _shortage(self, url: str, need: int) -> tuple[Limits, int, bool]:
        """What room for ``need`` bytes more takes.

        Returns:
            The limits to keep, the bytes in flight with those, and whether all that is in
            flight says how much it will be.
        """
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
                raise not_free_yet(url, pending)
            short = max(0, short - pending)
        limits = Limits(
            max_size=volume.budget(self._config),
            free_needed=short,
            inodes_needed=volume.lacks_inodes(self._inode_floor(volume) + _FETCH_INODES),
        )
        return limits, reserved + need, all(f.is_measured for f in found)

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
        with budget_lock(self._node, self._clock):
            needed = max(1, size) - self._sweep()
            volume = Volume.of(self._node.base)
            inodes = volume.lacks_inodes(_FETCH_INODES)
            if inodes:
                needed = size - volume.free  # then it is not the bytes that are short
            if needed > 0:
                pending = self._pending.left(volume.free)
                if pending >= needed:
                    raise not_free_yet(url, pending)
                needed -= pending
            if needed > 0 or inodes:
                chosen = self.plan(Limits(free_needed=max(0, needed), inodes_needed=inodes))
                if not chosen.suffices:
                    raise no_room(url, chosen.missing, chosen.missing_inodes)
                self._apply(chosen)

    @property
    def is_pressed(self) -> bool | None:
        """Whether less memory is free than should be; None where it is none. OSError: gone."""
        return self.limits().free_needed > 0 if is_memory(self._node.base) else None

    def relieve(self) -> int:
        """Give memory back that the job has come to need; bytes.

        Whatever the policy says: an entry can be fetched again, a job that the kernel killed has
        ended. Entries that are read or pinned stay. OSError: the filesystem is failing.
        """
        with budget_lock(self._node, self._clock):
            if not self.is_pressed:
                return 0
            limits = Limits(free_needed=self.limits().free_needed)
            chosen = self.plan(limits, protect=False)
            self._apply(chosen)
            return chosen.freed

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
        for victim in gone:
            self.evicted(victim)
        freed = sum(victim.entry.size for victim in gone)
        self._pending.note(freed, before, Volume.of(self._node.base).free)
        return len(gone)

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
            max_size=volume.budget(self._config),
            free_needed=max(0, self._config.min_free.of(volume.size) - volume.free),
            inodes_needed=volume.lacks_inodes(self._inode_floor(volume)),
            max_age=self._config.max_age,
        )

    def plan(
        self,
        limits: Limits,
        *,
        reserved: int = 0,
        protect: bool = True,
        found: Iterable[Entry] | None = None,
    ) -> EvictionPlan:
        """What would have to go; see `eviction.plan`.

        Args:
            limits: what must hold afterwards.
            reserved: bytes of fetches in flight.
            protect: whether what running jobs use stays.
            found: the entries, where they were listed already.
        """
        stores = self._stores()
        if found is None:
            found = self._through(entry for store in stores for entry in store.entries())
        now = self._clock.time()
        wall, monotonic = self._begun
        steady = wall + self._clock.monotonic() - monotonic
        return plan(
            found,
            limits,
            now,
            reserved=reserved,
            policy=Policy.now(self._config, self._node, now, steady=steady, jobs=protect),
            in_use=lambda entry: stores[0].owning(entry).is_pinned(entry),
        )

    def sole_cleaner(self, *, wait: bool) -> AbstractContextManager[None]:
        """Hold the lock of those who clean the root; see `spacelocks.sole_cleaner`.

        Args:
            wait: whether to wait for another one, ``lock_timeout`` at most.
        """
        seconds = self._config.lock_timeout if wait else 0.0
        return sole_cleaner(self._node, self._clock, seconds)

    def something_went(self) -> None:
        """Let newcomers ask again for room that was refused."""
        self._ledger.forget()

    def compact_counts(self) -> None:
        """Keep small what was counted; see `history.compact`.

        Raises:
            OSError: the filesystem is read-only or failing.
        """
        compact(self._node, self._clock.time())

    def forget_expired_pins(self) -> None:
        """Remove pins whose time is over.

        Raises:
            OSError: the filesystem is read-only or failing.
        """
        remove_expired(self._node, self._clock.time())

    def date(self, entries: Iterable[Entry]) -> None:
        """Say of entries that were last used in the future that it was now."""
        for entry in entries:
            self._stores()[0].touch(str(entry.path), self._clock.time())
