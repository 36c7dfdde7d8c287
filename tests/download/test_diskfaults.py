"""Disks that are full, read-only, failing or gone: reads succeed, with one warning.

The faults are real: small filesystems, limits of the process, remounts and unmounts. In
tests/stress/test_netfs.py, a filesystem fails at single calls.
"""

import contextlib
import errno
import os
import shutil

import pytest

from shardcache import TransferError
from shardcache.layout import META, Layout
from shardcache.locks.sessions import live_sessions
from tests.support.caches import unfinished, warnings
from tests.support.disktools import disk, remount, unmount
from tests.support.fakes import Fault
from tests.support.storetools import few_descriptors, wait_until
from tests.support.tars import make_tar


def shards(origin, count, size=0):
    """Put objects into the origin, small ones or of about ``size`` bytes."""
    urls = [f"s3://lab/{n:04d}.tar" for n in range(count)]
    for n, url in enumerate(urls):
        origin.objects[url] = make_tar(n, 1, size // 2) if size else make_tar(n, 1, 10)
    return urls


def read(cache, url, origin):
    """Read a shard, which must be right, and return whether it is cached."""
    with cache.open(url) as stream:
        assert stream.read() == origin.objects[url]
        return stream.name != url


@pytest.mark.parametrize("what", ["bytes", "inodes"])
def test_a_full_disk_streams_until_another_job_evicts(make_cache, origin, tmp_path, caplog, what):
    options = "size=8m" if what == "bytes" else "size=32m,nr_inodes=100"
    urls = shards(origin, 12, 1 << 20) if what == "bytes" else shards(origin, 40)
    with disk(tmp_path / "disk", options) as path:
        with make_cache(dir=path / "cache") as first:
            stored = [read(first, url, origin) for url in urls]
            # Seven shards of 1 MiB fit into 8 MiB. The number of inodes per shard varies.
            assert stored == [True] * 7 + [False] * 5 if what == "bytes" else 10 < sum(stored) < 30
            assert len(warnings(caplog)) == 1
            assert os.listdir(Layout.of_root(first.dir).partials) == []
            for entry in first.entries():  # the job ended long ago
                os.utime(entry.path / META, (1_735_700_000 + entry.used % 1000,) * 2)
        with make_cache(dir=path / "cache") as second:
            assert all(read(second, url, origin) for url in urls[:-8:-1])
            assert len(list(second.entries())) > 5  # few are evicted
        assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("left", [*range(8), 10])
def test_a_lack_of_descriptors_removes_no_entry(make_cache, origin, tmp_path, caplog, left):
    """A different step fails for each number of free descriptors."""
    urls = shards(origin, 3)
    cache = make_cache()
    entry = cache.fetch(urls[0])
    before = entry.path.stat().st_ino
    read(make_cache(dir=tmp_path / "full", max_size=1), urls[0], origin)  # imports all modules
    caplog.clear()
    with few_descriptors(left):
        for url in urls:
            read(cache, url, origin)
    assert entry.path.stat().st_ino == before
    assert len(warnings(caplog)) <= 1
    assert cache.process.disk.is_well
    # Downloads that started without descriptors may end without storing their shard.
    wait_until(lambda: not unfinished(cache))
    assert all(read(cache, url, origin) for url in urls)


@pytest.mark.usefixtures("s3_environment")
def test_the_error_for_a_lack_of_descriptors_names_the_limit(s3, bucket, open_cache):
    s3.put(bucket, "a.tar", make_tar(1))
    url, cache = f"s3://{bucket}/a.tar", open_cache(attempts=2)
    cache.process.prepare()
    with few_descriptors(0), pytest.raises(TransferError, match="ulimit -n") as caught:
        cache.open(url)
    assert url in str(caught.value) and "too many open files" in str(caught.value)
    assert caught.value.errno == errno.EMFILE
    with cache.open(url) as stream:
        assert stream.read() == make_tar(1) and stream.name != url


@pytest.fixture
def ram(tmp_path):
    with disk(tmp_path / "ram", "size=32m") as path:
        yield path


def test_a_read_only_mount_serves_reads_and_warns_once(make_cache, origin, ram, clock, caplog):
    """Such as ext4 after an error. When the mount is writable again, shards are cached again."""
    urls = shards(origin, 6)
    cache = make_cache(dir=ram / "cache")
    assert [read(cache, url, origin) for url in urls[:3]] == [True] * 3
    with cache.open(urls[0]) as stream:
        cache.close()  # the open session file prevents the remount
        remount(ram, "ro")
        assert stream.read() == origin.objects[urls[0]]
    origin.requests.clear()
    cache = make_cache(dir=ram / "cache")
    assert not read(cache, urls[3], origin)
    assert cache.process.disk.writing.left > 0  # writes are suspended after the first fault
    assert [read(cache, url, origin) for url in urls] == [True] * 3 + [False] * 3
    assert {url for url, _, _ in origin.requests} == set(urls[3:])
    assert len(warnings(caplog)) == 1 and "is read-only" in warnings(caplog)[0]
    strict = make_cache(dir=ram / "cache", strict=True)
    assert read(strict, urls[0], origin)
    for refused in (cache.fetch, strict.open):
        with pytest.raises(OSError) as caught:
            refused(urls[4])
        assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError, match=f"it cannot be written: '{ram}/cache'"):
        strict.clean()
    strict.close()
    remount(ram, "rw")
    clock.sleep(60)
    assert all(read(cache, url, origin) for url in urls)
    assert len(live_sessions(Layout.of_root(cache.dir))) == 1
    cache.close()
    # A cleaning, which is due now, may sweep a new partial and warn of it.
    assert sum("read-only" in text.lower() for text in warnings(caplog)) == 1


@pytest.mark.parametrize("below", ["", "cache"], ids=["the mountpoint", "a directory on it"])
@pytest.mark.parametrize("how", ["unmounted", "mounted again", "emptied", "hidden"])
def test_a_ram_disk_that_goes_away_is_used_again(make_cache, origin, ram, caplog, how, below):
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
            for _ in range(2):
                assert all(read(cache, url, origin) for url in urls)
            assert len(warnings(caplog)) == 1 and "was replaced (unmounted?)" in caplog.text
            assert (cache.dir / "manifest.json").exists()
            assert cache.dir.stat().st_mode & 0o777 == 0o700
            assert len(list(cache.entries())) == 6
            sessions = Layout.of_root(cache.dir).sessions
            assert len(list(sessions.glob("*.session"))) == 1  # this job
            assert held.read() == origin.objects[urls[0]][100:]
            cache.close()
            assert list(sessions.glob("*.session")) == []


PARTS = ["v1/objects", "v1/partial", "v1/sessions", "v1/locks", "v1/*", "*"]


@pytest.mark.parametrize(
    ("part", "isolation"), [*((part, "node") for part in PARTS), ("v1/ranks", "rank")]
)
def test_each_process_makes_deleted_directories_and_its_session_again(
    make_cache, origin, part, isolation
):
    urls = shards(origin, 5)
    with make_cache(isolation=isolation) as one, make_cache(isolation=isolation) as two:
        assert read(one, urls[0], origin) and read(two, urls[0], origin)
        for path in one.dir.glob(part):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert all(read(one, url, origin) for url in urls[:3])
        assert all(read(two, url, origin) for url in urls)
        assert len(live_sessions(Layout.of_root(one.dir))) == 2
        assert len(list(one.entries())) == 5


def test_a_new_root_that_others_may_write_is_not_read(make_cache, origin, ram, clock):
    urls = shards(origin, 5)
    with make_cache(dir=ram / "cache") as cache:
        assert read(cache, urls[0], origin)
        copy = ram / "copy"
        cache.dir.rename(copy)
        shutil.copytree(copy, cache.dir)
        os.chmod(cache.dir, 0o707)  # another user could have planted shards
        planted = next(cache.entries()).data
        planted.chmod(0o600)
        planted.write_bytes(bytes(planted.stat().st_size))
        assert not read(cache, urls[1], origin)  # a miss detects the new root
        assert not read(cache, urls[0], origin)
        os.chmod(cache.dir, 0o700)
        shutil.rmtree(cache.dir)
        clock.sleep(60)
        read(cache, urls[0], origin)
        clock.sleep(60)
        assert all(read(cache, url, origin) for url in urls)


@pytest.mark.parametrize(
    ("lost", "requests", "attempts"), [("v1/objects", 0, 1), ("v1/partial", 1, 2), ("disk", 0, 2)]
)
def test_a_download_starts_over_only_if_its_directory_is_gone(
    make_cache, origin, tmp_path, lost, requests, attempts
):
    """After as many requests, another program removes a directory or unmounts the disk."""
    urls, path = shards(origin, 2, 4 << 20), tmp_path / "disk"
    with (
        disk(path, "size=32m") if lost == "disk" else contextlib.nullcontext(),
        make_cache(dir=path / "cache", connections=1, part_size="1MiB") as cache,
    ):
        read(cache, urls[0], origin)
        remove, where = (unmount, path) if lost == "disk" else (shutil.rmtree, cache.dir / lost)
        origin.requests.clear()
        origin.faults += [Fault()] * requests + [Fault(before=lambda: remove(where))]
        assert cache.fetch(urls[1]).size
        assert origin.fetches == attempts
        assert all(read(cache, url, origin) for url in urls)
        assert len(list(cache.entries())) == 2
