"""Descriptors that neither an interrupt nor a fork can lose.

The lock on a file lives as long as its open file does, so a descriptor whose number
is lost keeps its lock until the process ends, and one that a forked child shares
keeps it longer than that.

* `open_file`: a file to read, owned by an object from the first moment.
* `open_owned`, `dup_owned`: files whose flock says "this process is writing", as
  numbers that are closed when they are lost, and in a forked child before any of its
  code runs.

Safe between threads.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardcache.config import group_name
from shardcache.errors import ConfigError

__all__ = [
    "PRIVATE",
    "Modes",
    "disown",
    "dup_owned",
    "is_alone",
    "list_directory",
    "open_file",
    "open_owned",
    "random_token",
    "settle",
    "sync_directory",
]


#: A sweeper may remove a directory that is not named yet, others may remove its parent as
#: empty; not this often in a row.
_ATTEMPTS = 100
#: Of those, so many follow each other at once; the others after `_UNSEEN` seconds each. On
#: a network filesystem a directory may be there and not be seen: another node made it, and
#: this one's kernel remembers that it was absent (3 to 60 s: acdirmin, acdirmax, nfs(5)).
_AT_ONCE = 10
_UNSEEN = 0.05


def random_token() -> str:
    """128 random bits as hex: no two nodes, pids or restarts ever share a name."""
    return os.urandom(16).hex()


def settle(file: int | Path, mode: int) -> None:
    """Give what was just made the bits that the umask took away.

    Args:
        file: an open file, or the path of a directory.
        mode: what it was made with.

    Raises:
        OSError: the filesystem refuses.
    """
    if mode & ~os.stat(file).st_mode:  # noqa: PTH116 - files by their descriptor
        os.chmod(file, mode)  # noqa: PTH101


def _is_in_the_way(path: Path) -> bool:
    """Whether something is there that is no directory, nor a link to one; one look tells."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path.is_symlink()
    except OSError as exn:
        if exn.errno in (errno.ELOOP, errno.ENOTDIR):
            return True
        raise


def _make_parents(path: Path) -> None:
    """As ``mkdir -p``, while others do so, on this node and on others."""
    for attempt in range(_ATTEMPTS):
        try:
            path.mkdir(parents=True, exist_ok=True)
            return
        except FileExistsError as exn:
            if _is_in_the_way(Path(exn.filename)):
                raise
            time.sleep(_UNSEEN if attempt >= _AT_ONCE else 0)
    raise FileNotFoundError(errno.ENOENT, "it is there and cannot be seen", str(path))


@dataclass(frozen=True, slots=True)
class Modes:
    """The permissions of one cache; `PRIVATE`, or what `of` makes.

    Attributes:
        group: number of the group that shares it; None where nobody does.
        directory: of every directory, the root's included.
        file: of what is written again: data in flight, sidecars, locks, sessions.
        published: of the data of entries.
        notice: of what is written once: the manifest, README.txt, CACHEDIR.TAG.
    """

    group: int | None = None
    directory: int = 0o700
    file: int = 0o600
    published: int = 0o400
    notice: int = 0o600

    @classmethod
    def of(cls, group: int | None) -> Modes:
        """Those of a cache that ``group`` shares, or of a private one.

        Raises:
            ConfigError: this process is not in the group.
        """
        if group is None:
            return PRIVATE
        if os.geteuid() != 0 and group not in (os.getegid(), *os.getgroups()):
            raise ConfigError(
                f"this process is not in the group {group_name(group)}, which shared_group names; "
                f"have its user added to it (and log in again), or run it with "
                f"'sg {group_name(group)} -c ...'.",
                option="shared_group",
            )
        return cls(group, 0o2770, 0o660, 0o440, 0o640)

    def new_directory(self, path: Path) -> None:
        """Make one directory.

        Raises:
            FileExistsError: something is there.
            FileNotFoundError: what it would be in is not.
            OSError: the disk is full, read-only, or not ours to write.
        """
        if self.group is None:
            path.mkdir(mode=self.directory)
            settle(path, self.directory)
            return
        for _ in range(_ATTEMPTS):
            # Renaming would take the place of an empty directory without a word.
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            unnamed = path.with_name(f".new.{random_token()}")
            unnamed.mkdir(mode=0o700)
            try:
                if unnamed.stat().st_gid != self.group:
                    os.chown(unnamed, -1, self.group)
                settle(unnamed, self.directory)
                unnamed.rename(path)
                return
            except FileNotFoundError:
                continue  # swept
            except OSError as exn:
                with contextlib.suppress(OSError):
                    unnamed.rmdir()
                if exn.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                    raise FileExistsError(exn.errno, exn.strerror, str(path)) from exn
                raise
        raise FileNotFoundError(errno.ENOENT, "it is swept as fast as it is made", str(path))

    def make_directory(self, path: Path, levels: int | None = None) -> None:
        """Make a directory and what it is in, as others may do at the same moment.

        Args:
            path: the directory.
            levels: how many of those it is in may be made too; the default is all. What is
                made on demand states it: where a disk was unmounted, nobody has looked
                yet at what has taken its place.

        Raises:
            FileExistsError: there is something else.
            FileNotFoundError: more is missing than may be made.
            OSError: as `new_directory`.
        """
        for attempt in range(_ATTEMPTS):
            try:
                self.new_directory(path)
                return
            except FileExistsError:
                if path.is_dir():
                    return
                if _is_in_the_way(path):
                    raise
                time.sleep(_UNSEEN if attempt >= _AT_ONCE else 0)
            except FileNotFoundError:
                if levels != 0:
                    self.make_directory(path.parent, None if levels is None else levels - 1)
                elif not path.parent.exists():  # else it was removed as soon as it was made
                    raise
        raise FileNotFoundError(errno.ENOENT, "it is removed as fast as it is made", str(path))

    def make_root(self, root: Path) -> None:
        """Make the directory of a cache; what it is in has to let the same people in.

        Raises:
            As `make_directory`.
        """
        if self.group is None and not root.parent.exists():
            # As `mkdir -p`: the umask decides about directories that are not the cache's.
            _make_parents(root.parent)
        self.make_directory(root)

    def objection(self, path: Path, found: os.stat_result) -> str | None:
        """Why ``path`` must not be a directory of the cache, and what to do; None if it may.

        Args:
            path: for the text.
            found: what is there.
        """
        if not stat.S_ISDIR(found.st_mode):
            return f"{path} is not a directory; point dir at a directory"
        if found.st_mode & stat.S_IWOTH:
            return (
                f"{path} can be written by every user, who could plant shards in it; look at what "
                f"is in it, then: chmod o-w {path}"
            )
        if self.group is None:
            if found.st_uid == os.geteuid():
                return None
            return (
                f"{path} belongs to user {found.st_uid} and this process is user {os.geteuid()}; "
                "use a directory of your own, or share one: shared_group"
            )
        name = group_name(self.group)
        if found.st_gid == self.group and self.directory & ~found.st_mode == 0:
            return None
        return (
            f"{path} is not shared by the group {name} (it has group {group_name(found.st_gid)} "
            f"and mode {stat.S_IMODE(found.st_mode):04o}); user {found.st_uid}, whose it is, can "
            f"mend that: chgrp {name} {path} && chmod {self.directory:o} {path}"
        )


PRIVATE = Modes()


File = TypeVar("File", bound=io.FileIO)

# What a forked child closes, by number. A fork waits for the guard, so that no descriptor
# is open but not yet registered. It is reentrant because a signal handler may fork.
_owned: dict[int, weakref.ref[io.FileIO]] = {}
_owned_guard = threading.RLock()


class _Owned(int):
    """The number of a file that is closed, and its lock freed, when the number is lost.

    An interrupt can strike between any two instructions: after a file was locked, and
    before anybody has written down that it was.
    """

    file: io.FileIO


def open_owned(path: str | os.PathLike[str], flags: int, modes: Modes = PRIVATE) -> int:
    """Open a file, never through a symbolic link, that a forked child must not keep.

    Raises:
        OSError: as `os.open`.
    """
    # O_NONBLOCK: somebody may have put a named pipe there.
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with _owned_guard:
        # `map`: no signal is looked for between the two calls; see `open_file`.
        opened = map(os.open, (path,), (flags,), (modes.file,))
        fd = _own(next(map(io.FileIO, opened, ("r+",))))
    if flags & os.O_EXCL:
        try:
            settle(fd, modes.file)
        except BaseException:
            disown(fd)
            raise
    return fd


def dup_owned(fd: int) -> int:
    """Another descriptor of an open file, which a forked child must not keep either.

    Raises:
        OSError: ``fd`` is closed, or there are too many.
    """
    with _owned_guard:
        return _own(next(map(io.FileIO, map(os.dup, (fd,)), ("r+",))))


def _own(file: io.FileIO) -> _Owned:
    fd = _Owned(file.fileno())
    fd.file = file
    _owned[int(fd)] = weakref.ref(file)
    return fd


def disown(fd: int) -> None:
    """Close a descriptor that `open_owned` or `dup_owned` made; in a forked child, nothing."""
    if isinstance(fd, _Owned):
        with _owned_guard:
            if not fd.file.closed:
                _owned.pop(int(fd), None)
                fd.file.close()


def _drop_in_child() -> None:
    global _owned_guard
    _owned_guard = threading.RLock()  # the old one belongs to a thread that is not here
    for found in _owned.values():
        file = found()
        if file is not None:
            with contextlib.suppress(OSError):  # a failing disk; the others must be closed too
                file.close()
    _owned.clear()


os.register_at_fork(
    before=lambda: _owned_guard.acquire(),
    after_in_parent=lambda: _owned_guard.release(),
    after_in_child=_drop_in_child,
)


def open_file(
    path: str | os.PathLike[str],
    kind: Callable[[int], File],
    access: int = os.O_RDONLY,
    mode: int = 0o600,
) -> File:
    """Open a file, never through a symbolic link, waiting for nobody.

    An interrupt can strike between any two instructions, and a number that `os.open`
    returned just before is lost: open, and locked, until the process ends. `map` makes
    both calls without a look for signals in between; the object closes the file when
    it goes away, however that comes about. And it is faster than two statements.

    Args:
        path: the file.
        kind: a class of files without an ``__init__`` of its own, which could be interrupted.
        access: whether to read or to write; what the object thinks does not matter to flock.
        mode: of a file that is made.

    Raises:
        OSError: as `os.open`; IsADirectoryError for a directory.
    """
    found: dict[str, int] = {}
    flags = access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fds = map(found.setdefault, ("fd",), map(os.open, (path,), (flags,), (mode,)))
    try:
        return next(map(kind, fds))
    except IsADirectoryError:
        if found:  # opened, and not closed by `kind`
            os.close(found["fd"])
        raise


def list_directory(path: str | os.PathLike[str]) -> list[str]:
    """The names in a directory, which is not reached through a symbolic link.

    Raises:
        OSError: it is missing, something else, or cannot be listed.
    """
    found: dict[str, int] = {}
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fds = map(found.setdefault, ("fd",), map(os.open, (path,), (flags,)))
    try:
        return next(map(os.listdir, fds))
    finally:
        if found:
            os.close(found["fd"])


def is_alone(fd: int) -> bool:
    """Whether an open file may be written: it is a plain one, and nowhere else.

    A hard link to a file of somebody's could have been put in its place.
    """
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and found.st_nlink <= 1


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names in it survive power loss.

    Raises:
        OSError: the disk fails.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
