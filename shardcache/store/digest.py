"""Digests of shards: our own tree digest, and the checksums origins state.

The tree digest of a shard is xxh3-128 over the xxh3-128 digests of its 1 MiB
blocks. Blocks can be hashed in any order by any thread while they are in the
processor's cache, a resumed fetch can prove the blocks it finds, and damage can
be located; a digest of the whole stream allows none of these.

CRCs of blocks are joined into the CRC of the object by polynomial arithmetic,
so a stated checksum costs no second pass over the data.

All functions are pure.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache

from shardcache.errors import IntegrityError
from shardcache.origins.base import Checksum

#: Bytes of a block, and of the one buffer each connection needs. 1 MiB per read
#: is where larger reads stop paying (TRANSFER measurements: smaller chunks cost
#: 20-30 %), and a killed fetch loses at most one block per connection.
BLOCK = 1 << 20

#: Reversed polynomials and widths: ISO-HDLC, Castagnoli, and NVM Express.
_POLYNOMIALS = {
    "crc32": (0xEDB88320, 32),
    "crc32c": (0x82F63B78, 32),
    "crc64nvme": (0x9A6C9329AC4BC9B5, 64),
}
_HASHES = ("sha256", "sha1")


def block_digest(block: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of one block, 16 bytes."""
    from xxhash import xxh3_128_digest

    digest: bytes = xxh3_128_digest(block)
    return digest


def tree_digest(blocks: Iterable[bytes]) -> str:
    """The digest of a shard from the digests of its blocks in order, as hex."""
    from xxhash import xxh3_128

    tree = xxh3_128()
    for digest in blocks:
        tree.update(digest)
    text: str = tree.hexdigest()
    return text


def read_blocks(fd: int) -> Iterable[memoryview]:
    """The blocks of an open file from its start; each view is valid until the next."""
    buffer = memoryview(bytearray(BLOCK))
    offset = 0
    while True:
        filled = 0
        while filled < BLOCK:  # a short read is allowed anywhere but at the end
            count = os.preadv(fd, [buffer[filled:]], offset + filled)
            if count == 0:
                break
            filled += count
        if filled:
            yield buffer[:filled]
        if filled < BLOCK:
            return
        offset += filled


def file_digest(fd: int) -> str:
    """The tree digest of an open file.

    Raises:
        OSError: the disk cannot be read.
    """
    return tree_digest(block_digest(block) for block in read_blocks(fd))


@cache
def _crc(algorithm: str) -> Callable[[memoryview, int], int] | None:
    if algorithm == "crc32":
        return zlib.crc32
    try:
        from awscrt import checksums
    except ImportError:
        return None
    function: Callable[[memoryview, int], int] | None = getattr(checksums, algorithm, None)
    return function


def can_check(checksum: Checksum | None) -> bool:
    """Whether this installation can compute ``checksum``.

    CRC32 and SHA always; CRC32C and CRC64NVME with the ``checksums`` extra.
    Composite checksums of multipart uploads (``...-3``) are digests of digests
    and say nothing that a reader of the bytes can check.
    """
    if checksum is None or "-" in checksum.value:
        return False
    return checksum.algorithm in _HASHES or (
        checksum.algorithm in _POLYNOMIALS and _crc(checksum.algorithm) is not None
    )


def crc_function(algorithm: str) -> Callable[[memoryview], int] | None:
    """The CRC of one block for an algorithm `can_check` accepts; None for hashes."""
    if algorithm not in _POLYNOMIALS:
        return None
    function = _crc(algorithm)
    if function is None:
        return None
    return lambda block: function(block, 0)


def join_crcs(algorithm: str, crcs: Iterable[tuple[int, int]]) -> str:
    """The CRC of a whole object from (crc, length) of its pieces, in base64."""
    polynomial, width = _POLYNOMIALS[algorithm]
    total = 0
    for crc, length in crcs:
        total = _multiply(_shift(polynomial, width, length), total, polynomial, width) ^ crc
    return base64.b64encode(total.to_bytes(width // 8, "big")).decode()


def _multiply(a: int, b: int, polynomial: int, width: int) -> int:
    """a times b modulo the polynomial, bits reversed as in the CRC itself."""
    product = 0
    bit = 1 << (width - 1)
    while bit and a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ polynomial if b & 1 else b >> 1
    return product


@lru_cache(maxsize=256)  # nearly every piece has the length of a block; last ones differ
def _shift(polynomial: int, width: int, length: int) -> int:
    """x to the power of ``8 * length`` modulo the polynomial."""
    power = 1 << (width - 2)  # x itself, reversed
    result = 1 << (width - 1)  # 1, reversed
    exponent = 8 * length
    while exponent:
        if exponent & 1:
            result = _multiply(power, result, polynomial, width)
        power = _multiply(power, power, polynomial, width)
        exponent >>= 1
    return result


def file_checksum(fd: int, algorithm: str) -> str:
    """An origin's kind of checksum over an open file, in base64.

    Raises:
        OSError: the disk cannot be read.
    """
    function = crc_function(algorithm)
    if function is not None:
        return join_crcs(algorithm, ((function(b), len(b)) for b in read_blocks(fd)))
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for block in read_blocks(fd):
        digest.update(block)
    return base64.b64encode(digest.digest()).decode()


class MismatchError(Exception):
    """The bytes do not have the checksum that the origin states."""

    def __init__(self, checksum: Checksum, found: str) -> None:
        super().__init__(checksum.algorithm)
        self.checksum = checksum
        self.found = found


class Comparison:
    """Compares a shard with the checksum that its origin states of the whole object.

    Blocks arrive in any order: their CRCs are computed while they are warm, joined in the end,
    and read back where the checksum was not known yet when they came. Other algorithms hash
    the file. For the threads of one job; `compare` comes after they ended.

    Attributes:
        stated: what the origin says, once it has said it.
    """

    def __init__(self) -> None:
        self.stated: Checksum | None = None
        self._crcs: dict[int, int] = {}

    def crc(self) -> Callable[[memoryview], int] | None:
        """What to compute of each block that comes, if that is known by now."""
        if self.stated is None or not can_check(self.stated):
            return None
        return crc_function(self.stated.algorithm)

    def note(self, index: int, crc: int | None) -> None:
        """Keep what was computed of a block."""
        if crc is not None:
            self._crcs[index] = crc

    def compare(self, fd: int, size: int, other: Checksum | None) -> str | None:
        """Compare a complete shard.

        Args:
            fd: its open data file.
            size: bytes of it.
            other: what came along with the bytes, where nothing was `stated`.

        Returns:
            The algorithm; None if there is nothing to compare with.

        Raises:
            MismatchError: they differ.
            OSError: the disk fails.
        """
        checksum = self.stated or other
        if checksum is None or not can_check(checksum):
            return None
        crc = crc_function(checksum.algorithm)
        if crc is None:
            found = file_checksum(fd, checksum.algorithm)
        else:
            found = join_crcs(checksum.algorithm, self._block_crcs(fd, size, crc))
        if found != checksum.value:
            raise MismatchError(checksum, found)
        return checksum.algorithm

    def _block_crcs(
        self, fd: int, size: int, crc: Callable[[memoryview], int]
    ) -> Iterator[tuple[int, int]]:
        """(crc, length) of every block; those that came before we knew are read back."""
        buffer = memoryview(bytearray(BLOCK))
        for start in range(0, size, BLOCK):
            length = min(BLOCK, size - start)
            known = self._crcs.get(start // BLOCK)
            if known is None:
                if os.preadv(fd, [buffer[:length]], start) != length:
                    raise OSError(errno.EIO, f"block {start // BLOCK} is cut short")
                known = crc(buffer[:length])
            yield known, length


_HEADER = 512
#: First bytes of what tarfile's "r|*" opens.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"(\xb5/\xfd")
_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


def check_archive(fd: int, basename: str, url: str) -> None:
    """Refuse a file named like a tar archive that does not begin like one.

    Args:
        fd: the open file.
        basename: its name; other names than tar's are not looked at.
        url: for the error.

    Raises:
        IntegrityError: it is something else, an error page for instance.
        OSError: it cannot be read.
    """
    if not basename.lower().endswith(_SUFFIXES):
        return
    head = os.pread(fd, _HEADER, 0)
    if not head or head.startswith(_COMPRESSED) or _is_tar_header(head):
        return
    raise IntegrityError(
        f"{url} is no tar archive: it begins with {head[:24]!r}. "
        "Look at the object; an error page may have been uploaded or served in its place.",
        url=url,
    )


def _is_tar_header(head: bytes) -> bool:
    """POSIX pax: the header's own checksum, bytes 148-155 counted as blanks."""
    if len(head) < _HEADER:
        return False
    if head == bytes(_HEADER):
        return True  # an archive without members
    try:
        stated = int(head[148:156].rstrip(b"\0 ").lstrip(b" ") or b"0", 8)
    except ValueError:
        return False
    # Old writers summed signed bytes; tarfile accepts both.
    fields = head[:148] + b" " * 8 + head[156:]
    if stated == sum(fields):
        return True
    return stated == sum(byte - 256 if byte > 127 else byte for byte in fields)
