"""What the garbage collector closes in the midst of something else: nobody waits for himself.

The collector may run at any moment, in any thread, so also in one that holds a lock which what it
closes wants to take. Here it is made to run at such moments.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.store.digest import BLOCK
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import PATIENCE, Parent, forked
from tests.support.tars import make_tar
from tests.support.webservers import Files, running

URL = "s3://lab/train-0000.tar"


@pytest.fixture(autouse=True)
def _no_other_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ends(function: Callable[[], object]) -> None:
    """Call it in a thread, which must not wait for itself."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(PATIENCE / 4)
    assert not thread.is_alive()


class Collecting(dict[str, int]):
    """Counts during whose counting the garbage collector runs."""

    def items(self) -> Any:
        gc.collect()
        return super().items()


def test_a_stream_of_a_shard_in_flight_may_be_closed_while_its_process_counts(
    make_cache: Callable[..., Cache], origin: MemoryOrigin
) -> None:
    origin.objects[URL] = make_tar(1, members=3, size=BLOCK)
    more = threading.Event()
    origin.faults.append(Fault(after=3 * BLOCK + 5, wait=more))
    cache = make_cache(fill="follow", connections=1, attempts=1)
    try:
        stream = cache.open(URL)
        assert stream.read(BLOCK)
        dropped = [stream]
        dropped.append(dropped)
        del stream, dropped  # it is closed when the collector finds it
        ends(lambda: cache._here().counters.add(Collecting(hits=1)))
    finally:
        more.set()
    cache.close()
    assert (cache.stats().hits, cache.stats().misses) == (1, 1)


@pytest.mark.parametrize("read", [BLOCK // 2, 2 * BLOCK])
def test_a_stream_past_the_cache_may_be_closed_while_a_connection_is_made(
    tmp_path: Path, read: int
) -> None:
    """Its own connection is then ended, or kept for the next request."""
    data = make_tar(1, members=3, size=BLOCK)[: 2 * BLOCK]
    server = Files()
    server.files["/a.tar"] = data
    cache = Cache(tmp_path / "cache", max_size=BLOCK, min_free=0)
    with running(server), cache:
        url = f"{server.url}/a.tar"
        stream = cache.open(url)
        assert stream.read(read) == data[:read]
        dropped: list[object] = [stream]
        dropped.append(dropped)
        del stream, dropped

        ends(gc.collect)
        with cache.open(url) as again:
            assert again.read() == data


def test_what_a_parent_opened_is_not_counted_by_the_child_that_closes_it_too(
    make_cache: Callable[..., Cache], origin: MemoryOrigin
) -> None:
    data = make_tar(1, members=3, size=BLOCK)
    origin.objects.update({URL: data, "s3://lab/big.tar": data * 2})
    cache = make_cache(fill="follow", connections=1, attempts=1, max_size=len(data) + 1)
    streamed = cache.open("s3://lab/big.tar")
    assert streamed.read(BLOCK)
    more = threading.Event()
    origin.faults.append(Fault(after=3 * BLOCK + 5, wait=more))
    followed = cache.open(URL)
    assert followed.read(BLOCK)
    before = cache.stats()

    def work(parent: Parent) -> None:
        followed.close()
        streamed.close()
        parent.say(cache.stats() == before)

    try:
        with forked(work) as child:
            assert child.hear()
    finally:
        more.set()
    for stream in (followed, streamed):
        stream.read()
        stream.close()
    cache.close()
    found = cache.stats()
    assert (found.opens, found.misses, found.bypassed) == (2, 1, 1)
    assert found.bytes_bypassed == 2 * len(data)
