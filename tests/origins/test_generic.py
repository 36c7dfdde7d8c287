"""Shards behind web servers and fsspec filesystems: memory, plain files, a silent one."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardcache import (
    AccessDeniedError,
    ConfigError,
    ShardNotFoundError,
    TransferError,
    TransferTimeoutError,
)
from shardcache.prewarm import Stopped
from tests.support.storetools import BLOCK, PATIENCE, no_thread
from tests.support.tars import make_tar
from tests.support.webservers import Files, Scripted, running

SHARD = make_tar(4, members=3, size=BLOCK)


@pytest.mark.parametrize(
    ("form", "header"),
    [
        ("http://me:canary@{}/a.tar", "Basic bWU6Y2FuYXJ5"),
        ("HTTP://me:canary@{}/a.tar", "Basic bWU6Y2FuYXJ5"),
        ("pipe:curl -H 'Authorization: Bearer canary' http://{}/a.tar", "Bearer canary"),
        ("pipe:curl -s -u me:$MYTOKEN http://{}/a.tar", "Basic bWU6Y2FuYXJ5"),
    ],
)
def test_a_login_is_sent_as_a_header_but_to_no_other_server(make_cache, monkeypatch, form, header):
    monkeypatch.setenv("MYTOKEN", "canary")
    with running(Files()) as web, running(Files()) as first:
        web.files["/a.tar"] = SHARD
        first.redirects = {"/a.tar": "/b.tar", "/b.tar": f"{web.url}/a.tar"}
        assert make_cache().open(form.format(first.url.removeprefix("http://"))).read() == SHARD
        assert [f"\r\nAuthorization: {header}\r\n" in head for head in first.heads] == [True] * 2
        assert "\r\nAuthorization:" not in "".join(web.heads)


@pytest.mark.parametrize("form", ["cache", "target", "command"])
def test_headers_in_storage_options_are_sent_but_not_after_a_redirect(
    make_cache, run, tmp_path, form, monkeypatch
):
    options = {"headers": {"x-api-key": "canary", "accept-encoding": "gzip"}}
    tables = json.dumps({"http": options, "s3": {"key": "me"}})
    with running(Files()) as web, running(Files()) as first:
        web.files["/a.tar"] = SHARD
        first.redirects = {"/a.tar": f"{web.url}/a.tar"}
        url = f"{first.url}/a.tar"
        if form == "cache":
            data = make_cache(storage_options={"http": options}).open(url).read()
        elif form == "command":  # its options for S3 are not for this server
            monkeypatch.setenv("SHARDCACHE_STORAGE_OPTIONS", tables)
            assert run("prewarm", "--profile", "lab", url)[0] == 0
            data = make_cache().fetch(url).data.read_bytes()
        else:
            names = {"target_protocol": "http", "target_options": options}
            data = fsspec.filesystem("shardcache", dir=f"{tmp_path}/own", **names).cat_file(url)
        assert data == SHARD and "\r\nX-Api-Key: canary\r\n" in first.heads[0]
        assert "gzip" not in first.heads[0] and "canary" not in "".join(web.heads)
        with pytest.raises(ConfigError, match="only headers .* Remove auth"):
            make_cache(storage_options={"http": {"auth": "x"}}).open(f"{first.url}/b.tar")


def test_the_version_of_a_file_is_its_modification_time(make_cache, tmp_path):
    cache, file = make_cache(cache_local=True), tmp_path / "nas" / "a.tar"
    file.parent.mkdir()
    file.write_bytes(SHARD)
    assert cache.open(f"file://{file}").read() == SHARD
    (entry,) = cache.entries()
    assert entry.metadata().info.modified == str(os.stat(file).st_mtime)
    for missing in (file.parent, file.with_name("none.tar")):
        with pytest.raises(ShardNotFoundError, match="not found"):
            cache.open(str(missing))
    with pytest.raises(ConfigError, match="gs:// cannot be read here"):  # gcsfs is not installed
        cache.open("gs://bucket/a.tar")


def test_two_readers_of_a_file_in_memory_share_no_position(make_cache):
    MemoryFileSystem().pipe_file("/lab/shared.tar", SHARD)
    cache = make_cache(max_size=1)  # streamed
    url = "memory://lab/shared.tar"
    with cache.open(url) as first, cache.open(url) as second:
        got = [b"", b""]
        while sum(map(len, got)) < 2 * len(SHARD):
            got = [got[0] + first.read(100_000), got[1] + second.read(70_000)]
    assert got == [SHARD, SHARD]


class Hooked(MemoryFileSystem):
    """A filesystem that calls `hook` first in each method, and keeps all listings."""

    protocol = "hooked"
    hook: Callable[[str], object] = staticmethod(lambda call: None)
    options: dict[str, Any] = {}
    known: dict[str, Any] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Hooked.options = options

    def info(self, path: str, **options: Any) -> Any:
        self.hook("info")
        return self.known.setdefault(self._strip_protocol(path), super().info(path, **options))

    def invalidate_cache(self, path: str | None = None) -> None:
        self.known.clear()

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.hook("open")
        file = super().open(path, mode, **options)
        read = file.read
        file.read = lambda size=-1: self.hook("read") or read(size)
        file.close = lambda: self.hook("close")
        return file


URL = "hooked://lab/a.tar"


@pytest.fixture
def set_hook(monkeypatch):
    """Register the filesystem, and return a function that sets its hook."""
    fsspec.register_implementation("hooked", Hooked, clobber=True)
    Hooked().pipe_file(URL, SHARD)
    return lambda hook: monkeypatch.setattr(Hooked, "hook", staticmethod(hook))


@pytest.fixture
def hooked_cache(make_cache, set_hook):
    storage = {"hooked": {"own": True}, "key": "belongs-to-s3"}
    options = {"allow_schemes": ["hooked"], "attempts": 1, "storage_options": storage}
    return lambda **more: make_cache(**options, **more)


@pytest.mark.parametrize("call", ["info", "open", "read"])
def test_a_call_of_a_silent_filesystem_times_out(hooked_cache, set_hook, call):
    released = threading.Event()
    set_hook(lambda name: name == call and released.wait())
    with pytest.raises(TransferTimeoutError, match="no data for"):
        hooked_cache(timeout=0.1).open(URL).read()
    set_hook(lambda name: None)
    assert hooked_cache().open(URL).read() == SHARD
    assert Hooked.options.get("own") and "key" not in Hooked.options  # only those of its scheme
    released.set()


@pytest.mark.parametrize(("url", "locks"), [(URL, "flock"), ("s3://lab/a.tar", "lease")])
def test_shards_are_read_and_cached_if_no_thread_can_start(
    hooked_cache, origin, no_threads, url, locks
):
    """At a limit of processes, and from Python 3.12 on while the interpreter ends."""
    origin.objects["s3://lab/a.tar"] = SHARD
    cache = hooked_cache(part_size=BLOCK, locks=locks)  # helpers would start for its parts
    with cache.open(url) as stream:  # following needs a thread, so the shard is streamed
        assert stream.read() == SHARD and stream.name == url
    assert cache.fetch(url).data.read_bytes() == SHARD


def test_the_listings_that_a_filesystem_keeps_are_not_used(hooked_cache):
    assert Hooked().info(URL)["size"] == len(SHARD)
    Hooked().pipe_file(URL, make_tar(2))
    assert Hooked().info(URL)["size"] == len(SHARD)  # outdated
    assert hooked_cache().fetch(URL).size == len(make_tar(2))


class StatusError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize(
    ("raised", "error"),
    [
        (StatusError(403), AccessDeniedError),
        (StatusError(409), ConfigError),
        (StatusError(503), TransferError),
        (PermissionError(), AccessDeniedError),
        (TimeoutError(), TransferTimeoutError),
        (RuntimeError(), TransferError),
    ],
)
def test_errors_of_a_filesystem_become_errors_of_the_library(hooked_cache, set_hook, raised, error):
    def fail(call: str) -> None:
        if call == "read":
            raise raised

    set_hook(fail)
    with pytest.raises(error, match=URL) as caught:
        hooked_cache().open(URL).read()
    assert isinstance(caught.value, TransferError) == issubclass(error, TransferError)


@pytest.mark.parametrize("source", ["filesystem", "TLS"])
def test_a_blocked_read_can_be_aborted(
    hooked_cache, pool, set_hook, context, authority, monkeypatch, source
):
    reading, released, stop = threading.Event(), threading.Event(), threading.Event()
    set_hook(lambda name: name == "read" and (reading.set(), released.wait()))

    def stalled(head):
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
        reading.set()
        released.wait()

    monkeypatch.setenv("SSL_CERT_FILE", authority[0])
    cache = hooked_cache(timeout=8 * PATIENCE)
    with running(Scripted(stalled), context) as server:
        url = URL if source == "filesystem" else f"{server.url}/a"
        prewarm = pool.submit(cache.prewarm, [url], stop=stop)
        assert reading.wait(PATIENCE)
        time.sleep(0.2)  # until the read blocks
        stop.set()
        assert prewarm.result(PATIENCE).stopped is Stopped.REQUESTED
        no_thread("-prewarm")
    released.set()


def test_closing_a_file_waits_for_no_thread(hooked_cache, set_hook, monkeypatch):
    """A new thread may collect garbage first, which may need a lock of the closing thread."""
    closed = threading.Event()
    set_hook(lambda name: name == "close" and closed.set())
    stream = hooked_cache(max_size=1).open(URL)  # streamed
    assert stream.read(100) == SHARD[:100]
    closed.clear()
    monkeypatch.setattr("threading.Thread.start", lambda thread: pytest.fail("a thread starts"))
    stream.close()
    assert closed.wait(PATIENCE)


@pytest.mark.parametrize("has_server", [True, False])
def test_google_credentials_are_sought_only_where_a_server_is(make_cache, has_server, monkeypatch):
    def connect(*address, timeout):
        if not has_server:
            raise TimeoutError
        return socket.socket()

    def google(*names, **options):
        assert os.environ.get("NO_GCE_CHECK") == (None if has_server else "true")
        return MemoryFileSystem(**options)

    monkeypatch.setenv("NO_GCE_CHECK", "")
    monkeypatch.delenv("NO_GCE_CHECK")
    monkeypatch.setattr("socket.create_connection", connect)
    monkeypatch.setattr("fsspec.filesystem", google)
    with pytest.raises(ShardNotFoundError):
        make_cache().fetch("gs://lab/none.tar")
