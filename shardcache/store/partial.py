"""A shard in flight: its growing data file and the record of what is in it.

A partial is a directory with the data file and `progress`. Which bytes are there is what
`progress` says, never the file's size: a file with a written tail has its full size and holes.

    progress:  a header, the sidecar as it is known so far, and a record for each block:
               its digest and its length, zeros while it is not there

A shard of one block has no `progress`: there is nothing to resume or to follow.

The process that holds the exclusive flock on the data file may write; its threads may write and
record different blocks at once. Anybody may read `progress`. When the writer dies the flock is
free, and no clock and no process id is asked, unless the filesystem does not do flock at all:
`claim` takes the partial over by renaming it, and whatever `progress` says is proven against the
data before it is believed; `remove_leftover` renames it and removes it. Of several exactly one
wins. A writer that lost its partial this way without knowing (locks that lie) can only write the
same bytes of the same version again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby, takewhile
from pathlib import Path

from shardcache.files import (
    NOT_DATA,
    Modes,
    dup_exclusive,
    open_exclusive,
    open_file,
    sync_directory,
    write_new,
)
from shardcache.layout import (
    IDLE_GRACE,
    META,
    PROGRESS,
    Layout,
    is_directory,
    is_evicted_name,
    is_idle,
    is_temporary_name,
    list_names,
    parse_partial_name,
    read_file,
    remove_old,
)
from shardcache.locks.flock import is_file, wait_flock
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.entry import (
    GONE,
    IMMOVABLE,
    MAX_BYTES,
    DamagedError,
    LostError,
    Metadata,
    data_file,
    hold,
    remove_directory,
)

_MAGIC = b"SHCPROG3"
#: Magic, where the records begin, and whether the blocks may be read.
_HEADER = struct.Struct("<8sII")
_RECORD = struct.Struct("<16sQ")
#: Bytes of a sidecar; a long URL adds some.
_SIDECAR = 700
#: Records that a reader takes in one call: 256 MiB of data.
_AHEAD = 256
#: Bytes of a journal: of a shard of 5 TB, the largest object of S3, it has 120 MB.
_MAX_PROGRESS = 1 << 27
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL


def record_size(size: int) -> int:
    """Bytes of `progress` for a shard of ``size`` bytes; its sidecar is no larger."""
    return _SIDECAR + -(-size // BLOCK) * _RECORD.size


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is."""

    metadata: Metadata  #: what the shard will be, as far as its writer knows
    written: int  #: bytes on disk

    @property
    def total(self) -> int | None:
        """Bytes the shard will have, or None while unknown."""
        return self.metadata.info.size


def _parse(path: Path, data: bytes) -> tuple[Metadata, int, bool]:
    """What `Partial._write_header` wrote: the sidecar, where the records begin, `confirmed`."""
    if len(data) < _HEADER.size:
        raise DamagedError("its progress file is too short")
    magic, records_at, confirmed = _HEADER.unpack_from(data)
    if magic != _MAGIC or records_at > MAX_BYTES:
        raise DamagedError("its progress file is of another kind")
    metadata = Metadata.decode(data[_HEADER.size : records_at])
    named = metadata.key, metadata.info.version, metadata.info.size
    if parse_partial_name(path.name) != named:
        raise DamagedError("its progress file describes another object")
    return metadata, records_at, bool(confirmed)


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """(digest, length) of each block, from the records of a progress file."""
    return _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])


def read_progress(path: Path) -> Progress | None:
    """The progress of the partial at ``path``; None when there is none that can be read."""
    try:
        data = read_file(path / PROGRESS, _MAX_PROGRESS)
        metadata, records_at, _ = _parse(path, data)
    except (OSError, DamagedError):
        return None
    return Progress(metadata, sum(min(length, BLOCK) for _, length in _records(data[records_at:])))


class PartialSource:
    """A partial, for reading its ``data`` file while it grows; ``info`` is its version.

    Raises:
        DamagedError: it must not be read.
        OSError: it is gone, or cannot be read.
    """

    def __init__(self, path: Path, basename: str) -> None:
        with contextlib.ExitStack() as stack:
            self.data = stack.enter_context(open_file(path / basename))
            self._progress = stack.enter_context(open_file(path / PROGRESS))
            data = os.pread(self._progress.fileno(), MAX_BYTES, 0)
            metadata, self._records_at, self._confirmed = _parse(path, data)
            self.info = metadata.info
            if not self.info.identifiable:
                # Its writer may begin again from nothing.
                raise DamagedError("its version cannot be told from others")
            self._stack = stack.pop_all()
        self._blocks = 0  # whole ones, without a gap

    def limit(self) -> int:
        """Bytes that may be read: all without a gap, except the last block."""
        fd = self._progress.fileno()
        if not self._confirmed:
            self._confirmed = bool(_HEADER.unpack(os.pread(fd, _HEADER.size, 0))[2])
            if not self._confirmed:
                return 0
        length = BLOCK
        while length == BLOCK:
            at = self._records_at + self._blocks * _RECORD.size
            data, length = os.pread(fd, _AHEAD * _RECORD.size, at), 0
            for _, length in _records(data):
                if length != BLOCK:
                    break
                self._blocks += 1
        known = self._blocks * BLOCK + min(length, BLOCK)
        # Of a shard of unknown size any block may be the last.
        size = known if self.info.size is None else self.info.size
        return min(known, max(0, size - 1) // BLOCK * BLOCK)

    @property
    def sealed(self) -> bool:
        """Whether it is being published, or was removed."""
        return os.fstat(self._progress.fileno()).st_nlink == 0

    def close(self) -> None:
        """Let go of it."""
        with contextlib.suppress(OSError):  # closed all the same; it was only read
            self._stack.close()


class Partial:
    """A partial that this process writes; made by `create` or `claim`.

    Attributes:
        path: its directory.
        data: the data file.
        metadata: what the shard will be; its size and digest count once it is sealed.
        confirmed: whether the origin said that it still has this version.
        written: bytes on disk altogether.
        earlier: directory names of the versions that were published when it was begun.
    """

    def __init__(
        self,
        layout: Layout,
        data: Path,
        metadata: Metadata,
        file: io.FileIO,
        progress: io.FileIO | None,
    ) -> None:
        self.path = data.parent
        self.data = data
        self.metadata = metadata
        self.earlier = frozenset(list_names(layout.key_dir(metadata.key)))
        self.confirmed = True
        self.written = 0
        self._file = file
        self._progress = progress
        self._records_at = 0
        self._digests: dict[int, tuple[bytes, int]] = {}
        self._guard = threading.Lock()

    @classmethod
    def create(cls, layout: Layout, metadata: Metadata, basename: str) -> Partial:
        """Make an empty partial, locked by this process."""
        size, modes = metadata.info.size, layout.modes
        path = layout.new_partial(metadata.key, metadata.info.version, size)
        modes.make_directory(path)
        with contextlib.ExitStack() as stack:
            stack.callback(remove_directory, path, basename)
            data = path / basename
            try:
                file = stack.enter_context(open_exclusive(data, _MAKE, modes))
            except FileNotFoundError as exn:
                raise LostError(f"{path.name} was swept as soon as it was made") from exn
            if layout.grace is None and wait_flock(file.fileno()) is False:
                raise LostError(f"{path.name} was locked by another process")
            partial = cls(layout, data, metadata, file, None)
            if size is None or size > BLOCK:
                progress = open_exclusive(path / PROGRESS, _MAKE, modes)
                partial._progress = stack.enter_context(progress)
                sidecar = metadata.encode()
                sidecar += b" " * (-len(sidecar) % 8)  # no record's length crosses two pages
                partial._records_at = _HEADER.size + len(sidecar)
                partial._write_header(sidecar)
            stack.pop_all()
        return partial

    @classmethod
    def claim(cls, layout: Layout, path: Path, basename: str) -> Partial | None:
        """Take over what a dead process of this user left; None if it is alive, gone or useless."""
        named = parse_partial_name(path.name)
        if named is None or not is_directory(path):
            return None
        mine = layout.new_partial(*named)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open_exclusive(path / basename, os.O_RDWR))
                free = wait_flock(file.fileno()) if layout.grace is None else None
                if free is None:
                    free = is_idle(path, layout.grace or IDLE_GRACE)
                found = os.fstat(file.fileno())
                ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
                # Between open and flock a sweeper may have won: then the name is gone.
                if not (free and is_file(path / basename, file.fileno()) and ours):
                    return None
                path.rename(mine)  # the claim: of two, one finds the old name gone
                data = read_file(mine / PROGRESS, _MAX_PROGRESS)
                metadata, records_at, _ = _parse(mine, data)
                progress = stack.enter_context(open_exclusive(mine / PROGRESS, os.O_RDWR))
                if metadata.info.size is None or not metadata.info.identifiable:
                    raise DamagedError("it is not known what is missing")
                (mine / META).unlink(missing_ok=True)  # its writer was killed while sealing it
                if found.st_size > metadata.info.size:
                    os.ftruncate(file.fileno(), metadata.info.size)
                partial = cls(layout, mine / basename, metadata, file, progress)
                partial._records_at = records_at
                partial._prove(_records(data[records_at:]), metadata.info.size)
            except (PermissionError, DamagedError):
                remove_directory(mine, basename)
                return None
            except OSError as exn:
                if exn.errno not in GONE | NOT_DATA | IMMOVABLE:
                    raise
                remove_directory(mine, basename)
                return None
            stack.pop_all()
        return partial

    def _prove(self, records: Iterator[tuple[bytes, int]], total: int) -> None:
        """Believe just those recorded blocks whose bytes have the recorded digest."""
        self.confirmed = False
        self._write_header()
        buffer = memoryview(bytearray(BLOCK))
        for index, (digest, length) in zip(range(-(-total // BLOCK)), records, strict=False):
            block = buffer[: min(BLOCK, total - index * BLOCK)]
            if length == len(block) == os.preadv(self.fd, [block], index * BLOCK) and (
                block_digest(block) == digest
            ):
                self._note(index, digest, length)
            elif length:
                self._write_record(index, bytes(16), 0)

    @property
    def fd(self) -> int:
        """The descriptor of the data file, for as long as this is open."""
        return self._file.fileno()

    def write(self, offset: int, data: memoryview, fd: int | None = None) -> None:
        """Put bytes in their place."""
        target = self.fd if fd is None else fd
        while data:
            written = os.pwrite(target, data, offset)
            if written == 0:
                raise OSError(errno.EIO, "the filesystem accepts no bytes")
            offset += written
            data = data[written:]

    def record(self, index: int, digest: bytes, length: int) -> None:
        """Say that block ``index`` is on disk. Call after `write`."""
        with self._guard:
            if not self._file.closed:  # or the fetch was called off; this does not matter
                self._write_record(index, digest, length)
                self._note(index, digest, length)

    def show(self, length: int) -> None:
        """Let the first bytes of the first block be read, before that is recorded."""
        with self._guard:
            if not self._file.closed and 0 not in self._digests:
                self._write_record(0, bytes(16), length)

    def restart(self) -> None:
        """Forget everything that was written."""
        with self._guard:
            self._digests.clear()
            self.written = 0
            if not self._file.closed:
                if self._progress is not None:
                    os.ftruncate(self._progress.fileno(), self._records_at)
                os.ftruncate(self.fd, 0)

    def confirm(self) -> None:
        """Say that the origin still has this version: what was resumed may be read."""
        with self._guard:
            self.confirmed = True
            if not self._file.closed:
                self._write_header()

    def _note(self, index: int, digest: bytes, length: int) -> None:
        if index not in self._digests:
            self.written += length
        self._digests[index] = (digest, length)

    def _write_record(self, index: int, digest: bytes, length: int) -> None:
        if self._progress is not None:
            at = self._records_at + index * _RECORD.size
            os.pwrite(self._progress.fileno(), _RECORD.pack(digest, length), at)

    def _write_header(self, sidecar: bytes = b"") -> None:
        if self._progress is not None:
            # Nothing is read of a version that may have been replaced since.
            header = _HEADER.pack(_MAGIC, self._records_at, self.confirmed)
            os.pwrite(self._progress.fileno(), header + sidecar, 0)

    @property
    def digests(self) -> list[bytes]:
        """The digests of the blocks in order, as far as there is no gap."""
        return [self._digests[index][0] for index in takewhile(self._digests.__contains__, count())]

    def missing(self) -> Iterator[tuple[int, int]]:
        """Byte ranges (start, stop) that are not there; needs a known size."""
        total = self.metadata.info.size
        assert total is not None
        starts = range(0, total, BLOCK)
        for there, run in groupby(starts, lambda start: start // BLOCK in self._digests):
            if not there:
                absent = list(run)
                yield absent[0], min(absent[-1] + BLOCK, total)

    def handle(self) -> io.FileIO:
        """Another descriptor of the data file, for a worker to close.

        It shares the writer's flock: the partial is live until the last worker has let go.
        """
        return dup_exclusive(self._file)

    def seal(self, metadata: Metadata, modes: Modes, *, sync: bool) -> None:
        """Make the directory what an entry must be (LostError: it is another's by now)."""
        try:
            write_new(f"{self.path}/{META}", metadata.encode(), modes.file, sync=sync)
            if self._progress is not None:
                os.unlink(f"{self.path}/{PROGRESS}")  # noqa: PTH108 - no Path per shard
            os.fchmod(self.fd, modes.published)
            if sync:
                os.fsync(self.fd)
                sync_directory(self.path)
        except FileNotFoundError as exn:
            raise LostError(f"{self.path.name} was taken over by another process") from exn
        self.metadata = metadata

    def close(self) -> None:
        """Let go; what is there stays for the next one to resume."""
        with self._guard:
            self._file.close()
            if self._progress is not None:
                self._progress.close()

    def discard(self) -> None:
        """Remove it, then let go. In a forked child, nothing: it is the parent's."""
        if not self._file.closed:
            remove_directory(self.path, self.data.name)
            self.close()


# -- what is in flight, and what dead processes left -----------------------------------------


@dataclass(frozen=True, slots=True)
class InFlight:
    """A directory of ``partial``."""

    path: Path
    key: str  #: the shard's; empty for an entry on its way out
    version: str  #: of the object, likewise
    live: bool  #: whether a process holds it
    occupied: int  #: bytes of data on disk now
    size: int | None  #: bytes it will have, where the origin said so

    @property
    def is_measured(self) -> bool:
        """Whether it is known how many bytes it will have, if it is to have more."""
        return not self.live or not self.key or self.size is not None

    @property
    def reserved(self) -> int:
        """Bytes it will occupy in the end, as far as known."""
        if self.live and not self.key:
            return 0  # somebody removes it right now
        return max(self.occupied, (self.live and self.size) or 0)


def _partial_names(layout: Layout) -> Iterator[str]:
    """The names in ``partial``, with those that processes gave to partials meanwhile."""
    seen = set[str]()
    while new := [name for name in list_names(layout.partial) if name not in seen]:
        seen.update(new)
        yield from new


def in_flight(layout: Layout) -> Iterator[InFlight]:
    """Everything in ``partial`` that bears a name of ours; changes nothing."""
    for name in _partial_names(layout):
        parsed = parse_partial_name(name)
        path = layout.partial / name
        if not (parsed or is_evicted_name(name)) or not is_directory(path):
            continue  # gone meanwhile, or nothing of ours
        try:
            # A writer's lock is exclusive, so a shared one shows whether the writer lives, and two
            # processes that look do not disturb each other. Readers of an entry on its way out
            # hold shared locks.
            with hold(path, layout.grace, shared=parsed is not None) as free:
                occupied = _occupied(path)
        except PermissionError:  # closed to us, so not ours
            continue
        key, version, size = parsed or ("", "", None)
        yield InFlight(path, key, version, not free, occupied, size)


def _occupied(path: Path) -> int:
    data = data_file(path)  # entries do not count their sidecars either
    if data is not None:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(data)
            return min(found.st_blocks * 512, found.st_size)
    return 0


def remove_leftover(layout: Layout, path: Path) -> bool:
    """Remove a directory of ``partial`` whose process is dead; False if it is live or gone."""
    parsed = parse_partial_name(path.name)
    if not (parsed or is_evicted_name(path.name)) or not is_directory(path):
        return False
    with hold(path, layout.grace) as free:
        if not free:
            return False
        doomed = layout.new_evicted(parsed[0] if parsed else path.name.split(".")[1])
        try:
            path.rename(doomed)
        except OSError as exn:
            if exn.errno not in IMMOVABLE:  # or another process was faster
                raise
            return False
        remove_directory(doomed)
        return not doomed.exists()


def remove_unnamed(layout: Layout) -> None:
    """Remove files and directories whose makers died before naming them."""
    for name in filter(is_temporary_name, list_names(layout.partial)):
        remove_old(layout.partial / name)
