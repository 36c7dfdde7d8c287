"""Reserve room for a shard before its first byte is written.

The node keeps one number, ``usage``: the bytes on disk of all entries, and of all shards in flight
at their final sizes. It is only written under the budget lock. Entries and partials are counted
again when the number is a minute old, and before a shard is evicted or refused. A refusal is
remembered for a minute, or until a process cleans the cache or a job ends. If locks fail, each
process may exceed the budget by the shards that others admit at the same moment. Nodes that share
a directory do not share the number, so they count entries and partials for every new shard.
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
from shardcache.space.memory import Volume, allocation
from shardcache.store.entry import Entry, Store
from shardcache.store.partial import InFlight, in_flight
from shardcache.threads import lazy
from shardcache.units import format_bytes

logger = logging.getLogger(__name__)

#: Seconds until ``usage`` is counted again, because failed downloads and removals by hand leave it
#: too high.
_BELIEVED = 60.0
#: Attempts to plan an eviction and carry it out. An attempt fails if a process begins to read one
#: of the shards in between.
_PLANS = 6
#: Shards that the processes of a node may admit at the same moment, before they see each other's
#: partials: 8 ranks with 8 workers each.
_AT_ONCE = 64
#: With this many entries or more, an eviction removes an extra 1 % of the bytes in the cache, so
#: that a full cache is listed only once per hundred new shards.
_EACH = 100
#: Seconds to wait for the budget lock. Its holder counts and evicts. A holder that takes longer was
#: probably stopped, so the shard is then admitted without the lock.
_BUDGET_SECONDS = 60.0
_POLL = 0.01
_ANNOUNCE_EVERY = 10.0
_MAX_USAGE = 4096  #: maximum bytes to read of the file ``usage``, which has about 100


@dataclass(frozen=True, slots=True)
class _Usage:
    """The content of the file ``usage``."""

    held: int  #: bytes on disk of entries and shards in flight
    counted: float  #: when they were counted, on the monotonic clock that a node's processes share
    most: int | None = None  #: the largest `held` that the last refusal allows; None without one

    def missing(self, need: int) -> int:
        """Return how many of ``need`` bytes do not fit according to the last refusal, if any."""
        return 0 if self.most is None else max(0, self.held + need - self.most)


class Space:
    """The budget of one root directory.

    Args:
        node: the node's namespace, which has the budget lock, ``usage`` and the sessions.
        stores: returns all namespaces of the root.
        config: the limits.
        evicted: called with the `Removal` of every evicted shard.
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
        # Lets only one thread of this process at a time poll the budget lock.
        self._threads = threading.Lock()

    @lazy
    def max_size(self) -> int | None:
        """The maximum bytes that the cache may hold, or None if only free space limits it."""
        return Volume.of(self.node.base).budget(self._config)

    @lazy
    def allocated(self) -> Callable[[int], int]:
        """The function that computes the bytes on disk of a shard from its size."""
        return allocation(self.node.base)

    @contextlib.contextmanager
    def reserved(self, url: str, size: int | None) -> Iterator[None]:
        """Reserve room for a shard, evicting others if necessary. The body must create the partial.

        Args:
            url: the URL of the shard.
            size: size of the shard in bytes; None if it is unknown, or if the partial exists.

        Raises:
            CacheFullError: there is too little room, and too few shards may be evicted.
        """
        if size is not None and (too_large := self._too_large(url, size)):
            raise too_large
        if size is not None and self.max_size is None:
            # If all shards that may be admitted at this moment fit, no budget lock is needed.
            volume = Volume.of(self.node.base)
            spare = volume.free - self._config.min_free.of(volume.size) - self._announced()
            if spare >= _AT_ONCE * self.allocated(size):
                yield
                return
        with self._threads, self._budget_lock():
            self._reserve(url, size)
            yield
            if size is None:
                self.recount()

    def refuses(self, url: str, size: int) -> CacheFullError | None:
        """Return the error if a shard is too large or was refused recently, otherwise None."""
        usage = self._read()
        missing = 0 if usage is None else usage.missing(self.allocated(size))
        return self._too_large(url, size) or (self._no_room(url, missing) if missing else None)

    def _no_room(self, url: str, missing: int = 0) -> CacheFullError:
        more = f"{format_bytes(missing)} more" if missing else "more"
        return CacheFullError(
            f"no room for {url} in {self._config.dir}: it needs {more}, and the cached shards are "
            "in use or were used since the running jobs began. Raise max_size, free the disk, or "
            "let the shard be streamed.",
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
        """Evict entries for a shard of ``size`` bytes after the disk was full.

        Three additional entries are evicted, because the disk may lack inodes, and a download needs
        more inodes than one entry frees. Raises `CacheFullError` if too few entries may be evicted.
        """
        with self._budget_lock():
            self.recount()
            needed = self.allocated(size) - self._sweep()
            entries = self._entries()
            spare = 3 * total_bytes(entries, self.allocated) // max(1, len(entries))
            planned = self.plan(Limits(free_needed=max(0, needed), spare=spare), entries=entries)
            if planned.missing:
                raise self._no_room(url, planned.missing)
            self.evict(planned)

    def relieve(self) -> int:
        """Evict from a RAM disk until ``min_free`` is free for the job; return the bytes freed.

        Shards of running jobs are evicted, too: the kernel kills a job that runs out of memory.
        """
        with self._budget_lock():
            planned = self.plan(Limits(free_needed=self.limits().free_needed), jobs=False)
            self.recount()
            return sum(removal.size for removal in self.evict(planned))

    def _reserve(self, url: str, size: int | None) -> None:
        """Add a shard to ``usage``, evicting first if necessary. Call it with the budget lock."""
        need = 0 if size is None else self.allocated(size)
        usage = None if size is None else self._read()
        entries: list[Entry] | None = None
        for attempt in range(_PLANS):
            limits = self.limits(need)
            if limits == Limits():
                return  # no limit applies, so ``usage`` is not needed
            if usage is None:
                usage, entries = self._count()
            elif missing := usage.missing(need):
                raise self._no_room(url, missing)
            over = 0 if limits.max_size is None else usage.held + need - limits.max_size
            if max(over, limits.free_needed) <= 0:
                self._write(replace(usage, held=usage.held + need))
                return
            if attempt == 0 and self._sweep():  # remove partials of dead processes before entries
                entries = None
            if entries is None:
                usage = None  # count again before evicting or refusing
                continue
            held = total_bytes(entries, self.allocated)
            spare = held // _EACH if len(entries) >= _EACH else 0
            planned = self.plan(
                replace(limits, spare=spare), reserved=usage.held - held + need, entries=entries
            )
            if planned.missing:
                # Under the other policies, entries stay because of readers, which may finish at any
                # moment, so only a refusal under working-set is remembered.
                if self._config.policy == "working-set":
                    self._write(replace(usage, most=usage.held + need - planned.missing))
                raise self._no_room(url, planned.missing)
            if len(self.evict(planned)) == len(planned.removed) and len(self.stores()) == 1:
                self._write(replace(usage, held=usage.held - planned.freed + need))
                return
            usage = None  # count again: a process now reads a planned shard, or a rank linked it
        raise self._no_room(url)

    def recount(self) -> None:
        """Remove the file ``usage``, so that the next admission counts entries and partials."""
        with contextlib.suppress(OSError):
            self.node.usage.unlink()

    def flights(self) -> list[InFlight]:
        """Return the shards in flight in all namespaces, with their sizes as bytes on disk."""
        found = []
        for flight in (each for store in self.stores() for each in in_flight(store.layout)):
            size = None if flight.size is None else self.allocated(flight.size)
            found.append(replace(flight, occupied=self.allocated(flight.occupied), size=size))
        return found

    def _entries(self) -> list[Entry]:
        return [entry for store in self.stores() for entry in store.entries()]

    def _count(self) -> tuple[_Usage, list[Entry]]:
        """Return a new count of entries and partials, and the list of entries."""
        counted, flights = clock.monotonic(), self.flights()
        if any(flight.live and flight.key and flight.size is None for flight in flights):
            counted = -math.inf  # a final size is unknown, so the next admission must count again
        entries = self._entries()
        published = {(entry.key, entry.version) for entry in entries}
        # A partial that was published after it was listed counts only as an entry. A partial that
        # still exists next to an entry of the same version may replace the entry, so both count.
        reserved = sum(
            flight.reserved
            for flight in flights
            if (flight.key, flight.version) not in published or is_directory(flight.path)
        )
        return _Usage(total_bytes(entries, self.allocated) + reserved, counted), entries

    def _read(self) -> _Usage | None:
        """Return the content of ``usage``. With leases, or if it is missing or old, return None."""
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
        layout = self.node
        if layout.grace is not None:
            return
        record = json.dumps([boot_id(), usage.held, usage.counted, usage.most]).encode()
        try:
            replace_file(layout.usage, record, layout.modes.file, via=layout.partial)
        except OSError as exn:  # the disk is full or read-only
            logger.debug("%s: %s", layout.usage, exn)
            self.recount()

    def limits(self, newcomer: int | None = None) -> Limits:
        """Return the configured limits in bytes, for the current state of the filesystem.

        Args:
            newcomer: bytes on disk of the shard to admit; None for a cleaning, to which ``max_age``
                applies as well.
        """
        volume = Volume.of(self.node.base)
        free = self._config.min_free.of(volume.size)
        if newcomer is not None:
            free += newcomer
            if volume.free < free + self._announced():
                free += sum(flight.reserved - flight.occupied for flight in self.flights())
        return Limits(
            max_size=volume.budget(self._config),
            free_needed=max(0, free - volume.free),
            max_age=self._config.max_age if newcomer is None else None,
        )

    def _announced(self) -> float:
        """Return the final bytes on disk that the names of partials state; infinity if unknown."""
        names = (name for store in self.stores() for name in list_names(store.layout.partial))
        sizes = [parsed[2] for name in names if (parsed := parse_partial_name(name))]
        return sum(math.inf if size is None else self.allocated(size) for size in sizes)

    def plan(
        self,
        limits: Limits,
        *,
        reserved: int = 0,
        jobs: bool = True,
        entries: Iterable[Entry] | None = None,
    ) -> CleanReport:
        """Plan an eviction with `eviction.plan`.

        Without ``jobs``, shards that running jobs used may be evicted. ``entries`` are all entries,
        if the caller has already listed them.
        """
        return plan(
            self._entries() if entries is None else entries,
            limits,
            Policy.of(self._config, self.node, clock.time(), jobs=jobs),
            reserved=reserved,
            in_use=self.stores()[0].in_use,
            allocated=self.allocated,
        )

    def _sweep(self) -> int:
        """Remove partials of dead processes and half-removed entries; return the bytes freed."""
        removals = [one for store in self.stores() for one in sweep(store, self.allocated)]
        for removal in removals:
            logger.info("removed %s, %d bytes", removal.name, removal.size)
        return sum(removal.size for removal in removals)

    def evict(self, planned: CleanReport) -> list[Removal]:
        """Evict the shards of a plan that no process reads now; return those that were evicted."""
        store, gone = self.stores()[0], []
        for removal in planned.removed:
            if all(store.evict(entry) for entry in removal.entries):
                key, size, reason = removal.entries[0].key, removal.entries[0].size, removal.reason
                extra = {"event": "evicted", "key": key, "bytes": size, "reason": reason.value}
                logger.info("evicted %s, %d bytes (%s)", key, size, reason, extra=extra)
                self._evicted(removal)
                gone.append(removal)
        return gone

    @contextlib.contextmanager
    def _budget_lock(self) -> Iterator[None]:
        """Hold the node's budget lock in the body; after a minute, warn and continue without it."""
        with self._hold("budget", _BUDGET_SECONDS) as other:
            if other is not None:
                text = "%s has had the budget lock for a minute; going on without it"
                logger.warning(text, other)
            yield

    @contextlib.contextmanager
    def sole_cleaner(self, *, wait: bool) -> Iterator[None]:
        """Hold the cleaning lock in the body. With ``wait``, wait up to ``lock_timeout`` for it.

        Raises:
            LockTimeoutError: another process is cleaning.
        """
        with self._hold("clean", self._config.lock_timeout if wait else 0.0) as other:
            if other is not None:
                root = self.node.base.parent
                text = f"{other} is cleaning {root}, so nothing was removed. Try again later."
                raise LockTimeoutError(text, dir=root)
            yield

    @contextlib.contextmanager
    def _hold(self, name: str, seconds: float) -> Iterator[str | None]:
        """Hold a lock of the node in the body.

        Yields None, or the lock's holder as text if the lock was not free within ``seconds``.
        """
        lock = KeyLock(self.node.named_lock(name), self.node.modes)
        holder = Holder.this_process(rank=None, job=None, now=clock.time())
        start = announced = clock.monotonic()
        try:
            while not (held := lock.try_acquire(holder)):
                now, other = clock.monotonic(), read_holder(lock.path) or "another process"
                if now - start >= seconds:
                    break
                if now - announced >= _ANNOUNCE_EVERY:
                    announced = now
                    logger.warning("waiting for %s, which has the %s lock", other, name)
                clock.sleep(_POLL)
            yield None if held else str(other)
        finally:
            lock.release()
