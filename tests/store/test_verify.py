"""`verify`: finding damage, repairing, and running during jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.store import digest as resources
from shardcache.store.verify import EntryState, VerifyStatus
from tests.support.caches import read
from tests.support.shop import Shop
from tests.support.storetools import damage


@pytest.fixture
def shop(shop: Shop) -> Shop:
    """Shards that are all cached."""
    with shop.cache() as cache:
        cache.prewarm(shop.urls)
    return shop


def test_linked_entries_are_read_once_and_set_aside_together(shop, monkeypatch):
    reads, linked, url = [], [], shop.urls[0]
    for rank in range(3):  # each links the entry of the node
        monkeypatch.setenv("SHARDCACHE_RANK", str(rank))
        linked.append(shop.cache(isolation="rank"))
        linked[rank].fetch(url)
    real = resources.read_blocks
    monkeypatch.setattr(resources, "read_blocks", lambda fd: reads.append(fd) or real(fd))
    assert [finding.state for finding in linked[0].verify()] == [EntryState.OK] * (8 + 3)
    assert len(reads) == 8
    with open(shop.entries()[url].data, "r+b") as file:
        file.write(b"x")
    for finding in linked[0].verify(repair=True):
        # At the first finding, all links have been set aside.
        if finding.state is EntryState.DAMAGED:
            assert finding.set_aside
            assert read(linked[2], url) == Path(url).read_bytes()
    for cache in linked:
        assert read(cache, url) == Path(url).read_bytes()
        cache.close()


def test_an_entry_is_pinned_while_it_is_read(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    url, real, stayed = shop.urls[0], resources.read_blocks, []

    def read_blocks(fd: int) -> Iterator[memoryview]:
        yield from real(fd)
        stayed.append(other.remove(url)[1])

    monkeypatch.setattr(resources, "read_blocks", read_blocks)
    with shop.cache() as other, shop.cache() as cache:
        (finding,) = cache.verify(url)
        assert (finding.state, stayed) == (EntryState.OK, [1])
        assert other.remove(url) == (shop.size, 0)


def test_entries_that_are_removed_during_verify_are_skipped(shop: Shop) -> None:
    status = VerifyStatus()
    with shop.cache() as cache, shop.cache() as other:
        findings = cache.verify(status=status, repair=True)
        other.remove(shop.urls[1:3])  # listed, but not yet read
        assert [found.state for found in findings] == [EntryState.OK] * 6
        assert status.done == status.shards


def test_a_cache_with_the_name_of_a_directory_of_its_own_is_repaired(shop, tmp_path):
    with Cache(tmp_path / "ranks", cache_local=True) as cache:
        damage(cache.fetch(shop.urls[0]).data)
        assert [finding.set_aside for finding in cache.verify(repair=True)] == [True]
