"""Shards behind web servers and fsspec filesystems: memory, plain files, a silent one."""

from __future__ import annotations

import os
import threading
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
from shardcache.origins.base import TransientError, VersionChangedError
from shardcache.origins.filesystem import FsspecOrigin
from shardcache.store.digest import BLOCK
from shardcache.urls import parse_url
from tests.support.tars import make_tar
from tests.support.webservers import Files, running

SHARD = make_tar(4, members=3, size=BLOCK)


@pytest.fixture
def web():
    server = Files()
    server.files["/a.tar"] = SHARD
    with running(server):
        yield server


@pytest.fixture
def cache(make_cache):
    return make_cache(attempts=2, cache_local=True)


def test_a_shard_is_fetched_once_whatever_its_url_is_signed_with(cache, web):
    signed = f"{web.url}/a.tar?x=1&X-Amz-Algorithm=A&X-Amz-Credential=C&X-Amz-Signature="
    assert cache.open(f"{signed}canary1").read() == SHARD
    assert any("canary1" in request for request in web.requests)
    web.heads.clear()
    assert cache.open(f"{signed}canary2").read() == SHARD
    assert web.requests == []


@pytest.mark.parametrize("lengths", [True, False])
def test_http_without_ranges_is_read_in_one_stream(cache, lengths):
    server = Files(lengths=lengths)
    server.files["/a.tar"], server.ranges = SHARD, False
    with running(server):
        assert cache.open(f"{server.url}/a.tar").read() == SHARD
    (entry,) = cache.entries()
    assert entry.size == len(SHARD)


def test_a_login_is_sent_as_a_header_and_to_no_server_that_another_one_names(cache, web):
    with running(Files()) as first:
        first.redirects = {"/a.tar": f"{web.url}/a.tar"}
        url = first.url.replace("://", "://me:canary@") + "/a.tar"
        assert cache.open(url).read() == SHARD
        assert "\r\nAuthorization: Basic bWU6Y2FuYXJ5\r\n" in first.heads[0]
    assert "\r\nAuthorization:" not in "".join(web.heads)


def test_redirects_are_followed_unless_they_lead_nowhere(cache, web):
    web.redirects = {"/moved.tar": "/a.tar", "/bad.tar": "http://[::1", "/again.tar": "/again.tar"}
    assert cache.open(f"{web.url}/moved.tar").read() == SHARD
    with pytest.raises(ConfigError, match="cannot be requested from"):
        cache.fetch(f"{web.url}/bad.tar")
    web.heads.clear()
    with pytest.raises(ConfigError, match="redirects more than 5 times"):
        cache.fetch(f"{web.url}/again.tar")
    assert len(web.requests) == 6


def test_a_slow_mount_is_cached_by_modification_time(cache, tmp_path):
    file = tmp_path / "nas" / "a.tar"
    file.parent.mkdir()
    file.write_bytes(SHARD)
    assert cache.open(f"file://{file}").read() == SHARD
    (entry,) = cache.entries()
    assert entry.metadata().info.modified == str(os.stat(file).st_mtime)
    for missing in (file.parent, file.with_name("none.tar")):
        with pytest.raises(ShardNotFoundError, match="not found"):
            cache.open(str(missing))
    with pytest.raises(ConfigError, match="gs:// cannot be read here"):  # it is not installed
        cache.open("gs://bucket/a.tar")


class Odd(MemoryFileSystem):
    """A filesystem that tells `hook` of each call, which may be silent or fail.

    What it has described once it describes so again, until it is told to forget its listings.
    """

    protocol = "odd"
    hook: Callable[[str], object] = staticmethod(lambda call: None)
    made_with: dict[str, Any] = {}
    known: dict[str, Any] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Odd.made_with = options

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
        return file


URL = "odd://lab/a.tar"


@pytest.fixture
def odd(monkeypatch):
    """Sets the hook."""
    fsspec.register_implementation("odd", Odd, clobber=True)
    Odd().pipe_file(URL, SHARD)
    return lambda hook: monkeypatch.setattr(Odd, "hook", staticmethod(hook))


@pytest.fixture
def odd_cache(make_cache, odd):
    options = {"odd": {"own": True}, "key": "belongs-to-s3"}
    given = {"allow_schemes": ["odd"], "attempts": 1, "storage_options": options}
    return lambda **more: make_cache(**given, **more)


@pytest.mark.parametrize("call", ["info", "open", "read"])
def test_a_silent_filesystem_is_given_up_on(odd_cache, odd, call):
    released = threading.Event()
    odd(lambda name: name == call and released.wait())
    with pytest.raises(TransferTimeoutError, match="nothing came for"):
        odd_cache(timeout=0.1).open(URL).read()
    odd(lambda name: None)
    assert odd_cache().open(URL).read() == SHARD
    assert Odd.made_with.get("own") and "key" not in Odd.made_with  # options of its scheme
    released.set()


def test_a_filesystem_is_read_without_threads_if_none_can_start(odd_cache, odd, monkeypatch):
    """At a limit of processes, and from Python 3.12 on while the interpreter ends."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    cache = odd_cache()
    assert cache.open(URL).read() == SHARD
    assert cache.fetch(URL).data.read_bytes() == SHARD


def test_listings_that_a_filesystem_keeps_are_not_believed(odd_cache):
    assert Odd().info(URL)["size"] == len(SHARD)
    Odd().pipe_file(URL, make_tar(2))
    assert Odd().info(URL)["size"] == len(SHARD)  # which is wrong
    assert odd_cache().fetch(URL).size == len(make_tar(2))


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
def test_errors_of_a_filesystem_are_sorted_by_their_status_or_kind(odd_cache, odd, raised, error):
    def fail(call: str) -> None:
        if call == "read":
            raise raised

    odd(fail)
    with pytest.raises(error, match=URL) as caught:
        odd_cache().open(URL).read()
    assert isinstance(caught.value, TransferError) == issubclass(error, TransferError)


def test_a_file_that_became_shorter_is_another_version(odd):
    url = parse_url(URL, allow_schemes={"odd"})
    origin = FsspecOrigin("odd", {}, timeout=60)
    pin = origin.stat(url)
    Odd().pipe_file(URL, SHARD[:-512])
    body = origin.open(url, len(SHARD) - 512, None, pin)
    with pytest.raises(VersionChangedError, match="became shorter"):
        body.readinto(memoryview(bytearray(512)))


def test_a_blocked_read_of_a_filesystem_can_be_aborted(odd):
    reading, released = threading.Event(), threading.Event()
    odd(lambda name: name == "read" and (reading.set(), released.wait()))
    body = FsspecOrigin("odd", {}, timeout=600).open(parse_url(URL, allow_schemes={"odd"}), 0, None)
    threading.Thread(target=lambda: reading.wait() and body.abort()).start()
    with pytest.raises(TransientError, match="cancelled"):
        body.readinto(memoryview(bytearray(100)))
    released.set()
    body.close()
