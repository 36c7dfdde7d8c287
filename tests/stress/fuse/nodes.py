"""Inodes and open files of the shim: what the kernel may name by number.

Inodes are O_PATH descriptors, so a file stays reachable whatever becomes of its
name, here or behind the mount's back. Here is also what one node of a network
filesystem knows and another does not: `Settings.delay` hides names that were not
made on this mount, `Settings.stale` says ESTALE for what was removed elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.stress.fuse import proto
from tests.stress.fuse.proto import Request

Key = tuple[int, int]

_DIRECT_IO = 1


@dataclass(slots=True)
class Settings:
    """How the filesystem behaves.

    Attributes:
        entry, attr: seconds the kernel may remember names and attributes.
        negative: seconds it may remember that there is no such name.
        delay: seconds during which a name made elsewhere is not seen here.
        stale: whether what was removed elsewhere answers ESTALE, as on NFS,
            or lives until it is closed, as on a local filesystem.
        silly: whether unlinking an open file renames it until it is closed.
        flock: "working", "lying", "refused" or "hanging".
        flock_error: what "refused" says.
    """

    entry: float = 0.0
    attr: float = 0.0
    negative: float = 0.0
    delay: float = 0.0
    stale: bool = False
    silly: bool = False
    flock: str = "working"
    flock_error: int = errno.ENOLCK


@dataclass(slots=True)
class Node:
    """An inode the kernel knows."""

    fd: int
    key: Key
    lookups: int = 1


@dataclass(slots=True)
class Handle:
    """An open file or directory."""

    fd: int
    key: Key
    names: list[tuple[str, int, int]] = field(default_factory=list)


class Nodes:
    """The tables; safe between threads.

    Args:
        backing: the directory that is shown.
    """

    def __init__(self, backing: Path) -> None:
        self.root = Path(os.path.realpath(backing))
        self.settings = Settings()
        self.guard = threading.RLock()
        self.nodes: dict[int, Node] = {}
        self.handles: dict[int, Handle] = {}
        self.removed: set[Key] = set()  # inodes whose names went through this mount
        self._by_key: dict[Key, int] = {}
        self._next = proto.ROOT
        self._next_handle = 1
        self._known: dict[tuple[Key, str], Key] = {}  # names made or seen here
        self._hidden: dict[Key, tuple[int, str]] = {}  # open files under a silly name
        self.add(os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))

    # -- inodes ----------------------------------------------------------------

    def add(self, fd: int) -> tuple[int, os.stat_result]:
        """The number of an inode, looked up once more; ``fd`` is ours."""
        found = os.fstat(fd)
        key = key_of(found)
        with self.guard:
            number = self._by_key.get(key)
            if number is not None:
                os.close(fd)
                self.nodes[number].lookups += 1
            else:
                number, self._next = self._next, self._next + 1
                self.nodes[number] = Node(fd, key)
                self._by_key[key] = number
        return number, found

    def drop(self, number: int, count: int) -> None:
        """The kernel forgets ``count`` lookups."""
        with self.guard:
            node = self.nodes[number]
            node.lookups -= count
            if node.lookups <= 0 and number != proto.ROOT:
                del self.nodes[number], self._by_key[node.key]
                os.close(node.fd)

    def forget(self, request: Request) -> None:
        """FORGET and BATCH_FORGET."""
        if request.op == proto.Op.FORGET:
            self.drop(request.node, request.unpack("<Q")[0])
            return
        count, _ = request.unpack("<II")
        for at in range(count):
            number, lookups = request.unpack(f"<8x{16 * at}xQQ")
            self.drop(number, lookups)

    def alive(self, number: int) -> Node:
        """An inode.

        Raises:
            OSError: ESTALE, if another node removed it.
        """
        node = self.nodes[number]
        if self.settings.stale and node.key not in self.removed:
            found = os.fstat(node.fd)
            if found.st_nlink == 0:
                raise OSError(errno.ESTALE, "")
        return node

    def proc(self, number: int) -> str:
        """A path that opens the inode itself."""
        return f"/proc/self/fd/{self.alive(number).fd}"

    def absolute(self, number: int, name: str = "") -> Path:
        """Where it is, or a name in it, below the backing directory."""
        return Path(os.readlink(f"/proc/self/fd/{self.nodes[number].fd}"), name)

    def relative(self, number: int, name: str = "") -> str:
        """As `absolute`, as the tests say it."""
        return os.path.relpath(self.absolute(number, name), self.root)

    def entry(self, parent: int, name: str, *, made: bool = False) -> bytes:
        """The answer to a lookup, or to what made the name."""
        directory = self.nodes[parent]
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd)
        number, found = self.add(fd)
        if made:
            self.know(directory.key, name, found)
        elif not self._visible(directory.key, name, found):
            self.drop(number, 1)
            raise FileNotFoundError(errno.ENOENT, "")
        return proto.entry_reply(number, found, self.settings.entry, self.settings.attr)

    def know(self, parent: Key, name: str, found: os.stat_result) -> None:
        """A name that was made here: always seen."""
        self._known[parent, name] = key_of(found)

    def _visible(self, parent: Key, name: str, found: os.stat_result) -> bool:
        if self._known.get((parent, name)) == key_of(found):
            return True
        if self.settings.delay and found.st_ctime + self.settings.delay > time.time():
            return False
        self.know(parent, name, found)
        return True

    # -- open files --------------------------------------------------------------

    def opened(self, fd: int) -> bytes:
        """The answer to what opened ``fd``."""
        found = os.fstat(fd)
        with self.guard:
            number, self._next_handle = self._next_handle, self._next_handle + 1
            self.handles[number] = Handle(fd, key_of(found))
        # Past the page cache: the errors of reads reach the reader as they are.
        return proto.open_reply(number, 0 if stat.S_ISDIR(found.st_mode) else _DIRECT_IO)

    def close(self, number: int) -> None:
        with self.guard:
            handle = self.handles.pop(number)
            os.close(handle.fd)
            if self._is_open(handle.key):
                return
            directory, hidden = self._hidden.pop(handle.key, (-1, ""))
        if hidden:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(hidden, dir_fd=directory)
            self.removed.add(handle.key)
            os.close(directory)

    def _is_open(self, key: Key) -> bool:
        return any(handle.key == key for handle in self.handles.values())

    def hide_open(self, number: int, name: str) -> bool:
        """Silly rename: an open file keeps a name until it is closed."""
        if not self.settings.silly:
            return False
        directory = self.nodes[number].fd
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        key = key_of(found)
        with self.guard:
            if key in self._hidden or not self._is_open(key) or stat.S_ISDIR(found.st_mode):
                return False
            hidden = f".nfs{found.st_ino:016x}"
            os.rename(name, hidden, src_dir_fd=directory, dst_dir_fd=directory)
            self._hidden[key] = (os.dup(directory), hidden)
        return True

    def listing(self, handle: Handle) -> Iterator[tuple[str, int, int]]:
        """(name, inode, type) of what is seen of a directory."""
        here = os.fstat(handle.fd).st_ino
        yield ".", here, stat.S_IFDIR >> 12
        yield "..", here, stat.S_IFDIR >> 12
        for name in os.listdir(handle.fd):
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=handle.fd, follow_symlinks=False)
                if self._visible(handle.key, name, found):
                    yield name, found.st_ino, found.st_mode >> 12


def key_of(found: os.stat_result) -> Key:
    return found.st_dev, found.st_ino
