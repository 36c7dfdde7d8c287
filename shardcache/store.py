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
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcache.digests import file_digest
from shardcache.entry import Entry, lacks, read_sidecar, scan, versions
from shardcache.layout import META, Layout, is_directory, make_directory, replace_file
from shardcache.locks import is_file, pin, seize
from shardcache.metadata import DamagedError, Metadata, boot_id
from shardcache.partials import LostError, Partial, sync_directory

__all__ = ["Entry", "Opened", "Store"]

logger = logging.getLogger(__name__)

#: The directories of a key come and go with its entries; not this often in a row.
_ATTEMPTS = 100
#: What a filesystem says where it cannot link, or the other entry is gone.
_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT})
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
#: Entries remembered per process, about 300 bytes each.
_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class Opened:
    """A hit: an open, pinned data file, which the caller must close."""

    fd: int
    path: str
    directory: str


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
        self._boot = boot_id() if verify_after_boot else ""
        # key -> (directory, data file, size). A dict's own operations are
        # atomic; a stale row costs one failed open.
        self._known: dict[str, tuple[str, str, int]] = {}

    def open(self, key: str, basename: str) -> Opened | None:
        """Open and pin the newest entry of ``key``; None is a miss.

        Raises:
            DamagedError: there is an entry, but it must not be used.
            OSError: the disk fails.
        """
        known = self._known.get(key)
        if known is not None:
            opened = self._open(*known)
            if opened is not None:
                return opened
            self._known.pop(key, None)
        for directory, size in versions(self.layout, key):
            path = f"{directory}/{basename}"
            opened = self._open(str(directory), path, size)
            if opened is None:
                if lacks(directory, basename.__eq__):
                    raise DamagedError("its data file is missing")
                continue
            try:
                self._trust(directory, opened.fd, key, size)
            except BaseException:
                os.close(opened.fd)
                raise
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = (str(directory), opened.path, size)
            return opened
        return None

    @staticmethod
    def _open(directory: str, path: str, size: int) -> Opened | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as exn:
            if exn.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return None
            if exn.errno in (errno.ELOOP, errno.ENXIO):
                raise DamagedError("its data file is a symbolic link or a socket") from exn
            raise
        good = False
        try:
            if not pin(fd, path):
                return None
            found = os.fstat(fd)
            if found.st_nlink == 0:  # evicted between open and flock
                return None
            if found.st_size != size or not stat.S_ISREG(found.st_mode):
                raise DamagedError(f"its data file has {found.st_size} bytes, not {size}")
            good = True
            return Opened(fd, path, directory)
        finally:
            if not good:
                os.close(fd)

    def _trust(self, directory: Path, fd: int, key: str, size: int) -> None:
        """Check an entry that this process sees for the first time."""
        try:
            metadata = Metadata.decode(self.sidecar(directory))
        except FileNotFoundError as exn:
            if lacks(directory, META.__eq__):
                raise DamagedError("it has no sidecar") from exn
            return  # evicted while we look; the open file is good
        named = Entry.at(directory)
        if (metadata.key, metadata.info.version, metadata.size) != (key, named.version, size):
            raise DamagedError("its sidecar describes another shard")
        if self._boot and metadata.boot != self._boot:
            if file_digest(fd) != metadata.digest:
                raise DamagedError("its bytes changed since they were fetched")
            try:
                replace_file(directory / META, metadata.trusted_since(self._boot).encode(), 0o600)
            except OSError as exn:  # read-only or full: verify again next time
                logger.debug("cannot note that %s was verified: %s", directory.name, exn)

    #: The sidecar of an entry's directory, undecoded; see `entry.read_sidecar`.
    sidecar = staticmethod(read_sidecar)

    def publish(self, partial: Partial, metadata: Metadata, *, sync: bool = False) -> Path:
        """Make a finished partial visible; returns the entry's directory.

        If the same version is there already and sound, ours is dropped: it is
        identical. The partial stays locked by its writer until the caller closes it.

        Raises:
            OSError: the disk fails.
            LostError: the partial was swept or taken over.
        """
        partial.seal(metadata, sync=sync)
        entry = self.layout.entry(metadata.key, metadata.info.version, metadata.size)
        for _ in range(_ATTEMPTS):
            try:
                partial.path.rename(entry)
                break
            except FileNotFoundError as exn:
                if partial.path.exists():
                    make_directory(entry.parent)
                elif is_file(entry / partial.data.name, partial.fd):
                    break  # done, and only the answer was lost (NFS)
                else:
                    raise LostError(f"{partial.path.name} was taken over") from exn
            except OSError as exn:
                if exn.errno not in _TAKEN:
                    raise
                aside = self._set_aside(entry, partial.data.name, "found while publishing")
                if aside or not is_directory(entry):
                    continue
                shutil.rmtree(partial.path, ignore_errors=True)
                break
        else:
            raise LostError(f"{entry.parent} is removed faster than it can be filled")
        if sync:
            sync_directory(entry.parent)
            sync_directory(entry.parent.parent)
        self._known.pop(metadata.key, None)
        return entry

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

    def _set_aside(self, directory: Path, basename: str | None, reason: str) -> bool:
        """Quarantine an entry if it is damaged, or has another data file than ``basename``."""
        entry = Entry.at(directory)
        try:
            data = entry.data
            opened = self._open(str(directory), str(data), entry.size)
            if opened is None:
                return False  # being evicted
            try:
                self._trust(directory, opened.fd, entry.key, entry.size)
            finally:
                os.close(opened.fd)
            if basename in (None, data.name):
                return False
        except FileNotFoundError:
            return False
        except DamagedError as exn:
            reason = f"{reason}: {exn}"
        for _ in range(_ATTEMPTS):
            try:
                directory.rename(self.layout.new_quarantined(directory))
            except FileNotFoundError:
                if not is_directory(directory):
                    return False
                self.layout.make()  # it was the quarantine that is missing
                continue
            logger.warning("set aside a damaged entry: %s (%s)", directory.name, reason)
            return True
        return False

    def touch(self, directory: str, now: float) -> None:
        """Note a use. A cache that cannot be written keeps its old times."""
        try:
            os.utime(f"{directory}/{META}", (now, now))
        except OSError as exn:
            logger.debug("cannot note a use of %s: %s", directory, exn)

    def entries(self) -> Iterator[Entry]:
        """Every entry, in no order; see `entry.scan`."""
        return scan(self.layout)

    def entries_of(self, key: str) -> Iterator[Entry]:
        """Every version of one shard, newest first."""
        return (Entry.at(directory) for directory, _size in versions(self.layout, key))

    @staticmethod
    def entry_at(opened: Opened) -> Entry:
        """The entry that an open data file belongs to, in whichever namespace."""
        return Entry.at(Path(opened.directory))

    @classmethod
    def owning(cls, entry: Entry) -> Store:
        """The store of the namespace that an entry is in."""
        base = entry.path.parents[3]  # objects/<aa>/<key>/<entry>
        return cls(Layout(base), verify_after_boot=False)

    def is_pinned(self, entry: Entry) -> bool:
        """Whether somebody reads or has pinned the entry right now.

        Raises:
            OSError: that cannot be told, for want of descriptors for instance.
        """
        try:
            fd = self._locked(entry)
        except FileNotFoundError:
            return False
        if fd is not None and fd >= 0:
            os.close(fd)
        return fd is None

    @staticmethod
    def _locked(entry: Entry) -> int | None:
        """The data file, exclusively locked; None if it is pinned, -1 if there is none.

        Raises:
            OSError: it is gone, or cannot be opened.
        """
        try:
            data = entry.data
            fd = os.open(data, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except DamagedError:
            return -1
        except OSError as exn:
            if exn.errno in (errno.ELOOP, errno.ENXIO):  # planted; nobody reads it
                return -1
            raise
        free = False
        try:
            free = seize(fd, data)
        finally:
            if not free:
                os.close(fd)
        return fd if free else None

    def evict(self, entry: Entry) -> bool:
        """Remove an entry unless somebody reads or has pinned it.

        Returns:
            Whether this call removed it.

        Raises:
            OSError: the filesystem is read-only or failing.
        """
        try:
            fd = self._locked(entry)
        except FileNotFoundError:
            return False
        if fd is None:
            return False
        try:
            doomed = self._hide(entry)
            if doomed is None:
                return False
            # The lock is held until the names are gone: a reader that gets its
            # pin afterwards sees a link count of zero and looks again.
            shutil.rmtree(doomed, ignore_errors=True)
        finally:
            if fd >= 0:
                os.close(fd)
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
                self.layout.make()  # it was `partial` that is missing
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
            staging.mkdir(mode=0o700)
            os.link(other.path, staging / basename)
            replace_file(staging / META, metadata.encode(), 0o600)
            entry = self.layout.entry(metadata.key, metadata.info.version, metadata.size)
            make_directory(entry.parent)
            staging.rename(entry)
        except OSError as exn:
            shutil.rmtree(staging, ignore_errors=True)
            if exn.errno in _TAKEN:
                return True
            if exn.errno in _CANNOT_LINK:
                return False
            raise
        return True
