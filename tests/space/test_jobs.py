"""Jobs that share a cache without room for all their shards."""

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from tests.support.caches import read
from tests.support.clitools import run_process
from tests.support.shop import Shop
from tests.support.storetools import Parent, crowd, forked


def numbers(shop: Shop) -> list[int]:
    return sorted(shop.urls.index(url) for url in shop.entries())


#: The reports of a job: whether the bytes of a shard are right, and whether it is cached.
STORED, STREAMED = (True, True), (True, False)


def job(parent: Parent, shop: Shop, options: dict[str, Any]) -> None:
    """Read each shard that the parent sends, until it sends None."""
    with shop.cache(**options) as cache:
        while (url := parent.hear()) is not None:
            parent.say((read(cache, url) == Path(url).read_bytes(), url in cache))
    parent.say()


def test_a_job_keeps_its_shards_until_they_have_been_unused_for_a_day(shop):
    budget = shop.room(4)
    with forked(job, shop, {"max_size": budget}) as b:
        with forked(job, shop, {"max_size": budget}) as a:
            for number in range(3):
                assert a.ask(shop.urls[number]) == STORED
            assert b.ask(shop.urls[5]) == STORED  # there is room
            assert b.ask(shop.urls[6]) == STREAMED
            for number in range(3):  # the next epoch
                assert a.ask(shop.urls[number]) == STORED
            assert b.ask(shop.urls[1]) == STORED  # cached by the first job
        # The first job has ended, but its recent uses still count.
        assert b.ask(shop.urls[6]) == STREAMED
        assert numbers(shop) == [0, 1, 2, 5]
        for number in (0, 2):
            shop.use(shop.urls[number], time.time() - 90_000)
        for number in (6, 7):
            assert b.ask(shop.urls[number]) == STORED
        assert numbers(shop) == [1, 5, 6, 7]
    with forked(job, shop, {"max_size": budget}) as c:  # no other job runs
        for number in (0, 2, 3, 4):
            assert c.ask(shop.urls[number]) == STORED
        assert numbers(shop) == [0, 2, 3, 4]


def test_jobs_with_a_smaller_limit_evict_two_shards_for_each_new_one(tmp_path):
    shop = Shop(tmp_path, count=40)
    with shop.cache() as cache:
        cache.prewarm(shop.urls[:30])
    counts, options = [30], {"max_size": shop.room(12)}
    with forked(job, shop, options) as a, forked(job, shop, options) as b:
        for each, url in zip(itertools.cycle((a, b)), shop.urls[30:], strict=False):
            assert each.ask(url) == STORED
            counts.append(len(numbers(shop)))
    assert counts == [30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20]


@pytest.mark.parametrize("policy", ["working-set", "lru"])
def test_a_pinned_shard_stays_until_its_pin_expires(shop, policy):
    budget = shop.room(2)
    with shop.cache(max_size=budget, policy=policy) as cache:
        cache.pin(shop.urls[0], 3600)
        for url in shop.urls[:2]:
            cache.fetch(url)
        shop.use(shop.urls[0], 1_735_700_000.0)
        shop.use(shop.urls[1], 1_735_700_001.0)
        cache.fetch(shop.urls[2])
        assert numbers(shop) == [0, 2]
        cache.pin(shop.urls[2], 0.001)
        time.sleep(0.002)
        for dry_run in (True, False):
            assert cache.clean(everything=True, dry_run=dry_run).kept == 1
        assert numbers(shop) == [0] and len(list((shop.path / "v1/pins").iterdir())) == 1
        assert cache.unpin(shop.urls[0]) and not cache.unpin(shop.urls[0])


def rank(parent: Parent, number: int, shop: Shop) -> None:
    """A rank with a budget of 3.4 shards."""
    os.environ |= {"SHARDCACHE_JOB": "17", "SHARDCACHE_RANK": str(number)}
    job(parent, shop, {"isolation": "rank", "max_size": shop.room(3.4, links=4)})


def test_ranks_link_a_shard_and_all_links_are_evicted_together(shop):
    with crowd(4, rank, shop) as ranks:
        for url in 2 * shop.urls[:3]:
            for each in ranks:
                assert each.ask(url) == STORED
        assert ranks[3].ask(shop.urls[3]) == STREAMED  # no room
        for each in ranks:
            each.ask(None)
    with Cache(shop.path) as cache:
        found = cache.stats()
        assert (found.fetches, found.linked, found.hits, found.streamed) == (3, 9, 12, 1)
    summary = json.loads(run_process("ls", "--json", directory=shop.path)[1])["summary"]
    assert (summary["shards"], summary["bytes"]) == (3, 3 * shop.size)
    for number, entries in enumerate(shop.links()[url] for url in shop.urls[:3]):
        for entry in entries:  # the latest use of any link counts
            os.utime(entry.path / "meta.json", (1.75e9, 1.75e9 - 1000 * number))
        os.utime(entries[0].path / "meta.json", (1.75e9, 1.75e9 + number))
    with shop.cache(max_size=shop.room(3.4, links=4)) as cache:
        cache.fetch(shop.urls[3])
        assert [len(shop.links().get(url, [])) for url in shop.urls[:4]] == [0, 4, 4, 1]
        with cache.open(shop.urls[1]) as stream:  # reads the link of a rank
            assert stream.read(1)
            assert cache.remove(shop.urls[1]) == (0, 1)
            report = cache.clean(everything=True)
        freed = shop.room(1, links=4) + shop.room(1)
        assert (len(report.removed), report.freed, report.kept) == (2, freed, 1)
