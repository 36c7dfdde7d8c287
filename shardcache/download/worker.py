"""Fetch a shard that is not cached, and open its entry; one download per node.

docs/design.md shows the steps; each of them gives the right bytes without locks.

A process that waits for the holder of the lock (`_Wait`) never takes the lock away. The holder is
stale if it has shown no progress for ``stale_after`` seconds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from shardcache import clock
from shardcache.archive import MALFORMED, archive_problem, check_archive
from shardcache.clock import boot_id
from shardcache.config import Config, __version__
from shardcache.download.download import Download
from shardcache.download.transfer import Resources, Transfer
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    TransferError,
    UnprovenError,
)
from shardcache.faults import FULL, ignoring, is_local_error, os_error
from shardcache.files import is_directory, open_file
from shardcache.layout import OUTDATED, REPLACED, parse_partial_name
from shardcache.locks.keys import Holder, KeyLease, KeyLock, read_holder
from shardcache.locks.sessions import Session
from shardcache.origins.base import ObjectInfo, Origin, VersionChangedError
from shardcache.space.budget import Space
from shardcache.space.eviction import Evict
from shardcache.store.digest import BLOCK, MismatchError, file_digest, identify
from shardcache.store.directory import DamagedError, Metadata
from shardcache.store.entry import Opened, is_marked, open_first
from shardcache.store.partial import Journal, LostError, Partial, read_journal
from shardcache.tiers import Directories
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

__all__ = ["Worker", "evict_outdated", "unlike"]

logger = logging.getLogger(__name__)

#: Downloads per node that ignore the lock of a stale holder, which must not cause a storm.
_PRIVATE = 2
#: Downloads per node of shards that no reader needs yet: enough to keep a fast link busy.
_AHEAD = 16
#: Assumed bytes of a shard of unknown size.
_USUAL_SIZE = 64 << 20
#: Headers that a download reads if an archive may have an end marker amid its members: some 20 ms.
_HEADERS = 2000
#: How often a shard is fetched again after a failure of each kind. An object that changes more
#: often is still being written. Where locks do not work, an entry or a partial may vanish.
_CHANGED, _MISMATCHED, _LOST = 3, 1, 4
#: Seconds between the first two polls of a wait, and the longest time between two: the download may
#: be about to end, but many processes may wait for long, and each poll opens two files.
_FIRST_POLL, _LAST_POLL = 0.02, 0.25
#: Seconds between two log records about a wait.
_ANNOUNCE_EVERY = 10.0
#: Seconds after which `shardcache top` shows a wait.
_NOTE_AFTER = 0.5
_DAMAGED = "%s: the copy in %s is damaged or was replaced, and is not used"

_Lock: TypeAlias = KeyLock | KeyLease


class _UpstreamError(Exception):
    """An upstream failed, or its copy is damaged. The next source continues at the same byte."""


@dataclass(eq=False, repr=False)
class Worker:
    """The attempts to fetch a shard, and what the next one does differently after a failure.

    failure                        the next attempt                            at most
    the object changed             begins again                                3 times
    the bytes do not match         begins again                                once
    an upstream failed             uses the next upstream, or the origin       once each
    the partial or entry vanished  begins again                                4 times
    the disk is full               evicts first, or uses the last tier only    once
    the directory vanished         uses the directories that are made again    once
    """

    _resources: Resources
    _download: Download
    _directories: Directories = field(init=False)  # of the current attempt
    _is_for_last_tier: bool = False  # because the disk was full
    _counts: Counter[type[BaseException]] = field(default_factory=Counter)
    _sources: Iterator[Origin] | None = None  # after the current one
    _source: Origin = field(init=False)  # an upstream, or the origin
    _space: Space | None = None  # in which room was reserved last
    _earlier: frozenset[str] = frozenset()  # versions on disk before the attempt's first request

    def run(self, prepare: Callable[[], Directories]) -> Opened | None:
        """Return the entry, or None if a download ahead gave way to another process or to readers.

        ``prepare`` returns the directories for an attempt. Raises the errors of `Cache.open` with
        ``strict``, and FetchCancelledError.
        """
        while True:
            self._directories = prepare()
            try:
                return self._attempt()
            except Exception as exn:
                if not self._recover(exn):
                    raise

    def _recover(self, exn: Exception) -> bool:
        """Prepare the next attempt. Return False if ``exn`` is final; raise what it means."""
        shard, directories = self._download.shard, self._directories
        self._counts[type(exn)] += 1
        count = self._counts[type(exn)]
        if isinstance(exn, _UpstreamError):
            assert self._sources is not None
            self._source = next(self._sources, self._source)  # at last the origin
        elif isinstance(exn, VersionChangedError):
            if count > _CHANGED:
                raise TransferError(
                    f"{shard} changed {count} times while it was downloaded. Wait until the "
                    "dataset is written, then try again. If nothing writes it, the servers behind "
                    "its address state different ETags.",
                    url=str(shard),
                ) from None
            logger.warning("%s changed while it was downloaded; starting over", shard)
        elif isinstance(exn, MismatchError):
            if count > _MISMATCHED:
                raise IntegrityError(
                    f"{shard}: the origin states {exn.checksum.algorithm} {exn.checksum.value}, "
                    f"but the bytes it sent twice have {exn.found}. The object or the path to it "
                    "is damaged; upload it again.",
                    url=str(shard),
                ) from None
            logger.warning("%s arrived damaged; downloading it again", shard)
        elif isinstance(exn, LostError):
            if count > _LOST:
                # A fault of the cache and not of the origin, so the shard can still be streamed.
                raise OSError(
                    errno.EBUSY,
                    f"the downloaded shard vanished, {count} times in a row. Either locks do not "
                    "work in this directory, or another program empties it; stop that program, or "
                    "use another directory",
                    str(directories.layout.base),
                )
            self._resources.notices.warn("lost", "%s: %s; starting over", shard, exn)
        elif isinstance(exn, FileNotFoundError) and is_local_error(exn) and count == 1:
            logger.info("%s: the disk was unmounted or emptied (%s)", shard, exn)
        elif is_local_error(exn) and exn.errno in FULL and not self._is_for_last_tier:
            # The failed attempt has removed its partial and released the lock.
            logger.info("%s: the disk is full (%s); making room", shard, exn)
            self._is_for_last_tier = True
            if (response := self._download.take_response()) is not None:
                response.close()
            last = directories.tiers[-1]
            if self._space in (None, last.space):  # otherwise the last tier may have room
                last.space.make_room(str(shard), self._download.size or 0)
        else:
            return False
        return True

    def _attempt(self) -> Opened | None:
        directories, download = self._directories, self._download
        shard = download.shard
        lock: _Lock | None
        with contextlib.ExitStack() as stack:
            if download.is_ahead:
                is_crowded = self._resources.connections.crowded
                slot = None if is_crowded else directories.slot("ahead", _AHEAD)
                if slot is not None:
                    stack.callback(slot.release)
                elif download.give_way():
                    return None
            lock = directories.key_lock(shard.key)
            stack.callback(directories.release, lock)
            wait: _Wait | None = None
            while not lock.try_acquire(directories.holder()):
                if download.give_way():
                    return None
                if wait is None:
                    wait = _Wait(download, directories, self._resources.config)
                    stack.callback(wait.close)
                if wait.is_stale and (slot := directories.slot("private", _PRIVATE)):
                    stack.callback(slot.release)
                    logger.warning("%s: %s; downloading it here, too", shard, wait.describe())
                    lock = None
                    break
                wait.pause()
                if (opened := directories.lookup(shard, download.outdated)) is not None:
                    return download.obtained(opened, "coalesced")
            if wait is not None:
                wait.close()
            self._earlier = frozenset(path.name for path in directories.versions(shard.key))
            opened = directories.lookup(shard, download.outdated, condemn=lock is not None)
            if opened is not None:
                return download.obtained(opened, "coalesced")
            if (opened := self._link()) is not None:
                return download.obtained(opened, "linked")
            if download.source is not None:
                entry = self._import(download.source)
            else:
                entry = self._download_entry(lock)
            if download.outdated:
                version = entry.name.partition("-")[0]
                if version in download.outdated:
                    text = "%s: the origin states another version than it sends; the old one stays"
                    logger.warning(text, shard)
                evict_outdated(directories, shard.key, download.outdated - {version})
            if (opened := directories.lookup(shard)) is not None:
                return opened if download.source is None else download.obtained(opened, "imported")
            if is_directory(entry):  # the disk cannot read it, and a new download would not help
                raise OSError(errno.EIO, "the stored shard cannot be read", str(entry))
            raise LostError(f"{entry.name} vanished after it was published")

    def _download_entry(self, lock: _Lock | None) -> Path:
        """Download the shard; return its published entry. ``lock`` is None if it is not held."""
        shard, download, resources = self._download.shard, self._download, self._resources
        directories = self._directories
        if self._sources is None:
            sources = resources.origins.sources(shard, download.listed)
            # Only the origin has a new version.
            self._sources = iter([resources.origins.of(shard)]) if download.outdated else sources
            self._source = next(self._sources)
        source = self._source
        partial = None if lock is None else self._resume(lock)
        digest = source.digest or ""
        if partial is not None and partial.metadata.digest != digest:
            # The bytes of the upstream could not be proven together with those of the partial.
            source = resources.origins.of(shard)
        # An upstream has one attempt: the next upstream, or the origin, continues at the same byte.
        record = None if lock is None else directories.layout.holder(shard.key)
        retries = resources.policy.started(str(shard), 1 if source.upstream else None, record)
        may_not_fit = partial is None and self._may_not_fit()
        transfer = Transfer(resources, download, retries, source, may_not_fit)
        try:
            with resources.connections.hold(download.check):
                download.check()
                if partial is None:
                    info = retries.call(transfer.begin, sleep=download.sleep)
                    resources.learn_size(shard, info.size)
                    download.check()
                    try:
                        if not (transfer.is_proven or info.checksum):
                            raise unproven(shard)
                        partial = self._begin(info, digest=digest)
                    except (UnprovenError, os_error()):  # a reader streams this response
                        if not source.upstream and (response := transfer.take_first()) is not None:
                            download.keep(response)
                        raise
                    size = info.size
                    # A partial of one block has no journal, so no process could follow it.
                    if lock is not None and (size is None or size > BLOCK):
                        lock.update(directories.holder()._replace(partial=partial.path.name))
                transfer.receive(partial)
            metadata = transfer.finish()
            if partial.metadata.digest not in ("", metadata.digest):
                partial.discard()
                logger.warning(_DAMAGED, shard, source.upstream or "an upstream")
                raise _UpstreamError
            most = _HEADERS if transfer.may_end_early else 0
            return self._publish(partial, metadata, proven=transfer.is_proven, headers=most)
        except BaseException as exn:
            download.retried(retries.retries)  # also those of the first request
            transfer.abandon(exn, partial)
            if not source.upstream or isinstance(exn, (FetchCancelledError, CacheFullError)):
                raise
            if isinstance(exn, (VersionChangedError, MismatchError, IntegrityError)):
                logger.warning(_DAMAGED, shard, source.upstream)
            elif isinstance(exn, ShardCacheError):
                source.failed(exn)
            else:
                raise
            raise _UpstreamError from exn

    def _import(self, source: Path) -> Path:
        """Publish a file of this machine as the shard, if it has the bytes of the object."""
        shard, resources, download = self._download.shard, self._resources, self._download
        origin, retries = resources.origins.of(shard), resources.policy.started(str(shard))
        info = retries.call(lambda: origin.stat(shard), sleep=download.sleep)
        if (size := source.stat().st_size) != info.size:
            raise unlike(shard, source, info)
        partial = self._begin(info, None if self._earlier else source)  # a link keeps its time
        try:
            if partial.linked is None:
                with open_file(source) as file:
                    while os.sendfile(partial.fd, file.fileno(), None, size):
                        download.check()
            if (checked := identify(partial.fd, info)) is None:
                raise unlike(shard, source, info)
            digest = file_digest(partial.fd)
            metadata = partial.metadata._replace(digest=digest, checked=checked)
            entry = self._publish(partial, metadata, proven=True)
        except BaseException:
            partial.discard()
            raise
        resources.counters.add({"bytes_stored": size})
        return entry

    def _link(self) -> Opened | None:
        """Hard-link the newest entry of the sibling namespaces, or open it where it is, if any."""
        download, directories = self._download, self._directories
        shard, outdated = download.shard, download.outdated
        siblings = [sibling for tier in directories.tiers for sibling in tier.stores()[1:]]
        other = opened = None
        with contextlib.suppress(DamagedError):
            other = open_first(siblings, shard.key, shard.basename, outdated)
        if other is None:
            return None
        if is_marked(other.directory, other.status, OUTDATED):
            other.close()
            return None
        tier = next(tier for tier in directories.tiers if tier.owns(other.directory))
        try:
            with tier.space.reserved(shard, 0, tier.space.policy):
                if tier.store.link(other, other.entry.metadata(), shard.basename):
                    opened = directories.lookup(shard, outdated)
        except (DamagedError, os_error()) as exn:  # full or read-only, or it was evicted
            logger.info("%s: not linked, but read where it is: %s", shard, exn)
        if opened is None:
            return other
        other.close()
        return opened

    def _may_not_fit(self) -> bool:
        """Return whether the shard may find no room; CacheFullError if it certainly has none."""
        size = self._resources.likely_size(self._download) or _USUAL_SIZE
        tiers = self._directories.tiers
        refusals = [tier.space.refuses(str(self._download.shard), size) for tier in tiers]
        if None in refusals:
            return False
        if self._download.listed is not None and refusals[-1] is not None:
            raise refusals[-1]
        return True

    def _resume(self, lock: _Lock) -> Partial | None:
        """Take over the partial of a killed holder of the lock; return None if there is none."""
        shard, name = self._download.shard, lock.partial or ""
        # The name was read from a file that another program may have damaged, so it is checked.
        parsed = parse_partial_name(name)
        if parsed is None or parsed[0] != shard.key:
            return None
        for tier in self._directories.tiers:
            layout = tier.store.layout
            partial = Partial.claim(layout, layout.partial / name, shard.basename)
            if partial is None:
                continue
            # At once, because all that follows takes time, and the process may end in it.
            lock.update(self._directories.holder()._replace(partial=partial.path.name))
            # Other shards may have taken the room that the dead process had reserved. The claimed
            # partial counts with its final size.
            try:
                partial.prove()
                logger.info("%s: resuming at %d bytes", shard, partial.written)
                with tier.space.reserved(shard, None, tier.space.policy):
                    return partial
            except BaseException as exn:
                (partial.discard if is_local_error(exn) else partial.close)()
                raise
        return None

    def _begin(self, info: ObjectInfo, source: Path | None = None, digest: str = "") -> Partial:
        """Create a partial, of ``source`` if it can be linked, in a tier (see docs/space.md).

        The bytes must have the ``digest``, if an upstream states it.
        """
        shard, tiers = self._download.shard, self._directories.tiers
        facts = str(shard), shard.key, info, info.size or 0
        now = clock.time(), boot_id()  # replaced at the end, as are digest and checksum
        metadata = Metadata(*facts, digest, None, *now, __version__, shard.endpoint)
        choices = [(tiers[-1], tiers[-1].space.policy)]
        # The last tier usually has the most room.
        if len(tiers) > 1 and not self._is_for_last_tier and info.size is not None:
            unused = [(tier, Evict.UNUSED) for tier in tiers[:-1]]
            choices = [*((tier, Evict.NONE) for tier in tiers), *unused, *choices]
        while True:
            tier, evict = choices.pop(0)
            try:
                with tier.space.reserved(shard, info.size, evict):
                    self._space = tier.space
                    return Partial.create(tier.store.layout, metadata, shard.basename, source)
            except os_error() as exn:  # CacheFullError is a subclass
                if not choices:
                    raise
                logger.debug("%s: not into %s: %s", shard, tier.store.layout.base, exn)

    def _publish(
        self, partial: Partial, metadata: Metadata, *, proven: bool, headers: int = _HEADERS
    ) -> Path:
        """Check a received shard, publish it, and return its entry."""
        shard, config = self._download.shard, self._resources.config
        check_archive(partial.fd, shard.basename, str(shard))
        if problem := archive_problem(partial.fd, shard.basename, metadata.size, headers):
            self._resources.notices.warn(f"{shard.key} {problem}", MALFORMED, shard, problem)
        if not (proven or metadata.checked):
            raise unproven(shard)
        if config.validate is not None:
            try:
                config.validate(partial.data)
            except Exception as exn:  # the hook may raise any exception to refuse the shard
                raise IntegrityError(
                    f"{shard} was refused by the validate hook: {type(exn).__name__}: {exn}. "
                    "Look at the object, or at the hook.",
                    url=str(shard),
                ) from exn
        tier = next(t for t in self._directories.tiers if t.owns(str(partial.path)))
        is_unknown = metadata.info.size is None  # so the budget was not checked before
        if is_unknown and (refusal := tier.space.refuses(str(shard), metadata.size)):
            raise refusal
        # If this process is stopped from here on, a version that another process publishes has a
        # later time, and is the one that is read.
        others = self._directories.versions(shard.key)
        own = tier.store.layout.entry(shard.key, metadata.info.version, metadata.size)
        if came := [other for other in others if other.name not in (own.name, *self._earlier)]:
            # Either may be the newer version, but a process that has read the published one must
            # not read an older one next.
            logger.info("%s: %s came before %s, which is dropped", shard, came[0].name, own.name)
            partial.discard()
            return came[0]
        entry = tier.store.publish(partial, metadata, others, sync=config.fsync == "fsync")
        partial.close()
        return entry


def unproven(shard: ShardURL) -> UnprovenError:
    """Return the error for a response that does not prove that it is complete."""
    text = "the response has no length and ends with the connection, so it may be incomplete"
    return UnprovenError(f"{shard}: {text}. Let the server send a Content-Length.", url=str(shard))


def unlike(shard: ShardURL, source: Path, info: ObjectInfo) -> IntegrityError:
    """Return the error for a file that is not shown to be the object."""
    return IntegrityError(
        f"{shard}: {source} ({source.stat().st_size} bytes) is not imported: it has no checksum or "
        f"MD5 that the origin states for the object ({info.size} bytes). Download the shard.",
        url=str(shard),
    )


def evict_outdated(directories: Directories, key: str, outdated: frozenset[str]) -> None:
    """Evict outdated versions. Those still being read are marked, and later evicted first.

    Other ranks and jobs keep theirs, marked so that they are not linked.
    """
    for tier in directories.tiers:
        found = [(s, e) for s in tier.stores() for e in s.entries_of(key) if e.version in outdated]
        for store, entry in found:
            if store is not tier.store:
                entry.mark(OUTDATED)
            elif store.evict(entry):
                tier.space.forget_refusal()
            elif not entry.mark(REPLACED):
                text = "%s was replaced, is in use and cannot be marked: it may still be read"
                directories.notices.warn("replaced", text, entry.path)


@dataclass(eq=False, repr=False)
class _Wait:
    """A wait for the holder of the key's lock, which downloads the shard."""

    _download: Download
    _directories: Directories
    _config: Config

    def __post_init__(self) -> None:
        self._shard = self._download.shard
        self._poll = _FIRST_POLL
        self._started = self._grew = self._announced = clock.monotonic()
        self._own = self._directories.holder()._replace(url=str(self._shard))
        self._note: Session | None = None
        self._found = self._read_holder()

    @property
    def is_stale(self) -> bool:
        """Whether the holder has shown no progress for ``stale_after`` seconds."""
        return clock.monotonic() - self._grew >= self._config.stale_after

    def pause(self) -> None:
        """Sleep until the next poll. Raises LockTimeoutError after ``lock_timeout`` seconds."""
        self._download.sleep(self._poll * clock.randomness.uniform(0.5, 1.0))
        self._poll = min(self._poll * 1.5, _LAST_POLL)
        now, seen = clock.monotonic(), self._read_holder()
        if seen != self._found:
            self._grew, self._found = now, seen
        waited = now - self._started
        if waited >= self._config.lock_timeout:
            raise LockTimeoutError(
                f"{self._shard} was not in the cache after {format_duration(waited)}: "
                f"{self.describe()}. Look at that process, or raise lock_timeout.",
                url=str(self._shard),
                holder=seen[0],
                waited=waited,
            )
        if now - self._announced >= _ANNOUNCE_EVERY:
            self._announced = now
            self._announce(waited)
        if waited >= _NOTE_AFTER and self._note is None:
            waits = self._shard.key, self._own
            self._note = Session(self._directories.layout, self._own.started, waits)

    def close(self) -> None:
        """Remove the note about the wait."""
        if self._note is not None:
            self._note.close()

    def _read_holder(self) -> tuple[Holder | None, Journal | None, int]:
        """Return the record of the lock's holder, its partial's journal, and the record's time."""
        path, touched = self._directories.layout.holder(self._shard.key), 0
        with ignoring(OSError):
            touched = path.lstat().st_mtime_ns
        holder = read_holder(path)
        name = holder.partial if holder else None
        # Another program may have damaged the record.
        if name is None or parse_partial_name(name) is None:
            return holder, None, touched
        paths = [tier.store.layout.partial / name for tier in self._directories.tiers]
        partial = next((path for path in paths[:-1] if is_directory(path)), paths[-1])
        # The kernel of another node may show the journal before the bytes that it describes.
        if self._directories.layout.grace is None:
            self._download.waiting(partial)
        return holder, read_journal(partial), touched

    def _announce(self, waited: float) -> None:
        """Log the wait. docs/observing.md describes the fields."""
        holder, progress, _ = self._found
        facts = {
            "event": "waiting",
            "shard": str(self._shard),
            "seconds": waited,
            "holder_pid": holder.pid if holder else None,
            "holder_host": holder.host if holder else None,
            "holder_rank": holder.rank if holder else None,
            "written": progress.written if progress else None,
            "size": progress.metadata.info.size if progress else None,
        }
        text = "%s: waiting for %s, %s"
        logger.warning(text, self._shard, format_duration(waited), self.describe(), extra=facts)

    def describe(self) -> str:
        """Describe the holder of the lock, how long it has held it, and its progress."""
        holder, progress, _ = self._found
        if holder is None:
            return "its lock is held by a process that left no record"
        age = format_duration(max(0.0, clock.time() - holder.started))
        text = f"{holder} has been downloading it for {age}"
        if progress is not None and (size := progress.metadata.info.size):
            text += f", {min(1.0, progress.written / size):.0%} of {format_bytes(size)} done"
        still = clock.monotonic() - self._grew
        if still >= _ANNOUNCE_EVERY:
            text += f", no progress for {format_duration(still)}"
        return text
