"""Notices as files in a directory that all ranks see; see `noticeboards.Board`.

A notice gets its name by link(2), which fails if the name is taken, on NFS, Lustre and GPFS,
too; what replaces another one, by rename. Names are read through `glimpse.look`, for another
node may have made them a moment ago.

On a local disk a claim is a file that its maker has locked (flock) before it has its name, so
it is never seen unlocked while its maker lives. It has two names: whoever removes "the lock
file" removes one, and the other still says that somebody is at work.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Sequence
from pathlib import Path

from shardcache.files import disown, open_file, open_owned
from shardcache.layout import read_file, replace_file, temporary_name, write_new
from shardcache.locks.flock import is_free, lock_exclusive
from shardcache.locks.mounts import mount_of
from shardcache.modes import Modes
from shardcache.sync.appearing import makedirs
from shardcache.sync.glimpse import look

__all__ = ["FileBoard"]

#: Bytes of a notice: results are for telling, data goes into files of their own.
LIMIT = 1 << 20
_ALSO = ".also"
#: What filesystems say that have no hard links; a directory entry is then made by O_EXCL.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_ABSENT = (FileNotFoundError, NotADirectoryError)
_ATTEMPTS = 10


class _Lock:
    """A locked file; freed when this process dies."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """See `noticeboards.Grip`."""
        disown(self._fd)


class _NoLock:
    def release(self) -> None:
        """Nothing is held: whether the maker lives is told otherwise."""


class FileBoard:
    """A directory; see `noticeboards.Board`.

    Args:
        directory: where; made here.

    Raises:
        OSError: it cannot be made.
    """

    listed = True

    def __init__(self, directory: Path) -> None:
        self.directory = makedirs(directory)
        # As `open` has it: ranks of other users may read what a group's directory holds.
        umask = _umask()
        self._modes = Modes(None, 0o777 & ~umask, 0o666 & ~umask)
        mount = mount_of(directory)
        self.exact = mount is not None and mount.is_local and self._locks_exclude()

    def __str__(self) -> str:
        return str(self.directory)

    def _path(self, name: str) -> Path:
        return self.directory / name

    def _room(self, name: str) -> Path:
        path = self._path(name)
        if not path.parent.is_dir():
            makedirs(path.parent)
        return path

    def _locks_exclude(self) -> bool:
        """Whether flock refuses the second of two; on a local disk that cannot hang."""
        path = temporary_name(self.directory, Path("probe"))
        fds: list[int] = []
        try:
            for flags in (os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR):
                fds.append(open_owned(path, flags, self._modes))
            return is_free(fds[0]) is True and is_free(fds[1]) is False
        except OSError:  # read-only or full: then nothing can be posted either
            return False
        finally:
            for fd in fds:
                disown(fd)
            with contextlib.suppress(OSError):
                path.unlink()

    # -- notices -----------------------------------------------------------------

    def get(self, name: str) -> bytes | None:
        """See `noticeboards.Board`."""
        found = self._read(self._path(name))
        if found is None and "/claim." in name:
            found = self._read(self._path(name + _ALSO))
        return found

    def _read(self, path: Path) -> bytes | None:
        for _ in range(_ATTEMPTS):
            if look(path) is None:
                return None
            try:
                return read_file(path, LIMIT + 1)
            except _ABSENT:
                return None
            except OSError as exn:
                if exn.errno != errno.ESTALE:  # replaced by another node between two calls
                    raise
        return None

    def put(self, name: str, data: bytes) -> None:
        """See `noticeboards.Board`."""
        replace_file(self._room(name), data, self._modes.file)

    def first(self, name: str, data: bytes) -> bool:
        """See `noticeboards.Board`."""
        path = self._room(name)
        temporary = temporary_name(path.parent, path)
        write_new(temporary, data, self._modes.file)
        try:
            return self._link(temporary, path, data)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    def _link(self, temporary: Path, path: Path, data: bytes) -> bool:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            # The answer may have been lost and the request repeated: then it is ours.
            found = look(path)
            return found is not None and os.path.samestat(found, temporary.stat())
        except OSError as exn:
            if exn.errno not in _NO_LINKS:
                raise
            try:
                write_new(path, data, self._modes.file)
            except FileExistsError:
                return False
        return True

    # -- claims ------------------------------------------------------------------

    def hold(self, name: str, data: bytes) -> _Lock | _NoLock | None:
        """See `noticeboards.Board`."""
        path = self._room(name)
        temporary = temporary_name(path.parent, path)
        fd = open_owned(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._modes)
        held = False
        try:
            if self.exact:
                lock_exclusive(fd)
            os.pwrite(fd, data, 0)
            held = self._name_twice(temporary, path, data)
        finally:
            if not (held and self.exact):
                disown(fd)
            with contextlib.suppress(OSError):
                temporary.unlink()
        if not held:
            return None
        return _Lock(fd) if self.exact else _NoLock()

    def _name_twice(self, temporary: Path, path: Path, data: bytes) -> bool:
        if not self._link(temporary, path, data):
            return False
        if self._link(temporary, path.with_name(path.name + _ALSO), data):
            return True
        # The first name was free because somebody removed it, not because nobody is at work.
        path.unlink()
        return False

    def held(self, name: str) -> bool | None:
        """See `noticeboards.Board`."""
        if not self.exact:
            return None
        found = [self._held(self._path(each)) for each in (name, name + _ALSO)]
        return True if True in found else None if found == [None, None] else False

    def _held(self, path: Path) -> bool | None:
        try:
            with open_file(path, io.FileIO) as file:
                free = is_free(file.fileno(), shared=True)
                if free:
                    fcntl.flock(file.fileno(), fcntl.LOCK_UN)
                return None if free is None else not free
        except _ABSENT:
            return None

    # -- rooms -------------------------------------------------------------------

    def posted(self, names: Sequence[str]) -> set[str]:
        """See `noticeboards.Board`."""
        rooms = {name.rpartition("/")[0] for name in names}
        found: set[str] = set()
        for room in rooms:
            try:
                found.update(f"{room}/{path.name}" for path in self._path(room).iterdir())
            except _ABSENT:
                continue
            except OSError as exn:
                if exn.errno != errno.ESTALE:
                    raise
        return found.intersection(names)

    def covers(self, names: Sequence[str]) -> bool:
        """See `noticeboards.Board`."""
        return len(self.posted(names)) == len(set(names))

    def remove(self, name: str) -> None:
        """See `noticeboards.Board`."""
        path = self._path(name)
        with contextlib.suppress(OSError):  # what is left is found by nobody
            path.unlink()
        with contextlib.suppress(OSError):
            path.parent.rmdir()


def _umask() -> int:
    """This process's, without a moment in which it is another one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text("ascii", "replace")
        return int(status.partition("\nUmask:")[2].split(None, 1)[0], 8)
    return 0o077
