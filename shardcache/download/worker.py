"""Fetch a shard that is not cached, and open its entry; one download per node.

docs/design.md shows the steps; each of them gives the right bytes without locks.

A process that waits for the holder of the lock never takes the lock away.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
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
from shardcache.config import __version__
from shardcache.download.download import TEMPORARY, Download
from shardcache.download.transfer import CopyError, Resources, Transfer
from shardcache.errors import IntegrityError, LockTimeoutError, ShardCacheError, TransferError
from shardcache.faults import FULL, is_disk_fault, is_local_error, system_error
from shardcache.files import is_directory, modified, open_file
from shardcache.layout import OUTDATED, REPLACED, parse_partial_name
from shardcache.locks.keys import Flock, Holder, KeyLease, read_holder
from shardcache.origins.base import ObjectInfo, Origin, VersionChangedError
from shardcache.origins.retry import Retries
from shardcache.space.eviction import Policy
from shardcache.store.digest import BLOCK, MismatchError, file_digest, identify
from shardcache.store.directory import DamagedError, Metadata
from shardcache.store.entry import OpenEntry, is_marked, open_first
from shardcache.store.partial import Journal, LostError, Partial, read_journal
from shardcache.threads import lazy
from shardcache.tiers import Directories, Tier
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)

#: How many processes of a node may download past a stale holder at once; more would be a storm.
_PRIVATE = 2
#: Downloads per node of shards that no reader needs yet: enough to keep a fast link busy.
_AHEAD = 16
#: Assumed bytes of a shard of unknown size.
_USUAL_SIZE = 64 << 20
#: How often a shard is fetched again after a failure of each kind. An object that changes more
#: often is still being written. Where locks do not work, an entry or a partial may vanish.
_CHANGED, _MISMATCHED, _LOST = 3, 1, 4
#: Seconds between the first two polls of a wait, and the longest time between two: the download may
#: be about to end, but many processes may wait for long, and each poll opens two files.
_FIRST_POLL, _LAST_POLL = 0.02, 0.25
#: Seconds between two log records about a wait.
_ANNOUNCE_EVERY = 10.0

_Lock: TypeAlias = Flock | KeyLease
#: The record of the holder of a lock, the journal of its partial, and the time of the record.
_Seen: TypeAlias = tuple[Holder | None, Journal | None, float]
#: Errors if the bytes of a copy are not those of the object.
_OTHER_BYTES = VersionChangedError, MismatchError, IntegrityError


@dataclass(eq=False, repr=False)
class Worker:
    """The attempts to fetch a shard, and what the next one does differently after a failure.

    failure                        the next attempt                            at most
    the object changed             begins again                                3 times
    the bytes do not match         begins again                                once
    an upstream or origin failed   continues from the next source, if any      once each
    the partial or entry vanished  begins again                                4 times
    a faster tier failed, is full  uses the last tier only                     once
    the last tier is full          evicts first                                once
    the directory vanished         uses the directories that are made again    once
    """

    _resources: Resources
    _download: Download
    _directories: Directories = field(init=False)  # of the current attempt
    _is_for_last_tier: bool = False  # because a faster one failed or was full
    _has_made_room: bool = False  # in the last tier, because it was full
    _counts: Counter[tuple[str, type]] = field(default_factory=Counter)  # by upstream and error
    _sources: Iterator[Origin] = field(init=False)  # after the current one
    _source: Origin | None = None  # the current one: an upstream, or at last the origin
    _tier: Tier | None = None  # in which the last partial is, or was
    _discards_partial: bool = False  # whether the next source cannot continue the partial
    _earlier: frozenset[str] = frozenset()  # versions on disk before the attempt's first request

    @lazy
    def _retries(self) -> Retries:
        """Those of all attempts; the deadline begins when the first one waits for a connection."""
        return self._resources.retry_limits.started(str(self._download.shard))

    def run(self, prepare: Callable[[], Directories]) -> OpenEntry:
        """Return the entry. ``prepare`` returns the directories for an attempt.

        Raises the errors of `Cache.open` with ``strict``, and FetchCancelledError.
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
        shard, directories, source = self._download.shard, self._directories, self._source
        upstream = "" if source is None else source.upstream
        self._counts[upstream, type(exn)] += 1
        count = self._counts[upstream, type(exn)]
        if isinstance(exn, _OTHER_BYTES if upstream else CopyError):
            text = "%s: the copy in %s is damaged or was replaced, and is not used"
            logger.warning(text, shard, upstream or "an upstream")
            self._source = next(self._sources, source)
        elif (
            source is not None
            and isinstance(exn, ShardCacheError)
            and type(exn) not in TEMPORARY
            and (other := next(self._sources, None))
        ):
            source.ended(exn)
            self._source, self._discards_partial = other, not upstream
        elif isinstance(exn, VersionChangedError):
            if count > _CHANGED:
                raise TransferError(
                    f"{shard} changed {count} times while it was downloaded. Wait until the "
                    "dataset is written, then try again. If nothing writes it, the servers behind "
                    "its address state different ETags.",
                    url=str(shard),
                ) from None
            logger.warning("%s changed while it was downloaded; starting over", shard)
            self._source = next(self._sources, source)  # one that a resumed partial did not fit
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
        else:
            return is_local_error(exn) and self._try_elsewhere(exn)
        return True

    def _try_elsewhere(self, exn: OSError) -> bool:
        """Leave a faster tier that failed or is full, or evict entries of the last one; once each.

        The failed attempt has removed its partial and released the lock.
        """
        directories, is_full, tier = self._directories, exn.errno in FULL, self._tier
        last = directories.tiers[-1]
        if exn.filename is not None and not is_full:
            tier = directories.faster_tier(str(exn.filename))
        is_last = tier is None or tier is last
        is_over = self._has_made_room if is_last else self._is_for_last_tier
        if is_over or not (is_full or (is_disk_fault(exn) and not is_last)):
            return False
        if (response := self._download.take_response()) is not None:
            response.close()
        if is_last:
            self._has_made_room = True
            logger.info("%s: the disk is full (%s); making room", self._download.shard, exn)
            last.space.make_room(str(self._download.shard), self._download.size or 0)
            return True
        self._is_for_last_tier = True
        if tier is not None and not is_full:
            tier.failed(exn)
        return True

    def _attempt(self) -> OpenEntry:
        directories, download = self._directories, self._download
        shard = download.shard
        lock: _Lock | None
        with contextlib.ExitStack() as stack:
            if download.is_ahead:
                is_crowded = self._resources.connections.crowded
                slot = None if is_crowded else directories.slot("ahead", _AHEAD)
                if slot is None:
                    download.give_way()
                else:
                    stack.callback(slot.release)
            lock = directories.key_lock(shard.key)
            stack.callback(directories.release, lock)
            if not lock.try_acquire(directories.holder()):
                found = self._wait(lock)
                if isinstance(found, OpenEntry):
                    return download.note_outcome(found, "coalesced")
                if found is not None:
                    stack.callback(found.release)
                    lock = None
            self._earlier = frozenset(path.name for path in directories.versions(shard.key))
            opened = None
            if self._earlier:
                opened = directories.lookup(shard, download.outdated, condemn=lock is not None)
            if opened is not None:
                return download.note_outcome(opened, "coalesced")
            if (opened := self._link()) is not None:
                return download.note_outcome(opened, "linked")
            file = download.file
            entry = self._fetch(lock) if file is None else self._import(file)
            if download.outdated:
                version = entry.name.partition("-")[0]
                if version in download.outdated:
                    text = "%s: the origin states another version than it sends; the old one stays"
                    logger.warning(text, shard)
                evict_outdated(directories, shard.key, download.outdated - {version})
            if (opened := directories.lookup(shard)) is not None:
                if file is not None:
                    download.note_outcome(opened, "imported")
                return opened
            if is_directory(entry):  # the disk cannot read it, and a new download would not help
                raise OSError(errno.EIO, "the stored shard cannot be read", str(entry))
            raise LostError(f"{entry.name} vanished after it was published")

    def _wait(self, lock: _Lock) -> OpenEntry | Flock | None:
        """Wait for the holder of the lock, which downloads the shard, and log the wait.

        Returns the entry, or None once this process has the lock; if the holder has shown no
        progress for ``stale_after`` seconds, a slot for a download without the lock. Raises
        LockTimeoutError after ``lock_timeout`` seconds.
        """
        download, directories, config = self._download, self._directories, self._resources.config
        start = now = grew = announced = clock.monotonic()
        download.note_waiting(None)
        shard, poll, seen = download.shard, _FIRST_POLL, self._read_holder()
        while True:
            download.give_way()
            is_stale = now - grew >= config.stale_after
            if is_stale and (slot := directories.slot("private", _PRIVATE)):
                text = "%s: %s; downloading it here, too"
                logger.warning(text, shard, _describe(seen, now - grew))
                return slot
            download.sleep(poll * clock.randomness.uniform(0.5, 1.0))
            poll = min(poll * 1.5, _LAST_POLL)
            before, seen = seen, self._read_holder()
            now = clock.monotonic()
            grew = grew if seen == before else now
            waited, (holder, journal, _) = now - start, seen
            if (opened := directories.lookup(shard, download.outdated)) is not None:
                return opened
            if waited >= config.lock_timeout:
                raise LockTimeoutError(
                    f"{shard} was not in the cache after {format_duration(waited)}: "
                    f"{_describe(seen, now - grew)}. Look at that process, or raise "
                    "lock_timeout.",
                    url=str(shard),
                    holder=holder,
                    waited=waited,
                )
            if now - announced >= _ANNOUNCE_EVERY:
                announced = now
                facts = {  # docs/observing.md describes them
                    "event": "waiting",
                    "shard": str(shard),
                    "seconds": waited,
                    "holder_pid": holder.pid if holder else None,
                    "holder_host": holder.host if holder else None,
                    "holder_rank": holder.rank if holder else None,
                    "written": journal.written if journal else None,
                    "size": journal.metadata.info.size if journal else None,
                }
                values = shard, format_duration(waited), _describe(seen, now - grew)
                logger.warning("%s: waiting for %s, %s", *values, extra=facts)
            if lock.try_acquire(directories.holder()):
                return None

    def _read_holder(self) -> _Seen:
        """Read what the holder of the lock shows of itself, and let readers follow its partial."""
        layout = self._directories.layout
        path = layout.holder(self._download.shard.key)
        holder, touched = read_holder(path), modified(path)
        name = holder.partial if holder else None
        # Another program may have damaged the record.
        if name is None or parse_partial_name(name) is None:
            return holder, None, touched
        paths = [tier.store.layout.partials / name for tier in self._directories.tiers]
        partial = next((path for path in paths[:-1] if is_directory(path)), paths[-1])
        # The kernel of another node may show the journal before the bytes that it describes.
        if layout.grace is None:
            self._download.note_waiting(partial)
        return holder, read_journal(partial), touched

    def _fetch(self, lock: _Lock | None) -> Path:
        """Download the shard; return its published entry. ``lock`` is None if it is not held."""
        shard, download, resources = self._download.shard, self._download, self._resources
        directories = self._directories
        if self._source is None:
            sources = resources.origins.sources(shard, download.listed)
            # Only the origin has a new version.
            self._sources = iter([resources.origins.of(shard)]) if download.outdated else sources
            self._source = next(self._sources)
        partial = None if lock is None else self._resume(lock)
        if partial is not None and self._discards_partial:
            partial.discard()
            partial, self._discards_partial = None, False
        elif partial is not None and self._source.upstream:
            begun, copy = partial.metadata, self._source.stated
            is_other = copy is not None and copy.version != begun.info.version
            # The bytes of the upstream could not be proven together with those of the partial.
            if is_other or begun.digest != (self._source.digest or ""):
                self._sources = itertools.chain([self._source], self._sources)
                self._source = resources.origins.of(shard)
        source = self._source
        whole = partial is None and self._is_best_whole()
        record = None if lock is None else directories.layout.holder(shard.key)
        # An upstream has one attempt: the next upstream, or the origin, continues at the same byte.
        limits, once = resources.retry_limits, bool(source.upstream)
        self._retries.use(limits, once=once, record=record)
        transfer = Transfer(resources, download, source, self._retries)
        try:
            with resources.connections.hold(download.check):
                download.check()
                if partial is None:
                    info = transfer.begin(whole=whole)
                    partial = self._reserve(info, digest=source.digest or "")
                    # A partial of one block has no journal, so no process could follow it.
                    if lock is not None and (info.size is None or info.size > BLOCK):
                        lock.update(directories.holder()._replace(partial=partial.path.name))
                transfer.receive(partial)
            metadata = transfer.finish()
            source.ended()
            return self._publish(partial, metadata)
        except BaseException as exn:
            transfer.abandon(exn, partial)
            raise

    def _import(self, file: Path) -> Path:
        """Publish a file of this machine as the shard, if it has the bytes of the object."""
        shard, resources, download = self._download.shard, self._resources, self._download
        origin, retries = resources.origins.of(shard), resources.retry_limits.started(str(shard))
        info = retries.call(lambda: origin.stat(shard), sleep=download.sleep)
        if (size := file.stat().st_size) != info.size:
            raise refused_file(shard, file, info)
        partial = self._reserve(info, None if self._earlier else file)  # a link keeps its time
        try:
            if partial.user_mode is None:
                with open_file(file) as opened:
                    while os.sendfile(partial.fd, opened.fileno(), None, size):
                        download.check()
            if (checked := identify(partial.fd, info)) is None:
                raise refused_file(shard, file, info)
            digest = file_digest(partial.fd)
            metadata = partial.metadata._replace(digest=digest, checked=checked)
            download.check()
            entry = self._publish(partial, metadata)
        except BaseException:
            partial.discard()
            raise
        resources.counters.add({"bytes_stored": size})
        return entry

    def _link(self) -> OpenEntry | None:
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
        tier.store.touch(other.directory, clock.time())  # with leases, it is in use only then
        try:
            with tier.space.reserved(shard, 0, tier.space.policy):
                tier.store.link(other, other.entry.metadata(), shard.basename)
                opened = directories.lookup(shard, outdated)
        except (DamagedError, system_error()) as exn:  # such as a full disk, or it was evicted
            logger.info("%s: not linked, but read where it is: %s", shard, exn)
        if opened is None:
            return other
        other.close()
        return opened

    def _is_best_whole(self) -> bool:
        """Return whether the first request asks for the whole shard.

        It does if the shard is small, or if no tier may have room: then a reader streams the
        response. Raises CacheFullError if a listed size finds no room in any tier.
        """
        download, resources = self._download, self._resources
        likely, tiers = resources.likely_size(download), self._directories.tiers
        shard, size = str(download.shard), likely or _USUAL_SIZE
        refusals = [tier.space.refuses(shard, size) for tier in tiers]
        if None not in refusals and download.listed is not None and refusals[-1] is not None:
            raise refusals[-1]
        return None not in refusals or 0 < (likely or 0) <= resources.connections.part

    def _resume(self, lock: _Lock) -> Partial | None:
        """Take over the partial of a killed holder of the lock; return None if there is none."""
        shard, name = self._download.shard, lock.partial_name or ""
        # The name was read from a file that another program may have damaged, so it is checked.
        parsed = parse_partial_name(name)
        if parsed is None or parsed[0] != shard.key:
            return None
        for tier in self._directories.tiers:
            layout = tier.store.layout
            partial = Partial.claim(layout, layout.partials / name, shard.basename)
            if partial is None:
                continue
            self._tier = tier
            # At once, because all that follows takes time, and the process may end in it.
            lock.update(self._directories.holder()._replace(partial=partial.path.name))
            # Other shards may have taken the room that the dead process had reserved. The claimed
            # partial counts with its final size.
            try:
                partial.prove()
                logger.info("%s: resuming at %d bytes", shard, partial.written)
                size, policy = partial.metadata.info.size, tier.space.policy
                with tier.space.reserved(shard, size, policy, exists=True):
                    return partial
            except BaseException as exn:
                # A faster tier is full, so start again: another tier may have room.
                is_last = tier is self._directories.tiers[-1]
                is_refused = getattr(exn, "errno", None) in FULL and not is_last
                (partial.discard if is_refused or is_local_error(exn) else partial.close)()
                if not is_refused:
                    raise
        return None

    def _reserve(self, info: ObjectInfo, file: Path | None = None, digest: str = "") -> Partial:
        """Reserve room in a tier (see docs/space.md), and create a partial, a link to ``file`` if
        possible.

        The bytes must have the ``digest``, if an upstream states it.
        """
        shard, tiers = self._download.shard, self._directories.tiers
        facts = str(shard), shard.key, info, info.size or 0
        now = clock.time(), boot_id()  # replaced at the end, as are digest and checksum
        metadata = Metadata(*facts, digest, None, *now, __version__, shard.endpoint)
        choices: list[tuple[Tier, Policy | None]] = [(tiers[-1], tiers[-1].space.policy)]
        # The last tier usually has the most room.
        if len(tiers) > 1 and not self._is_for_last_tier and info.size is not None:
            unused = [(tier, tier.space.policy._replace(keeps_used=True)) for tier in tiers[:-1]]
            choices = [*((tier, None) for tier in tiers), *unused, *choices]
        while True:
            tier, policy = choices.pop(0)
            try:
                with tier.space.reserved(shard, info.size, policy):
                    self._tier = tier
                    return Partial.create(tier.store.layout, metadata, shard.basename, file)
            except system_error() as exn:  # CacheFullError is a subclass
                if not choices:
                    raise
                logger.debug("%s: not into %s: %s", shard, tier.store.layout.base, exn)

    def _publish(self, partial: Partial, metadata: Metadata) -> Path:
        """Check the archive of a received shard, publish the shard, and return its entry."""
        shard, config = self._download.shard, self._resources.config
        check_archive(partial.fd, shard.basename, str(shard))
        if problem := archive_problem(partial.fd, shard.basename, metadata.size, is_quick=True):
            self._resources.notices.warn(f"{shard.key} {problem}", MALFORMED, shard, problem)
        if config.validate is not None:
            try:
                config.validate(partial.data)
            except Exception as exn:  # the hook may raise any exception to refuse the shard
                raise IntegrityError(
                    f"{shard} was refused by the validate hook: {type(exn).__name__}: {exn}. "
                    "Look at the object, or at the hook.",
                    url=str(shard),
                ) from exn
        assert self._tier is not None
        tier = self._tier
        is_unknown = metadata.info.size is None  # so the budget was not checked before
        if is_unknown and (refusal := tier.space.refuses(str(shard), metadata.size)):
            raise refusal
        # If this process is stopped from here on, a version that another process publishes has a
        # later time, and is the one that is read.
        others = self._directories.versions(shard.key)
        path = tier.store.layout.entry(shard.key, metadata.info.version, metadata.size)
        if came := [other for other in others if other.name not in (path.name, *self._earlier)]:
            # Either may be the newer version, but a process that has read the published one must
            # not read an older one next.
            logger.info("%s: %s came before %s, which is dropped", shard, came[0].name, path.name)
            partial.discard()
            return came[0]
        entry = tier.store.publish(partial, metadata, others, sync=config.fsync == "fsync")
        partial.close()
        return entry


def refused_file(shard: ShardURL, file: Path, info: ObjectInfo) -> IntegrityError:
    """Return the error for a file that is not shown to be the object."""
    size = file.stat().st_size
    why = "the checksum or ETag at the origin is not that of its bytes"
    if size != info.size:
        why = f"the object has {info.size} bytes"
    elif info.checksum is None and info.etag is None:
        why = "the origin states neither a checksum nor an ETag"
    text = f"{shard}: {file} ({size} bytes) is not imported: {why}. Prewarm the shard instead."
    return IntegrityError(text, url=str(shard))


def evict_outdated(directories: Directories, key: str, outdated: frozenset[str]) -> None:
    """Evict outdated versions. Those still being read are marked, and later evicted first.

    Other ranks and jobs keep theirs, marked so that they are not linked.
    """
    for tier in directories.tiers if outdated else ():
        old = [(s, e) for s in tier.stores() for e in s.entries_of(key) if e.version in outdated]
        for store, entry in old:
            if store is not tier.store:
                entry.mark(OUTDATED)
            elif store.evict(entry):
                tier.space.forget_refusal()
            elif not entry.mark(REPLACED):
                text = "%s was replaced, is in use and cannot be marked: it may still be read"
                directories.notices.warn("replaced", text, entry.path)


def _describe(seen: _Seen, still: float) -> str:
    """Describe the holder of a lock, how long it has held it, and its progress.

    ``still`` is the number of seconds without progress.
    """
    holder, journal, _ = seen
    if holder is None:
        return "its lock is held by a process that left no record"
    age = format_duration(max(0.0, clock.time() - holder.started))
    text = f"{holder} has been downloading it for {age}"
    if journal is not None and (size := journal.metadata.info.size):
        text += f", {min(1.0, journal.written / size):.0%} of {format_bytes(size)} done"
    if still >= _ANNOUNCE_EVERY:
        text += f", no progress for {format_duration(still)}"
    return text
