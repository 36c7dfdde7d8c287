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
import io
import os
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardcache.modes import PRIVATE, Modes, settle

__all__ = ["disown", "dup_owned", "is_alone", "list_directory", "open_file", "open_owned"]
__all__ += ["sync_directory"]

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
