"""The directory of one shard on disk, whether it is an entry or a partial.

It holds a data file and a sidecar (`Metadata`). This module reads the sidecar, finds the data file,
locks it, and removes the directory without touching files of other programs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shardcache.clock import utc
from shardcache.errors import ConfigError
from shardcache.files import NOT_DATA, open_file, unlock
from shardcache.layout import (
    META,
    PROGRESS,
    Layout,
    is_idle,
    is_side_file,
    list_names,
    open_directory,
    read_file,
)
from shardcache.locks.flock import is_file, try_flock
from shardcache.origins.base import ObjectInfo
from shardcache.urls import parse_url

logger = logging.getLogger(__name__)

SCHEMA = 1
#: Most bytes to read of a sidecar, which has about 700; a URL adds some kilobytes at most.
MAX_SIDECAR = 64 * 1024
#: Errors of opening a file that is gone.
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
#: Errors of renaming a directory that is gone, or that is a mount point.
_IMMOVABLE = frozenset({errno.ENOENT, errno.EBUSY})
#: Errors that concern one file. Those that concern the whole disk do not make an entry damaged.
_UNREADABLE = NOT_DATA | frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.EILSEQ, errno.ENODATA}
)
#: NFS and FUSE give such a name to a file that is removed while it is open, until it is closed.
_STILL_OPEN = (".nfs", ".fuse_hidden")


class DamagedError(Exception):
    """An entry, a partial or a sidecar is damaged; the text says how."""

    #: The entry's directory, if `Store.open` raised the error.
    directory = ""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Raise DamagedError if the disk cannot read a file in the body."""
    try:
        yield
    except OSError as exn:
        if exn.errno not in _UNREADABLE:
            raise
        raise DamagedError(f"it cannot be read ({exn.strerror})") from exn


@dataclass(frozen=True, slots=True)
class Metadata:
    """The sidecar of a shard."""

    url: str
    key: str
    info: ObjectInfo
    size: int
    digest: str  #: tree digest of the data, hex; empty while the shard is in flight
    checked: str | None  #: algorithm of the origin's checksum that the bytes were compared with
    fetched_at: float  #: seconds since the epoch
    boot: str  #: boot id under which the bytes on disk were last known to be good
    library: str  #: version of shardcache that wrote the sidecar
    endpoint: str | None = None  #: of an ``s3`` URL, see `ShardURL`; None if it is not known

    @property
    def resumable(self) -> bool:
        """Whether another process can continue the download: size and version are known."""
        return self.info.size is not None and self.info.identifiable

    @property
    def basename(self) -> str:
        """The name of the data file; raises DamagedError if the URL cannot be parsed."""
        try:
            return parse_url(self.url, allow_schemes=[self.url.partition(":")[0]]).basename
        except ConfigError as exn:
            raise DamagedError(f"its sidecar names no shard ({exn.message})") from exn

    def encode(self) -> bytes:
        """Return the sidecar as one line of JSON."""
        record: dict[str, Any] = {"schema": SCHEMA}
        record |= {name: getattr(self, name) for name in self.__slots__}
        record["object"] = record.pop("info").as_record()
        record["fetched_at"] = utc(self.fetched_at).isoformat(timespec="milliseconds")
        return f"{json.dumps(record)}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Parse the output of `encode`; raises DamagedError for anything else."""
        try:
            record = dict(json.loads(data))
            if record.pop("schema") != SCHEMA:
                raise ValueError("it has another schema")
            record["info"] = ObjectInfo.from_record(record.pop("object"))
            date = datetime.fromisoformat(record["fetched_at"]).timestamp()
            metadata = cls(**{**record, "fetched_at": max(0.0, date)})
            texts = metadata.url, metadata.key, metadata.digest, metadata.boot, metadata.library
            typed = type(metadata.size) is int and isinstance(metadata.checked, str | None)
            typed = typed and isinstance(metadata.endpoint, str | None)
            if not typed or not all(isinstance(text, str) for text in texts):
                raise TypeError("a field has another type")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exn:
            reason = f"{type(exn).__name__}: {exn}"[:200]
            raise DamagedError(f"its sidecar cannot be read ({reason})") from exn
        return metadata


def data_file(directory: Path) -> Path | None:
    """Return the data file of an entry or a partial, or None if there is none.

    Reads the sidecar only if files of other programs make the choice ambiguous.
    """
    names = _data_names(list_names(directory))
    if len(names) > 1 and (stated := _stated_name(directory)) is not None:
        names = [stated] if stated in names else []
    return directory / names[0] if names else None


def _data_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(".") and not is_side_file(name)]


def _stated_name(directory: Path) -> str | None:
    """Return the name of the data file according to the sidecar or the journal."""
    for name in (META, PROGRESS):
        with contextlib.suppress(OSError, ValueError, DamagedError):
            data = read_file(directory / name, MAX_SIDECAR)
            # In a journal, the sidecar follows a header.
            return Metadata.decode(data[data.index(b'{"schema"') :].partition(b"\n")[0]).basename
    return None


@contextlib.contextmanager
def hold(directory: Path, grace: float | None, *, shared: bool = False) -> Iterator[bool]:
    """Hold the flock of a directory's data file in the body; yield whether the shard is free.

    False means that another process has the lock, or may have it. With leases, nothing is locked,
    and a shard is free after ``grace`` seconds without a write or a touch.
    """
    if grace is not None:
        yield is_idle(directory, grace)
        return
    data = data_file(directory) or directory
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(open_file(data)).fileno()
            stack.callback(unlock, fd)
            free = try_flock(fd, shared=shared)
            if free and not shared:  # the file may have been replaced since it was opened
                free = is_file(data, fd)
        except OSError as exn:
            # EACCES: another member of the group may have been killed before it gave the group
            # access to its file. Other errors, such as EMFILE, do not show whether it is free.
            if exn.errno not in NOT_DATA | GONE | {errno.EACCES}:
                raise
            free = None if exn.errno == errno.EACCES else True  # it is gone, or is a link
        yield is_idle(directory) if free is None else free


def hide(directory: Path, layout: Layout, key: str) -> Path | None:
    """Rename an entry or a partial to a name that no reader looks up; the next sweep removes it.

    Returns the new path; None if the directory is gone, or is a mount point.
    """
    try:
        return directory.rename(layout.new_evicted(key))
    except OSError as exn:
        if exn.errno not in _IMMOVABLE:
            raise
        return None


def remove_free(directory: Path, layout: Layout, key: str) -> bool:
    """Remove an entry or a partial unless a process has its lock; return whether it was removed."""
    with hold(directory, layout.grace) as free:
        hidden = hide(directory, layout, key) if free else None
        if hidden is None:
            return False
        # Keep the lock until the names are gone: a reader that gets its lock afterwards sees a link
        # count of zero and looks again.
        remove_directory(hidden)
    return not hidden.exists()


def remove_directory(directory: Path, name: str | None = None) -> None:
    """Remove the files of shardcache from a directory, then the directory.

    If the directory holds anything else, rename it to ``kept.*``, which no sweep touches. If the
    disk fails, the next sweep tries again: the directory must be in `Layout.partial`. If ``name``,
    that of the data file, is None, it is read from the sidecar.
    """
    try:
        fd = open_directory(directory)
    except OSError as exn:  # the directory is gone
        logger.debug("%s: %s", directory, exn)
        return
    try:
        names = os.listdir(fd)  # noqa: PTH208 - names are enough
        data = name or _stated_name(directory) or _likely_name(names, fd)
        foreign = []
        for each in sorted(names, key=is_side_file):  # the data first: the sidecar names it
            if each == data or is_side_file(each):
                if not _remove_name(each, fd):
                    foreign.append(each)
            elif not each.startswith(_STILL_OPEN):
                foreign.append(each)
        if not foreign:
            directory.rmdir()
            return
        kept = directory.rename(directory.with_name(f"kept.{directory.name}"))
        shown = ", ".join(map(repr, sorted(foreign)[:3])) + (", ..." if foreign[3:] else "")
        logger.warning(
            "%s stays, because it holds files that shardcache did not write (%s); move them "
            "elsewhere or delete them",
            *(kept, shown),
        )
    except OSError as exn:
        logger.debug("%s is not removed yet: %s", directory, exn)
    finally:
        os.close(fd)


def _likely_name(names: list[str], fd: int) -> str | None:
    """Return the name of the data file in a directory without a sidecar that can be read."""
    candidates = _data_names(names)
    if len(candidates) != 1:
        return None
    # A file that lies alone is shardcache's only if its mode is: closed to other users.
    is_closed = not os.lstat(candidates[0], dir_fd=fd).st_mode & 0o117
    return candidates[0] if is_closed or len(names) > 1 else None


def _remove_name(name: str, fd: int) -> bool:
    """Remove a file or an empty directory; return False if it is a mount point or not empty."""
    try:
        try:
            os.unlink(name, dir_fd=fd)
        except IsADirectoryError:
            os.rmdir(name, dir_fd=fd)
    except OSError as exn:
        if exn.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
            raise
        return exn.errno == errno.ENOENT
    return True
