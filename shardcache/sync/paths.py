"""Directories that are visible when the call returns, waiting for what others make, whole files.

A client of a network filesystem remembers for a while that a name was absent (3 to 60 s on NFS:
acdirmin and acdirmax of nfs(5)), so `os.path.exists` says no long after another node has made it,
and ``mkdir`` says EEXIST of what ``stat`` cannot see. `look` asks the server again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal, TypedDict, TypeVar, Unpack, overload

from shardcache import clock
from shardcache.errors import ConfigError, InTheWayError, WaitTimeoutError
from shardcache.files import sync_directory
from shardcache.locks.mounts import mount_of
from shardcache.units import format_duration, parse_choice, parse_duration

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]
T = TypeVar("T")

#: Seconds where the caller states none: what torch.distributed gives its collectives.
DEFAULT_TIMEOUT = 1800.0
#: Seconds for which the filesystem may contradict itself: twice the longest for which an NFS
#: client remembers an absent name by default (acdirmax=60, nfs(5)).
_MKDIR_TIMEOUT = 120.0
#: What says that a name is absent; ESTALE is what NFS says of a directory that is gone.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
#: What filesystems say that cannot fsync a directory; their names are as safe as they get.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES})


class Wait:
    """The looks of one wait: pauses that grow, a warning every ten seconds, an end.

    A thousand ranks that look every 10 ms would be too much for a file server with other work, so
    pauses grow up to ``longest`` seconds. ``what`` says for the warnings what is waited for.
    """

    def __init__(
        self, timeout: float | str | None, what: Callable[[], str], longest: float = 1.0
    ) -> None:
        self._timeout = None if timeout is None else parse_duration(timeout)
        self._what = what
        self._longest = longest
        self._began = clock.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return clock.monotonic() - self._began

    def __str__(self) -> str:
        return format_duration(self.waited)

    def __iter__(self) -> Iterator[None]:
        pause, announced = 0.01, 0.0
        yield
        while self._timeout is None or (left := self._timeout - self.waited) > 0:
            if self.waited - announced >= 10.0:
                announced = self.waited
                logger.warning("after %s: waiting %s", self, self._what())
            # Jitter: ranks that begin together would ask together for ever.
            seconds = pause * random.uniform(0.5, 1.0)  # noqa: S311
            clock.sleep(seconds if self._timeout is None else min(seconds, left))
            pause = min(pause * 1.5, self._longest)
            yield


def look(path: PathLike) -> os.stat_result | None:
    """Say what is at a path now, links followed; None if nothing is.

    Raises:
        OSError: it cannot be told: no permission, a failing disk.
    """
    for is_known in (False, True):
        try:
            return os.stat(path)  # noqa: PTH116 - no Path needed
        except OSError as exn:
            if exn.errno not in ABSENT:
                raise
        if not is_known:
            _revalidate(os.fspath(path))
    return None


def _revalidate(path: str) -> None:
    """Have the kernel ask the server for ``path`` again; writes nothing.

    An NFS client revalidates the absent names it remembers when the directory is opened
    (close-to-open consistency). Linking /proc to the name always fails, for it is a directory, but
    first the kernel looks the name up as one that is about to be made, for which a remembered
    absence does not count (FUSE: ``fuse_dentry_revalidate``).
    """
    parent = os.path.dirname(path) or "."  # noqa: PTH120
    if parent == path or look(parent) is None:
        return
    try:
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        if sys.platform == "linux":  # elsewhere directories may be linked
            os.link("/proc/.", path)
    except OSError as exn:  # EEXIST, EXDEV or EPERM as a rule
        logger.debug("%s: looked up again: %s", path, exn)


def makedirs(
    path: PathLike, mode: int = 0o777, *, timeout: float | str | None = _MKDIR_TIMEOUT
) -> Path:
    """Make a directory and its parents, whoever else does so; it is visible when this returns.

    Args:
        path: the directory.
        mode: of the last directory if it is made here, less the umask, as for `os.makedirs`.
        timeout: seconds, or text such as ``10m``, for which the filesystem may contradict itself.

    Returns:
        The absolute path.

    Raises:
        InTheWayError: something else than a directory is in the way; nothing is removed.
        WaitTimeoutError: it was made and cannot be seen.
        OSError: it cannot be made: no permission, no space, read-only.
    """
    target = Path(path).absolute()
    wait = Wait(timeout, lambda: f"to see {target}, which was made", longest=0.25)
    for _ in wait:
        if _make(target, mode):
            return target
    raise WaitTimeoutError(
        f"{target} was made and could not be seen for {wait}: {_describe(target)}. "
        "Check that no other process removes it, and the caching options of the mount "
        "(lookupcache, acdirmax of nfs(5)).",
        path=str(target),
        waited=wait.waited,
    )


def _make(path: Path, mode: int) -> bool:
    """Make a directory if need be; whether it can be seen."""
    found = look(path)
    dangling = found is None and path.is_symlink()  # absent for stat, and in the way of mkdir
    if found is None and not dangling:
        if not _make(path.parent, 0o777):
            return False
        try:
            os.mkdir(path, mode)  # noqa: PTH102 - the mode is the caller's
        except OSError as exn:
            if exn.errno not in (errno.EEXIST, *ABSENT):  # what it says if another node makes it
                raise
        found = look(path)
    if found is None and not dangling:
        return False
    if found is not None and stat.S_ISDIR(found.st_mode):
        return True
    link = f"{path} is a symbolic link to what does not exist"
    raise InTheWayError(
        f"No directory can be made at {path}: {link if dangling else _describe(path)}. "
        "Remove or rename it, or choose another path.",
        path=str(path),
    )


class _Options(TypedDict, total=False):
    timeout: float | str | None
    by: str | None
    kind: Literal["any", "file", "directory"]
    name: str | None


@overload
def wait_for(what: Callable[[], T], **options: Unpack[_Options]) -> T: ...
@overload
def wait_for(what: PathLike, **options: Unpack[_Options]) -> Path: ...
@overload
def wait_for(
    what: list[PathLike] | tuple[PathLike, ...], **options: Unpack[_Options]
) -> list[Path]: ...


def wait_for(
    what: Callable[[], Any] | PathLike | list[PathLike] | tuple[PathLike, ...],
    *,
    timeout: float | str | None = DEFAULT_TIMEOUT,
    by: str | None = None,
    kind: Literal["any", "file", "directory"] = "any",
    name: str | None = None,
) -> Any:
    """Wait until a path exists, or all of several, or until a function returns something true.

    A file that exists need not be complete, unless `atomic_write` wrote it.

    Args:
        what: a path, a list of paths, or a function without arguments.
        timeout: seconds, or text such as ``10m``; None waits for ever.
        by: who should make it, such as ``rank 0``: for the error.
        kind: ``file`` or ``directory`` where only one of them will do.
        name: what a function waits for, in words: for the error.

    Returns:
        The absolute path or paths; or what the function returned.

    Raises:
        WaitTimeoutError: it did not come; the error says what exists instead.
        OSError: a path cannot be looked at; and whatever the function raises.
    """
    choice = parse_choice(kind, ("any", "file", "directory"))
    whose = f" (which {by} should make)" if by else ""
    found: Any = None
    paths: list[Path] = []
    if not callable(what):
        wanted = [what] if isinstance(what, str | os.PathLike) else what
        paths = [Path(path).absolute() for path in wanted]
        if not paths:
            raise ConfigError("wait_for was given no path to wait for. Give at least one.")
    missing = paths

    def title() -> str:
        names = [str(path) for path in missing]
        if callable(what):
            names = [name or str(getattr(what, "__qualname__", what))]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"for {', '.join(names[:3])}{more}{whose}"

    wait = Wait(timeout, title)
    for _ in wait:
        if callable(what):
            if found := what():
                return found
        elif not (missing := [path for path in missing if not _is_there(path, choice)]):
            return paths[0] if isinstance(what, str | os.PathLike) else paths
    state = f": its last answer was {found!r:.200}"
    if missing:
        state = "" if choice == "any" else f", a {choice},"
        state += f" ({len(missing)} of {len(paths)} are missing)" if len(paths) > 1 else ""
        state += f": {_describe(missing[0])}"
    raise WaitTimeoutError(
        f"Waited {wait} {title()}{state}. Look at what {by or 'its maker'} does "
        "and whether its node has the same filesystem mounted there, or give it more time with "
        "timeout.",
        paths=[str(path) for path in missing],
        waited=wait.waited,
        by=by,
    )


def _is_there(path: Path, kind: str) -> bool:
    found = look(path)
    return found is not None and (
        kind == "any" or (kind == "directory") == stat.S_ISDIR(found.st_mode)
    )


def _describe(path: Path) -> str:
    """Say for an error what exists at a path, or in the nearest directory, and on what mount."""
    nearest = path
    try:
        while (found := look(nearest)) is None and nearest != nearest.parent:
            nearest = nearest.parent
        is_directory = found is not None and stat.S_ISDIR(found.st_mode)
        names = sorted(os.listdir(nearest)) if is_directory else []  # noqa: PTH208 - names alone
    except OSError as exn:
        return f"{nearest} cannot be looked at ({exn.strerror})"
    mount = mount_of(nearest)
    where = "on an unknown mount"
    if mount is not None:
        where = f"on {mount.type} mounted at {mount.point} from {mount.source}"
    if nearest == path:
        return f"{path} is a {'directory' if is_directory else 'file'}, {where}"
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return (
        f"{path} does not exist; the nearest directory is {nearest}, "
        f"with {len(names)} names ({shown}), {where}"
    )


@contextlib.contextmanager
def atomic_write(
    path: PathLike,
    mode: Literal["w", "wb"] = "wb",
    *,
    encoding: str | None = None,
    newline: str | None = None,
    sync: bool = True,
) -> Iterator[IO[Any]]:
    """Write a file that appears, or replaces another one, when the block ends without an error.

    The bytes go into ``.<name>.<random>`` beside it, which a killed process leaves behind. A file
    that is replaced gives the new one its permissions; of a symbolic link the target is replaced.

    Args:
        path: the file; its directory must exist.
        mode: ``wb``, or ``w`` for text.
        encoding, newline: of text, as for `open`; UTF-8 by default.
        sync: bring the bytes to the disk before they get their name, and the name afterwards.
            Without it a loss of power may leave an empty file.

    Raises:
        ConfigError: another mode.
        OSError: it cannot be written; no temporary file is left.
    """
    is_text = parse_choice(mode, ("wb", "w")) == "w"
    target = Path(os.path.realpath(path))
    # 50 characters of up to four bytes and the rest stay below the 255 bytes of a name.
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}")
    if is_text:
        encoding = encoding or "utf-8"
    try:
        with open(temporary, "x" if is_text else "xb", encoding=encoding, newline=newline) as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode) & 0o777)
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # renamed, as a rule
    if sync:
        try:
            sync_directory(target.parent)
        except OSError as exn:
            if exn.errno not in _NO_SYNC:
                raise
