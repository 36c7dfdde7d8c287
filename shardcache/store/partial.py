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

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from shardcache.files import disown, dup_owned, open_owned, sync_directory
from shardcache.layout import META, PROGRESS, Layout, is_directory, replace_file
from shardcache.modes import PRIVATE, Modes
from shardcache.names import parse_partial_name
from shardcache.store.datalocks import create_locked, is_ours_alone, open_locked
from shardcache.store.digest import BLOCK, block_digest
from shardcache.store.growing import read_sidecar
from shardcache.store.metadata import DamagedError, Metadata
from shardcache.store.progressfile import (
    Progress,
    read_header,
    read_progress,
    read_records,
    write_record,
)

__all__ = ["LostError", "Partial", "Progress", "read_progress"]

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
        self,
        path: Path,
        name: str,
        metadata: Metadata,
        fd: int,
        progress_fd: int,
        modes: Modes = PRIVATE,
    ):
        self.path = path
        self._modes = modes
        self.data = path / name
        self.metadata = metadata
        self.fd = fd
        self._progress_fd = progress_fd
        self._digests: dict[int, tuple[bytes, int]] = {}
        self._written = 0
        self._contiguous = 0  # blocks
        self._guard = threading.Lock()
        self._total = metadata.info.size
        self.confirmed = True
        self._pid = os.getpid()

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
                fd = create_locked(path / basename, layout)
                if fd is None:  # a sweeper is looking at it right now
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                return cls._begin(path, basename, metadata, fd, layout.modes)
            except FileNotFoundError:
                continue  # swept between two of our calls
            except BaseException:
                shutil.rmtree(path, ignore_errors=True)
                raise
        raise LostError(f"{layout.partial} is being emptied faster than it can be filled")

    @classmethod
    def _begin(
        cls, path: Path, basename: str, metadata: Metadata, fd: int, modes: Modes
    ) -> Partial:
        try:
            replace_file(path / META, metadata.encode(), modes.file, via=path.parent)
            progress_fd = open_owned(path / PROGRESS, _MAKE, modes)
        except BaseException:
            disown(fd)
            raise
        partial = cls(path, basename, metadata, fd, progress_fd, modes)
        try:
            partial._write_header()
        except BaseException:
            partial.close()
            raise
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
        progress_fd = -1
        mine = layout.new_partial(*parsed)
        fd = None
        try:
            fd = open_locked(path / basename, layout.grace)
            if fd is None:
                return None
            path.rename(mine)  # the claim: of two, one finds the old name gone
            metadata = read_sidecar(mine, parsed)
            if metadata.info.size is None:
                raise DamagedError("its size is unknown, so it cannot be resumed")
            progress_fd = open_owned(mine / PROGRESS, os.O_RDWR)
            if not is_ours_alone(progress_fd):
                raise DamagedError("its progress file is also somewhere else")
            partial = cls(mine, basename, metadata, fd, progress_fd, layout.modes)
            partial._prove()
        except BaseException as exn:
            _drop(fd, progress_fd)
            gone = isinstance(exn, OSError) and exn.errno in _NOT_RESUMABLE
            if not (gone or isinstance(exn, DamagedError)):
                raise
            shutil.rmtree(mine, ignore_errors=True)
            return None
        return partial

    def _prove(self) -> None:
        """Believe just those recorded blocks whose bytes have the recorded digest."""
        header = read_header(self._progress_fd)
        if header.total is None or header.total != self._total:
            raise DamagedError("its progress file describes another object")
        self.confirmed = False
        buffer = memoryview(bytearray(BLOCK))
        for index, digest, length in read_records(self._progress_fd, header.total):
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
            if self._progress_fd < 0:
                return  # the fetch was called off; its last workers do not matter
            write_record(self._progress_fd, index, digest, length)
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
            if self._progress_fd >= 0 and self._contiguous == 0:
                self._write_header(early=count)

    def restart(self) -> None:
        """Forget everything that was written.

        Raises:
            OSError: the disk fails.
        """
        with self._guard:
            self._digests.clear()
            self._written = self._contiguous = 0
            if self._progress_fd >= 0:
                os.ftruncate(self._progress_fd, 0)
                os.ftruncate(self.fd, 0)
                self._write_header()

    def _advance(self) -> None:
        while self._contiguous in self._digests:
            self._contiguous += 1

    def _write_header(self, early: int = 0) -> None:
        # Who follows is given nothing of a version that may have been replaced since.
        shown = max(self.watermark, early) if self.confirmed else 0
        Progress(self._total, shown, self._written).write(self._progress_fd)

    def confirm(self) -> None:
        """Say that the origin still has this version: what was resumed may be read.

        Raises:
            OSError: the disk fails.
        """
        if not self.confirmed:
            with self._guard:
                self.confirmed = True
                if self._progress_fd >= 0:
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

    def read_block(self, index: int, buffer: memoryview) -> None:
        """Read a block back.

        Raises:
            OSError: the disk fails, or the block is not whole.
        """
        got = os.preadv(self.fd, [buffer], index * BLOCK)
        if got != len(buffer):
            raise OSError(errno.EIO, f"block {index} has {got} bytes, not {len(buffer)}")

    def set_total(self, total: int) -> None:
        """State the size, where the origin told it only by ending."""
        with self._guard:
            if self._progress_fd < 0:
                return
            self._total = total
            self._write_header()

    def handle(self) -> int:
        """Another descriptor of the data file for a worker, to be given to `locks.disown`.

        It shares the writer's flock: the partial counts as live until the last
        worker has let go, and a descriptor can never be reused under a worker.
        """
        return dup_owned(self.fd)

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
        """Let go; what is there stays for the next one to resume. In a forked child, nothing."""
        if self._pid != os.getpid():
            return
        with self._guard:
            fd, self.fd = self.fd, -1
            progress_fd, self._progress_fd = self._progress_fd, -1
        _drop(fd, progress_fd)

    def discard(self) -> None:
        """Remove it, then let go. In a forked child, nothing: it is the parent's."""
        if self.fd >= 0 and self._pid == os.getpid():
            shutil.rmtree(self.path, ignore_errors=True)
            self.close()


def _drop(*fds: int | None) -> None:
    for fd in fds:
        if fd is not None and fd >= 0:
            disown(fd)
