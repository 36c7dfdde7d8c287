"""The directory of one entry or partial: its sidecar and data file, its lock and its removal."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from shardcache import files
from shardcache.errors import ConfigError
from shardcache.faults import ignoring, system_error
from shardcache.layout import JOURNAL, META, hidden_path, is_side_file
from shardcache.origins.base import ObjectInfo
from shardcache.urls import parse_url

logger = logging.getLogger(__name__)

SCHEMA = 1
#: A URL that ends with the name of the data file: parsing takes 12 us, and `ls` of 100,000 shards
#: needs all names.
_PLAIN = re.compile(r"[a-z0-9]+://[^?#%]*/([A-Za-z0-9_-][A-Za-z0-9._-]{0,99})")
#: Errors of renaming a directory that is gone, or that is a mount point.
_IMMOVABLE = frozenset({errno.ENOENT, errno.EBUSY})
#: Errors that concern one file, so its entry counts as damaged. Errors of the whole disk do not.
_UNREADABLE = files.NOT_DATA | frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.EILSEQ, errno.ENODATA}
)
#: Prefixes of the names that NFS and FUSE give to a removed file until all processes close it.
_STILL_OPEN = (".nfs", ".fuse_hidden")


class DamagedError(Exception):
    """An entry, a partial or a sidecar is damaged."""

    directory = ""  #: that of the entry, if `Store.open` found the damage


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Raise DamagedError if the body cannot read a single file."""
    try:
        yield
    except system_error() as exn:
        if exn.errno not in _UNREADABLE:
            raise
        raise DamagedError(f"it cannot be read ({exn.strerror})") from exn


class Metadata(NamedTuple):
    """The sidecar of a shard."""

    url: str
    key: str
    info: ObjectInfo
    size: int
    #: Tree digest of the data in hex; while in flight, as an upstream states it, or "".
    digest: str
    checked: str | None  #: algorithm of the origin's checksum that the bytes match, if any
    fetched_at: float  #: end of the download, in seconds since the epoch
    boot: str  #: boot id under which the bytes on disk were last known to be intact
    library: str  #: version of shardcache that downloaded the shard
    endpoint: str | None = None  #: endpoint of an ``s3`` URL, see `ShardURL`; None if unknown

    @property
    def resumable(self) -> bool:
        """Whether another process can continue the download: size and version are known."""
        return self.info.size is not None and self.info.identifiable

    @property
    def basename(self) -> str:
        """The name of the data file. Raises DamagedError."""
        plain = _PLAIN.fullmatch(self.url)
        if plain is not None and not is_side_file(plain[1]):
            return plain[1]
        try:
            return parse_url(self.url, allow_schemes=[self.url.partition(":")[0]]).basename
        except ConfigError as exn:
            raise DamagedError(f"its sidecar names no shard ({exn.message})") from exn

    def encode(self) -> bytes:
        """Return the sidecar as one line of JSON."""
        date, info = datetime.fromtimestamp(self.fetched_at, UTC), self.info
        record: dict[str, Any] = {"schema": SCHEMA, **self._asdict()}
        del record["info"]
        record["object"] = info._asdict()
        record["object"]["checksum"] = info.checksum and info.checksum._asdict()
        record["fetched_at"] = date.isoformat(timespec="milliseconds")
        return f"{json.dumps(record)}\n".encode()

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Parse the output of `encode`. Raises DamagedError for anything else."""
        try:
            record = dict(json.loads(data))
            if record["schema"] != SCHEMA:
                raise ValueError("it has another schema")
            record["info"] = ObjectInfo.from_record(record["object"])
            date = datetime.fromisoformat(record["fetched_at"]).timestamp()
            record["fetched_at"] = max(0.0, date)
            # A later version of the library may have added fields.
            metadata = cls(**{name: record[name] for name in cls._fields})
            texts = [metadata.url, metadata.key, metadata.digest, metadata.boot, metadata.library]
            texts += [text for text in (metadata.checked, metadata.endpoint) if text is not None]
            if type(metadata.size) is not int or not all(isinstance(text, str) for text in texts):
                raise TypeError("a field has another type")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exn:
            reason = f"{type(exn).__name__}: {exn}"[:200]
            raise DamagedError(f"its sidecar cannot be read ({reason})") from exn
        return metadata


def data_file(directory: Path | str) -> Path | None:
    """Return the data file of an entry or a partial, or None if there is none."""
    names = _data_names(files.list_names(directory))
    if len(names) > 1 and (name := _recorded_name(directory)) is not None:
        names = [name] if name in names else []
    return Path(f"{directory}/{names[0]}") if names else None


def _data_names(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(".") and not is_side_file(name)]


def _recorded_name(directory: Path | str) -> str | None:
    """Return the data file's name according to the sidecar or journal; None if neither has it."""
    for name in (META, JOURNAL):
        with ignoring(OSError, ValueError, DamagedError):
            data = files.read_file(f"{directory}/{name}")
            # In a journal, a header precedes the sidecar.
            return Metadata.decode(data[data.index(b'{"schema"') :].partition(b"\n")[0]).basename
    return None


def data_locked_if_free(
    directory: Path | str,
    grace: float | None,
    *,
    data: Path | str | None = None,
    shared: bool = False,
) -> AbstractContextManager[bool]:
    """Lock a data file, by default the directory's, in the body; yield whether it is free.

    With leases, nothing is locked: it is free after ``grace`` seconds without a write or a touch.
    """
    if grace is not None:
        return contextlib.nullcontext(files.is_idle(Path(directory), grace))
    data = data or data_file(directory) or directory
    return files.locked_if_free(data, shared=shared, of=directory)


def hide(directory: Path) -> Path | None:
    """Rename an entry or a partial to a name that readers ignore and the next sweep removes.

    Returns the new path, or None if the directory is gone or is a mount point.
    """
    hidden = hidden_path(directory)
    try:
        return directory.rename(hidden)
    except system_error() as exn:
        if exn.errno in _IMMOVABLE:
            return None
        if exn.errno != errno.EXDEV:
            raise
    # A directory in a lower layer of an overlay, as in a container's image, cannot be renamed. Its
    # files are removed where they are, the data first, so that it never looks complete.
    if foreign := _remove_files(directory):
        hidden.mkdir(mode=0o700)
        hidden.chmod(directory.stat().st_mode)  # the members of a group may enter it
        for name in foreign:
            (directory / name).rename(hidden / name)
    directory.rmdir()
    return hidden


def remove_free(directory: Path, grace: float | None) -> bool:
    """Remove an entry or a partial unless a process uses it; return whether it is gone."""
    with data_locked_if_free(directory, grace) as free:
        if not free or (hidden := hide(directory)) is None:
            return False
        # Keep the lock until the names are gone, so that a reader that gets its lock afterwards
        # sees a link count of zero and repeats its lookup.
        remove_directory(hidden)
    return not hidden.exists()


def remove_directory(directory: Path, name: str | None = None) -> None:
    """Remove the files of shardcache from a directory of `Layout.partials`, then the directory.

    A directory with other files is renamed to ``kept.*``, which no sweep touches. ``name`` is the
    name of the data file; the default is the name in the sidecar.
    """
    try:
        if not (foreign := _remove_files(directory, name)):
            directory.rmdir()
            return
        kept = directory.rename(directory.with_name(f"kept.{directory.name}"))
        names = ", ".join(map(repr, sorted(foreign)[:3])) + (", ..." if foreign[3:] else "")
        text = "%s stays, because it holds files that shardcache did not write (%s); move them away"
        logger.warning(text, kept, names)
    except system_error() as exn:  # the directory is gone, or the disk fails
        logger.debug("%s is not removed: %s", directory, exn)


def _remove_files(directory: Path, name: str | None = None) -> list[str]:
    """Remove the files of shardcache from a directory; return the names of all others."""

    def remove(fd: int) -> list[str]:
        foreign, names = list[str](), os.listdir(fd)
        data = name or _recorded_name(directory)
        if data is None and len(candidates := _data_names(names)) == 1:
            # A lone file counts as shardcache's only if it is closed to other users, as those are.
            is_closed = not os.lstat(candidates[0], dir_fd=fd).st_mode & 0o117
            data = candidates[0] if is_closed or len(names) > 1 else None
        for child in sorted(names, key=is_side_file):  # data first: the sidecar states its name
            if child != data and not is_side_file(child):
                foreign += [] if child.startswith(_STILL_OPEN) else [child]
                continue
            try:
                os.unlink(child, dir_fd=fd)
            except FileNotFoundError:
                pass
            except system_error() as exn:
                if exn.errno not in (errno.EISDIR, errno.EBUSY):
                    raise
                foreign.append(child)  # a directory or a mount point
        return foreign

    return files.with_descriptor(directory, os.O_DIRECTORY, remove)
