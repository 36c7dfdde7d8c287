"""Jobs that share a cache which cannot hold all: what each of them gets."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from shardcache.cache import Cache
from tests.support.disktools import disk, needs_mounts
from tests.support.shop import Shop
from tests.support.tars import make_tar

pytestmark = pytest.mark.locks_work


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, count=10)


def numbers(shop: Shop) -> list[int]:
    """Which shards are cached."""
    return sorted(shop.urls.index(url) for url in shop.entries())


def test_what_the_first_of_two_jobs_has_it_keeps_and_the_second_takes_over_in_time(
    shop: Shop,
) -> None:
    budget = 4 * shop.size
    with shop.worker(max_size=budget) as b:
        with shop.worker(max_size=budget, touch_interval=0) as a:
            for number in range(3):
                shop.expect(a, shop.urls[number])
            shop.expect(b, shop.urls[5])  # there is room
            shop.expect(b, shop.urls[6], stored=False)
            for number in range(3):  # the next epoch
                shop.expect(a, shop.urls[number])
            shop.expect(b, shop.urls[1])  # theirs is as good
        # A use does not say whose it was: what the first job used lately stays for a while.
        shop.expect(b, shop.urls[6], stored=False)
        assert numbers(shop) == [0, 1, 2, 5]
        for number in (0, 2):
            shop.use(shop.urls[number], time.time() - 90_000)
        for number in (6, 7):
            shop.expect(b, shop.urls[number])
        assert numbers(shop) == [1, 5, 6, 7]
    with shop.worker(max_size=budget) as c:  # nobody runs beside it: all is free to go
        for number in (0, 2, 3, 4):
            shop.expect(c, shop.urls[number])
        assert numbers(shop) == [0, 2, 3, 4]


def test_what_was_fetched_beforehand_for_a_job_to_come_stays_beside_a_running_one(
    shop: Shop,
) -> None:
    budget = 2 * shop.size
    with shop.worker(max_size=budget) as running:
        shop.expect(running, shop.urls[0])
        with Cache(shop.path, cache_local=True, min_free=0, max_size=budget) as cache:
            assert cache.prewarm([shop.urls[1]]).failed == 0
        shop.expect(running, shop.urls[2], stored=False)
        assert numbers(shop) == [0, 1]


def test_what_a_job_did_not_use_for_long_goes_all_the_same(shop: Shop) -> None:
    budget = 3 * shop.size
    with shop.worker(max_size=budget, protect_for="1h") as job:
        for number in range(3):
            shop.expect(job, shop.urls[number])
        shop.use(shop.urls[0], time.time() - 3590)
        shop.use(shop.urls[1], time.time() - 3610)
        # The job began before that, as far as it says itself.
        [session] = (shop.path / "v1/sessions").glob("*.session")
        os.utime(session, (time.time() - 9000,) * 2)
        shop.expect(job, shop.urls[3])
        assert numbers(shop) == [0, 2, 3]
        shop.expect(job, shop.urls[4], stored=False)


@pytest.mark.parametrize(("policy", "gone"), [("lru", 1), ("fifo", 0)])
def test_under_other_policies_a_job_evicts_its_own(shop: Shop, policy: str, gone: int) -> None:
    budget = 3 * shop.size
    with shop.worker(max_size=budget, policy=policy) as job:
        for number in range(3):
            shop.expect(job, shop.urls[number])
            time.sleep(0.02)  # fifo goes by the times that the filesystem gives
        now = time.time()
        for number, age in ((0, 10), (1, 30), (2, 20)):
            shop.use(shop.urls[number], now - age)
        shop.expect(job, shop.urls[3])
        assert numbers(shop) == sorted({0, 1, 2, 3} - {gone})


@pytest.mark.parametrize("shuffled", [False, True])
def test_half_of_the_data_gives_half_of_the_hits_in_whatever_order(
    shop: Shop, shuffled: bool
) -> None:
    chance, size = random.Random(7), 5 * shop.size
    with Cache(shop.path, cache_local=True, min_free=0, max_size=size) as cache:
        for _ in range(4):
            urls = chance.sample(shop.urls, 10) if shuffled else shop.urls
            for url in urls:
                with cache.open(url) as stream:
                    assert len(stream.read()) == shop.size
        found = cache.stats()
    assert (found.misses, found.hits, found.bypassed) == (5, 3 * 5, 4 * 5)


@needs_mounts
def test_what_is_to_stay_free_stays_free(tmp_path: Path) -> None:
    files = []
    for number in range(20):
        files.append(tmp_path / f"{number}.tar")
        files[-1].write_bytes(make_tar(number, members=10, size=50_000))
    with (
        disk(tmp_path / "ram", "size=16m") as ram,
        Cache(ram / "cache", cache_local=True, min_free="4MB") as cache,
    ):
        for file in files:
            with cache.open(str(file)) as stream:
                assert stream.read() == file.read_bytes()
            assert shutil.disk_usage(ram).free >= 4_000_000
        assert 5 < sum(str(file) in cache for file in files) < 16


# -- pins ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["working-set", "lru", "fifo"])
def test_what_is_pinned_stays_whatever_comes(shop: Shop, policy: str) -> None:
    budget = 2 * shop.size
    with Cache(shop.path, cache_local=True, min_free=0, max_size=budget, policy=policy) as cache:
        cache.pin(shop.urls[0])  # before it is there
        for url in shop.urls[:2]:
            cache.fetch(url)
        shop.use(shop.urls[0], 1_735_700_000.0)
        shop.use(shop.urls[1], 1_735_700_001.0)
        cache.fetch(shop.urls[2])
        assert numbers(shop) == [0, 2]
        assert cache.remove(shop.urls[0]) == (0, 1)
        assert cache.clean(everything=True, dry_run=True).kept == 1
        assert cache.clean(everything=True).kept == 1
        assert numbers(shop) == [0]
        assert cache.unpin(shop.urls[0]) is True and cache.unpin(shop.urls[0]) is False
        assert cache.remove(shop.urls[0]) == (shop.size, 0)


def test_a_pin_ends_with_its_time(shop: Shop) -> None:
    with Cache(shop.path, cache_local=True, min_free=0) as cache:
        for url in shop.urls[:2]:
            cache.fetch(url)
        cache.pin(shop.urls[0], 0.05)
        cache.pin(shop.urls[1], 3600)
        time.sleep(0.1)
        assert cache.clean(everything=True).kept == 1
        assert numbers(shop) == [1]
        assert len(list((shop.path / "v1/pins").iterdir())) == 1
