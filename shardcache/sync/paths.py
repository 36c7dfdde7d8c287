"""Create directories that are visible at once, wait for paths, and write files atomically.

A client of a network filesystem remembers for a while that a name was absent (3 to 60 s on NFS:
acdirmin and acdirmax of nfs(5)). During that time, `os.path.exists` returns False although another
node has created the path, and ``mkdir`` fails with EEXIST. `find` makes the client ask its server
again.
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

#: Default timeout in seconds, the same as for the collectives of torch.distributed.
DEFAULT_TIMEOUT = 1800.0
#: Seconds for which a filesystem may contradict itself: twice the default of acdirmax.
_MKDIR_TIMEOUT = 120.0
#: Error codes that mean that a name is absent. NFS reports ESTALE for a directory that was removed.
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


def waiting(timeout: float | str | None, what: Callable[[], str]) -> Iterator[float]:
    """Sleep repeatedly, and after each pause yield the seconds waited so far, until a timeout.

    The pauses grow from 10 ms to a second, because a thousand ranks that poll every 10 ms would
    overload a file server. Every ten seconds, a warning states what is waited for: the text that
    ``what`` returns, such as ``for /nfs/run/ckpt``.

    Raises:
        WaitTimeoutError: ``timeout`` has passed.
    """
    return _wait(math.inf if timeout is None else parse_duration(timeout), what)


def _wait(limit: float, what: Callable[[], str]) -> Iterator[float]:
    start, pause, warned = clock.monotonic(), 0.01, 0.0
    while (waited := clock.monotonic() - start) < limit:
        if waited - warned >= 10.0:
            warned = waited
            logger.warning("after %s: waiting %s", format_duration(waited), what())
        # Without this jitter, ranks that start together would poll together.
        clock.sleep(min(pause * random.uniform(0.5, 1.0), limit - waited))  # noqa: S311
        pause = min(pause * 1.5, 1.0)
        yield clock.monotonic() - start
    raise WaitTimeoutError(
        f"Waited {format_duration(waited)} {what()}. Check the other ranks, or raise timeout.",
        waited=waited,
    )


def find(path: PathLike) -> os.stat_result | None:
    """Return the current status of a path at its server, following links; None if it is absent.

    Raises:
        OSError: no permission, or a failing disk.
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
    """Make the kernel ask the server for ``path`` again, without writing anything.

    When a directory is opened, an NFS client checks the absent names that it remembers there
    (close-to-open consistency). When a name is about to be created, no kernel trusts a remembered
    absence (FUSE: ``fuse_dentry_revalidate``). So this function opens the parent directory, and
    tries to make ``path`` a link to /proc, which always fails because /proc is a directory.
    """
    parent = os.path.dirname(path) or "."  # noqa: PTH120
    if parent == path or find(parent) is None:
        return
    try:
        os.close(os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        os.link("/proc/.", path)
    except OSError as exn:  # expected; usually EEXIST, EXDEV or EPERM
        logger.debug("%s: looked up again: %s", path, exn)


def makedirs(
    path: PathLike, mode: int = 0o777, *, timeout: float | str | None = _MKDIR_TIMEOUT
) -> Path:
    """Create a directory and its parents, unless they exist, and wait until they are visible.

    Other processes may create them at the same time.

    Args:
        path: the directory.
        mode: mode of the last directory if this call creates it; the umask applies, as for
            `os.makedirs`.
        timeout: seconds (120), or text such as ``10m``, to wait while the filesystem contradicts
            itself; None waits forever.

    Returns:
        The absolute path.

    Raises:
        InTheWayError: a file or a dangling link, which is not removed, has the name.
        WaitTimeoutError: the directory was created but is not visible.
        OSError: no permission, no space, or a read-only filesystem.
    """
    target = Path(path).absolute()
    mount = "see the caching options of its mount: lookupcache and acdirmax in nfs(5)"
    polls = waiting(timeout, lambda: f"to see {target}, which was created ({mount})")
    while not _make(target, mode):
        next(polls)
    return target


def _make(path: Path, mode: int) -> bool:
    """Create a directory if it is missing, and return whether it is visible."""
    found = find(path)
    if found is None and not path.is_symlink():
        if not _make(path.parent, 0o777):
            return False
        try:
            os.mkdir(path, mode)  # noqa: PTH102 - the mode is the caller's
        except OSError as exn:
            if exn.errno not in (errno.EEXIST, *ABSENT):  # raised while another node creates it
                raise
        if (found := find(path)) is None:
            return False
    if found is not None and stat.S_ISDIR(found.st_mode):
        return True
    obstacle = "a file" if found is not None else "a symbolic link to a missing target"
    raise InTheWayError(
        f"No directory can be created at {path}: it is {obstacle}. "
        "Remove or rename it, or choose another path."
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
    """Wait until a path exists, or until all of several paths exist.

    A file that exists may be incomplete, unless `atomic_write` wrote it.

    Args:
        what: a path, or a sequence of paths.
        timeout: seconds to wait (30 min), or text such as ``10m``; None waits forever.
        by: the rank that should create the path, such as ``rank 0``, for the error message.

    Returns:
        The absolute path or paths.

    Raises:
        WaitTimeoutError: a path did not appear in time.
        OSError: a path cannot be checked: no permission, or a failing disk.
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
    """Open a file that appears, or replaces another one, when the block ends without an error.

    The bytes go into a temporary file ``.<name>.<random>`` in the same directory. If the process is
    killed, the temporary file remains. The new file gets the permissions of the file that it
    replaces. If ``path`` is a symbolic link, its target is replaced.

    Args:
        path: the file; its directory must exist.
        mode: ``wb``, or ``w`` for text in UTF-8.
        sync: flush the bytes to the disk before the rename, and the new name afterwards. Without
            ``sync``, a power failure may leave an empty file.

    Raises:
        ConfigError: ``mode`` has another value.
        OSError: the file cannot be written. The temporary file is removed.
    """
    is_text = parse_choice(mode, ("wb", "w")) == "w"
    target = Path(os.path.realpath(path))
    # A name is limited to 255 bytes: two dots, 50 characters of up to 4 bytes, a token of 16 bytes.
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
        temporary.unlink(missing_ok=True)
    if sync:
        with contextlib.suppress(OSError):  # some filesystems cannot sync a directory
            sync_directory(target.parent)
