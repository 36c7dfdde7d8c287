"""Counters are exact, are written once a second, and never cause an error."""

import errno
import itertools
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardcache.layout import Layout
from shardcache.ranks import Ranks
from shardcache.stats import counters as module
from shardcache.stats.counters import BUCKETS, Counters, bucket_range
from shardcache.stats.database import add, compact, samples
from shardcache.stats.summary import Waits, by_hour, by_rank, summed
from tests.support.fakes import FakeClock
from tests.support.storetools import forked, needs_root, no_descriptor_left, refusing

HOUR = 3600.0
#: Begins a minute and an hour.
NOON = 1_795_348_800.0


@pytest.fixture
def clock(monkeypatch):
    return FakeClock(monkeypatch, now=NOON)


@pytest.fixture
def make(layout, clock):
    return lambda rank=0: Counters(lambda: layout, Ranks(rank=rank, source="explicit"))


def total(layout, **options):
    return summed(samples(layout, **options))


def bucket_of(seconds):
    """Return the bucket that counts a wait."""
    counters = Counters(lambda: Layout(Path("/nowhere")), allowed=lambda: False)
    counters.opened("hit", seconds)
    return next(int(name.removeprefix("disk:")) for name in counters.snapshot() if ":" in name)


def test_waits_are_counted_in_buckets_without_a_gap():
    ranges = [bucket_range(bucket) for bucket in range(BUCKETS)]
    assert ranges[0][0] == 0.0
    assert all(one[1] == two[0] for one, two in itertools.pairwise(ranges))
    for microseconds in (0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 12_345, 10**6, 10**9):
        low, high = bucket_range(bucket_of(microseconds / 1e6 + 1e-9))
        assert low <= microseconds / 1e6 + 1e-9 < high <= max(2e-6, 1.5 * low)
    assert bucket_of(1e9) == BUCKETS - 1  # thirty years
    waits = Waits({bucket_of(0.001): 98, bucket_of(1.0): 2})
    assert waits.count == 100 and Waits({}).percentile(0.5) is None
    assert 0.001 < waits.percentile(0.98) <= 0.0015 and 1.0 < waits.percentile(0.99) <= 1.5


def test_threads_lose_nothing(make, layout):
    counters = make()

    def count(_):
        for _ in range(5000):
            counters.opened("hit", 0.0)
            counters.read(3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    counters.flush()
    assert (total(layout).hits, total(layout).bytes_opened) == (20_000, 60_000)


def test_a_locked_database_is_written_later(make, layout, clock):
    make().add({"retries": 1})
    counters, other = make(), sqlite3.connect(layout.stats, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for _ in range(3):
        counters.opened("hit", 0.0)
        clock.sleep(60)
    assert total(layout).hits == 0 and counters.snapshot()["hits"] == 3
    other.execute("ROLLBACK")
    counters.flush()
    assert total(layout).hits == 3
    other.close()


@pytest.mark.parametrize("how", ["full", "gone"])
def test_counts_survive_a_failing_disk(make, layout, tmp_path, monkeypatch, how):
    with no_descriptor_left(), monkeypatch.context() as fault:
        if how == "full":
            refuse = refusing(errno.ENOSPC, real=None)
            fault.setattr("shardcache.stats.database.write_new", refuse)
        else:
            layout.base.rename(tmp_path / "elsewhere")
        counters = make()
        counters.opened("hit", 0.0)
        counters.flush()
        assert layout.base.exists() is (how != "gone")
    if how == "gone":
        (tmp_path / "elsewhere").rename(layout.base)
    counters.flush()
    assert total(layout).hits == 1


def test_the_database_can_be_read_while_it_is_created(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        for number in range(200):
            layout = Layout.of_root(tmp_path / str(number))
            layout.make()
            adding = pool.submit(add, layout, -1, 60, {"hits": 1}, 5.0)
            while not adding.done():
                samples(layout)
            adding.result()
            assert total(layout).hits == 1


def test_a_damaged_database_is_replaced(make, layout, clock):
    layout.stats.write_bytes(b"no database" * 1000)
    counters = make()
    for _ in range(2):
        counters.add({"misses": 1})
        clock.sleep(1)
    assert total(layout).misses == 2


@needs_root
def test_nothing_is_written_into_another_users_cache(layout, make):
    os.chown(layout.base, 12345, 12345)
    make().add({"evicted_asked": 1})
    assert not layout.stats.exists()


def test_nodes_that_share_a_directory_share_no_database(layout, tmp_path):
    (tmp_path / "node").mkdir()
    shared = Layout(layout.base, local=tmp_path / "node", grace=3600.0)
    Counters(lambda: shared).add({"misses": 1})
    assert (tmp_path / "node/stats.db").exists() and not layout.stats.exists()


def test_a_forked_child_inherits_no_connection(make, layout, monkeypatch):
    monkeypatch.setattr(module, "_INTERVAL", 0.0)
    ended = threading.Event()

    def count():
        counters = make()
        while not ended.is_set():
            counters.opened("hit", 0.0)

    def look(parent):
        names = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        parent.say([name for name in names if Path(name).name.startswith("stats.db")])

    with ThreadPoolExecutor(1) as pool:
        pool.submit(count)
        try:
            for _ in range(10):
                with forked(look) as child:
                    assert child.hear() == []
        finally:
            ended.set()


def test_minutes_are_compacted_to_hours_and_expire(make, layout, clock):
    for rank in (0, 1):  # two ranks, three hours
        counters = make(rank)
        clock.now = NOON - clock.elapsed
        for _ in range(180):
            counters.opened("hit", 0.001)
            counters.opened("fetched", 0.5)
            counters.flush()
            clock.sleep(60)
    day, count = total(layout), len(samples(layout))
    ranks, hours = by_rank(samples(layout)), by_hour(samples(layout))
    assert (day.hits, count, list(ranks)) == (360, 360, ["0", "1"])
    assert total(layout, since=NOON + HOUR).hits == 240
    for _ in range(2):
        compact(layout, NOON + 4 * HOUR)
        assert {sample.seconds for sample in samples(layout)} == {60, 3600}
        assert by_rank(samples(layout)) == ranks and by_hour(samples(layout)) == hours
    compact(layout, NOON + 9 * HOUR)
    assert len(samples(layout)) == 6 and total(layout) == day
    for days in (31, 62):  # one row holds all expired counts
        compact(layout, NOON + days * 24 * HOUR)
        assert samples(layout) == [] and len(samples(layout, ever=True)) == 1
        assert total(layout, ever=True).counters == day.counters
