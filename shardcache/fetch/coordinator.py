"""From a URL to an open entry: at most one fetch per node, whoever asks.

    open the entry ----------------------------------------> hit
      | not there
    try the key's lock --- busy --> wait, open again -------> coalesced
      | ours                          | holder is stale
    open again, set damaged aside     | fetch privately ----> fetched
    link a sibling namespace's entry -----------------------> linked
    resume what a dead process left, or start ---> publish -> fetched

A `Coordinator` belongs to one process and may be used by all its threads. Locks only save
bandwidth: every step is right without them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from shardcache import clock
from shardcache.clock import boot_id
from shardcache.config import Config, __version__
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    UnprovenError,
)
from shardcache.fetch.job import Fetched
from shardcache.fetch.status import FetchStatus
from shardcache.fetch.transfer import Fetcher
from shardcache.fetch.waiting import Waiter
from shardcache.files import FULL
from shardcache.layout import Layout, is_directory, parse_partial_name
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.lease import KeyLease
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.ranks import Ranks
from shardcache.space.budget import Space
from shardcache.space.tiers import Tier
from shardcache.store.digest import BLOCK, check_archive, is_whole_archive
from shardcache.store.entry import (
    DamagedError,
    LostError,
    Metadata,
    Opened,
    Store,
    open_first,
    set_aside,
)
from shardcache.store.partial import Partial
from shardcache.urls import ShardURL

__all__ = ["Coordinator", "Obtained"]

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

#: Where a shard may be stored, in the order in which that is tried.
_Places: TypeAlias = Sequence[tuple[Store, Space]]


class Obtained(NamedTuple):
    """An open entry, which the caller must close, and how it was had."""

    opened: Opened
    outcome: Literal["hit", "coalesced", "linked", "fetched"]


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
        #: Opens an entry in whichever tier it is; see `Store.open`.
        self.open = stores[0].open if len(stores) == 1 else functools.partial(open_first, stores)
        self.layout = stores[-1].layout
        # As they are now: a tier that is made anew gets another coordinator.
        self._places = [(tier.store, tier.space()) for tier in tiers]
        self._fetcher = fetcher
        self._origins = origins
        self._config = config
        self._ranks = ranks
        self._on_fault = on_fault
        self._warn = warn

    def get(self, url: ShardURL, status: FetchStatus, *, ahead: bool = False) -> Obtained | None:
        """Wait for the shard's entry, link it, or fetch it, where a look found none.

        Args:
            url: the shard.
            status: is kept up to date.
            ahead: no reader waits for the shard yet. Returns None if another process fetches
                it, if this node fetches enough ahead, or if its connections are scarce.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError,
            IntegrityError: the origin cannot serve it.
            CacheFullError: it cannot be stored.
            LockTimeoutError: somebody else has been fetching it for too long.
            OSError: the local disk failed.
        """
        with contextlib.ExitStack() as stack:
            if ahead and self._fetcher.connections.crowded:
                return None
            if ahead and not stack.enter_context(self._slot("ahead", _AHEAD_FETCHES)):
                return None
            try:
                return self._get(url, status, ahead, self._places)
            except OSError as exn:
                if isinstance(exn, ShardCacheError) or exn.errno not in FULL:
                    raise
                # At whichever step: the partial is gone by now, and so is the lock.
                logger.info("%s: the disk is full (%s); making room", url, exn)
                status.drop_answer()
                if len(self._places) == 1:  # otherwise the next tier may have room
                    self._places[0][1].make_room(str(url), status.size or 0)
                return self._get(url, status, ahead, self._places[-1:])

    def _get(
        self, url: ShardURL, status: FetchStatus, ahead: bool, places: _Places
    ) -> Obtained | None:
        holder, lock, waiter = self._holder(), self._lock(url.key, self.layout), None
        try:
            while not lock.try_acquire(holder):
                if ahead:
                    return None
                if waiter is None:
                    layouts = [store.layout for store, _ in self._places]
                    waiter = Waiter(url, status, layouts, self._config, holder)
                if waiter.stale:
                    with self._slot("private", _PRIVATE_FETCHES) as free:
                        if free:
                            waiter.close()
                            logger.warning("%s: %s; fetching it here too", url, waiter.describe())
                            return self._fill(url, status, None, places)
                waiter.pause()
                opened = self.lookup(url, status.outdated)
                if opened is not None:
                    return Obtained(opened, "coalesced")
        finally:
            if waiter is not None:
                waiter.close()
        try:
            return self._fill(url, status, lock, places)
        finally:
            lock.release()

    def lookup(
        self, url: ShardURL, outdated: Collection[str] = (), *, condemn: bool = False
    ) -> Opened | None:
        """Open the shard's entry if there is a good one, of another than these versions.

        With ``condemn`` a bad one is set aside; who does so has the lock of the key.
        """
        try:
            return self.open(url.key, url.basename, outdated)
        except DamagedError as exn:
            logger.info("%s: not used: %s", url, exn)
            if isinstance(exn.__cause__, OSError):
                self._on_fault(exn.__cause__)
            if condemn and set_aside(Path(exn.directory), f"{url}: {exn}"):
                self._warn("damaged", "%s was damaged and is fetched again: %s", url, exn)
            return None

    # -- locks -------------------------------------------------------------------

    @contextlib.contextmanager
    def sole(self, store: Store, key: str) -> Iterator[bool]:
        """Hold the lock of a shard in one of the root's namespaces; False if it is taken.

        Raises:
            OSError: the disk fails.
        """
        lock = self._lock(key, store.layout)
        try:
            yield lock.try_acquire(self._holder())
        finally:
            lock.release()

    @contextlib.contextmanager
    def _slot(self, name: str, count: int) -> Iterator[bool]:
        """One of the node's few places for fetches of a kind; False if all are taken."""
        layout, holder = self.layout, self._holder()
        slots = (KeyLock(layout.named_lock(f"{name}-{n}"), layout.modes) for n in range(count))
        lock = next((slot for slot in slots if slot.try_acquire(holder)), None)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def _lock(self, key: str, layout: Layout) -> KeyLock | KeyLease:
        if layout.grace is not None:
            return KeyLease(layout, key)
        return KeyLock(layout.key_lock(key), layout.modes)

    def _holder(self) -> Holder:
        ranks = self._ranks
        rank = None if ranks.source == "none" else ranks.rank
        return Holder.this_process(rank=rank, job=ranks.job, now=clock.time())

    # -- making the entry ----------------------------------------------------------

    def _fill(
        self, url: ShardURL, status: FetchStatus, lock: KeyLock | KeyLease | None, places: _Places
    ) -> Obtained:
        """Make the entry and open it; ``lock`` is the key's, or None for a private fetch."""
        for _ in range(_TRIES):
            opened = self.lookup(url, status.outdated, condemn=lock is not None)
            if opened is not None:
                return Obtained(opened, "coalesced")
            linked = self._link(url, status.outdated)
            if linked is not None:
                return Obtained(linked, "linked")
            try:
                entry = self._publish(url, self._fetch(url, status, lock, places))
            except LostError as exn:
                self._warn("lost", "%s: %s; starting over", url, exn)
                continue
            if status.outdated:
                self._drop(url, status.outdated)
            opened = self.lookup(url)
            if opened is not None:
                return Obtained(opened, "fetched")
            if is_directory(entry):  # another fetch would end there, too
                raise OSError(errno.EIO, "what was just stored cannot be read", str(entry))
        # The origin is well: a fault of the cache, so that the shard can still be streamed.
        raise OSError(
            errno.EBUSY,
            f"what was fetched vanished, {_TRIES} times in a row. Locks do not work there, or "
            "something else empties it; stop that, or use another directory",
            str(self.layout.base),
        )

    def _drop(self, url: ShardURL, outdated: Collection[str]) -> None:
        """Evict replaced versions that nobody reads; what stays is evicted before others."""
        for store, space in self._places:
            for entry in store.entries_of(url.key):
                if entry.version not in outdated:
                    continue
                if store.evict(entry):
                    space.recount()
                else:
                    store.mark_replaced(entry)

    def _link(self, url: ShardURL, outdated: Collection[str]) -> Opened | None:
        """Share a sibling namespace's copy, by hard link or else as it is."""
        places = ((*place, other) for place in self._places for other in place[1].stores()[1:])
        for store, space, sibling in places:
            other = opened = None
            try:
                other = sibling.open(url.key, url.basename, outdated)
                if other is None:
                    continue
                with space.reserved(str(url), 0):
                    is_linked = store.link(other, other.entry.metadata(), url.basename)
                if is_linked:
                    opened = self.lookup(url, outdated)
            except (DamagedError, FileNotFoundError):  # its own namespace will set it aside
                if other is not None:
                    other.close()
                continue
            except OSError as exn:  # full or read-only: theirs is as good to read
                if other is None:
                    raise
                logger.info("%s: not linked, but read where it is: %s", url, exn)
            if opened is None:
                return other
            other.close()
            return opened
        return None

    def _fetch(
        self, url: ShardURL, status: FetchStatus, lock: KeyLock | KeyLease | None, places: _Places
    ) -> Fetched:
        """Fetch from an upstream that has the shard, else from the origin.

        Raises:
            As `get`; LostError: somebody took the partial away.
        """
        left = None if lock is None or lock.left is None else lock.left.partial

        def announce(partial: Partial) -> Partial:
            """Say in the lock's record where the shard grows, for those who wait."""
            size = partial.metadata.info.size
            if lock is not None and (size is None or size > BLOCK):  # one block is never shown
                lock.update(replace(self._holder(), partial=partial.path.name))
            return partial

        # A copy of what the origin has replaced may still be in an upstream.
        upstreams = () if status.outdated else self._origins.upstreams(url)
        for source in chain(upstreams, (None,)):
            status.upstream = source is not None
            # What an upstream began comes before what an earlier holder of the lock left.
            resume = self._resume(url, left if status.partial is None else status.partial.name)
            if resume is not None:
                announce(resume)
            else:
                self._ask_for_room(url, status)
            try:
                fetched = self._fetcher.fetch(
                    source or self._origins.of(url),
                    url,
                    target=lambda info: announce(self._begin(url, info, places)),
                    resume=resume,
                    status=status,
                )
            except ShardCacheError as exn:
                if source is None or isinstance(exn, (FetchCancelledError, CacheFullError)):
                    raise
                logger.info("%s: not from %s: %s", url, source.name, exn)
                continue
            if source is None or source.digest in (None, fetched.digest):
                return fetched
            fetched.partial.discard()
            logger.warning("%s: its copy in %s is damaged", url, source.name)
        raise AssertionError("the origin is the last")

    def _ask_for_room(self, url: ShardURL, status: FetchStatus) -> None:
        """Ask no origin for what there is no room for, as far as both are known."""
        size = self._fetcher.likely_size(url, status.listed) or _USUAL
        refusals = [space.refuses(str(url), size) for _, space in self._places]
        status.roomless = None not in refusals
        if status.roomless and status.listed is not None and refusals[-1] is not None:
            raise refusals[-1]

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

    def _begin(self, url: ShardURL, info: ObjectInfo, places: _Places) -> Partial:
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
        """Make an entry of what was fetched, unless it is no archive or `validate` refuses it."""
        partial = fetched.partial
        try:
            check_archive(partial.fd, url.basename, str(url))
            if not (fetched.proven or fetched.checked or is_whole_archive(partial.fd)):
                raise UnprovenError(
                    f"{url} ends with the connection, and the archive does not show that it is "
                    "complete. Let the server send a Content-Length.",
                    url=str(url),
                )
            if self._config.validate is not None:
                try:
                    self._config.validate(partial.data)
                except Exception as exn:  # a user's check may raise anything: that is its answer
                    raise IntegrityError(
                        f"{url} was refused by the validate hook: {type(exn).__name__}: {exn}. "
                        "Look at the object, or at the hook.",
                        url=str(url),
                    ) from exn
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
            store, space = next(p for p in self._places if p[0].layout.partial == above)
            unknown = partial.metadata.info.size is None  # until now
            if unknown and (refusal := space.refuses(str(url), fetched.size)):
                raise refusal
            entry = store.publish(partial, metadata, sync=sync)
        except Exception:
            partial.discard()
            raise
        partial.close()
        return entry
