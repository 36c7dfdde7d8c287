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
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from shardcache import clock
from shardcache.clock import boot_id
from shardcache.config import Config, __version__
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
)
from shardcache.fetch.job import Fetched
from shardcache.fetch.status import FetchStatus
from shardcache.fetch.transfer import Fetcher
from shardcache.fetch.waiting import Waiter
from shardcache.files import FULL
from shardcache.layout import Layout, is_directory, parse_partial_name
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.lease import KeyLease
from shardcache.locks.sessions import WaitNote
from shardcache.origins.base import ObjectInfo, Origin
from shardcache.origins.resolve import Origins
from shardcache.ranks import Ranks
from shardcache.space.budget import Space
from shardcache.space.tiers import Tier
from shardcache.store.digest import BLOCK, check_archive
from shardcache.store.entry import DamagedError, Metadata
from shardcache.store.partial import LostError, Partial
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
#: Bytes of a shard whose size nobody knows yet. Where there is no room for so many it may have to
#: be streamed, which is to cost one request.
_USUAL = 64 << 20
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
        tiers: fastest first; locks are in the last one.
        fetcher, origins, config, ranks: what fetches, where from, with which limits, for whom.
        on_fault: is told of entries that the disk could not read.
        warn: says something of a kind once (`Process.warn`).
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        fetcher: Fetcher,
        origins: Origins,
        config: Config,
        ranks: Ranks,
        on_fault: Callable[[OSError], None],
        warn: Callable[..., None],
    ) -> None:
        stores = [tier.store for tier in tiers]
        self.store = stores[0] if len(stores) == 1 else Stores(stores)
        # As they are now: a tier that is made anew gets another coordinator.
        self._places = [(tier.store, tier.space()) for tier in tiers]
        self._tiers = tiers
        self._fetcher = fetcher
        self._origins = origins
        self._config = config
        self._ranks = ranks
        self._on_fault = on_fault
        self._warn = warn

    def get(
        self,
        url: ShardURL,
        status: FetchStatus,
        patient: Callable[[], bool] = lambda: True,
    ) -> Obtained | None:
        """Wait for the shard's entry, link it, or fetch it, where a look found none.

        Args:
            url: the shard.
            status: is kept up to date.
            patient: whether to wait where somebody else fetches the shard; asked before
                each wait. If not, the answer is None.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError,
            IntegrityError: the origin cannot serve it.
            CacheFullError: it cannot be stored.
            LockTimeoutError: somebody else has been fetching it for too long.
            OSError: the local disk failed.
        """
        with self._fetcher.cancellable(status):
            try:
                return self._get(url, status, patient, self._places)
            except ShardCacheError:
                raise
            except OSError as exn:
                if exn.errno not in FULL:
                    raise
                # At whichever step: the partial is gone by now, and so is the lock.
                logger.info("%s: the disk is full (%s); making room", url, exn)
                status.drop_answer()
                if len(self._places) == 1:  # otherwise the next tier may have room
                    self._places[0][1].make_room(str(url), status.size or 0)
                return self._get(url, status, patient, self._places[-1:])

    def _get(
        self,
        url: ShardURL,
        status: FetchStatus,
        patient: Callable[[], bool],
        places: Sequence[tuple[Store, Space]],
    ) -> Obtained | None:
        holder = self._holder()
        lock = self._lock(url.key, self.store.layout)
        with contextlib.closing(WaitNote(self.store.layout)) as note:
            waiter = None
            while True:
                if lock.try_acquire(holder):
                    note.close()
                    try:
                        return self._fill(url, lock, holder, status, places)
                    finally:
                        lock.release()
                if not patient():
                    return None
                waiter = waiter or self._waiter(url, status, note, holder)
                if waiter.stale:
                    with self._slot("private", _PRIVATE_FETCHES, holder) as free:
                        if free:
                            note.close()
                            logger.warning("%s: %s; fetching it here too", url, waiter.describe())
                            return self._fill(url, None, holder, status, places)
                waiter.pause()
                opened = self.lookup(url, status.outdated)
                if opened is not None:
                    return Obtained(opened, Outcome.COALESCED)

    def lookup(
        self, url: ShardURL, outdated: Collection[str] = (), *, condemn: bool = False
    ) -> Opened | None:
        """Open the shard's entry if there is a good one, of another than these versions.

        With ``condemn`` a bad one is set aside; who does so has the lock of the key.
        """
        try:
            return self.store.open(url.key, url.basename, outdated)
        except DamagedError as exn:
            logger.info("%s: not used: %s", url, exn)
            if isinstance(exn.__cause__, OSError):
                self._on_fault(exn.__cause__)
            if condemn and self.store.condemn(Path(exn.directory), f"{url}: {exn}"):
                self._warn("damaged", "%s was damaged and is fetched again: %s", url, exn)
            return None

    # -- locks -------------------------------------------------------------------

    @contextlib.contextmanager
    def sole(self, store: Store, key: str) -> Iterator[bool]:
        """Hold the lock of a shard in one of the root's namespaces; False if it is taken.

        Raises:
            OSError: the disk fails.
        """
        with self._held(self._lock(key, store.layout), self._holder()) as held:
            yield held

    def ahead_slot(self) -> AbstractContextManager[bool]:
        """One of the node's few places for what nobody waits for; False if all are taken."""
        return self._slot("ahead", _AHEAD_FETCHES, self._holder())

    @contextlib.contextmanager
    def _slot(self, name: str, count: int, holder: Holder) -> Iterator[bool]:
        layout = self.store.layout
        for number in range(count):
            lock = KeyLock(layout.named_lock(f"{name}-{number}"), layout.modes)
            with self._held(lock, holder) as held:
                if held:
                    yield True
                    return
        yield False

    @staticmethod
    @contextlib.contextmanager
    def _held(lock: _AnyLock, holder: Holder) -> Iterator[bool]:
        held = lock.try_acquire(holder)
        try:
            yield held
        finally:
            if held:
                lock.release()

    def _lock(self, key: str, layout: Layout) -> _AnyLock:
        if layout.grace is not None:
            return KeyLease(layout, key)
        return KeyLock(layout.key_lock(key), layout.modes)

    def _waiter(self, url: ShardURL, status: FetchStatus, note: WaitNote, holder: Holder) -> Waiter:
        return Waiter(
            [store.layout.partial for store, _ in self._places],
            url,
            status=status,
            record=self.store.layout.holder(url.key),
            timeout=self._config.lock_timeout,
            stale_after=self._config.stale_after,
            note=note,
            waiter=holder,
        )

    def _holder(self) -> Holder:
        ranks = self._ranks
        rank = None if ranks.source == "none" else ranks.rank
        return Holder.this_process(rank=rank, job=ranks.job, now=clock.time())

    # -- making the entry ----------------------------------------------------------

    def _fill(
        self,
        url: ShardURL,
        lock: _AnyLock | None,
        holder: Holder,
        status: FetchStatus,
        places: Sequence[tuple[Store, Space]],
    ) -> Obtained:
        """Make the entry and open it; ``lock`` is the key's, or None for a private fetch."""
        for _ in range(_TRIES):
            opened = self.lookup(url, status.outdated, condemn=lock is not None)
            if opened is not None:
                return Obtained(opened, Outcome.COALESCED)
            linked = self._link(url, status.outdated)
            if linked is not None:
                return Obtained(linked, Outcome.LINKED)

            def announce(partial: Partial) -> None:
                """Say in the lock's record where the shard grows, for those who wait."""
                size = partial.metadata.info.size
                if lock is not None and (size is None or size > BLOCK):  # one block is never shown
                    lock.update(replace(holder, partial=partial.path.name))

            try:
                left = None if lock is None else lock.left
                fetched = self._fetch(url, status, places, left, announce)
                entry = self._publish(url, fetched)
            except LostError as exn:
                self._warn("lost", "%s: %s; starting over", url, exn)
                continue
            if status.outdated:
                self._drop(url, status.outdated)
            opened = self.lookup(url)
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
        for store, space in self._places:
            for entry in store.entries_of(url.key):
                if entry.version in outdated and store.evict(entry):
                    space.recount()

    def _link(self, url: ShardURL, outdated: Collection[str]) -> Opened | None:
        """Share a sibling namespace's copy, by hard link or else as it is."""
        pairs = ((t.store, other) for t in self._tiers for other in t.namespaces.siblings())
        for store, sibling in pairs:
            try:
                other = sibling.open(url.key, url.basename, outdated)
            except DamagedError:
                continue  # its own namespace will set it aside
            if other is None:
                continue
            try:
                linked = store.link(other, other.entry.metadata(), url.basename)
                opened = self.lookup(url, outdated) if linked else None
            except (DamagedError, FileNotFoundError):
                other.close()
                continue
            except OSError as exn:  # full or read-only: theirs is as good to read
                logger.info("%s: not linked, but read where it is: %s", url, exn)
                return other
            except Exception:
                other.close()
                raise
            if opened is None:
                return other
            other.close()
            return opened
        return None

    def _fetch(
        self,
        url: ShardURL,
        status: FetchStatus,
        places: Sequence[tuple[Store, Space]],
        left: Holder | None,
        announce: Callable[[Partial], None],
    ) -> Fetched:
        """Fetch from an upstream that has the shard, else from the origin.

        Raises:
            As `get`; LostError: somebody took the partial away.
        """
        # A copy of what the origin has replaced may still be in an upstream.
        for upstream in () if status.outdated else self._origins.upstreams(url):
            status.upstream = True
            try:
                fetched = self._fetch_from(upstream, url, status, places, left, announce)
            except (FetchCancelledError, CacheFullError):
                raise
            except ShardCacheError as exn:
                logger.info("%s: not from %s: %s", url, upstream.name, exn)
                continue
            if upstream.digest in (None, fetched.digest):
                return fetched
            fetched.partial.discard()
            upstream.distrust()
            logger.warning("%s: its copy in %s is damaged", url, upstream.name)
        status.upstream = False
        return self._fetch_from(self._origins.of(url), url, status, places, left, announce)

    def _fetch_from(
        self,
        origin: Origin,
        url: ShardURL,
        status: FetchStatus,
        places: Sequence[tuple[Store, Space]],
        left: Holder | None,
        announce: Callable[[Partial], None],
    ) -> Fetched:
        # What an upstream began comes before what an earlier holder of the lock left.
        begun = None if left is None else left.partial
        resume = self._resume(url, begun if status.partial is None else status.partial.name)
        if resume is not None:
            announce(resume)
        else:
            self._ask_for_room(url, status)

        def target(info: ObjectInfo) -> Partial:
            partial = self._begin(url, info, places)
            try:
                announce(partial)
            except Exception:
                partial.discard()  # or its lock would reserve room until this process ends
                raise
            return partial

        return self._fetcher.fetch(origin, url, target=target, resume=resume, status=status)

    def _ask_for_room(self, url: ShardURL, status: FetchStatus) -> None:
        """Ask no origin for what there is no room for, as far as both are known."""
        size = self._fetcher.likely_size(url, status.listed) or _USUAL
        answers = [space.refuses(str(url), size) for _, space in self._places]
        refusals = [answer for answer in answers if answer is not None]
        if status.listed is not None and len(refusals) == len(answers):
            raise refusals[-1]
        small = all(s.max_size is not None and s.max_size < size for _, s in self._places)
        status.roomless = small or len(refusals) == len(answers)

    def _resume(self, url: ShardURL, name: str | None) -> Partial | None:
        """Take over the partial of this name, if nobody is at it."""
        # The name comes out of a file that anybody may have damaged.
        parsed = None if name is None else parse_partial_name(name)
        if name is None or parsed is None or parsed[0] != url.key:
            return None
        for store, space in self._places:
            partial = Partial.claim(store.layout, store.layout.partial / name, url.basename)
            if partial is None:
                continue
            logger.info("%s: resuming at %d bytes", url, partial.written)
            # A dead process's reservation lapsed: the budget may have been given to others.
            # Claimed, it is live again and counts with its final size: nothing to add.
            try:
                with space.reserved(str(url), None):
                    return partial
            except Exception:
                partial.close()
                raise
        return None

    def _begin(
        self, url: ShardURL, info: ObjectInfo, places: Sequence[tuple[Store, Space]]
    ) -> Partial:
        """Begin a partial in the first place that has room."""
        made = clock.time(), boot_id(), __version__
        metadata = Metadata(str(url), url.key, info, info.size or 0, "", None, *made)
        if info.size is None:  # it may fit only where most room is
            places = places[-1:]
        for store, space in places:
            try:
                with space.reserved(str(url), info.size):
                    return Partial.create(store.layout, metadata, url.basename)
            except OSError as exn:  # CacheFullError is one
                if store is places[-1][0] or isinstance(exn, LockTimeoutError):
                    raise
                logger.debug("%s: not into %s: %s", url, store.layout.base, exn)
        raise AssertionError("there is always a place")

    def _publish(self, url: ShardURL, fetched: Fetched) -> Path:
        partial = fetched.partial
        try:
            check_archive(partial.fd, url.basename, str(url))
            self._validate(url, partial)
            metadata = replace(
                partial.metadata,
                size=fetched.size,
                digest=fetched.digest,
                checked=fetched.checked,
                fetched_at=clock.time(),
                boot=boot_id(),
            )
            sync = self._config.fsync == "fsync"
            above = partial.path.parent
            store = next(store for store, _ in self._places if store.layout.partial == above)
            entry = store.publish(partial, metadata, sync=sync)
        except Exception:
            partial.discard()
            raise
        partial.close()
        return entry

    def _validate(self, url: ShardURL, partial: Partial) -> None:
        if self._config.validate is None:
            return
        try:
            self._config.validate(partial.data)
        except Exception as exn:  # a user's check may raise anything: that is its answer
            raise IntegrityError(
                f"{url} was refused by the validate hook: {type(exn).__name__}: {exn}. "
                "Look at the object, or at the hook.",
                url=str(url),
            ) from exn
