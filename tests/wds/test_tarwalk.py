"""The tar walk finds what tarfile finds, breaks where it breaks, and mostly does without it."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import NoReturn

import pytest
import webdataset as wds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardcache.wds.tar import TarWalk
from tests.support.tars import make_tar
from tests.wds.archives import (
    BLOCK,
    FORMATS,
    archive,
    by_tarfile,
    by_walk,
    damaged,
    mended,
    same,
    small,
)

GNU_TAR = shutil.which("tar")
SEEDS = st.integers(0, 2**32)


def forbid_tarfile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> NoReturn:
        raise AssertionError("tarfile was asked")

    monkeypatch.setattr(tarfile.TarFile, "__init__", refuse)


# -- the same as tarfile -----------------------------------------------------------


@given(seed=SEEDS)
@settings(max_examples=150, deadline=None)
def test_members_of_any_archive_are_those_of_tarfile(seed: int) -> None:
    same(archive(random.Random(seed)), seed)


@given(seed=SEEDS)
@example(seed=467790)  # a size beyond all memory
@settings(max_examples=150, deadline=None)
def test_damaged_archives_break_as_tarfile_breaks(seed: int) -> None:
    rng = random.Random(seed)
    same(damaged(rng, archive(rng)), seed)


@pytest.mark.parametrize("form", FORMATS)
def test_an_archive_cut_anywhere_ends_as_tarfile_says(form: int) -> None:
    data = small(form)
    ends = set()
    for length in range(0, len(data), 13):
        for near in (length, length - length % BLOCK):
            expected = by_tarfile(io.BytesIO(data[:near]))
            assert by_walk(io.BytesIO(data[:near])) == expected
            ends.update(event for event in expected if isinstance(event, tuple))
    said = {exn_type.__name__ + str(args) for _, exn_type, args in ends}
    assert said >= {f"ReadError('{text}',)" for text in ("empty file", "unexpected end of data")}
    assert {kind for kind, _, _ in ends} == {"unread", "broken"}


@pytest.mark.skipif(GNU_TAR is None, reason="there is no tar command")
@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_the_tar_command_writes_is_read_the_same(form: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for number in range(4):
        (tmp_path / "sub" / f"{number:04d}.txt").write_bytes(os.urandom(number * 311))
    (tmp_path / "sub" / "link.txt").symlink_to("0001.txt")
    os.link(tmp_path / "sub" / "0003.txt", tmp_path / "sub" / "hard.txt")
    (tmp_path / ("n\u00e4m\u00e9" * 4 + ".cls")).write_bytes(b"7")
    if form != "v7":
        (tmp_path / ("d" * 90)).mkdir()
        (tmp_path / ("d" * 90) / ("e" * 90 + ".bin")).write_bytes(b"deep")
    with open(tmp_path / "sub" / "holes.bin", "wb") as file:
        for at in range(0, 40 << 16, 1 << 16):
            file.seek(at)
            file.write(b"data")
    command = [str(GNU_TAR), f"--format={form}", "-cf", "-", "-C", str(tmp_path), "."]
    sparse = ["--sparse"] if form in ("oldgnu", "gnu", "posix") else []
    packed = subprocess.run([*command, *sparse], stdout=subprocess.PIPE, check=True).stdout
    found = same(packed, 5)
    assert "./sub/0003.txt" in found and (b"deep" in found or form == "v7")


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_archives_are_read_from_any_stream(pack) -> None:
    packed = pack(make_tar(3))
    assert same(packed) == same(make_tar(3))
    same(packed[: len(packed) // 2])
    for data in (b"", b"x", bytes(511), bytes(5000), b"x" * 512, packed[:2]):  # is no archive
        same(data)


def number(value: int) -> bytes:
    """A size in base 256, which may be negative."""
    return bytes([0x80 if value >= 0 else 0xFF]) + (value % 256**11).to_bytes(11, "big")


def sized(kind: bytes, size: int, name: str = "odd.txt") -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    header = info.tobuf(tarfile.USTAR_FORMAT)
    return mended(header[:124] + number(size) + header[136:])


def extended(records: bytes, padding: bytes = b"") -> bytes:
    """An extended header of these records, with something behind them in its last block."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    return info.tobuf(tarfile.USTAR_FORMAT) + (records + padding).ljust(BLOCK, b"\0")


@pytest.mark.parametrize(
    "header",
    [
        extended(b"11 path=ab\n", b"12 path=cde\n"),
        extended(b"11 path=ab\n", b"junk"),
        extended(b"11 path=abX"),
        extended(b"011 path=ab\n"),
        extended(b"11 path=ab\nrest"),
        extended(b"11 path=\xff\xfe\n"),
        extended(b"21 hdrcharset=BINARY\n11 path=\xff\xfe\n"),
        extended(b"24 comment=hdrcharset=x\n"),
        extended(b"10 size=7\n11 size=x1\n"),
        extended(b"22 GNU.sparse.major=1\n"),
        extended(b"11 path=ab\n") + extended(b"11 path=cd\n"),
        sized(b"L", 600) + b"n" * 700 + bytes(324),
        sized(b"S", 0),
        sized(b"0", 3),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_odd_headers_are_left_to_tarfile(
    header: bytes, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small(tarfile.USTAR_FORMAT)
    data = plain[: -2 * BLOCK] * first + header + plain
    same(data)
    for records in (b"8 path=\n", b"9 size=7\n11 path=a/\n", b"9 path=/\n"):  # and no odd ones
        same(extended(records) + data)
    if header[124:125] != b"\x80" or header[156:157] != b"L":
        forbid_tarfile(monkeypatch)
        found = by_walk(io.BytesIO(data))
        assert ("tarfile was asked",) in (event[2] for event in found if isinstance(event, tuple))


# -- a reader of streams -------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_ordinary_archives_need_no_tarfile(form: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small(form, ("a.txt", "dir/b.cls", "n" * 80 + "/" + "m" * 50 + ".txt", "n\u00e4.txt"))
    written = io.BytesIO()
    with wds.TarWriter(written) as writer:
        writer.write({"__key__": "k", "txt": b"text", "cls": b"1"})
    written = written.getvalue()
    forbid_tarfile(monkeypatch)
    assert len(by_walk(io.BytesIO(data))) == 8
    assert by_walk(io.BytesIO(written)) == ["k.cls", b"1", "k.txt", b"text"]
    assert by_walk(io.BytesIO(b"\xff" + data))[-1][2] == ("tarfile was asked",)


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_read_beyond_a_member_until_the_next_is_asked_for(form: int) -> None:
    stream = io.BytesIO(small(form))
    walk = TarWalk(stream)
    names = iter(walk)
    next(names)
    data = walk.read()
    assert stream.getvalue()[stream.tell() - len(data) : stream.tell()] == data
    assert set(stream.getvalue()[stream.tell() :][: -len(data) % BLOCK]) == {0}
