"""The budget of a cache: admission, counting and eviction."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardcache.cache import Cache
from shardcache.clock import boot_id
from shardcache.errors import CacheFullError
from shardcache.layout import Layout
from shardcache.locks.sessions import Session
from shardcache.space import budget
from shardcache.store.entry import Entry, Store
from shardcache.urls import parse_url
from tests.support.caches import read
from tests.support.disktools import disk
from tests.support.fakes import FakeClock
from tests.support.storetools import begin, begun, fill, metadata_for, payload, publish, room, taken

GB = 10**9
MIB = 1 << 20
NEW = "s3://lab/new.tar"


class Bench:
    """A root with room for shards of these sizes, on a disk with ``free`` bytes."""

    def __init__(self, layout, monkeypatch, holds=(), **options) -> None:
        self.layout, self.clock = layout, FakeClock(monkeypatch, now=10_000.0)
        self.free = 100 * GB
        monkeypatch.setattr(os, "statvfs", self._statvfs)
        if holds:
            options["max_size"] = self.room(*holds)
        tier = Cache(layout.base.parent, **{"min_free": 0, **options}).process.last_tier
        self.space, self.store = tier.space, tier.store
        self.counts = 0  # how often the first part of the cache was listed
        self.real_entries = self.store.entries
        monkeypatch.setattr(self.store, "entries", self._list)

    def _statvfs(self, path: Path) -> object:
        return SimpleNamespace(f_frsize=1, f_blocks=1000 * GB, f_bavail=self.free)

    def _list(self, prefix: str | None = None) -> Iterator[Entry]:
        self.counts += prefix == "00"
        return self.real_entries(prefix)

    def shelve(self, count: int, size: int) -> list[Entry]:
        """Publish entries, each used later than the one before."""
        urls = (f"s3://lab/{number:04d}.tar" for number in range(count))
        return [publish(self.store, url, bytes(size), used=n) for n, url in enumerate(urls, 1)]

    def admit(self, url: str = NEW, size: int | None = 0):
        with self.space.reserved(parse_url(url), size, self.space.policy):
            return begin(self.layout, metadata_for(url, b"", size=size))

    def fetch(self, number: int, size: int = 1000) -> None:
        url, data = f"s3://lab/{number:04d}.tar", bytes(size)
        partial = self.admit(url, size)
        fill(partial, data)
        path = self.store.publish(partial, metadata_for(url, data), [])
        os.utime(path / "meta.json", (self.clock.time(), self.clock.time()))
        partial.close()

    def used(self) -> int:
        entries = self.room(*(entry.size for entry in Store(self.layout).entries()))
        return entries + sum(flight.reserved for flight in self.space.flights())

    def room(self, *sizes: int) -> int:
        return room(self.layout.base, *sizes)


@pytest.fixture
def make(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bench]:
    return lambda *holds, **options: Bench(layout, monkeypatch, holds, **options)


@pytest.fixture
def library(make: Callable[..., Bench]) -> Bench:
    """200 entries of 1,000 bytes in a cache for 210."""
    bench = make(*210 * [1000])
    bench.shelve(200, 1000)
    return bench


@pytest.mark.locks_work("flock")
def test_min_free_includes_bytes_that_are_not_written_yet(make) -> None:
    bench = make(min_free="1GB")
    bench.free = GB + bench.room(5 * GB, 4 * GB)
    partials = [bench.admit("s3://lab/a.tar", 5 * GB), bench.admit("s3://lab/b.tar", 4 * GB)]
    with pytest.raises(CacheFullError):
        bench.admit(size=GB)
    partials.pop().discard()
    partials.append(bench.admit(size=GB))
    for partial in partials:
        partial.discard()


@pytest.mark.locks_work("answers")
@pytest.mark.parametrize("is_counted", [False, True])
def test_dead_partials_are_removed_before_entries(make, is_counted) -> None:
    bench = make(max_size=3 * MIB)
    [entry] = bench.shelve(1, 1000)
    if is_counted:  # but not the next partial, of a process without limits
        bench.fetch(1)
        bench.clock.sleep(10)
    orphan = begun(bench.layout, "s3://lab/orphan.tar", payload(2 * MIB))
    orphan.close()
    bench.admit(size=2 * MIB).discard()
    assert entry.path.exists() and not orphan.path.exists()


@pytest.mark.locks_work("flock")
def test_an_entry_that_is_opened_during_eviction_is_replaced_by_another(make, monkeypatch) -> None:
    bench = make(30, 30, 40)
    entries = bench.shelve(3, 30)
    opened = []
    real = Store.evict

    def read_meanwhile(store: Store, entry: Entry) -> bool:
        if not opened:
            opened.append(bench.store.open(entries[0].key, "0000.tar"))
        return real(store, entry)

    monkeypatch.setattr(Store, "evict", read_meanwhile)
    partial = bench.admit(size=40)
    assert [entry.path.exists() for entry in entries] == [True, False, True]
    assert bench.used() == bench.room(30, 30, 40)
    partial.discard()
    opened[0].close()


@pytest.mark.locks_work
def test_a_stuck_budget_lock_is_ignored_after_a_minute(make, caplog) -> None:
    bench = make(100)
    lock = taken(bench.layout.named_lock("budget"))
    with caplog.at_level("WARNING"):
        bench.admit(size=10).discard()
        assert "going on without it" in caplog.text
        assert 60.0 <= bench.clock.elapsed < 61.0
        bench.admit(size=10).discard()  # the same holder is not waited for again
        assert bench.clock.elapsed < 61.0
        lock.release()
        bench.admit(size=10).discard()
        lock = taken(bench.layout.named_lock("budget"))
        bench.admit(size=10).discard()
        assert bench.clock.elapsed >= 120.0
    lock.release()


@pytest.mark.locks_work("answers")
def test_a_shard_that_fits_is_admitted_without_counting(library: Bench) -> None:
    for number in range(200, 210):
        library.fetch(number)
    assert (library.counts, library.used()) == (1, library.room(*210 * [1000]))
    library.fetch(210)
    # One entry makes room, and one percent of 210 entries is evicted in advance.
    assert (library.counts, library.used()) == (2, library.room(*207 * [1000]))
    for number in range(211, 214):
        library.fetch(number)
    assert (library.counts, library.used()) == (2, library.space.max_size)
    for number in range(300, 309):  # not admitted: found by the next count
        publish(library.store, f"s3://lab/{number:04d}.tar", bytes(1000), used=1.0)
    library.clock.sleep(60)
    library.fetch(214)
    assert library.counts == 3 and library.used() <= library.space.max_size
    for number, seconds, counts in ((215, 0, 3), (216, 60, 4)):  # also while there is room
        library.clock.sleep(seconds)
        library.fetch(number)
        assert library.counts == counts


@pytest.mark.locks_work("flock")
def test_a_published_shard_and_a_second_download_of_it_count_both(make, monkeypatch) -> None:
    bench = make(MIB, MIB, MIB)
    first, second = (begun(bench.layout, "s3://lab/0.tar", bytes(MIB)) for _ in range(2))
    flights = bench.space.flights()
    bench.store.publish(first, first.metadata, [])
    first.close()
    bench.layout.usage.unlink(missing_ok=True)
    monkeypatch.setattr(bench.space, "flights", lambda: flights)  # listed before the publication
    bench.admit("s3://lab/1.tar", MIB).discard()
    assert len(list(bench.store.entries())) == 1
    bench.layout.usage.unlink(missing_ok=True)
    bench.admit("s3://lab/2.tar", 2 * MIB).discard()  # evicts the published shard
    assert list(bench.store.entries()) == []
    second.close()


@pytest.mark.locks_work("flock", "answers")
def test_a_refusal_is_remembered_while_it_holds(library: Bench) -> None:
    session = Session(library.layout, 0.5)
    fits = 1000 + 9 * library.room(1000)  # as much room as ten shards
    for _ in range(3):
        with pytest.raises(CacheFullError, match="it needs 1.0 KB more"):
            library.admit(size=fits + 1000)
    assert library.counts == 2  # to count, and to plan
    assert library.space.refuses(NEW, fits + 3000) and not library.space.refuses(NEW, fits)
    library.fetch(401, fits)  # smaller than the refused shard
    with pytest.raises(CacheFullError):
        library.fetch(402)
    assert library.counts == 2
    more = library.space._config.replace(max_size=2 * library.space.max_size)
    assert not replace(library.space, _config=more).refuses(NEW, fits + 3000)
    session.close()  # as if its process had been killed
    library.fetch(400, fits + 1000)
    assert library.used() <= library.space.max_size


@pytest.fixture
def large(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A full cache that is six times as large as a sample."""
    monkeypatch.setattr(budget, "_SAMPLE", 100)
    bench = make(*600 * [1000])
    bench.shelve(600, 1000)
    bench.fetch(600)
    return bench


@pytest.mark.locks_work("flock", "answers")
def test_a_large_full_cache_is_listed_in_samples(large: Bench) -> None:
    for number in range(601, 700):
        large.fetch(number)
        assert number % 10 or large.used() <= large.space.max_size
    urls = [f"s3://lab/{number:04d}.tar" for number in range(600)]
    directories = [Path(large.layout.key_dir(parse_url(url).key)) for url in urls]
    gone = [number for number, directory in enumerate(directories) if not directory.exists()]
    assert 100 <= len(gone) < 110 and max(gone) < 200 and large.counts < 10
    for path in large.layout.objects.glob("[0-7]?"):  # by hand
        shutil.rmtree(path)
    left, held = large.used(), len(list(large.real_entries()))
    for number in range(700, 800):
        large.fetch(number)
    assert large.used() - left == large.room(1000) * 100  # nothing was evicted
    assert len(list(large.real_entries())) == held + 100


@pytest.mark.locks_work("flock", "answers")
def test_a_large_full_cache_refuses_a_shard_when_all_entries_must_stay(large: Bench) -> None:
    session = Session(large.layout, 0.5)
    older = [entry for number, entry in enumerate(large.real_entries()) if number in (5, 500)]
    for entry in older:
        os.utime(entry.path / "meta.json", (0.1, 0.1))
    large.clock.sleep(60)  # until the room that was made in advance is used up
    for number in range(601, 620):
        with contextlib.suppress(CacheFullError):
            large.fetch(number)
    assert not any(entry.path.exists() for entry in older)
    assert large.used() == large.space.max_size
    counts = large.counts
    for _ in range(10):
        large.clock.sleep(60)
        with pytest.raises(CacheFullError):
            large.fetch(700)
    assert large.counts <= counts + 3  # a sample each
    session.close()
    large.layout.refusal.unlink()
    large.fetch(700)


@pytest.mark.locks_work("flock", "answers")
def test_shards_of_unknown_size_are_counted_as_they_grow(library: Bench) -> None:
    library.fetch(200)
    partial = library.admit("s3://lab/unknown.tar", None)
    for number, size in ((201, 5000), (202, 9000)):
        partial.write(0, memoryview(bytes(size)))
        library.fetch(number)
        assert library.used() <= library.space.max_size
    partial.discard()


def test_an_invalid_or_unshared_count_is_counted_again(library):
    library.fetch(200)
    usage = library.layout.usage
    boot = usage.read_bytes().split(b'"')[1]
    for text in (b"", b"{}", b'["BOOT"]', b'["BOOT", "x", 1e9, null]', b'["other", 5, 0, null]'):
        usage.write_bytes(text.replace(b"BOOT", boot))
        counts = library.counts
        library.fetch(201)
        assert library.counts == counts + 1
    usage.unlink()
    library.space.node = replace(library.layout, grace=3600.0)  # nodes share the directory
    counts = library.counts
    for number in (202, 203):
        library.fetch(number)
    assert library.counts == counts + 2 and not usage.exists()


@pytest.mark.locks_work("flock", "answers")
def test_the_count_survives_a_boot_and_samples_correct_it(large: Bench) -> None:
    usage = large.layout.usage
    usage.write_bytes(usage.read_bytes().replace(boot_id().encode(), b"the last boot"))
    for number in range(800, 830):  # a crash has lost the numbers of the last shards
        publish(large.store, f"s3://lab/{number:04d}.tar", bytes(1000), used=1.0)
    counts = large.counts
    large.fetch(601)
    assert large.counts == counts  # only a sample was listed
    for number in range(602, 702):
        large.fetch(number)
    assert large.used() <= large.space.max_size


@pytest.mark.locks_work("flock", "answers")
def test_a_large_cache_is_counted_by_a_few_admissions(make, monkeypatch) -> None:
    monkeypatch.setattr(budget, "_COUNTED", 50)
    bench, counts, inodes = make(*350 * [1000]), list[int](), set[int]()
    bench.shelve(300, 1000)

    def list_part(part: str) -> list[Entry]:
        counts[-1] += len(entries := list(bench.real_entries(part)))
        return entries

    monkeypatch.setattr(bench.store, "entries", list_part)
    for number in range(600, 608):
        counts.append(0)
        bench.admit(f"s3://lab/{number:04d}.tar", 1000).discard()
        inodes.add(bench.layout.usage.stat().st_ino)
    assert max(counts) < 65 and sum(counts) == 300
    assert len(inodes) == 1  # ext4 would flush a file that replaces another one


@pytest.mark.parametrize("kind", ["local", "tmpfs", "network"])
def test_small_shards_take_no_more_of_the_disk_than_max_size(shop, monkeypatch, kind) -> None:
    limit, real = 6 * shop.size, os.statvfs

    def transfer_size(path: Path) -> os.statvfs_result:  # as NFS states it for a block
        return os.statvfs_result((MIB, MIB, *real(path)[2:]))

    if kind == "network":
        monkeypatch.setattr(os, "statvfs", transfer_size)
    with disk(shop.path, "size=64m") if kind == "tmpfs" else contextlib.nullcontext():
        with shop.cache(max_size=limit) as cache:
            assert all(read(cache, url) == Path(url).read_bytes() for url in shop.urls)
            stored = len(list(cache.entries()))
        assert not list((shop.path / "v1/locks").glob("*/*.lock"))
        # The 256 directories above the entries do not grow.
        files = [path for path in (shop.path / "v1/objects").rglob("*") if len(path.name) > 2]
        used = sum(path.lstat().st_blocks for path in files) * 512
    assert limit - used / stored < used <= limit


def test_a_large_shard_takes_little_more_than_its_bytes(make_cache, origin) -> None:
    origin.objects[NEW] = bytes(32 * MIB)
    with pytest.raises(CacheFullError, match=r"takes 33\.6 MB on disk"):
        make_cache(max_size=32 * MIB).fetch(NEW)
    make_cache(max_size=int(32.1 * MIB)).fetch(NEW)
