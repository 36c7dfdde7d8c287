"""Entries: complete shards on disk, found by opening them.

Safe with any number of processes and threads on one store at once:

* opening is the lookup: an entry that could be opened and pinned is a hit, and
  stays readable until it is closed, whatever is evicted meanwhile;
* publishing is one rename; "already there" is success;
* evicting takes the exclusive flock that a pin blocks, renames the directory
  out of sight, then deletes it;
* the data of a published entry is never modified. Its sidecar may be replaced
  by one that says when the data was last verified.

Not safe: two stores with different roots on one directory, and editing entries
by hand (deleting them is fine).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardcache.clock import boot_id
from shardcache.config import Config
from shardcache.files import Modes, sync_directory
from shardcache.layout import (
    META,
    Layout,
    is_directory,
    is_rank_name,
    list_names,
    refuse_links,
    replace_file,
)
from shardcache.locks.flock import is_file
from shardcache.locks.mounts import node_namespace
from shardcache.ranks import Ranks, safe_name
from shardcache.store.digest import file_digest
from shardcache.store.entry import (
    DamagedError,
    Entry,
    Metadata,
    Opened,
    hold,
    lacks,
    open_data,
    readable,
    scan,
    versions,
)
from shardcache.store.partial import LostError, Partial
from shardcache.store.root import check_group, check_links

__all__ = ["Entry", "Namespaces", "Opened", "Store", "Stores", "own_layout"]

logger = logging.getLogger(__name__)


#: The directories of a key come and go with its entries; not this often in a row.
_ATTEMPTS = 100
#: Of those, so many follow each other at once; the others after `_UNSEEN` seconds each. An
#: NFS client may not see for 3 to 60 s what another one made (acdirmin, acdirmax, nfs(5));
#: after 4.5 s streaming the shard is the better use of time.
_AT_ONCE = 10
_UNSEEN = 0.05
#: What a filesystem says where it cannot link, or the other entry is gone.
_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT})
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
#: Links of a directory that holds one other. Where they are not counted (btrfs, overlayfs) an
#: entry is looked at once more.
_ALONE = 3
#: Entries remembered per process, about 300 bytes each.
_REMEMBERED = 100_000


class Store:
    """The entries of one namespace.

    Args:
        layout: where.
        verify_after_boot: whether entries of another boot are hashed once
            before they are trusted (after power loss a rename may have
            survived whose data did not).
    """

    def __init__(self, layout: Layout, *, verify_after_boot: bool = True) -> None:
        self.layout = layout
        self._grace = layout.grace
        self._boot = boot_id() if verify_after_boot else ""
        # key -> (directory, data file, size). A dict's own operations are
        # atomic; a stale row costs one failed open.
        self._known: dict[str, tuple[str, str, int]] = {}

    def open(self, key: str, basename: str, outdated: Collection[str] = ()) -> Opened | None:
        """Open and pin the newest entry of ``key``; None is a miss.

        Args:
            key: the shard's.
            basename: of its data file.
            outdated: versions that the origin has replaced; their entries are left out.

        Raises:
            DamagedError: there is an entry, but it must not be used.
            OSError: the disk fails.
        """
        known = None if outdated else self._known.get(key)
        if known is not None:
            directory, path, size = known
            opened = open_data(directory, path, size, self._grace)
            if opened is not None:
                return opened
            self._known.pop(key, None)
        return self._look_for(key, basename, outdated)

    def knows(self, key: str) -> bool:
        """Whether an entry of ``key`` was there when this process last looked."""
        return key in self._known

    def shares_root(self, opened: Opened) -> bool:
        """Whether an entry is of another namespace of this root, or of this one."""
        base = self.layout.base
        node = base.parent.parent if base.parent.name == "ranks" else base
        return opened.directory.startswith(f"{node}/")

    def _look_for(self, key: str, basename: str, outdated: Collection[str]) -> Opened | None:
        for directory, size in versions(self.layout, key):
            if outdated and Entry.at(directory).version in outdated:
                continue
            path = f"{directory}/{basename}"
            opened = self._open(str(directory), path, size)
            if opened is None:
                if lacks(directory, basename.__eq__):
                    raise DamagedError("its data file is missing")
                continue
            try:
                self._trust(directory, opened.fd)
            except (DamagedError, OSError):
                opened.close()
                raise
            self._remember(key, str(directory), opened.path, size)
            return opened
        return None

    def open_again(self, path: str) -> Opened | None:
        """Open an entry's data file once more; None if it is no longer what it was.

        Raises:
            OSError: the disk fails.
        """
        directory = os.path.dirname(path)  # noqa: PTH120 - paths are strings when reading
        try:
            return self._open(directory, path, Entry.at(Path(directory)).size)
        except DamagedError:
            return None

    def _open(self, directory: str, path: str, size: int) -> Opened | None:
        return open_data(directory, path, size, self._grace)

    def publish(
        self,
        partial: Partial,
        metadata: Metadata,
        *,
        sync: bool = False,
        known: Collection[Path] | None = None,
    ) -> Path:
        """Make a finished partial visible; returns the entry's directory.

        If the same version is there already and sound, ours is dropped: it is
        identical. The partial stays locked by its writer until the caller closes it.

        Args:
            partial: complete and checked.
            metadata: its final sidecar.
            sync: put it on the disk first.
            known: entries of this shard that may be superseded: those that were there
                before the fetch. If a sound one of another version has come since, ours is
                late and is dropped, and theirs returned. Nobody can tell which of two
                versions is newer, and whoever has read theirs must not read ours next.

        Raises:
            OSError: the disk fails.
            LostError: the partial was swept or taken over.
        """
        partial.seal(metadata, sync=sync)
        entry = self.layout.entry(metadata.key, metadata.info.version, metadata.size)
        # After sealing: a process that is stopped between this look and the rename
        # publishes a directory that is older than theirs, and `open` takes the newest.
        theirs = None if known is None else self._other_than(entry, known)
        if theirs is not None:
            logger.info("%s came meanwhile; dropping %s", theirs.name, entry.name)
            shutil.rmtree(partial.path, ignore_errors=True)
            return theirs
        refuse_links(*entry.parents[:2], entry)
        taken = ours = False
        for attempt in range(_ATTEMPTS):
            try:
                partial.path.rename(entry)
                ours = True
                break
            except OSError as exn:
                if is_file(entry / partial.data.name, partial.fd):
                    break  # done, and only the answer was lost (NFS)
                if isinstance(exn, FileNotFoundError):
                    if not partial.path.exists():
                        raise LostError(f"{partial.path.name} was taken over") from exn
                    self.layout.modes.make_directory(entry.parent)
                    continue
                taken = exn.errno in _TAKEN
                if not taken:
                    raise
                aside = self._set_aside(entry, partial.data.name, "found while publishing")
                if aside or not is_directory(entry):
                    time.sleep(_UNSEEN if attempt >= _AT_ONCE else 0)
                    continue
                shutil.rmtree(partial.path, ignore_errors=True)
                break
        else:
            if taken:  # by another node, and this one's kernel remembers that it was not there
                raise OSError(errno.EBUSY, "an entry is there and cannot be seen", str(entry))
            raise LostError(f"{entry.parent} is removed faster than it can be filled")
        if sync:
            sync_directory(entry.parent)
            sync_directory(entry.parent.parent)
        if ours and _is_alone(entry):
            # What is in it was checked before it got there. Beside another version it is to be
            # looked for, since nobody can tell which of them is newer but by looking.
            self._remember(metadata.key, str(entry), f"{entry}/{partial.data.name}", metadata.size)
        else:
            self._known.pop(metadata.key, None)
        return entry

    def _remember(self, key: str, directory: str, path: str, size: int) -> None:
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = (directory, path, size)

    def _other_than(self, entry: Path, known: Collection[Path]) -> Path | None:
        """A sound entry of the same shard that is neither ``entry`` nor known."""
        for directory, size in versions(self.layout, entry.parent.name):
            if directory == entry or directory in known:
                continue
            with contextlib.suppress(DamagedError, FileNotFoundError):
                opened = self._open(str(directory), str(Entry.at(directory).data), size)
                if opened is not None:
                    opened.close()
                    return directory
        return None

    def quarantine(self, key: str, reason: str) -> int:
        """Set aside the damaged entries of ``key``; call with the key's lock held.

        Returns:
            How many were set aside.

        Raises:
            OSError: the disk fails.
        """
        self._known.pop(key, None)
        return sum(
            self._set_aside(directory, None, reason)
            for directory, _size in versions(self.layout, key)
        )

    def _trust(self, directory: Path, fd: int) -> None:
        """Check an entry that this process sees for the first time.

        Its sidecar must describe it. If it was fetched under another boot of this machine, its
        bytes must be those that were fetched: after a power failure a rename may have survived
        whose data did not.

        Args:
            directory: the entry's.
            fd: of its open data file.

        Raises:
            DamagedError: it must not be used.
            OSError: the disk fails.
        """
        with readable():
            try:
                metadata = Entry.at(directory).metadata()
            except FileNotFoundError:
                return  # evicted while we look; the open file is good
            if not self._boot or metadata.boot == self._boot:
                return
            if file_digest(fd) != metadata.digest:
                raise DamagedError("its bytes changed since they were fetched")
        try:
            trusted = replace(metadata, boot=self._boot).encode()
            modes, via = self.layout.modes, self.layout.partial
            replace_file(directory / META, trusted, modes.file, via=via)
        except OSError as exn:  # read-only or full: verify again next time
            logger.debug("cannot note that %s was verified: %s", directory.name, exn)

    def _set_aside(self, directory: Path, basename: str | None, reason: str) -> bool:
        """Set an entry aside if it is damaged, or has another data file than ``basename``.

        Call with the key's lock held, so that an entry fetched in its place is not taken for it.

        Args:
            directory: the entry's.
            basename: its data file must have this name; None for any.
            reason: why it is looked at, for the log.

        Returns:
            Whether this call set it aside.

        Raises:
            OSError: the disk fails.
        """
        entry = Entry.at(directory)
        try:
            data = entry.data
            opened = self._open(entry.directory, str(data), entry.size)
            if opened is None:
                return False  # being evicted
            with opened.file:
                if opened.stuck:
                    return False  # likewise: who evicts it must not find another in its place
                self._trust(directory, opened.fd)
            if basename in (None, data.name):
                return False
        except FileNotFoundError:
            return False
        except DamagedError as exn:
            reason = f"{reason}: {exn}"
        return self.condemn(directory, reason)

    def condemn(self, directory: Path, reason: str) -> bool:
        """Set an entry aside, sound or not: rename it into the quarantine.

        Call with the key's lock held. Whoever has the entry open reads on.

        Returns:
            Whether this call did it.

        Raises:
            OSError: the disk fails.
        """
        self._known.pop(directory.parent.name, None)
        for _ in range(_ATTEMPTS):
            try:
                directory.rename(self.layout.new_quarantined(directory))
            except FileNotFoundError:
                if not is_directory(directory):
                    return False
                self.layout.mend(self.layout.quarantine)
                continue
            logger.info("set aside a damaged entry: %s (%s)", directory.name, reason)
            return True
        return False

    def touch(self, directory: str, now: float) -> None:
        """Note a use. A cache that cannot be written keeps its old times."""
        path = f"{directory}/{META}"
        try:
            if os.lstat(path).st_nlink > 1:
                return  # somebody's file, linked here: not to be written
            try:
                os.utime(path, (now, now), follow_symlinks=False)
            except PermissionError:  # another member's: only its owner may set any time
                os.utime(path, follow_symlinks=False)
        except OSError as exn:
            logger.debug("cannot note a use of %s: %s", directory, exn)

    def entries(self) -> Iterator[Entry]:
        """Every entry, in no order; see `scan`."""
        return scan(self.layout)

    def entries_of(self, key: str) -> Iterator[Entry]:
        """Every version of one shard, newest first."""
        return (Entry.at(directory) for directory, _size in versions(self.layout, key))

    @staticmethod
    def entry_at(opened: Opened) -> Entry:
        """The entry that an open data file belongs to, in whichever namespace."""
        return Entry.at(Path(opened.directory))

    def owning(self, entry: Entry) -> Store:
        """The store of the namespace of this root that an entry is in."""
        base = entry.path.parents[3]  # objects/<aa>/<key>/<entry>
        return Store(replace(self.layout, base=base), verify_after_boot=False)

    def is_pinned(self, entry: Entry) -> bool:
        """Whether somebody reads or has pinned the entry right now.

        Raises:
            OSError: that cannot be told, for want of descriptors for instance.
        """
        try:
            with hold(entry, self.layout.grace) as free:
                return not free
        except FileNotFoundError:
            return False

    def evict(self, entry: Entry) -> bool:
        """Remove an entry unless somebody reads or has pinned it.

        Returns:
            Whether this call removed it.

        Raises:
            OSError: the filesystem is read-only or failing.
        """
        try:
            with hold(entry, self.layout.grace) as free:
                doomed = self._hide(entry) if free else None
                if doomed is None:
                    return False
                # The lock is held until the names are gone: a reader that gets its
                # pin afterwards sees a link count of zero and looks again.
                shutil.rmtree(doomed, ignore_errors=True)
        except FileNotFoundError:
            return False
        with contextlib.suppress(OSError):  # another version is there, or it is gone too
            entry.path.parent.rmdir()
        return True

    def _hide(self, entry: Entry) -> Path | None:
        for _ in range(_ATTEMPTS):
            doomed = self.layout.new_evicted(entry.key)
            try:
                entry.path.rename(doomed)
            except FileNotFoundError:
                if not is_directory(entry.path):
                    return None
                self.layout.mend(self.layout.partial)
                continue
            return doomed
        return None

    def link(self, other: Opened, metadata: Metadata, basename: str) -> bool:
        """Publish a hard link to an entry of a sibling namespace.

        Returns:
            False where the filesystem cannot link (EXDEV, EPERM, EMLINK), or the
            entry is gone.

        Raises:
            OSError: the disk fails.
        """
        staging = self.layout.new_partial(metadata.key, metadata.info.version)
        try:
            self.layout.modes.new_directory(staging)
            os.link(other.path, staging / basename)
            modes, via = self.layout.modes, self.layout.partial
            replace_file(staging / META, metadata.encode(), modes.file, via=via)
            entry = self.layout.entry(metadata.key, metadata.info.version, metadata.size)
            refuse_links(*entry.parents[:2], entry)
            self.layout.modes.make_directory(entry.parent)
            staging.rename(entry)
        except OSError as exn:
            shutil.rmtree(staging, ignore_errors=True)
            if exn.errno in _TAKEN:
                return True
            if exn.errno in _CANNOT_LINK:
                return False
            raise
        return True


def _is_alone(entry: Path) -> bool:
    """Whether nothing else is where an entry is; False where that cannot be told."""
    try:
        return os.lstat(entry.parent).st_nlink == _ALONE
    except OSError:
        return False


class Stores:
    """What a `coordination.Coordinator` asks of a store, of all tiers together.

    Args:
        stores: fastest first; locks are in the last one.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = list(stores)

    @property
    def layout(self) -> Layout:
        """Of the last tier."""
        return self._stores[-1].layout

    def open(self, key: str, basename: str, outdated: Collection[str] = ()) -> Opened | None:
        """See `Store.open`; where one tier's entry is damaged, another's will do."""
        damaged: DamagedError | None = None
        # Where it was last: a look at a tier that has not got it costs as much as a hit.
        stores = sorted(self._stores, key=lambda one: not one.knows(key))
        for store in stores:
            try:
                opened = store.open(key, basename, outdated)
            except DamagedError as exn:
                damaged = damaged or exn
                continue
            if opened is not None:
                return opened
        if damaged is not None:
            raise damaged
        return None

    def quarantine(self, key: str, reason: str) -> int:
        """See `Store.quarantine`."""
        return sum(store.quarantine(key, reason) for store in self._stores)

    def link(self, other: Opened, metadata: Metadata, basename: str) -> bool:
        """See `Store.link`; a link stays in its tier."""
        for store in self._stores:
            if store.shares_root(other):
                return store.link(other, metadata, basename)
        return False


#: The job of processes that no launcher named: they share one namespace per
#: rank, as they would without isolation.
_NO_JOB = "local"


def own_layout(node: Layout, config: Config, ranks: Ranks) -> Layout:
    """The namespace this process stores into, in the root whose node namespace is ``node``."""
    if config.isolation == "node":
        return node
    job = ranks.job or _NO_JOB
    name = job if config.isolation == "job" else f"{job}-{ranks.rank}"
    return node.rank(safe_name(name))


class Namespaces:
    """All namespaces of one root, as stores; safe between threads.

    Args:
        config: isolation and fsync policy.
        ranks: who we are.

    Raises:
        ConfigError: others share the root than the configuration says, or our namespace
            leads elsewhere.
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        modes = Modes.of(config.shared_group)
        check_group(config.dir, modes)
        self.node = node_namespace(config.dir, config.locks, config.touch_interval, modes)
        self._verify = config.fsync == "verify-after-boot"
        layout = own_layout(self.node, config, ranks)
        if layout != self.node:
            check_links(layout)
        self.own = self._store(layout)
        self._others: dict[str, Store] = {}

    def _store(self, layout: Layout) -> Store:
        return Store(layout, verify_after_boot=self._verify)

    def siblings(self) -> Sequence[Store]:
        """Every namespace but our own, as they are now."""
        found = []
        for layout in (self.node, *rank_layouts(self.node)):
            if layout.base != self.own.layout.base:
                name = str(layout.base)
                store = self._others.get(name)
                if store is None:
                    store = self._others[name] = self._store(layout)
                found.append(store)
        return found

    def all(self) -> Sequence[Store]:
        """Every namespace, our own first."""
        return [self.own, *self.siblings()]


def rank_layouts(node: Layout) -> list[Layout]:
    """The namespaces of ranks and jobs that are in a root, as they are now.

    Raises:
        OSError: they cannot be listed.
    """
    # A name of another kind was not made by us, nor was what leads elsewhere.
    layouts = [node.rank(name) for name in list_names(node.ranks) if is_rank_name(name)]
    return [layout for layout in layouts if is_directory(layout.base) and not layout.linked()]
