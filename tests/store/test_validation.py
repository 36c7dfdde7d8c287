"""The cheap look at what was fetched: tar archives pass, error pages do not."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import tarfile
from pathlib import Path

import pytest

from shardcache.errors import IntegrityError
from shardcache.store.digest import check_archive
from tests.support.tars import make_tar, tar_of

URL = "s3://lab/train-0000.tar"
PAGE = b"<?xml version='1.0'?><Error><Code>SlowDown</Code></Error>" + b" " * 600


def check(path: Path, data: bytes, name: str = "train.tar") -> None:
    (path / "data").write_bytes(data)
    fd = os.open(path / "data", os.O_RDONLY)
    try:
        check_archive(fd, name, URL)
    finally:
        os.close(fd)


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["a.txt", "dir/" * 20 + "x" * 90 + ".txt", "\u00e9\u4e2d.txt"])
def test_archives_of_every_style_pass(tmp_path: Path, style: int, name: str) -> None:
    check(tmp_path, tar_of([(name, b"abc")], style))


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_archives_and_files_of_other_names_pass(tmp_path: Path, compress) -> None:
    for name in ("a.tar", "a.tgz", "a.TAR.XZ"):
        check(tmp_path, compress(make_tar(1)), name)
    for name in ("a.bin", "tar", "a.tar.idx"):
        check(tmp_path, PAGE, name)


@pytest.mark.parametrize(
    "data",
    [
        PAGE,
        b"<html>" + b"x" * 1000,
        b'{"error": "expired"}',
        bytes(100),
        make_tar(1)[:511],
        make_tar(1)[512:],
        bytes(511) + b"x",
    ],
)
def test_what_is_no_archive_is_refused_and_shown(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(IntegrityError, match="no tar archive") as caught:
        check(tmp_path, data, "a.tar.gz")
    assert URL in str(caught.value) and caught.value.url == URL
    assert len(str(caught.value)) < 400
