"""From a URL to an open entry: at most one fetch per node, whoever asks.

    open the entry ----------------------------------------> hit
      | not there
    try the key's lock --- busy --> wait, open again -------> coalesced
      | ours                          | holder is stale
    open again, set damaged aside     | fetch privately ----> fetched
    link a sibling namespace's entry -----------------------> linked
    resume what a dead process left, or start ---> publish -> fetched

A `Coordinator` belongs to one process and may be used by all its threads. Locks
only save bandwidth: every step is right without them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from shardcache.breaker import FULL
from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import ShardCacheError
from shardcache.fetch.intake import Intake, Place, Right
from shardcache.fetch.transfer import Fetcher, FetchStatus
from shardcache.fetch.waiting import Waiter
from shardcache.layout import Layout, is_directory
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.lease import KeyLease
from shardcache.locks.sessions import WaitNote
from shardcache.origins.resolve import Origins
from shardcache.ranks import Ranks
from shardcache.store.entry import DamagedError, Metadata, read_sidecar
from shardcache.store.partial import LostError
from shardcache.store.store import Opened, Store, Stores
from shardcache.urls import ShardURL

__all__ = ["Coordinator", "Obtained", "Outcome"]

logger = logging.getLogger(__name__)

#: Private fetches past a stale holder, per node: enough to go on with, too few
#: to turn one stuck process into a download storm.
_PRIVATE_FETCHES = 2
#: Fetches ahead, per node: as many as keep a fast link busy with eight connections each,
#: few beside what the workers of a node wait for.
_AHEAD_FETCHES = 16
#: An entry may vanish between publish and open, a partial may be taken away by
#: locks that lie; not this often in a row.
_TRIES = 5

_AnyLock = KeyLock | KeyLease


class Outcome(StrEnum):
    """How a shard was had."""

    HIT = "hit"
    COALESCED = "coalesced"
    LINKED = "linked"
    FETCHED = "fetched"


@dataclass(frozen=True, slots=True)
class Obtained:
    """An open entry; the caller must close ``opened``."""

    opened: Opened
    outcome: Outcome


class Coordinator:
    """See the module.

    Args:
        places: this process's namespaces, one per tier; locks are in the last.
        siblings: lists the other namespaces.
        fetcher: the engine.
        origins: where shards come from.
        config: time-outs and checks.
        ranks: who we are, for the lock records.
        clock: time.
        on_fault: is told of entries that the disk could not read.
        warn: says something of a kind once (`process.Process.warn`).
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        siblings: Callable[[], Sequence[Store]],
        fetcher: Fetcher,
        origins: Origins,
        config: Config,
        ranks: Ranks,
        clock: Clock,
        on_fault: Callable[[OSError], None],
        warn: Callable[..., None],
    ) -> None:
        stores = [place.store for place in places]
        self.store = stores[0] if len(stores) == 1 else Stores(stores)
        self._places = list(places)
        self._on_fault = on_fault
        self._warn = warn
        self._siblings = siblings
        self._fetcher = fetcher
        self._intake = Intake(places, fetcher=fetcher, origins=origins, config=config, clock=clock)
        self._space = places[-1].space
        self._config = config
        self._ranks = ranks
        self._clock = clock

    def obtain(self, url: ShardURL, status: FetchStatus | None = None) -> Obtained:
        """Open the shard's entry, fetching it first if need be.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError,
            IntegrityError: the origin cannot serve it.
            CacheFullError: it cannot be stored.
            LockTimeoutError: somebody else has been fetching it for too long.
            OSError: the local disk failed.
        """
        opened = self.look(url, status.outdated if status else ())
        if opened is not None:
            return Obtained(opened, Outcome.HIT)
        obtained = self.get(url, status)
        assert obtained is not None  # it waits for others
        return obtained

    def get(
        self,
        url: ShardURL,
        status: FetchStatus | None = None,
        patient: Callable[[], bool] = lambda: True,
    ) -> Obtained | None:
        """As `obtain`, where a look found nothing.

        Args:
            url: the shard.
            status: is kept up to date.
            patient: whether to wait where somebody else fetches the shard; asked before
                each wait. If not, the answer is None.
        """
        status = status or FetchStatus()
        try:
            return self._get(url, status, patient)
        except ShardCacheError:
            raise
        except OSError as exn:
            if exn.errno not in FULL:
                raise
            # At whichever step: the partial is gone by now, and so is the lock.
            logger.info("%s: the disk is full (%s); making room", url, exn)
            self._space.make_room(str(url), status.size or 0)
            return self._get(url, status, patient)

    def _get(
        self, url: ShardURL, status: FetchStatus, patient: Callable[[], bool]
    ) -> Obtained | None:
        holder = self._holder()
        note = WaitNote(self.store.layout)
        try:
            return self._wait_or_fill(url, status, patient, holder, note)
        finally:
            note.close()

    def _wait_or_fill(
        self,
        url: ShardURL,
        status: FetchStatus,
        patient: Callable[[], bool],
        holder: Holder,
        note: WaitNote,
    ) -> Obtained | None:
        waiter = self._waiter(url, status, note, holder)
        lock = self._lock(url.key, self.store.layout)
        while True:
            if lock.try_acquire(holder):
                note.close()
                try:
                    return self._fill(url, lock, holder, status)
                finally:
                    try:
                        lock.release()
                    finally:  # Ctrl-C may have struck the first, and nobody else has the lock
                        lock.release()
            if not patient():
                return None
            if waiter.stale:
                with self._slot("private", _PRIVATE_FETCHES, holder) as free:
                    if free:
                        note.close()
                        logger.warning("%s: %s; fetching it here too", url, waiter.describe())
                        return self._fill(url, None, holder, status)
            waiter.pause()
            opened = self.look(url, status.outdated)
            if opened is not None:
                return Obtained(opened, Outcome.COALESCED)

    def look(self, url: ShardURL, outdated: Collection[str] = ()) -> Opened | None:
        """Open the shard's entry if there is a good one, of another than these versions."""
        try:
            return self.store.open(url.key, url.basename, outdated)
        except DamagedError as exn:
            logger.info("%s: not used: %s", url, exn)
            if isinstance(exn.__cause__, OSError):
                self._on_fault(exn.__cause__)
            return None

    @contextlib.contextmanager
    def sole(self, store: Store, key: str) -> Iterator[bool]:
        """Hold the lock of a shard in one of the root's namespaces; False if it is taken.

        Raises:
            OSError: the disk fails.
        """
        lock = self._lock(key, store.layout)
        held = lock.try_acquire(self._holder())
        try:
            yield held
        finally:
            if held:
                lock.release()

    def _lock(self, key: str, layout: Layout) -> _AnyLock:
        if self._config.locks == "lease":
            record = layout.lease_record(key)
            lease = layout.lease(key)
            return KeyLease(lease, record, modes=layout.modes, via=layout.partial)
        return KeyLock(layout.key_lock(key), layout.modes)

    def _waiter(self, url: ShardURL, status: FetchStatus, note: WaitNote, holder: Holder) -> Waiter:
        layout = self.store.layout
        leased = self._config.locks == "lease"
        return Waiter(
            [place.store.layout.partial for place in self._places],
            url,
            self._clock,
            watch=self._fetcher.cancellation.watch(
                str(url), self._clock, lambda: status.called_off
            ),
            record=layout.lease_record(url.key) if leased else layout.key_lock(url.key),
            timeout=self._config.lock_timeout,
            stale_after=self._config.stale_after,
            found=status.grows_in,
            note=note,
            waiter=holder,
        )

    def _holder(self) -> Holder:
        ranks = self._ranks
        rank = None if ranks.source == "none" else ranks.rank
        return Holder.this_process(rank=rank, job=ranks.job, now=self._clock.time())

    def ahead_slot(self) -> AbstractContextManager[bool]:
        """One of the node's few places for what nobody waits for; False if all are taken."""
        return self._slot("ahead", _AHEAD_FETCHES, self._holder())

    @contextlib.contextmanager
    def _slot(self, name: str, count: int, holder: Holder) -> Iterator[bool]:
        for number in range(count):
            layout = self.store.layout
            lock = KeyLock(layout.named_lock(f"{name}-{number}"), layout.modes)
            if lock.try_acquire(holder):
                try:
                    yield True
                finally:
                    lock.release()
                return
        yield False

    def _fill(
        self, url: ShardURL, lock: _AnyLock | None, holder: Holder, status: FetchStatus
    ) -> Obtained:
        """Make the entry and open it; ``lock`` is the key's, or None for a private fetch."""
        for _ in range(_TRIES):
            opened = self._look_again(url, lock, status.outdated)
            if opened is not None:
                return Obtained(opened, Outcome.COALESCED)
            linked = self._link(url, status.outdated)
            if linked is not None:
                return Obtained(linked, Outcome.LINKED)
            try:
                entry = self._intake.fetch(url, Right(lock, holder), status)
            except LostError as exn:
                self._warn("lost", "%s: %s; starting over", url, exn)
                continue
            if status.outdated:
                self._drop(url, status.outdated)
            opened = self.look(url)
            if opened is not None:
                return Obtained(opened, Outcome.FETCHED)
            if is_directory(entry):  # another fetch would end there, too
                raise OSError(errno.EIO, "what was just stored cannot be read", str(entry))
        # The origin is well: a fault of the cache, so that the shard can still be streamed.
        raise OSError(
            errno.EBUSY,
            f"what was fetched vanished, {_TRIES} times in a row. Locks do not work there, or "
            "something else empties it; stop that, or use another directory",
            str(self.store.layout.base),
        )

    def _drop(self, url: ShardURL, outdated: Collection[str]) -> None:
        """Evict replaced versions that nobody reads; what stays is evicted before others."""
        for place in self._places:
            for entry in place.store.entries_of(url.key):
                if entry.version in outdated and place.store.evict(entry):
                    place.space.something_went()

    def _look_again(
        self, url: ShardURL, lock: _AnyLock | None, outdated: Collection[str]
    ) -> Opened | None:
        try:
            return self.store.open(url.key, url.basename, outdated)
        except DamagedError as exn:
            if lock is not None and self.store.quarantine(url.key, f"{url}: {exn}"):
                self._warn("damaged", "%s was damaged and is fetched again: %s", url, exn)
            return None

    def _link(self, url: ShardURL, outdated: Collection[str]) -> Opened | None:
        """Share a sibling namespace's copy, by hard link or else as it is."""
        for sibling in self._siblings():
            try:
                other = sibling.open(url.key, url.basename, outdated)
            except DamagedError:
                continue  # its own namespace will set it aside
            if other is None:
                continue
            try:
                metadata = Metadata.decode(read_sidecar(other.directory))
                linked = self.store.link(other, metadata, url.basename)
                opened = self.look(url, outdated) if linked else None
            except (DamagedError, FileNotFoundError):
                other.close()
                continue
            except OSError as exn:  # full or read-only: theirs is as good to read
                logger.info("%s: not linked, but read where it is: %s", url, exn)
                return other
            except BaseException:
                other.close()
                raise
            if opened is None:
                return other
            other.close()
            return opened
        return None
