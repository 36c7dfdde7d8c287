"""Downloads from an origin in memory that misbehaves."""

import contextlib
import os
import random
import threading
import time

import pytest

from shardcache.download import transfer
from shardcache.download.download import Download
from shardcache.errors import FetchCancelledError, ShardNotFoundError, TransferTimeoutError
from shardcache.origins.base import TransientError
from shardcache.urls import parse_url
from tests.support.caches import held_elsewhere, read
from tests.support.fakes import Fault, MemoryBody
from tests.support.storetools import BLOCK, PATIENCE, no_descriptor_left, no_thread, wait_until

URL, OTHER = "s3://lab/train-0000.bin", "s3://lab/other.bin"
SIZE = 5 * BLOCK + 777
DATA = random.Random(1).randbytes(SIZE)
NEWER = DATA[::-1]
OBJECTS = {URL: DATA, OTHER: DATA}


@pytest.fixture
def make(make_cache):
    """Makes caches that download parts of two blocks."""
    defaults = {"part_size": 2 * BLOCK, "connections": 4, "attempts": 3}
    return lambda **options: make_cache(**{**defaults, **options})


def fetched(cache, url=URL):
    return cache.fetch(url).data.read_bytes()


def run(cache, download):
    """Run this download as `Cache.fetch` runs its own."""
    opened = cache.process.fetch(download)
    opened.close()
    return opened.entry


def ranges(origin):
    return [(start, stop) for _, start, stop in origin.requests]


def stated(origin, data, url=URL):
    origin.objects[url] = data
    origin.state_checksum(url, data)


@pytest.mark.parametrize("sizes", [True, False], ids=["size", "no size"])
@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, SIZE])
def test_every_byte_arrives_once(make, origin, size, sizes):
    origin.objects[URL], origin.sizes = DATA[:size], sizes
    cache = make()
    download = Download(cache.process.downloads, parse_url(URL))
    with no_descriptor_left():
        assert run(cache, download).data.read_bytes() == DATA[:size]
    progress = download.progress()
    assert progress.received == progress.written == origin.delivered == size
    assert all(body.closed for body in origin.bodies)


def test_progress_resets_the_attempts_and_no_byte_arrives_twice(make, origin):
    origin.faults.extend(Fault(after=100_000) for _ in range(6))
    assert fetched(make(attempts=3, connections=1)) == DATA
    assert origin.delivered == SIZE


def test_without_conditional_requests_the_version_is_checked_at_the_end(make, origin):
    origin.proves_version = origin.states_checksums = False
    real = origin.stat

    def stat(url):
        if not origin.stats:
            origin.objects[URL] = NEWER
        return real(url)

    origin.stat = stat  # type: ignore[method-assign]
    assert fetched(make()) == NEWER


def test_bytes_after_an_abort_are_not_used(make, origin, monkeypatch):
    """An aborted TLS connection returns ciphertext."""
    origin.objects[URL] = DATA[: 4 * BLOCK]
    receiving, real = threading.Event(), MemoryBody.readinto

    def readinto(body, buffer):
        if body.start == 0:
            return real(body, buffer)
        receiving.set()
        assert body.aborted.wait(PATIENCE)
        buffer[:] = b"\xaa" * len(buffer)
        return len(buffer)

    # After some bytes of the first response, the other connections start.
    error = ShardNotFoundError("it vanished", url=URL)
    origin.faults.append(Fault(after=BLOCK, wait=receiving, error=error))
    monkeypatch.setattr(MemoryBody, "readinto", readinto)
    cache = make()
    with pytest.raises(ShardNotFoundError):
        cache.fetch(URL)
    assert receiving.is_set()
    monkeypatch.undo()
    assert fetched(cache) == DATA[: 4 * BLOCK]
    assert {start for start, _ in ranges(origin)[-2:]} == {BLOCK, 3 * BLOCK}  # resumed


def test_a_late_thread_writes_into_no_other_file(make, origin, pool, tmp_path, monkeypatch):
    """The download has failed, and another file may have its descriptor number."""
    monkeypatch.setattr(transfer, "_END_TIMEOUT", 0.0)
    more = origin.hold(BLOCK)  # the first part
    late, go, real = threading.Event(), threading.Event(), os.pwrite

    def pwrite(fd, data, offset):
        if offset == 2 * BLOCK:  # another thread writes the second part
            late.set()
            go.wait(PATIENCE)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    cache, other = make(connections=2), tmp_path / "other"
    with contextlib.ExitStack() as files:
        fetching = pool.submit(cache.fetch, URL)
        assert late.wait(PATIENCE)
        del origin.objects[URL]  # so the request for the third part fails
        more.set()
        assert isinstance(fetching.exception(PATIENCE), ShardNotFoundError)
        for _ in range(100):
            files.enter_context(other.open("ab"))
        go.set()
        no_thread("-part")
    assert other.read_bytes() == b""


@pytest.mark.parametrize(
    ("size", "etags", "rest"),
    [
        (BLOCK + 9, True, []),
        (2 * BLOCK + 1, True, [(2 * BLOCK, 2 * BLOCK + 1)]),  # longer than listed
        (2 * BLOCK + 1, False, []),  # parts could have different versions
    ],
)
def test_a_small_shard_that_was_listed_takes_one_request(make, origin, size, etags, rest):
    stated(origin, DATA[:size])
    origin.etags = etags
    cache = make()
    entry = run(cache, Download(cache.process.downloads, parse_url(URL), listed=BLOCK))
    assert entry.data.read_bytes() == DATA[:size]
    assert entry.metadata().checked == "crc32"
    assert (ranges(origin), origin.stats) == ([(0, None), *rest], [])


def test_after_a_small_shard_its_neighbour_takes_one_request(make, origin):
    """Its size is unknown, but probably similar. A whole response has a checksum."""
    neighbour = "s3://lab/neighbour.bin"
    stated(origin, DATA[: BLOCK + 9])
    stated(origin, DATA[: BLOCK + 9], neighbour)
    cache = make()
    cache.fetch(URL)
    assert cache.fetch(neighbour).metadata().checked == "crc32"
    assert (ranges(origin), origin.stats) == ([(0, 2 * BLOCK), (0, None)], [URL])


@pytest.mark.parametrize(
    ("is_silent", "most", "deadline"), [(False, 0.1, None), (True, 0.1, None), (True, 999, 2)]
)
def test_a_late_checksum_holds_up_no_shard(make, origin, monkeypatch, is_silent, most, deadline):
    monkeypatch.setattr(transfer, "_LAST_RESPONSE", most)
    over, stats = threading.Event(), []

    def stat(url):
        stats.append(url)
        if is_silent:
            over.wait(2 * PATIENCE)
        raise TransientError("503 Slow Down", retry_after=2 * PATIENCE)

    origin.stat = stat  # type: ignore[method-assign]
    start = time.monotonic()
    assert fetched(make(deadline=deadline)) == DATA
    assert time.monotonic() - start < PATIENCE
    assert len(stats) == 1
    over.set()


def test_closing_waits_a_limited_time_for_copies_to_an_upstream(make, tmp_path, monkeypatch):
    monkeypatch.setattr("shardcache.process.LAST_COPIES", 0.1)
    hangs = threading.Event()
    cache = make(upstreams=[{"url": str(tmp_path / "nas"), "write_back": True}])
    monkeypatch.setattr(cache.process.origins, "write_back", lambda *_: hangs.wait(2 * PATIENCE))
    start = time.monotonic()
    assert read(cache, URL) == DATA
    cache.close()
    assert time.monotonic() - start < PATIENCE
    hangs.set()


@pytest.mark.parametrize("during", ["another download", "no connection", "retries", "checksum"])
def test_a_waiting_download_can_be_cancelled(make, origin, pool, monkeypatch, during):
    monkeypatch.setattr(transfer, "_LAST_RESPONSE", 2 * PATIENCE)
    cache = make(attempts=100, connections=1 if during == "no connection" else 4)
    download, real = Download(cache.process.downloads, parse_url(URL)), origin.stat
    waits = {
        "another download": lambda: download.is_waiting,
        "no connection": lambda: cache.process.resources.connections._waiting,
        "retries": lambda: len(origin.requests) >= 3,
        "checksum": lambda: download.progress().written == SIZE,
    }
    with contextlib.ExitStack() as end:
        if during == "another download":
            end.callback(held_elsewhere(cache, URL).release)
        elif during == "no connection":
            end.callback(origin.hold(0).set)
            pool.submit(read, cache, OTHER)
            wait_until(lambda: origin.requests)
        elif during == "retries":
            origin.faults.extend(Fault(after=None) for _ in range(100))
        else:
            end.callback((over := threading.Event()).set)
            origin.stat = lambda shard: over.wait(3 * PATIENCE) and real(shard)
        fetching = pool.submit(run, cache, download)
        wait_until(waits[during])
        download.cancel()
        assert isinstance(fetching.exception(PATIENCE), FetchCancelledError)
    origin.faults.clear()
    assert fetched(cache) == DATA


def test_the_deadline_is_that_of_all_attempts(make, origin, clock):
    origin.state_checksum(URL, NEWER)  # so a second attempt follows
    origin.faults.extend([Fault(before=lambda: clock.sleep(2))] * 9)
    with pytest.raises(TransferTimeoutError, match="within the deadline of 5 s"):
        fetched(make(deadline=5, connections=1, part_size=SIZE // BLOCK * BLOCK))
