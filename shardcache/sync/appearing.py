"""Directories that are there when the call returns, and waiting for what others make.

On a network filesystem ``mkdir`` may say EEXIST of what ``stat`` says ENOENT of (another
node made it, and this one remembers that it was absent; or the server carried a request out
whose answer was lost), and ENOENT of a directory in which another node has just made one.
Neither is an answer here: it is looked again, by `glimpse.look`, until the answers agree.

Any number of processes on any number of nodes may call these for the same paths.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from shardcache.errors import ConfigError, InTheWayError, WaitTimeoutError
from shardcache.sync.glimpse import describe, look
from shardcache.sync.patience import DEFAULT_TIMEOUT, Patience
from shardcache.units import parse_choice

__all__ = ["Kind", "makedirs", "wait_for"]

PathLike = str | os.PathLike[str]
Kind = Literal["any", "file", "directory"]
T = TypeVar("T")

#: Seconds that `makedirs` lets the filesystem make up its mind: twice the longest for which
#: an NFS client remembers an absent name by default (acdirmax=60, nfs(5)).
_SETTLING = 120.0
#: Seconds between its looks, at most.
_LOOKS = 0.25
#: What a path that has been made may still say while nodes disagree.
_UNSETTLED = frozenset({errno.EEXIST, errno.ENOENT, errno.ESTALE})


def makedirs(path: PathLike, mode: int = 0o777, *, timeout: float | str | None = _SETTLING) -> Path:
    """Make a directory and what it is in, whoever else does so; it is there when this returns.

    Args:
        path: the directory.
        mode: of the last directory if it is made here, less the umask, as for `os.makedirs`.
        timeout: how long the filesystem may contradict itself.

    Returns:
        The path, absolute.

    Raises:
        InTheWayError: something else than a directory is in the way.
        WaitTimeoutError: it was made and cannot be seen.
        OSError: it cannot be made: no permission, no space, read-only.
    """
    target = Path(path).absolute()
    patience = Patience(timeout, longest=_LOOKS)
    while not _make(target, mode):
        if patience.over:
            raise WaitTimeoutError(
                f"{target} was made and could not be seen for {patience}: {describe(target)}. "
                "Check that no other process removes it, and the caching options of the mount "
                "(lookupcache, acdirmax of nfs(5)).",
                path=str(target),
                waited=patience.waited,
            )
        patience.pause(lambda: f"{target} has been made and cannot be seen yet")
    return target


def _make(path: Path, mode: int) -> bool:
    """Make it if need be; whether it can be seen."""
    if _is_directory(path):
        return True
    if path.parent != path and not _make(path.parent, 0o777):
        return False
    try:
        os.mkdir(path, mode)  # noqa: PTH102 - the mode is the caller's
    except OSError as exn:
        if exn.errno == errno.ENOTDIR:
            raise _in_the_way(path.parent) from exn
        if exn.errno not in _UNSETTLED:
            raise
    return _is_directory(path)


def _is_directory(path: Path) -> bool:
    found = look(path)
    if found is None:
        # A link that leads nowhere is there for mkdir and absent for stat, and stays so.
        if path.is_symlink():
            raise _in_the_way(path)
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise _in_the_way(path)
    return True


def _in_the_way(path: Path) -> InTheWayError:
    what = describe(path)
    if path.is_symlink() and look(path) is None:
        what = f"{path} is a symbolic link to {os.readlink(path)}, which is not there"  # noqa: PTH115
    return InTheWayError(
        f"No directory can be made there: {what}. Remove or rename it, or choose another path.",
        path=str(path),
    )


@overload
def wait_for(
    what: Callable[[], T],
    *,
    timeout: float | str | None = ...,
    by: str | None = ...,
    kind: Kind = ...,
    name: str | None = ...,
) -> T: ...


@overload
def wait_for(
    what: PathLike,
    *,
    timeout: float | str | None = ...,
    by: str | None = ...,
    kind: Kind = ...,
    name: str | None = ...,
) -> Path: ...


@overload
def wait_for(
    what: list[PathLike] | tuple[PathLike, ...],
    *,
    timeout: float | str | None = ...,
    by: str | None = ...,
    kind: Kind = ...,
    name: str | None = ...,
) -> list[Path]: ...


def wait_for(
    what: Callable[[], Any] | PathLike | list[PathLike] | tuple[PathLike, ...],
    *,
    timeout: float | str | None = DEFAULT_TIMEOUT,
    by: str | None = None,
    kind: Kind = "any",
    name: str | None = None,
) -> Any:
    """Wait until a path is there, or all of several, or until a function says something true.

    A file that is there need not be complete, unless it was written by `atomic_write`.

    Args:
        what: a path, a list of paths, or a function without arguments.
        timeout: seconds, or text such as ``10m``; None waits for ever.
        by: who should make it, such as ``rank 0``: for the error.
        kind: ``file`` or ``directory`` where only one of them will do.
        name: what a function waits for, in words: for the error.

    Returns:
        The path or the list of paths, absolute; or what the function returned.

    Raises:
        WaitTimeoutError: it did not come; the error tells what is there instead.
        OSError: a path cannot be looked at: no permission, a failing disk.
        Whatever the function raises.
    """
    parse_choice(kind, ("any", "file", "directory"))
    patience = Patience(timeout)
    if callable(what):
        return _until(what, patience, by, name)
    single = isinstance(what, str | os.PathLike)
    wanted = [what] if isinstance(what, str | os.PathLike) else what
    paths = [Path(path).absolute() for path in wanted]
    if not paths:
        raise ConfigError("wait_for was given no path to wait for. Give at least one.")
    missing = paths
    while missing := [path for path in missing if not _is_there(path, kind)]:
        if patience.over:
            raise _late(missing, paths, kind, patience, by)
        patience.pause(lambda: f"waiting for {_named(missing)}{_whose(by)}")
    return paths[0] if single else paths


def _until(function: Callable[[], T], patience: Patience, by: str | None, name: str | None) -> T:
    title = name or getattr(function, "__qualname__", None) or repr(function)
    while not (found := function()):
        if patience.over:
            raise WaitTimeoutError(
                f"Waited {patience} for {title}{_whose(by)}: its last answer was {found!r:.200}. "
                f"{_advice(by)}",
                waited=patience.waited,
                by=by,
            )
        patience.pause(lambda: f"waiting for {title}{_whose(by)}")
    return found


def _is_there(path: Path, kind: Kind) -> bool:
    found = look(path)
    if found is None:
        return False
    return kind == "any" or (kind == "directory") == stat.S_ISDIR(found.st_mode)


def _late(
    missing: list[Path], paths: list[Path], kind: Kind, patience: Patience, by: str | None
) -> WaitTimeoutError:
    count = f" ({len(missing)} of {len(paths)} are missing)" if len(paths) > 1 else ""
    wanted = "" if kind == "any" else f", a {kind},"
    return WaitTimeoutError(
        f"Waited {patience} for {_named(missing)}{wanted}{_whose(by)}{count}: "
        f"{describe(missing[0])}. {_advice(by)}",
        paths=[str(path) for path in missing],
        waited=patience.waited,
        by=by,
    )


def _named(paths: list[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more


def _whose(by: str | None) -> str:
    return f" (which {by} should make)" if by else ""


def _advice(by: str | None) -> str:
    who = by or "whoever should make it"
    return (
        f"Look at what {who} does and whether its node has the same filesystem mounted there, "
        "or give it more time with timeout."
    )
