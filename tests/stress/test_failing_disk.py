"""A disk that is full at a step of a fetch, or fails under a reader: reads go on, with one warning.

The disk is `fuse.shim`. Every other error of every operation is in test_netfs.py and `crash`;
for disks that are full, read-only or gone see tests/fetch.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardcache import Cache, TransferError
from shardcache.layout import META, Layout
from tests.stress.fuse.shim import Shim, mounted, needs_fuse
from tests.support.fakes import MemoryOrigin
from tests.support.storetools import no_descriptor_left
from tests.support.tars import make_tar

URL, OLD = "s3://lab/train-0000.tar", "s3://lab/old.tar"
DATA = make_tar(1, members=3, size=500_000)  # a dozen requests of the kernel
NEWER = make_tar(2, members=3, size=500_000)
MakeCache = Callable[..., Cache]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shim]:
    needs_fuse()
    with mounted(tmp_path_factory.mktemp("shim")) as made:
        yield made


@pytest.fixture
def on_shim(
    shim: Shim, make_cache: MakeCache, origin: MemoryOrigin, tmp_path: Path
) -> Iterator[MakeCache]:
    """Makes the cache of this test on the shim."""
    origin.objects = {URL: DATA, OLD: make_tar(3, members=3, size=500_000)}

    def make(**options: object) -> Cache:
        options = {"locks": "flock", "fsync": "fsync", **options}
        return make_cache(dir=shim.root / tmp_path.name, **options)

    yield make
    shim.heal()


@pytest.fixture
def warm(on_shim: MakeCache, origin: MemoryOrigin) -> Cache:
    """A cache that has the shard, which nobody has read."""
    cache = on_shim()
    cache.fetch(URL)
    origin.requests.clear()
    return cache


def fail(shim: Shim, cache: Cache, op: str, pattern: str, **fault: object) -> int:
    return shim.fail(op, f"{cache.dir.name}/{pattern}", **fault)


def fail_reads(shim: Shim, cache: Cache, skip: int = 0) -> None:
    """Wherever the file is: one that was set aside fails all the same."""
    fail(shim, cache, "read", "v1/*.tar", error=errno.EIO, times=-1, skip=skip)


def read(cache: Cache, origin: MemoryOrigin) -> bool:
    """Read the shard, which must be right; whether it is on the disk."""
    with cache.open(URL) as stream:
        assert stream.read() == origin.objects[URL]
        return stream.name != URL


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def leftovers(cache: Cache) -> list[str]:
    layout = Layout.of_root(cache.dir)
    return os.listdir(layout.partial)


# -- a shard is fetched --------------------------------------------------------------------

#: Steps of a fetch: operation, path below the root.
STEPS = {
    "partial": ("mkdir", "v1/partial/*"),
    "data file": ("create", "v1/partial/*.tar"),
    "data": ("write", "v1/partial/*.tar"),
    "progress": ("write", "v1/partial/*/progress"),
    "sidecar": ("create", "v1/partial/*meta.json*"),
    "sync": ("fsync fsyncdir", "v1/partial/*"),
    "directory of the key": ("mkdir", "v1/objects/*"),
    "publishing": ("rename", "v1/objects/*"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("times", [1, -1])
def test_a_full_disk_is_tried_once_more_and_then_left_alone(
    on_shim: MakeCache, shim: Shim, origin: MemoryOrigin, caplog, step: str, times: int
) -> None:
    cache = on_shim()
    used = cache.fetch(OLD)
    os.utime(used.path / META, (1_735_700_000,) * 2)  # a job that is over used it
    rule = fail(shim, cache, *STEPS[step], error=errno.ENOSPC, times=times)
    origin.requests.clear()
    with no_descriptor_left():
        assert read(cache, origin) == (times == 1)
    assert shim.struck(rule) >= 1
    assert times == -1 or OLD not in cache
    assert len(warnings(caplog)) == (times == -1), warnings(caplog)
    assert leftovers(cache) == []
    assert times == -1 or len(origin.requests) <= 2


def test_with_strict_faults_are_raised(on_shim: MakeCache, shim: Shim) -> None:
    cache = on_shim(strict=True)
    fail(shim, cache, "create", "v1/partial/*", error=errno.EIO, times=-1)
    for _ in range(5):  # no breaker hides them
        with pytest.raises(OSError) as caught:
            cache.open(URL)
        assert caught.value.errno == errno.EIO and not isinstance(caught.value, TransferError)


# -- a shard is read -----------------------------------------------------------------------

READERS: dict[str, Callable[[io.BufferedReader], bytes]] = {
    "all at once": lambda stream: stream.read(),
    "in pieces": lambda stream: b"".join(iter(lambda: stream.read(10_240), b"")),
    "unbuffered": lambda stream: stream.raw.read(),
}


@pytest.mark.parametrize("how", READERS)
@pytest.mark.parametrize("skip", [0, 2], ids=["at once", "later"])
def test_a_fault_of_the_disk_is_not_seen_by_the_reader(
    warm: Cache, shim: Shim, origin: MemoryOrigin, caplog, how: str, skip: int
) -> None:
    fail_reads(shim, warm, skip)
    with no_descriptor_left(), warm.open(URL) as stream:
        assert READERS[how](stream) == DATA
    (request,) = origin.requests
    if how == "in pieces":  # the others begin again, and give nothing until then
        assert (request[1] > 0) == (skip > 0)
    assert len(warnings(caplog)) == 1 and "the rest is streamed" in warnings(caplog)[0]
    # Nobody else meets it: the next one fetches it anew, and the one after that has a hit.
    shim.heal()
    assert warm.path(URL) is None
    for fetched in (True, False):
        origin.requests.clear()
        assert read(warm, origin)
        assert bool(origin.requests) == fetched


def test_two_versions_are_never_spliced(warm: Cache, shim: Shim, origin: MemoryOrigin) -> None:
    version = next(warm.entries()).version
    origin.objects[URL] = NEWER
    fail_reads(shim, warm, skip=3)
    with warm.open(URL) as stream:
        assert stream.read(10_240) == DATA[:10_240]
        with pytest.raises(TransferError, match=rf"s3://lab/train-0000.tar.*{version}"):
            while stream.read(10_240):
                pass
    shim.heal()
    assert read(warm, origin)


def test_a_stale_handle_is_opened_once_more(
    warm: Cache, shim: Shim, origin: MemoryOrigin, caplog
) -> None:
    rule = fail(shim, warm, "read", "v1/*.tar", error=errno.ESTALE, skip=1)
    assert read(warm, origin)
    assert shim.struck(rule) == 1
    assert origin.requests == [] and warnings(caplog) == []


def test_with_strict_a_read_that_fails_is_raised(
    on_shim: MakeCache, shim: Shim, origin: MemoryOrigin
) -> None:
    cache = on_shim(strict=True)
    cache.fetch(URL)
    fail_reads(shim, cache, skip=2)
    with cache.open(URL) as stream, pytest.raises(OSError) as caught:
        stream.read()
    assert caught.value.errno == errno.EIO
    shim.heal()
    assert read(cache, origin)
