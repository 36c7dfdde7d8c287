"""Digests: the tree digest, and the checksums that origins state."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import zlib
from pathlib import Path

import pytest

from shardcache.origins.base import Checksum
from shardcache.store import digest as digests
from shardcache.store.digest import (
    BLOCK,
    Comparison,
    MismatchError,
    block_digest,
    can_check,
    file_checksum,
    file_digest,
    tree_digest,
)
from tests.support.storetools import payload

CRCS = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
#: The check values of the catalogue of parametrised CRC algorithms: CRC-32/ISO-HDLC,
#: CRC-32/ISCSI, CRC-64/NVME over "123456789".
CHECK = {"crc32": 0xCBF43926, "crc32c": 0xE3069283, "crc64nvme": 0xAE8B14860A799888}


def whole(algorithm: str, data: bytes) -> int:
    """The CRC by the library that is trusted, in one go."""
    if algorithm == "crc32":
        return zlib.crc32(data)
    from awscrt import checksums

    return getattr(checksums, algorithm)(data)


def encoded(algorithm: str, value: int) -> str:
    return base64.b64encode(value.to_bytes(CRCS[algorithm], "big")).decode()


def opened(path: Path, data: bytes) -> int:
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize("algorithm", CRCS)
def test_crcs_have_the_published_check_values(tmp_path: Path, algorithm: str) -> None:
    fd = opened(tmp_path / "data", b"123456789")
    assert file_checksum(fd, algorithm) == encoded(algorithm, CHECK[algorithm])
    os.close(fd)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("size", [0, 5, BLOCK, 3 * BLOCK + 77])
@pytest.mark.parametrize("algorithm", [*CRCS, "sha256"])
def test_a_shard_is_compared_with_what_its_origin_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, size: int, joins: bool
) -> None:
    if not joins:
        real = digests._crc_functions
        monkeypatch.setattr(digests, "_crc_functions", lambda algorithm: (real(algorithm)[0], None))
    data = payload(size)
    fd = opened(tmp_path / "data", data)
    stated = Checksum(algorithm, file_checksum(fd, algorithm))
    comparison = Comparison()
    for index in range(-(-size // BLOCK)):  # the first comes before the answer
        comparison.add(index, memoryview(data)[index * BLOCK : (index + 1) * BLOCK])
        comparison.stated = stated
    assert comparison.compare(fd, size, stated) == algorithm
    comparison.stated = Checksum(algorithm, stated.value[::-1] + "=")
    with pytest.raises(MismatchError):
        comparison.compare(fd, size, None)
    if size:
        os.truncate(tmp_path / "data", size - 1)
        comparison = Comparison()
        with pytest.raises((OSError, MismatchError)):
            comparison.compare(fd, size, stated)
    assert Comparison().compare(fd, size, Checksum("md5", "x")) is None
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
def test_checksums_of_files_are_those_of_their_bytes(tmp_path: Path, size: int) -> None:
    data = payload(size)
    fd = opened(tmp_path / "data", data)
    try:
        for algorithm in CRCS:
            assert file_checksum(fd, algorithm) == encoded(algorithm, whole(algorithm, data))
        for name in ("sha256", "sha1"):
            expected = base64.b64encode(hashlib.new(name, data).digest()).decode()
            assert file_checksum(fd, name) == expected
        blocks = [data[i : i + BLOCK] for i in range(0, size, BLOCK)]
        assert file_digest(fd) == tree_digest(block_digest(b) for b in blocks)
        assert len(file_digest(fd)) == 32
    finally:
        os.close(fd)


def test_short_reads_do_not_change_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = payload(BLOCK + 1000)
    fd = opened(tmp_path / "data", data)
    expected = file_digest(fd)
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:70_001]], offset)
    )
    try:
        assert file_digest(fd) == expected
        assert file_checksum(fd, "crc32") == encoded("crc32", zlib.crc32(data))
    finally:
        os.close(fd)


def test_only_whole_object_checksums_can_be_checked() -> None:
    value = encoded("crc32", 1)
    assert not can_check(None)
    assert not can_check(Checksum("crc32", f"{value}-3"))
    assert not can_check(Checksum("md5", value))
    for algorithm in (*CRCS, "sha1", "sha256"):
        assert can_check(Checksum(algorithm, value))


def test_without_the_extra_only_crc32_and_sha_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt", None)
    digests._crc_functions.cache_clear()
    try:
        assert can_check(Checksum("crc32", "AAAAAA=="))
        assert can_check(Checksum("sha256", "AAAAAA=="))
        assert not can_check(Checksum("crc32c", "AAAAAA=="))
        assert not can_check(Checksum("crc64nvme", "AAAAAA=="))
    finally:
        digests._crc_functions.cache_clear()
