"""Directories that are visible when the call returns, waiting for paths, whole files.

A client of a network filesystem remembers for a while that a name was absent (3 to 60 s on NFS:
acdirmin and acdirmax of nfs(5)), so `os.path.exists` says no long after another node has made it,
and ``mkdir`` says EEXIST of a name that ``stat`` cannot see. `find` asks the server again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, overload

from shardcache import clock
from shardcache.errors import InTheWayError, WaitTimeoutError
from shardcache.files import sync_directory
from shardcache.units import format_duration, parse_choice, parse_duration

logger = logging.getLogger(__name__)

PathLike = str | os.PathLike[str]

#: Seconds where the caller states none: what torch.distributed gives its collectives.
DEFAULT_TIMEOUT = 1800.0
#: Seconds for which the filesystem may contradict itself: twice the longest for which an NFS
#: client remembers an absent name by default (acdirmax=60, nfs(5)).
_MKDIR_TIMEOUT = 120.0
#: What says that a name is absent; ESTALE is what NFS says of a directory that was removed.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


def waiting(timeout: float | str | None, what: Callable[[], str]) -> Iterator[float]:
    """Sleep, and yield the seconds waited so far, again and again.

    A thousand ranks that ask every 10 ms would be too much for a file server with other work, so
    the pauses grow up to a second. A warning every ten seconds says ``what`` is waited for; so does
    the `WaitTimeoutError` that is raised when ``timeout`` has passed.
    """
    limit = math.inf if timeout is None else parse_duration(timeout)

    def steps() -> Iterator[float]:
        began, pause, warned = clock.monotonic(), 0.01, 0.0
        while (waited := clock.monotonic() - began) < limit:
            if waited - warned >= 10.0:
                warned = waited
                logger.warning("after %s: waiting %s", format_duration(waited), what())
            # Jitter: ranks that begin together would ask together for ever.
            clock.sleep(min(pause * random.uniform(0.5, 1.0), limit - waited))  # noqa: S311
            pause = min(pause * 1.5, 1.0)
            yield clock.monotonic() - began
        raise WaitTimeoutError(
            f"Waited {format_duration(waited)} {what()}. Look at what the others do, or give them "
            "more time with timeout.",
            waited=waited,
        )

    return steps()


def find(path: PathLike) -> os.stat_result | None:
    """Stat a path, links followed, as the server has it now; None if it does not exist.

    Raises:
        OSError: no permission, a failing disk.
    """
    for is_second_try in (False, True):
        try:
            return os.stat(path)  # noqa: PTH116 - no Path needed
        except OSError as exn:
            if exn.errno not in ABSENT:
                raise
        if not is_second_try:
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
    if parent == path or find(parent) is None:
        return
    try:
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
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
        InTheWayError: a file or a dangling link is in the way; nothing is removed.
        WaitTimeoutError: it was made and cannot be seen.
        OSError: it cannot be made: no permission, no space, read-only.
    """
    target = Path(path).absolute()
    mount = "caching options of its mount: lookupcache and acdirmax of nfs(5)"
    polls = waiting(timeout, lambda: f"to see {target}, which was made ({mount})")
    while not _make(target, mode):
        next(polls)
    return target


def _make(path: Path, mode: int) -> bool:
    """Make a directory if need be; whether it can be seen."""
    found = find(path)
    if found is None and not path.is_symlink():
        if not _make(path.parent, 0o777):
            return False
        try:
            os.mkdir(path, mode)  # noqa: PTH102 - the mode is the caller's
        except OSError as exn:
            if exn.errno not in (errno.EEXIST, *ABSENT):  # what it says if another node makes it
                raise
        if (found := find(path)) is None:
            return False
    if found is not None and stat.S_ISDIR(found.st_mode):
        return True
    obstacle = "a file" if found is not None else "a symbolic link to what does not exist"
    raise InTheWayError(
        f"No directory can be made at {path}: it is {obstacle}. "
        "Remove or rename it, or choose another path.",
        path=str(path),
    )


@overload
def wait_for(
    what: PathLike, *, timeout: float | str | None = ..., by: str | None = ...
) -> Path: ...
@overload
def wait_for(
    what: Sequence[Path] | list[str], *, timeout: float | str | None = ..., by: str | None = ...
) -> list[Path]: ...


def wait_for(
    what: PathLike | Sequence[PathLike],
    *,
    timeout: float | str | None = DEFAULT_TIMEOUT,
    by: str | None = None,
) -> Path | list[Path]:
    """Wait until a path exists, or all of several.

    A file that exists need not be complete, unless `atomic_write` wrote it.

    Args:
        what: a path, or several.
        timeout: seconds, or text such as ``10m``; None waits without end.
        by: who should make it, such as ``rank 0``: for the error.

    Returns:
        The absolute path or paths.

    Raises:
        WaitTimeoutError: it did not come.
        OSError: a path cannot be read.
    """
    wanted = [what] if isinstance(what, str | os.PathLike) else what
    paths = [Path(path).absolute() for path in wanted]
    missing = paths

    def what_is_missing() -> str:
        names = ", ".join(map(str, missing[:3])) + (", ..." if len(missing) > 3 else "")
        nearest = next(parent for parent in missing[0].parents if find(parent) is not None)
        maker = f" (which {by} should make)" if by else ""
        return f"for {names}{maker}: {len(missing)} of {len(paths)} missing, {nearest} exists"

    polls = waiting(timeout, what_is_missing)
    while missing := [path for path in missing if find(path) is None]:
        next(polls)
    return paths if wanted is what else paths[0]


@contextlib.contextmanager
def atomic_write(
    path: PathLike, mode: Literal["w", "wb"] = "wb", *, sync: bool = True
) -> Iterator[IO[Any]]:
    """Write a file that appears, or replaces another one, when the block ends without an error.

    The bytes go into ``.<name>.<random>`` beside it, which a killed process leaves behind. A file
    that is replaced gives the new one its permissions; of a symbolic link the target is replaced.

    Args:
        path: the file; its directory must exist.
        mode: ``wb``, or ``w`` for text in UTF-8.
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
    try:
        with open(
            temporary, "x" if is_text else "xb", encoding="utf-8" if is_text else None
        ) as file:
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
        with contextlib.suppress(OSError):  # some filesystems cannot; the file itself is whole
            sync_directory(target.parent)
