"""Shards that are read while this or another process downloads them."""

import io
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from shardcache.errors import FetchCancelledError, IntegrityError, TransferError
from shardcache.layout import Layout
from tests.support.caches import unfinished
from tests.support.fakes import Fault
from tests.support.storetools import BLOCK, PATIENCE, no_thread, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, members=3, size=BLOCK)
OBJECTS = {URL: DATA}


@pytest.fixture
def more(origin):
    """Setting this event releases the bytes after the third block."""
    return origin.hold(3 * BLOCK + 5)


def one(make_cache, **options):
    """Make a cache with one connection and one attempt."""
    return make_cache(connections=1, attempts=1, **options)


@pytest.mark.parametrize(("after", "some"), [(3 * BLOCK + 5, 3 * BLOCK), (200_000, 100_000)])
def test_readers_follow_the_download_of_another_process(make_cache, origin, after, some):
    more, cache, other = origin.hold(after), one(make_cache), one(make_cache)
    with cache.open(URL) as first, other.open(URL) as second:
        assert first.read(some) == second.read(some) == DATA[:some]
        assert URL not in cache
        more.set()
        assert first.read() == second.read() == DATA[some:]
        assert first.read() == b""
        assert Path(first.name).read_bytes() == DATA
    assert origin.fetches == 1


def test_a_stream_that_joins_a_fetch_need_not_wait_for_a_block(make_cache, origin, pool):
    more, cache = origin.hold(200_000), one(make_cache)
    fetch = pool.submit(cache.fetch, URL)
    wait_until(lambda: unfinished(cache))
    late = threading.Timer(PATIENCE, more.set)
    late.start()
    with cache.open(URL) as stream:
        assert stream.read(100_000) == DATA[:100_000]
        assert not more.is_set()
        late.cancel()
        more.set()
        assert stream.read() == DATA[100_000:]
    fetch.result()
    assert origin.fetches == 1


@pytest.mark.parametrize(
    ("options", "etags"),
    [({"fill": "complete"}, True), ({}, False), ({"locks": "lease"}, True)],
    ids=["complete", "no version", "another node"],
)
def test_reading_begins_with_the_whole_shard(make_cache, origin, pool, more, options, etags):
    """Only a complete shard without a version is one version.

    An NFS server may have the journal of another node's download before its bytes.
    """
    origin.etags = etags
    cache = one(make_cache, **options)
    if "locks" in options:
        assert cache.open(URL).read(10) == DATA[:10]
        cache = one(make_cache, **options)
    beginning = pool.submit(lambda: cache.open(URL).read(10))
    wait_until(lambda: origin.delivered >= 2 * BLOCK)
    with pytest.raises(TimeoutError):
        beginning.result(0.1)
    more.set()
    assert beginning.result(PATIENCE) == DATA[:10]
    assert Path(cache.path(URL)).read_bytes() == DATA


@pytest.mark.parametrize("removed", [False, True])
def test_a_follower_continues_a_download_that_was_cancelled(make_cache, origin, more, removed):
    """From the same partial, or if that is gone, in a new one of the same version."""
    fetching, following = one(make_cache), one(make_cache)
    some = BLOCK + 10
    with fetching.open(URL) as first, following.open(URL) as second:
        assert first.read(some) == second.read(some) == DATA[:some]
        if removed:
            (partial,) = Layout.of_root(fetching.dir).partials.iterdir()
            shutil.rmtree(partial)
        for download in unfinished(fetching):
            download.cancel()
        with pytest.raises(FetchCancelledError):
            first.read()
        assert second.read() == DATA[some:]
    assert origin.fetches == 1 + removed


@pytest.mark.parametrize("at", [2000, len(DATA) - 9])
def test_damage_is_an_error_only_if_it_was_already_read(make_cache, origin, at):
    """The checksum fails at the end, and the shard is downloaded again."""
    origin.state_checksum(URL, DATA)
    origin.faults.append(Fault(after=at, corrupt=True))
    with one(make_cache).open(URL) as stream:
        first = stream.read(BLOCK)
        if at > BLOCK:
            assert first + stream.read() == DATA
        else:
            with pytest.raises(IntegrityError, match="were damaged on their way"):
                stream.read()
    assert origin.fetches == 2


@pytest.mark.parametrize("sizes", [True, False])
def test_the_last_block_is_withheld_until_the_shard_is_checked(make_cache, origin, sizes):
    origin.sizes = sizes
    limit = (len(DATA) - 1) // BLOCK * BLOCK
    got = bytearray()

    def refuse(path):  # gives the reader time to read too much
        wait_until(lambda: len(got) >= limit)
        time.sleep(0.1)
        raise ValueError("bad")

    cache = one(make_cache, validate=refuse)
    with cache.open(URL) as stream, pytest.raises(IntegrityError, match="validate hook"):
        while chunk := stream.raw.read(10_000):
            got += chunk
    assert got == DATA[:limit] and URL not in cache
    assert os.listdir(Layout.of_root(cache.dir).partials) == []


@pytest.mark.parametrize(("size", "etags"), [(len(DATA), True), (BLOCK, True), (len(DATA), False)])
def test_a_failed_download_leaves_its_partial_only_to_be_resumed(make_cache, origin, size, etags):
    """A shard of one block has no journal, and bytes without a version prove nothing."""
    origin.objects[URL], origin.etags = DATA[:size], etags
    origin.faults.append(Fault(after=1000))
    cache = one(make_cache)
    with pytest.raises(TransferError):
        cache.fetch(URL)
    left = os.listdir(Layout.of_root(cache.dir).partials)
    assert len(left) == (size > BLOCK and etags)


def test_closing_the_cache_cancels_no_download_with_a_reader(make_cache, origin, more):
    cache = one(make_cache, part_size=BLOCK)
    with cache.open(URL) as stream:
        assert stream.read(10) == DATA[:10]
        cache.close()
        more.set()
        assert stream.read() == DATA[10:]
    assert (URL in cache, origin.fetches) == (True, 1)


@pytest.mark.parametrize(("conditional", "replaced"), [(True, False), (True, True), (False, True)])
def test_resumed_bytes_wait_for_a_version(make_cache, origin, monkeypatch, conditional, replaced):
    if not conditional:
        origin.proves_version = origin.states_checksums = False
        real = origin.open

        def misstated(shard, start, stop, expected=None):
            body = real(shard, start, stop)
            body.info = expected or body.info  # it claims to have the requested version
            return body

        monkeypatch.setattr(origin, "open", misstated)
    origin.faults.append(Fault(after=2 * BLOCK + 9))
    origin.faults.append(Fault(after=None))
    with pytest.raises(TransferError):
        one(make_cache).fetch(URL)
    if replaced:
        origin.objects[URL] = make_tar(2, members=3, size=BLOCK)
    data, some = origin.objects[URL], 10 if replaced else 2 * BLOCK
    more, cache = origin.hold(0), one(make_cache)  # gives the reader time to read too much
    with cache.open(URL) as stream:
        assert stream.read(some) == data[:some]
        more.set()
        assert stream.read() == data[some:]
    assert os.listdir(Layout.of_root(cache.dir).partials) == []


def test_a_read_after_a_seek_waits_for_its_bytes(make_cache, more):
    cache = one(make_cache)
    with cache.open(URL) as stream, cache.open(URL) as other:
        assert stream.seek(0, os.SEEK_END) == len(DATA)
        with pytest.raises(OSError, match=f"whence {os.SEEK_HOLE} is not"):
            stream.seek(0, os.SEEK_HOLE)
        assert stream.seek(BLOCK + 3) == stream.tell() == BLOCK + 3
        assert stream.read(5) == DATA[BLOCK + 3 : BLOCK + 8]
        with pytest.raises(OSError, match="Invalid argument"):
            stream.raw.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            stream.raw.fileno()
        stream.seek(-7, os.SEEK_END)
        more.set()
        assert stream.read() == DATA[-7:]
        assert other.read() == DATA
        places = [each.seek(3) and each.fileno() for each in (stream, other)]
        for fd in places:  # numpy, and commands, read at the offset of a descriptor
            assert os.read(fd, 10) == DATA[3:13]
        stream.seek(1)
        assert stream.read() == DATA[1:]


@pytest.mark.parametrize(
    ("readers", "members", "kept"),
    [
        (["open", "pipeline"], 10, True),  # of 2 MiB each
        (["pipeline", "open"], 10, True),
        (["pipeline", "pipeline"], 10, False),
        (["pipeline", "pipeline"], 8, True),  # less than 16 MiB are missing
    ],
)
def test_a_download_may_end_without_readers(make_cache, origin, readers, members, kept):
    origin.objects[URL] = data = make_tar(1, members=members, size=BLOCK)
    more, cache = origin.hold(2 * BLOCK), one(make_cache)
    streams = [
        cache.open(URL) if reader == "open" else next(cache.url_opener([URL]))["stream"]
        for reader in readers
    ]
    for stream in streams:
        assert stream.read(BLOCK + 10) == data[: BLOCK + 10]
        stream.close()
    more.set()
    no_thread("-fetch")
    assert (URL in cache) == kept
    requests = len(origin.requests)
    with cache.open(URL) as stream:
        assert stream.read() == data
    assert (len(origin.requests) == requests) == kept
    assert origin.fetches == 1
