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

`Breaker` says when to leave a failing disk alone. A disk that answers with errors makes every call
that touches it slow and every log long: after a few faults in a row it is not asked for a while;
then one caller tries, and either all go on or the pause is doubled.
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

from shardcache.clock import Clock
from shardcache.config import group_name
from shardcache.errors import ConfigError, ShardCacheError

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


# -- failing disks -------------------------------------------------------------------------

#: The disk is full, for all or for this user: no fault, but its normal state in time.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: This process or this machine has run out of something else.
OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
#: What a disk says that is broken, read-only, gone, or no longer ours. The second row is
#: errno(3) as network filesystems, FUSE and the block layer use it (blk_errors in the
#: kernel's block/blk-core.c).
DISK_FAULTS = frozenset(
    {errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.EUCLEAN, errno.EACCES, errno.EPERM}
    | {errno.ESTALE, errno.EBADMSG, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNABORTED}
    | {errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENOLINK, errno.ETIMEDOUT, errno.EILSEQ}
    | {errno.ENODATA}
)
#: Faults in a row that are no accident of one file.
_THRESHOLD = 3
#: Seconds without asking, the first time and at most. A minute is nothing for a training
#: run and enough for a remount; ten minutes keep a dead disk to a line per ten minutes.
_FIRST_PAUSE = 60.0
_LONGEST_PAUSE = 600.0


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
    """Counts faults in a row; closed while all is well, open during a pause.

    Attributes:
        faults: in a row, up to now. While there are none, a success is no news.

    Args:
        clock: time.
        threshold: faults in a row that open it.
        first: seconds of the first pause; each further one is twice as long.
        longest: seconds of the longest pause.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        threshold: int = _THRESHOLD,
        first: float = _FIRST_PAUSE,
        longest: float = _LONGEST_PAUSE,
    ) -> None:
        self._clock = clock
        self._threshold = threshold
        self._first = first
        self._longest = longest
        # Reentrant: a stream that the garbage collector closes says that the disk works, at any
        # moment, so also while its thread is in here.
        self._guard = threading.RLock()
        self.faults = 0
        self._pause = 0.0  # 0 is closed
        self._until = 0.0
        self._trying = False

    @property
    def closed(self) -> bool:
        """Whether everybody may go on."""
        return self._pause == 0.0

    @property
    def left(self) -> float:
        """Seconds until somebody may try again."""
        return 0.0 if self.closed else max(0.0, self._until - self._clock.monotonic())

    def allows(self) -> bool:
        """Whether the caller may ask the disk.

        When a pause is over, one caller may. Until it tells how that went nobody else may,
        for as long as the pause was: it might never tell.
        """
        if self.closed:
            return True
        with self._guard:
            now = self._clock.monotonic()
            if not self.closed:
                if now < self._until:
                    return False
                self._trying = True
                self._until = now + self._pause
            return True

    def failed(self, *, at_once: bool = False) -> bool:
        """Note a fault; with ``at_once`` it alone is enough.

        Returns:
            Whether this began a row of pauses.
        """
        with self._guard:
            self.faults += 1
            begins = self.closed and (at_once or self.faults >= self._threshold)
            # Calls that began before a pause fail in it; that makes it no longer.
            if begins or self._trying:
                self._pause = self._first if begins else min(2 * self._pause, self._longest)
                self._until = self._clock.monotonic() + self._pause
                self._trying = False
            return begins

    def succeeded(self) -> bool:
        """Note that the disk did as it should.

        Returns:
            Whether this ended a row of pauses.
        """
        if not self.faults:
            return False
        with self._guard:
            ends = self._trying
            if self.closed or ends:  # in a pause it is the echo of an earlier call
                self.faults = 0
                self._pause = 0.0
                self._trying = False
            return ends

    def undecided(self) -> None:
        """The try ended without an answer of the disk: the next caller may."""
        if not self.closed:
            with self._guard:
                if self._trying:
                    self._trying = False
                    self._until = self._clock.monotonic()
