"""The `Cache` object: reading, pinning, cleaning, and forked children."""

import shutil
import socket
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError, ShardNotFoundError
from shardcache.process import ProcessCache
from shardcache.store.entry import OpenEntry
from tests.support.caches import read
from tests.support.storetools import BLOCK, together
from tests.support.tars import make_tar

URL, OTHER = "s3://lab/train-0000.tar", "s3://lab/train-0001.tar"
DATA = make_tar(1, members=3, size=BLOCK)


@pytest.fixture(autouse=True)
def _objects(origin):
    origin.objects |= {URL: DATA, OTHER: make_tar(2, members=3, size=BLOCK)}


def test_path_downloads_nothing_and_streams_are_named_by_it(make_cache, origin):
    cache = make_cache()
    assert cache.path(URL) is None and URL not in cache and origin.requests == []
    cache.fetch(URL)
    with cache.open(URL) as stream:
        assert Path(stream.name) == cache.path(URL) and URL in cache
        assert stream.name.endswith("/train-0000.tar")
        assert Path(stream.name).read_bytes() == DATA
        stream.read(10_240)  # tarfile reads so much at once; a system call reads more
        assert stream.raw.tell() >= 128 * 1024


def test_a_shard_that_is_evicted_at_any_moment_raises_no_error(make_cache, monkeypatch):
    cache, close = make_cache(), OpenEntry.close
    cache.fetch(URL)

    def evicted(opened):
        close(opened)
        shutil.rmtree(opened.directory)

    monkeypatch.setattr(OpenEntry, "close", evicted)
    assert cache.path(URL).name == "train-0000.tar" and URL not in cache


@pytest.mark.locks_work("flock")
def test_a_shard_in_use_survives_every_form_of_clean(make_cache):
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


def test_a_relative_path_belongs_to_the_working_directory(make_cache, tmp_path, monkeypatch):
    caches = make_cache(), make_cache(cache_local=True)
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        Path("x.tar").write_bytes(make_tar(number))
        assert [read(cache, "x.tar") for cache in caches] == 2 * [make_tar(number)]


def test_a_variable_of_a_command_may_change(make_cache, monkeypatch, files):
    cache = make_cache(max_size=1)
    files.files["/x.tar"] = DATA
    for token in ("first", "second"):
        monkeypatch.setenv("LAB_TOKEN", token)
        url = f"pipe:curl -s -H 'Authorization: Bearer $LAB_TOKEN' {files.url}/x.tar"
        assert read(cache, url.replace("'", '"')) == DATA
        assert f"Bearer {token}" in files.heads[-1]


def test_local_files_are_cached_only_on_request(make_cache, tmp_path):
    file = tmp_path / "here.tar"
    file.write_bytes(DATA)
    cache, caching = make_cache(), make_cache(cache_local=True)
    for url in (str(file), f"file://{file}"):
        assert read(cache, url) == DATA
        with cache.pinned(url) as path:
            assert path == file
    for use in (cache.open, cache.pinned):
        with pytest.raises(ShardNotFoundError, match="does not exist"), use(f"{tmp_path}/none.tar"):
            pass
    assert list(cache.entries()) == []
    assert read(caching, str(file)) == DATA
    file.unlink()
    assert read(caching, str(file)) == DATA


def test_a_pin_keeps_the_path(make_cache, layout, monkeypatch):
    """A process that died during an eviction may have renamed the directory of an open file."""
    cache, real, renamed = make_cache(), ProcessCache.fetch, []
    cache.fetch(URL)

    def obtain(self, download):
        opened = real(self, download)
        if not renamed:
            renamed.append(layout.new_hidden(download.shard.key))
            Path(opened.directory).rename(renamed[0])
        return opened

    monkeypatch.setattr(ProcessCache, "fetch", obtain)
    with cache.pinned(URL) as path:
        assert path.read_bytes() == DATA


def test_a_session_belongs_to_one_process_and_ends_with_its_cache(make_cache, layout):
    cache = make_cache()
    read(cache, URL)

    def sessions():
        return set(layout.sessions.glob("*.session"))

    before = sessions()
    assert together(1, lambda n: (read(cache, URL) == DATA, len(sessions()))) == [(True, 2)]
    assert before <= sessions()
    cache.close()
    assert not sessions() & before
    assert read(cache, URL) == DATA


def test_a_cache_refuses_sockets_that_ignore_timeouts_of_the_kernel(tmp_path, monkeypatch):
    """The sockets of gevent and eventlet do not inherit from those of the interpreter."""
    monkeypatch.setattr(socket, "socket", type("GreenSocket", (), {}))
    with pytest.raises(ConfigError, match="gevent or eventlet would never time out"):
        Cache(tmp_path)
