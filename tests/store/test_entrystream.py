"""A cached file that fails while it is read: right bytes all the same, and nobody else meets it.

The faults are real: a FUSE filesystem answers reads with errors, files are cut short.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardcache import Cache, TransferError
from shardcache.breaker import Breaker
from shardcache.clock import SYSTEM_CLOCK
from shardcache.config import Config
from shardcache.layout import META, Layout
from shardcache.origins.base import ObjectInfo
from shardcache.store.digest import BLOCK
from shardcache.store.entrystream import EntryStream
from shardcache.urls import parse_url
from tests.stress.fuse.shim import Shim, mounted, needs_fuse
from tests.support.fakes import FakeClock, MemoryOrigin
from tests.support.storetools import forked, no_descriptor_left, payload
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
PART = BLOCK // 2
DATA = make_tar(1, members=3, size=PART)  # a dozen requests of the kernel
NEWER = make_tar(2, members=3, size=PART)
#: Wherever it is: a file that was set aside fails all the same.
TAR = "v1/*.tar"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    needs_fuse()
    with mounted(tmp_path_factory.mktemp("shim")) as made:
        yield made


@pytest.fixture
def cache(
    shim: Shim, make_cache: Callable[..., Cache], origin: MemoryOrigin, tmp_path: Path
) -> Iterator[Cache]:
    """A cache on the shim with one shard in it, that nobody has read."""
    origin.objects[URL] = DATA
    made = make_cache(dir=shim.root / tmp_path.name, locks="flock")
    made.fetch(URL)
    origin.requests.clear()
    yield made
    shim.heal()


def fail(shim: Shim, cache: Cache, op: str, pattern: str, **fault: object) -> int:
    return shim.fail(op, f"{cache.dir.name}/{pattern}", **fault)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def in_pieces(stream: io.BufferedReader) -> bytes:
    return b"".join(iter(lambda: stream.read(10_240), b""))


def into_a_buffer(stream: io.BufferedReader) -> bytes:
    buffer = bytearray(len(DATA) + 10)
    count = at = stream.readinto(buffer)
    while count:
        count = stream.readinto(memoryview(buffer)[at:])
        at += count
    return bytes(buffer[:at])


READERS: dict[str, Callable[[io.BufferedReader], bytes]] = {
    "all at once": lambda stream: stream.read(),
    "in pieces": in_pieces,
    "into a buffer": into_a_buffer,
    "unbuffered": lambda stream: stream.raw.read(),
    "by lines": lambda stream: b"".join(stream),
}


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("skip", [0, 2], ids=["at once", "later"])
def test_a_fault_of_the_disk_is_not_seen_by_the_reader(
    cache: Cache, shim: Shim, origin: MemoryOrigin, caplog, how: str, skip: int
) -> None:
    fail(shim, cache, "read", TAR, error=errno.EIO, times=-1, skip=skip)
    with no_descriptor_left(), cache.open(URL) as stream:
        assert READERS[how](stream) == DATA
    (request,) = origin.requests
    if how not in ("all at once", "unbuffered"):  # they begin again, and give nothing until then
        assert (request[1] > 0) == (skip > 0)  # the rest, not all
    assert len(warnings(caplog)) == 1 and "the rest is streamed" in warnings(caplog)[0]
    # Nobody else meets it: the next one fetches it anew, and the one after that has a hit.
    shim.heal()
    assert cache.path(URL) is None
    assert len(os.listdir(Layout.of_root(cache.dir).quarantine)) == 1
    for fetched in (True, False):
        origin.requests.clear()
        with cache.open(URL) as stream:
            assert stream.read() == DATA and stream.name != URL
        assert bool(origin.requests) == fetched


def test_positions_hold_across_a_fault(cache: Cache, shim: Shim, origin: MemoryOrigin) -> None:
    fail(shim, cache, "read", TAR, error=errno.EIO, times=-1, skip=3)
    with cache.open(URL) as stream:
        assert stream.read(1000) == DATA[:1000]
        stream.seek(-5000, os.SEEK_END)
        assert stream.read() == DATA[-5000:] and stream.tell() == len(DATA)
        assert stream.seek(PART) == PART
        assert stream.read(3 * PART) == DATA[PART : 4 * PART]
        assert stream.tell() == 4 * PART
        stream.seek(10, os.SEEK_CUR)
        assert stream.read(10) == DATA[4 * PART + 10 : 4 * PART + 20]
        with pytest.raises(io.UnsupportedOperation, match="failed"):
            stream.fileno()
        with pytest.raises(OSError):
            stream.raw.seek(-1)
    assert stream.closed
    with pytest.raises(ValueError):
        stream.read()


def test_two_versions_are_never_spliced(cache: Cache, shim: Shim, origin: MemoryOrigin) -> None:
    version = next(cache.entries()).version
    origin.objects[URL] = NEWER
    fail(shim, cache, "read", TAR, error=errno.EIO, times=-1, skip=3)
    with cache.open(URL) as stream:
        first = stream.read(10_240)
        assert first == DATA[:10_240]
        with pytest.raises(TransferError, match=rf"s3://lab/train-0000.tar.*{version}"):
            while stream.read(10_240):
                pass
    shim.heal()
    with cache.open(URL) as stream:
        assert stream.read() == NEWER


def test_a_version_is_known_by_its_name_when_the_sidecar_is_gone_too(
    cache: Cache, shim: Shim, origin: MemoryOrigin
) -> None:
    with cache.open(URL) as stream:
        stream.read(1000)
        (next(cache.entries()).path / META).unlink()
        fail(shim, cache, "read", TAR, error=errno.EIO, times=-1)
        stream.seek(PART)
        assert stream.read() == DATA[PART:]
        origin.objects[URL] = NEWER
        stream.seek(0)
        with pytest.raises(TransferError, match="replaced"):
            stream.read()


def test_an_object_without_versions_is_not_continued(
    shim: Shim, make_cache: Callable[..., Cache], origin: MemoryOrigin, tmp_path: Path
) -> None:
    origin.objects[URL] = DATA
    origin.etags = False
    cache = make_cache(dir=shim.root / tmp_path.name, locks="flock")
    cache.fetch(URL)
    fail(shim, cache, "read", TAR, error=errno.EIO, times=-1, skip=2)
    with cache.open(URL) as stream, pytest.raises(TransferError, match="replaced"):
        in_pieces(stream)
    shim.heal()
    cache.fetch(URL)
    with cache.open(URL) as stream:
        stream.seek(2 * PART)
        assert stream.read(10) == DATA[2 * PART : 2 * PART + 10]
        fail(shim, cache, "read", TAR, error=errno.EIO, times=-1)
        stream.seek(0)
        with pytest.raises(TransferError, match="replaced"):
            stream.read()
    shim.heal()
    cache.fetch(URL)
    fail(shim, cache, "read", TAR, error=errno.EIO, times=-1)
    with cache.open(URL) as stream:  # nothing was given: all of it is of one version
        assert stream.read() == DATA
    shim.heal()


def test_with_strict_the_fault_is_raised_and_the_entry_set_aside(
    shim: Shim, make_cache: Callable[..., Cache], origin: MemoryOrigin, tmp_path: Path
) -> None:
    origin.objects[URL] = DATA
    cache = make_cache(dir=shim.root / tmp_path.name, locks="flock", strict=True)
    cache.fetch(URL)
    fail(shim, cache, "read", TAR, error=errno.EIO, times=-1, skip=2)
    with cache.open(URL) as stream:
        for _ in range(2):
            with pytest.raises(OSError) as caught:
                stream.read()
            assert caught.value.errno == errno.EIO and not isinstance(caught.value, TransferError)
    shim.heal()
    assert cache.path(URL) is None
    with cache.open(URL) as stream:
        assert stream.read() == DATA


# -- stale handles ---------------------------------------------------------------------


def test_a_stale_handle_is_opened_once_more(
    cache: Cache, shim: Shim, origin: MemoryOrigin, caplog
) -> None:
    rule = fail(shim, cache, "read", TAR, error=errno.ESTALE, skip=3)
    with no_descriptor_left(), cache.open(URL) as stream:
        number = stream.fileno()
        assert in_pieces(stream) == DATA
        assert stream.fileno() == number
        entry = next(cache.entries())
        assert cache._here().namespaces.own.is_pinned(entry)
    assert shim.struck(rule) == 1
    assert origin.requests == [] and warnings(caplog) == []
    assert cache.path(URL) is not None


def test_a_stale_handle_of_an_entry_that_is_gone_is_continued_from_the_origin(
    cache: Cache, shim: Shim, origin: MemoryOrigin
) -> None:
    with cache.open(URL) as stream:
        stream.read(1000)
        next(cache.entries()).path.rename(shim.root / f"gone-{cache.dir.name}")
        fail(shim, cache, "read", "", error=errno.ESTALE, times=-1)
        shim.fail("read", f"gone-{cache.dir.name}/*", error=errno.ESTALE, times=-1)
        assert stream.read() == DATA[1000:]
    assert len(origin.requests) == 1


# -- who is set aside --------------------------------------------------------------------


def test_a_fault_heals_where_flock_means_nothing(
    shim: Shim, make_cache: Callable[..., Cache], origin: MemoryOrigin, tmp_path: Path
) -> None:
    origin.objects[URL] = DATA
    cache = make_cache(dir=shim.root / tmp_path.name)
    cache.fetch(URL)
    assert cache._here().namespaces.node.grace is not None
    fail(shim, cache, "read", TAR, error=errno.EIO, times=-1, skip=2)
    with cache.open(URL) as stream:
        assert stream.read() == DATA
    shim.heal()
    assert cache.path(URL) is None


def test_a_stream_that_came_over_a_fork_heals_in_the_child(
    shim: Shim, make_cache: Callable[..., Cache], tmp_path: Path
) -> None:
    """And from an origin that cannot pin a version, only tell one."""
    file = tmp_path / "origin.tar"
    file.write_bytes(DATA)
    cache = make_cache(dir=shim.root / tmp_path.name, cache_local=True, locks="flock")
    cache.fetch(str(file))
    with cache.open(str(file)) as stream:
        stream.read(1000)
        fail(shim, cache, "read", "v1/objects/*", error=errno.EIO, times=-1)
        with forked(lambda parent: parent.say(stream.read())) as child:
            assert child.hear() == DATA[1000:]
    shim.heal()


# -- a file that is cut short --------------------------------------------------------------


def test_the_end_of_a_file_that_was_cut_short_is_no_end_of_the_shard(
    make_cache: Callable[..., Cache], origin: MemoryOrigin, caplog
) -> None:
    origin.objects[URL] = DATA
    cache = make_cache()
    cache.fetch(URL)
    origin.requests.clear()
    with cache.open(URL) as stream:
        assert stream.read(1000) == DATA[:1000]
        os.truncate(stream.name, 2 * PART)
        assert stream.read() == DATA[1000:]
        assert stream.read(10) == b"" == stream.raw.readall()
    assert origin.requests == [(URL, 2 * PART, None)]
    assert cache.path(URL) is None
    assert len(warnings(caplog)) == 1


SMALL = payload(2000)


class Rest(io.BytesIO):
    info = ObjectInfo(len(SMALL), "x")


class Keeper:
    """Stands in for the cache: the origin is a string."""

    def __init__(self) -> None:
        self.given_up = 0
        self.read = 0

    def open_again(self, shard, path):
        raise AssertionError("nothing is stale")

    def give_up(self, shard, path, fd, fault, position):
        self.given_up += 1
        return "version", None

    def rest(self, shard, start, pin, version):
        stream = Rest(SMALL)
        stream.seek(start)
        return stream

    def reassured(self):
        self.read += 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(-1, 2500)),
        st.tuples(st.just("read1"), st.integers(0, 2500)),
        st.tuples(st.just("readinto"), st.integers(0, 2500)),
        st.tuples(st.just("peek"), st.integers(0, 100)),
        st.tuples(st.just("start"), st.integers(0, 2500)),
        st.tuples(st.just("end"), st.integers(-2000, 0)),
        st.tuples(st.just("cut"), st.integers(0, 2000)),
    ),
    max_size=20,
)


@given(steps, st.sampled_from([1, 64, 4096]))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_stream_is_the_shard_wherever_and_whenever_its_file_is_cut(
    tmp_path: Path, steps: list[tuple[str, int]], buffer: int
) -> None:
    path = tmp_path / "data"
    path.write_bytes(SMALL)
    keeper = Keeper()
    raw = EntryStream(os.open(path, os.O_RDONLY))
    shard, breaker = parse_url(URL), Breaker(SYSTEM_CLOCK)
    raw.guard(keeper, shard, str(path), len(SMALL), breaker)
    model = io.BytesIO(SMALL)
    with io.BufferedReader(raw, buffer) as stream:
        for what, number in steps:
            if what == "read":
                assert stream.read(number) == model.read(number)
            elif what == "read1":
                found = stream.read1(number)
                assert found == model.read(len(found))
                assert found or not number or model.tell() >= len(SMALL)
            elif what == "readinto":
                ours = bytearray(number)
                count = stream.readinto(ours)
                assert ours[:count] == model.read(number)
            elif what == "peek":
                assert model.getvalue()[model.tell() :].startswith(stream.peek(number))
            elif what == "start":
                assert stream.seek(number) == model.seek(number)
            elif what == "end":
                assert stream.seek(number, os.SEEK_END) == model.seek(number, os.SEEK_END)
            else:
                os.truncate(path, min(number, path.stat().st_size))
            assert stream.tell() == model.tell()
    assert keeper.given_up <= 1


# -- the breaker -----------------------------------------------------------------------------


@pytest.fixture
def slow(
    shim: Shim, origin: MemoryOrigin, tmp_path: Path
) -> Iterator[tuple[Cache, FakeClock, list[str]]]:
    """Six cached shards, and a clock that is set by hand."""
    clock = FakeClock()
    config = Config(shim.root / tmp_path.name, min_free=0, locks="flock")
    cache = Cache.from_config(config, clock=clock)
    cache._here().coordinator()
    cache._here().origins.add("s3", origin)
    urls = [f"s3://lab/{n}.tar" for n in range(6)]
    for url in urls:
        origin.objects[url] = DATA
        cache.fetch(url)
    yield cache, clock, urls
    shim.heal()
    cache.close()


def reading(cache: Cache, url: str) -> bool:
    """Read a shard; whether it came from the disk."""
    with cache.open(url) as stream:
        assert stream.read() == DATA
        return stream.name != url


def test_a_disk_that_cannot_be_read_is_left_alone_for_a_while(
    slow: tuple[Cache, FakeClock, list[str]], shim: Shim, origin: MemoryOrigin, caplog
) -> None:
    cache, clock, urls = slow
    caplog.set_level(logging.INFO)
    everything = f"{cache.dir.name}/*"
    shim.fail("read", everything, error=errno.EIO, times=-1)
    shim.fail("rename mkdir create write", everything, error=errno.EIO, times=-1)
    for url in urls[:3]:
        reading(cache, url)
    assert [w for w in warnings(caplog) if "It is not read for 1m" in w]
    count = shim.calls("open") + shim.calls("lookup")
    for url in urls:
        assert not reading(cache, url)
    assert shim.calls("open") + shim.calls("lookup") == count  # nothing was asked
    clock.sleep(60)
    reading(cache, urls[0])
    assert shim.calls("open") + shim.calls("lookup") > count
    shim.heal()
    assert not reading(cache, urls[4])  # two minutes now
    clock.sleep(120)
    assert reading(cache, urls[4])
    assert [r for r in caplog.records if "can be read again" in r.getMessage()]
    assert all(reading(cache, url) for url in urls[3:])
    # One for the fault, one when the disk was first left alone.
    assert len([w for w in warnings(caplog) if "not read" in w]) == 1
