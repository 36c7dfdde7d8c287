"""Wall clocks that are wrong, differ and are set: right bytes, bounded waits, sane evictions.

Nothing but the order of evictions, and ages that people ask for, may depend on them.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.layout import Layout
from tests.support.caches import held_elsewhere
from tests.support.shop import Shop
from tests.support.storetools import PATIENCE, wait_until
from tests.support.workers import YEAR, Clock

AHEAD, BEHIND = 10 * YEAR, -10 * YEAR


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    """Of worker processes; that of the tests is right."""
    return Clock(tmp_path / "clock")


@pytest.mark.parametrize("offset", [AHEAD, BEHIND], ids=["2036", "2016"])
def test_a_wait_lasts_as_long_as_it_should_when_the_clock_is_set(shop, clock, offset):
    with Cache(shop.path, cache_local=True, min_free=0) as cache:
        cache._here().coordinator()
        lock = held_elsewhere(cache, shop.urls[0], time.time())
        with shop.worker(clock, lock_timeout=1.5, stale_after=60) as waiter:
            waiter.tell("fetch", shop.urls[0])
            sessions = Layout.of_root(shop.path).sessions
            wait_until(lambda: list(sessions.glob("*.wait")))
            clock.set(offset)
            answer, seconds = waiter.hear()
        lock.release()
    assert answer["error"] == "LockTimeoutError"
    assert "process 4711 on node-7" in answer["message"]
    assert 1.5 <= seconds < PATIENCE


def test_what_was_used_in_the_future_goes_first_and_makes_room(shop: Shop, clock: Clock) -> None:
    """A node was ten years ahead for an hour. What it used then must not stay for ten years."""
    budget = 4 * shop.size
    clock.set(AHEAD)
    with shop.worker(clock, max_size=budget) as wrong:
        for url in shop.urls[:3]:
            shop.expect(wrong, url)
    with shop.worker(max_size=budget) as right:
        shop.expect(right, shop.urls[3])
        assert len(shop.entries()) == 4  # nothing goes that need not
        for count, url in enumerate(shop.urls[4:7], 1):
            shop.expect(right, url)
            kept = shop.entries()
            assert len(kept) == 4
            assert set(kept) == {*shop.urls[count:3], *shop.urls[3 : 4 + count]}
        # The rest was used by a running job: as ever, the next is streamed.
        shop.expect(right, shop.urls[7], stored=False)


def test_nothing_in_use_goes_whatever_the_clock_says(shop: Shop, clock: Clock) -> None:
    with shop.worker() as reader, shop.worker(clock, max_size=2 * shop.size) as other:
        name = reader.ask("hold", shop.urls[0])
        for offset in (AHEAD, BEHIND, -int(time.time())):
            clock.set(offset)
            other.ask("clean", {"max_age": "1s"})
            other.ask("clean", {"everything": True})
            for url in shop.urls[1:4]:
                other.ask("read", url)
            assert Path(name).exists()
