"""Shards behind fsspec filesystems: memory, plain files, real HTTP servers."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import ssl
import threading
from collections.abc import Iterator
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
from shardcache.origins.base import TransientError
from shardcache.origins.filesystem import FsspecOrigin
from shardcache.store.digest import BLOCK
from shardcache.urls import parse_url
from tests.support.tars import make_tar

SHARD = make_tar(4, members=3, size=BLOCK)


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``; honours ranges and states sizes unless told otherwise."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.lengths = True
        self.status: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.redirects: dict[str, str] = {}
        self.authorizations: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, self.path))
        if "Authorization" in self.headers:
            self.server.authorizations.add(self.headers["Authorization"])
        if path in self.server.redirects:
            self.send_response(302)
            self.send_header("Location", self.server.redirects[path])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        status = self.server.status.get(path)
        data = self.server.files.get(path)
        if status or data is None:
            self.send_response(status or 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found and self.server.ranges:
            start = int(found.group(1))
            stop = min(int(found.group(2) or len(data) - 1) + 1, len(data))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            data = data[start:stop]
        else:
            self.send_response(200)
        if self.server.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if self.server.lengths:
            self.send_header("Content-Length", str(len(data)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.send_header("ETag", f'"{hash(self.server.files[path])}"')
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server()
    if tls is not None:
        # The handshake belongs to the connection's thread: one that fails must not stop the server.
        server.socket = tls.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def web() -> Iterator[Server]:
    with served() as server:
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", min_free=0, attempts=2)


def read(cache: Cache, url: str) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def test_http_shards_are_fetched_once(cache: Cache, web: Server) -> None:
    web.files["/a.tar"] = SHARD
    assert read(cache, f"{web.url}/a.tar") == SHARD
    web.requests.clear()
    assert read(cache, f"{web.url}/a.tar") == SHARD
    assert web.requests == []


@pytest.mark.parametrize("lengths", [True, False])
def test_http_without_ranges_is_read_in_one_stream(
    cache: Cache, web: Server, lengths: bool
) -> None:
    web.files["/a.tar"] = SHARD
    web.ranges, web.lengths = False, lengths
    assert read(cache, f"{web.url}/a.tar") == SHARD
    (entry,) = cache.entries()
    assert entry.size == len(SHARD)


def test_signatures_reach_the_server_but_not_the_key(cache: Cache, web: Server) -> None:
    web.files["/a.tar"] = SHARD
    assert read(cache, f"{web.url}/a.tar?x=1&X-Amz-Signature=canary1") == SHARD
    assert any("canary1" in path for _, path in web.requests)
    web.requests.clear()
    assert read(cache, f"{web.url}/a.tar?x=1&X-Amz-Signature=canary2") == SHARD
    assert web.requests == []
    (entry,) = cache.entries()
    assert "canary" not in (entry.path / "meta.json").read_text()


@pytest.mark.parametrize(
    ("status", "error"), [(404, ShardNotFoundError), (403, AccessDeniedError), (400, ConfigError)]
)
def test_http_refusals_are_final_and_named(
    cache: Cache, web: Server, status: int, error: type[Exception]
) -> None:
    web.status["/a.tar"] = status
    with pytest.raises(error, match="a.tar"):
        cache.open(f"{web.url}/a.tar")


def test_http_server_errors_are_retried_and_bounded(cache: Cache, web: Server) -> None:
    web.status["/a.tar"] = 503
    with pytest.raises(TransferError, match="2 attempts failed"):
        cache.open(f"{web.url}/a.tar")


def test_an_http_shard_that_changes_in_mid_fetch_is_fetched_anew(
    tmp_path: Path, web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This server ignores If-Match; the answers themselves tell."""
    cache = Cache(tmp_path / "cache", min_free=0, part_size=BLOCK, connections=1, fill="complete")
    web.files["/a.tar"] = SHARD
    other = make_tar(5, members=3, size=BLOCK)
    assert len(other) == len(SHARD)
    real = Handler.answer
    answers = 0

    def answer(self: Handler, *, body: bool) -> None:
        nonlocal answers
        answers += 1
        if answers == 3:
            web.files["/a.tar"] = other
        real(self, body=body)

    monkeypatch.setattr(Handler, "answer", answer)
    assert read(cache, f"{web.url}/a.tar") == other
    assert answers > len(other) // BLOCK


def test_a_user_in_the_url_is_sent_as_a_header_and_shown_nowhere(
    cache: Cache, web: Server, caplog: pytest.LogCaptureFixture
) -> None:
    web.files["/a.tar"] = SHARD
    with caplog.at_level("DEBUG"):
        assert read(cache, web.url.replace("://", "://me:canary@") + "/a.tar") == SHARD
    assert web.authorizations == {"Basic bWU6Y2FuYXJ5"}
    (entry,) = cache.entries()
    assert entry.metadata().url == f"{web.url}/a.tar"
    assert "canary" not in caplog.text


def test_redirects_are_followed_unless_they_lead_nowhere(cache: Cache, web: Server) -> None:
    web.files["/a.tar"] = SHARD
    web.redirects = {"/moved.tar": "/a.tar", "/bad.tar": "http://[::1"}
    assert read(cache, f"{web.url}/moved.tar") == SHARD
    with pytest.raises(ConfigError, match="redirects to what is no URL"):
        cache.fetch(f"{web.url}/bad.tar")


def test_a_web_server_that_is_down_is_no_missing_shard(cache: Cache) -> None:
    with pytest.raises(TransferError, match="127.0.0.1:9 does not answer"):
        cache.open("http://127.0.0.1:9/a.tar")


def test_memory_shards(cache: Cache) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/lab/m.tar", SHARD)
    try:
        assert read(cache, "memory://lab/m.tar") == SHARD
        memory.rm("/lab/m.tar")
        assert read(cache, "memory://lab/m.tar") == SHARD
        with pytest.raises(ShardNotFoundError, match="memory://lab/none.tar"):
            cache.open("memory://lab/none.tar")
    finally:
        if memory.exists("/lab"):
            memory.rm("/lab", recursive=True)


def test_a_slow_mount_is_cached_by_modification_time(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", min_free=0, cache_local=True)
    file = tmp_path / "nas" / "a.tar"
    file.parent.mkdir()
    file.write_bytes(SHARD)
    assert read(cache, f"file://{file}") == SHARD
    (entry,) = cache.entries()
    assert entry.metadata().info.modified == str(os.stat(file).st_mtime)
    with pytest.raises(ShardNotFoundError):
        cache.open(str(tmp_path / "nas"))
    with pytest.raises(ShardNotFoundError):
        cache.open(str(tmp_path / "nas" / "none.tar"))


def test_a_filesystem_that_is_not_installed_says_so(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="gs:// cannot be read here"):
        cache.open("gs://bucket/a.tar")


def test_storage_options_may_be_given_per_scheme(tmp_path: Path) -> None:
    options = {"memory": {"asynchronous": True}, "key": "belongs-to-s3"}
    cache = Cache(tmp_path / "cache", min_free=0, storage_options=options)
    cache._here().coordinator()
    origin = cache._here().origins.of(cache.parse("memory://lab/a.tar"))
    assert origin._options == {"asynchronous": True}


class Hung(MemoryFileSystem):
    """A filesystem that is silent in one call until it is released."""

    protocol = "hung"
    at = ""
    released = threading.Event()

    def _wait(self, call: str) -> None:
        if call == self.at:
            self.released.wait()

    def info(self, path: str, **options: Any) -> Any:
        self._wait("info")
        return super().info(path, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._wait("open")
        file = super().open(path, mode, **options)
        read = file.read
        file.read = lambda size=-1: self._wait("read") or read(size)
        return file


@pytest.fixture
def hung() -> Iterator[type[Hung]]:
    fsspec.register_implementation("hung", Hung, clobber=True)
    Hung().pipe_file("hung://lab/a.tar", SHARD)
    yield Hung
    Hung.at = ""
    Hung.released.set()
    Hung.released = threading.Event()


@pytest.mark.parametrize("call", ["info", "open", "read"])
def test_a_silent_filesystem_is_given_up_on(tmp_path: Path, hung: type[Hung], call: str) -> None:
    options: dict[str, Any] = {"min_free": 0, "allow_schemes": ["hung"], "attempts": 1}
    hung.at = call
    with Cache(tmp_path / "cache", timeout=0.1, **options) as cache:
        with pytest.raises(TransferTimeoutError, match="nothing came for"):
            read(cache, "hung://lab/a.tar")
        hung.at = ""
        assert read(cache, "hung://lab/a.tar") == SHARD


def test_a_blocked_read_of_a_filesystem_can_be_aborted(hung: type[Hung]) -> None:
    hung.at = "read"
    origin = FsspecOrigin("hung", {}, timeout=600)
    body = origin.open(parse_url("hung://lab/a.tar", allow_schemes={"hung"}), 0, None)
    threading.Timer(0.1, body.abort).start()
    with pytest.raises(TransientError, match="called off"):
        body.readinto(memoryview(bytearray(100)))
    body.close()
