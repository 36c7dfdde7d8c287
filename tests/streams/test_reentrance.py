"""What the garbage collector closes in the midst of something else: nobody waits for himself.

The collector may run at any moment, in any thread, so also in one that holds a lock which what it
closes wants to take. Here it is made to run at such moments.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.store.digest import BLOCK
from tests.support.storetools import PATIENCE, Parent, forked, room
from tests.support.tars import make_tar
from tests.support.webservers import Files, running

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, members=3, size=BLOCK)


@pytest.fixture(autouse=True)
def _no_other_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def drop(stream: Any) -> None:
    """Leave it to the collector to close it."""
    dropped = [stream]
    dropped.append(dropped)


def ends(function: Callable[[], object]) -> None:
    """Call it in a thread, which must not wait for itself."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


class Collecting(dict[str, int]):
    """Counts during whose counting the garbage collector runs."""

    def items(self) -> Any:
        gc.collect()
        return super().items()


def test_a_stream_of_a_shard_in_flight_may_be_closed_while_its_process_counts(make_cache, origin):
    origin.objects[URL] = DATA
    more = origin.hold(3 * BLOCK + 5)
    cache = make_cache(connections=1, attempts=1)
    try:
        stream = cache.open(URL)
        assert stream.read(BLOCK)
        drop(stream)
        del stream
        ends(lambda: cache._here().counters.add(Collecting(hits=1)))
    finally:
        more.set()
    cache.close()
    assert (cache.stats().hits, cache.stats().misses) == (1, 1)


@pytest.mark.parametrize("read", [BLOCK // 2, 2 * BLOCK])
def test_a_stream_past_the_cache_may_be_closed_while_a_connection_is_made(tmp_path, read):
    """Its own connection is then ended, or kept for the next request."""
    server, data = Files(), DATA[: 2 * BLOCK]
    server.files["/a.tar"] = data
    cache = Cache(tmp_path / "cache", max_size=BLOCK, min_free=0)
    with running(server), cache:
        url = f"{server.url}/a.tar"
        stream = cache.open(url)
        assert stream.read(read) == data[:read]
        drop(stream)
        del stream
        ends(gc.collect)
        with cache.open(url) as again:
            assert again.read() == data


def test_a_stream_that_is_dropped_at_the_end_of_a_part_leaves_a_connection_that_works(tmp_path):
    """The collector finalises all of a cycle, so it must not find the connection there."""
    server = Files()
    server.files = {"/small.tar": DATA[: 2 * BLOCK], "/big.tar": DATA * 2}
    cache = Cache(tmp_path / "cache", max_size="4MiB", min_free=0, part_size="1MiB", attempts=1)
    with running(server), cache:
        assert cache.open(f"{server.url}/small.tar").read() == DATA[: 2 * BLOCK]
        for _ in range(3):
            stream = cache.open(f"{server.url}/big.tar")
            assert stream.read(BLOCK) == DATA[:BLOCK]
            drop(stream)
            del stream
            gc.collect()
            with cache.open(f"{server.url}/big.tar") as again:
                assert again.read() == DATA * 2


def test_what_a_parent_opened_is_not_counted_by_the_child_that_closes_it_too(
    make_cache, origin, tmp_path
):
    big = "s3://lab/big.tar"
    origin.objects.update({URL: DATA, big: DATA * 2})
    cache = make_cache(connections=1, attempts=1, max_size=room(tmp_path, len(DATA)))
    streamed = cache.open(big)
    assert streamed.read(BLOCK)
    more = origin.hold(3 * BLOCK + 5)
    followed = cache.open(URL)
    assert followed.read(BLOCK)

    assert cache.stats().opens == 1

    def work(parent: Parent) -> None:
        followed.close()
        streamed.close()
        parent.say(cache.stats().opens)

    try:
        with forked(work) as child:
            assert child.hear() == 1
    finally:
        more.set()
    for stream in (followed, streamed):
        stream.read()
        stream.close()
    cache.close()
    found = cache.stats()
    assert (found.opens, found.misses, found.bypassed) == (2, 1, 1)
    assert found.bytes_bypassed == 2 * len(DATA)
