"""Entries: published shards. Any number of processes and threads may read them at the same time.

The data of an entry never changes. Its sidecar may be replaced, to record under which boot the data
was last verified, and `samples.idx` may be added.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardcache import files
from shardcache.clock import boot_id
from shardcache.faults import ignoring, system_error
from shardcache.layout import META, REPLACED, Layout, is_key, parse_entry_name
from shardcache.store.digest import file_digest
from shardcache.store.directory import (
    DamagedError,
    Metadata,
    data_file,
    data_locked_if_free,
    hide,
    readable,
    remove_directory,
    remove_free,
)
from shardcache.store.partial import LostError, Partial

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

#: Attempts to rename into a key's directory, which other processes may remove or fill.
_RENAME_ATTEMPTS = 100
#: The time of a version without a data file, later than all others.
DAMAGED = sys.maxsize
#: Errors of renaming a directory to a name that another directory has.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
#: Nanoseconds between the times of two versions; some filesystems store whole seconds.
_LATER = 2_000_000_000
#: Number of entries that a process remembers. Each takes about 300 bytes, so 30 MB together.
_MAX_KNOWN = 100_000


class Entry(NamedTuple):
    """A published shard. A tuple of plain values, because a scan makes many of them."""

    directory: str  #: the directory that holds the shard and its sidecar
    key: str  #: the key of the URL
    version: str  #: the version of the object
    size: int  #: bytes of the shard
    #: The last use, in seconds since the epoch, to within ten minutes. Without a sidecar, it is 0,
    #: so that the entry is evicted first.
    used: float

    @classmethod
    def at(cls, directory: Path | str) -> Entry:
        _, key, name = str(directory).rsplit("/", 2)
        parsed = parse_entry_name(name)
        assert parsed is not None
        return cls(str(directory), key, *parsed, files.modified(f"{directory}/{META}"))

    @property
    def path(self) -> Path:
        return Path(self.directory)

    def has_data(self, basename: str) -> bool:
        """Return whether the data file has the name and the size of the shard."""
        try:
            return os.lstat(f"{self.directory}/{basename}").st_size == self.size
        except system_error():
            return False

    def metadata(self) -> Metadata:
        """Read the sidecar. Raises OSError if the entry is gone, and DamagedError."""
        try:
            data = files.read_file(f"{self.directory}/{META}")
        except system_error() as exn:
            if isinstance(exn, FileNotFoundError) and files.is_directory(self.directory):
                raise DamagedError("it has no sidecar") from exn
            with readable():  # only after an error, because it costs time in each open
                raise
        metadata = Metadata.decode(data)
        if (metadata.key, metadata.info.version, metadata.size) != self[1:4]:
            raise DamagedError("its sidecar describes another shard")
        return metadata

    def name(self) -> str:
        """Return the URL of the shard, else the name of the data file, else an empty string."""
        with ignoring(DamagedError, OSError):
            return self.metadata().url
        with ignoring(DamagedError, OSError):
            return self.data.name
        return ""

    def mark(self, name: str) -> bool:
        """Mark the version as `REPLACED` or `OUTDATED`; return False if that is impossible.

        A time or a mode could not say so, because other ranks or the user may have the same file.
        """
        try:
            with contextlib.suppress(FileExistsError):
                os.link(self.data, f"{self.directory}/{name}")
        except (DamagedError, system_error()) as exn:
            logger.info("%s cannot be marked as %s: %s", self.path.name, name, exn)
            return False
        return True

    @property
    def data(self) -> Path:
        """The path of the data file. Raises OSError if the entry is gone, and DamagedError."""
        if (path := data_file(self.directory)) is not None:
            return path
        if files.is_directory(self.directory):
            raise DamagedError("it has no data file")
        raise FileNotFoundError(errno.ENOENT, "the entry is gone", self.directory)


def stored_at(directory: str) -> int:
    """Return the time of an entry's data in ns; the newest version of a shard has the latest.

    It is 0 if the entry is gone, 1 if it was replaced, and `DAMAGED` if it is damaged, so that
    `Store.open` finds the damage first.
    """
    try:
        if (data := data_file(directory)) is None:
            return DAMAGED
        status = os.lstat(data)
        return 1 if is_marked(directory, status) else status.st_mtime_ns
    except system_error():
        return 0  # evicted since the listing


def is_marked(directory: str, status: os.stat_result, name: str = REPLACED) -> bool:
    """Return whether `Entry.mark` has marked an entry, whose data has the ``status``."""
    return status.st_nlink > 1 and os.path.lexists(f"{directory}/{name}")


def versions(layout: Layout, key: str) -> list[tuple[str, int]]:
    """Return the directory and the size of each version of a shard, the newest first."""
    key_dir, listed = layout.key_dir(key), []
    for name in files.list_names(key_dir):
        parsed, directory = parse_entry_name(name), f"{key_dir}/{name}"
        if parsed is not None and files.is_directory(directory):
            listed.append((directory, parsed[1]))
    if len(listed) > 1:
        listed.sort(key=lambda row: stored_at(row[0]), reverse=True)
    return listed


def _directories(path: str) -> list[os.DirEntry[str]]:
    """List the subdirectories of ``path``; return [] if it is gone or may not be read."""
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


@dataclass(slots=True, eq=False)  # not frozen, because that would double the creation time
class OpenEntry:
    """An entry that is open for reading. The caller must close it."""

    file: io.FileIO  #: the unbuffered data file, which holds a shared flock until it is closed
    path: str  #: the path of the data file
    directory: str  #: the directory of the entry
    size: int
    status: os.stat_result  #: of the file when it was opened
    #: Whether a stopped process, which was evicting or publishing the entry, holds the exclusive
    #: flock. The open file can be read to its end, but may disappear from its path.
    stuck: bool = False
    is_locked: bool = True  #: whether entries in use have a flock, and not a lease
    reopened: bool = False  #: whether this replaces an open file whose handle was stale

    @property
    def entry(self) -> Entry:
        """The entry. Each access reads its last use from the disk."""
        return Entry.at(self.directory)

    def readinto(self, buffer: WriteableBuffer, position: int) -> int:
        """Read bytes at offset ``position`` into ``buffer``; return their number, 0 at the end."""
        count = os.preadv(self.file.fileno(), (buffer,), position)
        if count == 0 and position < self.size and memoryview(buffer).nbytes:
            raise OSError(errno.EIO, f"the file ends at byte {position} of {self.size}")
        return count

    def duplicate(self) -> OpenEntry:
        """Return another handle of the same file, with an offset of its own.

        Programs such as numpy read at the offset of a descriptor, and `os.dup` would share it.
        """
        flags, path = os.O_RDONLY | os.O_CLOEXEC, f"/proc/self/fd/{self.file.fileno()}"
        file = files.owned(os.open, (path,), (flags,))
        if self.is_locked:
            files.try_flock(file.fileno(), shared=True)
        return replace(self, file=file)

    def equals(self, path: Path) -> bool:
        """Return whether another file has the bytes of the entry."""
        with files.open_file(path) as other:
            fd, other_fd = self.file.fileno(), other.fileno()
            return os.path.sameopenfile(fd, other_fd) or file_digest(fd) == file_digest(other_fd)

    def close(self) -> None:
        """Close the file, so that the entry may be evicted."""
        try:  # not `ignoring`, which would cost as much as the close
            self.file.close()
        except system_error():  # the file was only read, and is closed nevertheless
            pass


def open_data(directory: str, path: str, size: int, grace: float | None) -> OpenEntry | None:
    """Open the data file of an entry, and take a shared flock unless there is a ``grace``.

    Returns None if the file is gone. Raises DamagedError if it does not have ``size`` bytes.
    """
    try:
        # Hot path: keep the number of calls small.
        file = files.owned(os.open, (path,), (os.O_RDONLY | files.SAFELY,))
    except system_error() as exn:
        if exn.errno in files.GONE:
            return None
        raise
    fd, opened = file.fileno(), None
    try:
        stuck = grace is None and files.try_flock(fd, shared=True) is False
        stuck = stuck and files.wait_flock(fd, shared=True) is False
        # A stuck entry is not a miss: while its name is taken, no process can publish the version.
        if stuck and not files.is_file(path, fd):
            return None
        status = os.fstat(fd)
        if status.st_nlink == 0:  # the entry was evicted between open and flock
            return None
        if status.st_size != size or not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"its data file has {status.st_size} bytes, not {size}")
        opened = OpenEntry(file, path, directory, size, status, stuck, grace is None)
    finally:
        if opened is None:
            file.close()
    return opened


class Store:
    """The entries of one namespace.

    With ``verify_after_boot``, each entry of another boot is hashed before its first use.
    """

    def __init__(self, layout: Layout, *, verify_after_boot: bool = True) -> None:
        self.layout = layout
        self._grace = layout.grace
        self._boot = boot_id() if verify_after_boot else ""
        # key -> directory, data file, size. No lock is needed, because single dict operations are
        # atomic, and an outdated row costs only one failed open.
        self._known: dict[str, tuple[str, str, int]] = {}

    def open(self, key: str, basename: str, outdated: Collection[str] = ()) -> OpenEntry | None:
        """Open the newest entry of a shard, except ``outdated`` versions; return None for a miss.

        Raises DamagedError if the newest entry is damaged.
        """
        known = None if outdated else self._known.get(key)
        if known is not None:
            try:
                opened = open_data(*known, self._grace)
                if opened is not None:
                    if opened.status.st_nlink == 1 or not is_marked(known[0], opened.status):
                        return opened
                    opened.close()
            except (DamagedError, system_error()) as exn:  # raised again below, unless it is gone
                logger.debug("%s: %s", key, exn)
            self._known.pop(key, None)
        for directory, size in versions(self.layout, key):
            if directory.rpartition("/")[2].partition("-")[0] not in outdated:
                opened = self._open_unknown(directory, basename, size)
                if opened is not None and is_marked(directory, opened.status):
                    opened.close()
                elif opened is not None:
                    self._remember(key, directory, basename, size)
                    return opened
        return None

    def _open_unknown(self, directory: str, basename: str, size: int) -> OpenEntry | None:
        """Open and check an entry that this process does not know; return None if it is gone."""
        opened = None
        try:
            with readable():
                opened = open_data(directory, f"{directory}/{basename}", size, self._grace)
                if opened is not None:
                    self._check(directory, opened.file.fileno())
                elif files.is_directory(directory):  # if evicted, it would have none either
                    raise DamagedError("its data file is missing")
        except (DamagedError, system_error()) as exn:
            if opened is not None:
                opened.close()
            if isinstance(exn, DamagedError):
                exn.directory = directory
            raise
        return opened

    def _check(self, directory: str, fd: int) -> None:
        """Check an entry's sidecar, and its bytes if they were last verified under another boot."""
        try:
            metadata = Entry.at(directory).metadata()
        except FileNotFoundError:
            return  # another process evicted it, but the open file can still be read
        if self._boot and metadata.boot != self._boot:
            if file_digest(fd) != metadata.digest:
                raise DamagedError("its bytes changed since they were downloaded")
            metadata = metadata._replace(boot=self._boot)
            with ignoring(OSError):  # if the disk is full or read-only, verify again later
                self.layout.write(Path(directory, META), metadata.encode())

    def is_intact(self, entry: Entry, basename: str) -> bool:
        """Return whether `open` would open an entry without hashing it; False in case of doubt."""
        if not entry.directory.startswith(f"{self.layout.base}/objects/"):
            return False
        try:
            status, boot = os.lstat(f"{entry.directory}/{basename}"), entry.metadata().boot
        except (DamagedError, system_error()):
            return False
        is_data = stat.S_ISREG(status.st_mode) and status.st_size == entry.size
        is_replaced = is_marked(entry.directory, status)
        return is_data and not is_replaced and (not self._boot or boot == self._boot)

    def _remember(self, key: str, directory: str, basename: str, size: int) -> None:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = directory, f"{directory}/{basename}", size

    def publish(
        self, partial: Partial, metadata: Metadata, others: Sequence[Path], *, sync: bool = False
    ) -> Path:
        """Turn a complete, checked partial into an entry, newer than ``others``; return its path.

        If an intact entry of the version exists, the partial is dropped. The caller must close the
        partial. With ``sync``, everything is flushed to the disk (fsync). Raises LostError.
        """
        key, name = metadata.key, partial.data.name
        if self._grace is not None:  # a network filesystem may report a failed write only now
            os.fsync(partial.fd)
        partial.seal(metadata, self.layout.modes, sync=sync)
        entry = self.layout.entry(key, metadata.info.version, metadata.size)
        others = [other for other in others if other != entry]
        # They may be of the future, if the clock was ahead.
        times = [time for other in others if (time := stored_at(str(other))) < DAMAGED]
        if times and max(times) >= os.fstat(partial.fd).st_mtime_ns:
            os.utime(partial.fd, ns=(max(times) + _LATER,) * 2)
        self._known.pop(key, None)
        if not self._rename(partial, entry, metadata.size):
            partial.discard()
        elif not others:
            # With other versions, the next `open` must list all of them to find the newest.
            self._remember(key, str(entry), name, metadata.size)
        if sync:
            files.sync_directory(entry.parent)
            files.sync_directory(entry.parent.parent)
        return entry

    def _rename(self, partial: Partial, entry: Path, size: int) -> bool:
        """Rename a sealed partial to its entry; return False if an intact entry has the name."""
        for _ in range(_RENAME_ATTEMPTS):
            self.layout.modes.make_directory(entry.parent, levels=2)  # but not below a mount point
            try:
                partial.path.rename(entry)
                return True
            except FileNotFoundError as exn:  # the key's directory was removed with its last entry
                if not partial.path.exists():
                    raise LostError(f"{partial.path.name} was taken over") from exn
            except system_error() as exn:
                if exn.errno not in _TAKEN:
                    raise
                try:
                    existing = self._open_unknown(str(entry), partial.data.name, size)
                except DamagedError as damage:
                    set_aside(entry, f"found while publishing: {damage}")
                else:
                    if existing is not None:
                        existing.close()
                        with ignoring(OSError):  # it is current again, if it was marked
                            (entry / REPLACED).unlink()
                        return False
        raise OSError(errno.EBUSY, "an entry has the name and cannot be opened", str(entry))

    def touch(self, directory: str, now: float) -> None:
        """Record the last use of an entry, ``now`` in seconds since the epoch, if possible."""
        path = f"{directory}/{META}"
        with ignoring(OSError):  # the entry is gone, or the disk is read-only
            try:
                os.utime(path, (now, now), follow_symlinks=False)
            except PermissionError:  # only the file's owner may set another timestamp than now
                os.utime(path, follow_symlinks=False)

    def entries(self, prefix: str | None = None) -> Iterator[Entry]:
        """Yield the entries, or those whose keys have this prefix of two digits, in any order."""
        objects = str(self.layout.objects)
        for name in [prefix] if prefix else files.list_names(objects):
            path = f"{objects}/{name}"
            keys = _directories(path) if files.is_directory(path) else []
            for key in (key for key in keys if is_key(key.name) and key.name[:2] == name):
                for child in _directories(key.path):
                    if (parsed := parse_entry_name(child.name)) is not None:
                        used = files.modified(f"{child.path}/{META}")
                        yield Entry(child.path, key.name, *parsed, used)

    def entries_of(self, key: str) -> Iterator[Entry]:
        """Yield every version of one shard, newest first."""
        return (Entry.at(directory) for directory, _ in versions(self.layout, key))

    def in_use(self, entry: Entry, data: str | None = None) -> bool:
        """Return whether a process is reading an entry of any namespace of this root.

        ``data`` is the path of the data file; without it, the directory is listed.
        """
        with data_locked_if_free(entry.directory, self._grace, data=data) as free:
            return not free

    def evict(self, entry: Entry) -> bool:
        """Remove an entry of any namespace of this root unless it is in use; True if removed."""
        if removed := remove_free(entry.path, self._grace):
            with ignoring(OSError):  # it has another version, or is already gone
                entry.path.parent.rmdir()
        return removed

    def link(self, other: OpenEntry, metadata: Metadata, basename: str) -> None:
        """Publish a hard link to another namespace's entry. Raises OSError if it is impossible."""
        modes, identity = self.layout.modes, (metadata.key, metadata.info.version, metadata.size)
        staging, entry = self.layout.new_partial(*identity), self.layout.entry(*identity)
        try:
            modes.new_directory(staging)
            os.link(other.path, staging / basename)
            files.write_new(staging / META, metadata.encode(), modes.file)
            modes.make_directory(entry.parent, levels=2)
            staging.rename(entry)
        except system_error() as exn:
            remove_directory(staging, basename)
            if exn.errno not in _TAKEN:
                raise


def set_aside(directory: Path, reason: str) -> bool:
    """Move a damaged entry to where no reader looks; return whether this call moved it.

    The caller must hold the key's lock, because an intact entry may replace the damaged one.
    """
    if hide(directory) is None:
        return False
    logger.info("set aside a damaged entry: %s (%s)", directory.name, reason)
    return True


def open_first(
    stores: Sequence[Store], key: str, basename: str, outdated: Collection[str] = ()
) -> OpenEntry | None:
    """Open the newest intact entry of a shard in any tier; None for a miss.

    Raises DamagedError if a tier has a damaged entry and no tier has an intact one.
    """
    newest = damaged = None
    # Begin with tiers known to have the shard: a lookup in another tier costs as much as a hit.
    known = [store for store in stores if key in store._known]
    for group in (known, [store for store in stores if store not in known]):
        for store in group:
            try:
                other = store.open(key, basename, outdated)
            except DamagedError as exn:
                other, damaged = None, damaged or exn
            except system_error() as exn:  # another tier may have the shard
                if store is stores[-1] and newest is None:
                    raise
                logger.info("%s: %s", store.layout.base, exn)
                other = None
            if other and (not newest or other.status.st_mtime_ns > newest.status.st_mtime_ns):
                newest, other = other, newest
            if other is not None:
                other.close()
        if newest is not None:
            return newest
    if damaged is not None:
        raise damaged
    return None
