"""Entries: published shards, for any number of processes and threads at once.

Opening is the lookup: an entry that could be opened and pinned is a hit, and stays readable until
it is closed, whatever is evicted meanwhile. Publishing is one rename. Evicting takes the exclusive
flock that a pin blocks, renames the directory out of sight, then deletes it. The data of an entry
is never modified; its sidecar may be replaced by one that says when the data was last verified.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardcache.clock import boot_id, utc
from shardcache.errors import ConfigError
from shardcache.files import NOT_DATA, SAFELY, open_file, sync_directory, unlock, write_new
from shardcache.layout import (
    META,
    PROGRESS,
    Layout,
    is_directory,
    is_idle,
    is_key,
    is_side_file,
    list_names,
    open_directory,
    parse_entry_name,
    read_file,
    replace_file,
)
from shardcache.locks.flock import is_file, try_flock, wait_flock
from shardcache.origins.base import ObjectInfo
from shardcache.store.digest import file_digest
from shardcache.urls import parse_url

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from shardcache.store.partial import Partial

logger = logging.getLogger(__name__)

SCHEMA = 1
#: A sidecar is about 700 bytes; URLs are at most some kilobytes.
MAX_BYTES = 64 * 1024
#: The directories of a key come and go with its entries; not this often in a row.
_ATTEMPTS = 100
#: What a filesystem says where it cannot link, or the other entry is gone.
_CANNOT_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT})
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
#: How renaming a directory fails if it is gone, or is a mount point.
IMMOVABLE = frozenset({errno.ENOENT, errno.EBUSY})
#: How NFS and FUSE name a file that was removed while it is open; they remove it when it is closed.
_STILL_OPEN = (".nfs", ".fuse_hidden")
#: Entries remembered per process, about 300 bytes each.
_REMEMBERED = 100_000


class DamagedError(Exception):
    """An entry, a partial or a sidecar is not what it should be; the text says how."""

    #: Of the entry, where `Store.open` raised it.
    directory = ""


class LostError(Exception):
    """Somebody swept or took over a partial: before it was locked, or locks do not work."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """The sidecar of a shard."""

    url: str
    key: str
    info: ObjectInfo
    size: int
    digest: str  #: tree digest of the data, hex; empty while the shard is in flight
    checked: str | None  #: algorithm of the origin's checksum that the bytes were compared with
    fetched_at: float  #: seconds since the epoch
    boot: str  #: boot during which the bytes were last known good on disk
    library: str  #: version of shardcache that wrote this

    @property
    def basename(self) -> str:
        """The name of the data file (DamagedError: the URL makes no sense)."""
        try:
            return parse_url(self.url, allow_schemes=[self.url.partition(":")[0]]).basename
        except ConfigError as exn:
            raise DamagedError(f"its sidecar names no shard ({exn.message})") from exn

    def encode(self) -> bytes:
        """The sidecar's bytes."""
        record: dict[str, Any] = {"schema": SCHEMA}
        record |= {name: getattr(self, name) for name in self.__slots__}
        record["object"] = record.pop("info").as_record()
        record["fetched_at"] = utc(self.fetched_at).isoformat(timespec="milliseconds")
        return f"{json.dumps(record)}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Read what `encode` wrote (DamagedError: it is anything else)."""
        try:
            record = dict(json.loads(data))
            if record.pop("schema") != SCHEMA:
                raise ValueError("it has another schema")
            record["info"] = ObjectInfo.from_record(record.pop("object"))
            date = datetime.fromisoformat(record["fetched_at"]).timestamp()
            found = cls(**{**record, "fetched_at": max(0.0, date)})
            texts = found.url, found.key, found.digest, found.boot, found.library
            typed = type(found.size) is int and isinstance(found.checked, str | None)
            if not typed or not all(isinstance(text, str) for text in texts):
                raise TypeError("a field has another type")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exn:
            reason = f"{type(exn).__name__}: {exn}"[:200]
            raise DamagedError(f"its sidecar cannot be read ({reason})") from exn
        return found


#: How opening fails if the file is gone.
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
#: What a disk says of one file that it cannot read. What it says of itself is no damage.
_UNREADABLE = NOT_DATA | frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.EILSEQ, errno.ENODATA}
)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """The body reads an entry; where the disk cannot, the entry is damaged (DamagedError)."""
    try:
        yield
    except OSError as exn:
        if exn.errno not in _UNREADABLE:
            raise
        raise DamagedError(f"it cannot be read ({exn.strerror})") from exn


class Entry(NamedTuple):
    """A published shard.

    A tuple, and its directory a `str`, because a scan makes a hundred thousand of them.

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
    def at(cls, path: Path) -> Entry:
        """The entry in a directory that bears an entry's name."""
        parsed = parse_entry_name(path.name)
        assert parsed is not None
        return cls(str(path), path.parent.name, *parsed, _used(path))

    @property
    def path(self) -> Path:
        """The directory of the entry."""
        return Path(self.directory)

    @property
    def published(self) -> float:
        """When it came into its place, in seconds since the epoch; 0 if it is gone."""
        try:
            return os.lstat(self.directory).st_mtime
        except OSError:
            return 0.0

    @readable()
    def metadata(self) -> Metadata:
        """Read the sidecar.

        Raises:
            DamagedError: it is missing, or is not this entry's.
            OSError: the entry is gone, or the disk fails.
        """
        try:
            metadata = Metadata.decode(read_file(f"{self.directory}/{META}", MAX_BYTES))
        except FileNotFoundError as exn:
            if is_directory(self.directory):
                raise DamagedError("it has no sidecar") from exn
            raise
        if (metadata.key, metadata.info.version, metadata.size) != self[1:4]:
            raise DamagedError("its sidecar describes another shard")
        return metadata

    def name(self) -> str:
        """The URL of its shard; where the sidecar does not tell, the name of its data file."""
        with contextlib.suppress(DamagedError, OSError):
            return self.metadata().url
        with contextlib.suppress(DamagedError, OSError):
            return self.data.name
        return ""

    @property
    def data(self) -> Path:
        """The path of the shard itself.

        Raises:
            DamagedError: it has no data file.
            OSError: the entry is gone.
        """
        path = data_file(self.path)
        if path is None and is_directory(self.directory):
            raise DamagedError("it has no data file")
        if path is None:
            raise FileNotFoundError(errno.ENOENT, "the entry is gone", self.directory)
        return path


def data_file(directory: Path) -> Path | None:
    """The data file in the directory of an entry or a partial, if there is one.

    The sidecar is read only if another program's file makes the choice unclear.
    """
    names = _data_names(list_names(directory))
    if len(names) > 1 and (stated := _stated_name(directory)) is not None:
        names = [stated] if stated in names else []
    return directory / names[0] if names else None


def _data_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(".") and not is_side_file(name)]


def _stated_name(directory: Path) -> str | None:
    """The name of the data file, as the sidecar or the journal of a partial states it."""
    for name in (META, PROGRESS):
        with contextlib.suppress(OSError, ValueError, DamagedError):
            data = read_file(directory / name, MAX_BYTES)
            # In a journal, the sidecar follows a header.
            return Metadata.decode(data[data.index(b'{"schema"') :].partition(b"\n")[0]).basename
    return None


def remove_directory(directory: Path, name: str | None = None) -> None:
    """Remove the files of shardcache from a directory, then the directory.

    If the directory holds anything else, rename it to ``kept.*``, which no sweep touches. If the
    disk fails, the next sweep tries again.

    Args:
        directory: of an entry or a partial, in `Layout.partial`.
        name: of the data file; None to read it from the sidecar.
    """
    try:
        fd = open_directory(directory)
    except OSError as exn:  # the directory is gone
        logger.debug("%s: %s", directory, exn)
        return
    try:
        names = os.listdir(fd)  # noqa: PTH208 - names are enough
        data = name or _stated_name(directory) or _likely_name(names, fd)
        foreign = []
        for each in sorted(names, key=is_side_file):  # the data first: the sidecar names it
            if each == data or is_side_file(each):
                if not _remove_name(each, fd):
                    foreign.append(each)
            elif not each.startswith(_STILL_OPEN):
                foreign.append(each)
        if not foreign:
            directory.rmdir()
            return
        kept = directory.rename(directory.with_name(f"kept.{directory.name}"))
        shown = ", ".join(map(repr, sorted(foreign)[:3])) + (", ..." if foreign[3:] else "")
        logger.warning(
            "%s stays, because it holds files that shardcache did not write (%s); move them "
            "elsewhere or delete them",
            *(kept, shown),
        )
    except OSError as exn:
        logger.debug("%s is not removed yet: %s", directory, exn)
    finally:
        os.close(fd)


def _likely_name(names: list[str], fd: int) -> str | None:
    """The name of the data file in a directory whose sidecar cannot be read, or is missing."""
    found = _data_names(names)
    if len(found) != 1:
        return None
    # A file that lies alone is ours only if its mode is: closed to other users.
    is_closed = not os.lstat(found[0], dir_fd=fd).st_mode & 0o117
    return found[0] if is_closed or len(names) > 1 else None


def _remove_name(name: str, fd: int) -> bool:
    """Remove a file or an empty directory; False if it is a mount point or a full directory.

    Raises:
        OSError: the disk fails.
    """
    try:
        try:
            os.unlink(name, dir_fd=fd)
        except IsADirectoryError:
            os.rmdir(name, dir_fd=fd)
    except OSError as exn:
        if exn.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
            raise
        return exn.errno == errno.ENOENT
    return True


def versions(layout: Layout, key: str) -> list[tuple[int, str, int]]:
    """(nanoseconds of its time, directory, size) of every version of one shard, newest first."""
    key_dir = str(layout.key_dir(key))
    found = []
    for name in list_names(key_dir):
        parsed = parse_entry_name(name)
        if parsed is not None:
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                status = os.lstat(f"{key_dir}/{name}")
                if stat.S_ISDIR(status.st_mode):
                    found.append((status.st_mtime_ns, f"{key_dir}/{name}", parsed[1]))
    return sorted(found, reverse=True)


def _directories(path: str) -> list[os.DirEntry[str]]:
    """The directories in a directory; none if it is gone, or not ours and closed to us."""
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _used(directory: Path | str) -> float:
    try:
        return os.lstat(f"{directory}/{META}").st_mtime
    except OSError:
        return 0.0  # no sidecar: the first to go


@dataclass(slots=True, eq=False)  # not frozen: that would double what making one costs
class Opened:
    """A hit: an open, pinned data file, which the caller must close."""

    file: io.FileIO  #: unbuffered; it owns the descriptor, and the pin with it
    path: str  #: where the data is
    directory: str  #: the entry's
    size: int
    #: It is not pinned: somebody who evicts or publishes it was stopped. It can be read to its
    #: end all the same, but may leave its path.
    stuck: bool = False
    reopened: bool = False  #: in place of one whose handle was stale
    replaced: bool = False  #: a newer version was published, see `Store.mark_replaced`

    @property
    def fd(self) -> int:
        """The descriptor, for as long as `file` is open."""
        return self.file.fileno()

    @property
    def entry(self) -> Entry:
        """The entry that it belongs to, in whichever namespace."""
        return Entry.at(Path(self.directory))

    def readinto(self, buffer: WriteableBuffer, position: int) -> int:
        """Read bytes from ``position`` on; 0 at the end of the shard."""
        count = os.preadv(self.file.fileno(), (buffer,), position)
        if count == 0 and position < self.size and memoryview(buffer).nbytes:
            raise OSError(errno.EIO, f"the file ends at byte {position} of {self.size}")
        return count

    def duplicate(self) -> Opened:
        """Another handle of the same file, under the same pin."""
        return replace(self, file=io.FileIO(os.dup(self.fd)))

    def close(self) -> None:
        """Let go of the entry."""
        try:
            self.file.close()
        except OSError as exn:  # closed all the same; nothing was written that could be lost
            logger.debug("%s: closing it: %s", self.path, exn)


def open_data(directory: str, path: str, size: int, grace: float | None) -> Opened | None:
    """Open the data file of an entry, and pin it where flock tells (no ``grace``).

    None if it is gone; DamagedError: it has not ``size`` bytes.
    """
    fd = -1
    try:
        # As `open_file`, without a call: a hit is opened a million times.
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
        # That is no miss: as long as the name is taken, nobody can publish.
        if stuck and not is_file(path, fd):
            return None
        found = os.fstat(fd)
        if found.st_nlink == 0:  # evicted between open and flock
            return None
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"its data file has {found.st_size} bytes, not {size}")
        opened = Opened(file, path, directory, size, stuck, replaced=found.st_mtime == 0.0)
    finally:
        if opened is None:
            file.close()
    return opened


@contextlib.contextmanager
def hold(directory: Path, grace: float | None, *, shared: bool = False) -> Iterator[bool]:
    """Hold the lock of the data file in a directory; False if somebody else does, or may do.

    Where flock does not tell (``grace``) nothing is locked: free is what was idle for so long.
    """
    if grace is not None:
        yield is_idle(directory, grace)
        return
    data = data_file(directory) or directory
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(open_file(data)).fileno()
            stack.callback(unlock, fd)
            free = try_flock(fd, shared=shared)
            if free and not shared:  # or it was removed since it was opened, and made anew
                free = is_file(data, fd)
        except OSError as exn:
            # What is gone or planted nobody reads. Another member of the group may have been
            # killed before it opened its file to all. With EMFILE for one nobody knows.
            if exn.errno not in NOT_DATA | GONE | {errno.EACCES}:
                raise
            free = None if exn.errno == errno.EACCES else True
        yield is_idle(directory) if free is None else free


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
                    if not opened.replaced:
                        return opened
                    opened.close()
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
            remove_directory(partial.path, name)
            return theirs
        self._known.pop(key, None)
        if not self._rename(partial, entry, metadata.size):
            remove_directory(partial.path, name)
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

    def mark_replaced(self, entry: Entry) -> None:
        """Have the processes that know this entry look for a newer version; for one that is in use.

        They see it in the `fstat` of their next open. Nothing else reads a data file's time.
        """
        try:
            os.utime(entry.data, (0, 0), follow_symlinks=False)
        except (DamagedError, OSError) as exn:  # another member's of the group, or read-only
            logger.info("%s is served on where it is known: %s", entry.path.name, exn)

    def entries(self) -> Iterator[Entry]:
        """Every entry, in no order; what has not the name and place of one is none."""
        for prefix in _directories(str(self.layout.objects)):
            for key in _directories(prefix.path):
                if is_key(key.name) and key.name[:2] == prefix.name:
                    for child in _directories(key.path):
                        if (parsed := parse_entry_name(child.name)) is not None:
                            yield Entry(child.path, key.name, *parsed, _used(child.path))

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
            remove_directory(doomed)
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
            remove_directory(staging, basename)
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
    """Move an entry out of sight, in its own namespace.

    Returns the new path, or None if the entry is gone, or is a mount point and so not ours.
    """
    hidden = Layout(directory.parents[3]).new_evicted(directory.parent.name)
    try:
        directory.rename(hidden)
    except OSError as exn:
        if exn.errno not in IMMOVABLE:
            raise
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
