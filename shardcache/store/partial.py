"""Partials: shards that are still being downloaded.

The journal, the file ``progress``, has a header, the known part of the sidecar, and a record for
each block, with its digest and length, or zeros if the block is not on disk.

The process that holds the exclusive flock on the data file is the writer. When it dies, another
process may take the partial over (`Partial.claim`) or remove it (`remove_free`). Both first
rename the directory, so if several processes try, only one succeeds. If locks do not work, a live
writer may lose its partial in this way, but it writes only the same bytes of the same version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import signal
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby, takewhile
from pathlib import Path
from typing import NamedTuple

from shardcache import files
from shardcache.faults import ignoring, system_error
from shardcache.layout import JOURNAL, META, Layout, is_hidden_name, parse_partial_name
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.directory import (
    DamagedError,
    Metadata,
    data_file,
    data_locked_if_free,
    remove_directory,
)

_MAGIC = b"SHCPROG3"
#: The header: magic, offset of the first record, and whether readers may read the blocks.
_HEADER = struct.Struct("<8sII")
#: The record of one block: its digest and length.
_RECORD = struct.Struct("<16sQ")
#: Bytes of a usual sidecar, for the budget. A long URL needs a few more.
_SIDECAR = 700
#: Records that a reader reads in one call: 6 KiB of the journal describe 256 MiB of data.
_RECORDS_PER_READ = 256
#: Largest journal in bytes. S3's largest object, of 5 TB, has a journal of 120 MB.
_MAX_JOURNAL = 1 << 27
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL


class LostError(Exception):
    """Another process removed or took a partial or a new entry, because locks fail or came late."""


def record_size(size: int) -> int:
    """Return the size of the journal of a shard of ``size`` bytes. Its sidecar is no larger."""
    return _SIDECAR + -(-size // BLOCK) * _RECORD.size


class Journal(NamedTuple):
    """A partial's journal: the sidecar, as far as the writer knows it, and the bytes on disk."""

    metadata: Metadata
    written: int


def _parse(path: Path, data: bytes) -> tuple[Metadata, int, bool]:
    """Return the sidecar in a journal, the offset of its records, and `Partial.confirmed`."""
    if len(data) < _HEADER.size:
        raise DamagedError("its progress file is too short")
    magic, records_at, confirmed = _HEADER.unpack_from(data)
    if magic != _MAGIC or records_at > files.MAX_RECORD:
        raise DamagedError("its progress file is of another kind")
    metadata = Metadata.decode(data[_HEADER.size : records_at])
    named = metadata.key, metadata.info.version, metadata.info.size
    if parse_partial_name(path.name) != named:
        raise DamagedError("its progress file describes another object")
    return metadata, records_at, bool(confirmed)


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the digest and length of each block; the last record may be incomplete."""
    return _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size])


def read_journal(path: Path) -> Journal | None:
    """Read the journal of a partial; return None if it is missing or damaged."""
    try:
        data = files.read_file(path / JOURNAL, _MAX_JOURNAL)
        metadata, records_at, _ = _parse(path, data)
    except (system_error(), DamagedError):
        return None
    return Journal(metadata, sum(min(length, BLOCK) for _, length in _records(data[records_at:])))


class OpenPartial:
    """A partial that is open for reading while its writer fills it.

    Raises OSError if the partial is gone, and DamagedError if it cannot be followed.
    """

    def __init__(self, path: Path, basename: str) -> None:
        with contextlib.ExitStack() as stack:
            self.data = stack.enter_context(files.open_file(path / basename))
            self._journal = stack.enter_context(files.open_file(path / JOURNAL))
            header = os.pread(self._journal.fileno(), files.MAX_RECORD, 0)
            metadata, self._records_at, self._confirmed = _parse(path, header)
            self.info = metadata.info
            if not self.info.identifiable:
                # The writer may start over with the bytes of another version.
                raise DamagedError("its origin states no version")
            self._stack = stack.pop_all()
        self._blocks = 0  # number of complete blocks before the first gap

    def watermark(self) -> int:
        """Return the watermark: how many bytes may be read, up to a gap or the last block."""
        fd = self._journal.fileno()
        if not self._confirmed:
            self._confirmed = bool(_HEADER.unpack(os.pread(fd, _HEADER.size, 0))[2])
            if not self._confirmed:
                return 0
        length = BLOCK
        while length == BLOCK:
            at = self._records_at + self._blocks * _RECORD.size
            records, length = os.pread(fd, _RECORDS_PER_READ * _RECORD.size, at), 0
            for _, length in _records(records):
                if length != BLOCK:
                    break
                self._blocks += 1
        known = self._blocks * BLOCK + min(length, BLOCK)
        # If the size is unknown, any block may be the last one.
        size = known if self.info.size is None else self.info.size
        return min(known, max(0, size - 1) // BLOCK * BLOCK)

    @property
    def sealed(self) -> bool:
        """Whether the partial is being published, or was removed."""
        return os.fstat(self._journal.fileno()).st_nlink == 0

    def close(self) -> None:
        with ignoring(OSError):  # read-only files are closed even if this fails
            self._stack.close()


@dataclass(eq=False)
class Partial:
    """A partial that this process writes. Use `create` or `claim` to make one."""

    data: Path
    metadata: Metadata  #: the sidecar; its size and digest are final after `seal`
    _file: io.FileIO
    _journal: io.FileIO | None
    _records_at: int
    _unproven: bytes = b""  # the records of a claimed partial
    #: Of a claimed partial: whether a response shows that the origin still has this version. Until
    #: then, no process reads it.
    confirmed: bool = True
    user_mode: int | None = None  #: the mode of the user's file, if the data is a link to it

    def __post_init__(self) -> None:
        self.path = self.data.parent
        self.written = 0  #: bytes on disk
        self._digests: dict[int, tuple[bytes, int]] = {}
        self._guard = threading.Lock()

    @classmethod
    def create(
        cls, layout: Layout, metadata: Metadata, basename: str, linked: Path | None = None
    ) -> Partial:
        """Create and lock an empty partial. Raises LostError if another process gets it first.

        If possible, its data is a hard link to the file ``linked``.
        """
        size, modes = metadata.info.size, layout.modes
        path = layout.new_partial(metadata.key, metadata.info.version, size)
        modes.make_directory(path)
        with contextlib.ExitStack() as stack:
            stack.callback(remove_directory, path, basename)
            data = path / basename
            user_mode = None
            if linked is not None and (user_mode := _link(linked, data, modes)) is not None:
                stack.callback(data.chmod, user_mode)
            flags = _CREATE if user_mode is None else os.O_RDONLY
            try:
                file = stack.enter_context(files.open_exclusive(data, flags, modes))
            except FileNotFoundError as exn:
                raise LostError(f"{path.name} was swept as soon as it was made") from exn
            if layout.grace is None and files.wait_flock(file.fileno()) is False:
                raise LostError(f"{path.name} was locked by another process")
            journal, sidecar = None, b""
            if user_mode is None and (size is None or size > BLOCK):
                journal = files.open_exclusive(path / JOURNAL, _CREATE, modes)
                stack.enter_context(journal)
                sidecar = metadata.encode()
                sidecar += b" " * (-len(sidecar) % 8)  # so that no record's length crosses a page
            records_at = _HEADER.size + len(sidecar)
            partial = cls(data, metadata, file, journal, records_at, user_mode=user_mode)
            partial._write_header(sidecar)
            stack.pop_all()
        return partial

    @classmethod
    def claim(cls, layout: Layout, path: Path, basename: str) -> Partial | None:
        """Take over and lock a dead process's partial, to be proven; None if it cannot be used."""
        named = parse_partial_name(path.name)
        if named is None or not files.is_directory(path):
            return None
        claimed = layout.new_partial(*named)
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(files.open_exclusive(path / basename, os.O_RDWR))
                free = files.wait_flock(file.fileno()) if layout.grace is None else None
                if free is None:
                    free = files.is_idle(path, layout.grace or files.IDLE_GRACE)
                status = os.fstat(file.fileno())
                is_own = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
                # If a sweep removed the partial between open and flock, its name is gone.
                if not (free and files.is_file(path / basename, file.fileno()) and is_own):
                    return None
                path.rename(claimed)  # succeeds for only one of several processes
                data = files.read_file(claimed / JOURNAL, _MAX_JOURNAL)
                metadata, records_at, _ = _parse(claimed, data)
                journal = stack.enter_context(files.open_exclusive(claimed / JOURNAL, os.O_RDWR))
                if metadata.info.size is None or not metadata.resumable:
                    raise DamagedError("its size or version is unknown")
                (claimed / META).unlink(missing_ok=True)  # left if the writer was killed in `seal`
                if status.st_size > metadata.info.size:
                    os.ftruncate(file.fileno(), metadata.info.size)
                parts = file, journal, records_at, data[records_at:], False
                partial = cls(claimed / basename, metadata, *parts)
                partial._write_header()
            except (system_error(), DamagedError):
                remove_directory(claimed, basename)
                return None
            stack.pop_all()
        return partial

    def prove(self) -> None:
        """Keep the recorded blocks whose bytes have the recorded digest, and forget the others."""
        total, buffer = self.metadata.info.size or 0, memoryview(bytearray(BLOCK))
        records, self._unproven = _records(self._unproven), b""
        for index, (digest, length) in zip(range(-(-total // BLOCK)), records, strict=False):
            block = buffer[: min(BLOCK, total - index * BLOCK)]
            count = os.preadv(self.fd, [block], index * BLOCK)
            if length == count == len(block) and block_digest(block) == digest:
                self.record(index, digest, length)
            elif length:
                self._write_record(index, bytes(16), 0)

    @property
    def resumable(self) -> bool:
        """Whether another process can continue: the journal says how far, of which version."""
        return self._journal is not None and self.metadata.resumable

    @property
    def fd(self) -> int:
        """The descriptor of the data file, which is valid until `close`."""
        return self._file.fileno()

    def write(self, offset: int, data: memoryview, fd: int | None = None) -> None:
        """Write all of ``data`` at ``offset``, through the descriptor ``fd`` if one is given."""
        target = self.fd if fd is None else fd
        while data:
            written = os.pwrite(target, data, offset)
            if written == 0:
                raise OSError(errno.EIO, "the filesystem accepts no bytes")
            offset += written
            data = data[written:]

    def record(self, index: int, digest: bytes, length: int) -> None:
        """Note in the journal that block ``index`` is on disk. Call it after `write`."""
        with self._guard:
            if not self._file.closed:  # a cancelled download may have closed the file
                self._write_record(index, digest, length)
                if index not in self._digests:
                    self.written += length
                self._digests[index] = (digest, length)

    def show(self, length: int) -> None:
        """Let readers read ``length`` bytes of the first block before it is complete."""
        with self._guard:
            if not self._file.closed and 0 not in self._digests:
                self._write_record(0, bytes(16), length)

    def restart(self) -> None:
        """Discard all bytes."""
        with self._guard:
            self._digests.clear()
            self.written = 0
            if not self._file.closed:
                if self._journal is not None:
                    os.ftruncate(self._journal.fileno(), self._records_at)
                os.ftruncate(self.fd, 0)

    def confirm(self) -> None:
        """Show the resumed blocks to readers, because the origin still has this version."""
        with self._guard:
            if not (self.confirmed or self._file.closed):
                self.confirmed = True
                self._write_header()

    def _write_record(self, index: int, digest: bytes, length: int) -> None:
        if self._journal is not None:
            at = self._records_at + index * _RECORD.size
            os.pwrite(self._journal.fileno(), _RECORD.pack(digest, length), at)

    def _write_header(self, sidecar: bytes = b"") -> None:
        if self._journal is not None:
            header = _HEADER.pack(_MAGIC, self._records_at, self.confirmed)
            os.pwrite(self._journal.fileno(), header + sidecar, 0)

    @property
    def digests(self) -> list[bytes]:
        """The digests of the blocks from the start to the first gap."""
        return [self._digests[index][0] for index in takewhile(self._digests.__contains__, count())]

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Yield the byte ranges (start, stop) that are not on disk. The size must be known."""
        total = self.metadata.info.size
        assert total is not None
        blocks = range(-(-total // BLOCK))
        for on_disk, run in groupby(blocks, self._digests.__contains__):
            if not on_disk:
                absent = list(run)
                yield absent[0] * BLOCK, min((absent[-1] + 1) * BLOCK, total)

    def handle(self) -> io.FileIO:
        """Return another descriptor of the data file, which shares the flock until it is closed."""
        return files.dup_exclusive(self._file)

    def seal(self, metadata: Metadata, modes: files.Modes, *, sync: bool) -> None:
        """Write the sidecar, remove the journal and make the data read-only, as in an entry."""
        try:
            files.write_new(f"{self.path}/{META}", metadata.encode(), modes.file, sync=sync)
            if self._journal is not None:
                os.unlink(f"{self.path}/{JOURNAL}")  # noqa: PTH108 - no Path per shard
            if self.user_mode is None:
                os.fchmod(self.fd, modes.published)
            if sync:
                os.fsync(self.fd)
                files.sync_directory(self.path)
        except FileNotFoundError as exn:
            raise LostError(f"{self.path.name} was taken over by another process") from exn
        self.metadata = metadata

    def close(self) -> None:
        """Close the files. The data stays on disk, so that the download can be resumed."""
        with self._guard:
            self._file.close()
            if self._journal is not None:
                self._journal.close()

    def discard(self) -> None:
        """Close and remove the partial. Does nothing in a forked child, whose file is closed."""
        if not self._file.closed:
            remove_directory(self.path, self.data.name)
            if self.user_mode is not None:
                os.fchmod(self.fd, self.user_mode)
            self.close()


def _link(path: Path, data: Path, modes: files.Modes) -> int | None:
    """Make ``data`` a hard link to a file, and return the mode of that; None if it is impossible.

    The file loses its write permissions, because a write to it would change the entry. A file is
    not linked if another user owns it, or a process has it open for writing.
    """
    with contextlib.ExitStack() as stack, ignoring(OSError):  # such as another filesystem
        os.link(path, data)
        stack.callback(data.unlink)
        with files.open_file(data) as file:
            status = os.fstat(file.fileno())
            is_ours = status.st_uid == os.geteuid() and modes.group in (None, status.st_gid)
            if is_ours:
                mode = stat.S_IMODE(status.st_mode)
                stack.callback(data.chmod, mode)
                data.chmod(mode & ~0o222 | modes.published)
                fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO would end this process
                fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # fails if a process may write
                stack.pop_all()
                return mode
    return None


# -- the directory `Layout.partials` ------------------------------------------------------------


class InFlight(NamedTuple):
    """A directory in `Layout.partials`: a partial, or a hidden entry that is being removed."""

    path: Path
    key: str  #: the key of the shard; empty for a hidden entry
    version: str  #: the version of the object; empty for a hidden entry
    live: bool  #: whether a process holds the lock of the data file
    occupied: int  #: bytes of data on disk
    size: int | None  #: bytes of the complete shard; None if the origin did not state them

    @property
    def reserved(self) -> int:
        """Bytes of data that the directory will occupy, as far as is known."""
        if self.live and not self.key:
            return 0  # a process is removing it
        return max(self.occupied, (self.live and self.size) or 0)


def in_flight(layout: Layout) -> Iterator[InFlight]:
    """Yield the partials and hidden entries of a namespace, without changing them."""
    seen = set[str]()
    # List until no name is new, because another process may claim a partial, which renames it.
    while new := [name for name in files.list_names(layout.partials) if name not in seen]:
        seen.update(new)
        for name in new:
            parsed, path = parse_partial_name(name), layout.partials / name
            if not (parsed or is_hidden_name(name)) or not files.is_directory(path):
                continue
            try:
                # A shared lock detects a writer, and no other process mistakes it for one. Only an
                # exclusive lock detects the readers of a hidden entry.
                with data_locked_if_free(path, layout.grace, shared=parsed is not None) as free:
                    occupied = 0
                    if (data := data_file(path)) is not None:
                        with contextlib.suppress(FileNotFoundError):
                            status = os.lstat(data)
                            occupied = min(status.st_blocks * 512, status.st_size)
            except PermissionError:  # the directory belongs to another user
                continue
            key, version, size = parsed or ("", "", None)
            yield InFlight(path, key, version, not free, occupied, size)
