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
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from shardcache.clock import Clock, boot_id
from shardcache.config import Config, __version__
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
)
from shardcache.fetch.transfer import Fetched, Fetcher, FetchStatus
from shardcache.fetch.waiting import Waiter
from shardcache.files import FULL
from shardcache.layout import Layout, is_directory, list_names, parse_partial_name
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.lease import KeyLease
from shardcache.locks.sessions import WaitNote
from shardcache.origins.base import ObjectInfo, Origin
from shardcache.origins.resolve import Origins
from shardcache.ranks import Ranks
from shardcache.space.budget import Space
from shardcache.store.digest import check_archive
from shardcache.store.entry import DamagedError, Metadata, read_sidecar, versions
from shardcache.store.partial import LostError, Partial
from shardcache.store.store import Opened, Store, Stores
from shardcache.urls import ShardURL

__all__ = ["Claim", "Coordinator", "Filler", "Obtained", "Outcome", "Place"]

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
        self._filler = Filler(places, fetcher=fetcher, origins=origins, config=config, clock=clock)
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
            status.drop_answer()
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
        if layout.grace is not None:
            return KeyLease(layout, key)
        return KeyLock(layout.key_lock(key), layout.modes)

    def _waiter(self, url: ShardURL, status: FetchStatus, note: WaitNote, holder: Holder) -> Waiter:
        layout = self.store.layout
        return Waiter(
            [place.store.layout.partial for place in self._places],
            url,
            self._clock,
            watch=self._fetcher.cancellation.watch(
                str(url), self._clock, lambda: status.called_off
            ),
            record=layout.holder(url.key),
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
                entry = self._filler.fetch(url, Claim(lock, holder), status)
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
                    place.space.recount()

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
            except Exception:
                other.close()
                raise
            if opened is None:
                return other
            other.close()
            return opened
        return None


class Claim:
    """Why a process fetches a key: it has its lock, or has waited for too long.

    Args:
        lock: the key's; None for a private fetch.
        holder: who we are.
    """

    def __init__(self, lock: KeyLock | KeyLease | None, holder: Holder) -> None:
        self.lock = lock
        self._holder = holder

    def tell(self, partial: Partial, size: int | None) -> None:
        """Say in the lock's record where the shard grows, for those who wait.

        Raises:
            OSError: the disk fails.
        """
        if self.lock is not None:
            self.lock.update(replace(self._holder, partial=partial.path.name, size=size))


@dataclass(frozen=True, slots=True)
class Place:
    """A tier, for a newcomer.

    Attributes:
        store: where entries are published.
        space: the budget.
    """

    store: Store
    space: Space


class Filler:
    """See the module.

    Args:
        places: in the order in which they are filled; the last one is always there.
        fetcher: the engine.
        origins: where shards come from.
        config: checks.
        clock: time.
    """

    def __init__(
        self,
        places: Sequence[Place],
        *,
        fetcher: Fetcher,
        origins: Origins,
        config: Config,
        clock: Clock,
    ) -> None:
        self._places = list(places)
        self._fetcher = fetcher
        self._origins = origins
        self._config = config
        self._clock = clock

    def fetch(self, url: ShardURL, claim: Claim, status: FetchStatus) -> Path:
        """Fetch and publish; the entry's directory.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError,
            IntegrityError: the origin cannot serve it.
            CacheFullError: it cannot be stored.
            partials.LostError: somebody took the partial away.
            OSError: the local disk failed.
        """
        known = frozenset(
            path for place in self._places for path, _ in versions(place.store.layout, url.key)
        )
        # A copy of what the origin has replaced may still be in an upstream.
        for upstream in () if status.outdated else self._origins.nearer(url):
            try:
                status.near = True
                fetched = self._fetch(upstream, url, claim, status)
                if upstream.digest in (None, fetched.digest):
                    return self._publish(url, fetched, known)
                fetched.partial.discard()
                upstream.distrust()
                logger.warning("%s: its copy in %s is damaged", url, upstream.name)
            except (FetchCancelledError, CacheFullError):
                raise
            except ShardCacheError as exn:
                logger.info("%s: not from %s: %s", url, upstream.name, exn)
        status.near = False
        return self._publish(url, self._fetch(self._origins.of(url), url, claim, status), known)

    def _fetch(self, origin: Origin, url: ShardURL, claim: Claim, status: FetchStatus) -> Fetched:
        places = deque(self._places)
        while True:
            resume = self._resume(url)
            if resume is not None:
                claim.tell(resume, resume.metadata.info.size)
            else:
                self._ask_for_room(url, status)
            try:
                return self._fetcher.fetch(
                    origin,
                    url,
                    target=lambda info: self._target(url, info, claim, places),
                    resume=resume,
                    status=status,
                )
            except OSError as exn:
                # What was admitted may still find no room: others write there, too.
                full = exn.errno in FULL and not isinstance(exn, ShardCacheError)
                if not full or len(places) == 1:
                    raise
                logger.info("%s: %s is full (%s)", url, places[0].store.layout.base, exn)
                status.drop_answer()
                places.popleft()

    def _ask_for_room(self, url: ShardURL, status: FetchStatus) -> None:
        """Ask no origin for what there is no room for, as far as both are known."""
        known = self._fetcher.likely_size(url, status.listed)
        size = _USUAL if known is None else known
        answers = [place.space.refuses(str(url), size) for place in self._places]
        refusals = [answer for answer in answers if answer is not None]
        if known is not None and len(refusals) == len(answers):
            raise refusals[-1]
        small = all((most := p.space.limits().max_size) and most < size for p in self._places)
        status.roomless = small or len(refusals) == len(answers)

    def _place_of(self, partial: Partial) -> Place:
        """Where a partial lies."""
        above = partial.path.parent
        return next(place for place in self._places if place.store.layout.partial == above)

    def _publish(self, url: ShardURL, fetched: Fetched, known: Collection[Path]) -> Path:
        partial = fetched.partial
        try:
            self._validate(url, partial)
            metadata = self._metadata(
                url, fetched.info, fetched.size, fetched.digest, fetched.checked
            )
            sync = self._config.fsync == "fsync"
            store = self._place_of(partial).store
            entry = store.publish(partial, metadata, sync=sync, known=known)
        except Exception:
            partial.discard()
            raise
        partial.close()
        return entry

    def _resume(self, url: ShardURL) -> Partial | None:
        """Take over what a dead process left of this shard."""
        for place in self._places:
            layout = place.store.layout
            for name in list_names(layout.partial):
                parsed = parse_partial_name(name)
                if parsed is not None and parsed[0] == url.key:
                    partial = Partial.claim(layout, layout.partial / name, url.basename)
                    if partial is not None:
                        logger.info("%s: resuming at %d bytes", url, partial.written)
                        return self._readmit(url, partial, place.space)
        return None

    def _readmit(self, url: ShardURL, partial: Partial, space: Space) -> Partial:
        """A dead process's reservation lapsed: the budget may have been given to others."""
        try:
            # Claimed, it is live again and counts with its final size: nothing to add.
            size = partial.metadata.info.size
            return space.admit(str(url), size, lambda: partial, reserved=True)
        except Exception:
            partial.close()
            raise

    def _target(
        self, url: ShardURL, info: ObjectInfo, claim: Claim, places: deque[Place]
    ) -> Partial:
        """Begin a partial in the first place that has room; those before it are taken off."""
        metadata = self._metadata(url, info, info.size or 0)
        if info.size is None:  # who knows whether it fits anywhere but where most room is
            while len(places) > 1:
                places.popleft()
        while True:
            layout, space = places[0].store.layout, places[0].space
            begin = functools.partial(Partial.create, layout, metadata, url.basename)
            try:
                partial = space.admit(str(url), info.size, begin)
                break
            except OSError as exn:  # CacheFullError is one
                if len(places) == 1 or isinstance(exn, LockTimeoutError):
                    raise
                logger.debug("%s: not into %s: %s", url, layout.base, exn)
                places.popleft()
        try:
            claim.tell(partial, info.size)
        except Exception:
            partial.discard()  # or its lock would reserve room until this process ends
            raise
        return partial

    def _metadata(
        self,
        url: ShardURL,
        info: ObjectInfo,
        size: int,
        digest: str = "",
        checked: str | None = None,
    ) -> Metadata:
        return Metadata(
            url=str(url),
            key=url.key,
            info=info,
            size=size,
            digest=digest,
            checked=checked,
            fetched_at=self._clock.time(),
            boot=boot_id(),
            library=__version__,
        )

    def _validate(self, url: ShardURL, partial: Partial) -> None:
        check_archive(partial.fd, url.basename, str(url))
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
