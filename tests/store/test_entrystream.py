"""A cached file that is cut short while it is read: right bytes all the same.

Files that cannot be read any more are in tests/stress/test_failing_disk.py.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcache import Cache
from shardcache.clock import SYSTEM_CLOCK
from shardcache.files import Breaker
from shardcache.origins.base import ObjectInfo
from shardcache.store.digest import BLOCK
from shardcache.store.entrystream import EntryStream
from shardcache.urls import parse_url
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import payload
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
PART = BLOCK // 2
DATA = make_tar(1, members=3, size=PART)  # a dozen requests of the kernel


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_end_of_a_file_that_was_cut_short_is_no_end_of_the_shard(
    make_cache: Callable[..., Cache], origin: MemoryOrigin, caplog
) -> None:
    origin.objects[URL] = DATA
    cache = make_cache()
    cache.fetch(URL)
    origin.requests.clear()
    with cache.open(URL) as stream:
        assert stream.read(1000) == DATA[:1000]
        os.truncate(stream.name, 2 * PART)
        assert stream.read() == DATA[1000:]
        assert stream.read(10) == b"" == stream.raw.readall()
    assert origin.requests == [(URL, 2 * PART, None)]
    assert cache.path(URL) is None
    assert len(warnings(caplog)) == 1


SMALL = payload(2000)


class Rest(io.BytesIO):
    info = ObjectInfo(len(SMALL), "x")


class Keeper:
    """Stands in for the cache: the origin is a string."""

    def __init__(self) -> None:
        self.given_up = 0
        self.read = 0

    def open_again(self, shard, path):
        raise AssertionError("nothing is stale")

    def give_up(self, shard, path, fd, fault, position):
        self.given_up += 1
        return "version", None

    def rest(self, shard, start, pin, version):
        stream = Rest(SMALL)
        stream.seek(start)
        return stream

    def reassured(self):
        self.read += 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(-1, 2500)),
        st.tuples(st.just("read1"), st.integers(0, 2500)),
        st.tuples(st.just("readinto"), st.integers(0, 2500)),
        st.tuples(st.just("peek"), st.integers(0, 100)),
        st.tuples(st.just("start"), st.integers(0, 2500)),
        st.tuples(st.just("end"), st.integers(-2000, 0)),
        st.tuples(st.just("cut"), st.integers(0, 2000)),
    ),
    max_size=20,
)


@given(steps, st.sampled_from([1, 64, 4096]))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_stream_is_the_shard_wherever_and_whenever_its_file_is_cut(
    tmp_path: Path, steps: list[tuple[str, int]], buffer: int
) -> None:
    path = tmp_path / "data"
    path.write_bytes(SMALL)
    keeper = Keeper()
    raw = EntryStream(os.open(path, os.O_RDONLY))
    shard, breaker = parse_url(URL), Breaker(SYSTEM_CLOCK)
    raw.guard(keeper, shard, str(path), len(SMALL), breaker)
    model = io.BytesIO(SMALL)
    with io.BufferedReader(raw, buffer) as stream:
        for what, number in steps:
            if what == "read":
                assert stream.read(number) == model.read(number)
            elif what == "read1":
                found = stream.read1(number)
                assert found == model.read(len(found))
                assert found or not number or model.tell() >= len(SMALL)
            elif what == "readinto":
                ours = bytearray(number)
                count = stream.readinto(ours)
                assert ours[:count] == model.read(number)
            elif what == "peek":
                assert model.getvalue()[model.tell() :].startswith(stream.peek(number))
            elif what == "start":
                assert stream.seek(number) == model.seek(number)
            elif what == "end":
                assert stream.seek(number, os.SEEK_END) == model.seek(number, os.SEEK_END)
            else:
                os.truncate(path, min(number, path.stat().st_size))
            assert stream.tell() == model.tell()
    assert keeper.given_up <= 1
