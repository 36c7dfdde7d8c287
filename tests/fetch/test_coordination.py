"""One fetch per node: many threads and processes, stale and dead holders."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import shardcache.clock
from shardcache.cache import Cache
from shardcache.errors import IntegrityError, LockTimeoutError, TransferError
from shardcache.layout import Layout
from shardcache.locks.flock import Holder, KeyLock, read_holder
from shardcache.origins.base import TransientError
from shardcache.store.digest import BLOCK
from shardcache.store.partial import Partial
from shardcache.store.store import Store
from tests.support.fakes import FakeClock, Fault, MemoryOrigin
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, members=3, size=BLOCK)
MakeCache = Callable[..., Cache]


@pytest.fixture(autouse=True)
def _object(origin: MemoryOrigin) -> None:
    origin.objects[URL] = DATA


def read(cache: Cache, url: str = URL) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def fetches(origin: MemoryOrigin) -> int:
    return sum(start == 0 for _, start, _ in origin.requests)


def hold(cache: Cache, *, pid: int = 4711, started: float | None = None) -> KeyLock:
    """Take the key's lock as another process would."""
    shard = cache.parse(URL)
    lock = KeyLock(Layout.of_root(cache.dir).key_lock(shard.key))
    now = shardcache.clock.time() if started is None else started
    assert lock.try_acquire(Holder(pid, "node-7", 3, "job", now))
    return lock


@pytest.mark.locks_work
def test_threads_share_one_fetch(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    cache = make_cache()
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(read(cache))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [DATA] * 16
    assert fetches(origin) == 1
    assert origin.delivered == len(DATA)


def test_whoever_gets_the_lock_looks_again_before_fetching(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = make_cache(), make_cache()
    real = KeyLock.try_acquire

    def others_first(self: KeyLock, holder: Holder) -> bool:
        monkeypatch.setattr(KeyLock, "try_acquire", real)
        assert read(first) == DATA  # between our look and our lock
        return real(self, holder)

    monkeypatch.setattr(KeyLock, "try_acquire", others_first)
    assert late.opener.fetch(late.parse(URL))[1] == "coalesced"
    assert fetches(origin) == 1


def test_a_hit_asks_the_origin_nothing(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    cache = make_cache()
    read(cache)
    origin.requests.clear()
    origin.stats.clear()
    origin.objects.clear()
    assert read(cache) == DATA
    assert read(make_cache()) == DATA
    assert (origin.requests, origin.stats) == ([], [])


@pytest.mark.locks_work
def test_a_stuck_holder_is_passed_by_after_stale_after_and_keeps_its_lock(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(stale_after=120)
    lock = hold(cache)
    with caplog.at_level(logging.WARNING):
        assert read(cache) == DATA
    assert 120 <= clock.elapsed < 125
    assert fetches(origin) == 1
    another = KeyLock(lock.path)
    assert not another.try_acquire(Holder(1, "x", None, None, 0.0))  # still the holder's
    lock.release()
    text = caplog.text
    assert "process 4711 on node-7 (rank 3) has been fetching it for 10" in text
    assert "fetching it here too" in text


@pytest.mark.locks_work
def test_waiting_is_announced_every_ten_seconds(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(stale_after=60)
    lock = hold(cache)
    with caplog.at_level(logging.WARNING, logger="shardcache.fetch.waiting"):
        read(cache)
    lock.release()
    announced = [r for r in caplog.records if "waiting for" in r.getMessage()]
    assert len(announced) == 5  # at 10, 20, ... 50 seconds


@pytest.mark.locks_work
def test_a_holder_that_makes_progress_is_never_passed_by(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock
) -> None:
    cache = make_cache(stale_after=10, lock_timeout=100)
    lock = hold(cache)
    shard = cache.parse(URL)
    layout = Layout.of_root(cache.dir)
    template = metadata_for(cache, origin)
    partial = Partial.create(layout, template, shard.basename)
    lock.update(Holder(4711, "node-7", 3, "job", clock.time(), partial.path.name))
    block = iter(range(10**6))

    def grow() -> None:
        if int(clock.elapsed) > grow.last:
            grow.last = int(clock.elapsed)
            partial.record(next(block), b"x" * 16, BLOCK)

    grow.last = 0
    clock.on_sleep.append(grow)
    with pytest.raises(LockTimeoutError, match=r"process 4711 on node-7 \(rank 3\)") as caught:
        cache.fetch(URL)
    assert 100 <= clock.elapsed < 101
    assert "%" in str(caught.value)
    assert fetches(origin) == 0
    partial.discard()
    lock.release()


def metadata_for(cache: Cache, origin: MemoryOrigin):
    from shardcache.store.entry import Metadata

    shard = cache.parse(URL)
    return Metadata(URL, shard.key, origin.info(shard), len(DATA), "", None, 1.0, "boot", "test")


@pytest.mark.locks_work
def test_a_reader_that_waited_too_long_streams_instead(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock
) -> None:
    cache = make_cache(lock_timeout=5, stale_after=60)
    lock = hold(cache)
    stream, path = cache.opener.open(cache.parse(URL))
    with stream:
        assert stream.read() == DATA
    assert path is None
    assert 5 <= clock.elapsed < 6
    lock.release()


@pytest.mark.locks_work
def test_a_strict_reader_that_waited_too_long_gets_the_error(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock
) -> None:
    cache = make_cache(lock_timeout=5, stale_after=60, strict=True)
    lock = hold(cache)
    with pytest.raises(LockTimeoutError):
        cache.open(URL)
    lock.release()


@pytest.mark.locks_work
def test_only_two_pass_a_stuck_holder_by(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock
) -> None:
    cache = make_cache(stale_after=1, lock_timeout=30)
    lock = hold(cache)
    layout = Layout.of_root(cache.dir)
    slots = [KeyLock(layout.named_lock(f"private-{n}")) for n in range(2)]
    for slot in slots:
        assert slot.try_acquire(Holder(1, "x", None, None, 0.0))
    with pytest.raises(LockTimeoutError):
        cache.fetch(URL)
    slots[0].release()
    assert cache.fetch(URL).size == len(DATA)
    slots[1].release()
    lock.release()


@pytest.mark.locks_work("flock")
def test_a_late_holder_publishes_nothing_over_the_entry(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache()
    shard = cache.parse(URL)
    late = Partial.create(Layout.of_root(cache.dir), metadata_for(cache, origin), shard.basename)
    entry = cache.fetch(URL)
    inode = entry.data.stat().st_ino
    late.write(0, memoryview(DATA))
    store = Store(Layout.of_root(cache.dir))
    assert store.publish(late, entry.metadata()) == entry.path
    late.close()
    assert entry.data.stat().st_ino == inode
    assert os.listdir(Layout.of_root(cache.dir).partial) == []


@pytest.mark.locks_work("answers")
def test_what_a_failed_fetch_left_is_resumed(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    cache = make_cache(attempts=1, connections=1)
    origin.faults.append(Fault(after=2 * BLOCK + 9, error=TransientError("reset")))
    origin.faults.append(Fault(after=None))
    with pytest.raises(TransferError):
        cache.fetch(URL)
    origin.requests.clear()
    assert read(cache) == DATA
    assert [start for _, start, _ in origin.requests] == [2 * BLOCK]


def interrupted(cache: Cache, origin: MemoryOrigin) -> None:
    """A fetch that fails after a block and leaves it."""
    origin.faults.append(Fault(after=BLOCK + 9, error=TransientError("reset")))
    origin.faults.append(Fault(after=None))
    with pytest.raises(TransferError):
        cache.fetch(URL)
    origin.requests.clear()


@pytest.mark.locks_work
@pytest.mark.parametrize(("less", "stored"), [(0, True), (1, False)])
def test_a_resumed_fetch_needs_its_own_bytes_and_no_more(
    make_cache: MakeCache, origin: MemoryOrigin, less: int, stored: bool
) -> None:
    interrupted(make_cache(attempts=1, connections=1), origin)
    cache = make_cache(max_size=len(DATA) - less)
    with cache.open(URL) as stream:
        assert stream.read() == DATA
        assert (stream.name != URL) == stored
    assert len(list(cache.entries())) == stored


@pytest.mark.locks_work
@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize("rank", [None, 3])
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
    cache = make_cache(connections=1)
    layout = Layout.of_root(cache.dir)
    seen: list[Holder] = []
    real = origin.open

    def watched(*args):
        if args[1]:  # not the first, which tells the size
            holder = read_holder(layout.key_lock(cache.parse(URL).key))
            assert holder is not None
            seen.append(holder)
            assert [holder.partial] == os.listdir(layout.partial)
        return real(*args)

    origin.open = watched
    origin.faults.append(Fault(after=BLOCK, error=TransientError("reset")))
    cache.fetch(URL)
    assert {(holder.pid, holder.rank) for holder in seen} == {(os.getpid(), rank)}


@pytest.mark.locks_work("answers")
def test_a_resumed_partial_of_an_older_version_is_dropped(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache(attempts=1, connections=1)
    origin.faults.append(Fault(after=2 * BLOCK + 9, error=TransientError("reset")))
    origin.faults.append(Fault(after=None))
    with pytest.raises(TransferError):
        cache.fetch(URL)
    newer = make_tar(2, members=3, size=BLOCK)
    origin.objects[URL] = newer
    assert read(cache) == newer
    assert URL in cache
    assert os.listdir(Layout.of_root(cache.dir).partial) == []


def test_a_damaged_entry_is_a_miss_with_a_reason_and_fetched_again(
    make_cache: MakeCache, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    entry = make_cache().fetch(URL)
    os.truncate(entry.data, 100)
    with caplog.at_level(logging.WARNING):
        assert read(make_cache()) == DATA
    assert fetches(origin) == 2
    assert "its data file has 100 bytes" in caplog.text
    [aside] = os.listdir(Layout.of_root(make_cache().dir).partial)
    assert aside.startswith("evict.")


def test_a_missing_sidecar_is_a_miss(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    entry = make_cache().fetch(URL)
    (entry.path / "meta.json").unlink()
    assert read(make_cache()) == DATA
    assert fetches(origin) == 2


def test_an_entry_of_another_boot_is_verified_once(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_cache().fetch(URL)
    os.chmod(entry.data, 0o600)
    with open(entry.data, "r+b") as file:  # same size, other bytes: lost in a power failure
        file.seek(2 * BLOCK)
        file.write(bytes(64))
    assert read(make_cache()) != DATA  # same boot: trusted
    monkeypatch.setattr("shardcache.store.store.boot_id", lambda: "another-boot")
    monkeypatch.setattr("shardcache.fetch.coordinator.boot_id", lambda: "another-boot")
    assert read(make_cache()) == DATA
    assert fetches(origin) == 2
    hashed: list[int] = []
    monkeypatch.setattr("shardcache.store.store.file_digest", hashed.append)
    assert read(make_cache()) == DATA
    assert hashed == []


def test_a_validate_hook_refuses_before_publishing(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    seen: list[bytes] = []

    def check(path: Path) -> None:
        seen.append(path.read_bytes())
        if len(seen) == 1:
            raise ValueError("no labels")

    cache = make_cache(validate=check)
    with pytest.raises(IntegrityError, match="no labels"):
        cache.fetch(URL)
    assert list(cache.entries()) == []
    assert read(cache) == DATA
    assert seen == [DATA, DATA]


def test_an_error_page_is_not_published(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    origin.objects[URL] = b"<html><body>503 Service Unavailable</body></html>" * 20
    cache = make_cache()
    with pytest.raises(IntegrityError, match="no tar archive"):
        cache.fetch(URL)
    assert list(cache.entries()) == []
    assert os.listdir(Layout.of_root(cache.dir).partial) == []


def test_a_full_disk_makes_room_once_and_then_streams(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    tries: list[int] = []

    def full(self, offset, data, fd=None):
        tries.append(offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Partial, "write", full)
    stream, path = cache.opener.open(cache.parse(URL))
    with stream:
        assert stream.read() == DATA
    assert path is None
    assert len(tries) >= 1


def test_the_cache_directory_may_vanish_in_mid_run(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache()
    read(cache)
    shutil.rmtree(cache.dir)
    assert read(cache) == DATA  # streamed or fetched anew: the reader does not care
    assert fetches(origin) == 2


def test_the_lock_directory_may_be_deleted_at_any_time(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache()
    shutil.rmtree(Layout.of_root(cache.dir).locks)
    assert read(cache) == DATA
    assert fetches(origin) == 1
    assert len(list(cache.entries())) == 1


def test_a_use_is_noted_once_and_then_every_touch_interval(
    make_cache: MakeCache, origin: MemoryOrigin, clock: FakeClock
) -> None:
    cache = make_cache(touch_interval=600)
    entry = cache.fetch(URL)

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
    assert entry.path.exists()


@pytest.mark.locks_work("answers")
def test_a_quota_that_is_reached_evicts_what_finished_jobs_left(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = "s3://lab/old.tar"
    origin.objects[old] = make_tar(7, members=3, size=BLOCK)
    first = make_cache()
    os.utime(first.fetch(old).path / "meta.json", (1, 1))
    first.close()
    cache = make_cache()
    real = Partial.write
    struck: list[int] = []

    def write(self, offset, data, fd=None):
        if not struck:
            struck.append(offset)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(self, offset, data, fd)

    monkeypatch.setattr(Partial, "write", write)
    assert read(cache) == DATA
    assert URL in cache
    assert old not in cache


def test_a_partial_that_is_swept_in_mid_fetch_is_begun_anew(
    make_cache: MakeCache, origin: MemoryOrigin, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(connections=1)
    gate = threading.Event()
    origin.faults.append(Fault(after=2 * BLOCK, wait=gate))
    partial = Layout.of_root(cache.dir).partial

    def sweep() -> None:
        # Somebody's rm -rf: our own sweeper would see the lock.
        while not any(path.stat().st_size >= BLOCK for path in partial.glob("*/*.tar")):
            time.sleep(0.01)
        shutil.rmtree(partial, ignore_errors=True)
        gate.set()

    saboteur = threading.Thread(target=sweep)
    saboteur.start()
    assert read(cache) == DATA
    saboteur.join()
    assert URL in cache


def ranks(cache_options: dict, monkeypatch: pytest.MonkeyPatch, rank: int) -> dict:
    monkeypatch.setenv("SHARDCACHE_RANK", str(rank))
    monkeypatch.setenv("SHARDCACHE_JOB", "job")
    return {**cache_options, "isolation": "rank"}


def test_a_damaged_copy_of_a_sibling_is_not_shared(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_cache(**ranks({}, monkeypatch, 0)).fetch(URL)
    os.chmod(entry.data, 0o600)
    os.truncate(entry.data, 10)
    assert read(make_cache(**ranks({}, monkeypatch, 1))) == DATA
    assert fetches(origin) == 2


def test_where_links_are_impossible_the_siblings_copy_is_read(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(**ranks({}, monkeypatch, 0)).fetch(URL)

    def refuse(*args: object, **kw: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    cache = make_cache(**ranks({}, monkeypatch, 1))
    assert read(cache) == DATA
    assert fetches(origin) == 1
    assert len(list(cache.entries())) == 1


def test_something_that_empties_the_cache_all_the_time_is_reported(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache()
    real = Store.publish

    def publish(self, *args, **kw):
        entry = real(self, *args, **kw)
        shutil.rmtree(entry)
        return entry

    monkeypatch.setattr(Store, "publish", publish)
    with pytest.raises(OSError, match="vanished, 5 times") as caught:
        cache.fetch(URL)
    assert not isinstance(caught.value, TransferError)  # the origin is well
    with cache.open(URL) as stream:
        assert stream.name == URL
        assert stream.read() == DATA


@pytest.mark.locks_work("flock")
def test_a_resumed_fetch_is_admitted_anew(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    other = "s3://lab/other.tar"
    origin.objects[other] = make_tar(2, members=3, size=BLOCK)
    budget = len(DATA) + 5 * BLOCK
    cache = make_cache(attempts=1, connections=1, max_size=budget)
    origin.faults.append(Fault(after=BLOCK + 9, error=TransientError("reset")))
    origin.faults.append(Fault(after=None))
    with pytest.raises(TransferError):
        cache.fetch(URL)
    origin.objects[other] = make_tar(2, members=2, size=2 * BLOCK)
    assert cache.fetch(other).size > 5 * BLOCK  # the dead fetch holds nothing back
    stream, path = cache.opener.open(cache.parse(URL))
    with stream:
        assert stream.read() == DATA
    assert path is None
    assert sum(entry.size for entry in cache.entries()) <= budget
