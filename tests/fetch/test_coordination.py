"""One fetch per node: many threads and processes, stale and dead holders."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardcache.cache import Cache
from shardcache.errors import IntegrityError, LockTimeoutError, TransferError
from shardcache.layout import META, Layout
from shardcache.locks.flock import Holder, KeyLock, read_holder
from shardcache.origins.base import TransientError
from shardcache.store.digest import BLOCK
from shardcache.store.entry import Metadata, Store
from shardcache.store.partial import Partial
from tests.support.fakes import FakeClock, Fault, MemoryOrigin
from tests.support.storetools import wait_until
from tests.support.tars import make_tar

URL, OTHER = "s3://lab/train-0000.tar", "s3://lab/other.tar"
DATA, NEWER = (make_tar(seed, members=3, size=BLOCK) for seed in (1, 2))
MakeCache = Callable[..., Cache]


@pytest.fixture(autouse=True)
def _object(origin: MemoryOrigin) -> None:
    origin.objects[URL] = DATA


def read(cache: Cache, url: str = URL) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def streamed(cache: Cache) -> bool:
    """Read the shard; whether it was not stored."""
    with cache.open(URL) as stream:
        assert stream.read() == DATA
        return bool(stream.name == URL)


def fetches(origin: MemoryOrigin) -> int:
    return sum(start == 0 for _, start, _ in origin.requests)


def layout(cache: Cache) -> Layout:
    return Layout.of_root(cache.dir)


def hold(cache: Cache, clock: FakeClock) -> KeyLock:
    """Take the key's lock as another process would."""
    lock = KeyLock(layout(cache).key_lock(cache.parse(URL).key))
    assert lock.try_acquire(Holder(4711, "node-7", 3, "job", clock.time()))
    return lock


def metadata_for(cache: Cache, origin: MemoryOrigin) -> Metadata:
    shard = cache.parse(URL)
    return Metadata(URL, shard.key, origin.info(shard), len(DATA), "", None, 1.0, "boot", "test")


def interrupted(cache: Cache, origin: MemoryOrigin) -> None:
    """A fetch that fails after two blocks and leaves them."""
    origin.faults.append(Fault(after=2 * BLOCK + 9, error=TransientError("reset")))
    origin.faults.append(Fault(after=None))
    with pytest.raises(TransferError):
        cache.fetch(URL)
    origin.requests.clear()


# -- sharing -------------------------------------------------------------------------------


@pytest.mark.locks_work
def test_threads_share_one_fetch_and_a_hit_asks_nobody(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache, results = make_cache(), []
    threads = [threading.Thread(target=lambda: results.append(read(cache))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [DATA] * 16
    assert (fetches(origin), origin.delivered) == (1, len(DATA))
    origin.objects.clear()
    origin.requests.clear()
    origin.stats.clear()
    assert read(cache) == read(make_cache()) == DATA
    assert (origin.requests, origin.stats) == ([], [])


def test_whoever_gets_the_lock_looks_again_before_fetching(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late, real = make_cache(), make_cache(), KeyLock.try_acquire

    def others_first(self: KeyLock, holder: Holder) -> bool:
        monkeypatch.setattr(KeyLock, "try_acquire", real)
        assert read(first) == DATA  # between our look and our lock
        return real(self, holder)

    monkeypatch.setattr(KeyLock, "try_acquire", others_first)
    assert late.opener.fetch(late.parse(URL))[1] == "coalesced"
    assert fetches(origin) == 1


# -- waiting -------------------------------------------------------------------------------


@pytest.mark.locks_work
def test_a_stuck_holder_is_announced_and_passed_by_and_keeps_its_lock(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock, caplog
) -> None:
    cache = make_cache(stale_after=60)
    lock = hold(cache, clock)
    with caplog.at_level(logging.WARNING):
        assert read(cache) == DATA
    assert 60 <= clock.elapsed < 65
    assert fetches(origin) == 1
    assert not KeyLock(lock.path).try_acquire(Holder(1, "x", None, None, 0.0))
    lock.release()
    said = [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "waiting"]
    assert len(said) == 5  # at 10, 20, ... 50 seconds
    assert "process 4711 on node-7 (rank 3) has been fetching it for 10" in said[0]
    assert "fetching it here too" in caplog.text


@pytest.mark.locks_work
def test_a_holder_that_makes_progress_is_never_passed_by(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock
) -> None:
    cache = make_cache(stale_after=10, lock_timeout=100)
    lock = hold(cache, clock)
    partial = Partial.create(layout(cache), metadata_for(cache, origin), "train-0000.tar")
    lock.update(Holder(4711, "node-7", 3, "job", clock.time(), partial.path.name))
    grown = [0]

    def grow() -> None:
        if int(clock.elapsed) > grown[-1]:
            grown.append(int(clock.elapsed))
            partial.record(len(grown), b"x" * 16, BLOCK)

    clock.on_sleep.append(grow)
    with pytest.raises(LockTimeoutError, match=r"process 4711 on node-7 \(rank 3\).*%"):
        cache.fetch(URL)
    assert 100 <= clock.elapsed < 101
    assert fetches(origin) == 0
    partial.discard()
    lock.release()


@pytest.mark.locks_work
def test_a_reader_that_waited_too_long_streams_unless_it_is_strict(
    make_cache: MakeCache, clock: FakeClock
) -> None:
    cache = make_cache(lock_timeout=5, stale_after=60)
    lock = hold(cache, clock)
    assert streamed(cache)
    assert 5 <= clock.elapsed < 6
    with pytest.raises(LockTimeoutError):
        make_cache(lock_timeout=5, stale_after=60, strict=True).open(URL)
    lock.release()


@pytest.mark.locks_work
def test_only_two_pass_a_stuck_holder_by(make_cache: MakeCache, clock: FakeClock) -> None:
    cache = make_cache(stale_after=1, lock_timeout=30)
    locks = [KeyLock(layout(cache).named_lock(f"private-{n}")) for n in range(2)]
    assert all(lock.try_acquire(Holder(1, "x", None, None, 0.0)) for lock in locks)
    locks.append(hold(cache, clock))
    with pytest.raises(LockTimeoutError):
        cache.fetch(URL)
    locks[0].release()
    assert cache.fetch(URL).size == len(DATA)
    for lock in locks:
        lock.release()


# -- resuming ------------------------------------------------------------------------------


@pytest.mark.locks_work("answers")
@pytest.mark.parametrize("replaced", [False, True])
def test_what_a_failed_fetch_left_is_resumed_unless_the_object_was_replaced(
    make_cache: MakeCache, origin: MemoryOrigin, replaced: bool
) -> None:
    cache = make_cache(attempts=1, connections=1)
    interrupted(cache, origin)
    if replaced:
        origin.objects[URL] = NEWER
    assert read(cache) == origin.objects[URL]
    assert origin.requests[0][1] == 2 * BLOCK
    assert len(origin.requests) == 1 + replaced
    assert os.listdir(layout(cache).partial) == []


@pytest.mark.locks_work
@pytest.mark.parametrize(("less", "stored"), [(0, True), (1, False)])
def test_a_resumed_fetch_needs_its_own_bytes_and_no_more(
    make_cache: MakeCache, origin: MemoryOrigin, less: int, stored: bool
) -> None:
    interrupted(make_cache(attempts=1, connections=1), origin)
    assert streamed(make_cache(max_size=len(DATA) - less)) != stored


@pytest.mark.locks_work("flock")
def test_a_resumed_fetch_is_admitted_anew(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    budget = len(DATA) + 5 * BLOCK
    cache = make_cache(attempts=1, connections=1, max_size=budget)
    interrupted(cache, origin)
    origin.objects[OTHER] = make_tar(2, members=2, size=2 * BLOCK)
    assert cache.fetch(OTHER).size > 5 * BLOCK  # the dead fetch holds nothing back
    assert streamed(cache)
    assert sum(entry.size for entry in cache.entries()) <= budget


@pytest.mark.locks_work
@pytest.mark.parametrize(("resumed", "rank"), [(True, None), (False, 3)])
def test_the_lock_says_who_fetches_what(
    make_cache: MakeCache,
    origin: MemoryOrigin,
    monkeypatch: pytest.MonkeyPatch,
    resumed: bool,
    rank: int | None,
) -> None:
    if resumed:
        interrupted(make_cache(attempts=1, connections=1), origin)
    if rank is not None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "8")
    cache, seen, real = make_cache(connections=1), [], origin.open

    def watched(*arguments: Any) -> Any:
        if arguments[1]:  # not the first, which tells the size
            holder = read_holder(layout(cache).key_lock(cache.parse(URL).key))
            assert holder is not None and [holder.partial] == os.listdir(layout(cache).partial)
            seen.append((holder.pid, holder.rank))
        return real(*arguments)

    origin.open = watched  # type: ignore[method-assign]
    origin.faults.append(Fault(after=BLOCK, error=TransientError("reset")))
    cache.fetch(URL)
    assert set(seen) == {(os.getpid(), rank)}


# -- damage --------------------------------------------------------------------------------


def truncated(entry: Any) -> None:
    os.truncate(entry.data, 100)


def without_sidecar(entry: Any) -> None:
    (entry.path / META).unlink()


@pytest.mark.parametrize("damage", [truncated, without_sidecar])
def test_a_damaged_entry_is_a_miss_with_a_reason_and_fetched_again(
    make_cache: MakeCache, origin: MemoryOrigin, caplog, damage: Callable[[Any], None]
) -> None:
    damage(make_cache().fetch(URL))
    with caplog.at_level(logging.WARNING):
        assert read(make_cache()) == DATA
    assert fetches(origin) == 2
    assert "was damaged and is fetched again" in caplog.text
    [aside] = os.listdir(layout(make_cache()).partial)
    assert aside.startswith("evict.")


def test_a_validate_hook_refuses_before_publishing(make_cache: MakeCache) -> None:
    seen: list[bytes] = []

    def check(path: Path) -> None:
        seen.append(path.read_bytes())
        if len(seen) == 1:
            raise ValueError("no labels")

    cache = make_cache(validate=check)
    with pytest.raises(IntegrityError, match="no labels"):
        cache.fetch(URL)
    assert list(cache.entries()) == []
    assert os.listdir(layout(cache).partial) == []
    assert read(cache) == DATA
    assert seen == [DATA, DATA]


@pytest.mark.locks_work("answers")
@pytest.mark.parametrize("times", [1, 1000])
def test_a_disk_or_quota_that_is_full_makes_room_once_and_then_streams(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    origin.objects[OTHER] = NEWER
    first = make_cache()
    os.utime(first.fetch(OTHER).path / META, (1, 1))  # a job that is over has left it
    first.close()
    cache, real, struck = make_cache(), Partial.write, []

    def write(*arguments: Any) -> None:
        if len(struck) < times:
            struck.append(arguments)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(*arguments)

    monkeypatch.setattr(Partial, "write", write)
    assert streamed(cache) == (times > 1)
    assert OTHER not in cache


# -- what other programs do to the cache ---------------------------------------------------


@pytest.mark.parametrize("what", ["", "v1/locks"])
@pytest.mark.locks_work("answers")
def test_directories_may_vanish_at_any_time(
    make_cache: MakeCache, origin: MemoryOrigin, what: str
) -> None:
    cache = make_cache()
    cache.fetch(URL)
    cache.remove(URL)
    shutil.rmtree(cache.dir / what)
    assert read(cache) == DATA
    assert URL in cache
    assert fetches(origin) == 2


def test_a_partial_that_is_swept_in_mid_fetch_is_begun_anew(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache(connections=1)
    gate, partial = threading.Event(), layout(cache).partial
    origin.faults.append(Fault(after=2 * BLOCK, wait=gate))

    def sweep() -> None:  # somebody's rm -rf: our own sweeper would see the lock
        wait_until(lambda: any(path.stat().st_size >= BLOCK for path in partial.glob("*/*.tar")))
        shutil.rmtree(partial, ignore_errors=True)
        gate.set()

    saboteur = threading.Thread(target=sweep)
    saboteur.start()
    assert read(cache) == DATA
    saboteur.join()
    assert URL in cache


def test_something_that_empties_the_cache_all_the_time_is_reported(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, real = make_cache(), Store.publish

    def publish(*arguments: Any, **options: Any) -> Path:
        entry = real(*arguments, **options)
        shutil.rmtree(entry)
        return entry

    monkeypatch.setattr(Store, "publish", publish)
    with pytest.raises(OSError, match="vanished, 5 times") as caught:
        cache.fetch(URL)
    assert not isinstance(caught.value, TransferError)  # the origin is well
    assert streamed(cache)


# -- uses, and siblings --------------------------------------------------------------------


def test_a_use_is_noted_once_and_then_every_touch_interval(
    make_cache: MakeCache, clock: FakeClock
) -> None:
    cache = make_cache(touch_interval=600)
    cache.fetch(URL)

    def used() -> float:
        (found,) = cache.entries()
        return found.used

    first = used()
    assert first == pytest.approx(clock.time(), abs=1e-3)  # a filesystem rounds
    clock.elapsed += 599
    read(cache)
    assert used() == first
    clock.elapsed += 1
    read(cache)
    assert used() == pytest.approx(clock.time(), abs=1e-3)


@pytest.mark.parametrize("how", ["is damaged", "cannot be linked"])
def test_a_copy_of_a_sibling_that_cannot_be_shared(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("SHARDCACHE_JOB", "job")
    monkeypatch.setenv("SHARDCACHE_RANK", "0")
    entry = make_cache(isolation="rank").fetch(URL)
    if how == "is damaged":
        truncated(entry)
    else:

        def refuse(*arguments: object) -> None:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setenv("SHARDCACHE_RANK", "1")
    assert read(make_cache(isolation="rank")) == DATA
    assert fetches(origin) == 1 + (how == "is damaged")
