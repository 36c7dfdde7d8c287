"""`tar_files` yields the same files and errors as WebDataset's expander, which uses tarfile."""

import bz2
import gzip
import io
import lzma
import random
import tarfile
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import webdataset as wds
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardcache.wds import tar_files, tar_samples
from shardcache.wds.tar import TarWalk
from tests.support.tars import make_tar
from tests.wds.archives import (
    BEFORE_1_0,
    BLOCK,
    FORMATS,
    OnlyRead,
    archive,
    damaged,
    same,
    seen,
    small,
)


def _select(name: str) -> bool:
    if name == "b.cls":
        raise KeyError("no colour", 7)
    return not name.startswith("a.c")


def _rename(name: str) -> str:
    if name == "noext":
        raise RuntimeError
    return name.replace("a.", "z/y.")


@given(seed=st.integers(0, 2**32))
@example(seed=467790)
@example(seed=84466)
@settings(max_examples=300, deadline=None)
def test_any_archive_is_read_as_webdataset_reads_it(seed):
    rng = random.Random(seed)
    shards = [archive(rng) for _ in range(rng.choice((1, 1, 3)))]
    shards = [damaged(rng, data) if rng.random() < 0.6 else data for data in shards]
    options: dict[str, Any] = {"local": rng.random() < 0.5}
    options |= {"select_files": _select} if rng.random() < 0.3 else {}
    options |= {"rename_files": _rename} if rng.random() < 0.3 else {}
    options |= {"eof_value": rng.choice((None, {}, {"end": 1}))} if rng.random() < 0.3 else {}
    same(*shards, answers=rng.choice(((True,), (True, True, False), ())), **options)


@pytest.mark.timeout(60)
def test_an_impossible_size_is_an_error():
    info = tarfile.TarInfo("a.txt")
    info.size = 1 << 70
    data = info.tobuf(tarfile.GNU_FORMAT) + bytes(2 * BLOCK)
    with pytest.raises(tarfile.ReadError, match="unexpected end of data"):
        list(TarWalk(io.BytesIO(data)))


@pytest.mark.parametrize("form", FORMATS)
def test_an_archive_cut_anywhere_ends_as_with_tarfile(form):
    data = small(form)
    ends = ""
    for length in range(0, len(data), 13):
        for cut in (length, length - length % BLOCK):
            ends += str(same(data[:cut]))
    assert "empty file" in ends and "unexpected end of data" in ends


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_archives_are_read_from_any_stream(pack):
    packed = pack(make_tar(3))
    assert same(packed) == same(make_tar(3))
    same(packed[: len(packed) // 2])
    for data in (b"", b"x", bytes(511), bytes(5000), b"x" * 512, packed[:2]):  # no archives
        same(data)


@pytest.mark.parametrize(
    ("records", "behind"),
    [
        (b"11 path=ab\n", b"12 path=cde\n"),
        (b"11 path=ab\n", b"junk"),
        (b"11 path=ab\nrest", b""),
        (b"5 path=ab\n", b""),
        (b"20 path=ab\n11 path=cd\n", b""),
        (b"11 path=\xff\xfe\n", b""),
        (b"21 hdrcharset=BINARY\n11 path=\xff\xfe\n", b""),
        (b"10 size=7\n", b""),
        (b"9 size=7\n11 path=a/\n", b""),
    ],
)
def test_odd_extended_headers_are_read_as_tarfile_reads_them(records, behind):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    header = info.tobuf(tarfile.USTAR_FORMAT) + (records + behind).ljust(BLOCK, b"\0")
    for form in FORMATS:  # in the last, another extended header follows
        plain = small(form)
        same(header + plain)
        same(plain[: -2 * BLOCK] + header + plain)


@pytest.mark.parametrize("form", FORMATS)
def test_ordinary_archives_need_no_tarfile(form, monkeypatch):
    data = small(form, ("a.txt", "dir/b.cls", "n" * 80 + "/" + "m" * 50 + ".txt", "n\u00e4.txt"))
    file = io.BytesIO()
    with wds.TarWriter(file) as writer:
        writer.write({"__key__": "k", "txt": b"text", "cls": b"1"})
    written = file.getvalue()
    monkeypatch.setattr(tarfile.TarFile, "__init__", None)
    assert len(seen(tar_files, [io.BytesIO(data)])) == (4 if BEFORE_1_0 else 5)
    (sample,) = tar_samples(iter([{"url": "u", "stream": io.BytesIO(written)}]))
    assert (sample["txt"], sample["cls"]) == (b"text", b"1")


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_read_beyond_the_current_member(form):
    stream = io.BytesIO(small(form))
    data = next(tar_files([{"url": "u", "stream": stream}]))["data"]
    assert stream.getvalue()[stream.tell() - len(data) : stream.tell()] == data


def test_at_most_one_shard_is_held_when_the_next_is_opened():
    alive: list[weakref.ref[OnlyRead]] = []
    counts = []

    def opened() -> Iterator[dict[str, Any]]:
        for number in range(4):
            counts.append(sum(ref() is not None for ref in alive))
            stream = OnlyRead(make_tar(number))
            alive.append(weakref.ref(stream))
            source = {"url": "u", "stream": stream}
            del stream
            yield source
            del source

    assert len(list(tar_samples(opened()))) == 16
    assert max(counts) <= 1
