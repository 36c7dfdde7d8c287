"""Room for a shard before its first byte is written.

The node keeps one number, ``usage``: bytes on disk of all shards, and of all fetches in flight with
their final sizes. It is read and written under the budget lock only. Entries and partials are
counted again before anything is evicted or refused, and after a minute; a refusal is believed as
long, unless another process cleans the cache or a job ends meanwhile. Where locks do not work, each
process may overshoot by what others admit at the same moment. Nodes that share a directory do not
share the number: they count each time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardcache import clock
from shardcache.clock import boot_id
from shardcache.config import Config
from shardcache.errors import CacheFullError, LockTimeoutError
from shardcache.layout import (
    Layout,
    is_directory,
    list_names,
    parse_partial_name,
    read_file,
    replace_file,
)
from shardcache.locks.flock import Holder, KeyLock, read_holder
from shardcache.space.eviction import (
    CleanReport,
    Limits,
    Policy,
    Removal,
    plan,
    sweep,
    total_bytes,
)
from shardcache.space.memory import Volume, allocation, is_memory
from shardcache.store.entry import Entry, Store
from shardcache.store.partial import InFlight, in_flight
from shardcache.threads import lazy
from shardcache.units import format_bytes

__all__ = ["Space"]

logger = logging.getLogger(__name__)

#: Seconds for which a count, and a refusal, is believed.
_BELIEVED = 60.0
#: Times that victims may come into use, or vanish, between plan and eviction.
_PLANS = 6
#: There is ample room where so many shards of a size would find some beside an eighth of the
#: volume: no node fetches more at once. So many where what is in flight is counted, too: no node
#: begins more at the same moment.
_AMPLE, _AT_ONCE = 1024, 64
#: Of so many entries, one goes along with those that must: otherwise a full cache would be listed
#: for every newcomer.
_EACH = 100
#: Seconds to wait for the budget lock. It is held for one count and the evictions that follow;
#: after this long something is wrong with its holder, and going on risks only an overshoot.
_BUDGET_SECONDS = 60.0
_POLL = 0.01
_ANNOUNCE_EVERY = 10.0
_MAX_USAGE = 4096


@dataclass(frozen=True, slots=True)
class _Usage:
    """The number."""

    held: int  #: bytes on disk of entries, and of fetches in flight when they will be complete
    counted: float  #: when, of the monotonic clock, which all processes share
    most: int | None = None  #: what `held` can be at most, as a refusal found; None without any

    def missing(self, need: int) -> int:
        """How many of the bytes that a shard needs find no room, as the last refusal found."""
        return 0 if self.most is None else max(0, self.held + need - self.most)


class Space:
    """The budget of one root.

    Args:
        node: the node's namespace, where budget lock, usage and sessions are.
        stores: lists all namespaces of the root.
        config: limits.
        evicted: is told of every shard that went.
    """

    def __init__(
        self,
        node: Layout,
        stores: Callable[[], Sequence[Store]],
        config: Config,
        evicted: Callable[[Removal], None] = lambda removal: None,
    ) -> None:
        self.node = node
        self.stores = stores
        self._evicted = evicted
        self._config = config
        # One thread of this process at a time polls the lock of all.
        self._threads = threading.Lock()

    # -- admission -----------------------------------------------------------------

    @lazy
    def max_size(self) -> int | None:
        """Most bytes that the cache may hold, on the filesystem as it was when first asked."""
        return Volume.of(self.node.base).budget(self._config)

    @lazy
    def allocated(self) -> Callable[[int], int]:
        """The function that computes the bytes on disk of a shard from its size."""
        return allocation(self.node.base)

    @contextlib.contextmanager
    def reserved(self, url: str, size: int | None) -> Iterator[None]:
        """Have room for a shard, by eviction if need be; its partial is made in the body.

        Args:
            url: of the shard.
            size: bytes; None where the origin does not tell, or its partial is there already.

        Raises:
            CacheFullError: there is no room and nothing may be evicted.
            OSError: the disk fails.
        """
        if size is not None:
            if too_large := self._too_large(url, size):
                raise too_large
            need = self.allocated(size)
            if self.max_size is None and self._is_ample(Volume.of(self.node.base), need):
                yield
                return
        with self._threads, self._budget_lock():
            self._reserve(url, size)
            yield
            if size is None:
                self.recount()

    def refuses(self, url: str, size: int) -> CacheFullError | None:
        """Why there is no room for a shard: it is too large, or that was found lately."""
        usage = self._read()
        missing = 0 if usage is None else usage.missing(self.allocated(size))
        return self._too_large(url, size) or (self._no_room(url, missing) if missing else None)

    def _no_room(self, url: str, missing: int = 0) -> CacheFullError:
        more = format_bytes(missing) if missing else "some"
        return CacheFullError(
            f"no room for {url} in {self._config.dir}: {more} more would have to go, and the rest "
            "is in use or was used since the running jobs began. Raise max_size, free the disk, "
            "or let the shard be streamed.",
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
        """Free room for ``size`` bytes, and three entries more, when the disk was full.

        What it lacks may be inodes, of which a fetch takes more than one entry has.
        """
        with self._budget_lock():
            self.recount()
            needed = self.allocated(size) - self._sweep()
            found = self._entries()
            spare = 3 * total_bytes(found, self.allocated) // max(1, len(found))
            chosen = self.plan(Limits(free_needed=max(0, needed), spare=spare), found=found)
            if chosen.missing:
                raise self._no_room(url, chosen.missing)
            self.evict(chosen)

    def relieve(self) -> int:
        """Give memory back that the job has come to need; bytes.

        Whatever the policy says: an entry can be fetched again, a job that the kernel killed has
        ended. Entries that are read or pinned stay.
        """
        with self._budget_lock():
            chosen = self.plan(Limits(free_needed=self.limits().free_needed), jobs=False)
            self.recount()
            return sum(removal.size for removal in self.evict(chosen))

    def _reserve(self, url: str, size: int | None) -> None:
        """Add a shard to the number, once there is room for it; under the lock."""
        need = 0 if size is None else self.allocated(size)
        usage = None if size is None else self._read()
        found: list[Entry] | None = None
        swept = False
        for _ in range(_PLANS):
            limits = self.limits(need)
            if limits == Limits():
                return  # no limit applies, so the number is not needed
            if usage is None:
                usage, found = self._count()
            elif missing := usage.missing(need):
                raise self._no_room(url, missing)
            over = 0 if limits.max_size is None else usage.held + need - limits.max_size
            if max(over, limits.free_needed) <= 0:
                self._write(replace(usage, held=usage.held + need))
                return
            if not swept:  # what dead processes left goes first
                swept = True
                if self._sweep():
                    found = None
            if found is None:
                usage = None  # what is evicted or refused is counted first
                continue
            held = total_bytes(found, self.allocated)
            spare = held // _EACH if len(found) >= _EACH else 0
            chosen = self.plan(
                replace(limits, spare=spare), reserved=usage.held - held + need, found=found
            )
            if chosen.missing:
                # Under other policies only readers keep entries, and may end at any moment.
                if self._config.policy == "working-set":
                    self._write(replace(usage, most=usage.held + need - chosen.missing))
                raise self._no_room(url, chosen.missing)
            if len(self.evict(chosen)) == len(chosen.removed) and len(self.stores()) == 1:
                self._write(replace(usage, held=usage.held - chosen.freed + need))
                return
            usage = None  # some came into use meanwhile, or another rank has linked them
        raise self._no_room(url)

    # -- the number ----------------------------------------------------------------

    def recount(self) -> None:
        """Have the next admission count what the cache holds."""
        with contextlib.suppress(OSError):
            self.node.usage.unlink()

    def flights(self) -> list[InFlight]:
        """The fetches in flight of all namespaces; their sizes are bytes on disk."""
        flights = (flight for store in self.stores() for flight in in_flight(store.layout))
        return [
            replace(
                flight,
                occupied=self.allocated(flight.occupied),
                size=None if flight.size is None else self.allocated(flight.size),
            )
            for flight in flights
        ]

    def _entries(self) -> list[Entry]:
        return [entry for store in self.stores() for entry in store.entries()]

    def _count(self) -> tuple[_Usage, list[Entry]]:
        """Count anew. Fetches first: what is published meanwhile is an entry, and counts as one.

        Another fetch of a version that is published counts beside it: once that is evicted, it
        will be an entry itself.
        """
        counted = clock.monotonic()
        flights = self.flights()
        if not all(flight.is_measured for flight in flights):
            counted = -math.inf  # the final size of one is unknown: the next admission counts again
        found = self._entries()
        published = {(entry.key, entry.version) for entry in found}
        fetched = [
            each
            for each in flights
            if (each.key, each.version) not in published or is_directory(each.path)
        ]
        held = total_bytes(found, self.allocated) + sum(flight.reserved for flight in fetched)
        return _Usage(held, counted), found

    def _read(self) -> _Usage | None:
        """The number; None if it is missing or too old."""
        if self.node.grace is not None:
            return None
        try:
            boot, held, counted, most = json.loads(read_file(self.node.usage, _MAX_USAGE))
            if boot == boot_id() and 0 <= clock.monotonic() - counted < _BELIEVED:
                return _Usage(int(held), counted, None if most is None else int(most))
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as exn:
            logger.debug("%s: %s", self.node.usage, exn)
        return None

    def _write(self, usage: _Usage) -> None:
        path, layout = self.node.usage, self.node
        if layout.grace is not None:
            return
        record = json.dumps([boot_id(), usage.held, usage.counted, usage.most]).encode()
        try:
            replace_file(path, record, layout.modes.file, via=layout.partial)
        except OSError as exn:  # full, read-only
            logger.debug("%s: %s", path, exn)
            self.recount()

    # -- limits and plans ----------------------------------------------------------

    def limits(self, newcomer: int | None = None) -> Limits:
        """The configured limits as they stand on this filesystem now.

        Args:
            newcomer: bytes on disk of a shard to admit beside the fetches in flight; None if there
                is none. Then entries that are too old may go.
        """
        volume = Volume.of(self.node.base)
        free = self._config.min_free.of(volume.size)
        if newcomer is not None:
            free += newcomer
            if not self._is_ample(volume, newcomer) and volume.free < free + self._announced():
                free += sum(flight.reserved - flight.occupied for flight in self.flights())
        return Limits(
            max_size=volume.budget(self._config),
            free_needed=max(0, free - volume.free),
            max_age=self._config.max_age if newcomer is None else None,
        )

    def _announced(self) -> float:
        """Bytes on disk that fetches in flight will have, by their names: no file is opened."""
        names = (name for store in self.stores() for name in list_names(store.layout.partial))
        sizes = [parsed[2] for name in names if (parsed := parse_partial_name(name))]
        return sum(math.inf if size is None else self.allocated(size) for size in sizes)

    def _is_ample(self, volume: Volume, need: int) -> bool:
        """Whether a shard fits whatever others reserve: asking under the lock costs more."""
        spare = volume.free - self._config.min_free.of(volume.size) - volume.size // 8
        return spare >= _AMPLE * need or spare >= _AT_ONCE * need + self._announced()

    @property
    def is_pressed(self) -> bool | None:
        """Whether less memory is free than should be; None where it is no RAM disk."""
        return self.limits().free_needed > 0 if is_memory(self.node.base) else None

    def plan(
        self,
        limits: Limits,
        *,
        reserved: int = 0,
        jobs: bool = True,
        found: Iterable[Entry] | None = None,
    ) -> CleanReport:
        """What would have to go; see `eviction.plan`.

        Args:
            limits: what must hold afterwards.
            reserved: bytes on disk of fetches in flight.
            jobs: whether what running jobs use stays.
            found: the entries, where they were listed already.
        """
        policy = Policy.of(self._config, self.node, clock.time(), jobs=jobs)
        entries = self._entries() if found is None else found
        in_use = self.stores()[0].in_use
        return plan(
            entries, limits, policy, reserved=reserved, in_use=in_use, allocated=self.allocated
        )

    def _sweep(self) -> int:
        """Remove what dead processes left; returns bytes freed."""
        removals = [one for store in self.stores() for one in sweep(store, self.allocated)]
        for removal in removals:
            logger.info("removed %s, %d bytes", removal.name, removal.size)
        return sum(removal.size for removal in removals)

    def evict(self, chosen: CleanReport) -> list[Removal]:
        """Carry a plan out; what somebody has begun to read meanwhile stays.

        Returns:
            What went with its last link.
        """
        store, gone = self.stores()[0], []
        for removal in chosen.removed:
            if all(store.evict(entry) for entry in removal.entries):
                entry, reason = removal.entries[0], removal.reason.value
                key, size = entry.key, entry.size
                extra = {"event": "evicted", "key": key, "bytes": size, "reason": reason}
                logger.info("evicted %s, %d bytes (%s)", key, size, reason, extra=extra)
                self._evicted(removal)
                gone.append(removal)
        return gone

    # -- locks ---------------------------------------------------------------------

    @contextlib.contextmanager
    def _budget_lock(self) -> Iterator[None]:
        """Hold the node's budget lock, or go on without it after a minute, with a warning."""
        with self._hold("budget", _BUDGET_SECONDS) as other:
            if other is not None:
                logger.warning("%s holds the budget lock for long; going on without it", other)
            yield

    @contextlib.contextmanager
    def sole_cleaner(self, *, wait: bool) -> Iterator[None]:
        """Hold the lock of those who clean the root, or raise `LockTimeoutError`.

        With ``wait``, after ``lock_timeout`` at most.
        """
        with self._hold("clean", self._config.lock_timeout if wait else 0.0) as other:
            if other is not None:
                root = self.node.base.parent
                raise LockTimeoutError(
                    f"{root} is being cleaned by {other}; nothing was removed. Try again when "
                    "that has ended.",
                    dir=root,
                )
            yield

    @contextlib.contextmanager
    def _hold(self, name: str, seconds: float) -> Iterator[str | None]:
        """Hold a lock of the node; yields who has it instead after so many seconds."""
        lock = KeyLock(self.node.named_lock(name), self.node.modes)
        holder = Holder.this_process(rank=None, job=None, now=clock.time())
        start = announced = clock.monotonic()
        try:
            while not (held := lock.try_acquire(holder)):
                now, other = clock.monotonic(), read_holder(lock.path) or "somebody"
                if now - start >= seconds:
                    break
                if now - announced >= _ANNOUNCE_EVERY:
                    announced = now
                    logger.warning("waiting for %s, which has the %s lock", other, name)
                clock.sleep(_POLL)
            yield None if held else str(other)
        finally:
            lock.release()
