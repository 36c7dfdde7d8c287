"""A partial from outside: how far it is, and the bytes that may be read by now.

What may be read is behind the watermark and does not include the last block, which
is withheld until the shard was checked and published. Safe with any writer: a header
of the progress file is written at once, and bytes behind the watermark stay as they are.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from shardcache.files import open_file
from shardcache.layout import META, PROGRESS, read_file
from shardcache.names import parse_partial_name
from shardcache.store.digest import BLOCK
from shardcache.store.metadata import MAX_BYTES, DamagedError, Metadata
from shardcache.store.progressfile import read_header

__all__ = ["Growing", "is_same", "read_sidecar", "same_bytes"]


def read_sidecar(path: Path, expected: tuple[str, str]) -> Metadata:
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
        self.info = read_sidecar(path, parsed).info
        self.data = open_file(path / basename, io.FileIO)
        try:
            self._progress = open_file(path / PROGRESS, io.FileIO)
        except BaseException:  # it is being published: its progress file went first
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
