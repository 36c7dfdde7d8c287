"""What a shard costs that is streamed: one request, and its bytes once."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from shardcache.cache import Cache
from shardcache.errors import CacheFullError
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import no_descriptor_left
from tests.support.tars import make_tar

Make = Callable[..., Cache]
MIB = 1 << 20
URLS = [f"s3://lab/{name}/0.tar" for name in "abc"]
LARGE = make_tar(1, 20, MIB // 2)  # 20 MiB: longer than the first part that is asked for


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> None:
    origin.states_checksums = False
    for number, url in enumerate(URLS):
        origin.objects[url] = LARGE + bytes([number]) * 512


def read(cache: Cache, url: str) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


@pytest.mark.parametrize("fill", ["follow", "complete"])
def test_a_shard_larger_than_the_budget_costs_one_request(
    make_cache: Make, origin: MemoryOrigin, fill: str
) -> None:
    cache = make_cache(max_size="10MiB", fill=fill)
    with no_descriptor_left():
        assert [read(cache, url) for url in URLS] == [origin.objects[url] for url in URLS]
    assert [start for _, start, _ in origin.requests] == [0, 0, 0]
    assert origin.delivered == sum(map(len, origin.objects.values()))
    assert all(body.closed for body in origin.bodies)


def test_where_no_room_is_left_a_shard_costs_one_request(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    """The first shard is in use, so the second one cannot take its place."""
    cache = make_cache(max_size=len(LARGE) + MIB)
    with cache.open(URLS[0]) as held:
        assert len(held.read()) == len(origin.objects[URLS[0]])
        assert read(cache, URLS[1]) == origin.objects[URLS[1]]
    assert len([url for url, *_ in origin.requests if url == URLS[1]]) == 1


def test_a_shard_that_was_asked_for_ahead_costs_one_request(
    make_cache: Make, origin: MemoryOrigin
) -> None:
    cache = make_cache(max_size="10MiB", prefetch=2)
    rows = cache.url_opener({"url": url} for url in URLS)
    assert [row["stream"].read() for row in rows] == [origin.objects[url] for url in URLS]
    assert [start for _, start, _ in origin.requests] == [0, 0, 0]


def test_an_answer_that_nobody_reads_is_closed(make_cache: Make, origin: MemoryOrigin) -> None:
    cache = make_cache(max_size="10MiB", strict=True)
    with pytest.raises(CacheFullError), cache.pinned(URLS[0]):
        pass
    with pytest.raises(CacheFullError):
        cache.open(URLS[1])
    assert cache.prewarm([URLS[2]]).fetched == 0
    gc.collect()
    assert all(body.closed for body in origin.bodies)
