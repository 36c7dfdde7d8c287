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
    MismatchError,
    block_digest,
    can_check,
    compare,
    file_checksum,
    file_digest,
    tree_digest,
)
from tests.support.storetools import payload

CRCS = {"crc32": 4, "crc32c": 4, "crc64nvme": 8}
#: The check values of the catalogue of parametrised CRC algorithms: CRC-32/ISO-HDLC,
#: CRC-32/ISCSI, CRC-64/NVME over "123456789".
CHECK = {"crc32": 0xCBF43926, "crc32c": 0xE3069283, "crc64nvme": 0xAE8B14860A799888}


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


@pytest.mark.parametrize("size", [0, 5, 3 * BLOCK + 77])
@pytest.mark.parametrize("algorithm", [*CRCS, "sha256"])
def test_a_shard_is_compared_with_what_its_origin_states(
    tmp_path: Path, algorithm: str, size: int
) -> None:
    fd = opened(tmp_path / "data", payload(size))
    stated = Checksum(algorithm, file_checksum(fd, algorithm))
    assert compare(fd, stated) == algorithm
    with pytest.raises(MismatchError):
        compare(fd, Checksum(algorithm, stated.value[::-1] + "="))
    if size:
        os.truncate(tmp_path / "data", size - 1)
        with pytest.raises(MismatchError):
            compare(fd, stated)
    assert compare(fd, Checksum("md5", "x")) is None
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, BLOCK, 3 * BLOCK + 77])
def test_checksums_of_files_are_those_of_their_bytes_however_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    data = payload(size)
    fd = opened(tmp_path / "data", data)
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:70_001]], offset)
    )
    try:
        assert file_checksum(fd, "crc32") == encoded("crc32", zlib.crc32(data))
        expected = base64.b64encode(hashlib.sha256(data).digest()).decode()
        assert file_checksum(fd, "sha256") == expected
        blocks = [data[i : i + BLOCK] for i in range(0, size, BLOCK)]
        assert file_digest(fd) == tree_digest(block_digest(b) for b in blocks)
    finally:
        os.close(fd)


def test_only_whole_object_checksums_are_checked_and_more_kinds_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = encoded("crc32", 1)
    assert not can_check(None)
    assert not can_check(Checksum("crc32", f"{value}-3"))
    assert not can_check(Checksum("md5", value))
    for algorithm in (*CRCS, "sha1", "sha256"):
        assert can_check(Checksum(algorithm, value))
    monkeypatch.setitem(sys.modules, "awscrt", None)
    digests._crc.cache_clear()
    try:
        found = {a for a in (*CRCS, "sha256") if can_check(Checksum(a, value))}
        assert found == {"crc32", "sha256"}
    finally:
        digests._crc.cache_clear()
