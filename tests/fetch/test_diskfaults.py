"""Disks that are full, read-only, failing or gone: reads go on, with one warning.

The faults are real: small filesystems, limits of the process, remounts and unmounts. What a disk
answers at single steps is in tests/stress/test_failing_disk.py.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcache import Cache, TransferError
from shardcache.config import Config
from shardcache.layout import META, Layout
from tests.support.disktools import disk, remount, unmount
from tests.support.fakes import FakeClock, MemoryOrigin
from tests.support.storetools import few_descriptors, needs_root, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
OLD = "s3://lab/old.tar"
SMALL = make_tar(1, members=1, size=10_000)
MIB = 1 << 20
MakeCache = Callable[..., Cache]


def shards(origin: MemoryOrigin, count: int, size: int = 0) -> list[str]:
    """Objects at the origin, small ones or of about ``size`` bytes."""
    urls = [f"s3://lab/{n:04d}.tar" for n in range(count)]
    for n, url in enumerate(urls):
        origin.objects[url] = make_tar(n, 1, size // 2) if size else make_tar(n, 1, 10)
    return urls


def read(cache: Cache, url: str, origin: MemoryOrigin) -> bool:
    """Read a shard, which must be right; whether it is on the disk."""
    with cache.open(url) as stream:
        assert stream.read() == origin.objects[url]
        return stream.name != url


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def leftovers(cache: Cache) -> list[str]:
    layout = Layout.of_root(cache.dir)
    return os.listdir(layout.partial)


def long_ago(cache: Cache) -> None:
    """As if jobs that are over had used what is there."""
    for entry in cache.entries():
        os.utime(entry.path / META, (1_735_700_000 + entry.used % 1000,) * 2)


# -- room ------------------------------------------------------------------------------------


@needs_root
def test_a_full_disk_is_filled_no_further_and_stays_usable(
    make_cache: MakeCache, origin: MemoryOrigin, tmp_path: Path, caplog
) -> None:
    urls = shards(origin, 12, MIB)
    with disk(tmp_path / "disk", "size=8m") as path:
        first = make_cache(dir=path / "cache", min_free=0)
        stored = [read(first, url, origin) for url in urls]
        assert stored == [True] * 7 + [False] * 5
        assert len(warnings(caplog)) == 1
        assert leftovers(first) == []
        first.close()
        long_ago(first)
        second = make_cache(dir=path / "cache", min_free=0)  # another job
        stored = [read(second, url, origin) for url in reversed(urls)]
        assert stored[:7] == [True] * 7  # five of them in the place of others
        second.close()


@needs_root
def test_a_disk_without_inodes_makes_room(
    make_cache: MakeCache, origin: MemoryOrigin, tmp_path: Path, caplog
) -> None:
    caplog.set_level(logging.INFO)
    urls = shards(origin, 40)
    with disk(tmp_path / "disk", "size=32m,nr_inodes=100") as path:
        first = make_cache(dir=path / "cache", min_free=0)
        stored = [read(first, url, origin) for url in urls]
        assert 10 < sum(stored) < 30
        assert len(warnings(caplog)) == 1
        first.close()
        long_ago(first)
        caplog.clear()
        second = make_cache(dir=path / "cache", min_free=0)
        assert all(read(second, url, origin) for url in urls[-8:])
        assert warnings(caplog) == []
        assert len(list(second.entries())) > 5  # little more than it takes
        second.close()


# -- limits of the process -----------------------------------------------------------------


def test_a_file_that_may_not_grow_so_large_is_streamed(
    make_cache: MakeCache, origin: MemoryOrigin, caplog
) -> None:
    """RLIMIT_FSIZE, as on filesystems with a largest file (vfat)."""
    origin.objects[URL] = make_tar(1, members=1, size=MIB)
    cache = make_cache()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python starts
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, hard))
    try:
        assert [read(cache, URL, origin) for _ in range(5)] == [False] * 5
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert len(warnings(caplog)) == 1 and "File too large" in warnings(caplog)[0]
    assert leftovers(cache) == []
    assert read(cache, URL, origin)


@pytest.mark.parametrize("left", range(12))
def test_too_few_descriptors_cost_nothing_that_is_there(
    make_cache: MakeCache, origin: MemoryOrigin, tmp_path: Path, caplog, left: int
) -> None:
    """However many are left: some step is the one that fails."""
    urls = shards(origin, 3)
    cache = make_cache()
    entry = cache.fetch(urls[0])
    before = entry.path.stat().st_ino
    full = make_cache(dir=tmp_path / "full", max_size=1)
    read(full, urls[0], origin)  # so that no module has to be imported when there is no way to
    caplog.clear()
    with few_descriptors(left):
        for url in urls:
            read(cache, url, origin)
    assert entry.path.stat().st_ino == before
    assert len(warnings(caplog)) <= 1
    assert cache._here().reading.closed and cache._here().writing.closed
    # What was begun then may still end as it was to end then.
    wait_until(lambda: not cache._here().fetchings.unfinished())
    assert all(read(cache, url, origin) for url in urls)


@pytest.mark.usefixtures("s3_environment")
def test_too_few_descriptors_for_the_origin_too_are_named(
    s3: Any, bucket: str, tmp_path: Path
) -> None:
    s3.put(bucket, "a.tar", SMALL)
    url = f"s3://{bucket}/a.tar"
    with Cache(tmp_path / "cache", min_free=0, attempts=2) as cache:
        cache._here().coordinator()
        with few_descriptors(0), pytest.raises(TransferError) as caught:
            cache.open(url)
        text = str(caught.value)
        assert url in text and "too many open files" in text and "ulimit -n" in text
        assert caught.value.errno == errno.EMFILE
        with cache.open(url) as stream:
            assert stream.read() == SMALL and stream.name != url


# -- read-only -----------------------------------------------------------------------------


@needs_root
def test_a_read_only_mount_serves_hits_and_misses_with_one_warning(
    make_cache: MakeCache, origin: MemoryOrigin, tmp_path: Path, caplog
) -> None:
    """A prewarmed cache in an image, or on a disk that the node may only read."""
    urls = shards(origin, 6)
    writer = make_cache(dir=tmp_path / "cache")
    for url in urls[:3]:
        writer.fetch(url)
    writer.close()
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    subprocess.run(["mount", "--bind", str(writer.dir), str(mirror)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(mirror)], check=True)
        origin.requests.clear()
        cache = make_cache(dir=mirror)
        assert not read(cache, urls[3], origin)
        assert cache._here().writing.left > 0  # once is enough to know
        assert [read(cache, url, origin) for url in urls] == [True] * 3 + [False] * 3
        assert {url for url, _, _ in origin.requests} == set(urls[3:])
        assert len(warnings(caplog)) == 1 and "Read-only file system" in warnings(caplog)[0]
        with pytest.raises(OSError) as caught:
            cache.fetch(urls[4])
        assert caught.value.errno == errno.EROFS
        cache.close()
        strict = make_cache(dir=mirror, strict=True)
        assert read(strict, urls[0], origin)
        with pytest.raises(OSError) as caught:
            strict.open(urls[4])
        assert caught.value.errno == errno.EROFS
        strict.close()
    finally:
        unmount(mirror)


@needs_root
def test_a_disk_that_turns_read_only_under_a_job(
    origin: MemoryOrigin, tmp_path: Path, clock: FakeClock, caplog
) -> None:
    """As ext4 does after an error; and when somebody has mended it."""
    urls = shards(origin, 6)
    with disk(tmp_path / "disk", "size=32m") as path:
        with Cache.from_config(Config(path / "cache", min_free=0)) as cache:
            cache._here().coordinator()
            cache._here().origins.add("s3", origin)
            assert [read(cache, url, origin) for url in urls[:2]] == [True] * 2
            with cache.open(urls[0]) as stream:
                cache.close()  # a mount that is written cannot become read-only: the session
                remount(path, "ro")
                assert stream.read() == origin.objects[urls[0]]
            cache._here().coordinator()
            cache._here().origins.add("s3", origin)
            stored = [read(cache, url, origin) for url in urls]
            assert stored == [True] * 2 + [False] * 4
            assert len(warnings(caplog)) == 1
            remount(path, "rw")
            clock.sleep(60)
            assert all(read(cache, url, origin) for url in urls)
        assert len(warnings(caplog)) == 1


# -- a disk that goes away -----------------------------------------------------------------


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    with disk(tmp_path / "ram", "size=32m") as path:
        yield path


@pytest.mark.parametrize("below", ["", "cache"], ids=["the mountpoint", "a directory on it"])
@pytest.mark.parametrize("how", ["unmounted", "mounted again", "emptied", "hidden"])
def test_a_ram_disk_that_goes_away_is_begun_anew(
    make_cache: MakeCache, origin: MemoryOrigin, ram: Path, caplog, how: str, below: str
) -> None:
    urls = shards(origin, 6)
    cache = make_cache(dir=ram / below)
    assert all(read(cache, url, origin) for url in urls[:3])
    with cache.open(urls[0]) as held:
        held.read(100)
        with contextlib.ExitStack() as stack:
            if how != "emptied":
                if how != "hidden":
                    unmount(ram)
                if how != "unmounted":
                    stack.enter_context(disk(ram, "size=32m"))
            else:
                shutil.rmtree(ram / "cache" if below else ram, ignore_errors=True)
            ram.chmod(0o700)
            # The first of these is a hit no more; all are stored where the root is now.
            assert all(read(cache, url, origin) for url in urls)
            assert all(read(cache, url, origin) for url in urls)
            assert len(warnings(caplog)) == 1 and "another directory than before" in caplog.text
            assert (cache.dir / "manifest.json").exists()
            assert cache.dir.stat().st_mode & 0o777 == 0o700
            assert len(list(cache.entries())) == 6
            sessions = Layout.of_root(cache.dir).sessions
            assert len(list(sessions.glob("*.session"))) == 1  # the job is known there too
            # What was open goes on, wherever it is now.
            assert held.read() == origin.objects[urls[0]][100:]
            cache.close()
            assert list(sessions.glob("*.session")) == []


def test_a_root_that_comes_back_as_somebody_elses_is_not_read(
    origin: MemoryOrigin, ram: Path, clock: FakeClock, caplog
) -> None:
    urls = shards(origin, 5)
    with Cache.from_config(Config(ram / "cache", min_free=0)) as cache:
        cache._here().coordinator()
        cache._here().origins.add("s3", origin)
        assert read(cache, urls[0], origin)
        copy = ram / "copy"
        cache.dir.rename(copy)
        shutil.copytree(copy, cache.dir)
        os.chmod(cache.dir, 0o707)  # planted by somebody, full of shards
        planted = next(cache.entries()).data
        planted.chmod(0o600)
        planted.write_bytes(bytes(planted.stat().st_size))
        assert not read(cache, urls[1], origin)  # a miss: seen
        assert not read(cache, urls[0], origin)  # and not trusted
        os.chmod(cache.dir, 0o700)
        shutil.rmtree(cache.dir)
        clock.sleep(60)
        read(cache, urls[0], origin)
        clock.sleep(60)
        assert all(read(cache, url, origin) for url in urls)
        cache.close()


def test_a_disk_that_goes_away_in_the_midst_of_a_fetch(
    make_cache: MakeCache, origin: MemoryOrigin, ram: Path
) -> None:
    urls = shards(origin, 3)
    cache = make_cache(dir=ram / "cache")
    read(cache, urls[0], origin)
    real = MemoryOrigin.open

    def late(self: MemoryOrigin, *args: object, **kw: object) -> object:
        unmount(ram)
        return real(self, *args, **kw)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryOrigin, "open", late)
        assert read(cache, urls[1], origin)  # at the second try, in the new place
    assert all(read(cache, url, origin) for url in urls)
    assert len(list(cache.entries())) == 3
    cache.close()


def test_a_namespace_of_a_rank_that_is_removed_is_made_again(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    urls = shards(origin, 2)
    cache = make_cache(isolation="rank")
    assert read(cache, urls[0], origin)
    shutil.rmtree(cache._here().home.store.layout.base)
    assert read(cache, urls[0], origin) and read(cache, urls[1], origin)
