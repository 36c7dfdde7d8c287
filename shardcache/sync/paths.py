"""Directories that are visible when the call returns, and waiting for what others make.

A client of a network filesystem remembers for a while that a name was absent (a negative
dentry: 3 to 60 s on NFS, acdirmin and acdirmax of nfs(5)), so `os.path.exists` says no long after
another node has made it, and ``mkdir`` says EEXIST of what ``stat`` cannot see. `look` asks the
server again. Any number of processes on any number of nodes may call these for the same paths.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.errors import ConfigError, InTheWayError, WaitTimeoutError
from shardcache.locks.mounts import mount_of
from shardcache.units import format_duration, parse_choice, parse_duration

__all__ = ["DEFAULT_TIMEOUT", "Wait", "look", "makedirs", "wait_for"]

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]
T = TypeVar("T")

#: Seconds where the caller states none: what torch.distributed gives its collectives.
DEFAULT_TIMEOUT = 1800.0
#: Seconds for which `makedirs` lets the filesystem contradict itself: twice the longest for which
#: an NFS client remembers an absent name by default (acdirmax=60, nfs(5)).
_MKDIR_TIMEOUT = 120.0
#: What mkdir says of a path that another node is making.
_CONTRADICTIONS = frozenset({errno.EEXIST, errno.ENOENT, errno.ESTALE})
#: What says that a name is absent; ESTALE is what NFS says of a directory that is gone.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
#: Names of a directory that an error shows.
_SHOWN = 4


class Wait:
    """One wait with a deadline: pauses that grow longer, and a warning every ten seconds.

    The last look comes after the last pause, so that whatever arrived in time is found:

        wait = Wait(timeout)
        while not there():
            if wait.is_over:
                raise WaitTimeoutError(...)
            wait.pause(lambda: "waiting for ...")

    Args:
        timeout: seconds, or text such as ``10m``; None waits for ever.
        longest: most seconds between two looks. A thousand ranks that look once a second are
            a thousand requests a second to a file server that has other work.
        clock: whose time that is.

    Raises:
        ConfigError: ``timeout`` is no duration.
    """

    def __init__(
        self, timeout: float | str | None, *, longest: float = 1.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.timeout = None if timeout is None else parse_duration(timeout)
        self._longest = longest
        self._clock = clock
        self._began = self._announced = clock.monotonic()
        self._next = min(0.01, longest)

    @property
    def waited(self) -> float:
        """Seconds since the wait began."""
        return self._clock.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.timeout is not None and self.waited >= self.timeout

    def __str__(self) -> str:
        return format_duration(self.waited)

    def pause(self, describe: Callable[[], str]) -> None:
        """Sleep until the next look, not past the deadline.

        Args:
            describe: says what is waited for; asked every ten seconds, for the log.
        """
        if self._clock.monotonic() - self._announced >= 10.0:
            self._announced = self._clock.monotonic()
            logger.warning("after %s: %s", self, describe())
        # Jitter: ranks that begin together would ask together for ever.
        seconds = self._next * random.uniform(0.5, 1.0)  # noqa: S311
        if self.timeout is not None:
            seconds = min(seconds, max(0.0, self.timeout - self.waited))
        self._next = min(self._next * 1.5, self._longest)
        self._clock.sleep(seconds)


def look(path: PathLike) -> os.stat_result | None:
    """Say what is at a path now, links followed; None if nothing is.

    Raises:
        OSError: it cannot be told: no permission, a failing disk.
    """
    path = os.fspath(path)
    found = _stat(path)
    if found is None:
        _revalidate(path)
        found = _stat(path)
    return found


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - no Path needed
    except OSError as exn:
        if exn.errno in _ABSENT:
            return None
        raise


def _revalidate(path: str) -> None:
    """Have the kernel ask the server for ``path`` again; writes nothing.

    The directory is opened, upon which an NFS client revalidates the absent names it remembers
    (close-to-open consistency). Then /proc is linked to the name: no directory can be
    linked, so that always fails, but the kernel first looks the name up as one that is about to be
    made, for which a remembered absence does not count (FUSE: ``fuse_dentry_revalidate``).
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
    wait = Wait(timeout, longest=0.25)
    while not _make(target, mode):
        if wait.is_over:
            raise WaitTimeoutError(
                f"{target} was made and could not be seen for {wait}: {_describe(target)}. "
                "Check that no other process removes it, and the caching options of the mount "
                "(lookupcache, acdirmax of nfs(5)).",
                path=str(target),
                waited=wait.waited,
            )
        wait.pause(lambda: f"{target} was made and cannot be seen yet")
    return target


def _make(path: Path, mode: int) -> bool:
    """Make a directory if need be; whether it can be seen."""
    if _is_directory(path):
        return True
    if path.parent != path and not _make(path.parent, 0o777):
        return False
    try:
        os.mkdir(path, mode)  # noqa: PTH102 - the mode is the caller's
    except OSError as exn:
        if exn.errno == errno.ENOTDIR:
            raise _in_the_way(path.parent) from exn
        if exn.errno not in _CONTRADICTIONS:
            raise
    return _is_directory(path)


def _is_directory(path: Path) -> bool:
    found = look(path)
    # A link that leads nowhere exists for mkdir, is absent for stat, and stays so.
    if path.is_symlink() if found is None else not stat.S_ISDIR(found.st_mode):
        raise _in_the_way(path)
    return found is not None


def _in_the_way(path: Path) -> InTheWayError:
    what = _describe(path)
    if path.is_symlink() and look(path) is None:
        what = f"{path} is a symbolic link to {path.readlink()}, which does not exist"
    return InTheWayError(
        f"No directory can be made at {path}: {what}. Remove or rename it, or choose another path.",
        path=str(path),
    )


class _WaitOptions(TypedDict, total=False):
    timeout: float | str | None
    by: str | None
    kind: Literal["any", "file", "directory"]
    name: str | None


@overload
def wait_for(what: Callable[[], T], **options: Unpack[_WaitOptions]) -> T: ...
@overload
def wait_for(what: PathLike, **options: Unpack[_WaitOptions]) -> Path: ...
@overload
def wait_for(
    what: list[PathLike] | tuple[PathLike, ...], **options: Unpack[_WaitOptions]
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
        OSError: a path cannot be looked at: no permission, a failing disk.
        Whatever the function raises.
    """
    parse_choice(kind, ("any", "file", "directory"))
    wait = Wait(timeout)
    whose = f" (which {by} should make)" if by else ""
    single = isinstance(what, str | os.PathLike)
    paths: list[Path] = []
    if callable(what):
        title = name or getattr(what, "__qualname__", None) or repr(what)
    else:
        wanted = [what] if isinstance(what, str | os.PathLike) else what
        paths = [Path(path).absolute() for path in wanted]
        if not paths:
            raise ConfigError("wait_for was given no path to wait for. Give at least one.")
    missing = paths
    while True:
        if callable(what):
            if found := what():
                return found
            state = f"{whose}: its last answer was {found!r:.200}"
        else:
            missing = [path for path in missing if not _is_there(path, kind)]
            if not missing:
                return paths[0] if single else paths
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            title = ", ".join(map(str, missing[:3])) + more
            wanted_kind = "" if kind == "any" else f", a {kind},"
            count = f" ({len(missing)} of {len(paths)} are missing)" if len(paths) > 1 else ""
            state = f"{wanted_kind}{whose}{count}"
        if wait.is_over:
            if missing:
                state += f": {_describe(missing[0])}"
            raise WaitTimeoutError(
                f"Waited {wait} for {title}{state}. Look at what {by or 'its maker'} does "
                "and whether its node has the same filesystem mounted there, or give it more "
                "time with timeout.",
                paths=[str(path) for path in missing],
                waited=wait.waited,
                by=by,
            )
        wait.pause(lambda title=title: f"waiting for {title}{whose}")  # type: ignore[misc]


def _is_there(path: Path, kind: str) -> bool:
    found = look(path)
    if found is None:
        return False
    return kind == "any" or (kind == "directory") == stat.S_ISDIR(found.st_mode)


def _describe(path: Path) -> str:
    """Say for an error what exists at a path, or in the nearest directory, and on what mount."""
    nearest = path
    try:
        while (found := look(nearest)) is None and nearest != nearest.parent:
            nearest = nearest.parent
        mount = mount_of(nearest)
        where = f"on {mount.type} mounted at {mount.point}" if mount else "on an unknown mount"
        if mount and mount.source not in ("none", mount.type):
            where += f" from {mount.source}"
        if nearest == path and found is not None:
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a file"
            return f"{path} is {kind}, {where}"
        names = sorted(os.listdir(nearest))  # noqa: PTH208 - names alone
    except OSError as exn:
        return f"{nearest} cannot be looked at ({exn.strerror})"
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names[:_SHOWN])
    more = ", ..." if len(names) > _SHOWN else ""
    contents = f"with {len(names)} names ({shown}{more})" if names else "which is empty"
    return f"{path} does not exist; the nearest directory is {nearest}, {contents}, {where}"
