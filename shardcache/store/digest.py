"""Digests of shards: our own tree digest, and the checksums that origins state.

The tree digest of a shard is xxh3-128 over the xxh3-128 digests of its 1 MiB blocks. Any thread
can hash blocks in any order while they are in the processor's cache, a resumed fetch can prove
the blocks it finds, and damage can be located; a digest of the whole stream allows none of these.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from xxhash import xxh3_128, xxh3_128_digest

from shardcache.errors import IntegrityError
from shardcache.origins.base import Checksum

#: Bytes of a block, and of the one buffer each connection needs. 1 MiB per read is where larger
#: reads stop paying (smaller chunks cost 20-30 %), and a killed fetch loses at most one block per
#: connection.
BLOCK = 1 << 20

#: Bytes of each CRC.
_CRCS = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
_HASHES = ("sha256", "sha1")


def block_digest(block: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of one block, 16 bytes."""
    digest: bytes = xxh3_128_digest(block)
    return digest


def tree_digest(blocks: Iterable[bytes]) -> str:
    """The digest of a shard from the digests of its blocks in order, as hex."""
    text: str = xxh3_128(b"".join(blocks)).hexdigest()
    return text


def read_blocks(fd: int) -> Iterator[memoryview]:
    """The blocks of an open file from its start; each view is valid until the next."""
    buffer = memoryview(bytearray(BLOCK))
    offset = filled = 0
    while count := os.preadv(fd, [buffer[filled:]], offset + filled):
        filled += count  # a read may be short anywhere
        if filled == BLOCK:
            yield buffer
            offset, filled = offset + BLOCK, 0
    if filled:
        yield buffer[:filled]


def file_digest(fd: int) -> str:
    """The tree digest of an open file."""
    return tree_digest(block_digest(block) for block in read_blocks(fd))


@cache
def _crc(algorithm: str) -> Callable[[memoryview, int], int] | None:
    """What continues a CRC over more bytes, if it is installed."""
    try:
        from awscrt import checksums
    except ImportError:
        return zlib.crc32 if algorithm == "crc32" else None
    found: Callable[[memoryview, int], int] | None = getattr(checksums, algorithm, None)
    return found


def can_check(checksum: Checksum | None) -> bool:
    """Whether this installation can compute ``checksum``.

    CRC32 and SHA always; CRC32C and CRC64NVME with the ``checksums`` extra. Composite checksums
    of multipart uploads (``...-3``) are digests of digests and say nothing that a reader of the
    bytes can check.
    """
    if checksum is None or "-" in checksum.value:
        return False
    algorithm = checksum.algorithm
    return algorithm in _HASHES or (algorithm in _CRCS and _crc(algorithm) is not None)


def file_checksum(fd: int, algorithm: str) -> str:
    """An origin's kind of checksum over an open file, in base64."""
    if algorithm in _HASHES:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for block in read_blocks(fd):
            digest.update(block)
        return base64.b64encode(digest.digest()).decode()
    function, value = _crc(algorithm), 0
    assert function is not None
    for block in read_blocks(fd):
        value = function(block, value)
    return base64.b64encode(value.to_bytes(_CRCS[algorithm], "big")).decode()


class MismatchError(Exception):
    """The bytes do not have the checksum that the origin states."""

    def __init__(self, checksum: Checksum, found: str) -> None:
        super().__init__(checksum.algorithm)
        self.checksum = checksum
        self.found = found


def compare(fd: int, checksum: Checksum | None) -> str | None:
    """Compare a complete file with what its origin states of it, or raise MismatchError.

    It is read back: the file was just written, so that comes from memory.

    Returns:
        The algorithm; None if there is nothing to compare with.
    """
    if checksum is None or not can_check(checksum):
        return None
    found = file_checksum(fd, checksum.algorithm)
    if found != checksum.value:
        raise MismatchError(checksum, found)
    return checksum.algorithm


def is_whole_archive(fd: int) -> bool:
    """Whether a file is a tar archive, compressed or not, that ends with its end marker.

    Reads the whole file: nothing else shows that the end of a connection was not a cut.
    """
    import lzma
    import tarfile
    import zlib

    try:
        with open(fd, "rb", closefd=False) as file, tarfile.open(fileobj=file) as archive:
            while archive.next() is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # bounds the memory
            inner = archive.fileobj
            assert inner is not None
            inner.seek(archive.offset)
            marked = inner.read(2 * tarfile.BLOCKSIZE) == bytes(2 * tarfile.BLOCKSIZE)
            while inner.read(BLOCK):  # a compressed file ends with a checksum
                pass
            return marked
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError):
        return False


#: First bytes of what tarfile's "r|*" opens.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"(\xb5/\xfd")
_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


def check_archive(fd: int, basename: str, url: str) -> None:
    """Refuse (IntegrityError) a file named like a tar archive that does not begin like one."""
    if not basename.lower().endswith(_SUFFIXES):
        return
    import tarfile  # here: `import shardcache` stays light

    head = os.pread(fd, tarfile.BLOCKSIZE, 0)
    if head.startswith(_COMPRESSED) or head in (b"", bytes(tarfile.BLOCKSIZE)):
        return  # the last two are archives without members
    try:
        tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as exn:
        raise IntegrityError(
            f"{url} is no tar archive: it begins with {head[:24]!r}. "
            "Look at the object; an error page may have been uploaded or served in its place.",
            url=url,
        ) from exn
