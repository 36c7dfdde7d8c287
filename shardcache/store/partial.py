"""A shard in flight: its growing data file and the record of what is in it.

A partial is a directory with the data file and `progress`. Which bytes are there is what
`progress` says, never the file's size: a file with a written tail has its full size and holes.

    progress:  a header, the sidecar as it is known so far, and a record for each block:
               its digest and its length, zeros while it is not there

Who may touch it: the process that holds the exclusive flock on the data file. Its threads may
write and record different blocks at once. Anybody may read `progress`. When the writer dies the
flock is free: `claim` takes the partial over by renaming it, and whatever `progress` says is
proven against the data before it is believed. A writer that lost its partial this way without
knowing (locks that lie) can only write the same bytes of the same version again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from shardcache.files import Modes, dup_exclusive, open_exclusive, open_file, sync_directory
from shardcache.layout import (
    IDLE_GRACE,
    META,
    PROGRESS,
    Layout,
    is_directory,
    is_idle,
    parse_partial_name,
    write_new,
)
from shardcache.locks.flock import is_file, is_free
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.entry import MAX_BYTES, DamagedError, Metadata

_MAGIC = b"SHCPROG2"
#: Magic, bytes of the shard, where the records begin, and whether what is recorded may be read.
_HEADER = struct.Struct("<8sQII")
_UNKNOWN = (1 << 64) - 1
_RECORD = struct.Struct("<16sQ")
#: Records that a reader looks at in one call: 256 MiB of data.
_AHEAD = 256


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is."""

    total: int | None  #: bytes the shard will have, or None while unknown
    written: int  #: bytes on disk


def _parse_header(data: bytes) -> tuple[int | None, int, bool]:
    """Bytes of the shard, where the records begin, and whether what is there may be read."""
    if len(data) < _HEADER.size:
        raise DamagedError("its progress file is too short")
    magic, total, records_at, shown = _HEADER.unpack_from(data)
    if magic != _MAGIC or records_at > MAX_BYTES:
        raise DamagedError("its progress file is of another kind")
    return None if total == _UNKNOWN else total, records_at, bool(shown)


def _records(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """(digest, length) of each block, from the bytes of a progress file."""
    stop = start + (len(data) - start) // _RECORD.size * _RECORD.size
    return _RECORD.iter_unpack(data[start:stop])


def read_progress(path: Path) -> Progress | None:
    """The progress of the partial at ``path``; None when it is gone or unreadable."""
    try:
        with open_file(path / PROGRESS) as file:
            data = file.readall()
        total, records_at, _shown = _parse_header(data)
    except (OSError, DamagedError):
        return None
    return Progress(total, sum(min(length, BLOCK) for _, length in _records(data, records_at)))


def read_metadata(path: Path) -> Metadata:
    """What the partial at ``path`` will be, as far as its writer knows."""
    with open_file(path / PROGRESS) as file:
        return _parse_metadata(path, os.pread(file.fileno(), MAX_BYTES, 0))


def _parse_metadata(path: Path, data: bytes) -> Metadata:
    """The sidecar in the first bytes of the progress file of the partial at ``path``."""
    _total, records_at, _shown = _parse_header(data)
    metadata = Metadata.decode(data[_HEADER.size : records_at])
    if parse_partial_name(path.name) != (metadata.key, metadata.info.version):
        raise DamagedError("its progress file describes another object")
    return metadata


class PartialSource:
    """A partial as those see it who read it while it grows.

    Attributes:
        info: the version it will be.
        data: the data file.

    Raises:
        DamagedError: it must not be read.
        OSError: it is gone, or cannot be read.
    """

    def __init__(self, path: Path, basename: str) -> None:
        with contextlib.ExitStack() as stack:
            self.data = stack.enter_context(open_file(path / basename))
            self._progress = stack.enter_context(open_file(path / PROGRESS))
            data = os.pread(self._progress.fileno(), MAX_BYTES, 0)
            self.info = _parse_metadata(path, data).info
            self._total, self._records_at, self._shown = _parse_header(data)
            if not self.info.identifiable:
                # Its writer may begin again from nothing.
                raise DamagedError("its version cannot be told from others")
            stack.pop_all()
        self._blocks = 0  # whole ones, without a gap

    def limit(self) -> int:
        """Bytes that may be read: what is there without a gap, without the last block."""
        fd = self._progress.fileno()
        self._shown = self._shown or _parse_header(os.pread(fd, _HEADER.size, 0))[2]
        if not self._shown:
            return 0
        length = BLOCK
        while length == BLOCK:
            at = self._records_at + self._blocks * _RECORD.size
            data, length = os.pread(fd, _AHEAD * _RECORD.size, at), 0
            for _, length in _records(data, 0):
                if length != BLOCK:
                    break
                self._blocks += 1
        known = self._blocks * BLOCK + min(length, BLOCK)
        # Of a shard of unknown size any block may be the last.
        held_back = max(0, (known if self._total is None else self._total) - 1)
        return min(known, held_back // BLOCK * BLOCK)

    @property
    def sealed(self) -> bool:
        """Whether it is being published, or was removed."""
        return os.fstat(self._progress.fileno()).st_nlink == 0

    def close(self) -> None:
        """Let go of it."""
        for file in (self.data, self._progress):
            with contextlib.suppress(OSError):  # closed all the same; it was only read
                file.close()


#: Seconds between looks at a lock that is taken: whoever only looks whether a
#: writer is alive holds it for microseconds, a writer for as long as it lives.
_LOCK_PATIENCE = (0.001, 0.01, 0.0)


def _lock(fd: int, layout: Layout) -> bool | None:
    """Take the lock of a data file; None where nobody can tell who has it."""
    free = None
    for seconds in _LOCK_PATIENCE if layout.grace is None else ():
        free = is_free(fd)
        if free is not False:
            break
        time.sleep(seconds)
    return free


#: What opening the files answers when they are gone, sealed already, or no files
#: of ours: then there is nothing to resume.
_NOT_RESUMABLE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.EISDIR})
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class LostError(Exception):
    """Somebody swept or took over this partial; only possible where locks do not work."""


class Partial:
    """A partial that this process writes; made by `create` or `claim`.

    Attributes:
        path: its directory.
        data: the data file.
        metadata: what the shard will be; its size and digest count once it is sealed.
        confirmed: whether the origin said that it still has this version.
        written: bytes on disk altogether.
    """

    def __init__(
        self, data: Path, metadata: Metadata, file: io.FileIO, progress: io.FileIO, modes: Modes
    ) -> None:
        self.path = data.parent
        self.data = data
        self.metadata = metadata
        self.confirmed = True
        self.written = 0
        self._modes = modes
        self._file = file
        self._progress = progress
        self._records_at = 0
        self._digests: dict[int, tuple[bytes, int]] = {}
        self._contiguous = 0  # blocks
        self._guard = threading.Lock()

    @classmethod
    def create(cls, layout: Layout, metadata: Metadata, basename: str) -> Partial:
        """Make an empty partial, locked by this process."""
        path = layout.new_partial(metadata.key, metadata.info.version)
        layout.modes.make_directory(path, levels=1)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            file = stack.enter_context(open_exclusive(path / basename, _MAKE, layout.modes))
            if _lock(file.fileno(), layout) is False:
                raise LostError(f"{path.name} was locked by another process")
            # Last: sweepers leave alone what has none and is young.
            progress = stack.enter_context(open_exclusive(path / PROGRESS, _MAKE, layout.modes))
            partial = cls(path / basename, metadata, file, progress, layout.modes)
            sidecar = metadata.encode()
            sidecar += b" " * (-len(sidecar) % 8)  # no record's length crosses two pages
            partial._records_at = _HEADER.size + len(sidecar)
            partial._write_header(sidecar)
            stack.pop_all()
        return partial

    @classmethod
    def claim(cls, layout: Layout, path: Path, basename: str) -> Partial | None:
        """Take over what a dead process left, or None if it is alive, gone or useless.

        Useless remains are removed, or left to the sweeper; so is what another user left,
        who alone could make it read-only.
        """
        parsed = parse_partial_name(path.name)
        if parsed is None or not is_directory(path):
            return None
        mine = layout.new_partial(*parsed)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open_exclusive(path / basename, os.O_RDWR))
                free = _lock(file.fileno(), layout)
                if free is None:
                    free = is_idle(path, layout.grace or IDLE_GRACE)
                # Between open and flock a sweeper may have won: then the name is gone.
                if not (free and is_file(path / basename, file.fileno()) and _is_ours(file)):
                    return None
                path.rename(mine)  # the claim: of two, one finds the old name gone
                progress = stack.enter_context(open_exclusive(mine / PROGRESS, os.O_RDWR))
                data = progress.readall() or b""  # None: a named pipe
                metadata = _parse_metadata(mine, data)
                if metadata.info.size is None or not metadata.info.identifiable:
                    raise DamagedError("it is not known what is missing")
                (mine / META).unlink(missing_ok=True)  # its writer was killed while sealing it
                partial = cls(mine / basename, metadata, file, progress, layout.modes)
                partial._records_at = _parse_header(data)[1]
                partial._prove(_records(data, partial._records_at), metadata.info.size)
            except (DamagedError, OSError) as exn:
                if isinstance(exn, OSError) and exn.errno not in _NOT_RESUMABLE:
                    raise
                shutil.rmtree(mine, ignore_errors=True)
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
            count = os.pwrite(target, data, offset)
            if count == 0:
                raise OSError(errno.EIO, "the filesystem accepts no bytes")
            offset += count
            data = data[count:]

    def record(self, index: int, digest: bytes, length: int) -> None:
        """Say that block ``index`` is on disk. Call after `write`."""
        with self._guard:
            if not self._progress.closed:  # or the fetch was called off; this does not matter
                self._write_record(index, digest, length)
                self._note(index, digest, length)

    def show(self, count: int) -> None:
        """Say that the first ``count`` bytes of the first block are on disk.

        They may be read; they count as written once their block is recorded.
        """
        with self._guard:
            if not self._progress.closed and 0 not in self._digests:
                self._write_record(0, bytes(16), count)

    def restart(self) -> None:
        """Forget everything that was written."""
        with self._guard:
            self._digests.clear()
            self.written = self._contiguous = 0
            if not self._progress.closed:
                os.ftruncate(self._progress.fileno(), self._records_at)
                os.ftruncate(self.fd, 0)

    def confirm(self) -> None:
        """Say that the origin still has this version: what was resumed may be read."""
        with self._guard:
            self.confirmed = True
            if not self._progress.closed:
                self._write_header()

    def _note(self, index: int, digest: bytes, length: int) -> None:
        if index not in self._digests:
            self.written += length
        self._digests[index] = (digest, length)
        while self._contiguous in self._digests:
            self._contiguous += 1

    def _write_record(self, index: int, digest: bytes, length: int) -> None:
        at = self._records_at + index * _RECORD.size
        os.pwrite(self._progress.fileno(), _RECORD.pack(digest, length), at)

    def _write_header(self, sidecar: bytes = b"") -> None:
        total = _UNKNOWN if self.metadata.info.size is None else self.metadata.info.size
        # Who follows is given nothing of a version that may have been replaced since.
        header = _HEADER.pack(_MAGIC, total, self._records_at, self.confirmed)
        os.pwrite(self._progress.fileno(), header + sidecar, 0)

    @property
    def watermark(self) -> int:
        """Bytes of the contiguous prefix on disk."""
        if self._contiguous == 0:
            return 0
        return (self._contiguous - 1) * BLOCK + self._digests[self._contiguous - 1][1]

    @property
    def digests(self) -> list[bytes]:
        """The digests of the contiguous blocks, in order."""
        return [self._digests[i][0] for i in range(self._contiguous)]

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

        It shares the writer's flock: the partial counts as live until the last
        worker has let go, and a descriptor can never be reused under a worker.
        """
        return dup_exclusive(self._file)

    def seal(self, metadata: Metadata, *, sync: bool) -> None:
        """Make the directory what an entry must be (LostError: it is another's by now)."""
        try:
            write_new(self.path / META, metadata.encode(), self._modes.file, sync=sync)
            (self.path / PROGRESS).unlink()
            os.fchmod(self.fd, self._modes.published)
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
            self._progress.close()

    def discard(self) -> None:
        """Remove it, then let go. In a forked child, nothing: it is the parent's."""
        if not self._file.closed:
            shutil.rmtree(self.path, ignore_errors=True)
            self.close()


def _is_ours(file: io.FileIO) -> bool:
    """Whether an open file can be sealed, which its owner alone may do."""
    return os.fstat(file.fileno()).st_uid == os.geteuid()
