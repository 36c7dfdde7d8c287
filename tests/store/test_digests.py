"""Digests: the tree digest, and the checksums that origins state."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import random
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.layout import Layout
from shardcache.origins.base import Checksum
from shardcache.store import digest as digests
from shardcache.store.digest import (
    BLOCK,
    block_digest,
    can_check,
    crc_function,
    file_checksum,
    file_digest,
    join_crcs,
    tree_digest,
)
from tests.support.storetools import begin, fill, metadata_for, payload

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
@given(data=st.binary(max_size=400), cuts=st.lists(st.integers(0, 400), max_size=6))
def test_crcs_of_any_pieces_join_into_the_crc_of_the_whole(algorithm, data, cuts) -> None:
    function = crc_function(algorithm)
    assert function is not None
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)]
    joined = join_crcs(algorithm, ((function(piece), len(piece)) for piece in pieces))
    assert joined == encoded(algorithm, whole(algorithm, data))


@pytest.mark.parametrize("algorithm", CRCS)
def test_crcs_have_the_published_check_values(algorithm: str) -> None:
    function = crc_function(algorithm)
    assert function is not None
    assert function(memoryview(b"123456789")) == CHECK[algorithm]
    pieces = [(function(memoryview(p)), len(p)) for p in (b"1234", b"", b"56789")]
    assert join_crcs(algorithm, pieces) == encoded(algorithm, CHECK[algorithm])


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


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 4 * BLOCK))
def test_the_tree_digest_does_not_depend_on_the_order_of_writing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, size: int
) -> None:
    data = payload(size, seed)
    layout = Layout(tmp_path_factory.mktemp("order") / "v1")
    layout.make()
    partial = begin(layout, metadata_for(data=data))
    order = list(range(-(-size // BLOCK)))
    random.Random(seed).shuffle(order)
    try:
        fill(partial, data, order)
        assert tree_digest(partial.digests) == file_digest(partial.fd)
        assert tree_digest(partial.digests) == metadata_for(data=data).digest
    finally:
        partial.discard()


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
    assert crc_function("sha256") is None


def test_without_the_extra_only_crc32_and_sha_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "awscrt", None)
    digests._crc.cache_clear()
    try:
        assert can_check(Checksum("crc32", "AAAAAA=="))
        assert can_check(Checksum("sha256", "AAAAAA=="))
        assert not can_check(Checksum("crc32c", "AAAAAA=="))
        assert not can_check(Checksum("crc64nvme", "AAAAAA=="))
        assert crc_function("crc64nvme") is None
    finally:
        digests._crc.cache_clear()
