"""Checks of a shard: versions, checksums of origins, and the format of an archive."""

import bz2
import gzip
import lzma
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcache.archive import check_archive
from shardcache.errors import IntegrityError
from shardcache.origins.base import Checksum, ObjectInfo
from shardcache.store import digest as digests
from shardcache.store.digest import compare
from tests.support.tars import make_tar, tar_of


def test_different_objects_have_different_versions() -> None:
    one = ObjectInfo(1, '"a"')
    others = [ObjectInfo(2, '"a"'), ObjectInfo(1, '"b"'), ObjectInfo(1, "monday")]
    others += [ObjectInfo(1, '"a"', version_id=version) for version in ("v1", "v2")]
    others += [ObjectInfo(1, None, modified=date) for date in ("monday", "tuesday")]
    assert len({info.version for info in (one, *others)}) == 8
    # A null version ID, or a time in addition to an ETag, does not change the version.
    assert ObjectInfo(1, '"a"', version_id="null").version == one.version
    assert ObjectInfo(1, '"a"', modified="x").version == one.version


@contextmanager
def opened(path: Path, data: bytes) -> Iterator[int]:
    (path / "data").write_bytes(data)
    with open(path / "data", "rb") as file:
        yield file.fileno()


def test_checksums_that_cannot_be_computed_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "awscrt", None)  # the extra `checksums` is not installed
    monkeypatch.setattr(digests, "_crc", digests._crc.__wrapped__)
    with opened(tmp_path, b"123456789") as fd:
        for algorithm in ("md5", "crc32c", "crc64nvme"):
            assert compare(fd, Checksum(algorithm, "AAAAAQ==")) is None
        assert compare(fd, Checksum("crc32", "AAAAAQ==-3")) is None
        assert compare(fd, Checksum("crc32", "y/Q5Jg==")) == "crc32"


URL = "s3://lab/train-0000.tar"
PAGE = b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>" + b" " * 600


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_archives_of_every_style_and_files_of_other_names_pass(tmp_path: Path, compress) -> None:
    members = "a.txt", "dir/" * 20 + "x" * 90 + ".txt", "\u00e9\u4e2d.txt"
    for style in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        for name in members:
            with opened(tmp_path, compress(tar_of([(name, b"abc")], style))) as fd:
                for file in ("a.tar", "a.tgz", "a.TAR.XZ"):
                    check_archive(fd, file, URL)
    with opened(tmp_path, PAGE) as fd:
        for file in ("a.bin", "tar", "a.tar.idx"):
            check_archive(fd, file, URL)


@pytest.mark.parametrize(
    "data", [PAGE, b'{"error": "expired"}', b"", bytes(100), make_tar(1)[512:], bytes(511) + b"x"]
)
def test_data_that_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    with opened(tmp_path, data) as fd, pytest.raises(IntegrityError, match="not a tar") as caught:
        check_archive(fd, "a.tar.gz", URL)
    assert URL in str(caught.value) and len(str(caught.value)) < 400
