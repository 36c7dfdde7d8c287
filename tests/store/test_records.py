"""What is believed of a shard: sidecars, digests, checksums of origins, the look of an archive."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import lzma
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardcache.errors import IntegrityError
from shardcache.origins.base import Checksum, ObjectInfo
from shardcache.store import digest as digests
from shardcache.store.digest import MismatchError, can_check, check_archive, compare
from shardcache.store.directory import Metadata
from tests.support.storetools import metadata_for
from tests.support.tars import make_tar, tar_of

FULL = ObjectInfo(2**64 - 1, 'W/"\u00e9"', "v1", "monday", Checksum("crc32", "AA=="))


@pytest.mark.parametrize("info", [FULL, ObjectInfo(None, None)])
def test_a_sidecar_says_what_was_written_into_it(info):
    written = replace(
        metadata_for(data=b"abc"), info=info, checked="crc32", fetched_at=1.7e9 + 0.125
    )
    assert Metadata.decode(written.encode()) == written


def test_versions_tell_objects_apart() -> None:
    one = ObjectInfo(1, '"a"')
    others = [ObjectInfo(2, '"a"'), ObjectInfo(1, '"b"'), ObjectInfo(1, "monday")]
    others += [ObjectInfo(1, '"a"', version_id=version) for version in ("v1", "v2")]
    others += [ObjectInfo(1, None, modified=date) for date in ("monday", "tuesday")]
    assert len({info.version for info in (one, *others)}) == 8
    # Neither a null version, nor the time beside an ETag, makes another version.
    assert ObjectInfo(1, '"a"', version_id="null").version == one.version
    assert ObjectInfo(1, '"a"', modified="x").version == one.version


#: Of "123456789". The CRCs are the check values in the catalogue of parametrised CRC algorithms:
#: CRC-32/ISO-HDLC, CRC-32/ISCSI, CRC-64/NVME.
NINE = {
    "crc32": "cbf43926",
    "crc32c": "e3069283",
    "crc64nvme": "ae8b14860a799888",
    "sha256": hashlib.sha256(b"123456789").hexdigest(),
}


@contextmanager
def opened(path: Path, data: bytes) -> Iterator[int]:
    (path / "data").write_bytes(data)
    with open(path / "data", "rb") as file:
        yield file.fileno()


@pytest.mark.parametrize("algorithm", NINE)
def test_a_shard_is_compared_with_what_its_origin_states(tmp_path: Path, algorithm: str) -> None:
    stated = Checksum(algorithm, base64.b64encode(bytes.fromhex(NINE[algorithm])).decode())
    with opened(tmp_path, b"123456789") as fd:
        assert compare(fd, stated) == algorithm
        assert compare(fd, Checksum("md5", "x")) is None
    for other in (b"", b"12345678", b"123456780"):
        with opened(tmp_path, other) as fd, pytest.raises(MismatchError):
            compare(fd, stated)


def test_only_whole_object_checksums_are_checked_and_more_kinds_with_the_extra(monkeypatch):
    for unknown in (None, Checksum("crc32", "AAAAAQ==-3"), Checksum("md5", "AAAAAQ==")):
        assert not can_check(unknown)
    for algorithm in (*NINE, "sha1"):
        assert can_check(Checksum(algorithm, "AAAAAQ=="))
    monkeypatch.setitem(sys.modules, "awscrt", None)
    digests._crc.cache_clear()
    try:
        found = {a for a in NINE if can_check(Checksum(a, "AAAAAQ=="))}
        assert found == {"crc32", "sha256"}
    finally:
        digests._crc.cache_clear()


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
    with opened(tmp_path, data) as fd, pytest.raises(IntegrityError, match="not a tar") as caught:
        check_archive(fd, "a.tar.gz", URL)
    assert URL in str(caught.value) and len(str(caught.value)) < 400
