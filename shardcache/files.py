"""Permissions of the files of a cache; opening, reading, writing and locking files safely.

In a shared cache, the set-group-id bit gives new files and directories the group of their parent.
The members of the group must trust each other, because each may remove or replace all files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shardcache import clock
from shardcache.config import group_name
from shardcache.errors import ConfigError
from shardcache.faults import ignoring, system_error
from shardcache.threads import no_fork

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between attempts if a directory exists according to mkdir (EEXIST) but not according to
#: stat: an NFS client remembers for a few seconds that a name was absent.
_ABSENCE_PAUSE = 0.1
#: Attempts to create a directory, whose empty parent other processes may remove: at most 10 s.
_MKDIR_ATTEMPTS = 100
#: Without flock: seconds without use after which an entry may be evicted, and without a write after
#: which a download counts as dead. A live download writes its journal with every block. An hour
#: also covers nodes whose clocks differ. If the guess is wrong, the download starts over, or the
#: reader continues from the origin.
IDLE_GRACE = 3600.0
#: Maximum number of bytes to read of a sidecar, a pin or another record. Most have less than 3,000,
#: and a long URL adds a few kilobytes.
MAX_RECORD = 64 * 1024
#: Errors of a filesystem without flock, where every process gets the lock.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP})
#: Seconds between attempts to take a lock that another process holds briefly: planning an eviction
#: takes microseconds, and closing a partial after its publication takes a few milliseconds.
_FLOCK_PAUSES = (0.001, 0.01, 0.02)


def random_token() -> str:
    """Return 128 random bits in hexadecimal, for a name that no other process on any node uses."""
    return os.urandom(16).hex()


class Modes(NamedTuple):
    """The permissions of a cache: `PRIVATE`, or those that `Modes.of` returns."""

    group: int | None = None  #: number of the group that shares the cache
    directory: int = 0o700  #: mode of every directory, including the root
    file: int = 0o600  #: mode of all files except those below
    published: int = 0o400  #: mode of the data files of published shards

    @classmethod
    def of(cls, group: int | None) -> Modes:
        """Return the permissions of a cache. Raise ConfigError for a user outside the group."""
        if group is None:
            return PRIVATE
        if os.geteuid() != 0 and group not in (os.getegid(), *os.getgroups()):
            raise ConfigError(
                f"this process is not in the group {group_name(group)}, which shared_group names; "
                f"have its user added to it (and log in again), or run it with "
                f"'sg {group_name(group)} -c ...'."
            )
        return cls(group, 0o2770, 0o660, 0o440)

    def new_directory(self, path: Path) -> None:
        """Create one directory. Raise FileExistsError if its name exists."""
        if self.group is None:
            path.mkdir(mode=self.directory)
            return
        # Check first, because rename(2) would replace an empty directory.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        # Members could not enter a directory that has its name before its permissions.
        unnamed = path.with_name(f".new.{random_token()}")
        unnamed.mkdir(mode=0o700)
        try:
            os.chown(unnamed, -1, self.group)
            unnamed.chmod(self.directory)
            unnamed.rename(path)
        except system_error() as exn:
            with ignoring(OSError):
                unnamed.rmdir()
            if exn.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, exn.strerror, str(path)) from exn
            raise

    def make_directory(self, path: Path, levels: int = 1) -> None:
        """Create a directory unless it exists, and up to ``levels`` missing ones above it."""
        for _ in range(_MKDIR_ATTEMPTS):
            try:
                self.new_directory(path)
                return
            except FileExistsError:
                if path.is_dir():
                    return
                if os.path.lexists(path):
                    raise
                clock.sleep(_ABSENCE_PAUSE)
            except FileNotFoundError:
                if levels:  # 0 below the mount point of a disk that may be unmounted
                    self.make_directory(path.parent, levels - 1)
                elif not path.parent.exists():  # otherwise, it was missing only for a moment
                    raise
        reason = f"no directory can be made in {path.parent}"
        raise FileNotFoundError(errno.ENOENT, reason, str(path))

    def objection(self, path: Path, status: os.stat_result) -> str | None:
        """Return why a directory cannot be a cache and how to fix that, or None if it can be."""
        mode = status.st_mode
        if not stat.S_ISDIR(mode):
            return f"{path} is not a directory. Set dir to a directory."
        if mode & stat.S_IWOTH:
            # In /tmp and other sticky directories, all users must be able to write.
            is_sticky = mode & stat.S_ISVTX
            close = "" if is_sticky else f", or check its contents, then: chmod o-w {path}"
            return (
                f"{path} can be written by every user, who could plant shards in it. Use a "
                f"directory of your own below it, such as {path}/shards{close}"
            )
        if self.group is None and status.st_uid != os.geteuid():
            return (
                f"{path} belongs to user {status.st_uid} and this process is user "
                f"{os.geteuid()}. Use a directory of your own, or share one: shared_group"
            )
        if self.group is None and mode & stat.S_IWGRP:
            return (
                f"{path} can be written by the group {group_name(status.st_gid)}, whose members "
                f"could plant shards in it. Check its contents, then: chmod g-w {path} (or share "
                "it with them: shared_group)"
            )
        if self.group is None or (status.st_gid == self.group and not self.directory & ~mode):
            return None
        name = group_name(self.group)
        return (
            f"{path} is not shared by the group {name} (it has group {group_name(status.st_gid)} "
            f"and mode {stat.S_IMODE(mode):04o}). Its owner, user {status.st_uid}, can change "
            f"that: chgrp {name} {path} && chmod {self.directory:o} {path}"
        )


PRIVATE = Modes()

#: Flags of every open. With O_NONBLOCK, an open does not block if the path names a pipe.
SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
#: Errors of `open_file` if the path names a symbolic link, a directory or a socket, not a file.
NOT_DATA = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
#: Errors of opening a file that is gone.
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
ABSENT = NOT_DATA | GONE


def check_own(path: Path | str, status: os.stat_result) -> None:
    """Raise OSError (ELOOP) unless this is a regular file with exactly one name."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        reason = "it is a link or no regular file, so another program may own it; remove it"
        raise OSError(errno.ELOOP, reason, str(path))


def owned(function: Callable[..., int], *args: tuple[object]) -> io.FileIO:
    """Call `os.open` or `os.dup`, each argument in a tuple; return a file that owns the result."""
    fds: list[int] = []
    files: list[io.FileIO] = []
    try:
        # A signal handler may raise after any call. Here, one call makes and keeps the descriptor.
        fds.extend(map(function, *args))
        files.extend(map(io.FileIO, fds))
        return files[0]
    finally:
        if fds and not files:  # it is a directory
            os.close(fds[0])


def open_file(path: Path | str, access: int = os.O_RDONLY, mode: int = 0o600) -> io.FileIO:
    """Open a file without following a symbolic link, without blocking, and with `check_own`."""
    file = owned(os.open, (path,), (access | SAFELY,), (mode,))
    if access & (os.O_WRONLY | os.O_RDWR) and not access & os.O_EXCL:
        status = os.fstat(file.fileno())
        try:
            if not stat.S_ISFIFO(status.st_mode):  # a write to a pipe at an offset fails anyway
                check_own(path, status)
        except OSError:
            file.close()
            raise
    return file


def write_new(path: Path | str, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Create a file and write ``data`` to it. After an error, an incomplete file may remain."""
    with open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as file:
        try:
            if mode & 0o070:  # for a group, regardless of the umask
                os.fchmod(file.fileno(), mode)
            if os.write(file.fileno(), data) != len(data):
                raise OSError(errno.ENOSPC, "the disk is full", str(path))
            if sync:
                os.fsync(file.fileno())
        except system_error() as exn:
            name = exn.filename or str(Path(path).parent)  # None with a descriptor
            raise OSError(exn.errno, exn.strerror, name) from exn


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new name in the directory of a file; its file replaces ``path`` after the body."""
    # A name is limited to 255 bytes, and a character may have 4.
    temporary = path.with_name(f".{path.name[:50]}.{random_token()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Write a directory to the disk (fsync), so that the names in it survive a power loss."""
    with_descriptor(path.resolve(), os.O_DIRECTORY, os.fsync)


def with_descriptor(path: Path | str, flags: int, function: Callable[[int], T]) -> T:
    """Open a file or directory for reading, but no symbolic link; pass it to ``function``.

    Cheaper than `open_file` and a context manager: each miss calls this often.
    """
    fds: list[int] = []
    try:
        fds.extend(map(os.open, (path,), (flags | SAFELY,)))  # as in `owned`
        return function(fds[0])
    finally:
        for fd in fds:
            os.close(fd)


def list_names(directory: Path | str) -> list[str]:
    """Return the names in a directory, or no names if it is missing or a symbolic link."""
    try:
        return with_descriptor(directory, os.O_DIRECTORY, os.listdir)
    except system_error() as exn:
        if exn.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return []
        # `os.listdir` names the descriptor.
        raise OSError(exn.errno, exn.strerror, os.fspath(directory)) from None


def existing(path: Path) -> Path:
    """Return the path, or the nearest of its parents that exists."""
    return next(parent for parent in (path, *path.parents) if parent.exists())


def is_directory(path: Path | str) -> bool:
    """Return whether ``path`` is a directory and not a symbolic link."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except system_error():
        return False


def modified(path: Path | str) -> float:
    """Return the time of a file's last change, in seconds since the epoch; 0 if it has none."""
    try:
        return os.lstat(path).st_mtime
    except system_error():
        return 0.0


def is_idle(path: Path, grace: float = IDLE_GRACE) -> bool:
    """Return whether a file, or every file in a directory, was unused for ``grace`` seconds."""
    latest = 0.0
    for file in [path / name for name in list_names(path)] or [path]:
        with contextlib.suppress(FileNotFoundError):
            status = file.lstat()
            # A modification time may be in the future, but only the kernel sets the change time.
            latest = max(latest, min(status.st_mtime, status.st_ctime))
    return time.time() - latest > grace


def remove_old(path: Path, age: float = IDLE_GRACE) -> None:
    """Remove a file or an empty directory that was unused for ``age`` seconds."""
    with ignoring(OSError):  # another process was faster, or the directory is not empty
        if is_idle(path, age):
            path.rmdir() if is_directory(path) else path.unlink()


def read_file(path: Path | str, limit: int = MAX_RECORD) -> bytes:
    """Read up to ``limit`` bytes of a file without following a symbolic link or blocking."""
    # Not `limit` alone, because Python allocates as many bytes first.
    return with_descriptor(path, 0, lambda fd: os.read(fd, min(limit, os.fstat(fd).st_size)))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, unchecked; None if it is missing or damaged."""
    try:
        return json.loads(read_file(path))
    except (system_error(), ValueError, RecursionError) as exn:
        logger.debug("%s: %s", path, exn)
        return None


# -- locks ---------------------------------------------------------------------------------


def try_flock(fd: int, *, shared: bool = False) -> bool | None:
    """Try to take the lock of an open file. Return None if the filesystem has no flock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except system_error() as exn:
        if exn.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if exn.errno in _UNSUPPORTED:
            return None
        raise
    return True


def wait_flock(fd: int, *, shared: bool = False) -> bool | None:
    """Call `try_flock` up to four times within 31 ms, while it returns False; return the result."""
    for seconds in _FLOCK_PAUSES:
        if (taken := try_flock(fd, shared=shared)) is not False:
            return taken
        time.sleep(seconds)
    return try_flock(fd, shared=shared)


@contextlib.contextmanager
def locked_if_free(
    path: Path | str, *, shared: bool = False, of: Path | str | None = None
) -> Iterator[bool]:
    """Hold the flock of a file in the body, if it is free; yield whether it is.

    It is free if it is missing, or if no other process holds the flock and the path still names it.
    A file without a flock (of a filesystem that has none, or of a process that died before it gave
    the group access) is free once it, or the directory whose data file it is (``of``), was unused
    for an hour. With ``of``, a link is free.
    """
    fds = list[int]()
    try:
        try:  # without `open_file`, as in `read_file`
            fds.extend(map(os.open, (path,), (SAFELY,)))
            free = try_flock(fds[0], shared=shared) and is_file(path, fds[0])
        except system_error() as exn:
            if exn.errno in GONE or (of is not None and exn.errno in NOT_DATA):
                free = True
            elif exn.errno == errno.EACCES:
                free = None
            else:  # errors such as EMFILE say nothing about the lock
                raise
        if free is None and of is not None:
            free = is_idle(Path(of))
        elif free is None:  # the modification of a session may be older than its file
            free = time.time() - os.stat(fds[0] if fds else path).st_ctime > IDLE_GRACE  # noqa: PTH116
        yield free
    finally:
        for fd in fds:
            try:
                unlock(fd)
            finally:  # a signal handler may raise in `unlock`
                os.close(fd)


def unlock(fd: int) -> None:
    """Release a flock. Closing the file would not, while a forked child still has it open."""
    with ignoring(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_file(path: str | Path, fd: int) -> bool:
    """Return whether ``path`` still names the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


# -- files that a forked child closes ------------------------------------------------------

#: The files that a forked child closes. A fork waits until each newly opened file is in this set.
_exclusive: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def open_exclusive(path: Path | str, flags: int, modes: Modes = PRIVATE) -> io.FileIO:
    """Open a file with `open_file`. A forked child closes it before the child's own code runs."""
    with no_fork():
        file = open_file(path, flags, modes.file)
        _exclusive.add(file)
    if flags & os.O_CREAT and modes.group is not None:  # regardless of the umask
        with contextlib.suppress(PermissionError):  # another member of the group owns the file
            os.fchmod(file.fileno(), modes.file)
    return file


def dup_exclusive(file: io.FileIO) -> io.FileIO:
    """Duplicate the descriptor of an open file. A forked child closes the duplicate, too."""
    with no_fork():
        if file.closed:
            raise OSError(errno.EBADF, "it is closed")
        copy = owned(os.dup, (file.fileno(),))
        _exclusive.add(copy)
    return copy


def _close_in_child() -> None:
    for file in _exclusive:
        with ignoring(OSError):  # the disk fails; close the other files nevertheless
            file.close()
    _exclusive.clear()


os.register_at_fork(after_in_child=_close_in_child)
