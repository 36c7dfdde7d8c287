"""Cleaning beside a job: what it removes, when, and that nobody notices."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.layout import Layout
from shardcache.space import clean as module
from tests.support.shop import Shop
from tests.support.storetools import begin, fill, metadata_for, payload, wait_until

pytestmark = pytest.mark.locks_work
LONG_AGO = 1_767_225_600.0


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path, count=5)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST", -1.0)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Who cleaned."""
    found: list[str] = []
    real = module.clean

    def noted(*args, **kw):
        found.append(threading.current_thread().name)
        return real(*args, **kw)

    monkeypatch.setattr(module, "clean", noted)
    yield found


def settled() -> None:
    wait_until(lambda: "shardcache-clean" not in {t.name for t in threading.enumerate()})


def opened(shop: Shop, **options) -> Cache:
    return Cache(shop.path, cache_local=True, min_free=0, **options)


@pytest.fixture
def full(shop: Shop) -> Shop:
    """As if a job that is over had used every shard; before anything is cleaned."""
    with opened(shop) as cache:
        for number, url in enumerate(shop.urls):
            cache.fetch(url)
            shop.use(url, LONG_AGO + number)
    return shop


def read(cache: Cache, url: str) -> None:
    with cache.open(url) as stream:
        stream.read()


def orphan(shop: Shop) -> Path:
    """A partial that nobody resumed for long."""
    data = payload(100_000)
    partial = begin(Layout.of_root(shop.path), metadata_for("s3://lab/orphan.tar", data))
    fill(partial, data)
    partial.close()
    for path in partial.path.iterdir():
        os.utime(path, (LONG_AGO, LONG_AGO))
    return partial.path


def test_what_a_dead_process_left_goes_beside_a_running_job(full: Shop, at_once, rounds) -> None:
    path = orphan(full)
    with opened(full) as cache:
        read(cache, full.urls[0])
        wait_until(lambda: not path.exists())
        settled()
    assert rounds == ["shardcache-clean"]


def test_a_cache_is_brought_a_little_below_its_limit(full: Shop, at_once, rounds) -> None:
    with opened(full, max_size=5 * full.size) as cache:
        read(cache, full.urls[0])
        wait_until(lambda: len(full.entries()) == 4)
        settled()
    assert set(full.entries()) == {full.urls[n] for n in (0, 2, 3, 4)}


def test_of_all_processes_of_a_node_one_cleans(full: Shop, at_once, rounds) -> None:
    with opened(full) as first, opened(full) as second:
        read(first, full.urls[0])
        wait_until(lambda: bool(rounds))
        settled()
        read(second, full.urls[0])
        settled()
        assert len(rounds) == 1
        stamp = Layout.of_root(full.path).named_lock("clean")
        os.utime(stamp, (time.time() - module.INTERVAL - 1,) * 2)
        with opened(full) as third:
            read(third, full.urls[0])
            wait_until(lambda: len(rounds) == 2)
            settled()
