"""An entry: a published shard as it lies on disk.

Entries are values: looking at one says nothing about whether it is still there.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from shardcache.clock import rfc3339
from shardcache.files import open_file
from shardcache.layout import (
    IDLE_GRACE,
    META,
    Layout,
    is_directory,
    is_idle,
    is_key,
    list_names,
    parse_entry_name,
    read_file,
)
from shardcache.locks.flock import is_file, pin, seize
from shardcache.origins.base import ObjectInfo
from shardcache.store.entrystream import EntryStream

SCHEMA = 1
#: A sidecar is about 700 bytes; URLs are at most some kilobytes.
MAX_BYTES = 64 * 1024
#: The year 10000, which `encode` could not write.
_LAST_SECOND = 253_402_300_800


class DamagedError(Exception):
    """An entry, a partial or a sidecar is not what it should be; the text says how."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """One fetched shard.

    Attributes:
        url: canonical URL, free of credentials.
        key: key of that URL.
        info: the version fetched.
        size: bytes of the data file.
        digest: tree digest of the data (`digests.tree_digest`), hex; empty while
            the shard is in flight.
        checked: the origin's checksum algorithm that the bytes were compared
            with before publishing, or None where it stated none we can compute.
        fetched_at: seconds since the epoch.
        boot: boot during which the bytes were last known good on disk.
        library: version of shardcache that wrote this.
    """

    url: str
    key: str
    info: ObjectInfo
    size: int
    digest: str
    checked: str | None
    fetched_at: float
    boot: str
    library: str

    def encode(self) -> bytes:
        """The sidecar's bytes."""
        record = {
            "schema": SCHEMA,
            "url": self.url,
            "key": self.key,
            "object": self.info.as_record(),
            "size": self.size,
            "digest": self.digest,
            "checked": self.checked,
            "fetched_at": rfc3339(self.fetched_at),
            "boot": self.boot,
            "library": self.library,
        }
        # A line for each field. `indent` would leave the work to json's encoder in Python,
        # and every shard has this written twice.
        lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items())
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Read what `encode` wrote.

        Raises:
            DamagedError: ``data`` is anything else.
        """
        try:
            record = json.loads(data)
            schema = record["schema"]
            if type(schema) is not int or schema != SCHEMA:
                raise DamagedError(f"its sidecar has schema {str(schema)[:20]}, not {SCHEMA}")
            fetched = datetime.fromisoformat(_text(record, "fetched_at"))
            if fetched.tzinfo is None or not 0 <= fetched.timestamp() < _LAST_SECOND:
                raise ValueError("fetched_at has no time zone, or is no time of ours")
            checked = record["checked"]
            size = record["size"]
            if not (checked is None or isinstance(checked, str)):
                raise TypeError("checked")
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise TypeError("size")
            return cls(
                url=_text(record, "url"),
                key=_text(record, "key"),
                info=ObjectInfo.from_record(record["object"]),
                size=size,
                digest=_text(record, "digest"),
                checked=checked,
                fetched_at=fetched.timestamp(),
                boot=_text(record, "boot"),
                library=_text(record, "library"),
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exn:
            reason = f"{type(exn).__name__}: {exn}"[:200]
            raise DamagedError(f"its sidecar cannot be read ({reason})") from exn


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise TypeError(name)
    return value


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
        return cls(str(path), path.parent.name, parsed[0], parsed[1], _used(path))

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

    def metadata(self) -> Metadata:
        """Read the sidecar.

        Raises:
            DamagedError: it is missing, or is not this entry's.
            OSError: it cannot be read, or the entry is gone.
        """
        try:
            metadata = Metadata.decode(read_sidecar(self.directory))
        except FileNotFoundError as exn:
            if lacks(self.path, META.__eq__):
                raise DamagedError("it has no sidecar") from exn
            raise
        if (metadata.key, metadata.info.version, metadata.size) != self[1:4]:
            raise DamagedError("its sidecar describes another shard")
        return metadata

    @property
    def data(self) -> Path:
        """The shard itself.

        Raises:
            OSError: the entry is gone.
            DamagedError: it has no data file.
        """
        for name in list_names(self.path):
            if _is_data(name):
                return self.path / name
        if lacks(self.path, _is_data):
            raise DamagedError("it has no data file")
        raise FileNotFoundError(errno.ENOENT, "the entry is gone", str(self.path))


def _is_data(name: str) -> bool:
    return name != META and not name.startswith(".")


def lacks(directory: Path, wanted: Callable[[str], bool]) -> bool:
    """Whether an entry is in its place, and no name in it is ``wanted``.

    An entry comes and goes with its directory, by rename, so what is missing
    from one that is in place was never there or was taken out. The descriptor
    keeps the directory's inode from being that of the entry's successor.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        missing = not any(wanted(name) for name in os.listdir(fd))  # noqa: PTH208
        return missing and os.path.samestat(os.fstat(fd), os.lstat(directory))
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)


def read_sidecar(directory: str | Path) -> bytes:
    """The sidecar of an entry, undecoded.

    Raises:
        OSError: it is gone or cannot be read.
        DamagedError: something else is in its place.
    """
    try:
        return read_file(f"{directory}/{META}", MAX_BYTES)
    except OSError as exn:
        if exn.errno == errno.ELOOP:
            raise DamagedError("its sidecar is not a plain file") from exn
        raise


def below(objects: Path, prefix: str) -> list[Entry]:
    """The entries whose keys begin with ``prefix``, the name of their directory; in no order.

    Entries that go away meanwhile are left out, and so is what does not have
    the name and the place that we give entries.

    Raises:
        OSError: a directory cannot be read.
    """
    directory = f"{objects}/{prefix}"
    if not is_directory(directory):  # perhaps one that is not open to us yet (`modes`)
        return []
    found = []
    for place in _scanned(directory):
        key = place.name
        if is_key(key) and key.startswith(prefix) and place.is_dir(follow_symlinks=False):
            for child, version, size in _listed(place.path):
                path = child.path
                found.append(Entry(path, key, version, size, _used(path)))
    return found


def versions(layout: Layout, key: str) -> list[tuple[Path, int]]:
    """(directory, size) of every version of one shard, newest first.

    Raises:
        OSError: the directory cannot be read.
    """
    found = []
    key_dir = layout.key_dir(key)
    if not (is_directory(key_dir.parent) and is_directory(key_dir)):
        return []
    for child, _version, size in _listed(key_dir):
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            found.append((child.stat(follow_symlinks=False).st_mtime_ns, child.path, size))
    return [(Path(path), size) for _, path, size in sorted(found, reverse=True)]


def _listed(key_dir: Path | str) -> list[tuple[os.DirEntry[str], str, int]]:
    """(directory, version, size) of the entries of a key; symbolic links are none."""
    return [
        (child, *parsed)
        for child in _scanned(key_dir)
        if (parsed := parse_entry_name(child.name)) is not None
        and child.is_dir(follow_symlinks=False)
    ]


def _scanned(directory: Path | str) -> list[os.DirEntry[str]]:
    try:
        return list(os.scandir(directory))
    except (FileNotFoundError, NotADirectoryError):  # it was there just now
        return []


def _used(directory: Path | str) -> float:
    try:
        return os.lstat(f"{directory}/{META}").st_mtime
    except OSError:
        return 0.0  # no sidecar: the first to go


def scan(layout: Layout) -> Iterator[Entry]:
    """Every entry of a namespace, in no order.

    Entries that go away meanwhile are left out, and so is what does not have
    the name and the place that we give entries.

    Raises:
        OSError: a directory cannot be read.
    """
    for prefix in list_names(layout.objects):
        if is_key(prefix * 16):
            yield from below(layout.objects, prefix)


#: What opening a planted link, directory or socket says.
_NOT_DATA = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
#: What a disk says of one file that it cannot read. What it says of itself is no damage.
UNREADABLE = frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.EILSEQ, errno.ENODATA}
)
_fileno = io.FileIO.fileno  # what `EntryStream` adds is for later
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


@dataclass(slots=True, eq=False)  # not frozen: that would double what making one costs
class Opened:
    """A hit: an open, pinned data file, which the caller must close.

    Attributes:
        file: unbuffered; it owns the descriptor.
        path: where the data is.
        directory: the entry's.
        size: bytes of it.
        stuck: somebody began to evict it and does not go on. It can be read to its end
            all the same, but may leave its path at any time.
    """

    file: EntryStream
    path: str
    directory: str
    size: int
    stuck: bool = False

    @property
    def fd(self) -> int:
        """The descriptor, for as long as `file` is open."""
        return self.file.fileno()

    def close(self) -> None:
        """Let go of the entry."""
        self.file.close()


def open_data(directory: str, path: str, size: int, grace: float | None) -> Opened | None:
    """Open and pin a data file of ``size`` bytes; None if it is gone.

    Args:
        directory: the entry's.
        path: of the data file in it.
        size: bytes that it must have.
        grace: as `Layout.grace`; where flock does not tell, nothing is pinned.

    Raises:
        DamagedError: what is there is no such file.
        OSError: the disk fails.
    """
    try:
        file = open_file(path, EntryStream)
    except OSError as exn:
        if exn.errno in _GONE:
            return None
        if exn.errno in _NOT_DATA:
            raise DamagedError("its data file is a link, a directory or a socket") from exn
        if exn.errno in UNREADABLE:
            raise DamagedError(f"its data file cannot be opened ({exn.strerror})") from exn
        raise
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        fd = _fileno(file)
        # A miss would be fetched in vain as long as the name is taken.
        stuck = grace is None and not pin(fd, path)
        if stuck and not is_file(path, fd):
            return None
        found = os.fstat(fd)
        if found.st_nlink == 0:  # evicted between open and flock
            return None
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"its data file has {found.st_size} bytes, not {size}")
        stack.pop_all()
    return Opened(file, path, directory, size, stuck)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """What is done in the body reads an entry; where the disk cannot, that is damaged.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        yield
    except OSError as exn:
        if exn.errno not in UNREADABLE:
            raise
        raise DamagedError(f"it cannot be read ({exn.strerror})") from exn


@contextlib.contextmanager
def hold(entry: Entry, grace: float | None) -> Iterator[bool]:
    """Hold the exclusive lock of an entry's data; False if it is pinned.

    Where flock does not tell, what was used within the grace counts as pinned.

    Raises:
        OSError: the entry is gone, or cannot be opened.
    """
    try:
        data = entry.data
        file = open_file(data, io.FileIO)
    except DamagedError:
        yield True
        return
    except OSError as exn:
        if exn.errno not in _NOT_DATA:
            raise
        yield True  # planted; nobody reads it
        return
    with file:
        free = seize(file.fileno(), data) if grace is None else None
        yield is_idle(entry.path, grace or IDLE_GRACE) if free is None else free
