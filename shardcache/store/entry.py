"""An entry: a published shard as it lies on disk.

Entries are values: looking at one says nothing about whether it is still there.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shardcache.layout import META, Layout, is_directory, list_names, read_file
from shardcache.names import is_key, parse_entry_name
from shardcache.store.metadata import MAX_BYTES, DamagedError, Metadata

__all__ = ["Entry", "below", "lacks", "read_sidecar", "versions"]


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
            DamagedError: it is not one of ours.
            OSError: it cannot be read, or the entry is gone.
        """
        return Metadata.decode(read_sidecar(self.path))

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
    for child, _version, size in _children(key_dir) if is_directory(key_dir.parent) else ():
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            found.append((child.stat(follow_symlinks=False).st_mtime_ns, child.path, size))
    return [(Path(path), size) for _, path, size in sorted(found, reverse=True)]


def _children(key_dir: Path | str) -> list[tuple[os.DirEntry[str], str, int]]:
    """(directory, version, size) of the entries of a key; symbolic links are none."""
    return _listed(key_dir) if is_directory(key_dir) else []


def _listed(key_dir: Path | str) -> list[tuple[os.DirEntry[str], str, int]]:
    """As `_children` of what is known to be a directory."""
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
