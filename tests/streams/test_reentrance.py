"""What the garbage collector closes in the midst of something else: nobody waits for himself.

The collector may run at any moment, in any thread, so also in one that holds a lock which what it
closes wants to take. Here it is made to run at such moments.
"""

from __future__ import annotations

import gc
import pkgutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.files import Breaker
from shardcache.layout import Layout
from shardcache.stats import counters as module
from shardcache.stats.counters import COUNTERS, Counters
from shardcache.stats.database import samples
from shardcache.stats.summary import Stats, summed
from shardcache.store.digest import BLOCK
from shardcache.store.root import make_root
from shardcache.urls import parse_url
from tests.origins.test_generic import Server
from tests.support.fakes import FakeClock, Fault, MemoryOrigin
from tests.support.storetools import PATIENCE, Parent, forked
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"


class Dropped:
    """Garbage that does something when it is collected: it refers to itself."""

    def __init__(self, last: Callable[[], object]) -> None:
        self.me = self
        self.last = last

    def __del__(self) -> None:
        self.last()


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


def collecting(function: Callable[..., Any]) -> Callable[..., Any]:
    def collect(*args: object, **kw: object) -> object:
        gc.collect()
        return function(*args, **kw)

    return collect


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return make_root(tmp_path / "cache", "test")


def total(layout: Layout) -> Stats:
    return summed(samples(layout))


@pytest.mark.parametrize("inside", ["bucket_of", "blank", "database.add"])
@pytest.mark.parametrize("what", ["hit", "add", "flush"])
def test_what_is_counted_in_the_midst_of_counting_is_counted_once(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, inside: str, what: str
) -> None:
    clock = FakeClock(now=1_795_348_800.0)
    counters = Counters(lambda: layout, clock)
    counters.hit(10, 0.001, clock.monotonic())
    counters.hit(10, 0.001, clock.monotonic())  # not written yet
    owner, _, name = f"shardcache.stats.counters.{inside}".rpartition(".")
    monkeypatch.setattr(f"{owner}.{name}", collecting(getattr(pkgutil.resolve_name(owner), name)))
    clock.sleep(60)
    Dropped(lambda: counters.add({"misses": 1, "bytes_opened": 7}, "network", 1.0))
    Dropped(lambda: counters.hit(3, 0.001, clock.monotonic(), 1))
    count = {
        "hit": lambda: counters.hit(100, 0.001, clock.monotonic()),
        "add": lambda: counters.add({"coalesced": 1, "bytes_opened": 100}, "lock", 1.0),
        "flush": counters.flush,
    }[what]
    ends(count)
    gc.collect()
    counters.flush()
    found = total(layout)
    assert (found.hits, found.coalesced, found.misses) == (3 + (what == "hit"), what == "add", 1)
    assert found.bytes_opened == 10 + 10 + 7 + 3 + (100 if what != "flush" else 0)
    told = dict(zip(COUNTERS, counters.snapshot(), strict=False))
    assert {name: told[name] for name in COUNTERS} == dict(found.counters)
    assert [found.waits[wait].count for wait in ("disk", "lock", "network")] == [
        found.hits,
        found.coalesced,
        1,
    ]


def test_a_stream_of_a_shard_in_flight_may_be_closed_while_its_process_counts(
    make_cache: Callable[..., Cache], origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
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
        counters = cache._here().counters
        monkeypatch.setattr(module, "bucket_of", collecting(module.bucket_of))
        ends(lambda: counters.hit(1, 0.001, 0.0))
        monkeypatch.undo()
    finally:
        more.set()
    cache.close()
    assert (cache.stats().hits, cache.stats().misses) == (1, 1)


def test_a_reader_may_say_that_the_disk_works_while_somebody_notes_that_it_failed() -> None:
    clock = FakeClock()
    breaker = Breaker(clock, threshold=1)
    clock.monotonic = collecting(clock.monotonic)  # type: ignore[method-assign]
    Dropped(breaker.succeeded)
    ends(breaker.failed)
    assert not breaker.closed
    clock.elapsed += 61
    Dropped(breaker.succeeded)
    ends(breaker.allows)
    ends(breaker.succeeded)
    assert breaker.closed


@pytest.mark.parametrize("read", [BLOCK // 2, 2 * BLOCK])
def test_a_stream_past_the_cache_may_be_closed_while_its_pool_of_connections_is_locked(
    tmp_path: Path, read: int
) -> None:
    """The lock of urllib3's pools is not reentrant."""
    data = make_tar(1, members=3, size=BLOCK)[: 2 * BLOCK]
    with Server() as server, Cache(tmp_path / "cache", max_size=BLOCK, min_free=0) as cache:
        server.files["/a.tar"] = data
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"{server.url}/a.tar"
            stream = cache.open(url)
            assert stream.read(read) == data[:read]
            origin: Any = cache._here().origins.of(parse_url(url))
            pool = origin._pools[""].connection_from_url(url).pool
            if read == len(data):  # what was read to its end is given back by its reader
                assert any(connection is not None for connection in pool.queue)
            dropped: list[object] = [stream]
            dropped.append(dropped)
            del stream, dropped

            def collect() -> None:
                with pool.mutex:
                    gc.collect()

            ends(collect)
            with cache.open(url) as again:
                assert again.read() == data
        finally:
            server.shutdown()
            thread.join()


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
