"""An entry: a published shard as it lies on disk. An `Entry` is a value: it may be gone already."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardcache.clock import utc
from shardcache.files import SAFELY, open_file
from shardcache.layout import (
    META,
    PROGRESS,
    Layout,
    is_directory,
    is_idle,
    is_key,
    list_names,
    parse_entry_name,
    read_file,
)
from shardcache.locks.flock import is_file, try_flock, wait_flock
from shardcache.origins.base import ObjectInfo

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

SCHEMA = 1
#: A sidecar is about 700 bytes; URLs are at most some kilobytes.
MAX_BYTES = 64 * 1024


class DamagedError(Exception):
    """An entry, a partial or a sidecar is not what it should be; the text says how."""

    #: Of the entry, where `Store.open` raised it.
    directory = ""


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


#: What opening says of what is gone, and of a planted link, directory or socket.
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
NOT_DATA = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
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
    """A published shard. A tuple, and its path a text: a scan makes them by the hundred thousand.

    Attributes:
        directory: where it is.
        key: key of its URL.
        version: version of the object.
        size: bytes of the data.
        used: wall-clock seconds of the last use, to `touch_interval`.
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
        """Its directory."""
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

    @property
    def data(self) -> Path:
        """The shard itself.

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
    """The shard's own file in the directory of an entry or a partial, if there is one."""
    for name in list_names(directory):
        if name not in (META, PROGRESS) and not name.startswith("."):
            return directory / name
    return None


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


def scan(layout: Layout) -> Iterator[Entry]:
    """Every entry of a namespace, in no order; what has not the name and place of one is none."""
    for prefix in _directories(str(layout.objects)):
        for key in _directories(prefix.path):
            if is_key(key.name) and key.name[:2] == prefix.name:
                for child in _directories(key.path):
                    if (parsed := parse_entry_name(child.name)) is not None:
                        yield Entry(child.path, key.name, *parsed, _used(child.path))


def _directories(path: str) -> list[os.DirEntry[str]]:
    """The directories in one that was there just now; a symbolic link is none."""
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
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
        opened = Opened(file, path, directory, size, stuck)
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
