"""Many processes on one node with a real server: economy, and stopped processes."""

import functools
import os
import signal

import pytest

from shardcache import Cache
from tests.support.storetools import BLOCK, crowd, forked, together, wait_until
from tests.support.tars import make_tar

SHARD = make_tar(5, members=8, size=2 * BLOCK)  # 32 MiB
STORED = [True, True]  # the right bytes, from a file


@pytest.fixture
def url(put):
    return put("a.tar", SHARD)


def written(layout):
    """Return the bytes that the running download has written."""
    return max((file.stat().st_blocks * 512 for file in layout.partials.glob("*/*.tar")), default=0)


def reader(parent, url, **options):
    """Read a shard when the parent sends a message."""
    with Cache(**options) as cache:
        parent.hear()
        with cache.open(url) as stream:
            parent.say([stream.read() == SHARD, os.path.exists(stream.name)])
        parent.hear()


def test_eight_processes_and_four_cold_shards_cost_four_object_fetches(put, proxy):
    data = [make_tar(n, members=4, size=BLOCK) for n in range(4)]
    shards = {put(f"{n}.tar", each): each for n, each in enumerate(data)}

    def read_all(number):
        with Cache() as cache:
            return [cache.open(url).read() for url in shards] == data

    assert all(together(8, read_all))
    assert proxy.fetches() == {url.removeprefix("s3://"): 1 for url in shards}
    received = proxy.received()
    assert received == sum(map(len, data))
    found = Cache().stats()
    assert (found.opens, found.misses, found.fetches, found.failed) == (32, 4, 4, 0)
    assert found.hits + found.coalesced == 28
    assert (found.bytes_origin, found.bytes_opened) == (received, 8 * received)
    assert found.bytes_saved == 7 * received
    assert sum(waits.count for waits in found.waits.values()) == 32


def test_others_resume_the_download_of_a_killed_process(url, proxy, layout):
    with crowd(4, lambda parent, number: reader(parent, url)) as (victim, *others):
        proxy.pause(len(SHARD) // 4)  # in each of two parts
        victim.tell()
        wait_until(lambda: written(layout) >= len(SHARD) // 2 - 4 * BLOCK)
        for other in others:
            other.tell()
        wait_until(lambda: len(list(layout.sessions.glob("*.session"))) == 4)
        victim.kill()
        proxy.resume()
        assert [other.hear() for other in others] == [STORED] * 3
    assert proxy.received() < 1.3 * len(SHARD)
    assert list(layout.partials.iterdir()) == []


@pytest.mark.parametrize(("max_size", "requests"), [("10GB", 2), ("1MB", 1)])
def test_a_hanging_process_counts_its_bytes(url, proxy, max_size, requests):
    proxy.pause(2 * BLOCK)  # in each part, or in the stream
    other = functools.partial(reader, max_size=max_size)
    with forked(other, url) as child, Cache() as cache:
        child.tell()
        wait_until(lambda: requests * 2 * BLOCK <= proxy.received() == cache.stats().bytes_origin)
        if requests == 2:
            cache.open(url).close()
            assert (cache.stats().coalesced, cache.stats().misses) == (1, 0)


def test_a_stopped_holder_is_passed_by_and_wakes_harmlessly(url, proxy, layout):
    impatient = functools.partial(reader, stale_after=1)
    with forked(reader, url) as holder, forked(impatient, url) as other:
        proxy.pause(len(SHARD) // 4)
        holder.tell()
        wait_until(lambda: written(layout) >= BLOCK)
        holder.kill(signal.SIGSTOP)
        proxy.resume()
        assert other.ask() == STORED
        holder.kill(signal.SIGCONT)
        assert holder.hear() == STORED
    (entry,) = Cache().entries()
    assert entry.data.read_bytes() == SHARD
    assert list(layout.partials.iterdir()) == []
