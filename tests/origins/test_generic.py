"""Shards behind web servers and fsspec filesystems: memory, plain files, a silent one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from shardcache import (
    AccessDeniedError,
    Cache,
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
def web() -> Iterator[Files]:
    server = Files()
    server.files["/a.tar"] = SHARD
    with running(server):
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", min_free=0, attempts=2)


def read(cache: Cache, url: str) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def test_a_shard_is_fetched_once_whatever_its_url_is_signed_with(cache: Cache, web: Files) -> None:
    assert read(cache, f"{web.url}/a.tar?x=1&X-Amz-Signature=canary1") == SHARD
    assert any("canary1" in request for request in web.requests)
    web.heads.clear()
    assert read(cache, f"{web.url}/a.tar?x=1&X-Amz-Signature=canary2") == SHARD
    assert web.requests == []


@pytest.mark.parametrize("lengths", [True, False])
def test_http_without_ranges_is_read_in_one_stream(cache: Cache, lengths: bool) -> None:
    server = Files(lengths=lengths)
    server.files["/a.tar"], server.ranges = SHARD, False
    with running(server):
        assert read(cache, f"{server.url}/a.tar") == SHARD
    (entry,) = cache.entries()
    assert entry.size == len(SHARD)


def test_a_login_is_sent_as_a_header_and_to_no_server_that_another_one_names(cache, web):
    with running(Files()) as first:
        first.redirects = {"/a.tar": f"{web.url}/a.tar"}
        assert read(cache, first.url.replace("://", "://me:canary@") + "/a.tar") == SHARD
        assert "\r\nAuthorization: Basic bWU6Y2FuYXJ5\r\n" in first.heads[0]
    assert "\r\nAuthorization:" not in "".join(web.heads)


def test_redirects_are_followed_unless_they_lead_nowhere(cache: Cache, web: Files) -> None:
    web.redirects = {"/moved.tar": "/a.tar", "/bad.tar": "http://[::1", "/again.tar": "/again.tar"}
    assert read(cache, f"{web.url}/moved.tar") == SHARD
    with pytest.raises(ConfigError, match="cannot be asked for"):
        cache.fetch(f"{web.url}/bad.tar")
    web.heads.clear()
    with pytest.raises(ConfigError, match="redirects more than 5 times"):
        cache.fetch(f"{web.url}/again.tar")
    assert len(web.requests) == 6


def test_a_slow_mount_is_cached_by_modification_time(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", min_free=0, cache_local=True)
    file = tmp_path / "nas" / "a.tar"
    file.parent.mkdir()
    file.write_bytes(SHARD)
    assert read(cache, f"file://{file}") == SHARD
    (entry,) = cache.entries()
    assert entry.metadata().info.modified == str(os.stat(file).st_mtime)
    for missing in (file.parent, file.with_name("none.tar")):
        with pytest.raises(ShardNotFoundError, match="not found"):
            cache.open(str(missing))


def test_a_filesystem_that_is_not_installed_says_so(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="gs:// cannot be read here"):
        cache.open("gs://bucket/a.tar")


class Odd(MemoryFileSystem):
    """A filesystem that tells `hook` of each call, which may be silent or fail."""

    protocol = "odd"
    hook: Callable[[str], object] = staticmethod(lambda call: None)
    made_with: dict[str, Any] = {}

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Odd.made_with = options

    def info(self, path: str, **options: Any) -> Any:
        self.hook("info")
        return super().info(path, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.hook("open")
        file = super().open(path, mode, **options)
        read = file.read
        file.read = lambda size=-1: self.hook("read") or read(size)
        return file


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the hook."""
    fsspec.register_implementation("odd", Odd, clobber=True)
    Odd().pipe_file("odd://lab/a.tar", SHARD)
    return lambda hook: monkeypatch.setattr(Odd, "hook", staticmethod(hook))


ODD = "odd://lab/a.tar"


def odd_cache(path: Path, **given: Any) -> Cache:
    options = {"odd": {"own": True}, "key": "belongs-to-s3"}
    given = {"min_free": 0, "attempts": 1, "storage_options": options, **given}
    return Cache(path, allow_schemes=["odd"], **given)


@pytest.mark.parametrize("call", ["info", "open", "read"])
def test_a_silent_filesystem_is_given_up_on(tmp_path: Path, odd, call: str) -> None:
    released = threading.Event()
    odd(lambda name: name == call and released.wait())
    with pytest.raises(TransferTimeoutError, match="nothing came for"):
        read(odd_cache(tmp_path, timeout=0.1), ODD)
    odd(lambda name: None)
    assert read(odd_cache(tmp_path), ODD) == SHARD
    assert Odd.made_with.get("own") and "key" not in Odd.made_with  # options of its scheme
    released.set()


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
def test_errors_of_a_filesystem_are_sorted_by_their_status_or_kind(tmp_path, odd, raised, error):
    def fail(call: str) -> None:
        if call == "read":
            raise raised

    odd(fail)
    with pytest.raises(error, match=ODD) as caught:
        read(odd_cache(tmp_path), ODD)
    assert isinstance(caught.value, TransferError) == issubclass(error, TransferError)


def test_a_file_that_became_shorter_is_another_version(odd) -> None:
    url = parse_url(ODD, allow_schemes={"odd"})
    origin = FsspecOrigin("odd", {}, timeout=60)
    pin = origin.stat(url)
    Odd().pipe_file(ODD, SHARD[:-512])
    body = origin.open(url, len(SHARD) - 512, None, pin)
    with pytest.raises(VersionChangedError, match="became shorter"):
        body.readinto(memoryview(bytearray(512)))


def test_a_blocked_read_of_a_filesystem_can_be_aborted(odd) -> None:
    reading, released = threading.Event(), threading.Event()
    odd(lambda name: name == "read" and (reading.set(), released.wait()))
    body = FsspecOrigin("odd", {}, timeout=600).open(parse_url(ODD, allow_schemes={"odd"}), 0, None)
    threading.Thread(target=lambda: reading.wait() and body.abort()).start()
    with pytest.raises(TransientError, match="called off"):
        body.readinto(memoryview(bytearray(100)))
    released.set()
    body.close()
