"""A disk that is full at a step of a fetch, or fails under a reader: reads go on, with one warning.

Every other error of every operation is in test_netfs.py; for disks that are full, read-only or gone
see tests/fetch.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator

import pytest

from shardcache import Cache, TransferError
from shardcache.layout import META
from tests.stress.conftest import Far
from tests.stress.fuse.shim import Shim


@pytest.fixture
def cache(far: Far, shim: Shim) -> Iterator[Cache]:
    """A cache on the disk that fails, as if it were a local one; it has the largest shard."""
    far.names.sort(key=far.shards.sizes.__getitem__, reverse=True)
    options = {"locks": "flock", "fsync": "fsync", "fill": "complete"}
    with far.cache(shim.root / "cache", **options) as cache:
        used = cache.fetch(far.url(0))
        os.utime(used.path / META, (1_735_700_000,) * 2)  # a job that is over used it
        yield cache


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


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
    far: Far, cache: Cache, shim: Shim, caplog: pytest.LogCaptureFixture, step: str, times: int
) -> None:
    operation, path = STEPS[step]
    rule = shim.fail(operation, f"cache/{path}", error=errno.ENOSPC, times=times)
    assert far.read(cache, 1)
    assert shim.struck(rule) >= 1
    assert (cache.path(far.url(1)) is not None) == (times == 1)
    if times == 1:
        assert far.url(0) not in cache  # room was made
        assert far.fetches(1) <= 2
    assert len(warnings(caplog)) == (times == -1), warnings(caplog)
    assert os.listdir(cache.dir / "v1" / "partial") == []


def fail_reads(shim: Shim, skip: int) -> None:
    """Wherever the file is: one that was set aside fails all the same."""
    shim.fail("read", "cache/v1/*.tar", error=errno.EIO, times=-1, skip=skip)


@pytest.mark.parametrize("skip", [0, 2], ids=["at once", "later"])
@pytest.mark.parametrize("size", [-1, 10_240], ids=["all at once", "in pieces"])
def test_a_fault_of_the_disk_is_not_seen_by_the_reader(
    far: Far, cache: Cache, shim: Shim, caplog: pytest.LogCaptureFixture, size: int, skip: int
) -> None:
    fail_reads(shim, skip)
    with cache.open(far.url()) as stream:
        assert far.right(b"".join(iter(lambda: stream.read(size), b"")))
    assert len(warnings(caplog)) == 1 and "the rest is streamed" in warnings(caplog)[0]
    # Nobody else meets it: the next one fetches it anew, and the one after that has a hit.
    shim.heal()
    assert cache.path(far.url()) is None
    assert far.read(cache)
    before = far.fetches()
    assert far.read(cache) and far.fetches() == before


def test_two_versions_are_never_spliced(far: Far, cache: Cache, shim: Shim) -> None:
    far.replace()
    fail_reads(shim, 3)
    with cache.open(far.url()) as stream, pytest.raises(TransferError, match="replaced"):
        while stream.read(10_240):
            pass
    shim.heal()
    with cache.open(far.url()) as stream:
        assert far.right(stream.read(), version=1)
