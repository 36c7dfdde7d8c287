"""Streams that the garbage collector closes: no deadlock, and no shard that stays open.

The collector may run at any moment, also in a thread that holds a lock which `close` needs.
"""

import gc
import itertools
import sys
import threading

import pytest

from shardcache.cache import Cache
from shardcache.download import download
from shardcache.download.download import Download
from shardcache.origins.base import RepeatError, TransientError
from tests.support.fakes import Fault
from tests.support.storetools import BLOCK, descriptors, forked, no_thread
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, members=3, size=BLOCK)
OBJECTS = {URL: DATA}


@pytest.fixture(autouse=True)
def _no_other_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_shards():
    return [each for each in descriptors() if "/partial/" in each or "/objects/" in each]


def test_a_stream_may_be_closed_at_every_call_that_a_download_makes(files):
    """In a child process, because a deadlock would never end. It takes less than a second."""
    files.files = {"/a.tar": DATA, "/b.tar": DATA}
    files.hold("/a.tar", BLOCK + 5)

    def work(parent):
        cache = Cache()
        streams = [cache.open(f"{files.url}/a.tar").detach() for _ in range(2000)]

        def close_one(frame, event, _):
            if streams and event.endswith("call") and "/shardcache/" in frame.f_code.co_filename:
                streams.pop().close()

        threading.setprofile(close_one)
        sys.setprofile(close_one)
        parent.say(cache.open(f"{files.url}/b.tar").read() == DATA)

    with forked(work) as child:
        assert child.hear(60.0)


def test_a_reader_joins_while_the_last_one_is_collected(make_cache, origin, tmp_path, monkeypatch):
    """At each call in `Download.join`, the new reader still gets all bytes."""
    monkeypatch.setattr(download, "_ALMOST_COMPLETE", -1)
    for number in itertools.count():
        more, cache = origin.hold(BLOCK + 5), make_cache(dir=tmp_path / str(number))
        last, calls = next(cache.url_opener([URL]))["stream"].detach(), itertools.count()

        def close_last(frame, *_):
            code = getattr(frame.f_back, "f_code", None), frame.f_code
            if Download.join.__code__ in code and next(calls) == number:  # noqa: B023
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


def test_a_child_that_closes_its_copy_of_a_stream_keeps_and_counts_nothing(make_cache, origin):
    """An open shard cannot be evicted."""
    more = origin.hold(BLOCK + 5)
    cache = make_cache(connections=1)
    stream = cache.open(URL)
    assert stream.read(10) == DATA[:10]
    more.set()
    no_thread("-fetch")

    def work(parent):
        stream.close()
        parent.say((open_shards(), cache.stats().opens))
        parent.hear()

    with forked(work) as child:
        assert child.hear() == ([], 0)
        stream.close()
        assert len(cache.clean(everything=True).removed) == 1
    assert (cache.stats().opens, cache.stats().misses) == (1, 1)


@pytest.mark.parametrize("ends", ["whole", "broken"])
@pytest.mark.parametrize("first", ["reader", "download"])
def test_the_last_of_reader_and_download_closes_the_shard(make_cache, origin, recwarn, first, ends):
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


def test_a_repeated_request_leaves_no_reference_cycle(make_cache, origin, no_threads):
    """A cycle would keep a partial and its lock until the next garbage collection."""

    def fail():
        raise RepeatError("remedy", TransientError("503"), lambda: False)

    origin.faults.append(Fault(before=fail))
    before = [each for each in gc.get_objects() if type(each) is Download]
    make_cache(attempts=2).fetch(URL)
    assert [each for each in gc.get_objects() if type(each) is Download] == before
