"""What several ranks link is one file: it counts once, and goes when its last link goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.units import format_bytes
from tests.support.clitools import run_process
from tests.support.shop import Shop
from tests.support.storetools import Child, Parent, crowd


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, count=5)


def rank(parent: Parent, number: int, shop: Shop) -> None:
    """A rank with a budget of 3.4 shards, which reads what it is told until it is told nothing."""
    os.environ |= {"SHARDCACHE_JOB": "17", "SHARDCACHE_RANK": str(number)}
    size = int(3.4 * shop.size)
    with Cache(shop.path, cache_local=True, min_free=0, isolation="rank", max_size=size) as cache:
        while (url := parent.hear()) is not None:
            with cache.open(url) as stream:
                read = len(stream.read())
            parent.say((read, url in cache))
    parent.say()


def ended(ranks: list[Child]) -> None:
    for each in ranks:
        each.ask(None)


def test_four_ranks_that_link_three_shards_fetch_each_once(shop: Shop) -> None:
    with crowd(4, rank, shop) as ranks:
        for _ in range(2):
            for url in shop.urls[:3]:
                for each in ranks:
                    assert each.ask(url) == (shop.size, True)
        assert ranks[3].ask(shop.urls[3]) == (shop.size, False)  # there is no room for a fourth
        ended(ranks)
    with Cache(shop.path) as cache:
        found = cache.stats()
        assert (found.fetches, found.linked, found.hits, found.bypassed) == (3, 9, 12, 1)
        assert len({entry.data.stat().st_ino for entry in cache.entries()}) == 3
    code, said, _ = run_process("ls", "--json", directory=shop.path)
    found = json.loads(said)
    assert (code, len(found["shards"])) == (0, 12)
    assert (found["summary"]["shards"], found["summary"]["bytes"]) == (3, 3 * shop.size)
    assert f"3 shards, {format_bytes(3 * shop.size)}" in run_process("ls", directory=shop.path)[1]


def test_a_shard_goes_with_all_its_links(shop: Shop) -> None:
    with crowd(4, rank, shop) as ranks:
        for url in shop.urls[:3]:
            for each in ranks:
                each.ask(url)
        ended(ranks)
    for number, entries in enumerate(shop.links()[url] for url in shop.urls[:3]):
        for each in entries:  # the last use of a file is that of its latest link
            os.utime(each.path / "meta.json", (1.75e9, 1.75e9 - 1000 * number))
        os.utime(entries[0].path / "meta.json", (1.75e9, 1.75e9 + number))
    with Cache(shop.path, cache_local=True, min_free=0, max_size=int(3.4 * shop.size)) as cache:
        cache.fetch(shop.urls[3])
        assert [len(shop.links().get(url, [])) for url in shop.urls[:4]] == [0, 4, 4, 1]
        with cache.open(shop.urls[1]) as stream:  # reads the link of a rank
            assert stream.read(1)
            report = cache.clean(everything=True)
        assert (len(report.removed), report.freed, report.kept) == (2, 2 * shop.size, 1)
        assert cache.clean(max_size=shop.size).kept_bytes == shop.size
