"""Streams past the cache: one request, from a nearer copy, and never two versions."""

import gc
import os

import pytest

from shardcache import TransferError
from shardcache.errors import CacheFullError
from tests.support import caches
from tests.support.fakes import Fault
from tests.support.storetools import BLOCK, no_descriptor_left
from tests.support.tars import make_tar

URLS = [f"s3://lab/{name}/0.tar" for name in "abc"]
URL = URLS[0]
LARGE = make_tar(1, 4, BLOCK // 2)  # 4 MiB: longer than the first part
DATA = make_tar(1, members=50, size=40_000)
OTHER = make_tar(2, members=50, size=40_000)
OBJECTS = {URL: DATA}


def read(cache, url=URL):
    return caches.read(cache, url)


def starts(origin):
    return [start for _, start, _ in origin.requests]


@pytest.fixture
def large(origin):
    origin.states_checksums = False
    origin.objects.update({url: LARGE + bytes([n]) * 512 for n, url in enumerate(URLS)})
    return list(origin.objects.values())


@pytest.mark.parametrize("how", ["follow", "complete", "ahead"])
def test_a_shard_larger_than_the_budget_costs_one_request(make_cache, origin, large, how):
    fill = "follow" if how == "ahead" else how
    cache = make_cache(max_size="2MiB", part_size="1MiB", fill=fill, prefetch=2)
    with no_descriptor_left():
        if how == "ahead":
            rows = cache.url_opener({"url": url} for url in URLS)
            assert [row["stream"].read() for row in rows] == large
        else:
            assert [read(cache, url) for url in URLS] == large
        gc.collect()
    assert starts(origin) == [0, 0, 0]
    assert origin.delivered == sum(map(len, large))
    assert all(body.closed for body in origin.bodies)


def test_a_response_without_a_reader_is_closed(make_cache, origin, large):
    cache = make_cache(max_size="2MiB", part_size="1MiB", strict=True)
    with pytest.raises(CacheFullError), cache.pinned(URL):
        pass
    with pytest.raises(CacheFullError):
        cache.open(URLS[1])
    assert cache.prewarm([URLS[2]]).fetched == 0
    gc.collect()
    assert all(body.closed for body in origin.bodies)


@pytest.fixture
def full(make_cache):
    """Makes caches without room for a shard."""
    return lambda **options: make_cache(max_size=1000, **options)


@pytest.mark.parametrize("max_size", [None, 1000], ids=["download", "past"])
def test_a_server_that_ends_each_answer_early_gets_few_requests(make_cache, origin, max_size):
    """Fewer bytes than an attempt must receive."""
    origin.faults.extend([Fault(after=5000)] * 99)
    with pytest.raises(TransferError):
        read(make_cache(max_size=max_size, attempts=3, connections=1))
    assert len(origin.requests) <= 4


def test_a_slow_reader_causes_no_timeout(full, origin, clock):
    received = bytearray()
    with full(attempts=1, deadline=100.0, timeout=30.0).open(URL) as stream:
        while chunk := stream.read(10_240):
            received += chunk
            clock.sleep(5)
    assert received == DATA
    assert len(origin.requests) == 1


def test_a_stream_past_the_cache_can_seek(full, origin):
    with full().open(URL) as stream:
        assert stream.read(10) == DATA[:10]
        stream.seek(BLOCK)
        assert stream.read(10) == DATA[BLOCK:][:10]
        stream.seek(-5, os.SEEK_END)
        assert (stream.read(), stream.tell()) == (DATA[-5:], len(DATA))
        stream.seek(0)
        origin.objects[URL] = OTHER
        with pytest.raises(TransferError, match="was replaced while it was streamed"):
            stream.read()


def test_a_stream_of_a_size_that_only_its_end_shows_can_be_read_again(full, origin):
    origin.sizes = False
    with full().open(URL) as stream:
        for _ in range(2):
            assert stream.read() == DATA
            stream.seek(0)


@pytest.mark.parametrize("when", ["before it is continued", "before its last bytes"])
def test_the_version_of_a_streamed_file_is_compared(full, tmp_path, fail_files, when):
    """A filesystem knows no conditional requests."""
    path, new = tmp_path / "a.bin", tmp_path / "new"
    path.write_bytes(DATA)
    cache = full(cache_local=True, attempts=3)
    assert read(cache, str(path)) == DATA
    with cache.open(str(path)) as stream:
        assert stream.name == f"file://{path}"
        assert stream.raw.read(BLOCK) == DATA[:BLOCK]
        new.write_bytes(DATA[::-1])
        os.utime(new, (1, 1))
        new.rename(path)
        if when == "before it is continued":
            fail_files(-1)
        with pytest.raises(TransferError, match="was replaced"):
            stream.raw.readall()


@pytest.fixture
def copy(filled):
    return filled(URL)


@pytest.fixture
def near(full, tmp_path, nas, copy):
    """A cache without room that reads the copy."""
    return full(dir=tmp_path / "full", upstreams=[nas], attempts=1)


@pytest.mark.parametrize("what", ["the copy", "both", "a copy without sidecar"])
def test_when_a_copy_is_replaced_the_rest_has_the_same_version(near, copy, origin, what):
    if what == "a copy without sidecar":
        copy.with_name("0.tar.shardcache.json").unlink()
    with near.open(URL) as stream:
        begin = stream.read(10)
        copy.with_name("new").write_bytes(OTHER)
        copy.with_name("new").replace(copy)
        if what == "the copy":
            assert begin + stream.read() == DATA
            assert min(starts(origin)) > 0
            return
        if what == "both":
            origin.objects[URL] = OTHER
        with pytest.raises(TransferError, match="was replaced while it was streamed"):
            stream.read()


@pytest.mark.parametrize("piece", [10_007, 2 * BLOCK])
def test_a_read_after_an_error_skips_no_bytes(near, origin, fail_files, monkeypatch, piece):
    """The copy fails within a block, and the origin fails once."""
    got, errors = bytearray(), 0
    with near.open(URL) as stream:
        fail_files(BLOCK + BLOCK // 2 - 1, most=BLOCK // 4)
        origin.faults.append(Fault(None))
        while errors < 3:
            try:
                if not (found := stream.read(piece)):
                    break
                got += found
            except TransferError:
                errors += 1
    assert errors == 3
    assert DATA.startswith(bytes(got))
    monkeypatch.undo()
    assert read(near) == DATA and len(origin.requests) == 1 and origin.stats == []


@pytest.mark.parametrize("copied", ["the same", "without sidecar", "another", "none"])
def test_a_read_of_a_damaged_entry_is_continued_from_a_source_of_its_version(
    make_cache, tmp_path, nas, copy, origin, copied
):
    """Without a sidecar, the version of the entry is that of the copy."""
    if copied == "without sidecar":
        copy.with_name("0.tar.shardcache.json").unlink()
    cache = make_cache(dir=tmp_path / "node", upstreams=[nas])
    assert read(cache) == DATA
    if copied == "another":
        copy.write_bytes(OTHER)
        copy.with_name("0.tar.shardcache.json").unlink()
    elif copied == "none":
        copy.unlink()
    with cache.open(URL) as stream:
        begin = stream.read(1000)
        os.truncate(stream.name, BLOCK)
        assert begin + stream.read() == DATA
    assert starts(origin) == ([] if copied in ("the same", "without sidecar") else [BLOCK])
