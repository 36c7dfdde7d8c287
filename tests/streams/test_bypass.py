"""Streams past the cache: slow readers, silent origins, versions that are never mixed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache import Cache, TransferError
from shardcache.config import Config
from shardcache.origins.base import TransientError
from shardcache.origins.filesystem import FsspecBody
from shardcache.store.digest import BLOCK
from tests.support.fakes import FakeClock, Fault, MemoryOrigin

URL = "s3://lab/a.bin"
DATA = os.urandom(3 * BLOCK)
Full = Callable[..., Cache]


@pytest.fixture
def full(tmp_path: Path, origin: MemoryOrigin, clock: FakeClock) -> Iterator[Full]:
    """Makes caches without room for a shard."""
    origin.objects[URL] = DATA
    made = []

    def make(**options: object) -> Cache:
        config = Config(tmp_path / "cache", min_free=0, max_size=1000, **options)
        cache = Cache.from_config(config)
        cache._here().coordinator()
        cache._here().origins.add("s3", origin)
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.close()


def test_a_slow_reader_is_no_slow_origin(
    full: Full, origin: MemoryOrigin, clock: FakeClock
) -> None:
    received = bytearray()
    with full(attempts=1, deadline=100.0, timeout=30.0).open(URL) as stream:
        while chunk := stream.read(10_240):
            received += chunk
            clock.sleep(5)  # two minutes from one read of the origin to the next
    assert received == DATA
    assert len(origin.requests) == 1


def test_a_broken_connection_is_continued_unseen(full: Full, origin: MemoryOrigin) -> None:
    origin.faults.append(Fault(after=BLOCK + 7, error=TransientError("reset")))
    with full().open(URL) as stream:
        assert stream.read() == DATA
    assert [start for _, start, _ in origin.requests] == [0, BLOCK + 7]


def test_a_streamed_shard_can_be_sought_in(full: Full, origin: MemoryOrigin) -> None:
    with full().open(URL) as stream:
        assert stream.read(10) == DATA[:10]
        stream.seek(2 * BLOCK)
        assert stream.read(10) == DATA[2 * BLOCK :][:10]
        stream.seek(-5, os.SEEK_END)
        assert (stream.read(), stream.tell()) == (DATA[-5:], len(DATA))
        stream.seek(0)
        origin.objects[URL] = DATA[::-1]
        with pytest.raises(TransferError, match="was replaced while it was streamed"):
            stream.read()


# -- an origin that cannot pin a version -------------------------------------------------


@pytest.fixture
def local(full: Full, tmp_path: Path) -> tuple[Path, Cache]:
    path = tmp_path / "a.bin"
    path.write_bytes(DATA)
    return path, full(cache_local=True, attempts=3)


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(DATA[::-1])
    os.utime(new, (1, 1))
    new.rename(path)


def test_it_is_not_continued_with_another_version(
    local: tuple[Path, Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = local
    with cache.open(str(path)) as stream:
        assert stream.raw.read(BLOCK)
        replace(path)

        def broken(body: FsspecBody, view: memoryview) -> int:
            monkeypatch.undo()
            raise TransientError("reset")

        monkeypatch.setattr(FsspecBody, "readinto", broken)
        with pytest.raises(TransferError, match="was replaced"):
            stream.raw.read(BLOCK)


def test_it_is_asked_before_the_last_bytes_are_given(local: tuple[Path, Cache]) -> None:
    path, cache = local
    with cache.open(str(path)) as stream:
        received = [len(stream.raw.read(BLOCK)) for _ in range(2)]
        replace(path)
        with pytest.raises(TransferError, match="was replaced"):
            stream.raw.read(BLOCK)
    assert received == [BLOCK, BLOCK]


def test_an_unchanged_file_is_read_to_its_end(local: tuple[Path, Cache]) -> None:
    path, cache = local
    with cache.open(str(path)) as stream:
        assert stream.read() == path.read_bytes()
        assert stream.name == f"file://{path}"
