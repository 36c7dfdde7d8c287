"""The budget: kept by many processes at once, never at the price of what is in use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.clock import SYSTEM_CLOCK
from shardcache.config import Config
from shardcache.errors import CacheFullError
from shardcache.locks.flock import Holder, KeyLock
from shardcache.locks.sessions import Session
from shardcache.space import budget as module
from shardcache.space.budget import Space
from shardcache.store.digest import BLOCK
from shardcache.store.entry import Entry
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
    metadata_for,
    no_descriptor_left,
    payload,
    publish,
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


@pytest.mark.locks_work("flock")
def test_a_full_disk_with_nothing_to_evict_is_an_error(make) -> None:
    bench = make()
    session = Session(bench.layout, 1.0)
    publish(bench.store, used=2.0)
    with no_descriptor_left(), pytest.raises(CacheFullError):
        bench.space.make_room("s3://lab/new.tar", 10)
    session.close()


# -- the number ----------------------------------------------------------------


class Library(Bench):
    """200 entries of 1,000 bytes in a cache for 210; to list them takes 0.1 s."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, grace: float | None = None):
        super().__init__(path, monkeypatch, max_size=210_000)
        for number in range(200):
            publish(self.store, f"s3://lab/{number:04d}.tar", bytes(1000), used=number + 1.0)
        self.counts = 0
        node = replace(self.layout, grace=grace)
        self.space = Space(node, lambda: self.stores, self.config, self.clock, self._list)

    def _list(self, entries: Iterator[Entry]) -> Iterator[Entry]:
        self.counts += 1
        self.clock.sleep(0.1)
        return entries

    def fetch(self, number: int, size: int = 1000) -> None:
        url, data = f"s3://lab/{number:04d}.tar", bytes(size)
        partial = self.admit(url, size)
        fill(partial, data)
        path = self.store.publish(partial, metadata_for(url, data))
        os.utime(path / "meta.json", (self.clock.time(), self.clock.time()))
        partial.close()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(tmp_path, monkeypatch)


@pytest.mark.locks_work("answers")
def test_what_fits_costs_no_count_and_the_budget_holds(library: Library) -> None:
    for number in range(200, 210):
        library.fetch(number)
    assert (library.counts, library.used()) == (1, 210_000)
    library.fetch(210)
    # One made room for this one, two more are one in a hundred of 201,000 bytes.
    assert (library.counts, library.used()) == (2, 207_000)
    for number in range(211, 214):
        library.fetch(number)
    assert (library.counts, library.used()) == (2, 210_000)


@pytest.mark.locks_work("answers")
def test_of_a_small_cache_no_more_goes_than_must(make) -> None:
    bench = make(max_size=20_000)
    for number in range(25):
        publish(bench.store, f"s3://lab/{number}.tar", bytes(1000), used=number + 1.0)
    bench.admit("s3://lab/new.tar", 1000).discard()
    assert bench.used() == 19_000


@pytest.mark.locks_work("answers")
def test_what_others_publish_without_asking_is_seen_after_a_while(library: Library) -> None:
    library.fetch(200)
    for number in range(300, 309):
        publish(library.store, f"s3://lab/{number:04d}.tar", bytes(1000), used=1.0)
    library.clock.sleep(2.1)  # 20 times 0.1
    library.fetch(201)
    assert library.counts == 2 and library.used() <= 210_000


@pytest.mark.locks_work("flock", "answers")
def test_what_was_refused_is_refused_without_a_count_for_a_while(library: Library) -> None:
    session = Session(library.layout, 0.5)
    for _ in range(3):
        with pytest.raises(CacheFullError, match=r"1.0 KB more would have to go"):
            library.admit("s3://lab/x.tar", 11_000)
    assert library.counts == 1
    assert library.space.refuses("s3://lab/x.tar", 13_000)
    assert not library.space.refuses("s3://lab/x.tar", 10_000)
    library.fetch(401, 10_000)  # less than was refused: that is there
    with pytest.raises(CacheFullError):
        library.fetch(402)
    assert library.counts == 1
    session.close()
    library.space.recount()
    library.fetch(400, 11_000)
    assert library.used() <= 210_000


def test_a_reservation_counts_although_its_fetch_failed_until_the_next_count(
    library: Library,
) -> None:
    library.admit("s3://lab/a.tar", 9000).discard()
    library.fetch(200)
    assert (library.counts, library.used()) == (1, 201_000)
    library.fetch(201, 2000)
    assert library.counts == 2
    assert library.used() == 203_000  # nothing had to go


@pytest.mark.locks_work("flock", "answers")
def test_shards_of_unknown_size_are_counted_as_they_grow(library: Library) -> None:
    library.fetch(200)
    partial = library.admit("s3://lab/unknown.tar", None)
    for number, size in ((201, 5000), (202, 9000)):
        partial.write(0, memoryview(bytes(size)))
        library.fetch(number)
        assert library.used() <= 210_000
    partial.discard()


def test_nodes_that_share_a_directory_count_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(tmp_path, monkeypatch, grace=3600.0)
    for number in range(200, 204):
        library.fetch(number)
    assert library.counts == 4 and not library.layout.usage.exists()


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b'["BOOT"]', b'["BOOT", "x", 1e9, null]', b'["BOOT", 1e999, 0, 0]', b"\xff"],
)
def test_a_number_that_makes_no_sense_is_counted_anew(library: Library, text: bytes) -> None:
    library.fetch(200)
    boot = library.layout.usage.read_bytes().split(b'"')[1]
    library.layout.usage.write_bytes(text.replace(b"BOOT", boot))
    library.fetch(201)
    assert library.counts == 2


def test_the_number_is_written_through_no_link(library: Library, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    library.layout.usage.symlink_to(tmp_path / "mine")
    library.fetch(200)
    assert (tmp_path / "mine").read_text() == "precious"


# -- many processes ------------------------------------------------------------


@pytest.mark.locks_work
def test_many_processes_keep_the_budget_at_every_moment(tmp_path: Path) -> None:
    layout = make_root(tmp_path / "cache", "test")
    config = Config(tmp_path / "cache", max_size=60_000, min_free=0)
    done = tmp_path / "done"

    def work(parent: Parent, number: int) -> None:
        store = Store(layout)
        space = Space(layout, lambda: [store], config, SYSTEM_CLOCK)
        parent.hear()
        for n in range(15):
            url, data = f"s3://lab/{number}-{n}.tar", bytes(1000)
            metadata = metadata_for(url, data)
            partial = space.admit(url, 1000, lambda m=metadata: begin(layout, m))
            fill(partial, data)
            store.publish(partial, metadata)
            partial.close()
        parent.say()

    def watch(parent: Parent, number: int) -> None:
        store = Store(layout)
        most = 0
        parent.hear()
        while not done.exists():
            # Entries first: what is published in between is missed, never counted twice.
            entries = list(store.entries())
            flying = sum(f.reserved for f in in_flight(layout) if f.key)
            most = max(most, sum(e.size for e in entries if e.path.exists()) + flying)
        parent.say(most)

    with crowd(16, work) as workers, crowd(1, watch) as (watcher,):
        for child in (watcher, *workers):
            child.tell()
        for worker in workers:
            worker.hear()
        done.touch()
        assert 30_000 < watcher.hear() <= 60_000


@pytest.mark.locks_work
def test_reservations_of_many_processes_never_exceed_the_budget(tmp_path: Path) -> None:
    # Nobody publishes: what was admitted is held, and adds up.
    root = tmp_path / "cache"
    layout = make_root(root, "test")
    config = Config(root, max_size=100 * MIB, min_free=0)

    def work(parent: Parent, number: int) -> None:
        store = Store(layout)
        space = Space(layout, lambda: [store], config, SYSTEM_CLOCK)
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
