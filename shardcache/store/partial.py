"""A shard in flight: its growing data file and the record of what is in it.

A partial is a directory with the files an entry has, and `progress` beside
them. Which bytes are there is what `progress` says, never the file's size: a
file with a written tail has its full size and holes.

Who may touch it: the process that holds the exclusive flock on the data file.
Its threads may write and record different blocks at once. Anybody may read
`progress`. When the writer dies the flock is free: `claim` takes the partial
over by renaming it, and whatever `progress` says is proven against the data
before it is believed. A writer that lost its partial this way without knowing
(locks that lie) can only write the same bytes of the same version again.
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
from pathlib import Path

from shardcache.files import (
    Modes,
    dup_exclusive,
    is_alone,
    open_exclusive,
    open_file,
    sync_directory,
)
from shardcache.layout import (
    IDLE_GRACE,
    META,
    PROGRESS,
    Layout,
    is_directory,
    is_idle,
    parse_partial_name,
    read_file,
    replace_file,
)
from shardcache.locks.flock import is_file, is_free
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.entry import MAX_BYTES, DamagedError, Metadata

_MAGIC = b"SHCPROG1"
_HEADER = struct.Struct("<8sQQQQ")
_RECORD = struct.Struct("<16sQ")
_RECORDS_AT = 64
_UNKNOWN = (1 << 64) - 1
#: Records read at once: 96 KiB, for a shard of 4 GiB.
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a fetch is, read from outside.

    Attributes:
        total: bytes the shard will have, or None while unknown.
        watermark: bytes of the contiguous prefix on disk.
        written: bytes on disk altogether.
    """

    total: int | None
    watermark: int
    written: int

    def write(self, fd: int) -> None:
        """Make this the header of an open progress file.

        Raises:
            OSError: the disk fails.
        """
        total = _UNKNOWN if self.total is None else self.total
        os.pwrite(fd, _HEADER.pack(_MAGIC, BLOCK, total, self.watermark, self.written), 0)


def read_progress(path: Path) -> Progress | None:
    """The progress of the partial at ``path``; None when it is gone or unreadable."""
    try:
        return parse_header(read_file(path / PROGRESS, _HEADER.size))
    except (OSError, DamagedError):
        return None


def read_header(fd: int) -> Progress:
    """The header of an open progress file.

    Raises:
        DamagedError: it is none.
        OSError: the disk fails.
    """
    return parse_header(os.pread(fd, _HEADER.size, 0))


def parse_header(data: bytes) -> Progress:
    """What the first bytes of a progress file say.

    Raises:
        DamagedError: they are none.
    """
    if len(data) != _HEADER.size:
        raise DamagedError("its progress file is too short")
    magic, block, total, watermark, written = _HEADER.unpack(data)
    if magic != _MAGIC or block != BLOCK:
        raise DamagedError("its progress file is of another kind")
    return Progress(None if total == _UNKNOWN else total, watermark, written)


def read_records(fd: int, total: int) -> Iterator[tuple[int, bytes, int]]:
    """(index, digest, length) of the recorded blocks of a shard of ``total`` bytes.

    A record whose length is not that of its block is passed over.

    Raises:
        OSError: the disk fails.
    """
    count = -(-total // BLOCK)
    index = 0
    while index < count:
        at = _next_data(fd, _record_at(index))
        if at is None:
            return
        # A file may be damaged and claim any size: what was never written is skipped.
        index = max(index, (at - _RECORDS_AT) // _RECORD.size)
        data = os.pread(fd, min(_CHUNK, count - index) * _RECORD.size, _record_at(index))
        whole = len(data) // _RECORD.size
        if whole == 0:
            return
        for digest, length in _RECORD.iter_unpack(data[: whole * _RECORD.size]):
            if length == min(BLOCK, total - index * BLOCK):
                yield index, digest, length
            index += 1


def _record_at(index: int) -> int:
    return _RECORDS_AT + index * _RECORD.size


def _next_data(fd: int, offset: int) -> int | None:
    """The first offset from ``offset`` on that was written; None if there is none."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as exn:
        if exn.errno == errno.ENXIO:
            return None
        if exn.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return offset  # a filesystem that does not tell


def _read_sidecar(path: Path, expected: tuple[str, str]) -> Metadata:
    """The sidecar of a partial whose bytes are worth something to others than its writer.

    Args:
        path: the partial.
        expected: key and version, as its name has them.

    Raises:
        DamagedError: it is none.
        OSError: the disk fails, or there is no sidecar.
    """
    metadata = Metadata.decode(read_file(path / META, MAX_BYTES))
    if expected != (metadata.key, metadata.info.version):
        raise DamagedError("its sidecar describes another object")
    if not metadata.info.identifiable:
        # Its writer may begin again from nothing.
        raise DamagedError("its version cannot be told from others")
    return metadata


class Growing:
    """A partial as those see it who read it while it grows.

    Attributes:
        path: its directory when it was opened; it may be renamed.
        info: the version it will be.
        data: the data file.
    """

    def __init__(self, path: Path, basename: str) -> None:
        """Open the partial at ``path`` of a shard whose data file is ``basename``.

        Raises:
            DamagedError: it cannot be followed.
            OSError: it is gone, or cannot be read.
        """
        parsed = parse_partial_name(path.name)
        if parsed is None:
            raise DamagedError("it is no partial")
        self.path = path
        self.info = _read_sidecar(path, parsed).info
        self.data = open_file(path / basename, io.FileIO)
        try:
            self._progress = open_file(path / PROGRESS, io.FileIO)
        except OSError:  # it is being published: its progress file went first
            self.data.close()
            raise

    def limit(self) -> int:
        """Bytes that may be read: what is behind the watermark, without the last block.

        Raises:
            DamagedError, OSError: the progress file is none.
        """
        found = read_header(self._progress.fileno())
        known = found.watermark if found.total is None else min(found.watermark, found.total)
        # Of a shard of unknown size any block may be the last.
        held_back = max(0, (known if found.total is None else found.total) - 1)
        return min(known, held_back // BLOCK * BLOCK)

    @property
    def sealed(self) -> bool:
        """Whether it is being published, or was removed."""
        return os.fstat(self._progress.fileno()).st_nlink == 0

    def close(self, *, data: bool = True) -> None:
        """Let go of it; without ``data`` the data file stays open, for somebody else."""
        if data:
            self.data.close()
        self._progress.close()


def is_same(one: io.FileIO, other: io.FileIO) -> bool:
    """Whether two open files are one."""
    return os.path.sameopenfile(one.fileno(), other.fileno())


def same_bytes(one: io.FileIO, other: io.FileIO, size: int) -> bool:
    """Whether two files have the same first ``size`` bytes.

    Raises:
        OSError: one of them cannot be read.
    """
    for offset in range(0, size, BLOCK):
        length = min(BLOCK, size - offset)
        found = os.pread(one.fileno(), length, offset)
        if len(found) != length or found != os.pread(other.fileno(), length, offset):
            return False
    return True


#: Seconds between looks at a lock that is taken: whoever only looks whether a
#: writer is alive holds it for microseconds, a writer for as long as it lives.
_LOCK_PATIENCE = (0.001, 0.01)


def _create_locked(path: Path, layout: Layout) -> io.FileIO | None:
    """Make a data file with its exclusive lock, or None if a sweeper has that."""
    file = open_exclusive(path, _MAKE, layout.modes)
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        locked = layout.grace is not None or is_free(file.fileno()) is not False
        if not (locked and is_file(path, file.fileno())):
            return None
        stack.pop_all()
    return file


def _open_locked(path: Path, grace: float | None) -> io.FileIO | None:
    """Open a data file for writing with its exclusive lock, or None if it is somebody's.

    Args:
        path: the file.
        grace: as `Layout.grace`; then nothing is locked.
    """
    file = open_exclusive(path, os.O_RDWR)
    with contextlib.ExitStack() as stack:
        stack.callback(file.close)
        answer = is_free(file.fileno()) if grace is None else None
        for seconds in _LOCK_PATIENCE:
            if answer is not False:
                break
            time.sleep(seconds)
            answer = is_free(file.fileno())
        if answer is None:
            answer = is_idle(path.parent, grace or IDLE_GRACE)
        # Between open and flock a sweeper may have won: then the name is gone, or is another file.
        if not (answer and is_file(path, file.fileno()) and _is_ours_alone(file.fileno())):
            return None
        stack.pop_all()
    return file


def _is_ours_alone(fd: int) -> bool:
    """Whether an open file may be written, and sealed, which its owner alone can do."""
    return is_alone(fd) and os.fstat(fd).st_uid == os.geteuid()


#: What opening the files answers when they are gone, sealed already, or no files
#: of ours: then there is nothing to resume.
_NOT_RESUMABLE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.EISDIR})
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL
#: A sweeper may remove a directory between our mkdir and our flock; it cannot
#: do so for ever.
_CREATE_ATTEMPTS = 100


class LostError(Exception):
    """Somebody swept or took over this partial; only possible where locks do not work."""


class Partial:
    """A partial that this process writes. Made by `create` or `claim`."""

    def __init__(
        self, data: Path, metadata: Metadata, file: io.FileIO, progress: io.FileIO, modes: Modes
    ):
        self.path = data.parent
        self.data = data
        self.metadata = metadata
        self._modes = modes
        self._file = file
        self._progress = progress
        self._digests: dict[int, tuple[bytes, int]] = {}
        self._written = 0
        self._contiguous = 0  # blocks
        self._guard = threading.Lock()
        self._total = metadata.info.size
        self.confirmed = True

    @classmethod
    def create(cls, layout: Layout, metadata: Metadata, basename: str) -> Partial:
        """Make an empty partial, locked by this process.

        Raises:
            OSError: the disk is full, read-only or failing.
            LostError: something keeps removing it.
        """
        for _ in range(_CREATE_ATTEMPTS):
            path = layout.new_partial(metadata.key, metadata.info.version)
            try:
                layout.modes.new_directory(path)
            except FileNotFoundError:
                layout.mend(layout.partial)
                continue
            try:
                file = _create_locked(path / basename, layout)
                if file is None:  # a sweeper is looking at it right now
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                return cls._begin(path / basename, metadata, file, layout.modes)
            except FileNotFoundError:
                continue  # swept between two of our calls
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
                raise
        raise LostError(f"{layout.partial} is being emptied faster than it can be filled")

    @classmethod
    def _begin(cls, data: Path, metadata: Metadata, file: io.FileIO, modes: Modes) -> Partial:
        with contextlib.ExitStack() as stack:
            stack.callback(file.close)
            replace_file(data.parent / META, metadata.encode(), modes.file, via=data.parent.parent)
            progress = open_exclusive(data.parent / PROGRESS, _MAKE, modes)
            stack.callback(progress.close)
            partial = cls(data, metadata, file, progress, modes)
            partial._write_header()
            stack.pop_all()
        return partial

    @classmethod
    def claim(cls, layout: Layout, path: Path, basename: str) -> Partial | None:
        """Take over what a dead process left, or None if it is alive, gone or useless.

        Useless remains are removed, or left to the sweeper; so is what another user left,
        who alone could make it read-only.

        Raises:
            OSError: the disk fails.
        """
        parsed = parse_partial_name(path.name)
        if parsed is None or not is_directory(path):
            return None
        mine = layout.new_partial(*parsed)
        with contextlib.ExitStack() as stack:
            try:
                file = _open_locked(path / basename, layout.grace)
                if file is None:
                    return None
                stack.callback(file.close)
                path.rename(mine)  # the claim: of two, one finds the old name gone
                metadata = _read_sidecar(mine, parsed)
                if metadata.info.size is None:
                    raise DamagedError("its size is unknown, so it cannot be resumed")
                progress = open_exclusive(mine / PROGRESS, os.O_RDWR)
                stack.callback(progress.close)
                if not _is_ours_alone(progress.fileno()):
                    raise DamagedError("its progress file is also somewhere else")
                partial = cls(mine / basename, metadata, file, progress, layout.modes)
                partial._prove()
            except (DamagedError, OSError) as exn:
                if isinstance(exn, OSError) and exn.errno not in _NOT_RESUMABLE:
                    raise
                shutil.rmtree(mine, ignore_errors=True)
                return None
            stack.pop_all()
        return partial

    @property
    def fd(self) -> int:
        """The descriptor of the data file, for as long as this is open."""
        return self._file.fileno()

    def _prove(self) -> None:
        """Believe just those recorded blocks whose bytes have the recorded digest."""
        header = read_header(self._progress.fileno())
        if header.total is None or header.total != self._total:
            raise DamagedError("its progress file describes another object")
        self.confirmed = False
        buffer = memoryview(bytearray(BLOCK))
        for index, digest, length in read_records(self._progress.fileno(), header.total):
            got = os.preadv(self.fd, [buffer[:length]], index * BLOCK)
            if got == length and block_digest(buffer[:length]) == digest:
                self._digests[index] = (digest, length)
                self._written += length
        self._advance()
        self._write_header()

    def write(self, offset: int, data: memoryview, fd: int | None = None) -> None:
        """Put bytes in their place.

        Raises:
            OSError: ENOSPC, EDQUOT, EIO, ...
        """
        target = self.fd if fd is None else fd
        while data:
            count = os.pwrite(target, data, offset)
            if count == 0:
                raise OSError(errno.EIO, "the filesystem accepts no bytes")
            offset += count
            data = data[count:]

    def record(self, index: int, digest: bytes, length: int) -> None:
        """Say that block ``index`` is on disk. Call after `write`.

        Raises:
            OSError: as `write`.
        """
        with self._guard:
            if self._progress.closed:
                return  # the fetch was called off; its last workers do not matter
            os.pwrite(self._progress.fileno(), _RECORD.pack(digest, length), _record_at(index))
            if index not in self._digests:
                self._written += length
            self._digests[index] = (digest, length)
            self._advance()
            self._write_header()

    def show(self, count: int) -> None:
        """Say that the first ``count`` bytes of the first block are on disk.

        They may be read; they count as written once their block is recorded.

        Raises:
            OSError: as `write`.
        """
        with self._guard:
            if not self._progress.closed and self._contiguous == 0:
                self._write_header(early=count)

    def restart(self) -> None:
        """Forget everything that was written.

        Raises:
            OSError: the disk fails.
        """
        with self._guard:
            self._digests.clear()
            self._written = self._contiguous = 0
            if not self._progress.closed:
                os.ftruncate(self._progress.fileno(), 0)
                os.ftruncate(self.fd, 0)
                self._write_header()

    def _advance(self) -> None:
        while self._contiguous in self._digests:
            self._contiguous += 1

    def _write_header(self, early: int = 0) -> None:
        # Who follows is given nothing of a version that may have been replaced since.
        shown = max(self.watermark, early) if self.confirmed else 0
        Progress(self._total, shown, self._written).write(self._progress.fileno())

    def confirm(self) -> None:
        """Say that the origin still has this version: what was resumed may be read.

        Raises:
            OSError: the disk fails.
        """
        if not self.confirmed:
            with self._guard:
                self.confirmed = True
                if not self._progress.closed:
                    self._write_header()

    @property
    def watermark(self) -> int:
        """Bytes of the contiguous prefix on disk."""
        if self._contiguous == 0:
            return 0
        return (self._contiguous - 1) * BLOCK + self._digests[self._contiguous - 1][1]

    @property
    def written(self) -> int:
        """Bytes on disk altogether."""
        return self._written

    @property
    def digests(self) -> list[bytes]:
        """The digests of the contiguous blocks, in order."""
        return [self._digests[i][0] for i in range(self._contiguous)]

    def missing(self) -> Iterator[tuple[int, int]]:
        """Byte ranges (start, stop) that are not there; needs a known size."""
        assert self._total is not None
        start = None
        blocks = -(-self._total // BLOCK)
        for index in range(blocks + 1):
            absent = index < blocks and index not in self._digests
            if absent and start is None:
                start = index * BLOCK
            elif not absent and start is not None:
                yield start, min(index * BLOCK, self._total)
                start = None

    def set_total(self, total: int) -> None:
        """State the size, where the origin told it only by ending."""
        with self._guard:
            if self._progress.closed:
                return
            self._total = total
            self._write_header()

    def handle(self) -> io.FileIO:
        """Another descriptor of the data file, for a worker to close.

        It shares the writer's flock: the partial counts as live until the last
        worker has let go, and a descriptor can never be reused under a worker.
        """
        return dup_exclusive(self._file)

    def seal(self, metadata: Metadata, *, sync: bool) -> None:
        """Make the directory what an entry must be, ready to be renamed.

        Raises:
            OSError: the disk fails.
            LostError: the partial is no longer under its name.
        """
        try:
            via = self.path.parent  # what is killed half-way must not be published by a resume
            data = metadata.encode()
            replace_file(self.path / META, data, self._modes.file, via=via, sync=sync)
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
