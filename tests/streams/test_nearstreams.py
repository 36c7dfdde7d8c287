"""Shards that are streamed past a full cache, from a copy that is nearer than their origin."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.errors import TransferError
from shardcache.origins.base import TransientError
from shardcache.origins.filesystem import FsspecBody
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import no_descriptor_left
from tests.support.tars import make_tar

URL = "s3://lab/train/0.tar"
DATA = make_tar(0, members=50, size=40_000)
OTHER = make_tar(1, members=50, size=40_000)
MIB = 1 << 20

Make = Callable[..., Cache]


@pytest.fixture
def copy(make_cache: Make, origin: MemoryOrigin, tmp_path: Path) -> Path:
    """The shard on a NAS, as another node has written it."""
    origin.objects[URL] = DATA
    place = {"url": str(tmp_path / "nas"), "write_back": True}
    with make_cache(dir=tmp_path / "first", upstreams=[place]) as cache, cache.open(URL) as stream:
        stream.read()
    origin.requests.clear()
    origin.stats.clear()
    return tmp_path / "nas/lab/train/0.tar"


@pytest.fixture
def full(make_cache: Make, tmp_path: Path, copy: Path) -> Cache:
    """A cache without room for it."""
    return make_cache(
        dir=tmp_path / "full", upstreams=[tmp_path / "nas"], max_size=1000, attempts=1
    )


def read(cache: Cache) -> bytes:
    with cache.open(URL) as stream:
        return stream.read()


def test_it_comes_from_there_and_nothing_from_the_origin(full: Cache, origin: MemoryOrigin) -> None:
    with no_descriptor_left():
        assert read(full) == DATA
    with full.open(URL) as stream:
        assert b"".join(iter(lambda: stream.read(10_007), b"")) == DATA
        assert stream.read() == b""
    assert (origin.requests, origin.stats) == ([], [])
    assert URL not in full


def test_a_copy_that_somebody_else_made_is_streamed_too(
    full: Cache, copy: Path, origin: MemoryOrigin
) -> None:
    copy.with_name("0.tar.shardcache.json").unlink()
    copy.write_bytes(OTHER)
    assert read(full) == OTHER and not origin.requests


def test_an_empty_one_is_empty(full: Cache, copy: Path, origin: MemoryOrigin) -> None:
    copy.with_name("0.tar.shardcache.json").unlink()
    copy.write_bytes(b"")
    full._here().writing.failed(at_once=True)  # or it would be stored
    assert read(full) == b"" and not origin.requests


def test_where_it_is_replaced_on_the_way_the_rest_comes_from_the_origin(
    full: Cache, copy: Path, origin: MemoryOrigin
) -> None:
    with no_descriptor_left(), full.open(URL) as stream:
        begin = stream.read(10)
        copy.with_name("new").write_bytes(OTHER)
        copy.with_name("new").replace(copy)
        assert begin + stream.read() == DATA
    starts = [start for _, start, _ in origin.requests]
    assert starts and min(starts) > 0


@pytest.mark.parametrize("piece", [10_007, 2 * MIB])
def test_a_reader_that_goes_on_after_an_error_is_given_no_later_bytes(
    full: Cache, copy: Path, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """The copy goes away in the midst of a block, and the origin is down for a moment."""
    got = bytearray()
    real = FsspecBody.readinto
    served = 0

    def readinto(self: FsspecBody, buffer: memoryview) -> int:
        nonlocal served
        if served >= MIB + MIB // 2:
            raise TransientError("the NAS hangs")
        count = real(self, buffer[: MIB // 4])
        served += count
        return count

    with full.open(URL) as stream:
        monkeypatch.setattr(FsspecBody, "readinto", readinto)
        origin.faults.append(Fault(None, TransientError("503")))
        errors = 0
        while errors < 3:
            try:
                if not (found := stream.read(piece)):
                    break
                got += found
            except TransferError:
                errors += 1
    assert errors == 3
    assert DATA.startswith(bytes(got))
    monkeypatch.undo()
    assert read(full) == DATA


def test_where_both_are_replaced_it_is_an_error_and_no_splice(
    full: Cache, copy: Path, origin: MemoryOrigin
) -> None:
    with full.open(URL) as stream:
        stream.read(10)
        origin.objects[URL] = OTHER
        copy.with_name("new").write_bytes(OTHER)
        copy.with_name("new").replace(copy)
        with pytest.raises(TransferError, match="was replaced while it was streamed"):
            stream.read()


def test_a_foreign_copy_that_is_replaced_on_the_way_is_an_error(
    full: Cache, copy: Path, origin: MemoryOrigin
) -> None:
    copy.with_name("0.tar.shardcache.json").unlink()
    with full.open(URL) as stream:
        stream.read(10)
        copy.with_name("new").write_bytes(OTHER)
        copy.with_name("new").replace(copy)
        with pytest.raises(TransferError, match="was replaced while it was streamed"):
            stream.read()


def test_where_there_is_none_it_comes_from_the_origin(
    full: Cache, copy: Path, origin: MemoryOrigin
) -> None:
    copy.unlink()
    assert read(full) == DATA and origin.requests
    copy.symlink_to(copy)  # a loop
    assert read(full) == DATA


def test_what_was_read_already_is_never_continued_with_a_copy(
    make_cache: Make, tmp_path: Path, copy: Path, origin: MemoryOrigin
) -> None:
    """Where a cached file fails the rest is to be of its version."""
    cache = make_cache(dir=tmp_path / "node", upstreams=[tmp_path / "nas"])
    assert read(cache) == DATA
    with cache.open(URL) as stream:
        begin = stream.read(1000)
        os.truncate(stream.name, MIB)
        assert begin + stream.read() == DATA
    assert [start for _, start, _ in origin.requests] == [MIB]
