"""The progress file of a partial: which blocks of its data are on disk.

    header, 64 bytes:  "SHCPROG1", block size, total size, watermark, bytes written
    per block, 24:     xxh3-128 digest, length

All integers are unsigned 64-bit little-endian; a length of 0 says "not there".
The watermark is the length of the contiguous prefix that is on disk. A reader
of a header that is being rewritten sees the old one or the new one: it is one
write of less than a page.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardcache.layout import PROGRESS, read_file
from shardcache.store.digest import BLOCK
from shardcache.store.metadata import DamagedError

__all__ = [
    "Progress",
    "parse_header",
    "read_header",
    "read_progress",
    "read_records",
    "write_record",
]

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


def write_record(fd: int, index: int, digest: bytes, length: int) -> None:
    """Record that block ``index`` is on disk.

    Raises:
        OSError: the disk fails.
    """
    os.pwrite(fd, _RECORD.pack(digest, length), _record_at(index))


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
