"""Cleaning by command and in the background."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardcache import clock, tiers
from shardcache.cache import Cache
from shardcache.errors import LockTimeoutError
from shardcache.locks.sessions import live_sessions
from shardcache.space.budget import Space
from shardcache.space.eviction import CleanReport, Limits, Reason, total_bytes
from shardcache.store.entry import Entry, Store, set_aside
from shardcache.urls import parse_url
from tests.support.caches import read
from tests.support.disktools import disk
from tests.support.storetools import (
    PATIENCE,
    age,
    begun,
    layout_of,
    no_thread,
    publish,
    refusing,
    room,
    taken,
    tree,
    wait_until,
)

MIB = 1 << 20


def leave(layout) -> Path:
    """Make the partial of a dead process."""
    left = begun(layout, "s3://lab/orphan.tar", bytes(MIB))
    left.close()
    return left.path


SIZES = *4 * [1000], 500
CASES: dict[str, Callable[[Path], Limits]] = {
    "nothing": lambda path: Limits(),
    "max_size that orphans would break": lambda path: Limits(max_size=room(path, *SIZES, 5)),
    "free, more than leftovers have": lambda path: Limits(free_needed=room(path, MIB, 100, 1000)),
    "age": lambda path: Limits(max_age=clock.time() - 3.5),
    "all": lambda path: Limits(everything=True),
    "impossible": lambda path: Limits(free_needed=10 * MIB),
}


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_changes_nothing_and_reports_what_a_run_removes(layout, case):
    store, rank = Store(layout), Store(layout.namespace("job-0"))
    rank.layout.make()
    space = Cache(layout.base.parent, min_free=0).process.last_tier.space
    for n, size in enumerate(SIZES[:4]):
        publish(store, f"s3://lab/{n}.tar", bytes(size), used=n + 1.0)
    publish(rank, "s3://lab/r.tar", bytes(SIZES[4]), used=2.5)
    leave(layout)
    assert set_aside(publish(store, "s3://lab/bad.tar", bytes(100)).path, "test")
    live = begun(layout, "s3://lab/live.tar")
    limits, before = CASES[case](layout.base), tree(layout.base)
    with store.open(parse_url("s3://lab/1.tar").key, "1.tar").file:
        dry = space.clean(limits, orphans=True, dry_run=True)
        assert tree(layout.base) == before
        real = space.clean(limits, orphans=True)
    assert replace(real, dry_run=True) == dry
    assert not any(Path(removal.name).exists() for removal in real.removed)
    left = [*store.entries(), *rank.entries()]
    assert (real.kept, real.kept_bytes) == (len(left), total_bytes(left, space.allocated))
    reasons = [removal.reason for removal in real.removed]
    assert reasons.count(Reason.ORPHAN) == 2 and os.listdir(layout.sessions) == []
    assert live.path.exists() and "1.tar" in {entry.data.name for entry in left}
    live.discard()


def test_a_shard_that_is_opened_during_a_cleaning_is_missing(shop, monkeypatch):
    urls, streams, real = shop.urls[:3], list[Any](), Store.evict

    def evict(store: Store, entry: Entry) -> bool:
        is_evicted = real(store, entry)
        if not streams:
            streams.extend(cache.open(url) for url in urls if url in cache)
        return is_evicted

    monkeypatch.setattr(Store, "evict", evict)
    with shop.cache(policy="lru") as cache:
        cache.prewarm(urls)
        report = cache.clean(max_size=shop.room(1.5))
        assert str(report).endswith(" above the limits")
        assert (report.kept, report.missing) == (2, shop.room(2) - shop.room(1.5))
        for stream in streams:
            stream.close()


def test_dead_partials_and_unnamed_files_are_kept_for_an_hour(layout) -> None:
    partial, unnamed = leave(layout), layout.partials / f".meta.json.{'0' * 32}"
    unnamed.touch()
    with Cache(layout.base.parent, min_free=0) as cache:
        for seconds, removed in ((0.0, 0), (3500.0, 0), (3700.0, 1)):
            age(layout.partials, seconds)
            assert len(cache.clean().removed) == removed
            assert partial.exists() == unnamed.exists() == (not removed)


def test_only_one_process_cleans_at_a_time(tmp_path: Path) -> None:
    with Cache(tmp_path / "cache", min_free=0, lock_timeout="0.3s") as cache:
        cache.pin("s3://lab/a.tar")  # creates the directory
        lock = taken(layout_of(cache.dir).named_lock("clean"))
        for wait in (False, True):
            with pytest.raises(LockTimeoutError, match=f"process {os.getpid()}"):
                cache.clean(wait=wait)
        assert cache.clean(dry_run=True).removed == ()
        lock.release()
        layout_of(cache.dir).partials.rmdir()  # by hand, which does not make it read-only
        assert cache.clean(wait=False).removed == ()


def test_one_process_of_a_node_cleans_in_the_background(layout, shop, monkeypatch):
    rounds, real = [], Space.clean
    with shop.cache() as earlier:
        for number, url in enumerate(shop.urls[:5]):
            earlier.fetch(url)
            shop.use(url, 1000.0 + number)
    age(orphan := leave(layout))

    def clean(*arguments: Any, **options: Any) -> CleanReport:
        rounds.append(threading.current_thread().name)
        return real(*arguments, **options)

    def read() -> None:
        with shop.cache(max_size=shop.room(4)) as cache:
            cache.open(shop.urls[0]).close()
            no_thread("shardcache-clean")

    monkeypatch.setattr(tiers, "_FIRST", -1.0)
    monkeypatch.setattr(Space, "clean", clean)
    read()
    assert not orphan.exists()
    assert set(shop.entries()) == {shop.urls[n] for n in (0, 2, 3, 4)}
    read()
    assert rounds == ["shardcache-clean"]
    os.utime(layout_of(shop.path).named_lock("clean"), (1000.0, 1000.0))
    read()
    assert rounds == ["shardcache-clean"] * 2


def test_a_process_evicts_for_the_memory_of_its_job_in_one_thread(shop, monkeypatch):
    monkeypatch.setattr(tiers, "_MEMORY_INTERVAL", 0.0)
    gate, clean = threading.Event(), Space.clean
    monkeypatch.setattr(Space, "clean", lambda space: gate.wait() and clean(space))
    with disk(shop.path, "size=16m"):
        with shop.cache() as cache:
            cache.fetch(shop.urls[0])
        lock = taken(layout_of(shop.path).named_lock("clean"))  # by a process that was stopped
        with shop.cache(min_free="100%") as cache:
            for _ in range(3):
                cache.open(shop.urls[0]).close()
                assert [each.name for each in threading.enumerate()].count("shardcache-clean") == 1
            gate.set()
            no_thread("shardcache-clean")
            assert shop.urls[0] not in cache
        lock.release()


def test_a_ram_disk_does_not_wait_until_a_slow_disk_is_clean(shop, tmp_path, monkeypatch):
    ram, gate, cleaned = tmp_path / "ram", threading.Event(), list[Path]()

    def clean(space: Space) -> CleanReport:
        cleaned.append(directory := space.node.base.parent)
        assert directory == ram or gate.wait(PATIENCE)
        return CleanReport((), 0, 0, 0, dry_run=False)

    def read_again() -> bool:
        cache.open(shop.urls[0]).close()
        return cleaned.count(ram) > 2

    monkeypatch.setattr(tiers, "_FIRST", -1.0)
    monkeypatch.setattr(tiers, "_MEMORY_INTERVAL", 0.0)
    monkeypatch.setattr(Space, "clean", clean)
    monkeypatch.setattr(Space, "lacks_memory", lambda space: space.node.base.parent == ram)
    with shop.cache(tiers=[str(ram)]) as cache:
        wait_until(read_again)
        assert cleaned.count(shop.path) == 1
        gate.set()


@pytest.mark.parametrize(
    ("stays", "why"),
    [
        ("", ""),
        ("pin", "pinned"),
        ("early pin", "pinned"),  # of a shard that is not cached
        ("process", "a process uses it"),
        ("v1/locks/mine.lock", "files of other"),
        ("mine", "files of other"),
    ],
)
def test_remove_dir_leaves_nothing_unless_something_must_stay(run, shop, stays, why):
    root = shop.path
    with shop.cache() as cache:
        cache.prewarm(shop.urls)
        if "pin" in stays:
            cache.pin(shop.urls[0])
        if stays == "early pin":
            cache.remove(cache.unpin(shop.urls[0]))
            cache.pin(shop.urls[0])
        if stays != "process":
            cache.close()
        token = 32 * "0"  # files of killed processes
        (root / "v1/locks/00").mkdir(exist_ok=True)
        (root / f"v1/locks/00/{token}.lease.break.7.{token}").touch()
        (root / f"v1/partial/.limits.{token}").touch()
        if "mine" in stays:
            (root / stays).touch()
        code, _, err = run("clean", "--all", "--remove-dir", "-y")
        assert (code, root.exists()) == (int(bool(stays)), bool(stays)) and why in err
        assert len(list(cache.pins())) == ("pin" in stays)
        if "mine" in stays:
            (root / stays).unlink()
            assert run("clean", "--all", "--remove-dir", "-y")[0] == 0 and not root.exists()
        if stays:
            assert cache.fetch(shop.urls[1]).data.exists()


def test_remove_dir_leaves_the_session_of_a_job_that_begins_meanwhile(shop, monkeypatch):
    with shop.cache() as cache, shop.cache() as job:
        cache.prewarm(shop.urls)
        cache.process.last_tier.end_session()
        # `clean` calls this after the last check for running jobs.
        monkeypatch.setattr(cache.process.counters, "flush", lambda: job.fetch(shop.urls[0]))
        cache.clean(everything=True, remove_dir=True)
        assert shop.urls[0] in job and len(live_sessions(layout_of(shop.path))) == 1


@pytest.mark.parametrize("group", [None, os.getegid()])
def test_shards_in_the_image_of_a_container_can_be_removed_and_replaced(shop, monkeypatch, group):
    """A directory in the lower layer of an overlay cannot be renamed."""
    url, damaged = shop.urls[:2]
    data, other = Path(url).read_bytes(), Path(damaged).read_bytes()
    with shop.cache(shared_group=group) as cache:
        entries = [cache.fetch(url).path, cache.fetch(damaged).path]
        is_baked = lambda path, *_: Path(path) in entries  # noqa: E731
        monkeypatch.setattr(os, "rename", refusing(errno.EXDEV, when=is_baked, real=os.rename))
        os.truncate(cache.path(damaged), 100)
        (entries[0] / "notes.txt").write_text("of another program")
        assert read(cache, damaged) == other and cache.entry(damaged).size == len(other)
        with cache.open(url) as stream:
            assert cache.remove(url) == (0, 1) and stream.read() == data  # it is in use
        assert cache.remove(url) == (len(data), 0) and cache.path(url) is None
        assert read(cache, url) == data and cache.path(url) is not None
        (kept,) = layout_of(shop.path).partials.glob("kept.*")
        assert [path.name for path in kept.iterdir()] == ["notes.txt"]
        assert kept.stat().st_mode == entries[0].stat().st_mode


def test_the_namespace_of_a_job_that_has_ended_is_removed(shop, monkeypatch):
    for job in ("ended", "recent", "with a shard"):
        monkeypatch.setenv("SHARDCACHE_JOB", job)
        with shop.cache(isolation="job") as cache:
            cache.fetch(shop.urls[0])
            if job != "with a shard":
                cache.remove(shop.urls[0])
    ranks = layout_of(shop.path).ranks
    for name in ("ended", "with a shard"):
        age(next(ranks.glob(f"{name[:4]}*")) / "partial")
    with shop.cache() as cache:
        cache.clean()
    assert sorted(path.name[:4] for path in ranks.iterdir()) == ["rece", "with"]


def test_a_partial_whose_process_is_about_to_lock_it_stays(make_cache):
    cache = make_cache()
    new = cache.dir / "v1/partial" / f"{'a' * 32}.{'b' * 24}.{'c' * 32}"
    cache.process.prepare()
    new.mkdir()
    (new / "x.tar").touch()
    assert not cache.clean(orphans=True).removed and new.exists()
    age(new)
    assert cache.clean().removed and not new.exists()
