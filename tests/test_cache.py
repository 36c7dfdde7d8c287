"""The `Cache` object: reading, pinning, cleaning, and what happens when the cache is at fault."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import inspect
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError, ShardNotFoundError, default_cache
from shardcache.cache import PrewarmOptions
from shardcache.layout import Layout
from shardcache.prewarm import prewarm
from shardcache.store.digest import BLOCK
from shardcache.store.entry import Store
from shardcache.streams.opener import Opener
from tests.support.fakes import Fault, MemoryOrigin
from tests.support.storetools import Parent, forked, wait_until
from tests.support.tars import make_tar

URL = "s3://lab/train-0000.tar"
OTHER = "s3://lab/train-0001.tar"
DATA = make_tar(1, members=3, size=BLOCK)
OTHER_DATA = make_tar(2, members=3, size=BLOCK)
MakeCache = Callable[..., Cache]


@pytest.fixture(autouse=True)
def _objects(origin: MemoryOrigin) -> None:
    origin.objects[URL] = DATA
    origin.objects[OTHER] = OTHER_DATA


def read(cache: Cache, url: str = URL) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def test_the_stream_is_named_by_its_local_path(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.fetch(URL)
    with cache.open(URL) as stream:
        assert stream.name.endswith("/train-0000.tar")
        assert Path(stream.name).read_bytes() == DATA
        assert stream.seekable()
        stream.read(10_240)  # as tarfile reads, but not so little per system call
        assert stream.raw.tell() >= 128 * 1024


@pytest.mark.locks_work("flock")
def test_what_is_in_use_survives_every_form_of_clean(make_cache: MakeCache) -> None:
    cache = make_cache()
    read(cache, OTHER)
    with cache.open(URL) as stream, cache.pinned(URL) as path:
        first = stream.read(1000)
        report = cache.clean(everything=True)
        assert path.read_bytes() == DATA == first + stream.read()
        assert (len(report.removed), report.kept) == (1, 1)
        assert cache.remove(URL) == (0, 1)
    assert cache.remove(URL) == (len(DATA), 0)
    assert list(cache.entries()) == []


@pytest.mark.locks_work("answers")
def test_sweeping_leaves_what_is_over_a_limit(make_cache: MakeCache) -> None:
    with make_cache() as cache:
        read(cache)
    small = make_cache(max_size=1)
    assert small.clean(orphans=True).removed == ()
    assert len(small.clean(orphans=True, max_size=1, dry_run=True).removed) == 1
    assert len(small.clean().removed) == 1


def test_path_tells_without_fetching(make_cache: MakeCache, origin: MemoryOrigin) -> None:
    cache = make_cache()
    assert cache.path(URL) is None
    assert URL not in cache
    assert origin.requests == []
    read(cache)
    path = cache.path(URL)
    assert path is not None
    assert path.read_bytes() == DATA
    assert URL in cache


def test_a_missing_shard_is_named_and_costs_one_request(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    with pytest.raises(ShardNotFoundError, match="s3://lab/none.tar"):
        make_cache().open("s3://lab/none.tar")
    assert len(origin.requests) == 1
    with pytest.raises(FileNotFoundError):
        make_cache().open("s3://lab/none.tar")


def test_local_files_are_opened_as_they_are_or_cached_on_request(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    file = tmp_path / "here.tar"
    file.write_bytes(DATA)
    cache, caching = make_cache(), make_cache(cache_local=True)
    for url in (str(file), f"file://{file}"):
        assert read(cache, url) == DATA
        with cache.pinned(url) as path:
            assert path == file
    with pytest.raises(ConfigError, match="cache_local"):
        cache.fetch(str(file))
    with pytest.raises(ShardNotFoundError, match="does not exist"):
        cache.open(str(tmp_path / "none.tar"))
    assert list(cache.entries()) == []
    assert read(caching, str(file)) == DATA
    file.unlink()
    assert read(caching, str(file)) == DATA


def test_a_pin_holds_a_path_and_not_just_a_file(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evictor that died between rename and unlink leaves an open file without its name."""
    cache = make_cache()
    cache.fetch(URL)
    real = Opener.obtain
    renamed: list[Path] = []

    def obtain(self, shard, status=None):
        obtained = real(self, shard, status)
        if not renamed:
            directory = Path(obtained[0].directory)
            renamed.append(Layout.of_root(cache.dir).new_evicted(shard.key))
            directory.rename(renamed[0])
        return obtained

    monkeypatch.setattr(Opener, "obtain", obtain)
    with cache.pinned(URL) as path:
        assert path.read_bytes() == DATA


def test_a_forked_child_reads_through_the_parents_cache(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache()
    read(cache)

    def sessions() -> set[Path]:
        return set(Layout.of_root(cache.dir).sessions.glob("*.session"))

    before = sessions()
    with forked(lambda parent: parent.say((read(cache) == DATA, len(sessions())))) as child:
        assert child.hear() == (True, 2)
    assert read(cache) == DATA
    assert before <= sessions()


def paths_open_for_writing() -> list[str]:
    """Of the descriptors of this process; one that only reads holds no lock of a fetch."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return paths


def test_a_fork_while_another_thread_fetches_leaves_the_child_free(
    make_cache: MakeCache, origin: MemoryOrigin
) -> None:
    cache = make_cache(connections=1)
    gate = threading.Event()
    origin.faults.append(Fault(after=BLOCK, wait=gate))
    thread = threading.Thread(target=read, args=(cache,))
    thread.start()
    wait_until(lambda: origin.delivered >= BLOCK)

    def look(parent: Parent) -> None:
        ours = [path for path in paths_open_for_writing() if path.startswith(str(cache.dir))]
        parent.say([path for path in ours if "/partial/" in path or ".lock" in path])

    with forked(look) as child:
        assert child.hear() == []
    gate.set()
    thread.join()
    assert URL in cache


def test_close_ends_the_session_and_the_cache_goes_on(make_cache: MakeCache) -> None:
    cache = make_cache()
    read(cache)
    cache.close()
    assert os.listdir(Layout.of_root(cache.dir).sessions) == []
    assert read(cache) == DATA


def test_type_checkers_know_the_options_of_a_prewarm() -> None:
    known = inspect.signature(prewarm).parameters.values()
    named = [one.name for one in known if one.kind is one.KEYWORD_ONLY and one.name != "share"]
    assert list(PrewarmOptions.__annotations__) == named


def test_the_default_cache_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default_cache.cache_clear()
    monkeypatch.setenv("SHARDCACHE_DIR", str(tmp_path / "default"))
    assert default_cache().dir == tmp_path / "default"
    assert default_cache() is default_cache()


def test_a_bad_option_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_size"):
        Cache(tmp_path / "cache", maxsize="1GB")
    assert not (tmp_path / "cache").exists()


def test_cleaning_a_directory_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="is not a shardcache directory"):
        Cache(tmp_path).clean(everything=True)
    assert (tmp_path / "model.ckpt").exists()


def test_what_a_sibling_has_is_read_there_when_our_own_place_is_full(
    make_cache: MakeCache, origin: MemoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache().fetch(URL)
    origin.requests.clear()

    def full(*arguments: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Store, "link", full)
    cache = make_cache(isolation="job")
    stream, _ = cache.opener.open(cache.parse(URL))
    with stream:
        assert stream.read() == DATA
        assert stream.name != URL
    assert origin.requests == []
