"""Entries: published shards, which any number of processes and threads read at once.

Opening is the lookup: `Store.open` opens the data file and takes a shared flock on it. The open
file can be read to its end, even if the entry is removed. Publishing is one rename. Evicting takes
the exclusive flock, which readers block, renames the directory out of sight, and deletes it. The
data of an entry never changes. Its sidecar may be replaced by one that says when the data was last
verified.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardcache.clock import boot_id
from shardcache.files import SAFELY, sync_directory, write_new
from shardcache.layout import (
    META,
    Layout,
    is_directory,
    is_key,
    list_names,
    parse_entry_name,
    read_file,
    replace_file,
)
from shardcache.locks.flock import is_file, try_flock, wait_flock
from shardcache.store.digest import file_digest
from shardcache.store.directory import (
    GONE,
    MAX_SIDECAR,
    DamagedError,
    Metadata,
    data_file,
    hide,
    hold,
    readable,
    remove_directory,
    remove_free,
)
from shardcache.store.partial import LostError, Partial

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

#: Attempts to rename into a key's directory, which other processes may remove or fill each time.
_ATTEMPTS = 100
#: Errors of linking on a filesystem that cannot, or if the other entry is gone.
_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT})
#: Errors of renaming a directory to the name of one that exists.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
#: Entries that a process remembers. One takes about 300 bytes, so all take 30 MB.
_REMEMBERED = 100_000


class Entry(NamedTuple):
    """A published shard. A tuple of plain values, because a scan makes a hundred thousand of them.

    Attributes:
        directory: the directory of the entry, which holds the shard and its sidecar.
        key: the key of the URL.
        version: the version of the object.
        size: bytes of the shard.
        used: the last use, in seconds since the epoch, as exact as `touch_interval`.
    """

    directory: str
    key: str
    version: str
    size: int
    used: float

    @classmethod
    def at(cls, directory: Path | str) -> Entry:
        """Make an entry from its directory, whose name holds version and size."""
        _, key, name = str(directory).rsplit("/", 2)
        parsed = parse_entry_name(name)
        assert parsed is not None
        return cls(str(directory), key, *parsed, _last_use(directory))

    @property
    def path(self) -> Path:
        """The directory of the entry."""
        return Path(self.directory)

    @property
    def published(self) -> float:
        """When the entry was published, in seconds since the epoch; 0 if it is gone."""
        try:
            return os.lstat(self.directory).st_mtime
        except OSError:
            return 0.0

    @readable()
    def metadata(self) -> Metadata:
        """Read the sidecar.

        Raises:
            DamagedError: the sidecar is missing, or is not this entry's.
            OSError: the entry is gone, or the disk fails.
        """
        try:
            metadata = Metadata.decode(read_file(f"{self.directory}/{META}", MAX_SIDECAR))
        except FileNotFoundError as exn:
            if is_directory(self.directory):
                raise DamagedError("it has no sidecar") from exn
            raise
        if (metadata.key, metadata.info.version, metadata.size) != self[1:4]:
            raise DamagedError("its sidecar describes another shard")
        return metadata

    def name(self) -> str:
        """Return the URL of the shard; if the sidecar is damaged, the name of the data file."""
        with contextlib.suppress(DamagedError, OSError):
            return self.metadata().url
        with contextlib.suppress(DamagedError, OSError):
            return self.data.name
        return ""

    @property
    def data(self) -> Path:
        """The path of the data file.

        Raises:
            DamagedError: the entry has no data file.
            OSError: the entry is gone.
        """
        if (path := data_file(self.path)) is not None:
            return path
        if is_directory(self.directory):
            raise DamagedError("it has no data file")
        raise FileNotFoundError(errno.ENOENT, "the entry is gone", self.directory)


def _last_use(directory: Path | str) -> float:
    try:
        return os.lstat(f"{directory}/{META}").st_mtime
    except OSError:
        return 0.0  # an entry without a sidecar is evicted first


def versions(layout: Layout, key: str) -> list[tuple[int, str, int]]:
    """List (publication time in ns, directory, size) of all versions of a shard, newest first."""
    key_dir = str(layout.key_dir(key))
    listed = []
    for name in list_names(key_dir):
        parsed = parse_entry_name(name)
        if parsed is not None:
            with contextlib.suppress(FileNotFoundError):  # evicted since the listing
                status = os.lstat(f"{key_dir}/{name}")
                if stat.S_ISDIR(status.st_mode):
                    listed.append((status.st_mtime_ns, f"{key_dir}/{name}", parsed[1]))
    return sorted(listed, reverse=True)


def _directories(path: str) -> list[os.DirEntry[str]]:
    """List the directories in a directory; none if it is gone or this user may not read it."""
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


@dataclass(slots=True, eq=False)  # not frozen: that would double the time to make one
class Opened:
    """An entry that is open for reading. The caller must close it."""

    file: io.FileIO  #: unbuffered; has a shared flock until it is closed
    path: str  #: of the data file
    directory: str  #: of the entry
    size: int
    #: Another process that evicts or publishes the entry was stopped and has the exclusive flock.
    #: The file can be read to its end all the same, but may leave its path.
    stuck: bool = False
    reopened: bool = False  #: opened again because an earlier file handle was stale
    replaced: bool = False  #: a newer version was published, see `Store.mark_replaced`

    @property
    def fd(self) -> int:
        """The descriptor of `file`."""
        return self.file.fileno()

    @property
    def entry(self) -> Entry:
        """The entry, whose last use is read from the disk."""
        return Entry.at(self.directory)

    def readinto(self, buffer: WriteableBuffer, position: int) -> int:
        """Read bytes from offset ``position`` on into ``buffer``; return how many, 0 at the end.

        Raises:
            OSError: the disk fails, or the file is shorter than the shard.
        """
        count = os.preadv(self.file.fileno(), (buffer,), position)
        if count == 0 and position < self.size and memoryview(buffer).nbytes:
            raise OSError(errno.EIO, f"the file ends at byte {position} of {self.size}")
        return count

    def duplicate(self) -> Opened:
        """Return another handle of the same file, which shares the flock."""
        return replace(self, file=io.FileIO(os.dup(self.fd)))

    def close(self) -> None:
        """Close the file, so that the entry may be evicted."""
        with contextlib.suppress(OSError):  # it is closed nevertheless, and was only read
            self.file.close()


def open_data(directory: str, path: str, size: int, grace: float | None) -> Opened | None:
    """Open the data file of an entry and, without ``grace`` (leases), take a shared flock on it.

    Returns None if it is gone; raises DamagedError if the file does not have ``size`` bytes.
    """
    fd = -1
    try:
        # Hot path: the code of `open_file`, without calling it.
        fd = os.open(path, os.O_RDONLY | SAFELY)
        file = io.FileIO(fd)
    except OSError as exn:
        if fd >= 0:
            os.close(fd)
        if exn.errno in GONE:
            return None
        raise
    opened = None
    try:
        stuck = grace is None and try_flock(fd, shared=True) is False
        stuck = stuck and wait_flock(fd, shared=True) is False
        # A stuck entry is no miss: no process can publish the version while the name is taken.
        if stuck and not is_file(path, fd):
            return None
        status = os.fstat(fd)
        if status.st_nlink == 0:  # evicted between open and flock
            return None
        if status.st_size != size or not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"its data file has {status.st_size} bytes, not {size}")
        opened = Opened(file, path, directory, size, stuck, replaced=status.st_mtime == 0.0)
    finally:
        if opened is None:
            file.close()
    return opened


class Store:
    """The entries of one namespace.

    Args:
        layout: the namespace.
        verify_after_boot: hash entries of another boot once before they are trusted. After power
            loss, a rename may have survived without the data.
    """

    def __init__(self, layout: Layout, *, verify_after_boot: bool = True) -> None:
        self.layout = layout
        self._grace = layout.grace
        self._boot = boot_id() if verify_after_boot else ""
        # key -> (directory, data file, size). Without a lock: single operations of a dict are
        # atomic, and an outdated row costs one failed open.
        self._known: dict[str, tuple[str, str, int]] = {}

    def open(self, key: str, basename: str, outdated: Collection[str] = ()) -> Opened | None:
        """Open the newest entry of a shard, except ``outdated`` versions; return None for a miss.

        Raises:
            DamagedError: there is an entry, but it is damaged.
        """
        known = None if outdated else self._known.get(key)
        if known is not None:
            try:
                opened = open_data(*known, self._grace)
                if opened is not None:
                    if not opened.replaced:
                        return opened
                    opened.close()
            except (DamagedError, OSError) as exn:  # raised again below, unless it went away
                logger.debug("%s: %s", key, exn)
            self._known.pop(key, None)
        for _, directory, size in versions(self.layout, key):
            if not outdated or Entry.at(directory).version not in outdated:
                opened = self._open_unknown(directory, basename, size)
                if opened is not None:
                    self._remember(key, directory, basename, size)
                    return opened
        return None

    def _open_unknown(self, directory: str, basename: str, size: int) -> Opened | None:
        """Open an entry that this process has not checked yet; return None if it is gone."""
        opened = None
        try:
            with readable():
                opened = open_data(directory, f"{directory}/{basename}", size, self._grace)
                if opened is not None:
                    self._check(directory, opened.fd)
                elif is_directory(directory):  # files come and go with the entry's directory
                    raise DamagedError("its data file is missing")
        except (DamagedError, OSError) as exn:
            if opened is not None:
                opened.close()
            if isinstance(exn, DamagedError):
                exn.directory = directory
            raise
        return opened

    def _check(self, directory: str, fd: int) -> None:
        """Check an entry's sidecar, and its bytes if they were downloaded under another boot."""
        try:
            metadata = Entry.at(directory).metadata()
        except FileNotFoundError:
            return  # evicted; the open file is good
        if not self._boot or metadata.boot == self._boot:
            return
        if file_digest(fd) != metadata.digest:
            raise DamagedError("its bytes changed since they were downloaded")
        with contextlib.suppress(OSError):  # read-only or full: the next process verifies again
            trusted = replace(metadata, boot=self._boot).encode()
            mode, via = self.layout.modes.file, self.layout.partial
            before = os.lstat(directory)
            replace_file(Path(directory, META), trusted, mode, via=via)
            # The time of the directory is when it was published; see `versions`.
            os.utime(directory, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _remember(self, key: str, directory: str, basename: str, size: int) -> None:
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[key] = directory, f"{directory}/{basename}", size

    def publish(self, partial: Partial, metadata: Metadata, *, sync: bool = False) -> Path:
        """Make a finished partial an entry. The caller must close the partial, which stays locked.

        The partial is dropped if a sound entry of the same version exists. It is also dropped if
        another version was published after the partial was made: it is unknown which of the two is
        newer, and a process that has read the other one must not read this one next.

        Args:
            partial: the partial, complete and checked.
            metadata: its final sidecar.
            sync: write it to the disk first (fsync).

        Returns:
            The directory of the entry that readers find.

        Raises:
            LostError: another process swept the partial or took it over.
        """
        key, name = metadata.key, partial.data.name
        partial.seal(metadata, self.layout.modes, sync=sync)
        entry = self.layout.entry(key, metadata.info.version, metadata.size)
        # List after sealing: if this process is stopped between the listing and the rename, its
        # directory is older than an entry that is published then, and `open` takes the newest.
        others = [Path(row[1]) for row in versions(self.layout, key) if row[1] != str(entry)]
        newcomer = next((other for other in others if other.name not in partial.earlier), None)
        if newcomer is not None:
            logger.info("%s was published before %s, which is dropped", newcomer.name, entry.name)
            remove_directory(partial.path, name)
            return newcomer
        self._known.pop(key, None)
        if not self._rename(partial, entry, metadata.size):
            remove_directory(partial.path, name)
        elif not others:
            # If there are other versions, the next `open` must list them to find the newest.
            self._remember(key, str(entry), name, metadata.size)
        if sync:
            sync_directory(entry.parent)
            sync_directory(entry.parent.parent)
        return entry

    def _rename(self, partial: Partial, entry: Path, size: int) -> bool:
        """Rename a sealed partial to its entry; return False if a sound entry has the name."""
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
                    existing = self._open_unknown(str(entry), partial.data.name, size)
                except DamagedError as damage:
                    set_aside(entry, f"found while publishing: {damage}")
                else:
                    if existing is not None:
                        existing.close()
                        return False
        raise OSError(errno.EBUSY, "an entry has the name and cannot be opened", str(entry))

    def touch(self, directory: str, now: float) -> None:
        """Set an entry's time of last use, in seconds since the epoch, if the disk permits."""
        path = f"{directory}/{META}"
        try:
            try:
                os.utime(path, (now, now), follow_symlinks=False)
            except PermissionError:  # only the owner of a file may set a time other than now
                os.utime(path, follow_symlinks=False)
        except OSError as exn:
            logger.debug("%s: its use is not noted: %s", directory, exn)

    def mark_replaced(self, entry: Entry) -> None:
        """Mark an entry, by the time 0 of its data file, because a newer version was published.

        Processes that remember the entry see the mark at their next open, and list the versions.
        """
        try:
            os.utime(entry.data, (0, 0), follow_symlinks=False)
        except (DamagedError, OSError) as exn:  # another user's, or read-only
            logger.info("processes that know %s still read it: %s", entry.path.name, exn)

    def entries(self) -> Iterator[Entry]:
        """Yield every entry, in no order. Directories with other names are ignored."""
        for prefix in _directories(str(self.layout.objects)):
            for key in _directories(prefix.path):
                if is_key(key.name) and key.name[:2] == prefix.name:
                    for child in _directories(key.path):
                        if (parsed := parse_entry_name(child.name)) is not None:
                            yield Entry(child.path, key.name, *parsed, _last_use(child.path))

    def entries_of(self, key: str) -> Iterator[Entry]:
        """Yield every version of one shard, newest first."""
        return (Entry.at(directory) for _, directory, _ in versions(self.layout, key))

    def in_use(self, entry: Entry) -> bool:
        """Return whether a process reads an entry, of any namespace of this root, right now."""
        with hold(entry.path, self._grace) as free:
            return not free

    def evict(self, entry: Entry) -> bool:
        """Remove an entry of any namespace of this root, unless a process reads it.

        Returns whether this call removed it.
        """
        removed = remove_free(entry.path, _namespace(entry.path, self._grace), entry.key)
        if removed:
            with contextlib.suppress(OSError):  # another version is in it, or it is gone
                entry.path.parent.rmdir()
        return removed

    def link(self, other: Opened, metadata: Metadata, basename: str) -> bool:
        """Publish a hard link to ``other``, an entry of another namespace with that sidecar.

        Returns False if the filesystem cannot link, or the other entry is gone.
        """
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
            remove_directory(staging, basename)
            if exn.errno in _TAKEN:
                return True
            if exn.errno in _CANNOT_LINK:
                return False
            raise
        return True


def set_aside(directory: Path, reason: str) -> bool:
    """Move a damaged entry out of the readers' sight; return whether this call moved it.

    Processes that have the entry open read on. The caller must hold the key's lock: otherwise it
    could move an entry that was downloaded in place of the damaged one.
    """
    hidden = hide(directory, _namespace(directory), directory.parent.name)
    if hidden is not None:
        logger.info("set aside a damaged entry: %s (%s)", directory.name, reason)
    return hidden is not None


def _namespace(directory: Path, grace: float | None = None) -> Layout:
    """Return the namespace of an entry, from <namespace>/objects/<aa>/<key>/<entry>."""
    return Layout(directory.parents[3], grace=grace)


def open_first(
    stores: Sequence[Store], key: str, basename: str, outdated: Collection[str] = ()
) -> Opened | None:
    """Open the newest entry of a shard in the first of several tiers that has a sound one.

    Raises the errors of `Store.open` if no tier has a sound entry.
    """
    damaged: DamagedError | None = None
    # The tier that had the shard last comes first: looking into another one costs as much as a hit.
    for store in sorted(stores, key=lambda one: key not in one._known):
        try:
            if (opened := store.open(key, basename, outdated)) is not None:
                return opened
        except DamagedError as exn:
            damaged = damaged or exn
    if damaged is not None:
        raise damaged
    return None
