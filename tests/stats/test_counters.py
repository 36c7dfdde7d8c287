"""Counters are exact, are written once a second, and never cause an error."""

import contextlib
import errno
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardcache.ranks import Ranks
from shardcache.stats import counters as module
from shardcache.stats.counters import Counters
from shardcache.stats.database import add, expire, samples
from shardcache.stats.summary import by_rank, summed
from tests.support.disktools import needs_root
from tests.support.storetools import forked, no_descriptor_left, refusing

HOUR = 3600.0
#: Begins a minute and an hour.
NOON = 1_795_348_800.0


@pytest.fixture
def make(layout, clock):
    return lambda rank=0: Counters(lambda: layout, Ranks(rank=rank, launcher="explicit"))


def total(layout, **options):
    return summed(samples(layout, **options))


def test_threads_lose_nothing(make, layout):
    counters = make()

    def count(_):
        for _ in range(5000):
            counters.opened("hit", 0.0)
            counters.read(3)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, range(4)))
    counters.opened("hit", 0.0, tier=3)  # the option takes any number of tiers
    counters.flush()
    found = total(layout)
    assert (found.hits, found.bytes_opened, found.hits_tier_3) == (20_001, 60_000, 1)


def test_an_event_amid_a_write_lets_no_other_thread_write(layout, clock):
    """The garbage collector may close a stream then, and the disk may have failed."""
    steps, is_well = [], True

    def where():
        nonlocal is_well
        if not steps:
            steps.append("")
            clock.sleep(10)
            is_well = False
            counters.add({"retries": 1})
            clock.sleep(10)
            is_well = True
            thread = threading.Thread(target=counters.add, args=({"retries": 1},))
            thread.start()
            thread.join()
        return layout

    counters = Counters(where, allowed=lambda: is_well)
    counters.add({"retries": 1})
    counters.flush()
    assert total(layout).retries == 3


@contextlib.contextmanager
def failing(how, layout, monkeypatch):
    """Let the database of a cache, or of the run, fail."""
    match how:
        case "full disk":
            with monkeypatch.context() as fault:
                refuse = refusing(errno.ENOSPC, real=None)
                fault.setattr("shardcache.stats.database.write_new", refuse)
                yield
        case "no directory":
            elsewhere = layout.base.rename(layout.base.with_name("elsewhere"))
            yield
            assert not layout.base.exists()
            elsewhere.rename(layout.base)
        case "damaged":
            layout.stats.write_bytes(b"no database" * 1000)
            yield
        case "locked":
            add(layout, -1, NOON, {"retries": 1}, 5.0)
            with contextlib.closing(sqlite3.connect(layout.stats, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                yield
                assert total(layout).hits == 0
        case "ended run":
            run = 1.0, f"{layout.base}/gone/notes"
            monkeypatch.setattr("shardcache.stats.counters.run_of_this_process", lambda: run)
            yield


@pytest.mark.parametrize("how", ["full disk", "no directory", "damaged", "locked", "ended run"])
def test_no_count_is_lost_while_the_database_fails(make, layout, clock, monkeypatch, how):
    with no_descriptor_left(), failing(how, layout, monkeypatch):
        counters = make()
        for _ in range(2):
            counters.opened("hit", 0.0)
            clock.sleep(60)
    counters.flush()
    assert total(layout).hits == counters.snapshot()["hits"] == 2


def test_the_database_can_be_read_while_it_is_created(layout):
    with ThreadPoolExecutor(1) as pool:
        for _ in range(200):
            layout.stats.unlink(missing_ok=True)
            adding = pool.submit(add, layout, -1, NOON, {"hits": 1}, 5.0)
            while not adding.done():
                samples(layout)
            adding.result()
            assert total(layout).hits == 1


@needs_root
def test_nothing_is_written_into_another_users_cache(layout, make):
    os.chown(layout.base, 12345, 12345)
    make().add({"evicted_asked": 1})
    assert not layout.stats.exists()


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


def test_counts_expire_but_their_total_stays(make, layout, clock):
    for rank in (0, 1):  # two ranks, three hours
        counters = make(rank)
        clock.now = NOON - clock.elapsed
        for _ in range(180):
            counters.opened("hit", 0.001)
            counters.opened("fetched", 0.5)
            counters.flush()
            clock.sleep(60)
    whole, count = total(layout), len(samples(layout))
    assert (whole.hits, count, list(by_rank(samples(layout)))) == (360, 2 * 18, [0, 1])
    assert (whole.waits["network"].count, whole.waits["network"].mean) == (360, 0.5)
    assert total(layout, since=NOON + HOUR).hits == 240
    for hours, periods in ((3, 12 + 60), (24, 18)):  # those of the last hour are finer
        expire(layout, NOON + hours * HOUR)
        assert len(samples(layout)) == count and total(layout) == whole
        assert len({each.start for each in samples(layout, period=10)}) == periods
    for days in (31, 62):  # one row holds all expired counts
        expire(layout, NOON + days * 24 * HOUR)
        assert samples(layout) == [] and len(samples(layout, ever=True)) == 1
        assert total(layout, ever=True).counters == whole.counters
