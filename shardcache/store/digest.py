"""Digests of shards: the tree digest of shardcache, and the checksums that origins state."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial

from xxhash import xxh3_128, xxh3_128_digest, xxh3_128_hexdigest

from shardcache.origins.base import Checksum, ObjectInfo

#: Bytes of a block, and of the one buffer that each connection needs. Larger reads are no faster,
#: and smaller ones are slower. A killed download loses at most a block per connection.
BLOCK = 1 << 20

#: Length of each kind of CRC in bytes.
_CRCS = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
_HASHES = ("sha256", "sha1")
#: MiB of a part of an upload: boto3 and aws take 8, rclone 5, s3cmd 15, mc 16, s5cmd 50.
_UPLOAD_PARTS = (5, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 250, 256, 512, 1024)

block_digest = xxh3_128_digest  #: computes the digest of a block: 16 bytes
tree_digest = xxh3_128_hexdigest  #: computes a shard's digest, in hex, from those of its blocks


class TreeDigest:
    """Computes the tree digest of a shard whose bytes arrive in order."""

    def __init__(self) -> None:
        self.length = 0  #: bytes so far
        self._digests: list[bytes] = []
        self._block = xxh3_128()

    def update(self, data: memoryview) -> None:
        # Wrong until the end, in case a signal handler raises.
        length, self.length = self.length, -1
        while part := data[: BLOCK - length % BLOCK]:
            self._block.update(part)
            length += len(part)
            if length % BLOCK == 0:
                self._digests.append(self._block.digest())
                self._block.reset()
            data = data[len(part) :]
        self.length = length

    def value(self) -> str:
        """Return the digest, in hex."""
        last = [self._block.digest()] if self.length % BLOCK else []
        return tree_digest(b"".join(self._digests + last))


def read_blocks(fd: int) -> Iterator[memoryview]:
    """Yield the blocks of an open file. Each view is valid only until the next one is yielded."""
    buffer = memoryview(bytearray(BLOCK))
    offset = filled = 0
    while count := os.preadv(fd, [buffer[filled:]], offset + filled):
        filled += count  # any read may be short
        if filled == BLOCK:
            yield buffer
            offset, filled = offset + BLOCK, 0
    if filled:
        yield buffer[:filled]


def file_digest(fd: int, check: Callable[[], None] = lambda: None) -> str:
    """Return the tree digest of an open file. ``check`` is called before each block."""
    digests = []
    for block in read_blocks(fd):
        check()
        digests.append(block_digest(block))
    return tree_digest(b"".join(digests))


@cache
def _crc(algorithm: str) -> Callable[[memoryview, int], int] | None:
    """Return the function that continues a CRC over more bytes; None if none is installed."""
    try:
        from awscrt import checksums
    except ImportError:
        return zlib.crc32 if algorithm == "crc32" else None
    function: Callable[[memoryview, int], int] | None = getattr(checksums, algorithm, None)
    return function


class MismatchError(Exception):
    """A file does not have the checksum that its origin states."""

    def __init__(self, checksum: Checksum, found: str) -> None:
        super().__init__(checksum.algorithm)
        self.checksum = checksum
        self.found = found


def compare(fd: int, checksum: Checksum) -> str | None:
    """Compare a complete file with the checksum that its origin states; return the algorithm.

    Returns None if the checksum cannot be compared. Raises MismatchError.
    """
    algorithm, crc = checksum.algorithm, 0
    if "-" in checksum.value:  # a checksum of the checksums of parts
        return None
    if algorithm in _HASHES:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for block in read_blocks(fd):
            digest.update(block)
        found = digest.digest()
    elif algorithm in _CRCS and (function := _crc(algorithm)):
        for block in read_blocks(fd):
            crc = function(block, crc)
        found = crc.to_bytes(_CRCS[algorithm], "big")
    else:  # some need the extra `checksums`
        return None
    if (text := base64.b64encode(found).decode()) != checksum.value:
        raise MismatchError(checksum, text)
    return algorithm


def identify(fd: int, info: ObjectInfo) -> str | None:
    """Return the algorithm that shows that a file is the object, or None if none does.

    S3 makes an ETag of the MD5 of the object, or of the MD5s of its parts, unless KMS encrypts it.
    """
    if os.fstat(fd).st_size != info.size:
        return None
    with contextlib.suppress(MismatchError):
        if info.checksum and (algorithm := compare(fd, info.checksum)):
            return algorithm
        etag, blocks = (info.etag or "").strip('"'), -(-(info.size or 0) // BLOCK)
        _, is_multipart, count = etag.partition("-")
        parts = {min(part, blocks) for part in _UPLOAD_PARTS if count == str(-(-blocks // part))}
        if any(_etag(fd, part) == etag for part in (parts if is_multipart else [0])):
            return "md5"
    return None


def _etag(fd: int, part: int) -> str:
    """Return the ETag of a file that was uploaded in parts of ``part`` blocks, or whole (0)."""
    md5 = partial(hashlib.md5, usedforsecurity=False)
    parts = [md5()]
    for number, block in enumerate(read_blocks(fd)):
        if part and number and number % part == 0:
            parts.append(md5())
        parts[-1].update(block)
    if not part:
        return parts[0].hexdigest()
    return f"{md5(b''.join(part_md5.digest() for part_md5 in parts)).hexdigest()}-{len(parts)}"
