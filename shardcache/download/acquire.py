"""Turn a shard that is not cached into an open entry, with one download per node.

    try the key's lock --- busy --> wait, look again --------------> coalesced
      | ours                          | the holder is stale
    look again, set damage aside      | download without the lock -> fetched
    link a sibling namespace's entry ------------------------------> linked
    resume a partial or begin one ---> transfer ---> publish ------> fetched

A sibling namespace stores the shards of another rank or job in the same cache (``isolation``). The
holder of the lock is stale if its partial, the shard in flight, has not grown for ``stale_after``
seconds. Locks only save bandwidth: every step gives the right bytes without them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

from shardcache import clock
from shardcache.clock import boot_id
from shardcache.config import Config, __version__
from shardcache.download.download import Download, Result
from shardcache.download.transfer import Engine, Source, Transferred, transfer
from shardcache.download.waiting import Waiter
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    UnprovenError,
    is_local_error,
)
from shardcache.files import FULL
from shardcache.layout import Layout, is_directory, parse_partial_name
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.lease import KeyLease
from shardcache.origins.base import ObjectInfo
from shardcache.origins.resolve import Origins
from shardcache.ranks import Ranks
from shardcache.space.budget import Space
from shardcache.space.tiers import Tier
from shardcache.store.digest import BLOCK, check_archive
from shardcache.store.directory import DamagedError, Metadata
from shardcache.store.entry import Opened, Store, open_first, set_aside
from shardcache.store.partial import LostError, Partial
from shardcache.threads import lazy
from shardcache.urls import ShardURL

__all__ = ["Site", "acquire"]

logger = logging.getLogger(__name__)

#: Downloads per node that ignore the lock of a stale holder: enough for readers to continue, too
#: few for one stuck process to cause a download storm.
_PRIVATE = 2
#: Downloads ahead (of shards that no reader needs yet) per node: enough to keep a fast link busy
#: with eight connections each, few compared with the shards that the node's workers wait for.
_AHEAD = 16
#: Assumed bytes of a shard of unknown size. If there is no room for that many, the shard may have
#: to be streamed, so the first request asks for the whole shard.
_USUAL_SIZE = 64 << 20
#: Attempts to store a shard. An entry may vanish between publish and open, and a process whose
#: locks do not work may remove a partial, but hardly this often in a row.
_TRIES = 5

_Lock: TypeAlias = KeyLock | KeyLease


class _Place(NamedTuple):
    """A namespace in which a shard may be stored, and the budget that it counts against."""

    store: Store
    space: Space


@dataclass(frozen=True)
class Site:
    """The directories of a cache as a process found them, and the tools to download into them.

    A new site replaces this one if a directory is unmounted or emptied. Safe between threads.

    Attributes:
        tiers: the directories of the cache, fastest first; the last one holds the locks.
        engine, origins, config, ranks: those of the process.
        on_read_error: called with the error when the disk cannot read an entry.
        warn: logs each kind of warning once (`Process.warn`).
    """

    tiers: Sequence[Tier]
    engine: Engine
    origins: Origins
    config: Config
    ranks: Ranks
    on_read_error: Callable[[OSError], None]
    warn: Callable[..., None]

    @lazy
    def open(self) -> Callable[..., Opened | None]:
        """The function that opens an entry in the first tier that has it, like `Store.open`."""
        stores = [tier.store for tier in self.tiers]
        return stores[0].open if len(stores) == 1 else functools.partial(open_first, stores)

    @lazy
    def places(self) -> list[_Place]:
        """The places where shards may be stored, in the order in which they are tried."""
        policy = self.config.policy  # `Process.evict_lru` changes only this one
        return [_Place(t.store, t.space(t.config.replace(policy=policy))) for t in self.tiers]

    @property
    def layout(self) -> Layout:
        """The namespace that holds the locks."""
        return self.tiers[-1].store.layout

    def holder(self) -> Holder:
        """Return the record that this process writes into a lock that it holds."""
        ranks = self.ranks
        rank = None if ranks.source == "none" else ranks.rank
        return Holder.this_process(rank=rank, job=ranks.job, now=clock.time())

    def find(
        self, shard: ShardURL, outdated: frozenset[str] = frozenset(), *, condemn: bool = False
    ) -> Opened | None:
        """Open the newest entry of a shard, or return None if there is no sound one.

        Entries of ``outdated`` versions are ignored. With ``condemn``, a damaged entry is set
        aside; the caller must then hold the key's lock.
        """
        try:
            return self.open(shard.key, shard.basename, outdated)
        except DamagedError as exn:
            logger.info("%s: not used: %s", shard, exn)
            if isinstance(exn.__cause__, OSError):
                self.on_read_error(exn.__cause__)
            if condemn and set_aside(Path(exn.directory), f"{shard}: {exn}"):
                self.warn("damaged", "%s was damaged and is downloaded again: %s", shard, exn)
            return None

    @contextlib.contextmanager
    def locked(self, store: Store, key: str) -> Iterator[bool]:
        """Hold the lock of a key in ``store`` in the body; yield False if another process has it.

        Raises:
            OSError: the disk fails.
        """
        lock = _lock(key, store.layout)
        try:
            yield lock.try_acquire(self.holder())
        finally:
            lock.release()

    @contextlib.contextmanager
    def slot(self, name: str, count: int) -> Iterator[bool]:
        """Hold one of the node's ``count`` slots for ``name``; yield False if all are taken."""
        layout, holder = self.layout, self.holder()
        slots = (KeyLock(layout.named_lock(f"{name}-{n}"), layout.modes) for n in range(count))
        lock = next((slot for slot in slots if slot.try_acquire(holder)), None)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()


def _lock(key: str, layout: Layout) -> _Lock:
    if layout.grace is not None:
        return KeyLease(layout, key)
    return KeyLock(layout.key_lock(key), layout.modes)


def acquire(site: Site, download: Download) -> Result | None:
    """Obtain the entry of a shard: wait for another process, link a sibling's entry, or download.

    Returns:
        The open entry, or None if a download ahead gave way to another process or to readers.

    Raises:
        ShardNotFoundError, AccessDeniedError, ConfigError, TransferError, IntegrityError: the
            origin cannot deliver the shard.
        CacheFullError: the shard cannot be stored.
        LockTimeoutError: another process has been downloading it for too long.
        FetchCancelledError: the download was cancelled.
        OSError: the local disk failed.
    """
    with contextlib.ExitStack() as stack:
        is_crowded = download.is_ahead and (
            site.engine.connections.crowded or not stack.enter_context(site.slot("ahead", _AHEAD))
        )
        if is_crowded and download.give_way():
            return None
        try:
            return _acquire(site, download, site.places)
        except OSError as exn:
            if not is_local_error(exn) or exn.errno not in FULL:
                raise
            # The failed attempt has removed its partial and released the lock, so it can be
            # repeated once there is room.
            logger.info("%s: the disk is full (%s); making room", download.shard, exn)
            if (response := download.take_response()) is not None:
                response.close()
            if len(site.places) == 1:  # otherwise the next tier may have room
                size = download.progress().size or 0
                site.places[0].space.make_room(str(download.shard), size)
            return _acquire(site, download, site.places[-1:])


def _acquire(site: Site, download: Download, places: list[_Place]) -> Result | None:
    shard, waiter = download.shard, None
    lock = _lock(shard.key, site.layout)
    try:
        while not lock.try_acquire(site.holder()):
            if download.give_way():
                return None
            if waiter is None:
                layouts = [place.store.layout for place in site.places]
                waiter = Waiter(download, layouts, site.config, site.holder())
            if waiter.is_stale:
                with site.slot("private", _PRIVATE) as is_free:
                    if is_free:
                        waiter.close()
                        logger.warning("%s: %s; downloading it here, too", shard, waiter.describe())
                        return _make_entry(site, download, None, places)
            waiter.pause()
            if (opened := site.find(shard, download.outdated)) is not None:
                return Result(opened, "coalesced")
        if waiter is not None:
            waiter.close()
        return _make_entry(site, download, lock, places)
    finally:
        if waiter is not None:
            waiter.close()
        lock.release()


def _make_entry(site: Site, download: Download, lock: _Lock | None, places: list[_Place]) -> Result:
    """Link or download the shard, and open it. ``lock`` is None if a stale process holds it."""
    shard = download.shard
    for _ in range(_TRIES):
        opened = site.find(shard, download.outdated, condemn=lock is not None)
        if opened is not None:
            return Result(opened, "coalesced")
        if (opened := _link(site, download)) is not None:
            return Result(opened, "linked")
        try:
            entry = _publish(site, download, _transfer(site, download, lock, places))
        except LostError as exn:
            site.warn("lost", "%s: %s; starting over", shard, exn)
            continue
        if download.outdated:
            _evict_outdated(site, download)
        if (opened := site.find(shard)) is not None:
            return Result(opened, "fetched")
        if is_directory(entry):  # the disk cannot read it, and another download would not help
            raise OSError(errno.EIO, "the stored shard cannot be read", str(entry))
    # An OSError is a fault of the cache and not of the origin, so the shard can still be streamed.
    raise OSError(
        errno.EBUSY,
        f"the downloaded shard vanished, {_TRIES} times in a row. Either locks do not work in this "
        "directory, or another program empties it; stop that program, or use another directory",
        str(site.layout.base),
    )


def _evict_outdated(site: Site, download: Download) -> None:
    """Evict outdated versions. Those still being read are marked, and later evicted first."""
    for store, space in site.places:
        for entry in store.entries_of(download.shard.key):
            if entry.version not in download.outdated:
                continue
            if store.evict(entry):
                space.forget_refusal()
            else:
                store.mark_replaced(entry)


def _link(site: Site, download: Download) -> Opened | None:
    """Hard-link a sibling namespace's entry, or open it where it is; return None if none has it."""
    shard, outdated = download.shard, download.outdated
    places = ((*place, other) for place in site.places for other in place.space.stores()[1:])
    for store, space, sibling in places:
        other = opened = None
        try:
            other = sibling.open(shard.key, shard.basename, outdated)
            if other is None:
                continue
            with space.reserved(shard, 0):
                is_linked = store.link(other, other.entry.metadata(), shard.basename)
            if is_linked:
                opened = site.find(shard, outdated)
        except (DamagedError, FileNotFoundError):  # the sibling's own processes set it aside
            if other is not None:
                other.close()
            continue
        except OSError as exn:  # full or read-only: the sibling's entry can be read instead
            if other is None:
                raise
            logger.info("%s: not linked, but read where it is: %s", shard, exn)
        if opened is None:
            return other
        other.close()
        return opened
    return None


def _transfer(
    site: Site, download: Download, lock: _Lock | None, places: list[_Place]
) -> Transferred:
    """Transfer the shard from an upstream that has it, or else from the origin.

    Raises:
        LostError: another process removed the partial.
        The errors of `acquire`.
    """
    shard = download.shard
    left = None if lock is None or lock.left is None else lock.left.partial

    def announce(partial: Partial) -> Partial:
        """Write the partial's name into the lock's record, so that waiting processes find it."""
        size = partial.metadata.info.size
        # A partial of one block has no journal, so no process could follow it.
        if lock is not None and (size is None or size > BLOCK):
            lock.update(replace(site.holder(), partial=partial.path.name))
        return partial

    # If a version is outdated, an upstream may still hold it, so only the origin is used.
    upstreams = () if download.outdated else site.origins.upstreams(shard)
    for upstream in chain(upstreams, (None,)):
        # If an upstream failed, continue the partial that it began. Otherwise, try the partial that
        # an earlier holder of the lock left.
        name = left if download.partial is None else download.partial.name
        resume, roomless = _resume(site, download, name), False
        if resume is not None:
            announce(resume)
        else:
            roomless = _may_not_fit(site, download)
        try:
            transferred = transfer(
                site.engine,
                Source(upstream or site.origins.of(shard), upstream is not None, roomless),
                download,
                lambda info: announce(_begin(download, info, places)),
                resume,
            )
        except ShardCacheError as exn:
            if upstream is None or isinstance(exn, (FetchCancelledError, CacheFullError)):
                raise
            upstream.failed(exn)
            continue
        if upstream is None or upstream.digest in (None, transferred.digest):
            return transferred
        transferred.partial.discard()
        logger.warning("%s: the copy in %s is damaged and is not used", shard, upstream.name)
    raise AssertionError("the origin is the last")


def _may_not_fit(site: Site, download: Download) -> bool:
    """Return whether the shard may find no room. Raise CacheFullError if it certainly has none."""
    size = site.engine.sizes.likely(download) or _USUAL_SIZE
    refusals = [space.refuses(str(download.shard), size) for _, space in site.places]
    if None in refusals:
        return False
    if download.listed is not None and refusals[-1] is not None:
        raise refusals[-1]
    return True


def _resume(site: Site, download: Download, name: str | None) -> Partial | None:
    """Take over the partial of this name; return None if it is gone or its writer is alive."""
    shard = download.shard
    # The name was read from a file that another program may have damaged, so it is checked.
    parsed = None if name is None else parse_partial_name(name)
    if name is None or parsed is None or parsed[0] != shard.key:
        return None
    for store, space in site.places:
        partial = Partial.claim(store.layout, store.layout.partial / name, shard.basename)
        if partial is None:
            continue
        logger.info("%s: resuming at %d bytes", shard, partial.written)
        # The reservation ended with the dead process, and other shards may have taken its room, so
        # the limits are checked again. The claimed partial already counts with its final size.
        try:
            with space.reserved(shard, None):
                return partial
        except Exception:
            partial.close()
            raise
    return None


def _begin(download: Download, info: ObjectInfo, places: list[_Place]) -> Partial:
    """Create a partial in the fastest tier that has room."""
    shard, made = download.shard, (clock.time(), boot_id(), __version__, download.shard.endpoint)
    metadata = Metadata(str(shard), shard.key, info, info.size or 0, "", None, *made)
    if info.size is None:  # use the last tier, which usually has the most room
        places = places[-1:]
    for store, space in places:
        try:
            with space.reserved(shard, info.size):
                return Partial.create(store.layout, metadata, shard.basename)
        except OSError as exn:  # CacheFullError is a subclass
            if store is places[-1].store or isinstance(exn, LockTimeoutError):
                raise
            logger.debug("%s: not into %s: %s", shard, store.layout.base, exn)
    raise AssertionError("there is always a place")


def _publish(site: Site, download: Download, transferred: Transferred) -> Path:
    """Publish a transferred shard and return its entry, or discard it if a check refuses it."""
    partial, shard = transferred.partial, download.shard
    try:
        check_archive(partial.fd, shard.basename, str(shard))
        if not (transferred.proven or transferred.checked):
            raise UnprovenError(
                f"{shard} is not stored: its response has no length and ends with the connection, "
                "so it may be incomplete. Let the server send a Content-Length.",
                url=str(shard),
            )
        if site.config.validate is not None:
            try:
                site.config.validate(partial.data)
            except Exception as exn:  # the hook may raise any exception to refuse the shard
                raise IntegrityError(
                    f"{shard} was refused by the validate hook: {type(exn).__name__}: {exn}. "
                    "Look at the object, or at the hook.",
                    url=str(shard),
                ) from exn
        metadata = replace(
            partial.metadata,
            size=transferred.size,
            digest=transferred.digest,
            checked=transferred.checked,
            fetched_at=clock.time(),
            boot=boot_id(),
        )
        above = partial.path.parent
        store, space = next(p for p in site.places if p.store.layout.partial == above)
        is_unknown = partial.metadata.info.size is None  # so the budget was not checked before
        if is_unknown and (refusal := space.refuses(str(shard), transferred.size)):
            raise refusal
        entry = store.publish(partial, metadata, sync=site.config.fsync == "fsync")
    except Exception:
        partial.discard()
        raise
    partial.close()
    return entry
