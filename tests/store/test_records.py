"""What is believed of a shard: sidecars, digests, checksums of origins, the look of an archive."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import lzma
import os
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import IntegrityError
from shardcache.origins.base import Checksum, ObjectInfo
from shardcache.store import digest as digests
from shardcache.store.digest import (
    BLOCK,
    MismatchError,
    block_digest,
    can_check,
    check_archive,
    compare,
    file_checksum,
    file_digest,
    tree_digest,
)
from shardcache.store.entry import DamagedError, Metadata
from tests.support.storetools import metadata_for, payload
from tests.support.tars import make_tar, tar_of

# -- sidecars ------------------------------------------------------------------

texts = st.text(max_size=30)
maybe = st.none() | texts
sizes = st.integers(0, 2**64 - 1)
infos = st.builds(
    ObjectInfo,
    size=st.none() | sizes,
    etag=maybe,
    version_id=maybe,
    modified=maybe,
    checksum=st.none() | st.builds(Checksum, texts, texts),
)
sidecars = st.builds(
    Metadata,
    url=texts,
    key=texts,
    info=infos,
    size=sizes,
    digest=texts,
    checked=maybe,
    fetched_at=st.integers(0, 4_000_000_000_000).map(lambda ms: ms / 1000),
    boot=texts,
    library=texts,
)


@given(sidecars)
def test_a_sidecar_says_what_was_written_into_it(written: Metadata) -> None:
    found = Metadata.decode(written.encode())
    assert found == replace(written, fetched_at=found.fetched_at)
    assert abs(found.fetched_at - written.fetched_at) <= 0.001
    assert found.info.version == written.info.version


@given(st.data())
def test_a_sidecar_with_bytes_changed_is_damage_or_says_something_valid(data) -> None:
    raw = bytearray(metadata_for(data=b"abc").encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        found = Metadata.decode(bytes(raw))
    except DamagedError:
        return
    assert Metadata.decode(found.encode()) == found
    assert isinstance(found.info.version, str)


def test_versions_tell_objects_apart() -> None:
    one = ObjectInfo(1, '"a"')
    others = [
        ObjectInfo(2, '"a"'),
        ObjectInfo(1, '"b"'),
        ObjectInfo(1, '"a"', version_id="v1"),
        ObjectInfo(1, '"a"', version_id="v2"),
        ObjectInfo(1, None, modified="monday"),
        ObjectInfo(1, None, modified="tuesday"),
        ObjectInfo(1, "monday"),
    ]
    assert len({info.version for info in (one, *others)}) == 8
    # Neither a null version, nor the time beside an ETag, makes another version.
    assert ObjectInfo(1, '"a"', version_id="null").version == one.version
    assert ObjectInfo(1, '"a"', modified="x").version == one.version


# -- digests and checksums -----------------------------------------------------

#: Bytes, and the check value over "123456789" in the catalogue of parametrised CRC algorithms:
#: CRC-32/ISO-HDLC, CRC-32/ISCSI, CRC-64/NVME.
CRCS = {"crc32": (4, 0xCBF43926), "crc32c": (4, 0xE3069283), "crc64nvme": (8, 0xAE8B14860A799888)}


@contextmanager
def opened(path: Path, data: bytes) -> Iterator[int]:
    (path / "data").write_bytes(data)
    with open(path / "data", "rb") as file:
        yield file.fileno()


@pytest.mark.parametrize("algorithm", CRCS)
def test_crcs_have_the_published_check_values(tmp_path: Path, algorithm: str) -> None:
    size, value = CRCS[algorithm]
    with opened(tmp_path, b"123456789") as fd:
        published = base64.b64encode(value.to_bytes(size, "big")).decode()
        assert file_checksum(fd, algorithm) == published


@pytest.mark.parametrize("size", [0, 5, 3 * BLOCK + 77])
@pytest.mark.parametrize("algorithm", [*CRCS, "sha256"])
def test_a_shard_is_compared_with_what_its_origin_states(
    tmp_path: Path, algorithm: str, size: int
) -> None:
    with opened(tmp_path, payload(size)) as fd:
        stated = Checksum(algorithm, file_checksum(fd, algorithm))
        assert compare(fd, stated) == algorithm
        with pytest.raises(MismatchError):
            compare(fd, Checksum(algorithm, stated.value[::-1] + "="))
        if size:
            os.truncate(tmp_path / "data", size - 1)
            with pytest.raises(MismatchError):
                compare(fd, stated)
        assert compare(fd, Checksum("md5", "x")) is None


@pytest.mark.parametrize("size", [0, 1, BLOCK, 3 * BLOCK + 77])
def test_digests_of_files_are_those_of_their_bytes_however_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    data, real = payload(size), os.preadv
    few = lambda fd, buffers, offset: real(fd, [buffers[0][:70_001]], offset)  # noqa: E731
    monkeypatch.setattr(os, "preadv", few)
    with opened(tmp_path, data) as fd:
        expected = base64.b64encode(hashlib.sha256(data).digest()).decode()
        assert file_checksum(fd, "sha256") == expected
        blocks = [data[i : i + BLOCK] for i in range(0, size, BLOCK)]
        assert file_digest(fd) == tree_digest(block_digest(b) for b in blocks)


def test_only_whole_object_checksums_are_checked_and_more_kinds_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for unknown in (None, Checksum("crc32", "AAAAAQ==-3"), Checksum("md5", "AAAAAQ==")):
        assert not can_check(unknown)
    for algorithm in (*CRCS, "sha1", "sha256"):
        assert can_check(Checksum(algorithm, "AAAAAQ=="))
    monkeypatch.setitem(sys.modules, "awscrt", None)
    digests._crc.cache_clear()
    try:
        found = {a for a in (*CRCS, "sha256") if can_check(Checksum(a, "AAAAAQ=="))}
        assert found == {"crc32", "sha256"}
    finally:
        digests._crc.cache_clear()


# -- archives ------------------------------------------------------------------

URL = "s3://lab/train-0000.tar"
PAGE = b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>" + b" " * 600


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["a.txt", "dir/" * 20 + "x" * 90 + ".txt", "\u00e9\u4e2d.txt"])
def test_archives_of_every_style_pass(tmp_path: Path, style: int, name: str) -> None:
    with opened(tmp_path, tar_of([(name, b"abc")], style)) as fd:
        check_archive(fd, "train.tar", URL)


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_archives_and_files_of_other_names_pass(tmp_path: Path, compress) -> None:
    for names, data in (
        (("a.tar", "a.tgz", "a.TAR.XZ"), compress(make_tar(1))),
        (("a.bin", "tar", "a.tar.idx"), PAGE),
    ):
        with opened(tmp_path, data) as fd:
            for name in names:
                check_archive(fd, name, URL)


@pytest.mark.parametrize(
    "data", [PAGE, b'{"error": "expired"}', bytes(100), make_tar(1)[512:], bytes(511) + b"x"]
)
def test_what_is_no_archive_is_refused_and_shown(tmp_path: Path, data: bytes) -> None:
    with opened(tmp_path, data) as fd, pytest.raises(IntegrityError, match="no tar arch") as caught:
        check_archive(fd, "a.tar.gz", URL)
    assert URL in str(caught.value) and len(str(caught.value)) < 400
