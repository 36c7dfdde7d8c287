"""What a power failure takes: writes and names that were never fsynced.

Models a journalling filesystem such as ext4 or XFS. Data reaches the disk when
its file is fsynced, and not before. Names (create, rename, unlink, mkdir ...)
are one ordered journal: any fsync puts all earlier ones on the disk, and a
failure loses a tail of the rest, never one out of the middle. So a rename can
survive whose data did not, which is what makes an entry look complete.

`Unsynced` keeps what is needed to go back: the durable content of files that
were written to, and for every name the way to undo it. One lock serialises all
changes, so record and deed cannot be torn apart.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import random
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Dirty:
    """A file with data that may be lost: itself, open, and its durable content."""

    fd: int
    durable: bytes


@dataclass(frozen=True, slots=True)
class _Named:
    """A change of names, with what it takes to undo it.

    Attributes:
        path: the name that was made, removed, or renamed to.
        before: the name that it had, if it was renamed.
        kept: another link to the file that was removed or overwritten.
        mode: of the directory that was removed or overwritten.
        made: whether the name is new.
    """

    path: Path
    before: Path | None = None
    kept: Path | None = None
    mode: int | None = None
    made: bool = False

    def undo(self) -> None:
        if self.made:
            is_directory = stat.S_ISDIR(self.path.lstat().st_mode)
            (self.path.rmdir if is_directory else self.path.unlink)()
            return
        if self.before is not None:
            self.path.rename(self.before)
        if self.kept is not None:
            self.kept.rename(self.path)
        elif self.mode is not None:
            self.path.mkdir()
            self.path.chmod(self.mode)


class Unsynced:
    """Everything since the last fsync.

    Args:
        grave: a directory on the same filesystem that keeps what was unlinked.
    """

    def __init__(self, grave: Path) -> None:
        self._grave = grave
        self._count = 0
        self._dirty: dict[Key, _Dirty] = {}
        self._names: list[_Named] = []
        self._guard = threading.RLock()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change and its record."""
        with self._guard:
            yield

    def writing(self, key: Key, path: str) -> None:
        """Data of a file is about to change; ``path`` opens it, whatever its names."""
        if key in self._dirty:
            return
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._dirty[key] = _Dirty(fd, _content(fd))

    def keep(self, path: Path) -> Path:
        """Another link to a file whose name is about to go."""
        kept = self._grave / str(self._count)
        self._count += 1
        os.link(path, kept, follow_symlinks=False)
        return kept

    def made(self, path: Path) -> None:
        self._names.append(_Named(path, made=True))

    def removed(self, path: Path, kept: Path | None, mode: int | None = None) -> None:
        self._names.append(_Named(path, kept=kept, mode=mode))

    def renamed(self, before: Path, path: Path, kept: Path | None, mode: int | None) -> None:
        self._names.append(_Named(path, before, kept, mode))

    def synced(self, key: Key | None) -> None:
        """A file (or a directory: None) was fsynced, and with it all names."""
        with self._guard:
            dirty = self._dirty.pop(key, None) if key is not None else None
            if dirty is not None:
                os.close(dirty.fd)
            self._names.clear()

    def lose(self, data: str, names: int | None, seed: int, spare: str) -> dict[str, int]:
        """The failure.

        Args:
            data: "zeros" (sizes survived, contents did not), "truncated" (neither
                did), "torn" (some pages did) or "kept".
            names: how many of the newest names are lost; None is all.
            seed: which pages survive when torn.
            spare: pattern of paths whose data reached the disk all the same.

        Returns:
            How many files and names were hit.
        """
        chance = random.Random(seed)
        with self._guard:
            files = 0
            if data != "kept":
                for dirty in self._dirty.values():
                    path = os.readlink(f"/proc/self/fd/{dirty.fd}")
                    if not fnmatch.fnmatchcase(path, spare):
                        files += _revert(dirty, data, chance)
            count = len(self._names) if names is None else min(names, len(self._names))
            for named in reversed(self._names[len(self._names) - count :]):
                named.undo()
            return {"files": files, "names": count}


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0)


def _revert(dirty: _Dirty, data: str, chance: random.Random) -> bool:
    now = _content(dirty.fd)
    if data == "truncated":
        left = dirty.durable
    else:
        left = dirty.durable[: len(now)].ljust(len(now), b"\0")
    if data == "torn":
        pages = [
            (now if chance.random() < 0.5 else left)[at : at + PAGE]
            for at in range(0, len(now), PAGE)
        ]
        left = b"".join(pages)
    os.ftruncate(dirty.fd, 0)
    view = memoryview(left)
    at = 0
    while at < len(left):
        at += os.pwrite(dirty.fd, view[at:], at)
    return left != now
