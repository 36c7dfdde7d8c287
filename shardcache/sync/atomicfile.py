"""Files that are there whole or not at all.

The bytes go into a file beside the target, are brought to the disk, and get their name by
one rename, upon which the directory is brought to the disk, too. A reader sees the old file
or the new one; so does whoever comes after a crash or a loss of power. A process that is
killed leaves ``.<name>.<random>`` beside the target, which nobody takes for it.

Of several processes that write one path each writes a whole file, and one of them stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, overload

from shardcache.errors import ConfigError
from shardcache.files import sync_directory
from shardcache.layout import temporary_name

__all__ = ["atomic_write"]

#: What filesystems answer that cannot fsync a directory; their names are as safe as they get.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES})

#: Characters of the target's name in that of the temporary file: with four bytes each and what
#: is added they are fewer than the 255 bytes that a name may have.
_MAX_NAME = 50


@overload
def atomic_write(
    path: str | os.PathLike[str],
    mode: Literal["wb"] = ...,
    *,
    encoding: str | None = ...,
    newline: str | None = ...,
    sync: bool = ...,
) -> contextlib.AbstractContextManager[IO[bytes]]: ...


@overload
def atomic_write(
    path: str | os.PathLike[str],
    mode: Literal["w"],
    *,
    encoding: str | None = ...,
    newline: str | None = ...,
    sync: bool = ...,
) -> contextlib.AbstractContextManager[IO[str]]: ...


@contextlib.contextmanager
def atomic_write(
    path: str | os.PathLike[str],
    mode: Literal["w", "wb"] = "wb",
    *,
    encoding: str | None = None,
    newline: str | None = None,
    sync: bool = True,
) -> Iterator[IO[Any]]:
    """Write a file that appears, or replaces another one, when the block has ended well.

    If the block raises, nothing has happened to ``path``. What is replaced gives the new
    file its permissions; a new one gets those that `open` would give it. Where ``path`` is
    a symbolic link, the file it leads to is replaced.

    Args:
        path: the file; the directory it is in must be there.
        mode: ``wb``, or ``w`` for text.
        encoding: of text; UTF-8 by default.
        newline: as for `open`.
        sync: whether the bytes are on the disk before they have their name. Without, a loss
            of power may leave an empty file.

    Raises:
        ConfigError: another mode.
        OSError: it cannot be written; no temporary file is left.
    """
    if mode not in ("w", "wb"):
        raise ConfigError(f"atomic_write cannot open with mode={mode!r}. Accepted: 'wb' or 'w'.")
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    temporary = temporary_name(target.parent, target.with_name(target.name[:_MAX_NAME]))
    text = None if mode == "wb" else encoding or "utf-8"
    # Open until it has its name, for `_rename` asks it.
    with open(temporary, "xb") as raw:
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(raw.fileno(), stat.S_IMODE(target.stat().st_mode) & 0o777)
            with open(raw.fileno(), mode, closefd=False, encoding=text, newline=newline) as file:
                yield file
            if sync:
                os.fsync(raw.fileno())
            _rename(raw.fileno(), temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error counts
                temporary.unlink()
            raise
    if sync:
        _sync(target.parent)


def _rename(fd: int, temporary: Path, target: Path) -> None:
    """Give it its name.

    When the answer of an NFS server is lost, its client asks again and is told that the old
    name is not there: the file says itself whether that is so because it was renamed.
    """
    try:
        temporary.replace(target)
    except FileNotFoundError:
        try:
            if os.path.samestat(os.fstat(fd), target.stat()):
                return
        except OSError:  # not there either: the first error counts
            pass
        raise


def _sync(directory: Path) -> None:
    try:
        sync_directory(directory)
    except OSError as exn:
        if exn.errno not in _NO_SYNC:
            raise
