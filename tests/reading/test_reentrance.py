"""Streams that the garbage collector closes: no deadlock, and no shard that stays open.

The collector may run at any moment, also in a thread that holds a lock which `close` needs.
"""

import contextlib
import errno
import gc
import itertools
import os
import sys
import threading
import weakref

import pytest

from shardcache.cache import Cache
from shardcache.download import download
from shardcache.download.download import Downloads
from shardcache.errors import ShardNotFoundError
from tests.support.fakes import Fault
from tests.support.storetools import BLOCK, PATIENCE, descriptors, forked, no_thread, room
from tests.support.tars import make_tar
from tests.support.webservers import Files, running

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, members=3, size=BLOCK)


@pytest.fixture(autouse=True)
def _no_other_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def drop(stream):
    """Put the stream into a reference cycle, so that the garbage collector closes it."""
    dropped = [stream]
    dropped.append(dropped)


def ends(function):
    """Call the function in a thread, and assert that it returns."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def open_shards():
    return [each for each in descriptors() if "/partial/" in each or "/objects/" in each]


@pytest.mark.parametrize("size", [BLOCK // 2, BLOCK, 2 * len(DATA)])
def test_after_a_dropped_stream_the_next_request_works(tmp_path, size):
    """The connection of the dropped stream was in use, at the end of a part, or free."""
    server = Files()
    server.files["/a.tar"] = DATA * 2
    cache = Cache(tmp_path / "cache", max_size="4MiB", min_free=0, part_size="1MiB", attempts=1)
    with running(server), cache:
        url = f"{server.url}/a.tar"
        for _ in range(3):
            stream = cache.open(url)
            assert stream.read(size) == (DATA * 2)[:size]
            drop(stream)
            del stream
            ends(gc.collect)
            with cache.open(url) as again:
                assert again.read() == DATA * 2


def test_a_child_that_closes_a_stream_of_its_parent_counts_nothing(make_cache, origin, tmp_path):
    big = "s3://lab/big.tar"
    origin.objects.update({URL: DATA, big: DATA * 2})
    cache = make_cache(connections=1, attempts=1, max_size=room(tmp_path, len(DATA)))
    streamed = cache.open(big)
    assert streamed.read(BLOCK)
    more = origin.hold(3 * BLOCK + 5)
    followed = cache.open(URL)
    assert followed.read(BLOCK)

    assert cache.stats().opens == 1

    def work(parent):
        followed.close()
        streamed.close()
        parent.say(cache.stats().opens)

    try:
        with forked(work) as child:
            assert child.hear() == 1
    finally:
        more.set()
    for stream in (followed, streamed):
        stream.read()
        stream.close()
    cache.close()
    found = cache.stats()
    assert (found.opens, found.misses, found.streamed) == (2, 1, 1)
    assert found.bytes_streamed == 2 * len(DATA)


def test_a_stream_may_be_closed_at_every_call_that_a_download_makes(tmp_path):
    """In a child process, because a deadlock would never end. It takes less than a second."""
    server = Files()
    server.files = {"/a.tar": DATA, "/b.tar": DATA}
    server.hold("/a.tar", BLOCK + 5)

    def work(parent):
        cache = Cache(tmp_path / "cache", min_free=0)
        streams = [cache.open(f"{server.url}/a.tar").detach() for _ in range(2000)]

        def close_one(frame, event, _):
            if streams and event.endswith("call") and "/shardcache/" in frame.f_code.co_filename:
                streams.pop().close()

        threading.setprofile(close_one)
        sys.setprofile(close_one)
        parent.say(cache.open(f"{server.url}/b.tar").read() == DATA)

    with running(server), forked(work) as child:
        assert child.hear(60.0)


def test_a_reader_joins_while_the_collector_closes_the_last_other_one(
    make_cache, origin, tmp_path, monkeypatch
):
    """At each call in `Downloads.join`, the new reader still gets all bytes."""
    monkeypatch.setattr(download, "_ALMOST_COMPLETE", -1)
    origin.objects[URL] = DATA
    for number in itertools.count():
        more, cache = origin.hold(BLOCK + 5), make_cache(dir=tmp_path / str(number))
        last, calls = next(cache.url_opener([URL]))["stream"].detach(), itertools.count()

        def close_last(frame, *_):
            code = getattr(frame.f_back, "f_code", None), frame.f_code
            if Downloads.join.__code__ in code and next(calls) == number:  # noqa: B023
                last.close()  # noqa: B023

        sys.setprofile(close_last)
        stream = next(cache.url_opener([URL]))["stream"]
        sys.setprofile(None)
        more.set()
        assert stream.read() == DATA
        if not last.closed:
            break
    assert number > 5
    last.close()


def test_a_child_that_closes_its_copy_of_a_stream_keeps_no_shard_open(make_cache, origin):
    """An open shard cannot be evicted."""
    origin.objects[URL] = DATA
    more = origin.hold(BLOCK + 5)
    cache = make_cache(connections=1)
    stream = cache.open(URL)
    assert stream.read(10) == DATA[:10]
    more.set()
    no_thread("-fetch")

    def work(parent):
        stream.close()
        parent.say(open_shards())
        parent.hear()

    with forked(work) as child:
        assert child.hear() == []
        stream.close()
        assert len(cache.clean(everything=True).removed) == 1


@pytest.mark.parametrize("ends", ["whole", "broken"])
@pytest.mark.parametrize("first", ["reader", "download"])
def test_the_last_of_reader_and_download_closes_the_shard(make_cache, origin, recwarn, first, ends):
    origin.objects[URL] = DATA
    more = origin.hold(BLOCK + 5)
    if ends == "broken":
        origin.faults.append(Fault(after=None))  # the next request
    cache = make_cache(connections=1, attempts=1, part_size=2 * BLOCK)
    stream = cache.open(URL)
    assert stream.read(10) == DATA[:10]
    for event in (stream.close, more.set) if first == "reader" else (more.set, stream.close):
        event()
        if event == more.set:
            no_thread("-fetch")
    assert open_shards() == []
    assert len(cache.clean(everything=True).removed) == 1
    assert not [each for each in recwarn if each.category is ResourceWarning]


@pytest.mark.parametrize("how", ["fetch", "pinned"])
def test_a_handled_error_keeps_no_shard_open(make_cache, origin, how):
    """Its traceback refers to frames, which refer to open files."""
    other = "s3://lab/other.tar"
    origin.objects.update({URL: DATA, other: DATA})
    cache = make_cache(connections=1, attempts=1, part_size=2 * BLOCK)
    cache.fetch(other)
    origin.faults += [Fault(), Fault(before=lambda: origin.objects.pop(URL))]  # the second part

    def work():
        opened = cache.open(other)
        assert opened.read(10) == DATA[:10]
        cache.fetch(URL) if how == "fetch" else cache.pinned(URL).__enter__()

    with contextlib.suppress(ShardNotFoundError):
        work()
    cache.clean(everything=True)
    assert other not in cache


def test_a_fault_that_was_streamed_past_is_forgotten_with_its_stream(
    make_cache, origin, monkeypatch
):
    """Its traceback refers to all frames of the download."""

    class DiskError(OSError):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            errors.append(weakref.ref(self))

    def fail(*_):
        raise DiskError(errno.EIO, "Input/output error")

    errors: list[weakref.ref[DiskError]] = []
    origin.objects[URL] = DATA
    cache = make_cache(connections=1)
    monkeypatch.setattr(os, "pwrite", fail)
    with cache.open(URL) as stream:
        assert stream.read() == DATA
    no_thread("-fetch")
    assert {error() for error in errors} == {None}
