"""The entries of one namespace, for any number of processes and threads at once.

Opening is the lookup: an entry that could be opened and pinned is a hit, and stays readable until
it is closed, whatever is evicted meanwhile. Publishing is one rename. Evicting takes the exclusive
flock that a pin blocks, renames the directory out of sight, then deletes it. The data of an entry
is never modified; its sidecar may be replaced by one that says when the data was last verified.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shardcache.clock import boot_id
from shardcache.files import sync_directory, write_new
from shardcache.layout import META, Layout, is_directory, replace_file
from shardcache.store.digest import file_digest
from shardcache.store.entry import (
    DamagedError,
    Entry,
    Metadata,
    Opened,
    hold,
    open_data,
    readable,
    scan,
    versions,
)
from shardcache.store.partial import LostError, Partial

__all__ = ["Entry", "Opened", "Store", "open_first", "set_aside"]

logger = logging.getLogger(__name__)

#: The directories of a key come and go with its entries; not this often in a row.
_ATTEMPTS = 100
#: What a filesystem says where it cannot link, or the other entry is gone.
_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT})
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
#: Entries remembered per process, about 300 bytes each.
_REMEMBERED = 100_000


class Store:
    """The entries of one namespace.

    With ``verify_after_boot`` entries of another boot are hashed once before they are trusted:
    after power loss a rename may have survived whose data did not.
    """

    def __init__(self, layout: Layout, *, verify_after_boot: bool = True) -> None:
        self.layout = layout
        self._grace = layout.grace
        self._boot = boot_id() if verify_after_boot else ""
        # key -> (directory, data file, size). A dict's own operations are
        # atomic; a stale row costs one failed open.
        self._known: dict[str, tuple[str, str, int]] = {}

    def open(self, key: str, basename: str, outdated: Collection[str] = ()) -> Opened | None:
        """Open and pin the newest entry of ``key``, except ``outdated`` versions; None is a miss.

        Raises:
            DamagedError: there is an entry, but it must not be used.
            OSError: the disk fails.
        """
        known = None if outdated else self._known.get(key)
        if known is not None:
            try:
                opened = open_data(*known, self._grace)
                if opened is not None:
                    return opened
            except (DamagedError, OSError) as exn:  # met again below
                logger.debug("%s: %s", key, exn)
            self._known.pop(key, None)
        for _, directory, size in versions(self.layout, key):
            if not outdated or Entry.at(Path(directory)).version not in outdated:
                opened = self._open_at(directory, basename, size)
                if opened is not None:
                    self._remember(key, directory, basename, size)
                    return opened
        return None

    def _open_at(self, directory: str, basename: str, size: int) -> Opened | None:
        """Open an entry that this process sees for the first time; None if it is gone."""
        opened = None
        try:
            with readable():
                opened = open_data(directory, f"{directory}/{basename}", size, self._grace)
                if opened is not None:
                    self._trust(Path(directory), opened.fd)
                elif is_directory(directory):  # it comes and goes with all that is in it
                    raise DamagedError("its data file is missing")
        except (DamagedError, OSError) as exn:
            if opened is not None:
                opened.close()
            if isinstance(exn, DamagedError):
                exn.directory = directory
            raise
        return opened

    def _trust(self, directory: Path, fd: int) -> None:
        """Check the sidecar of an entry, and its bytes if they were fetched under another boot."""
        try:
            metadata = Entry.at(directory).metadata()
        except FileNotFoundError:
            return  # evicted meanwhile; the open file is good
        if not self._boot or metadata.boot == self._boot:
            return
        if file_digest(fd) != metadata.digest:
            raise DamagedError("its bytes changed since they were fetched")
        try:
            trusted = replace(metadata, boot=self._boot).encode()
            modes, via = self.layout.modes, self.layout.partial
            before = directory.stat()
            replace_file(directory / META, trusted, modes.file, via=via)
            # It is no newer than it was; see `versions`.
            os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))
        except OSError as exn:  # read-only or full: verify again next time
            logger.debug("cannot note that %s was verified: %s", directory.name, exn)

    def _remember(self, key: str, directory: str, basename: str, size: int) -> None:
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = directory, f"{directory}/{basename}", size

    def publish(self, partial: Partial, metadata: Metadata, *, sync: bool = False) -> Path:
        """Make a finished partial visible; returns the entry's directory.

        If the same version is there already and sound, ours is dropped: it is identical. So it is
        if another version came since the partial was begun: nobody can tell which of two is newer,
        and whoever has read theirs must not read ours next. The partial stays locked by its writer
        until the caller closes it.

        Args:
            partial: complete and checked.
            metadata: its final sidecar.
            sync: put it on the disk first.

        Raises:
            LostError: the partial was swept or taken over.
            OSError: the disk fails.
        """
        key, name = metadata.key, partial.data.name
        partial.seal(metadata, self.layout.modes, sync=sync)
        entry = self.layout.entry(key, metadata.info.version, metadata.size)
        # After sealing: a process that is stopped between this listing and the rename
        # publishes a directory that is older than theirs, and `open` takes the newest.
        others = [Path(found[1]) for found in versions(self.layout, key) if found[1] != str(entry)]
        theirs = next((other for other in others if other.name not in partial.earlier), None)
        if theirs is not None:
            logger.info("%s came meanwhile; dropping %s", theirs.name, entry.name)
            shutil.rmtree(partial.path, ignore_errors=True)
            return theirs
        self._known.pop(key, None)
        if not self._rename(partial, entry, metadata.size):
            shutil.rmtree(partial.path, ignore_errors=True)
        elif not others:
            # It was checked before it got there. Beside another version the next open lists
            # them, since only that tells which of them is newer.
            self._remember(key, str(entry), name, metadata.size)
        if sync:
            sync_directory(entry.parent)
            sync_directory(entry.parent.parent)
        return entry

    def _rename(self, partial: Partial, entry: Path, size: int) -> bool:
        """Rename a sealed partial to its entry; False if a sound one is there already."""
        for _ in range(_ATTEMPTS):
            try:
                self.layout.modes.make_directory(entry.parent)
                partial.path.rename(entry)
                return True
            except FileNotFoundError as exn:  # the key's directory went with its last entry
                if not partial.path.exists():
                    raise LostError(f"{partial.path.name} was taken over") from exn
            except OSError as exn:
                if exn.errno not in _TAKEN:
                    raise
                try:
                    theirs = self._open_at(str(entry), partial.data.name, size)
                except DamagedError as damage:
                    set_aside(entry, f"found while publishing: {damage}")
                else:
                    if theirs is not None:
                        theirs.close()
                        return False
        raise OSError(errno.EBUSY, "an entry is there and cannot be seen", str(entry))

    def touch(self, directory: str, now: float) -> None:
        """Note a use. A cache that cannot be written keeps its old times."""
        path = f"{directory}/{META}"
        try:
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
        return (Entry.at(Path(directory)) for _, directory, _ in versions(self.layout, key))

    def is_pinned(self, entry: Entry) -> bool:
        """Whether somebody reads or has pinned an entry of any namespace of this root right now."""
        with hold(entry.path, self._grace) as free:
            return not free

    def evict(self, entry: Entry) -> bool:
        """Remove an entry of any namespace of this root unless somebody reads or has pinned it.

        Returns whether this call removed it.
        """
        with hold(entry.path, self._grace) as free:
            doomed = _hide(entry.path) if free else None
            if doomed is None:
                return False
            # The lock is held until the names are gone: a reader that gets its
            # pin afterwards sees a link count of zero and looks again.
            shutil.rmtree(doomed, ignore_errors=True)
        with contextlib.suppress(OSError):  # another version is there, or it is gone too
            entry.path.parent.rmdir()
        return True

    def link(self, other: Opened, metadata: Metadata, basename: str) -> bool:
        """Publish a hard link to a sibling's entry; False where none can be made, or it is gone."""
        version, modes = metadata.info.version, self.layout.modes
        staging = self.layout.new_partial(metadata.key, version, metadata.size)
        entry = self.layout.entry(metadata.key, version, metadata.size)
        try:
            modes.new_directory(staging)
            os.link(other.path, staging / basename)
            write_new(staging / META, metadata.encode(), modes.file)
            modes.make_directory(entry.parent)
            staging.rename(entry)
        except OSError as exn:
            shutil.rmtree(staging, ignore_errors=True)
            if exn.errno in _TAKEN:
                return True
            if exn.errno in _CANNOT_LINK:
                return False
            raise
        return True


def set_aside(directory: Path, reason: str) -> bool:
    """Set an entry aside, sound or not: no reader finds it, and the next sweep removes it.

    Call with the key's lock held, so that an entry fetched in its place is not taken for it.
    Whoever has the entry open reads on. Returns whether this call did it.
    """
    if _hide(directory) is None:
        return False
    logger.info("set aside a damaged entry: %s (%s)", directory.name, reason)
    return True


def _hide(directory: Path) -> Path | None:
    """Move an entry out of sight, in its own namespace; where to, or None if it is gone."""
    hidden = Layout(directory.parents[3]).new_evicted(directory.parent.name)
    try:
        directory.rename(hidden)
    except FileNotFoundError:
        return None
    return hidden


def open_first(
    stores: Sequence[Store], key: str, basename: str, outdated: Collection[str] = ()
) -> Opened | None:
    """See `Store.open`; of several tiers, where one's entry is damaged, another's will do."""
    damaged: DamagedError | None = None
    # Where it was last: a look at a tier that has not got it costs as much as a hit.
    for store in sorted(stores, key=lambda one: key not in one._known):
        try:
            if (opened := store.open(key, basename, outdated)) is not None:
                return opened
        except DamagedError as exn:
            damaged = damaged or exn
    if damaged is not None:
        raise damaged
    return None
