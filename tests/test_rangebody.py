"""Answers that are not what was asked, from servers that speak HTTP badly, on real sockets."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest

from shardcache import Cache, TransferError
from shardcache.origin import ObjectInfo, Origin, TransientError, VersionChangedError
from shardcache.rangebody import content_range, retry_after
from shardcache.s3 import S3Origin
from shardcache.urls import ShardURL, parse_url
from shardcache.web import WebOrigin


class Scripted(socketserver.ThreadingTCPServer):
    """Answers every request with ``answer(request head)``, as bytes, then hangs up."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, answer: Callable[[str], bytes]) -> None:
        self.answer = answer
        self.heads: list[str] = []
        super().__init__(("127.0.0.1", 0), _Connection)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(socketserver.StreamRequestHandler):
    server: Scripted

    def handle(self) -> None:
        head = ""
        for line in self.rfile:
            head += line.decode("latin-1")
            if line == b"\r\n":
                break
        if head:
            self.server.heads.append(head)
            self.wfile.write(self.server.answer(head))


@pytest.fixture
def serve() -> Iterator[Callable[[bytes | Callable[[str], bytes]], Scripted]]:
    servers: list[tuple[Scripted, threading.Thread]] = []

    def start(answer: bytes | Callable[[str], bytes]) -> Scripted:
        server = Scripted(answer if callable(answer) else lambda head: answer)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        servers.append((server, thread))
        return server

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def answer(status: str, body: bytes = b"", **headers: str | int) -> bytes:
    headers = {"Content_Length": len(body), "ETag": '"v1"', **headers}
    lines = [f"HTTP/1.1 {status}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


@pytest.fixture(params=["web", "s3"])
def connect(request: pytest.FixtureRequest) -> Callable[[Scripted], tuple[Origin, ShardURL]]:
    """Both origins that speak HTTP, on the same misbehaving server."""

    def make(server: Scripted) -> tuple[Origin, ShardURL]:
        if request.param == "web":
            return WebOrigin(connections=2, timeout=20), parse_url(f"{server.url}/a.tar")
        options = {
            "key": "AK",
            "secret": "SK",
            "config_kwargs": {"s3": {"addressing_style": "path"}},
        }
        origin = S3Origin(options, endpoint_url=server.url, connections=2, timeout=20)
        return origin, parse_url("s3://lab/a.tar", endpoint=server.url)

    return make


def read_all(origin: Origin, url: ShardURL, start: int, stop: int) -> bytes:
    body = origin.open(url, start, stop, ObjectInfo(size=100, etag='"v1"'))
    buffer = memoryview(bytearray(1000))
    received = b""
    try:
        while count := body.readinto(buffer):
            received += bytes(buffer[:count])
    finally:
        body.close()
    return received


def test_a_right_answer_is_read(serve, connect) -> None:
    server = serve(answer("206 Partial Content", b"x" * 10, Content_Range="bytes 10-19/100"))
    assert read_all(*connect(server), 10, 20) == b"x" * 10
    assert 'if-match: "v1"' in server.heads[0].lower()
    assert "range: bytes=10-19" in server.heads[0].lower()


@pytest.mark.parametrize(
    "said",
    [
        "bytes 0-9/100",  # another range
        "bytes 10-18/100",  # a shorter one
        "bytes 10-29/100",  # a longer one
        "bytes 10-19/*",  # of unknown size
        "nonsense",
    ],
)
def test_another_range_than_asked_is_refused(serve, connect, said: str) -> None:
    server = serve(answer("206 Partial Content", b"x" * 10, Content_Range=said))
    with pytest.raises(TransientError, match="asked for bytes 10 to 20"):
        read_all(*connect(server), 10, 20)


def test_another_length_than_the_range_is_refused(serve, connect) -> None:
    server = serve(answer("206 Partial Content", b"x" * 9, Content_Range="bytes 10-19/100"))
    with pytest.raises(TransientError):
        read_all(*connect(server), 10, 20)


def test_a_body_that_ends_early_is_an_error_not_an_end(serve, connect) -> None:
    whole = answer("206 Partial Content", b"x" * 10, Content_Range="bytes 10-19/100")
    server = serve(whole[:-4])
    with pytest.raises(TransientError):
        read_all(*connect(server), 10, 20)


def test_an_ignored_range_is_told_by_where_the_bytes_start(serve, connect) -> None:
    server = serve(answer("200 OK", b"y" * 100))
    origin, url = connect(server)
    body = origin.open(url, 10, 20, ObjectInfo(size=100, etag='"v1"'))
    body.close()
    assert (body.start, body.stop) == (0, 100)


def test_a_failed_precondition_is_a_changed_version(serve, connect) -> None:
    server = serve(answer("412 Precondition Failed"))
    with pytest.raises(VersionChangedError):
        read_all(*connect(server), 10, 20)


@pytest.mark.parametrize("status", ["500 Oops", "503 Slow Down", "429 Too Many Requests"])
def test_trouble_is_transient_and_its_retry_after_is_kept(serve, connect, status: str) -> None:
    server = serve(answer(status, Retry_After=7))
    with pytest.raises(TransientError) as caught:
        read_all(*connect(server), 10, 20)
    assert caught.value.retry_after == 7
    assert len(server.heads) == 1


def test_a_connection_that_is_cut_at_once_is_transient(serve, connect) -> None:
    server = serve(b"")
    with pytest.raises(TransientError):
        read_all(*connect(server), 10, 20)
    assert len(server.heads) == 1


def test_only_one_layer_repeats_requests(serve, tmp_path) -> None:
    """The SDK's own retries would multiply ours."""
    server = serve(answer("503 Slow Down"))
    options = {"key": "AK", "secret": "SK", "config_kwargs": {"s3": {"addressing_style": "path"}}}
    cache = Cache(
        tmp_path / "cache", min_free=0, attempts=3, endpoint_url=server.url, storage_options=options
    )
    with pytest.raises(TransferError, match="3 attempts failed"):
        cache.open("s3://lab/a.tar")
    assert len(server.heads) == 3


def test_expired_credentials_are_renewed_once(serve) -> None:
    from shardcache import AccessDeniedError

    body = b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>"
    server = serve(answer("400 Bad Request", body, Content_Type="application/xml"))
    origin = S3Origin(
        {"key": "AK", "secret": "SK", "config_kwargs": {"s3": {"addressing_style": "path"}}},
        endpoint_url=server.url,
        connections=2,
        timeout=20,
    )
    with pytest.raises(AccessDeniedError, match="log in again"):
        origin.open(parse_url("s3://lab/a.tar"), 0, 10)
    assert len(server.heads) == 2


def test_a_length_that_is_not_stated_is_read_to_the_end(serve) -> None:
    server = serve(b'HTTP/1.1 200 OK\r\nETag: "v1"\r\nConnection: close\r\n\r\n' + b"z" * 50)
    origin = WebOrigin(connections=2, timeout=20)
    body = origin.open(parse_url(f"{server.url}/a.tar"), 0, 10)
    buffer = memoryview(bytearray(1000))
    received = b""
    while count := body.readinto(buffer):
        received += bytes(buffer[:count])
    body.close()
    assert received == b"z" * 50
    assert body.stop is None
    assert body.info.size is None


def test_content_range_is_checked_against_the_end_of_the_object() -> None:
    assert content_range("bytes 90-99/100", 10, 90, 200) == (100, 100)
    assert content_range("bytes 0-99/100", None, 0, None) == (100, 100)
    with pytest.raises(TransientError):
        content_range(None, 10, 0, 10)


def test_retry_after_is_a_number_of_seconds_or_nothing() -> None:
    assert retry_after({"retry-after": "2.5"}) == 2.5
    assert retry_after({"retry-after": "-1"}) == 0
    assert retry_after({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) is None
    assert retry_after({}) is None
