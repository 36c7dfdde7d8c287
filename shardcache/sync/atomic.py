"""Files that are complete or absent.

The bytes go into a file beside the target, are brought to the disk, and get their name by one
rename; then the directory is brought to the disk, too. A reader sees the old file or the new one,
also after a crash or a loss of power. A process that is killed leaves ``.<name>.<random>`` beside
the target. Of several processes that write one path, each writes a whole file and one of them
stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, overload

from shardcache.errors import ConfigError

__all__ = ["atomic_write"]

#: What filesystems say that cannot fsync a directory; their names are as safe as they get.
_NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES})


@overload
def atomic_write(
    path: str | os.PathLike[str], mode: Literal["wb"] = ..., *, sync: bool = ...
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
    """Write a file that appears, or replaces another one, when the block ends without an error.

    If the block raises, nothing has happened to ``path``. A file that is replaced gives the
    new one its permissions; a new one gets those that `open` would give it. Where ``path`` is a
    symbolic link, the file it leads to is replaced.

    Args:
        path: the file; its directory must exist.
        mode: ``wb``, or ``w`` for text.
        encoding: of text; UTF-8 by default.
        newline: as for `open`.
        sync: bring the bytes to the disk before they get their name. Without it a loss of power
            may leave an empty file.

    Raises:
        ConfigError: another mode.
        OSError: it cannot be written; no temporary file is left.
    """
    if mode not in ("w", "wb"):
        raise ConfigError(f"atomic_write cannot open with mode={mode!r}. Accepted: 'wb' or 'w'.")
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    # 50 characters of up to four bytes and the rest stay below the 255 bytes of a name.
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}")
    text = None if mode == "wb" else encoding or "utf-8"
    with open(temporary, "xb") as raw:  # open until the rename, which may have to ask it
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(raw.fileno(), stat.S_IMODE(target.stat().st_mode) & 0o777)
            with open(raw.fileno(), mode, closefd=False, encoding=text, newline=newline) as file:
                yield file
            if sync:
                os.fsync(raw.fileno())
            _rename(raw.fileno(), temporary, target)
        finally:
            with contextlib.suppress(OSError):  # renamed, as a rule
                temporary.unlink()
    if sync:
        _sync_directory(target.parent)


def _rename(fd: int, temporary: Path, target: Path) -> None:
    """Give the file its name.

    When the answer of an NFS server is lost, its client asks again and is told that the old name
    does not exist: then the file itself says whether it was renamed.
    """
    try:
        temporary.replace(target)
    except FileNotFoundError:
        if not (target.exists() and os.path.samestat(os.fstat(fd), target.stat())):
            raise


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exn:
        if exn.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)
