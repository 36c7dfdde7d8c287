"""Streams past the cache: slow readers, silent origins, versions that are never mixed."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.errors import ShardNotFoundError, TransferError
from shardcache.origins.base import TransientError
from shardcache.origins.filesystem import FsspecOrigin
from shardcache.origins.retry import RetryPolicy
from shardcache.store.digest import BLOCK
from shardcache.streams.sources import OriginStream, open_stream
from shardcache.urls import parse_url
from tests.support.fakes import FakeClock, Fault, MemoryOrigin

URL = parse_url("s3://lab/a.bin")


def test_a_slow_reader_is_no_slow_origin(origin: MemoryOrigin) -> None:
    origin.objects[str(URL)] = os.urandom(3 * BLOCK)
    clock = FakeClock()
    policy = RetryPolicy(attempts=1, deadline=100.0, clock=clock)
    received = bytearray()
    with open_stream(origin, URL, policy, clock, timeout=30) as stream:
        while chunk := stream.read(10_240):
            received += chunk
            clock.sleep(5)  # two minutes from one read of the origin to the next
    assert received == origin.objects[str(URL)]
    assert len(origin.requests) == 1


def test_a_silent_origin_is_told_from_a_slow_reader(origin: MemoryOrigin) -> None:
    origin.objects[str(URL)] = os.urandom(BLOCK)
    origin.chunk = 100
    clock = FakeClock()
    real = clock.monotonic
    stream = OriginStream(origin, URL, RetryPolicy(1, None, clock), clock, timeout=30)
    clock.monotonic = lambda: (clock.sleep(1.0), real())[1]  # a second per look
    with pytest.raises(TransferError, match="bytes in"):
        while stream.readinto(bytearray(BLOCK)):
            pass
    stream.close()


@pytest.fixture
def replaceable(tmp_path: Path) -> Iterator[tuple[Path, OriginStream]]:
    path = tmp_path / "a.bin"
    path.write_bytes(b"a" * 3 * BLOCK)
    clock = FakeClock()
    policy = RetryPolicy(attempts=3, deadline=None, clock=clock)
    with OriginStream(
        FsspecOrigin("file", {}, timeout=30), parse_url(str(path)), policy, clock, 30
    ) as stream:
        yield path, stream


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"b" * 3 * BLOCK)
    os.utime(new, (1, 1))
    new.rename(path)


def test_an_origin_that_cannot_pin_is_not_continued_with_another_version(
    replaceable: tuple[Path, OriginStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stream = replaceable
    buffer = bytearray(BLOCK)
    stream.readinto(buffer)
    replace(path)

    def broken(view: memoryview) -> int:
        monkeypatch.undo()
        raise TransientError("reset")

    monkeypatch.setattr(stream._body, "readinto", broken)
    with pytest.raises(TransferError, match="was replaced"):
        stream.readinto(buffer)


def test_an_origin_that_cannot_pin_is_asked_before_the_last_bytes_are_given(
    replaceable: tuple[Path, OriginStream],
) -> None:
    path, stream = replaceable
    received = [stream.readinto(bytearray(BLOCK)) for _ in range(2)]
    replace(path)
    with pytest.raises(TransferError, match="was replaced"):
        stream.readinto(bytearray(BLOCK))
    assert received == [BLOCK, BLOCK]


def test_an_unchanged_file_is_read_to_its_end(replaceable: tuple[Path, OriginStream]) -> None:
    path, stream = replaceable
    assert stream.read() == path.read_bytes()


def test_a_stream_that_cannot_be_opened_is_closed_quietly(
    origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[BaseException | None] = []
    real = OriginStream.close

    def watched(self: OriginStream) -> None:
        try:
            real(self)
        finally:
            closed.append(sys.exception())

    monkeypatch.setattr(OriginStream, "close", watched)
    clock = FakeClock()
    with pytest.raises(ShardNotFoundError):
        OriginStream(origin, URL, RetryPolicy(1, None, clock), clock, 30)
    gc.collect()
    assert closed == [None]


def test_a_broken_connection_is_continued_unseen(origin: MemoryOrigin) -> None:
    origin.objects[str(URL)] = os.urandom(2 * BLOCK)
    origin.faults.append(Fault(after=BLOCK + 7, error=TransientError("reset")))
    clock = FakeClock()
    with open_stream(origin, URL, RetryPolicy(3, None, clock), clock, timeout=30) as stream:
        assert stream.read() == origin.objects[str(URL)]
    assert [start for _, start, _ in origin.requests] == [0, BLOCK + 7]
