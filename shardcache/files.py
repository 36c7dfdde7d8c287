"""Opening files safely, and who may do what with them: one user, or all users of one group.

Permission bits are set explicitly, so that no umask takes any away; where a group shares a
cache, a directory gets its name only when every member may use it, so that no member meets
one that is closed to it for a moment.

    private    directories 0700   files 0600   published data 0400   notices 0600
    shared     directories 2770   files 0660   published data 0440   notices 0640

The set-group-id bit gives everything that is made below a directory its group. Members trust
each other: any of them may remove or replace what another one stored.

A lock on a file lives as long as its open file does, also in a forked child. So files whose
flock says "this process writes" are made by `open_exclusive` and `dup_exclusive`, and a forked
child closes them before any of its code runs. Safe between threads.
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

File = TypeVar("File", bound=io.FileIO)

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
            if found.st_uid != os.geteuid():
                return (
                    f"{path} belongs to user {found.st_uid} and this process is user "
                    f"{os.geteuid()}; use a directory of your own, or share one: shared_group"
                )
            if found.st_mode & stat.S_IWGRP:
                return (
                    f"{path} can be written by the group {group_name(found.st_gid)}, whose members "
                    f"could plant shards in it; look at what is in it, then: chmod g-w {path} (or "
                    "share it with them: shared_group)"
                )
            return None
        name = group_name(self.group)
        if found.st_gid == self.group and self.directory & ~found.st_mode == 0:
            return None
        return (
            f"{path} is not shared by the group {name} (it has group {group_name(found.st_gid)} "
            f"and mode {stat.S_IMODE(found.st_mode):04o}); user {found.st_uid}, whose it is, can "
            f"mend that: chgrp {name} {path} && chmod {self.directory:o} {path}"
        )


PRIVATE = Modes()

#: What a forked child closes. A fork waits for the guard, so that no file is open and not in here.
_exclusive: weakref.WeakSet[io.FileIO] = weakref.WeakSet()
_guard = threading.RLock()  # reentrant because a signal handler may fork


def open_exclusive(path: str | os.PathLike[str], flags: int, modes: Modes = PRIVATE) -> io.FileIO:
    """Open a file, never through a symbolic link, that a forked child must not keep.

    Raises:
        OSError: as `os.open`.
    """
    with _guard:
        file = open_file(path, io.FileIO, flags, modes.file)
        _exclusive.add(file)
    if flags & os.O_EXCL:
        try:
            settle(file.fileno(), modes.file)
        except OSError:
            file.close()
            raise
    return file


def dup_exclusive(file: io.FileIO) -> io.FileIO:
    """Another descriptor of an open file, which a forked child must not keep either.

    Raises:
        OSError: ``file`` is closed, or there are too many.
    """
    with _guard:
        if file.closed:
            raise OSError(errno.EBADF, "it is closed")
        copy = io.FileIO(os.dup(file.fileno()))
        _exclusive.add(copy)
    return copy


def _close_in_child() -> None:
    for file in _exclusive:
        with contextlib.suppress(OSError):  # a failing disk; the others must be closed too
            file.close()
    _exclusive.clear()
    _guard.release()


os.register_at_fork(
    before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child
)


def open_file(
    path: str | os.PathLike[str],
    kind: Callable[[int], File],
    access: int = os.O_RDONLY,
    mode: int = 0o600,
) -> File:
    """Open a file, never through a symbolic link, waiting for nobody.

    Args:
        path: the file.
        kind: a class of files.
        access: whether to read or to write; what the object thinks does not matter to flock.
        mode: of a file that is made.

    Raises:
        OSError: as `os.open`; IsADirectoryError for a directory.
    """
    # O_NONBLOCK: somebody may have put a named pipe there.
    fd = os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    try:
        return kind(fd)
    except OSError:
        os.close(fd)
        raise


def list_directory(path: str | os.PathLike[str]) -> list[str]:
    """The names in a directory, which is not reached through a symbolic link.

    Raises:
        OSError: it is missing, something else, or cannot be listed.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return os.listdir(fd)  # noqa: PTH208 - names are enough
    finally:
        os.close(fd)


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
