"""Room for a shard before its first byte is written.

The node keeps one number, ``usage``: bytes of all shards and of all fetches in flight. It is read
and written under the budget lock only: an admission adds its shard's size, an eviction subtracts.
So many processes keep one budget. A fetch that fails leaves its bytes in the number, and what else
changes the cache is not in it, so entries and partials are counted again whenever the number is
older than 20 times what counting took, and than a minute at most: counting takes a twentieth of the
time, whatever the size of the cache. `clean` has it counted anew.

Where locks do not work, each process may overshoot by what others admit at the same moment. Nodes
that share a directory do not share the number: they count each time.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from shardcache.clock import Clock, boot_id
from shardcache.config import Config
from shardcache.errors import CacheFullError, LockTimeoutError
from shardcache.files import FULL, is_alone, open_file, settle
from shardcache.layout import Layout, read_file
from shardcache.locks.flock import Holder, KeyLock, read_holder
from shardcache.space.eviction import (
    EvictionPlan,
    Limits,
    Victim,
    apply,
    linked,
    plan,
    sweep,
)
from shardcache.space.memory import Volume, is_memory
from shardcache.space.policy import Policy
from shardcache.store.partial import Partial
from shardcache.store.store import Entry, Store
from shardcache.store.sweeping import InFlight, in_flight
from shardcache.units import format_bytes, format_duration

__all__ = ["Space"]

logger = logging.getLogger(__name__)

#: For how long a count is believed: so many times what it took, and so many seconds at most.
_BELIEVED, _LONGEST = 20, 60.0
#: Times that victims may come into use, or vanish, between plan and eviction.
_PLANS = 6
#: What a fetch makes at most: a partial of five names, a lock with its directory, the
#: directories of the key, the budget lock.
_FETCH_INODES = 10
#: There is ample room where so many shards of a size would find some, beside an eighth of the
#: volume: no node fetches more at once.
_AMPLE = 1024
#: Of so many entries, one goes along with those that must: otherwise a full cache would be listed
#: for every newcomer.
_EACH = 100
#: Seconds to wait for the budget lock. It is held for one count and the evictions that follow;
#: after this long something is wrong with its holder, and going on risks only an overshoot.
_BUDGET_SECONDS = 60.0
_BUDGET_POLL = 0.01
_CLEAN_POLL = 0.1
_ANNOUNCE_EVERY = 10.0
_MAX_USAGE = 4096


@dataclass(frozen=True, slots=True)
class _Usage:
    """The number, and how far it is to be believed.

    Attributes:
        held: bytes of entries, and of fetches in flight when they will be complete.
        until: until when to believe it, of the monotonic clock, which all processes share.
        evictable: bytes of `held` that can be evicted at most; None where nobody has looked.
    """

    held: int
    until: float
    evictable: int | None = None


@dataclass(frozen=True, slots=True)
class _Need:
    """What one more shard takes.

    Attributes:
        size: its bytes that are not reserved yet.
        limit: bytes that the cache may hold; None where only free space limits it.
        short: bytes that the volume lacks to keep its free space.
        inodes: likewise inodes.
    """

    size: int
    limit: int | None
    short: int
    inodes: int

    def over(self, usage: _Usage) -> int:
        """Bytes that have to go first."""
        over = 0 if self.limit is None else usage.held + self.size - self.limit
        return max(over, self.short)

    def limits(self, spare: int = 0) -> Limits:
        """What must hold once they are gone, and ``spare`` bytes more."""
        limit = None if self.limit is None else self.limit - spare
        return Limits(limit, self.short + spare if self.short else 0, self.inodes)


class Space:
    """The budget of one root.

    Args:
        node: the node's layout, where budget lock, usage and sessions are.
        stores: lists all namespaces of the root.
        config: limits.
        clock: time.
        through: entries are listed through this, which may take its time.
        begun: wall and monotonic time of a moment long ago, by which it is seen if the wall
            clock is set.
        evicted: is told of every shard that went.
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
        self.node = node
        self.clock = clock
        self._stores = stores
        self._config = config
        self._through = through
        self.evicted = evicted
        self._begun = (clock.time(), clock.monotonic()) if begun is None else begun
        # Of this process only one thread at a time asks for the lock of all: they would
        # find each other's, and look for it again and again.
        self._turn = threading.Lock()

    # -- admission -----------------------------------------------------------------

    def admit(
        self,
        url: str,
        size: int | None,
        make: Callable[[], Partial],
        *,
        reserved: bool = False,
    ) -> Partial:
        """Reserve room for a shard, evict others if need be, and make its partial.

        Args:
            url: of the shard.
            size: bytes; None where the origin does not tell.
            make: makes the partial.
            reserved: whether what ``make`` returns is live already, and counts.

        Raises:
            CacheFullError: there is no room and nothing may be evicted.
            OSError: the disk fails.
        """
        need = 0 if reserved else size or 0
        volume = Volume.of(self.node.base)
        limit = volume.budget(self._config)
        if limit is not None and need > limit:
            raise CacheFullError(
                f"{url} has {format_bytes(need)}, more than the whole cache may hold "
                f"({format_bytes(limit)}). Raise max_size.",
                url=url,
            )
        if size is not None and limit is None and self._is_ample(volume, need):
            return make()
        with self._turn, self._budget_lock():
            self._reserve(url, need, self._read() if size is not None and not reserved else None)
            return make()

    def refuses(self, url: str, size: int) -> CacheFullError | None:
        """Why there is no room for a shard, if that was found just now; asks nobody."""
        usage = self._read()
        if usage is None or usage.evictable is None:
            return None
        need = self._need(size, self._flights())
        return self._refusal(url, need, usage)

    def make_room(self, url: str, size: int) -> None:
        """Free ``size`` bytes, or inodes, after the disk said that it is full.

        Raises:
            CacheFullError: nothing may go.
            OSError: the disk fails.
        """
        with self._budget_lock():
            self.recount()
            needed = max(1, size) - self._sweep()
            volume = Volume.of(self.node.base)
            inodes = volume.lacks_inodes(_FETCH_INODES)
            if inodes:
                needed = size - volume.free  # then it is not the bytes that are short
            if needed > 0 or inodes:
                chosen = self.plan(Limits(free_needed=max(0, needed), inodes_needed=inodes))
                if not chosen.suffices:
                    raise _no_room(url, chosen.missing, chosen.missing_inodes)
                self._evict(chosen)

    def recount(self) -> None:
        """Have the next admission count what the cache holds."""
        self._write(None)

    def _is_ample(self, volume: Volume, need: int) -> bool:
        """Whether there is room whatever others reserve: nobody needs to be asked then.

        A look at all fetches in flight costs more than a small shard.
        """
        wanted = self._config.min_free.of(volume.size) + _AMPLE * need + volume.size // 8
        names = self._inode_floor(volume) + _AMPLE * _FETCH_INODES
        return volume.free >= wanted and not volume.lacks_inodes(names)

    def _reserve(self, url: str, size: int, usage: _Usage | None) -> None:
        """Add a shard to the number, once there is room for it; under the lock.

        Args:
            url: of the shard.
            size: bytes.
            usage: the number; None to count.

        Raises:
            CacheFullError: there is no room and nothing may be evicted.
        """
        found: list[Entry] | None = None
        swept = False
        for _ in range(_PLANS):
            flights = self._flights()
            need = self._need(size, flights)
            if need.limit is None and not need.short and not need.inodes:
                return  # nothing limits the number, so nobody needs it
            if usage is not None and (refusal := self._refusal(url, need, usage)) is not None:
                raise refusal
            if usage is None or not all(flight.is_measured for flight in flights):
                usage, found = self._count(flights)
            if need.over(usage) <= 0 and not need.inodes:
                self._write(replace(usage, held=usage.held + size))
                return
            if found is None:
                usage, found = self._count(flights)
                continue
            if not swept:  # what dead processes left goes first
                swept, usage = True, None if self._sweep() else usage
                if usage is None:
                    continue
            chosen = self._choose(need, usage, found)
            if not chosen.suffices:
                self._write(replace(usage, evictable=chosen.freed))
                raise _no_room(url, chosen.missing, chosen.missing_inodes)
            if self._evict(chosen) and len(self._stores()) == 1:
                self._write(replace(usage, held=usage.held - chosen.freed + size))
                return
            # They came into use meanwhile, or another rank has linked them: see what is there.
            usage, found = None, None
        raise _no_room(url, 0, 0)

    def _choose(self, need: _Need, usage: _Usage, found: list[Entry]) -> EvictionPlan:
        """What has to go for a newcomer, and a little more if there is much."""
        # Fetches in flight, and the newcomer.
        reserved = usage.held + need.size - sum(links[0].size for links in linked(found))
        chosen = self.plan(need.limits(), reserved=reserved, found=found)
        if not chosen.victims or not chosen.suffices or len(found) < _EACH:
            return chosen
        spare = (chosen.kept_bytes + chosen.freed) // _EACH
        more = self.plan(need.limits(spare), reserved=reserved, found=found)
        return more if more.suffices else chosen

    def _need(self, size: int, flights: Iterable[InFlight]) -> _Need:
        volume = Volume.of(self.node.base)
        unwritten = sum(flight.reserved - flight.occupied for flight in flights)
        floor = self._config.min_free.of(volume.size)
        return _Need(
            size,
            volume.budget(self._config),
            max(0, floor + size + unwritten - volume.free),
            volume.lacks_inodes(self._inode_floor(volume) + _FETCH_INODES),
        )

    def _refusal(self, url: str, need: _Need, usage: _Usage) -> CacheFullError | None:
        if usage.evictable is None or self._config.policy != "working-set":
            return None
        missing = need.over(usage) - usage.evictable
        return _no_room(url, missing, 0) if missing > 0 else None

    # -- the number ----------------------------------------------------------------

    def _flights(self) -> list[InFlight]:
        return [flight for store in self._stores() for flight in in_flight(store.layout)]

    def _count(self, flights: Iterable[InFlight]) -> tuple[_Usage, list[Entry]]:
        """Count anew; ``flights`` were listed before: what is published since counts twice."""
        begun = self.clock.monotonic()
        found = list(self._through(entry for store in self._stores() for entry in store.entries()))
        held = sum(links[0].size for links in linked(found)) + sum(f.reserved for f in flights)
        now = self.clock.monotonic()
        believed = min(_LONGEST, _BELIEVED * (now - begun))
        if not all(flight.is_measured for flight in flights):
            believed = 0.0  # who knows how many bytes they will have
        return _Usage(held, now + believed), found

    def _read(self) -> _Usage | None:
        """The number; None if it is missing or too old."""
        if self.node.grace is not None:
            return None
        try:
            boot, held, until, evictable = json.loads(read_file(self.node.usage, _MAX_USAGE))
            left = float(until) - self.clock.monotonic()
            if boot != boot_id() or not 0 < left <= _LONGEST:
                return None
            return _Usage(int(held), until, None if evictable is None else int(evictable))
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as exn:
            logger.debug("%s: %s", self.node.usage, exn)
            return None

    def _write(self, usage: _Usage | None) -> None:
        """Write the number, in its place; who is killed meanwhile leaves none that can be read."""
        if self.node.grace is not None:
            return
        record = b""
        if usage is not None:
            values = [boot_id(), usage.held, usage.until, usage.evictable]
            record = json.dumps(values).encode()
        mode = self.node.modes.file
        create = os.O_CREAT if usage is not None else 0
        try:
            with open_file(self.node.usage, io.FileIO, os.O_WRONLY | create, mode) as file:
                if is_alone(file.fileno()):
                    settle(file.fileno(), mode)
                    os.ftruncate(file.fileno(), 0)
                    os.write(file.fileno(), record)
        except OSError as exn:  # absent, full, read-only: the next one counts
            logger.debug("%s: %s", self.node.usage, exn)

    # -- limits and plans ----------------------------------------------------------

    def _inode_floor(self, volume: Volume) -> int:
        """Inodes that stay free: the share that stays free of the bytes."""
        min_free = self._config.min_free
        return 0 if min_free.percent is None else min_free.of(volume.inodes)

    @property
    def is_pressed(self) -> bool | None:
        """Whether less memory is free than should be; None where it is none. OSError: gone."""
        return self.limits().free_needed > 0 if is_memory(self.node.base) else None

    def relieve(self) -> int:
        """Give memory back that the job has come to need; bytes.

        Whatever the policy says: an entry can be fetched again, a job that the kernel killed has
        ended. Entries that are read or pinned stay. OSError: the filesystem is failing.
        """
        with self._budget_lock():
            if not self.is_pressed:
                return 0
            limits = Limits(free_needed=self.limits().free_needed)
            chosen = self.plan(limits, protect=False)
            self._evict(chosen)
            self.recount()
            return chosen.freed

    def reserved(self) -> int:
        """Bytes that the fetches in flight will occupy."""
        return sum(flight.reserved for flight in self._flights())

    def limits(self) -> Limits:
        """The configured limits as they stand on this filesystem now.

        Raises:
            OSError: the filesystem does not answer.
        """
        volume = Volume.of(self.node.base)
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
        now = self.clock.time()
        wall, monotonic = self._begun
        steady = wall + self.clock.monotonic() - monotonic
        return plan(
            found,
            limits,
            now,
            reserved=reserved,
            policy=Policy.now(self._config, self.node, now, steady=steady, jobs=protect),
            in_use=lambda entry: stores[0].owning(entry).is_pinned(entry),
        )

    def _sweep(self) -> int:
        """Remove what dead processes left; returns bytes freed."""
        freed = 0
        for store in self._stores():
            for removal in sweep(store):
                logger.info("removed %s, %d bytes", removal.name, removal.size)
                freed += removal.size
        return freed

    def _evict(self, chosen: EvictionPlan) -> bool:
        """Evict what was chosen; returns whether all of it went."""
        gone = 0
        for victim in apply(self._stores()[0], chosen.victims):
            self.evicted(victim)
            gone += 1
        return gone == len(chosen.victims)

    # -- locks ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _budget_lock(self) -> Iterator[None]:
        """Hold the node's budget lock, or go on without it after a minute, with a warning."""
        lock = KeyLock(self.node.named_lock("budget"), self.node.modes)
        what = "holds the budget lock"
        try:
            if not self._wait_for(lock, what, _BUDGET_SECONDS, _BUDGET_POLL):
                logger.warning(
                    "waiting for %s: %s %s; going on without it",
                    format_duration(_BUDGET_SECONDS),
                    read_holder(lock.path) or "somebody",
                    what,
                )
            yield
        finally:
            lock.release()

    def sole_cleaner(self, *, wait: bool) -> AbstractContextManager[None]:
        """Hold the lock of those who clean the root.

        Args:
            wait: whether to wait for another one, ``lock_timeout`` at most.

        Raises:
            LockTimeoutError: another one cleans it.
            OSError: the disk fails.
        """
        # Where the root is another user's, the lock would be that user's from then on.
        if self._is_foreign():
            return contextlib.nullcontext()
        return self._cleaner_lock(self._config.lock_timeout if wait else 0.0)

    @contextlib.contextmanager
    def _cleaner_lock(self, seconds: float) -> Iterator[None]:
        lock = KeyLock(self.node.named_lock("clean"), self.node.modes)
        if not self._wait_for(lock, "cleans the cache", seconds, _CLEAN_POLL):
            root, who = self.node.base.parent, read_holder(lock.path) or "another process"
            raise LockTimeoutError(
                f"{root} is being cleaned by {who}; nothing was removed. Try again when that has "
                "ended.",
                dir=root,
            )
        try:
            yield
        finally:
            lock.release()

    def _is_foreign(self) -> bool:
        if self.node.modes.group is not None:
            return False
        try:
            return os.lstat(self.node.locks).st_uid != os.geteuid()
        except FileNotFoundError:
            return False

    def _wait_for(self, lock: KeyLock, what: str, seconds: float, poll: float) -> bool:
        """Take a lock and say whom it is waited for; False if it did not come free in time."""
        holder = Holder.this_process(rank=None, job=None, now=self.clock.time())
        begun = announced = self.clock.monotonic()
        while not _take(lock, holder):
            now = self.clock.monotonic()
            if now - begun >= seconds:
                return False
            if now - announced >= _ANNOUNCE_EVERY:
                announced = now
                waited, who = format_duration(now - begun), read_holder(lock.path) or "somebody"
                logger.warning("waiting for %s: %s %s", waited, who, what)
            self.clock.sleep(min(poll, max(0.001, seconds)))
        return True


def _take(lock: KeyLock, holder: Holder) -> bool:
    try:
        return lock.try_acquire(holder)
    except OSError as exn:
        if exn.errno not in FULL:
            raise
        # There is no room for its file; without it there will not be any.
        logger.info("going on without %s: %s", lock.path.name, exn)
        return True


def _no_room(url: str, missing: int, missing_inodes: int) -> CacheFullError:
    wanted = []
    if missing:
        wanted.append(format_bytes(missing))
    if missing_inodes:
        wanted.append(f"{missing_inodes} inodes (names of files, see df -i)")
    return CacheFullError(
        f"no room for {url}: {' and '.join(wanted) or 'some'} more would have to go, and "
        "the rest is in use or was used since the running jobs began. Raise max_size, "
        "free the disk, or let the shard be streamed.",
        url=url,
    )
