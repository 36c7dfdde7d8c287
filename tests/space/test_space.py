"""The budget: kept by many processes at once, never at the price of what is in use."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.config import Config
from shardcache.errors import CacheFullError
from shardcache.layout import Layout
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.sessions import Session
from shardcache.space import budget as module
from shardcache.space.budget import Space
from shardcache.space.eviction import Limits
from shardcache.store.digest import BLOCK
from shardcache.store.partial import Partial
from shardcache.store.root import make_root
from shardcache.store.store import Store
from shardcache.store.sweeping import in_flight
from shardcache.urls import parse_url
from tests.support.fakes import FakeClock
from tests.support.storetools import (
    Parent,
    begin,
    crowd,
    fill,
    forked,
    make_store,
    metadata_for,
    no_descriptor_left,
    payload,
    publish,
    read,
)

GB = 10**9
MIB = 1 << 20


class Bench:
    """A root with room for what the test says; the disk is as free as it says."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        self.root = path / "cache"
        self.layout = make_root(self.root, "test")
        self.store = Store(self.layout)
        self.stores: list[Store] = [self.store]
        self.clock = FakeClock(now=10_000.0)
        self.free = 100 * GB
        self.size = 1000 * GB
        options.setdefault("min_free", 0)
        self.config = Config(self.root, **options)
        monkeypatch.setattr(os, "statvfs", lambda path: self._statvfs())
        self.space = Space(self.layout, lambda: self.stores, self.config, self.clock)

    def _statvfs(self) -> object:
        return SimpleNamespace(
            f_frsize=1, f_blocks=self.size, f_bavail=self.free, f_files=0, f_favail=0
        )

    def admit(self, url: str, size: int | None) -> Partial:
        shard = parse_url(url)
        metadata = metadata_for(url, b"", size=size)
        return self.space.admit(
            url, size, lambda: Partial.create(self.layout, metadata, shard.basename)
        )

    def used(self) -> int:
        return sum(entry.size for entry in self.store.entries()) + self.space.reserved()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    return lambda **options: Bench(tmp_path, monkeypatch, **options)


def left_behind(bench: Bench, url: str = "s3://lab/orphan.tar", size: int = MIB) -> Path:
    data = payload(size)
    partial = begin(bench.layout, metadata_for(url, data))
    fill(partial, data)
    partial.close()
    return partial.path


# -- admission -----------------------------------------------------------------


def test_a_shard_larger_than_the_cache_is_refused_before_anything_is_touched(make) -> None:
    bench = make(max_size=1000)
    entry = publish(bench.store, used=1.0)
    with pytest.raises(CacheFullError, match="whole cache") as caught:
        bench.admit("s3://lab/big.tar", 1001)
    assert caught.value.url == "s3://lab/big.tar"
    assert entry.path.exists() and list(in_flight(bench.layout)) == []


@pytest.mark.locks_work("flock")
def test_a_reservation_counts_until_its_owner_lets_go(make) -> None:
    bench = make(max_size=10 * MIB)
    with no_descriptor_left():
        first = bench.admit("s3://lab/a.tar", 6 * MIB)
        with pytest.raises(CacheFullError, match="no room for s3://lab/b.tar"):
            bench.admit("s3://lab/b.tar", 6 * MIB)
        first.close()
        second = bench.admit("s3://lab/b.tar", 6 * MIB)
        second.discard()


@pytest.mark.locks_work("answers")
def test_the_least_recently_used_make_room_for_the_newcomer(make) -> None:
    bench = make(max_size=100)
    entries = [publish(bench.store, f"s3://lab/{n}.tar", bytes(30), used=n + 1.0) for n in range(3)]
    partial = bench.admit("s3://lab/new.tar", 40)
    assert [entry.path.exists() for entry in entries] == [False, True, True]
    partial.discard()


@pytest.mark.locks_work("flock")
def test_what_the_running_job_used_is_not_evicted_for_its_own_newcomer(make) -> None:
    bench = make(max_size=100)
    entry = publish(bench.store, data=bytes(80), used=10_001.0)
    session = Session(bench.layout, 10_000.0)
    with pytest.raises(CacheFullError):
        bench.admit("s3://lab/new.tar", 40)
    assert entry.path.exists()
    session.close()
    bench.admit("s3://lab/new.tar", 40).discard()
    assert not entry.path.exists()


@pytest.mark.locks_work("flock")
def test_when_there_is_no_room_nothing_is_evicted_in_vain(make) -> None:
    bench = make(max_size=100)
    idle = publish(bench.store, "s3://lab/idle.tar", bytes(10), used=1.0)
    busy = publish(bench.store, "s3://lab/busy.tar", bytes(80), used=2.0)
    shard = parse_url("s3://lab/busy.tar")
    opened = bench.store.open(shard.key, shard.basename)
    with pytest.raises(CacheFullError):
        bench.admit("s3://lab/new.tar", 40)
    assert idle.path.exists() and busy.path.exists()
    opened.close()


def test_without_limits_nothing_is_listed_and_nothing_goes(make, monkeypatch) -> None:
    bench = make()
    entry = publish(bench.store, used=1.0)
    monkeypatch.setattr(Store, "entries", lambda self: pytest.fail("a scan"))
    bench.admit("s3://lab/new.tar", GB).discard()
    assert entry.path.exists()


@pytest.mark.locks_work("files")
@pytest.mark.parametrize(
    ("size", "free", "options", "asks"),
    [
        (100_000, 1000 * GB, {}, False),
        (GB // 2, 1000 * GB, {}, False),
        (GB, 1000 * GB, {}, True),  # a thousand of those are too many
        (100_000, 126 * GB, {}, False),
        (100_000, 125 * GB, {}, True),  # an eighth of the volume
        (100_000, 126 * GB, {"min_free": "2GB"}, True),
        (100_000, 1000 * GB, {"max_size": "900GB"}, True),
        (None, 1000 * GB, {}, True),
    ],
)
def test_where_there_is_ample_room_nobody_is_asked(make, size, free, options, asks) -> None:
    """Neither the lock of all nor the fetches in flight: that costs more than a small shard."""
    bench = make(**options)
    bench.free = free
    looks = []
    bench.space._stores = lambda: looks.append(1) or bench.stores
    bench.admit("s3://lab/new.tar", size).discard()
    assert bench.layout.named_lock("budget").exists() is bool(looks) is asks


@pytest.mark.locks_work("files")
def test_where_inodes_are_few_there_is_no_ample_room(make, monkeypatch) -> None:
    bench = make()
    for free, asks in ((10_240, False), (10_239, True)):
        found = SimpleNamespace(f_frsize=1, f_blocks=GB, f_bavail=GB, f_files=20_000, f_favail=free)
        monkeypatch.setattr(os, "statvfs", lambda path, found=found: found)
        bench.admit("s3://lab/new.tar", 1000).discard()
        assert bench.layout.named_lock("budget").exists() is asks


@pytest.mark.locks_work("flock")
def test_the_free_space_floor_counts_what_is_not_written_yet(make) -> None:
    bench = make(min_free="1GB")
    bench.free = 10 * GB
    partials = [bench.admit("s3://lab/a.tar", 5 * GB), bench.admit("s3://lab/b.tar", 4 * GB)]
    with pytest.raises(CacheFullError):
        bench.admit("s3://lab/c.tar", GB)
    partials.pop().discard()
    partials.append(bench.admit("s3://lab/c.tar", GB))
    for partial in partials:
        partial.discard()


@pytest.mark.locks_work("answers")
def test_the_floor_is_kept_by_eviction(make) -> None:
    bench = make(min_free="10%")
    bench.free = 100 * GB + 50
    entries = [publish(bench.store, f"s3://lab/{n}.tar", bytes(60), used=n + 1.0) for n in range(2)]
    bench.admit("s3://lab/new.tar", 100).discard()
    assert [entry.path.exists() for entry in entries] == [False, True]


def test_an_object_of_unknown_size_reserves_what_it_occupies(make) -> None:
    bench = make(max_size=10 * MIB)
    partial = bench.admit("s3://lab/a.tar", None)
    assert bench.space.reserved() == 0
    fill(partial, payload(3 * BLOCK))
    assert bench.space.reserved() == 3 * BLOCK
    partial.discard()


@pytest.mark.locks_work("flock")
def test_a_resumed_partial_is_admitted_by_asking_for_nothing_more(make) -> None:
    # Claimed, it reserves all that it will be; room is needed for the rest of it.
    bench = make(max_size=10 * MIB)
    entry = publish(bench.store, data=bytes(6 * MIB), used=1.0)
    partial = begin(bench.layout, metadata_for("s3://lab/big.tar", b"", size=8 * MIB))
    partial.close()
    claimed = Partial.claim(bench.layout, partial.path, "big.tar")
    assert bench.used() == 14 * MIB
    session = Session(bench.layout, 0.5)
    with pytest.raises(CacheFullError):
        bench.space.admit("s3://lab/big.tar", 8 * MIB, lambda: claimed, reserved=True)
    assert claimed.path.exists() and entry.path.exists()
    session.close()
    assert bench.space.admit("s3://lab/big.tar", 8 * MIB, lambda: claimed, reserved=True) is claimed
    assert bench.used() == 8 * MIB and not entry.path.exists()
    claimed.discard()


@pytest.mark.locks_work("answers")
def test_what_dead_processes_left_goes_before_any_entry(make) -> None:
    bench = make(max_size=3 * MIB)
    entry = publish(bench.store, data=bytes(1000), used=1.0)
    orphans = [left_behind(bench), left_behind(bench, "s3://lab/other.tar")]
    bench.admit("s3://lab/new.tar", 2 * MIB).discard()
    assert entry.path.exists()
    assert not any(path.exists() for path in orphans)


def test_what_dead_processes_left_stays_while_there_is_room(make) -> None:
    bench = make(max_size=30 * MIB)
    orphan = left_behind(bench)
    bench.admit("s3://lab/new.tar", 2 * MIB).discard()
    assert orphan.exists()


@pytest.mark.locks_work("flock")
def test_entries_that_come_into_use_are_replaced_in_the_plan(make, monkeypatch) -> None:
    bench = make(max_size=100)
    entries = [publish(bench.store, f"s3://lab/{n}.tar", bytes(30), used=n + 1.0) for n in range(3)]
    shard = parse_url("s3://lab/0.tar")
    opened = []
    real = module.apply

    def read_meanwhile(store: Store, chosen: Sequence[object]):
        if not opened:
            opened.append(bench.store.open(shard.key, shard.basename))
        return real(store, chosen)

    monkeypatch.setattr(module, "apply", read_meanwhile)
    partial = bench.admit("s3://lab/new.tar", 40)
    assert [entry.path.exists() for entry in entries] == [True, False, True]
    assert bench.used() == 100
    partial.discard()
    opened[0].close()


def test_entries_that_always_come_into_use_end_in_an_error(make, monkeypatch) -> None:
    bench = make(max_size=100)
    publish(bench.store, data=bytes(80), used=1.0)
    monkeypatch.setattr(module, "apply", lambda store, chosen: iter(()))
    with no_descriptor_left(), pytest.raises(CacheFullError):
        bench.admit("s3://lab/new.tar", 40)


@pytest.mark.locks_work("answers")
def test_a_namespace_that_appears_meanwhile_is_counted_and_evicted_from(
    make, monkeypatch, tmp_path: Path
) -> None:
    bench = make(max_size=100)
    real = bench.space._choose
    late = make_store(bench.layout.base / "ranks" / "late")
    entry = publish(late, data=bytes(90), used=1.0)

    def choose(*args):
        bench.stores = [bench.store, late]
        return real(*args)

    monkeypatch.setattr(bench.space, "_choose", choose)
    bench.admit("s3://lab/new.tar", 40).discard()
    assert not entry.path.exists()


def test_an_error_of_the_maker_frees_the_budget_lock(make) -> None:
    bench = make(max_size=100)

    def fail() -> Partial:
        raise OSError(28, "full")

    with no_descriptor_left(), pytest.raises(OSError):
        bench.space.admit("s3://lab/a.tar", 10, fail)
    lock = KeyLock(bench.layout.named_lock("budget"))
    assert lock.try_acquire(Holder.this_process(rank=None, job=None, now=1.0))
    lock.release()


@pytest.mark.locks_work
def test_a_stuck_budget_lock_is_passed_by_after_its_bound(make, caplog) -> None:
    bench = make(max_size=100)
    lock = KeyLock(bench.layout.named_lock("budget"))
    assert lock.try_acquire(Holder.this_process(rank=None, job=None, now=1.0))
    with caplog.at_level("WARNING"):
        bench.admit("s3://lab/a.tar", 10).discard()
    assert "going on without it" in caplog.text
    assert bench.clock.elapsed >= 60.0
    lock.release()


# -- a full disk ---------------------------------------------------------------


@pytest.mark.locks_work("answers")
def test_a_full_disk_frees_what_is_needed(make) -> None:
    bench = make()
    entries = [publish(bench.store, f"s3://lab/{n}.tar", bytes(30), used=n + 1.0) for n in range(4)]
    bench.space.make_room("s3://lab/new.tar", 50)
    assert [entry.path.exists() for entry in entries] == [False, False, True, True]


@pytest.mark.locks_work("answers")
def test_a_disk_without_inodes_loses_one_entry_at_least(make) -> None:
    bench = make()
    entries = [publish(bench.store, f"s3://lab/{n}.tar", bytes(30), used=n + 1.0) for n in range(2)]
    bench.space.make_room("s3://lab/new.tar", 0)
    assert [entry.path.exists() for entry in entries] == [False, True]


@pytest.mark.locks_work("answers")
def test_what_a_sweep_frees_need_not_be_evicted(make) -> None:
    bench = make()
    entry = publish(bench.store, used=1.0)
    orphan = left_behind(bench)
    bench.space.make_room("s3://lab/new.tar", MIB // 2)
    assert entry.path.exists() and not orphan.exists()


@pytest.mark.locks_work("flock")
def test_a_full_disk_with_nothing_to_evict_is_an_error(make) -> None:
    bench = make()
    session = Session(bench.layout, 1.0)
    publish(bench.store, used=2.0)
    with no_descriptor_left(), pytest.raises(CacheFullError):
        bench.space.make_room("s3://lab/new.tar", 10)
    session.close()


def test_the_configured_limits_as_they_stand(make) -> None:
    bench = make(max_size="50%", min_free="20%", max_age="1h")
    assert bench.space.limits() == Limits(max_size=500 * GB, free_needed=100 * GB, max_age=3600.0)
    assert make().space.limits() == Limits()


# -- many processes ------------------------------------------------------------


@pytest.mark.locks_work
def test_many_processes_admitting_at_once_keep_one_budget(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    layout = make_root(root, "test")
    limit, shard = 8 * MIB, MIB
    config = Config(root, max_size=limit, min_free=0)

    def work(parent: Parent, number: int) -> None:
        store = Store(layout)
        space = Space(layout, lambda: [store], config, module_clock())
        parent.hear()
        got = refused = 0
        for n in range(12):
            url = f"s3://lab/{number}-{n}.tar"
            data = payload(shard, n)
            metadata = metadata_for(url, data)
            try:
                partial = space.admit(url, shard, lambda u=url, m=metadata: begin(layout, m))
            except CacheFullError:
                refused += 1
                continue
            fill(partial, data)
            store.publish(partial, metadata)
            partial.close()
            got += 1
        parent.say((got, refused))

    def watch(parent: Parent, number: int) -> None:
        store = Store(layout)
        most = 0
        parent.hear()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            # Entries first: what is published in between is missed, never counted twice.
            entries = list(store.entries())
            flying = [f for f in in_flight(layout) if f.key]
            there = [e for e in entries if e.path.exists()]
            most = max(most, sum(e.size for e in there) + sum(f.reserved for f in flying))
        parent.say(most)

    with crowd(4, work) as workers, crowd(1, watch) as watchers:
        for child in (*workers, *watchers):
            child.tell()
        results = [worker.hear() for worker in workers]
        watchers[0].hear()
    assert sum(got for got, _ in results) >= 8
    store = Store(layout)
    entries = list(store.entries())
    assert sum(entry.size for entry in entries) <= limit
    assert all(read(store, entry.metadata().url) is not None for entry in entries)


def module_clock():
    from shardcache.clock import SYSTEM_CLOCK

    return SYSTEM_CLOCK


@pytest.mark.locks_work
def test_reservations_of_many_processes_never_exceed_the_budget(tmp_path: Path) -> None:
    # Nobody publishes: what was admitted is held, and adds up.
    root = tmp_path / "cache"
    layout = make_root(root, "test")
    config = Config(root, max_size=100 * MIB, min_free=0)

    def work(parent: Parent, number: int) -> None:
        store = Store(layout)
        space = Space(layout, lambda: [store], config, module_clock())
        parent.hear()
        held = []
        for n in range(5):
            url = f"s3://lab/{number}-{n}.tar"
            metadata = metadata_for(url, b"", size=9 * MIB)
            try:
                held.append(space.admit(url, 9 * MIB, lambda m=metadata: begin(layout, m)))
            except CacheFullError:
                break
        parent.say(len(held))
        parent.hear()

    with crowd(6, work) as children:
        for child in children:
            child.tell()
        # 11 of 9 MiB fit into 100, and not one more.
        assert sum(child.hear() for child in children) == 11
        reserved = sum(f.reserved for f in in_flight(layout))
        assert reserved == 99 * MIB


@pytest.mark.locks_work("flock")
def test_the_reservation_of_a_killed_process_is_free_at_once(make) -> None:
    bench = make(max_size=10 * MIB)

    def hold(parent: Parent) -> None:
        held = bench.admit("s3://lab/a.tar", 8 * MIB)
        parent.say(held.path.name)
        parent.hear()

    with forked(hold) as child:
        child.hear()
        with pytest.raises(CacheFullError):
            bench.admit("s3://lab/b.tar", 8 * MIB)
        child.kill()
        bench.admit("s3://lab/b.tar", 8 * MIB).discard()


@pytest.mark.locks_work("answers")
def test_a_namespace_of_a_rank_counts_towards_the_budget(make) -> None:
    bench = make(max_size=100)
    rank = Store(Layout(bench.layout.base).rank("job-0"))
    rank.layout.make()
    bench.stores.append(rank)
    entry = publish(rank, data=bytes(80), used=1.0)
    bench.admit("s3://lab/new.tar", 40).discard()
    assert not entry.path.exists()
