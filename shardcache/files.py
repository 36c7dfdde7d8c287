"""Permissions of a cache, opening files safely, and failing disks.

    private    directories 0700   files 0600   published data 0400
    shared     directories 2770   files 0660   published data 0440

The set-group-id bit gives new files and directories the group of the directory that they are in.
Its members trust each other: each may remove or replace the files of the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

from shardcache import clock
from shardcache.config import group_name
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.threads import undivided

#: Seconds until the next attempt to see a directory that exists by EEXIST, but not by stat: an NFS
#: client remembers for some seconds that a name was absent.
_RETRY = 0.1
#: Attempts to make a directory, whose empty parent other processes may remove each time. With the
#: pause above: 10 s.
_ATTEMPTS = 100


def random_token() -> str:
    """Return 128 random bits as hex, for a name that no other process on any node has."""
    return os.urandom(16).hex()


def set_mode(file: int | Path, mode: int) -> None:
    """Set the mode of a group's new file (a descriptor) or directory, which the umask restricted.

    A private one has its mode from the start, because no sensible umask restricts the user.
    """
    if mode & 0o070:
        os.chmod(file, mode)  # noqa: PTH101 - files by their descriptor


@dataclass(frozen=True, slots=True)
class Modes:
    """The permissions of one cache: `PRIVATE`, or those that `of` returns."""

    group: int | None = None  #: number of the group that shares the cache
    directory: int = 0o700  #: of every directory, the root included
    file: int = 0o600
    published: int = 0o400  #: of the data files of entries

    @classmethod
    def of(cls, group: int | None) -> Modes:
        """Return the permissions of a cache; raises ConfigError for a user outside the group."""
        if group is None:
            return PRIVATE
        if os.geteuid() != 0 and group not in (os.getegid(), *os.getgroups()):
            raise ConfigError(
                f"this process is not in the group {group_name(group)}, which shared_group names; "
                f"have its user added to it (and log in again), or run it with "
                f"'sg {group_name(group)} -c ...'.",
                option="shared_group",
            )
        return cls(group, 0o2770, 0o660, 0o440)

    def new_directory(self, path: Path) -> None:
        """Make one directory.

        A group's is renamed to its name when every member may use it. Otherwise members could not
        enter it for a moment, or ever if this process is killed.
        """
        if self.group is None:
            path.mkdir(mode=self.directory)
            return
        # rename(2) would replace an empty directory.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        unnamed = path.with_name(f".new.{random_token()}")
        unnamed.mkdir(mode=0o700)
        try:
            os.chown(unnamed, -1, self.group)
            set_mode(unnamed, self.directory)
            unnamed.rename(path)
        except OSError as exn:
            with contextlib.suppress(OSError):
                unnamed.rmdir()
            if exn.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, exn.strerror, str(path)) from exn
            raise

    def make_directory(self, path: Path, levels: int = 1) -> None:
        """Make a directory, unless it exists, and up to ``levels`` missing directories above it.

        Other processes may do the same at the same moment. The limit keeps shardcache from making
        a new tree below the mount point of a disk that was unmounted.
        """
        for _ in range(_ATTEMPTS):
            try:
                self.new_directory(path)
                return
            except FileExistsError:
                if path.is_dir():
                    return
                if os.path.lexists(path) and not path.is_dir():
                    raise
                clock.sleep(_RETRY)
            except FileNotFoundError:
                if levels:
                    self.make_directory(path.parent, levels - 1)
                elif not path.parent.exists():  # else another process removed it just now
                    raise
        raise FileNotFoundError(errno.ENOENT, "another process keeps removing it", str(path))

    def objection(self, path: Path, status: os.stat_result) -> str | None:
        """Return why a directory cannot be a cache and how to fix that; None if it can."""
        mode = status.st_mode
        if not stat.S_ISDIR(mode):
            return f"{path} is not a directory. Set dir to a directory."
        if mode & stat.S_IWOTH:
            return (
                f"{path} can be written by every user, who could plant shards in it. Use a "
                f"directory of your own below it, such as {path}/shards, or check its contents, "
                f"then: chmod o-w {path}"
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

#: Flags of every open. O_NONBLOCK, because the path may name a pipe.
SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
#: Errors of opening a path that names a link, a directory or a socket instead of a file.
NOT_DATA = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


def check_own(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Raise ELOOP, as for a symbolic link, if a file to be written has a second name (a hard link).

    It is also raised for anything but a regular file.
    """
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        reason = "it is a link or no regular file, so another program may own it; remove it"
        raise OSError(errno.ELOOP, reason, str(path))


def open_file(
    path: str | os.PathLike[str], access: int = os.O_RDONLY, mode: int = 0o600
) -> io.FileIO:
    """Open a file without following a link and without blocking.

    Raises:
        OSError: it cannot be opened, or it is opened for writing and `check_own` refuses it.
    """
    file = io.FileIO(path, opener=lambda path, _: os.open(path, access | SAFELY, mode))
    if access & (os.O_WRONLY | os.O_RDWR) and not access & os.O_EXCL:
        status = os.fstat(file.fileno())
        try:
            if not stat.S_ISFIFO(status.st_mode):  # writing at an offset to a pipe just fails
                check_own(path, status)
        except OSError:
            file.close()
            raise
    return file


def write_new(path: Path | str, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Create a file and write ``data``; if ``sync`` is set, to the disk (fsync).

    If that fails, a part of the file may be left.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, mode)
    try:
        set_mode(fd, mode)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "the disk is full", str(path))
        if sync:
            os.fsync(fd)
    except OSError as exn:
        exn.filename = exn.filename or str(Path(path).parent)  # calls with a descriptor set none
        raise
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Write a directory to the disk (fsync), so that the names in it survive power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- files that a forked child closes ------------------------------------------------------

#: The files that a forked child closes. A fork waits until an opened file is in this set.
_exclusive: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def open_exclusive(path: str | os.PathLike[str], flags: int, modes: Modes = PRIVATE) -> io.FileIO:
    """Open a file with `open_file`, so that a forked child closes it before any of its code runs.

    A new file (O_EXCL) gets the mode of ``modes``, regardless of the umask.
    """
    with undivided():
        file = open_file(path, flags, modes.file)
        _exclusive.add(file)
    if flags & os.O_EXCL:
        set_mode(file.fileno(), modes.file)
    return file


def unlock(fd: int) -> None:
    """Release a flock before its file is closed: a forked child may have the descriptor, too."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def dup_exclusive(file: io.FileIO) -> io.FileIO:
    """Return another descriptor of an open file, which a forked child closes, too."""
    with undivided():
        if file.closed:
            raise OSError(errno.EBADF, "it is closed")
        copy = io.FileIO(os.dup(file.fileno()))
        _exclusive.add(copy)
    return copy


def _close_in_child() -> None:
    for file in _exclusive:
        with contextlib.suppress(OSError):  # of a failing disk; close the others, too
            file.close()
    _exclusive.clear()


os.register_at_fork(after_in_child=_close_in_child)


# -- failing disks -------------------------------------------------------------------------

#: Errors of a full disk, or of a user's full quota. That is no fault: disks fill up in time.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: Errors of a disk that is broken, read-only, gone, or another user's. The last three rows are of
#: network filesystems, FUSE and the block layer (blk_errors in block/blk-core.c of the kernel).
DISK_FAULTS = frozenset(
    {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.EACCES, errno.EPERM}
    | {errno.ESTALE, errno.EBADMSG, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNABORTED}
    | {errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENOLINK, errno.ETIMEDOUT, errno.EILSEQ}
    | {errno.ENODATA}
)
#: Seconds for which a failing disk is not used: long enough to mount it again, and short for a job.
_PAUSE = 60.0


def is_disk_fault(exn: BaseException) -> bool:
    """Return whether an error comes from a failing local disk, and not from an origin."""
    return (
        isinstance(exn, OSError)
        and not isinstance(exn, ShardCacheError)
        and exn.errno in DISK_FAULTS
    )


def fault_kind(exn: OSError) -> str:
    """Return the name of an error, such as ``EIO``. Each kind is warned of once."""
    return errno.errorcode.get(exn.errno or 0, type(exn).__name__)


class Breaker:
    """Decides when a failing disk is not used: for a minute after some faults in a row.

    It has no lock, because the garbage collector may close a stream, which reports a success, at
    any moment. One fault more or less makes no difference.
    """

    def __init__(self, threshold: int = 3) -> None:
        self._threshold = threshold
        self.faults = 0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """Whether the disk may be used."""
        return self.faults < self._threshold

    @property
    def left(self) -> float:
        """Seconds until the disk may be used again; 0 if it may be used now."""
        return max(0.0, self._until - clock.monotonic())

    def failed(self, *, at_once: bool = False) -> bool:
        """Count a fault; with ``at_once``, one is enough. Returns whether it opened the breaker."""
        if self.left:
            return False  # of a call that began before the pause, and so does not prolong it
        was_closed = self.closed
        self.faults += self._threshold if at_once else 1
        if not self.closed:
            self._until = clock.monotonic() + _PAUSE
        return was_closed and not self.closed

    def succeeded(self) -> bool:
        """Reset the count after a success. Returns whether this closed the breaker."""
        if not self.faults or self.left:
            return False
        was_open, self.faults = not self.closed, 0
        return was_open
