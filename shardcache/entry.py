"""An entry: a published shard as it lies on disk.

Entries are values: looking at one says nothing about whether it is still there.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcache.layout import (
    META,
    Layout,
    is_directory,
    is_key,
    list_names,
    parse_entry_name,
    read_file,
)
from shardcache.metadata import MAX_BYTES, DamagedError, Metadata

__all__ = ["Entry", "lacks", "read_sidecar", "scan", "versions"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A published shard.

    Attributes:
        path: its directory.
        key: key of its URL.
        version: version of the object.
        size: bytes of the data.
        used: wall-clock seconds of the last use, to `touch_interval`.
    """

    path: Path
    key: str
    version: str
    size: int
    used: float

    @classmethod
    def at(cls, path: Path) -> Entry:
        """The entry in a directory that bears an entry's name."""
        parsed = parse_entry_name(path.name)
        assert parsed is not None
        return cls(path, path.parent.name, parsed[0], parsed[1], _used(path))

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


def scan(layout: Layout) -> Iterator[Entry]:
    """Every entry of a namespace, in no order.

    Entries that go away meanwhile are left out, and so is what does not have
    the name and the place that we give entries.

    Raises:
        OSError: a directory cannot be read.
    """
    for prefix in list_names(layout.objects):
        if not is_key(prefix * 16):  # perhaps one that is not open to us yet (`modes`)
            continue
        directory = f"{layout.objects}/{prefix}"
        for key in list_names(directory):
            if not (is_key(key) and key.startswith(prefix)):
                continue
            for child, version, size in _children(f"{directory}/{key}"):
                yield Entry(Path(child.path), key, version, size, _used(child.path))


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
    if not is_directory(key_dir):
        return []
    try:
        with os.scandir(key_dir) as children:
            named = [(child, parse_entry_name(child.name)) for child in children]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        (child, *parsed)
        for child, parsed in named
        if parsed is not None and child.is_dir(follow_symlinks=False)
    ]


def _used(directory: Path | str) -> float:
    try:
        return os.lstat(f"{directory}/{META}").st_mtime
    except OSError:
        return 0.0  # no sidecar: the first to go
