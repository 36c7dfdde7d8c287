"""Comparing a shard with the checksum that its origin states of the whole object.

Blocks arrive in any order: their CRCs are computed while they are warm, joined in
the end, and read back where the checksum was not known yet when they came. Other
algorithms hash the file. For the threads of one job; `compare` comes after they ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardcache.origins.base import Checksum
from shardcache.store import digest as digests
from shardcache.store.digest import BLOCK
from shardcache.store.partial import Partial

__all__ = ["Comparison", "MismatchError"]


class MismatchError(Exception):
    """The bytes do not have the checksum that the origin states."""

    def __init__(self, checksum: Checksum, found: str) -> None:
        super().__init__(checksum.algorithm)
        self.checksum = checksum
        self.found = found


class Comparison:
    """See the module.

    Args:
        partial: the shard.

    Attributes:
        stated: what the origin says, once it has said it.
    """

    def __init__(self, partial: Partial) -> None:
        self.stated: Checksum | None = None
        self._partial = partial
        self._crcs: dict[int, int] = {}

    def crc(self) -> Callable[[memoryview], int] | None:
        """What to compute of each block that comes, if that is known by now."""
        if self.stated is None or not digests.can_check(self.stated):
            return None
        return digests.crc_function(self.stated.algorithm)

    def note(self, index: int, crc: int | None) -> None:
        """Keep what was computed of a block."""
        if crc is not None:
            self._crcs[index] = crc

    def compare(self, other: Checksum | None) -> str | None:
        """Compare a complete shard.

        Args:
            other: what came along with the bytes, where nothing was `stated`.

        Returns:
            The algorithm; None if there is nothing to compare with.

        Raises:
            MismatchError: they differ.
            OSError: the disk fails.
        """
        checksum = self.stated or other
        if checksum is None or not digests.can_check(checksum):
            return None
        crc = digests.crc_function(checksum.algorithm)
        if crc is None:
            found = digests.file_checksum(self._partial.fd, checksum.algorithm)
        else:
            found = digests.join_crcs(checksum.algorithm, self._block_crcs(crc))
        if found != checksum.value:
            raise MismatchError(checksum, found)
        return checksum.algorithm

    def _block_crcs(self, crc: Callable[[memoryview], int]) -> Iterator[tuple[int, int]]:
        """(crc, length) of every block; those that came before we knew are read back."""
        left = self._partial.watermark
        buffer: memoryview | None = None
        for index in range(-(-left // BLOCK)):
            length = min(BLOCK, left - index * BLOCK)
            known = self._crcs.get(index)
            if known is None:
                buffer = buffer or memoryview(bytearray(BLOCK))
                self._partial.read_block(index, buffer[:length])
                known = crc(buffer[:length])
            yield known, length
