"""What reads bytes from a disk or a network, as fuzz targets.

A target takes any bytes and returns, or it has found a bug. Hypothesis tries them in
`test_fuzz`, libFuzzer in ``python -m tests.stress.fuzz``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from shardcache import layout, units
from shardcache import layout as grammar
from shardcache.errors import ConfigError
from shardcache.locks.flock import Holder, parse_holder
from shardcache.locks.mounts import parse_mountinfo
from shardcache.locks.sessions import Wait, parse_wait
from shardcache.origins.base import Checksum, ObjectInfo, TransientError
from shardcache.origins.http import content_length, content_range, retry_after
from shardcache.store.digest import BLOCK
from shardcache.store.entry import DamagedError, Metadata
from shardcache.store.partial import Progress, parse_header, read_records, write_record
from shardcache.urls import parse_url, redact
from tests.support.tartools import FORMATS, OnlyRead, by_tarfile, by_walk, mended, small

KEY, VERSION, TOKEN = "0123456789abcdef" * 2, "fedcba987654" * 2, "f" * 32

SIDECAR = Metadata(
    url="s3://lab/train-0000.tar",
    key=KEY,
    info=ObjectInfo(3, '"etag"', "v1", "monday", Checksum("crc32", "AAAAAA==")),
    size=3,
    digest=TOKEN,
    checked="crc32",
    fetched_at=1_790_000_000.0,
    boot="11111111-2222-3333-4444-555555555555",
    library="0.1.0",
)


def sidecar(data: bytes) -> None:
    try:
        found = Metadata.decode(data)
    except DamagedError as exn:
        assert len(str(exn)) < 400
        return
    again = Metadata.decode(found.encode())
    assert abs(again.fetched_at - found.fetched_at) <= 0.001
    assert replace(again, fetched_at=found.fetched_at) == found
    assert len(found.info.version) == 24
    assert Metadata.decode(found.trusted_since("b").encode()).boot == "b"


def record(data: bytes) -> None:
    found = parse_holder(data)
    if found is not None:
        assert str(found).isprintable() and len(str(found)) < 400
        assert (found.job or "").isprintable()
        assert parse_holder(json.dumps(asdict(found)).encode()) == found


def wait(data: bytes) -> None:
    found = parse_wait(data)
    if found is not None:
        assert found.url.isprintable() and len(found.key) == 32
        assert parse_wait(found.encode()) == found


def progress(data: bytes) -> None:
    fd = os.memfd_create("progress")
    try:
        os.write(fd, data)
        try:
            header = parse_header(data[:40])
        except DamagedError:
            header = None
        sizes = [len(data) << 20, 1 << 80]
        if header is not None and header.total is not None:
            sizes.append(header.total)
        for total in sizes:
            for index, digest, length in read_records(fd, total):
                assert 64 + index * 24 < len(data) and len(digest) == 16
                assert 0 < length <= BLOCK and index * BLOCK + length <= total
    finally:
        os.close(fd)


def names(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    place = layout.Layout(Path("/v1"))
    entry, partial = grammar.parse_entry_name(name), grammar.parse_partial_name(name)
    if entry is not None:
        assert place.entry(KEY, *entry).name == name
    if partial is not None:
        key, version = partial
        assert grammar.is_key(key) and name.startswith(f"{key}.{version}.")
        assert place.new_partial(key, version).name[:58] == name[:58]
    kinds = [entry, partial, grammar.is_evicted_name(name), grammar.is_quarantined_name(name)]
    kinds += [grammar.is_key(name), grammar.is_lock_name(name), grammar.is_temporary_name(name)]
    assert sum(map(bool, kinds)) <= 1
    if any(kinds):
        assert "/" not in name and "\0" not in name and name not in (".", "..")


def url(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for options in ({}, {"allow_schemes": ("pipe", "sftp"), "endpoint": text[:40]}):
        try:
            found = parse_url(text, **options)
        except ConfigError:
            continue
        assert grammar.is_key(found.key)
        name = found.basename
        assert 0 < len(name) <= 126 and "/" not in name and not name.startswith(".")
        assert name.isascii() and name.isprintable() and name not in ("meta.json", "progress")
        if found.scheme not in ("pipe", "file"):
            assert parse_url(str(found), **options).key == found.key
    redact(text)


def headers(data: bytes) -> None:
    text = data.decode("latin-1")
    given = {"content-length": text, "retry-after": text}
    length = content_length(given)
    assert length is None or 0 <= length < 10**19
    seconds = retry_after(given)
    assert seconds is None or 0 <= seconds < float("inf")
    for start, stop in ((0, None), (0, 100), (10, 20)):
        with contextlib.suppress(TransientError):
            total, end = content_range(text, length, start, stop)
            assert start < end <= total and (stop is None or end <= stop)


def quantities(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for parse in (units.parse_bytes, units.parse_duration, units.parse_limit, units.parse_bool):
        with contextlib.suppress(ConfigError):
            parse(text)
    for mount in parse_mountinfo(text):
        assert mount.type is not None


class _EndlessError(BaseException):
    """tarfile reads on and on beyond the end: it was promised so many bytes."""


class _Patient(OnlyRead):
    _at_end = 0

    def read(self, size: int) -> bytes:
        data = super().read(size)
        self._at_end += not data
        if self._at_end > 1000:
            raise _EndlessError
        return data


def archive(data: bytes) -> None:
    # As it is, and with headers that are sound, to get behind the checksum.
    blocks = [data[at : at + 512] for at in range(0, len(data), 512)]
    sound = [mended(b) if len(b) == 512 and b[257:262] == b"ustar" else b for b in blocks]
    for each in (data, b"".join(sound)):
        if b"GNU.sparse" in each or b"S" in each[156::512]:
            continue  # a few bytes of them make members of gigabytes
        with contextlib.suppress(_EndlessError):
            assert by_walk(_Patient(each)) == by_tarfile(_Patient(each))


def _progress_seed() -> bytes:
    fd = os.memfd_create("seed")
    try:
        Progress(2 * BLOCK + 5, BLOCK, BLOCK + 5).write(fd)
        write_record(fd, 0, b"d" * 16, BLOCK)
        write_record(fd, 2, b"e" * 16, 5)
        return os.pread(fd, 4096, 0)
    finally:
        os.close(fd)


#: name -> (target, inputs that mean something to it)
TARGETS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "sidecar": (sidecar, [SIDECAR.encode(), replace(SIDECAR, checked=None).encode()]),
    "record": (
        record,
        [json.dumps(asdict(Holder(7, "node-1", 3, "job", 1.5, f"{KEY}.x", 9))).encode()],
    ),
    "wait": (wait, [Wait("s3://b/a.tar", KEY, Holder(7, "n", 3, "j", 1.5), None).encode()]),
    "progress": (progress, [_progress_seed()]),
    "names": (
        names,
        [
            f"{VERSION}-1f".encode(),
            f"{KEY}.{VERSION}.{TOKEN}".encode(),
            f"evict.{KEY}.{TOKEN}".encode(),
            f"{KEY}.{VERSION}-1f.{TOKEN}".encode(),
            f"{KEY}.lock".encode(),
            f".meta.json.{TOKEN}".encode(),
        ],
    ),
    "url": (
        url,
        [
            b"s3://lab/a/b.tar?versionId=7",
            b"https://u:p@host:443/a%20b.tar?X-Amz-Signature=x&y=1#z",
            b"pipe: curl -u a:b https://h/x | cat",
            b"s3://arn:aws:s3:us-east-1:1:accesspoint/ap/key",
            b"abfs://c@a.dfs/x?sig=1&sv=2",
            b"simplecache::gs://b/k",
        ],
    ),
    "headers": (
        headers,
        [b"bytes 10-19/100", b"bytes 10-9/10", b"bytes 0-99/*", b"120", b"1e3", b"-5"],
    ),
    "archive": (archive, [small(form)[:4096] for form in FORMATS]),
    "quantities": (quantities, [b"10.5 GiB", b"1h30m", b"80%", b"36 35 98:0 / /m rw - ext3 d rw"]),
}
