"""One download per node: threads and processes that share it, stuck holders, resumption."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardcache.errors import LockTimeoutError, TransferError
from shardcache.layout import META
from shardcache.origins.base import TransientError
from shardcache.store.entry import Store
from tests.support import caches, storetools
from tests.support.caches import held_elsewhere, unfinished
from tests.support.fakes import Fault
from tests.support.storetools import BLOCK, PATIENCE, forked, layout_of, refusing, room, wait_until
from tests.support.tars import make_tar

URL, OTHER = "s3://lab/train-0000.tar", "s3://lab/other.tar"
DATA = make_tar(1, members=3, size=BLOCK)
OBJECTS = {URL: DATA, OTHER: make_tar(2, members=2, size=2 * BLOCK)}


def read(cache):
    return caches.read(cache, URL)


def streamed(cache):
    """Read the shard, and return whether it was streamed past the cache."""
    with cache.open(URL) as stream:
        assert stream.read() == DATA
        return bool(stream.name == URL)


def test_all_uses_of_a_shard_in_a_process_share_one_download(make_cache, origin, pool, caplog):
    cache, more, stop = make_cache(connections=1), origin.hold(2 * BLOCK), threading.Event()
    stream = cache.open(URL)
    fetching = pool.submit(cache.fetch, URL)
    prewarms = [pool.submit(cache.prewarm, URL, stop=event) for event in (None, stop)]
    (download,) = unfinished(cache)
    wait_until(lambda: download.readers == 4)
    stop.set()  # which cancels the download of no other reader
    assert prewarms[1].result(PATIENCE).not_started == 1
    more.set()
    assert stream.read() == DATA and fetching.result(PATIENCE).size == len(DATA)
    assert prewarms[0].result(PATIENCE).coalesced == 1
    assert (origin.fetches, caches.warnings(caplog)) == (1, [])


def test_a_download_looks_the_shard_up_again_after_taking_the_lock(make_cache, origin, monkeypatch):
    first, late, real = make_cache(), make_cache(), fcntl.flock
    path = str(layout_of(late.dir).key_lock(late.parse(URL).key))

    def lock_late(fd, operation):
        if os.readlink(f"/proc/self/fd/{fd}") == path:
            monkeypatch.setattr(fcntl, "flock", real)
            assert read(first) == DATA  # between lookup and lock
        return real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert read(late) == DATA
    assert (origin.fetches, late.stats().coalesced) == (1, 1)


@pytest.mark.locks_work
def test_a_stuck_holder_is_announced_and_passed_by(make_cache, origin, clock, caplog):
    cache = make_cache(stale_after=55)
    lock = held_elsewhere(cache, URL, clock.time())
    with caplog.at_level(logging.WARNING):
        assert read(cache) == DATA
    assert 55 <= clock.elapsed < 60
    assert origin.fetches == 1
    with open(lock.path) as file, pytest.raises(BlockingIOError):  # it is still held
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    lock.release()
    waits = [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "waiting"]
    assert len(waits) == 5  # at 10, 20, ... 50 seconds
    assert "process 4711 on node-7 (rank 3) has been downloading it for 10" in waits[0]
    assert "downloading it here, too" in caplog.text


@pytest.mark.locks_work
def test_a_holder_with_progress_is_never_passed_by(make_cache, origin, clock):
    cache = make_cache(stale_after=10, lock_timeout=100)
    partial = storetools.begin(layout_of(cache.dir), storetools.metadata_for(URL, DATA))
    lock = held_elsewhere(cache, URL, clock.time(), partial=partial.path.name)
    grown = [0]

    def grow():
        if int(clock.elapsed) > grown[-1]:
            grown.append(int(clock.elapsed))
            partial.record(len(grown), b"x" * 16, BLOCK)

    clock.on_sleep.append(grow)
    with pytest.raises(LockTimeoutError, match=r"process 4711 on node-7 \(rank 3\).*%"):
        cache.fetch(URL)
    assert 100 <= clock.elapsed < 101
    assert origin.fetches == 0
    partial.discard()
    lock.release()


@pytest.mark.locks_work
def test_a_holder_that_waits_for_a_throttling_server_is_never_passed_by(
    make_cache, origin, pool, clock
):
    busy = TransientError("503 SlowDown", patient=True)
    origin.faults.extend(Fault(after=None, error=busy) for _ in range(9))
    step = threading.Barrier(2)  # both sleep equally often while both wait

    def take_turns():
        with contextlib.suppress(threading.BrokenBarrierError):
            step.wait(PATIENCE)

    clock.on_sleep.append(take_turns)
    reads = [pool.submit(read, make_cache(stale_after=5)) for _ in range(2)]
    for each in reads:
        each.add_done_callback(lambda _: step.abort())
    assert [each.result() for each in reads] == [DATA, DATA]
    assert clock.elapsed > 15 and len(origin.requests) == 9 + 1


@pytest.mark.locks_work
@pytest.mark.parametrize("jump", [0, 10**8, -(10**8)])
def test_after_lock_timeout_a_reader_streams_unless_it_is_strict(make_cache, clock, jump):
    # The wall clock does not matter.
    clock.on_sleep.append(lambda: setattr(clock, "now", clock.now + jump))
    cache = make_cache(lock_timeout=5, stale_after=60)
    lock = held_elsewhere(cache, URL)
    assert streamed(cache)
    assert 5 <= clock.elapsed < 6
    with pytest.raises(LockTimeoutError):
        make_cache(lock_timeout=5, stale_after=60, strict=True).open(URL)
    lock.release()


@pytest.mark.locks_work
@pytest.mark.parametrize("isolation", ["node", "rank"])
def test_only_two_pass_a_stuck_holder_by(make_cache, clock, set_variables, isolation):
    set_variables(SHARDCACHE_RANK="1")
    cache = make_cache(stale_after=1, lock_timeout=30, isolation=isolation)
    locks = [storetools.taken(layout_of(cache.dir).named_lock(f"private-{n}")) for n in range(2)]
    locks.append(held_elsewhere(cache, URL))
    with pytest.raises(LockTimeoutError):
        cache.fetch(URL)
    locks[0].release()
    assert cache.fetch(URL).size == len(DATA)
    for lock in locks:
        lock.release()


@pytest.fixture
def interrupted(make_cache, origin):
    """A download has ended after two blocks, and may be resumed."""
    origin.faults += [Fault(after=2 * BLOCK + 9), Fault(after=None)]
    with pytest.raises(TransferError):
        make_cache(attempts=1, connections=1).fetch(URL)


@pytest.mark.locks_work
@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(("more", "stored"), [(0, True), (-1, False), (5 * BLOCK, False)])
def test_a_resumed_download_needs_no_additional_room(make_cache, origin, tmp_path, more, stored):
    limit = room(tmp_path, len(DATA)) + more
    cache = make_cache(max_size=limit)
    if more > 0:  # a dead download reserves no room
        assert cache.fetch(OTHER).size > more
    assert streamed(cache) != stored
    assert room(tmp_path, *(entry.size for entry in cache.entries())) <= limit
    if more < 0:  # the download that found no room has lost nothing
        origin.requests.clear()
        assert not streamed(make_cache()) and origin.requests[0][1] == 2 * BLOCK


@pytest.mark.locks_work
@pytest.mark.usefixtures("interrupted")
def test_a_resumed_download_evicts_as_much_as_it_needs(make_cache, origin, tmp_path):
    small = make_tar(2, members=1, size=BLOCK // 4)
    limit = room(tmp_path, len(DATA), len(small))
    cache = make_cache(max_size=limit, policy="lru")
    layout_of(cache.dir).usage.unlink(missing_ok=True)  # a dead download reserves no room
    for number in range((limit - room(tmp_path, 3 * BLOCK)) // room(tmp_path, len(small))):
        origin.objects[f"s3://lab/{number}.tar"] = small
        cache.fetch(f"s3://lab/{number}.tar")
    assert not streamed(cache)
    assert room(tmp_path, *(entry.size for entry in cache.entries())) <= limit


def test_a_damaged_entry_is_downloaded_not_linked(make_job, origin, caplog):
    os.truncate(make_job("one").fetch(URL).data, 100)
    assert read(make_job("two")) == DATA
    assert (origin.fetches, caches.warnings(caplog)) == (2, [])
    cache = make_job("one")
    assert read(cache) == DATA  # by a link
    assert "was damaged and is downloaded again" in caplog.text
    [aside] = os.listdir(cache.process.last_tier.store.layout.partials)
    assert aside.startswith("evict.") and origin.fetches == 2


@pytest.mark.locks_work("answers")
@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("at", [0, 2 * BLOCK])
def test_a_full_disk_makes_room_once_then_streams(make_cache, monkeypatch, times, at):
    """Even if the reader has already received some bytes."""
    first = make_cache()
    os.utime(first.fetch(OTHER).path / META, (1, 1))  # by an earlier job
    first.close()
    cache, left = make_cache(), iter(range(times))

    def strikes(fd, data, offset):
        return len(data) > 10_000 and offset >= at and next(left, None) is not None  # no record

    monkeypatch.setattr(os, "pwrite", refusing(errno.EDQUOT, when=strikes, real=os.pwrite))
    assert streamed(cache) == (times > 1)
    assert (OTHER in cache, URL in cache) == (False, times == 1)
    if times > 1:
        with pytest.raises(OSError), make_cache(strict=True).open(URL) as stream:
            stream.read()


def test_a_program_that_keeps_emptying_the_cache_is_reported(make_cache, monkeypatch):
    cache, real = make_cache(), Store.publish

    def publish(*arguments, **options):
        entry = real(*arguments, **options)
        shutil.rmtree(entry)
        return entry

    monkeypatch.setattr(Store, "publish", publish)
    with pytest.raises(OSError, match="vanished, 5 times") as caught:
        cache.fetch(URL)
    assert not isinstance(caught.value, TransferError)  # no fault of the origin
    assert streamed(cache)


def test_a_use_is_recorded_once_per_ten_minutes(make_cache, clock):
    cache, used = make_cache(), []
    cache.fetch(URL)
    for seconds in (0, 599, 1):
        clock.elapsed += seconds
        assert read(cache) == DATA
        used.append(next(cache.entries()).used)
    assert used == [pytest.approx(clock.now + s, abs=1e-3) for s in (0, 0, 600)]


@pytest.mark.locks_work
def test_a_waiter_that_was_stopped_for_long_finds_the_shard(make_cache, origin):
    cache, more = make_cache(), origin.hold(BLOCK)

    def wait(parent):
        with ThreadPoolExecutor() as pool:
            fetching = pool.submit((waiter := make_cache(lock_timeout=1)).fetch, URL)
            wait_until(lambda: any(each.is_waiting for each in unfinished(waiter)))
            parent.say("waits")
            parent.say(fetching.result().size)

    with cache.open(URL) as stream, forked(wait) as child:
        assert child.hear() == "waits"
        child.kill(signal.SIGSTOP)
        more.set()
        assert stream.read() == DATA
        time.sleep(1)  # the lock timeout
        child.kill(signal.SIGCONT)
        assert child.hear() == len(DATA)
