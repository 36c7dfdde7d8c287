"""Opening files safely, who may do what with them, and disks that fail.

    private    directories 0700   files 0600   published data 0400
    shared     directories 2770   files 0660   published data 0440

The set-group-id bit gives all that is made below a directory its group, whose members trust each
other: any of them may remove or replace what another one stored.
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

#: Seconds between looks for a directory that another node has made and this one does not see yet.
_LATE = 0.1
#: Others may remove a directory that is empty, not this often in a row.
_ATTEMPTS = 100


def random_token() -> str:
    """128 random bits as hex: no two nodes, pids or restarts ever share a name."""
    return os.urandom(16).hex()


def set_mode(file: int | Path, mode: int) -> None:
    """Give a new file (by its descriptor) or directory the group's bits, which a umask takes away.

    No umask of use takes bits from the user, so what is private has its mode from the start.
    """
    if mode & 0o070:
        os.chmod(file, mode)  # noqa: PTH101 - files by their descriptor


@dataclass(frozen=True, slots=True)
class Modes:
    """The permissions of one cache; `PRIVATE`, or what `of` makes."""

    group: int | None = None  #: number of the group that shares it
    directory: int = 0o700  #: of every directory, the root's included
    file: int = 0o600
    published: int = 0o400  #: of the data of entries

    @classmethod
    def of(cls, group: int | None) -> Modes:
        """Those of a cache that ``group`` shares, or of a private one."""
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

        A group's directory gets its name only when every member may use it, so that no member
        meets one that is closed to it for a moment, or for ever if its maker is killed.
        """
        if self.group is None:
            path.mkdir(mode=self.directory)
            return
        # Renaming would take the place of an empty directory without a word.
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
        """Make a directory and what it is in, as others may do at the same moment.

        At most ``levels`` directories above it are made too: where a disk was unmounted, nobody
        has checked yet what has taken its place.
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
                clock.sleep(_LATE)
            except FileNotFoundError:
                if levels:
                    self.make_directory(path.parent, levels - 1)
                elif not path.parent.exists():  # else it was removed as soon as it was made
                    raise
        raise FileNotFoundError(errno.ENOENT, "it is removed as fast as it is made", str(path))

    def objection(self, path: Path, found: os.stat_result) -> str | None:
        """Why ``path`` must not be a cache, and what to do; None if it may."""
        mode = found.st_mode
        if not stat.S_ISDIR(mode):
            return f"{path} is not a directory; point dir at a directory"
        if mode & stat.S_IWOTH:
            return (
                f"{path} can be written by every user, who could plant shards in it; use a "
                f"directory of your own below it, such as {path}/shards, or look at what is in "
                f"it, then: chmod o-w {path}"
            )
        if self.group is None and found.st_uid != os.geteuid():
            return (
                f"{path} belongs to user {found.st_uid} and this process is user "
                f"{os.geteuid()}; use a directory of your own, or share one: shared_group"
            )
        if self.group is None and mode & stat.S_IWGRP:
            return (
                f"{path} can be written by the group {group_name(found.st_gid)}, whose members "
                f"could plant shards in it; look at what is in it, then: chmod g-w {path} (or "
                "share it with them: shared_group)"
            )
        if self.group is None or (found.st_gid == self.group and not self.directory & ~mode):
            return None
        name = group_name(self.group)
        return (
            f"{path} is not shared by the group {name} (it has group {group_name(found.st_gid)} "
            f"and mode {stat.S_IMODE(mode):04o}); user {found.st_uid}, whose it is, can mend that: "
            f"chgrp {name} {path} && chmod {self.directory:o} {path}"
        )


PRIVATE = Modes()


#: O_NONBLOCK: the path may name a pipe.
SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
#: How opening fails if the path names a link, a directory or a socket instead of a file.
NOT_DATA = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


def check_own(path: str | os.PathLike[str], found: os.stat_result) -> None:
    """Refuse to write to a file that has a second name, and to anything but a regular file.

    Raises:
        OSError: ELOOP, as for a symbolic link, so that callers treat all links alike.
    """
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        reason = "it is a link or no regular file, so another program may own it; remove it"
        raise OSError(errno.ELOOP, reason, str(path))


def open_file(
    path: str | os.PathLike[str], access: int = os.O_RDONLY, mode: int = 0o600
) -> io.FileIO:
    """Open a file without following a link and without blocking.

    Raises:
        OSError: it cannot be opened, or `check_own` refuses to write to it.
    """
    file = io.FileIO(path, opener=lambda path, _: os.open(path, access | SAFELY, mode))
    if access & (os.O_WRONLY | os.O_RDWR) and not access & os.O_EXCL:
        found = os.fstat(file.fileno())
        try:
            if not stat.S_ISFIFO(found.st_mode):  # writing at an offset fails, which harms nobody
                check_own(path, found)
        except OSError:
            file.close()
            raise
    return file


def write_new(path: Path | str, data: bytes, mode: int, *, sync: bool = False) -> None:
    """Make a file that does not exist yet; with ``sync``, on the disk.

    Where that fails, a part of it may be left.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | SAFELY, mode)
    try:
        set_mode(fd, mode)
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, "the disk is full", str(path))
        if sync:
            os.fsync(fd)
    except OSError as exn:
        exn.filename = exn.filename or str(Path(path).parent)  # by its descriptor it has none
        raise
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """fsync a directory, so that the names in it survive power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- files that a forked child must not keep -----------------------------------------------

#: What a forked child closes. A fork waits until a file that is being opened is in here.
_exclusive: weakref.WeakSet[io.FileIO] = weakref.WeakSet()


def open_exclusive(path: str | os.PathLike[str], flags: int, modes: Modes = PRIVATE) -> io.FileIO:
    """As `open_file`; a new file (O_EXCL) has its mode whatever the umask."""
    with undivided():
        file = open_file(path, flags, modes.file)
        _exclusive.add(file)
    if flags & os.O_EXCL:
        set_mode(file.fileno(), modes.file)
    return file


def unlock(fd: int) -> None:
    """Release a flock before the file is closed.

    A child that is forked while the file is open, or is being closed, has the descriptor, too. It
    would keep the lock for as long as it lives.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


def dup_exclusive(file: io.FileIO) -> io.FileIO:
    """Another descriptor of an open file."""
    with undivided():
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


os.register_at_fork(after_in_child=_close_in_child)


# -- failing disks -------------------------------------------------------------------------

#: The disk is full, for all or for this user: no fault, but its normal state in time.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: What a disk says that is broken, read-only, gone, or no longer ours. The second row is
#: errno(3) as network filesystems, FUSE and the block layer use it (blk_errors in the
#: kernel's block/blk-core.c).
DISK_FAULTS = frozenset(
    {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.EACCES, errno.EPERM}
    | {errno.ESTALE, errno.EBADMSG, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNABORTED}
    | {errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENOLINK, errno.ETIMEDOUT, errno.EILSEQ}
    | {errno.ENODATA}
)
#: Seconds without asking: nothing for a training run, and enough for a remount.
_PAUSE = 60.0


def is_disk_fault(exn: BaseException) -> bool:
    """Whether an error comes from a failing local disk (errors of ours, of the origin, do not)."""
    return (
        isinstance(exn, OSError)
        and not isinstance(exn, ShardCacheError)
        and exn.errno in DISK_FAULTS
    )


def fault_kind(exn: OSError) -> str:
    """What one warning is enough for: ``EIO``, ``ENOSPC``, ..."""
    return errno.errorcode.get(exn.errno or 0, type(exn).__name__)


class Breaker:
    """Says when to leave a failing disk alone: for a minute, after a few faults in a row.

    A disk that answers with errors makes every call slow and every log long. Without a lock: a
    stream that the garbage collector closes may say at any moment that the disk works, and a
    fault more or less makes no difference.
    """

    def __init__(self, threshold: int = 3) -> None:
        self._threshold = threshold
        self.faults = 0
        self._until = 0.0

    @property
    def closed(self) -> bool:
        """Whether everybody may go on."""
        return self.faults < self._threshold

    @property
    def left(self) -> float:
        """Seconds until the disk may be asked again; 0 if it may."""
        return max(0.0, self._until - clock.monotonic())

    def failed(self, *, at_once: bool = False) -> bool:
        """Note a fault, which alone is enough with ``at_once``; whether this opened it."""
        if self.left:
            return False  # of a call that began before the pause, which that makes no longer
        was_closed = self.closed
        self.faults += self._threshold if at_once else 1
        if not self.closed:
            self._until = clock.monotonic() + _PAUSE
        return was_closed and not self.closed

    def succeeded(self) -> bool:
        """Note that the disk did as it should; whether this closed it."""
        if not self.faults or self.left:
            return False
        was_open, self.faults = not self.closed, 0
        return was_open
