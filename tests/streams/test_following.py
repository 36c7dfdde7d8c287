"""Shards that are read while they are fetched, by this process and by others."""

from __future__ import annotations

import base64
import io
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache.cache import Cache
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    TransferError,
)
from shardcache.layout import Layout
from shardcache.origins.base import Body, Checksum, ObjectInfo, TransientError
from shardcache.store.digest import BLOCK
from shardcache.store.partial import Partial
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import PATIENCE, Parent, forked, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
DATA = make_tar(1, members=3, size=BLOCK)
NEWER = make_tar(2, members=3, size=BLOCK)
MakeCache = Callable[..., Cache]

pytestmark = pytest.mark.locks_work


@pytest.fixture(autouse=True)
def _object(origin: MemoryOrigin) -> None:
    origin.objects[URL] = DATA


class Hold:
    """Holds the first answer back behind a byte."""

    def __init__(self, origin: MemoryOrigin, after: int) -> None:
        self.event = threading.Event()
        origin.faults.append(Fault(after=after, wait=self.event))

    def release(self) -> None:
        self.event.set()


@pytest.fixture
def held(origin: MemoryOrigin) -> Iterator[Hold]:
    """The shard, without all that is behind its third block."""
    hold = Hold(origin, 3 * BLOCK + 5)
    yield hold
    hold.release()


@pytest.fixture
def make_cache(make_cache: MakeCache) -> MakeCache:
    """Caches whose shards are followed."""
    return lambda **options: make_cache(**{"fill": "follow", **options})


def one(make_cache: MakeCache, **options: object) -> Cache:
    """A cache with one connection, as one process has it."""
    return make_cache(connections=1, attempts=1, **options)


def fetches(origin: MemoryOrigin) -> int:
    return sum(start == 0 for _, start, _ in origin.requests)


def call_off(cache: Cache) -> None:
    """End the fetches of a cache's streams."""
    for fetching in list(cache._here().fetchings._running.values()):
        fetching.status.cancel()


def crc(data: bytes) -> Checksum:
    return Checksum("crc32", base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode())


def _taken_for(body: Body, pin: ObjectInfo | None = None) -> Body:
    body.info = pin or body.info
    return body


@pytest.mark.parametrize(
    ("processes", "after", "some"),
    [(1, 3 * BLOCK + 5, 3 * BLOCK), (2, 3 * BLOCK + 5, 3 * BLOCK), (2, 200_000, 100_000)],
)
def test_all_read_one_fetch_before_its_last_bytes_have_come(
    make_cache: MakeCache, origin: MemoryOrigin, processes: int, after: int, some: int
) -> None:
    """The first sample does not wait for a whole block."""
    hold = Hold(origin, after)
    caches = [one(make_cache) for _ in range(processes)]
    with caches[0].open(URL) as first, caches[-1].open(URL) as second:
        assert first.read(some) == second.read(some) == DATA[:some]
        assert URL not in caches[0]
        hold.release()
        assert first.read() == second.read() == DATA[some:]
        assert first.read() == b""
        assert Path(first.name).read_bytes() == DATA
    assert fetches(origin) == 1


def test_with_fill_complete_nothing_is_read_before_all_is_there(
    make_cache: MakeCache, origin: MemoryOrigin, held: Hold
) -> None:
    cache = one(make_cache, fill="complete")
    opened: list[io.BufferedIOBase] = []
    thread = threading.Thread(target=lambda: opened.append(cache.open(URL)))
    thread.start()
    wait_until(lambda: origin.delivered >= 2 * BLOCK)
    assert not opened
    held.release()
    thread.join(PATIENCE)
    with opened[0] as stream:
        assert Path(stream.name).read_bytes() == stream.read() == DATA


@pytest.mark.parametrize("removed", [False, True])
def test_who_follows_goes_on_when_the_fetching_process_gives_up(
    make_cache: MakeCache, origin: MemoryOrigin, held: Hold, removed: bool
) -> None:
    """It goes on where the other one ended, or from another file of the same version."""
    fetching, following = one(make_cache), one(make_cache)
    some = BLOCK + 10
    with fetching.open(URL) as first, following.open(URL) as second:
        assert first.read(some) == second.read(some) == DATA[:some]
        if removed:
            (partial,) = Layout.of_root(fetching.dir).partial.iterdir()
            shutil.rmtree(partial)
        call_off(fetching)
        with pytest.raises(FetchCancelledError):
            first.read()
        assert second.read() == DATA[some:]
    assert fetches(origin) == 1 + removed


def test_what_differs_in_another_file_of_the_same_version_is_an_error(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    """The checksum fails after the bytes were given: they may have been the wrong ones."""
    origin.checksums[URL] = crc(DATA)
    origin.faults.append(Fault(after=2000, corrupt=True))
    with (
        one(make_cache, validate=lambda path: None).open(URL) as stream,
        pytest.raises(IntegrityError, match="turned out damaged"),
    ):
        stream.read(BLOCK)
        stream.read()


def test_damage_behind_what_was_read_is_mended_unseen(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    origin.checksums[URL] = crc(DATA)
    origin.faults.append(Fault(after=len(DATA) - 9, corrupt=True))
    with one(make_cache).open(URL) as stream:
        assert stream.read(BLOCK) == DATA[:BLOCK]
        assert stream.read() == DATA[BLOCK:]
    assert fetches(origin) == 2


def test_the_last_block_is_withheld_until_all_is_checked(make_cache: MakeCache) -> None:
    limit = (len(DATA) - 1) // BLOCK * BLOCK
    got = bytearray()

    def refuse(path: Path) -> None:  # the reader has all the time to read what it must not
        wait_until(lambda: len(got) >= limit)
        time.sleep(0.3)
        raise ValueError("bad")

    cache = one(make_cache, validate=refuse)
    with cache.open(URL) as stream, pytest.raises(IntegrityError, match="validate hook"):
        while chunk := stream.raw.read(10_000):
            got += chunk
    assert got == DATA[:limit]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("a checksum that is never right", IntegrityError),
        ("an error page", IntegrityError),
        ("an origin that is gone", TransferError),
    ],
)
def test_an_error_stays_an_error(
    make_cache: MakeCache, origin: MemoryOrigin, how: str, error: type[Exception]
) -> None:
    if how == "a checksum that is never right":
        origin.checksums[URL] = crc(b"something else")
    elif how == "an error page":
        origin.objects[URL] = b"<html>no such bucket</html>" * 200_000
    else:
        origin.faults.extend([Fault(after=BLOCK, error=TransientError("reset")), Fault(after=None)])
    # It may have failed before the stream is handed out.
    with pytest.raises(error), one(make_cache).open(URL) as stream:
        with pytest.raises(error):
            stream.read()
        stream.read()


def test_closing_the_cache_calls_off_what_nobody_reads_and_says_so(
    make_cache: MakeCache, origin: MemoryOrigin, held: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="shardcache")
    cache = one(make_cache, part_size=BLOCK)
    with cache.open(URL) as stream:
        assert stream.read(10) == DATA[:10]
    process = cache._here()
    assert [str(one.shard) for one in process.fetchings.unfinished()] == [URL]  # it goes on
    cache.close()
    assert process.fetchings.unfinished() == []
    held.release()
    wait_until(lambda: "not fetched in the background" in caplog.text)
    assert URL not in cache


def test_closing_the_cache_leaves_a_stream_what_it_reads(
    make_cache: MakeCache, origin: MemoryOrigin, held: Hold
) -> None:
    cache = one(make_cache)
    with cache.open(URL) as stream:
        assert stream.read(10) == DATA[:10]
        cache.close()
        held.release()
        assert stream.read() == DATA[10:]
    assert fetches(origin) == 1


@pytest.mark.parametrize(("pins", "replaced"), [(True, False), (True, True), (False, True)])
def test_what_was_resumed_is_read_once_it_is_known_to_be_the_current_version(
    make_cache: MakeCache,
    origin: MemoryOrigin,
    monkeypatch: pytest.MonkeyPatch,
    pins: bool,
    replaced: bool,
) -> None:
    if not pins:
        origin.pins = origin.states_checksums = False
        real = origin.open
        # It takes the version that it is asked for to be what it has.
        monkeypatch.setattr(origin, "open", lambda *a: _taken_for(real(*a[:3]), *a[3:]))
    origin.faults.append(Fault(after=2 * BLOCK + 9, error=TransientError("reset")))
    origin.faults.append(Fault(after=None))
    with pytest.raises(TransferError):
        one(make_cache).fetch(URL)
    if replaced:
        origin.objects[URL] = NEWER
    data, some = origin.objects[URL], 10 if replaced else 2 * BLOCK
    hold = Hold(origin, 0)  # time enough to read what should not be shown
    with one(make_cache).open(URL) as stream:
        assert stream.read(some) == data[:some]
        hold.release()
        assert stream.read() == data[some:]


def test_a_disk_that_fills_up_in_the_midst_costs_the_reader_nothing(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Partial.write

    def write(self: Partial, offset: int, data: memoryview, fd: int | None = None) -> None:
        if offset >= 2 * BLOCK:
            raise OSError(28, os.strerror(28))
        real(self, offset, data, fd)

    monkeypatch.setattr(Partial, "write", write)
    cache = one(make_cache)
    with cache.open(URL) as stream:
        assert stream.read() == DATA
        assert stream.name == URL
    assert URL not in cache
    with (
        one(make_cache, strict=True).open(URL) as stream,
        pytest.raises((CacheFullError, OSError)),
    ):
        stream.read()


def test_a_version_that_cannot_be_told_from_others_is_read_when_it_is_there(
    make_cache: MakeCache, origin: MemoryOrigin, held: Hold
) -> None:
    origin.etags = False
    cache = one(make_cache)
    stream = cache.open(URL)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(stream.read(10)))
    thread.start()
    wait_until(lambda: origin.delivered >= 2 * BLOCK)
    thread.join(0.1)
    assert not got
    held.release()
    thread.join(PATIENCE)
    assert got == [DATA[:10]]
    assert stream.read() == DATA[10:]
    stream.close()


def test_a_shard_of_unknown_size_is_followed_too(
    make_cache: MakeCache, origin: MemoryOrigin, held: Hold
) -> None:
    origin.sizes = False
    with one(make_cache).open(URL) as stream:
        assert stream.read(2 * BLOCK) == DATA[: 2 * BLOCK]
        held.release()
        assert stream.read() == DATA[2 * BLOCK :]


def test_where_no_thread_can_be_started_a_shard_is_streamed(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with make_cache().open(URL) as stream:
        assert stream.read() == DATA and stream.name == URL


def test_seeking_waits_for_what_is_sought(make_cache: MakeCache, held: Hold) -> None:
    with one(make_cache).open(URL) as stream:
        assert stream.seek(0, os.SEEK_END) == len(DATA)
        assert stream.seek(BLOCK + 3) == stream.tell() == BLOCK + 3
        assert stream.read(5) == DATA[BLOCK + 3 : BLOCK + 8]
        with pytest.raises(OSError, match="Invalid argument"):
            stream.raw.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            stream.raw.fileno()
        stream.seek(-7, os.SEEK_END)
        held.release()
        assert stream.read() == DATA[-7:]
        assert os.pread(stream.fileno(), 10, 0) == DATA[:10]
        stream.seek(1)
        assert stream.read() == DATA[1:]


def test_a_child_goes_on_with_its_parents_stream(make_cache: MakeCache, held: Hold) -> None:
    cache = one(make_cache)
    stream = cache.open(URL)
    assert stream.read(10) == DATA[:10]

    def work(parent: Parent) -> None:
        cache._here().coordinator()
        cache._here().origins.add("s3", MemoryOrigin())  # without the shard: it must not be asked
        parent.say("ready")
        parent.say(stream.read() == DATA[10:])

    with forked(work) as child:
        assert child.hear() == "ready"
        held.release()
        assert stream.read() == DATA[10:]
        assert child.hear()
    stream.close()


def test_a_stream_that_is_closed_early_leaves_the_shard_in_the_cache(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    origin.objects[URL] = data = make_tar(1, members=30, size=BLOCK)
    hold = Hold(origin, 2 * BLOCK)
    cache = one(make_cache)
    with cache.open(URL) as stream:
        stream.read(10)
    hold.release()
    wait_until(lambda: URL in cache)
    assert cache.path(URL).read_bytes() == data


def test_what_is_opened_without_finish_is_called_off_with_its_last_stream(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    origin.objects[URL] = make_tar(1, members=30, size=BLOCK)
    hold = Hold(origin, 2 * BLOCK)
    cache = one(make_cache)
    shard = cache.parse(URL)
    first, second = (cache.opener.open(shard, finish=False) for _ in range(2))
    assert first.read(BLOCK + 10) == second.read(BLOCK + 10)
    first.close()
    assert second.read(10)
    second.close()
    hold.release()
    wait_until(lambda: not [t for t in threading.enumerate() if "shardcache" in t.name])
    assert URL not in cache
    assert fetches(origin) == 1
    with cache.open(URL) as stream:  # what was fetched is not fetched again
        assert stream.read() == origin.objects[URL]
    assert fetches(origin) == 1
