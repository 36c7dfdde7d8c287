"""The files that a stream reads while its shard is fetched, one after the other.

    partial of the fetch ---- given up, or taken over ----> partial of the next ----> entry

Bytes of two versions never meet in one stream, and another file of the same version is
read on only if what was given of the old one is the same in it. What is given stays
readable until that was compared: its file is kept open. For one thread.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from pathlib import Path

from shardcache.errors import IntegrityError, TransferError
from shardcache.origins.base import ObjectInfo
from shardcache.store.digest import check_archive
from shardcache.store.entry import DamagedError
from shardcache.store.partial import Growing, is_same, same_bytes
from shardcache.urls import ShardURL

__all__ = ["Trail"]

logger = logging.getLogger(__name__)


class Trail:
    """See the module.

    Args:
        shard: which.

    Attributes:
        given: the end of what was read; kept by the stream.
        limit: the end of what may be read.
        info: the version that was read, or None.
    """

    def __init__(self, shard: ShardURL) -> None:
        self.given = 0
        self.limit = 0
        self.info: ObjectInfo | None = None
        self._shard = shard
        self._source: Growing | None = None
        self._before: io.FileIO | None = None  # read until now; the new source is unproven
        self._useless: Path | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a partial."""
        return self._source is not None

    @property
    def sealed(self) -> bool:
        """Whether the partial is being published, or was removed."""
        return self._source is not None and self._source.sealed

    @property
    def size(self) -> int | None:
        """Bytes of the shard, if known."""
        return None if self._source is None else self._source.info.size

    def follow(self, path: Path) -> None:
        """From now on the shard grows there.

        Raises:
            TransferError: it is another version than what was given.
            OSError: the disk fails.
        """
        if path == self._useless or (self._source is not None and path == self._source.path):
            return
        try:
            source = Growing(path, self._shard.basename)
        except (DamagedError, FileNotFoundError) as exn:
            logger.debug("%s: %s cannot be followed: %s", self._shard, path.name, exn)
            if isinstance(exn, DamagedError):
                self._useless = path
            return
        if self.given and self.info is not None and source.info.version != self.info.version:
            source.close()
            raise self._replaced()
        old, self._source = self._source, source
        self.limit = 0
        if old is None:
            return
        old.close(data=False)
        given_from = self._before or old.data
        if self._before is not None:
            old.data.close()  # it was never proven
        if self.given and not is_same(given_from, source.data):
            self._before = given_from
        else:  # taken over under another name
            given_from.close()
            self._before = None

    def grown(self, position: int) -> bool:
        """Whether there is more to read at ``position`` than there was.

        Raises:
            IntegrityError: what was given is not what is there now, or it is no archive.
            OSError: the disk fails.
        """
        if self._source is None:
            return False
        try:
            limit = self._source.limit()
        except DamagedError:  # being begun
            return False
        if self._before is not None:
            if limit < self.given:
                return False
            self._prove(self._source.data)
        if self.limit == 0 and limit > 0:
            check_archive(self._source.data.fileno(), self._shard.basename, str(self._shard))
        grown = limit > max(self.limit, position)
        self.limit = limit
        if grown and self.info is None:
            self.info = self._source.info
        return grown

    def read(self, view: memoryview, position: int) -> int:
        """Read what is there, a byte at least.

        Raises:
            OSError: the disk fails.
        """
        assert self._source is not None
        count = os.preadv(self._source.data.fileno(), [view], position)
        if count == 0:
            raise OSError(errno.EIO, f"the partial ends at byte {position}")
        return count

    def prove_entry(self, file: io.FileIO, version: str) -> None:
        """Make sure that reading can go on in an entry.

        Args:
            file: its data.
            version: of the entry.

        Raises:
            TransferError: it is another version than what was given.
            IntegrityError: it has other bytes than what was given.
            OSError: the disk fails.
        """
        if not self.given:
            return
        assert self.info is not None and self._source is not None
        if version != self.info.version:
            raise self._replaced()
        before = self._before or self._source.data
        if not is_same(before, file):
            self._before = before
            self._prove(file)

    def _prove(self, file: io.FileIO) -> None:
        """Compare what was given with what another file of the version has in its place."""
        assert self._before is not None
        if not same_bytes(self._before, file, self.given):
            raise IntegrityError(
                f"{self._shard}: bytes that were read of it turned out damaged on their way; "
                "it was fetched again. Read it again.",
                url=str(self._shard),
            )
        self._before.close()
        self._before = None

    def _replaced(self) -> TransferError:
        return TransferError(
            f"{self._shard} was replaced while it was read; the bytes read so far are of the "
            "old version. Read the shard again.",
            url=str(self._shard),
        )

    def close(self) -> None:
        """Let go of the files."""
        source, self._source = self._source, None
        before, self._before = self._before, None
        self.limit = 0
        if source is not None:
            source.close()
        if before is not None:
            before.close()
