"""`tar_files` yields the same files and errors as WebDataset's expander, which uses tarfile.

Random archives with random damage come first, then the comparison in `same`, then the tests.
"""

import bz2
import gzip
import inspect
import io
import itertools
import lzma
import random
import tarfile
from typing import Any

import pytest
import webdataset as wds
from hypothesis import example, given, settings
from hypothesis import strategies as st
from webdataset.tariterators import group_by_keys, tar_file_expander

from shardcache.archive import TarWalk
from shardcache.wds import group_files, tar_files, tar_samples
from tests.support.tars import make_tar, tar_of

BLOCK = 512
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


class EndlessError(Exception):
    """Stops tarfile, which reads on for minutes after some damaged sizes."""


class OnlyRead:
    """A stream with nothing but ``read``."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self._at_end = 0

    def read(self, size: int) -> bytes:
        self._at_end += self._file.tell() >= len(self._file.getbuffer())
        if self._at_end > 1000:
            raise EndlessError
        return self._file.read(size)


#: WebDataset before 1.0: its expander marks no end of a shard, and has no local paths.
BEFORE_1_0 = "eof_value" not in inspect.signature(tar_file_expander).parameters
_EARLY = ("select_files", "rename_files")

_NAMES = (
    "a.txt", "a.cls", "b.cls", "./b/c.cls", "dir/", "noext", "__", "__a", "a__", "x/__c__",
    ".hidden", "__meta__", "__meta__/x.txt", "x" * 99 + ".a",
    "p" * 60 + "/" + "n" * 90 + ".png", "l" * 140 + ".txt", "d" * 120 + "/" + "e" * 130 + ".bin",
    "n\u00e4me.txt", "\udcff\udcfe.bin", "a b=c\n1.txt", "\u65e5" * 60 + ".x", "BZh91AY&SY.txt",
)  # fmt: skip
_SIZES = (0, 1, 511, 512, 513, 1024, 2000, 10240, 12000)
_PAX = (
    {"comment": "x"}, {"mtime": "1.5"}, {"size": "7"}, {"path": "elsewhere/p.q"}, {"path": "/"},
    {"hdrcharset": "BINARY"}, {"uid": "x"}, {"size": "-4"}, {"size": "1_0"}, {"path": ""},
    {"GNU.sparse.size": "9"}, {"GNU.sparse.name": "other.s"}, {"linkpath": "z"},
    {"SCHILY.xattr.user.a": "1\n2=3"}, {"GNU.sparse.map": "0,3"}, {"x" * 200: "y" * 3000},
)  # fmt: skip


def small(form: int, *names: str) -> bytes:
    """Return an archive of two members, or of those with the names, in one format."""
    names = names or ("a.txt", "n" * 80 + "/" + "m" * 40 + ".cls")
    members = [(name, name.encode() * 3) for name in names]
    return tar_of(members, form, modified=1_700_000_000.5, whole_records=False)


def archive(rng: random.Random) -> bytes:
    """Return an archive of random members, in one format or each in its own."""
    own = rng.choice((None, None, *FORMATS))
    members = (_member(rng, own or rng.choice(FORMATS)) for _ in range(rng.choice((0, 1, 2, 5, 8))))
    return b"".join(members) + bytes(rng.choice((0, 512, 1024, 1024, 1024, 9000)))


def _member(rng: random.Random, form: int) -> bytes:
    data = rng.randbytes(rng.choice(_SIZES))
    info = tarfile.TarInfo(rng.choice(_NAMES))
    info.size = len(data)
    info.mtime = rng.choice((0, 1_700_000_000, 1_700_000_000.25, 2**40))
    info.uid = rng.choice((0, 1000, 3_000_000))
    info.uname = rng.choice(("", "root", "j\u00f6rg"))
    info.type = bytes([rng.choice(b"0" * 12 + b"\0" * 3 + b"77" + b"1234556SDZXAIVMN")])
    if info.type in b"12":
        info.linkname = rng.choice(_NAMES)
        info.size, data = 0, b""
    if rng.random() < 0.2:
        info.pax_headers = rng.choice(_PAX)
    try:
        head = info.tobuf(form, "utf-8", "surrogateescape")
    except ValueError:  # the format cannot represent this member
        head = info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    if rng.random() < 0.04:
        head = tarfile.TarInfo.create_pax_global_header(rng.choice(_PAX)) + head
    return head + data + bytes(-len(data) % BLOCK)


#: Positions of number fields, type, names and prefix in a header.
_FIELDS = (
    (0, 100), (100, 108), (108, 116), (116, 124), (124, 136), (136, 148), (156, 157),
    (157, 257), (257, 265), (329, 337), (337, 345), (345, 500), (500, 512),
)  # fmt: skip
_VALUES = (
    b"\0", b"0", b"7", b"8", b" ", b"+7", b"-7", b"0o7", b"1_1", b"\x80", b"\xff", b"\x80\0\0",
    b"\xff" * 12, b"\x80" + b"\0" * 10 + b"\5", b"7" * 12, b"      12 ", b"00000001000\0",
    b"0000001 \0", b"12\0garbage", b"\xc3\xa4", b"a/\0", b"x/", b"L", b"K", b"x", b"g", b"S", b"5",
    b"1", b"X", b"D", b"/",
)  # fmt: skip


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Return ``data`` cut short, damaged, or with other values in headers."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        if changed:
            rng.choice((_bend,) * 3 + (_set_field,) * 4 + (_record,))(rng, changed)
    return bytes(changed)


def _bend(rng: random.Random, data: bytearray) -> None:
    """Flip a bit, drop some bytes, or cut the end off."""
    at = rng.randrange(len(data))
    match rng.randrange(3):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            del data[at : at + rng.choice((1, 100, BLOCK))]
        case _:
            del data[at - at % rng.choice((1, BLOCK)) :]


def _set_field(rng: random.Random, data: bytearray) -> None:
    """Set a field of a header, and its checksum."""
    blocks = range(0, len(data), BLOCK)
    at = rng.choice([at for at in blocks if data[at + 257 : at + 262] == b"ustar"] or blocks)
    start, stop = rng.choice(_FIELDS)
    value = rng.choice(_VALUES)[: stop - start]
    if start == 124 and value[:1] == b"\xff":
        return  # tarfile does not handle negative sizes
    header = data[at : at + BLOCK].ljust(BLOCK, b"\0")
    start += rng.choice((0, 0, 0, max(0, stop - start - len(value))))
    header[start : start + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    data[at : at + BLOCK] = header


def _record(rng: random.Random, data: bytearray) -> None:
    """Damage a record of an extended header, if the data has one."""
    at = data.find(b"=", rng.randrange(len(data)))
    if at >= 0:
        place = max(0, at - rng.randrange(12))
        data[place : place + 1] = rng.choice((b"0", b"9", b"99", b" ", b"", b"\n", b"\0", b"="))


def seen(stage, streams, answers=(True,), **options) -> list[Any]:
    """Return the files of a stage and the errors passed to its handler, in order.

    The handler returns each of ``answers`` in turn, and again; without any, it raises the error.
    """
    events: list[Any] = []
    replies = itertools.cycle(answers)

    def described(exn: Exception) -> tuple[Any, str]:
        text = repr(exn.args)
        for stream in streams:
            text = text.replace(repr(stream), "<stream>")
        return type(exn), text

    def handler(exn: Exception) -> bool:
        events.append(described(exn))
        if not answers:
            raise exn
        return next(replies)

    if BEFORE_1_0:
        options = {name: value for name, value in options.items() if name in _EARLY}
    sources = ({"url": f"u{n}", "stream": stream} for n, stream in enumerate(streams))
    if options.pop("local", False):
        sources = (source | {"local_path": f"/p{source['url']}"} for source in sources)
    try:
        for file in stage(sources, handler, **options):
            events.append(list(file.items()))
    except Exception as exn:
        events.append(described(exn))
    return events


def same(*shards: bytes, **options: Any) -> list[Any]:
    """Check that we read shards from any kind of stream as WebDataset does; returns its events."""
    theirs = seen(tar_file_expander, [OnlyRead(data) for data in shards], **options)
    endless = next((n for n, event in enumerate(theirs) if EndlessError in event), None)
    for kind in (io.BytesIO, lambda data: io.BufferedReader(io.BytesIO(data), 700), OnlyRead):
        streams = [kind(data) for data in shards]
        ours = seen(tar_files, streams, **options)
        assert ours[:endless] == theirs[:endless], type(streams[0])
        assert not any(getattr(stream, "closed", False) for stream in streams)
    return theirs


@given(seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_files_are_grouped_as_webdataset_groups_them(seed):
    rng = random.Random(seed)
    names = ["a.txt", "a.TXT", "a.__bad__", "a.__key__", "b.x.y", "b.txt", "noext", "d/a.txt"]
    files = [{"fname": name, "data": b"1", "__url__": "u"} for name in names]
    files += [{"__url__": "u"}] if BEFORE_1_0 else [{}, {}, {"__url__": "u"}]
    drawn, answers = rng.choices(files, k=20), rng.choice(((True,), (True, True, False), ()))

    def grouped(group):
        return seen(lambda _, handler: group(drawn, handler=handler), [], answers)

    assert grouped(group_files) == grouped(group_by_keys)


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


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_and_cut_archives_are_read_from_any_stream(pack):
    packed = pack(make_tar(3))
    assert same(packed) == same(make_tar(3))
    for data in (packed[: len(packed) // 2], b"", b"x", bytes(511), bytes(5000)):
        same(data)
    same(tar_of([("a.cls", bytes(30_000))])[:15_000], select_files=_select)  # cut where it skips


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
    data = small(form, "a.txt", "dir/b.cls", "n" * 80 + "/" + "m" * 50 + ".txt", "n\u00e4.txt")
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


def test_samples_behind_an_end_marker_are_named_once(caplog):
    first, both = make_tar(1), make_tar(1) + make_tar(2)
    for stream in (OnlyRead(both), *(io.BufferedReader(io.BytesIO(both)) for _ in range(2))):
        sources = [{"url": "joined.tar", "stream": each} for each in (stream, OnlyRead(first))]
        joined, alone = (list(tar_files([source])) for source in sources)
        assert joined == alone
    (text,) = caplog.messages
    assert "joined.tar: readers stop at an end marker" in text
    assert f"miss the data from byte {len(first)} on" in text
