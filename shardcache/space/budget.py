"""Reserve room for a shard before its first byte is written.

The file ``usage`` has a number for each bin of the cache, which are the shards whose keys begin
with the same two digits. If locks fail, each process may exceed the budget by the shards that
others admit at the same moment. With leases, all entries and partials are counted each time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from shardcache import clock
from shardcache.config import Config
from shardcache.errors import CacheFullError, LockTimeoutError
from shardcache.faults import ignoring, system_error
from shardcache.files import is_directory, list_names, open_exclusive, read_json
from shardcache.layout import Layout, parse_partial_name
from shardcache.locks.keys import Flock, Holder, read_holder
from shardcache.locks.sessions import live_sessions
from shardcache.space import eviction
from shardcache.space.eviction import CleanReport, Limits, Policy, Removal
from shardcache.space.memory import Volume, allocation, ram_disk
from shardcache.stats import database
from shardcache.stats.counters import Counters
from shardcache.store.entry import Entry, Store
from shardcache.store.partial import InFlight, in_flight
from shardcache.threads import lazy
from shardcache.units import format_bytes
from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)

#: Number of bins: the directories of `Layout.objects`.
_BINS = 256
#: An eviction lists at least this many entries, or all, while other admissions wait.
_SAMPLE = 1000
#: An eviction lists this many times the bytes that it must free, or everything, so that it evicts
#: only the least recently used 2 % of a sample.
_SHARE = 50
#: With this many entries or more, an eviction removes an extra 2 % of the sample, but at most 1 %
#: of the cache, so that one admission in twenty lists a sample.
_MANY = 100
#: If the numbers are unknown, at least this many shards are counted, or all of them; an estimate
#: from these is within 4 %.
_COUNTED = 10_000
#: `Space.contents` samples bins that are this far apart, because evictions empty bins in turn, so
#: that neighbours are alike.
_STRIDE = 159
#: Seconds after which an admission lists a sample although nothing must be evicted, to correct the
#: numbers: processes without a ``max_size`` do not add to ``usage``.
_CORRECTED = 6.0
#: Seconds for which a refusal is remembered.
_REFUSED = 60.0
#: Attempts to evict. One fails if a process begins to read one of the shards after it was planned.
_PLANS = 6
#: Shards that the processes of a node may admit at the same moment, before they see each other's
#: partials: 8 ranks with 8 workers each.
_AT_ONCE = 64
#: Seconds to wait for the budget lock, whose holder counts and evicts.
_BUDGET_SECONDS = 60.0
_POLL = 0.01
#: The holder of a lock without a record.
_UNKNOWN = Holder(0, "an unknown node", None, None, 0.0)
_ANNOUNCE_EVERY = 10.0
#: Seconds for which partials of dead processes stay, so that the next prewarm can resume them.
_KEEP_PARTIALS = 3600.0
#: Length in bytes to which the files ``usage`` and ``refusal`` are padded. The first one has about
#: 2,500, and at most 5,000 with the longest numbers.
_PADDED = 8192


def _bin(name: str) -> int:
    """Return the bin of a key, or of a directory in `Layout.partials`."""
    return int(name.removeprefix("evict.")[:2], 16)


class Contents(NamedTuple):
    """The shards of a cache. A file with several links counts once."""

    shards: int = 0
    bytes: int = 0  #: sum of the sizes of the shards
    disk_bytes: int = 0
    estimated: bool = False  #: whether a sample of the shards was counted


@dataclass(slots=True)
class _Usage:
    """The content of the file ``usage``."""

    #: Bytes on disk of the entries and shards in flight of each bin; None if not counted.
    bins: list[int | None] = field(default_factory=lambda: [None] * _BINS)
    next: int = 0  #: the bin to list next
    listed: float = -math.inf  #: when a sample was listed, on the monotonic clock of the node
    #: Bins to count again in the next admission, because a final size is unknown.
    growing: set[int] = field(default_factory=set)

    @property
    def total(self) -> int:
        """The bytes of all bins, estimated from those that were counted."""
        known = [size for size in self.bins if size is not None]
        return sum(known) * _BINS // max(1, len(known))

    def listed_to(self, number: int) -> None:
        self.next = (number + 1) % _BINS
        self.listed = clock.monotonic()

    def add(self, number: int, size: int) -> None:
        before = self.bins[number]
        self.bins[number] = None if before is None else max(0, before + size)


@dataclass(eq=False)
class Space:
    """The budget of one root directory."""

    node: Layout  #: has the budget lock, and the file ``usage``
    stores: Callable[[], Sequence[Store]]  #: returns all namespaces of the directory
    _config: Config
    policy: Policy
    _counters: Counters
    _home: Layout  # whose pins hold here, too

    def __post_init__(self) -> None:
        self._turn = threading.Lock()  # lets one thread at a time poll the budget lock
        self._stuck: Holder | None = None  # had the budget lock for a minute when last seen

    @lazy
    def max_size(self) -> int | None:
        """The maximum bytes that the cache may hold, or None if only free space limits it."""
        return Volume.of(self.node.base).budget(self._config)

    @lazy
    def min_free(self) -> int:
        """The bytes of the disk that must stay free."""
        return self._config.min_free.of(Volume.of(self.node.base).size)

    @lazy
    def in_memory(self) -> bool:
        return ram_disk(self.node.base) is not None

    @lazy
    def allocated(self) -> Callable[[int], int]:
        """The function that computes the bytes on disk of a shard from its size."""
        return allocation(self.node.base)

    @contextlib.contextmanager
    def reserved(
        self, shard: ShardURL, size: int | None, policy: Policy | None, *, exists: bool = False
    ) -> Iterator[None]:
        """Reserve room for a shard, evicting others by the policy, if any. The body must create the
        partial, unless it ``exists``. The size is None if it is unknown. Raises CacheFullError.
        """
        if size is not None:
            if too_large := self._too_large(str(shard), size):
                raise too_large
            if self.max_size is None:
                # If all shards that may be admitted at this moment fit, no budget lock is needed.
                spare = Volume.of(self.node.base).free - self.min_free - self._announced()
                if spare >= _AT_ONCE * self.allocated(size):
                    yield
                    return
        with self._turn, self._budget_lock():
            self._reserve(shard, size, policy, exists)
            yield

    def refuses(self, url: str, size: int) -> CacheFullError | None:
        """Return the error if a shard is too large or was refused recently, otherwise None."""
        missing, is_recent = self._refusal(self.allocated(size), self.policy)
        refused = self._no_room(url, missing) if missing and is_recent else None
        return self._too_large(url, size) or refused

    def _no_room(self, url: str, missing: int = 0) -> CacheFullError:
        more = f"{format_bytes(missing)} more" if missing else "more"
        return CacheFullError(
            f"no room for {url} in {self._config.dir}: it needs {more}, and the cached shards are "
            "pinned, in use or were used since the running jobs began. Raise max_size, free the "
            "disk, or let the shard be streamed.",
            url=url,
        )

    def _too_large(self, url: str, size: int) -> CacheFullError | None:
        if self.max_size is None or (need := self.allocated(size)) <= self.max_size:
            return None
        return CacheFullError(
            f"{url} takes {format_bytes(need)} on disk, more than the whole cache may hold "
            f"({format_bytes(self.max_size)}). Raise max_size.",
            url=url,
        )

    def make_room(self, url: str, size: int) -> None:
        """Evict entries for a shard after the disk was full. Raises CacheFullError."""
        with self._budget_lock(), self._usage() as usage:
            needed = Limits(free_needed=max(0, self.allocated(size) - self._sweep(usage)))
            # The disk may lack inodes, and a download needs more of them than one entry frees.
            planned = self._choose(usage, needed, self.policy, extra=3)
            if planned.missing:
                raise self._no_room(url, planned.missing)
            self._evict(usage, planned)

    def lacks_memory(self) -> bool:
        """Return whether the cache is on a RAM disk and takes memory that the job needs."""
        with ignoring(OSError):  # the directory is gone
            return self.in_memory and self.limits().free_needed > 0
        return False

    def _reserve(
        self, shard: ShardURL, size: int | None, policy: Policy | None, exists: bool
    ) -> None:
        """Add a shard to ``usage``, evicting first if necessary. Call it with the budget lock."""
        room, number = 0 if size is None else self.allocated(size), _bin(shard.key)
        need = 0 if exists else room  # a listing counts what exists
        if (limits := self.limits(need)) == Limits():
            return  # no limit applies, so ``usage`` is not needed
        with self._usage() as usage:
            if size is None or exists:
                usage.bins[number] = None
                usage.growing.add(number)
            self._count(usage)
            is_old = not 0 <= clock.monotonic() - usage.listed < _CORRECTED
            if is_old and (policy is None or limits.excess(usage.total + need) <= 0):
                self._choose(usage, Limits(), self.policy, sample_only=True)  # corrects `usage`
            # If limits were lowered or the disk was filled, the next admissions evict the rest, so
            # that none waits for long.
            freed, least = 0, 2 * max(1, room)
            for attempt in range(_PLANS):
                over = limits.excess(usage.total + need)
                if over <= 0 or freed >= least:
                    usage.add(number, need)
                    return
                if policy is None:
                    break
                missing, is_recent = self._refusal(need, policy, usage)
                if missing and is_recent:
                    raise self._no_room(str(shard), missing)
                # Leftovers of dead processes go first. After a minute, a sample decides whether a
                # refusal still holds.
                if attempt or not self._sweep(usage):
                    later, sample_only = max(0, over - least), missing > 0
                    plan = self._choose(usage, limits, policy, need, later, sample_only=sample_only)
                    if plan.missing:
                        # Otherwise, entries stay because of readers, which may end at any moment.
                        if policy.keeps_used:
                            held = usage.total + need - plan.missing
                            oldest = min(live_sessions(self.node), default=0)
                            self._write(self.node.refusal, clock.monotonic(), held, oldest)
                        raise self._no_room(str(shard), plan.missing)
                    freed += self._evict(usage, plan)  # not all, if a process now reads one
                self._count(usage)
                limits = self.limits(need)
            raise self._no_room(str(shard))

    def _choose(
        self,
        usage: _Usage,
        limits: Limits,
        policy: Policy,
        need: int = 0,
        later: int = 0,
        *,
        sample_only: bool = False,
        extra: int = 0,
    ) -> CleanReport:
        """Plan an eviction from a sample of the cache or, if that is too little, from all of it.

        Corrects ``usage`` where entries are listed. With ``sample_only``, a sample must do. If
        possible, ``extra`` entries are evicted in addition.
        """
        over = limits.excess(usage.total + need) - later
        order = [(usage.next + n) % _BINS for n in range(_BINS)]
        listing = zip(order, self._list(usage, order), strict=True)
        entries, listed = list[Entry](), 0
        for least in (_SAMPLE,) if sample_only else (_SAMPLE, math.inf):
            for number, (more, size) in listing:
                entries += more
                listed += size
                usage.listed_to(number)
                if len(entries) >= least and listed >= _SHARE * over:
                    break
            spare = min(listed // _SHARE, usage.total // 100) if len(entries) >= _MANY else 0
            spare = max(spare, extra * listed // max(1, len(entries)))
            reserved = usage.total - listed + need
            planned = self.plan(
                entries, limits, policy, reserved=reserved, later=later, spare=spare
            )
            if not planned.missing:
                break
        return planned

    def _evict(self, usage: _Usage, planned: CleanReport) -> int:
        """Carry out a plan; return the bytes freed. Call it with the budget lock."""
        gone = self.evict(planned.removed)
        for removal in gone:
            usage.add(_bin(removal.entries[0].key), -removal.size)
        return sum(removal.size for removal in gone)

    def flights(self) -> list[InFlight]:
        """Return the shards in flight in all namespaces, with their sizes as bytes on disk."""
        flights = []
        for store in self.stores():
            for flight in in_flight(store.layout):
                size = None if flight.size is None else self.allocated(flight.size)
                occupied = self.allocated(flight.occupied)
                flights.append(flight._replace(occupied=occupied, size=size))
        return flights

    def contents(self) -> Contents:
        """Count the shards on the disk; estimate a large cache from a fixed sample of its bins."""
        stores, files, share = self.stores(), list[eviction.Links](), 0.0
        for n in range(_BINS):
            prefix = f"{n * _STRIDE % _BINS:02x}"
            files += eviction.group_links(e for store in stores for e in store.entries(prefix))
            share = (n + 1) / _BINS
            if len(files) >= _COUNTED:
                break
        size = sum(links[0].size for links in files)
        used = sum(eviction.disk_bytes(links, self.allocated) for links in files)
        shards, size, used = (round(count / share) for count in (len(files), size, used))
        return Contents(shards, size, used, estimated=share < 1)

    def _list(self, usage: _Usage, bins: Iterable[int]) -> Iterator[tuple[list[Entry], int]]:
        """Yield the entries of each bin, and their bytes on disk; correct ``usage``."""
        flights: dict[int, list[InFlight]] = {}
        for flight in self.flights():
            flights.setdefault(_bin(flight.path.name), []).append(flight)
        stores = self.stores()
        for number in bins:
            entries = [entry for store in stores for entry in store.entries(f"{number:02x}")]
            published = {(entry.key, entry.version) for entry in entries}
            # A partial that was published after it was listed counts only as an entry. A partial
            # that still exists next to an entry of its version may replace the entry: both count.
            reserved = sum(
                flight.reserved
                for flight in flights.get(number, ())
                if (flight.key, flight.version) not in published or is_directory(flight.path)
            )
            if any(f.live and f.key and f.size is None for f in flights.get(number, ())):
                usage.growing.add(number)
            size = eviction.total_bytes(entries, self.allocated)
            usage.bins[number] = size + reserved
            yield entries, size

    def _count(self, usage: _Usage) -> None:
        """Count the bins whose bytes are unknown, until `_COUNTED` shards are counted."""
        unknown = [number for number, size in enumerate(usage.bins) if size is None]
        left = math.inf if self.node.grace is not None else _COUNTED
        for entries, _ in self._list(usage, unknown) if unknown else ():
            if (left := left - len(entries)) <= 0:
                break
        if len(unknown) == _BINS:
            usage.listed_to(usage.next - 1)

    @contextlib.contextmanager
    def _usage(self) -> Iterator[_Usage]:
        """Read the file ``usage``, and write it after the body. Call it with the budget lock."""
        usage = self._read()
        try:
            yield usage
        finally:
            bins = [None if n in usage.growing else size for n, size in enumerate(usage.bins)]
            self._write(self.node.usage, bins, usage.next, usage.listed)

    def _read(self) -> _Usage:
        """Return the content of ``usage``. With leases, or if it is damaged, no bin is counted."""
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            boot, bins, number, listed = read_json(self.node.usage)
            if len(bins) == _BINS and self.node.grace is None:
                bins = [size if isinstance(size, int) and size >= 0 else None for size in bins]
                listed = float(listed) if boot == clock.boot_id() else -math.inf
                return _Usage(bins, int(number) % _BINS, listed)
        return _Usage()

    def _refusal(self, need: int, policy: Policy, usage: _Usage | None = None) -> tuple[int, bool]:
        """Return how many of ``need`` bytes the last refusal lacks, and whether it still holds.

        It holds for a minute, while the limits are exceeded and the same jobs keep their shards.
        """
        if policy.keeps_used and self.node.grace is None:
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                boot, when, most, oldest = read_json(self.node.refusal)
                age = clock.monotonic() - float(when)
                if boot == clock.boot_id() and age >= 0:
                    total = (usage or self._read()).total
                    missing = max(0, total + need - int(most))
                    if missing and self.limits(need).excess(total + need) > 0:
                        is_kept = oldest == min(live_sessions(self.node), default=0)
                        return missing, age < _REFUSED and is_kept
        return 0, False

    def forget_refusal(self) -> None:
        """Forget the last refusal, because shards were removed or may be evicted now."""
        with ignoring(OSError):
            self.node.refusal.unlink()

    def _write(self, path: Path, *values: object) -> None:
        if self.node.grace is not None:
            return
        try:
            # In place: if a file replaces another one, ext4 waits for the disk (4 ms each time).
            flags = os.O_WRONLY | os.O_CREAT
            with open_exclusive(path, flags, self.node.modes) as file:
                data = json.dumps([clock.boot_id(), *values]).encode()
                os.pwrite(file.fileno(), data.ljust(_PADDED), 0)
        except system_error() as exn:  # the disk is full or read-only
            logger.debug("%s: %s", path, exn)
            with ignoring(OSError):
                path.unlink()

    def limits(self, newcomer: int = 0) -> Limits:
        """Return the limits in bytes that must hold to admit ``newcomer`` bytes on disk now."""
        volume = Volume.of(self.node.base)
        spare = volume.free - self.min_free - newcomer
        if spare < self._announced():
            spare -= sum(flight.reserved - flight.occupied for flight in self.flights())
        return Limits(max_size=volume.budget(self._config), free_needed=max(0, -spare))

    def _announced(self) -> float:
        """Return the final bytes on disk that the names of partials state; infinity if unknown."""
        names = (name for store in self.stores() for name in list_names(store.layout.partials))
        sizes = [parsed[2] for name in names if (parsed := parse_partial_name(name))]
        return sum(math.inf if size is None else self.allocated(size) for size in sizes)

    def plan(
        self,
        entries: Sequence[Entry],
        limits: Limits,
        policy: Policy,
        *,
        in_use: Callable[[Entry], bool] | None = None,
        **goal: int,
    ) -> CleanReport:
        """Plan with the pins and sessions of now; ``goal`` as for `eviction.plan`."""
        keys, now = {entry.key for entry in entries}, clock.time()
        pins = eviction.pinned((self.node, self._home), now, keys)
        return eviction.plan(
            entries,
            limits,
            policy,
            now,
            since=policy.kept_since(self.node, now),
            pinned=pins,
            in_use=in_use or self.stores()[0].in_use,
            allocated=self.allocated,
            **goal,
        )

    def _sweep(self, usage: _Usage) -> int:
        """Remove partials of dead processes and half-removed entries; return the bytes freed."""
        swept = 0
        for store in self.stores():
            for removal in eviction.sweep(store, self.allocated):
                logger.info("removed %s, %d bytes", removal.name, removal.size)
                usage.bins[_bin(Path(removal.name).name)] = None
                swept += removal.size
        return swept

    def evict(self, planned: Iterable[Removal]) -> list[Removal]:
        """Evict the shards of a plan that no process reads now; return those that were evicted."""
        store, gone = self.stores()[0], []
        for removal in planned:
            if all(store.evict(entry) for entry in removal.entries):
                key, size, reason = removal.entries[0].key, removal.entries[0].size, removal.reason
                extra = {"event": "evicted", "key": key, "bytes": size, "reason": reason.value}
                logger.info("evicted %s, %d bytes (%s)", key, size, reason, extra=extra)
                self._counters.add({f"evicted_{reason}": 1, "bytes_evicted": size})
                gone.append(removal)
        return gone

    def clean(
        self,
        limits: Limits | None = None,
        *,
        orphans: bool = False,
        dry_run: bool = False,
        wait: bool = False,
    ) -> CleanReport:
        """Evict until the limits hold, by default the configured ones, and remove leftovers.

        The options are as for `Cache.clean`. Raises LockTimeoutError if another process cleans.
        """
        seconds = self._config.lock_timeout if wait else 0.0
        with contextlib.nullcontext() if dry_run else self._named_lock("clean", seconds) as other:
            # A process that was stopped while it cleaned must not cost a job its memory.
            if other is not None and not self.lacks_memory():
                root = self.node.base.parent
                text = f"{other} is cleaning {root}, so nothing was removed. Try again later."
                raise LockTimeoutError(text, dir=root)
            limits = limits or self.limits()._replace(max_age=self._config.max_age)
            return self._clean(limits, orphans=orphans, dry_run=dry_run)

    def _clean(self, limits: Limits, *, orphans: bool, dry_run: bool) -> CleanReport:
        keep = 0.0 if orphans or limits.everything else _KEEP_PARTIALS
        leftovers = list[Removal]()
        for store in self.stores():
            leftovers += eviction.sweep(store, self.allocated, keep=keep, dry_run=dry_run)
        swept = sum(removal.size for removal in leftovers)
        # A dry run has not removed the leftovers, so `flights` still counts them.
        reserved = sum(flight.reserved for flight in self.flights()) - (swept if dry_run else 0)
        limits = limits._replace(free_needed=max(0, limits.free_needed - swept))
        entries = [entry for store in self.stores() for entry in store.entries()]
        # Not even running jobs keep shards in memory: the kernel kills a job that lacks it.
        lacks_memory = limits.free_needed > 0 and self.in_memory
        keeps_used = self.policy.keeps_used and not (limits.everything or lacks_memory)
        policy = self.policy._replace(keeps_used=keeps_used)
        planned = self.plan(entries, limits, policy, reserved=reserved)
        if dry_run:
            return replace(planned, removed=(*leftovers, *planned.removed))
        gone, now = self.evict(planned.removed), clock.time()
        for store in self.stores()[1:]:
            if store.layout != self.node and next(store.entries(), None) is None:
                eviction.remove_unused(store.layout)
        self.forget_refusal()
        eviction.remove_expired(self.node, now)
        try:
            database.expire(self.node, now)
        except system_error() as exn:
            logger.info("old statistics were not merged: %s", exn)
        freed = sum(removal.size for removal in gone)
        kept_bytes = planned.kept_bytes + planned.freed - freed
        left = limits._replace(free_needed=limits.free_needed - freed)
        return replace(
            planned,
            removed=(*leftovers, *gone),
            kept=planned.kept + len(planned.removed) - len(gone),
            kept_bytes=kept_bytes,
            missing=max(0, left.excess(kept_bytes + reserved)),
            dry_run=False,
        )

    @contextlib.contextmanager
    def _budget_lock(self) -> Iterator[None]:
        """Hold the node's budget lock in the body; after a minute, warn and continue without it."""
        with self._named_lock("budget", _BUDGET_SECONDS, self._stuck) as other:
            if other not in (None, self._stuck):
                text = "%s has had the budget lock for a minute; going on without it"
                logger.warning(text, other)
            self._stuck = other
            yield

    @contextlib.contextmanager
    def _named_lock(
        self, name: str, seconds: float, stuck: Holder | None = None
    ) -> Iterator[Holder | None]:
        """Hold a lock of the node; yield None, or its holder if it is not free in ``seconds``.

        The holder that was ``stuck`` before is not waited for again.
        """
        lock = Flock(self.node.named_lock(name), self.node.modes)
        start = announced = clock.monotonic()
        try:
            while not (is_ours := lock.try_acquire(Holder.this_process())):
                now, other = clock.monotonic(), read_holder(lock.path) or _UNKNOWN
                if now - start >= seconds or other == stuck:
                    break
                if now - announced >= _ANNOUNCE_EVERY:
                    announced = now
                    logger.warning("waiting for %s, which has the %s lock", other, name)
                clock.sleep(_POLL)
            yield None if is_ours else other
        finally:
            lock.release()
