"""Answers that are not what was asked, from servers that speak HTTP badly, on real sockets."""

from __future__ import annotations

import gzip
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest

from shardcache import AccessDeniedError, ConfigError
from shardcache.origins.base import ObjectInfo, Origin, TransientError, VersionChangedError
from shardcache.origins.http import WebOrigin
from shardcache.origins.s3 import S3Origin
from shardcache.urls import ShardURL, parse_url


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
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
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


def test_a_right_answer_is_read_and_a_failed_precondition_is_a_changed_version(
    serve, connect
) -> None:
    server = serve(answer("206 Partial Content", b"x" * 10, Content_Range="bytes 10-19/100"))
    assert read_all(*connect(server), 10, 20) == b"x" * 10
    assert 'if-match: "v1"' in server.heads[0].lower()
    assert "range: bytes=10-19" in server.heads[0].lower()
    with pytest.raises(VersionChangedError):
        read_all(*connect(serve(answer("412 Precondition Failed"))), 10, 20)


@pytest.mark.parametrize(
    ("said", "length"),
    [
        ("bytes 0-9/100", 10),  # another range
        ("bytes 10-18/100", 10),  # a shorter one
        ("bytes 10-29/100", 10),  # a longer one
        ("bytes 10-19/*", 10),  # of unknown size
        ("bytes 10-19/100", 9),  # of another length than the range
        ("nonsense", 10),
    ],
)
def test_another_range_than_asked_is_refused(serve, connect, said: str, length: int) -> None:
    server = serve(answer("206 Partial Content", b"x" * length, Content_Range=said))
    with pytest.raises(TransientError, match="asked for bytes 10 to 20"):
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


def test_a_stated_encoding_changes_no_byte(serve, connect) -> None:
    packed = gzip.compress(b"x" * 5000)
    span = f"bytes 0-{len(packed) - 1}/{len(packed)}"
    said = {"Content_Encoding": "gzip", "Content_Range": span}
    server = serve(answer("206 Partial Content", packed, **said))
    assert read_all(*connect(server), 0, len(packed)) == packed
    assert "accept-encoding: gzip" not in server.heads[0].lower()


@pytest.mark.parametrize(
    ("answered", "pause"),
    [
        (answer("500 Oops", Retry_After=7), 7),
        (answer("503 Slow Down", Retry_After=7), 7),
        (answer("429 Too Many Requests", Retry_After=7), 7),
        (b"", None),  # cut at once
    ],
)
def test_trouble_is_transient_and_its_retry_after_is_kept(
    serve, connect, answered: bytes, pause: float | None
) -> None:
    server = serve(answered)
    with pytest.raises(TransientError) as caught:
        read_all(*connect(server), 10, 20)
    assert caught.value.retry_after == pause
    assert len(server.heads) == 1


def s3_origin(server: Scripted, **options: object) -> S3Origin:
    config = {"s3": {"addressing_style": "path"}, **options}
    keys = {"key": "AK", "secret": "SK", "endpoint_url": server.url, "config_kwargs": config}
    return S3Origin(keys, connections=2, timeout=20)


def error(status: str, code: str) -> bytes:
    return answer(status, f"<Error><Code>{code}</Code><Message>said</Message></Error>".encode())


SHARD = parse_url("s3://lab/a.bin")


def test_chunks_without_a_length_are_read_to_their_end(connect, serve) -> None:
    origin, url = connect(
        serve(
            b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: "a"\r\n\r\n'
            b"5\r\nhello\r\n0\r\n\r\n"
        )
    )
    body = origin.open(url, 0, 100)
    assert (body.info.size, body.stop) == (None, None)
    body.close()
    assert read_all(origin, url, 0, 100) == b"hello"


def test_a_connection_with_an_unread_end_mark_is_not_used_again(serve) -> None:
    """A range in chunks: all bytes are there before the mark that ends them."""
    requests: list[str] = []

    class Keeping(_Connection):
        def handle(self) -> None:
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = self.rfile.readline()
                    if not line:
                        return
                    head += line
                requests.append(head.decode())
                self.wfile.write(
                    b"HTTP/1.1 206 Partial Content\r\nTransfer-Encoding: chunked\r\n"
                    b'ETag: "a"\r\nContent-Range: bytes 0-4/5\r\n\r\n5\r\nhello\r\n0\r\n\r\n'
                )

    server = serve(b"")
    server.RequestHandlerClass = Keeping
    origin = WebOrigin(connections=1, timeout=20)
    url = parse_url(f"{server.url}/a.bin")
    for _ in range(3):
        body = origin.open(url, 0, 5)
        assert body.readinto(memoryview(bytearray(5))) == 5
        body.close()
    assert len(requests) == 3


def test_an_answer_without_a_body_is_no_shard(connect, serve) -> None:
    origin, url = connect(serve(answer("204 No Content")))
    with pytest.raises(ConfigError, match="204"):
        origin.open(url, 0, 100)


def test_a_weak_validator_is_compared_but_not_insisted_on(connect, serve) -> None:
    server = serve(
        lambda head: (
            answer("412 Precondition Failed")
            if "If-Match" in head
            else answer("206 Partial Content", b"hello", ETag='W/"a"', Content_Range="bytes 0-4/5")
        )
    )
    origin, url = connect(server)
    body = origin.open(url, 0, 5)
    again = origin.open(url, 0, 5, body.info)
    assert again.info.version == body.info.version
    body.close()
    again.close()


def test_a_gateway_that_redirects_costs_one_request(serve) -> None:
    """botocore would look for the bucket's region, be redirected, and look again."""
    server = serve(answer("301 Moved Permanently", Location="https://elsewhere.invalid/"))
    with pytest.raises(ConfigError, match="301"):
        s3_origin(server).open(SHARD, 0, 5)
    assert len(server.heads) == 1


@pytest.mark.parametrize("retries", [{"max_attempts": 4}, {"total_max_attempts": 4}])
def test_retries_configured_for_s3fs_do_not_multiply_ours(serve, retries: dict) -> None:
    server = serve(answer("503 Slow Down"))
    with pytest.raises(TransientError):
        s3_origin(server, retries=retries).open(SHARD, 0, 5)
    assert len(server.heads) == 1


@pytest.mark.parametrize(
    ("answered", "says"),
    [
        (error("400 Bad Request", "InvalidToken"), "AWS_SESSION_TOKEN"),
        (error("403 Forbidden", "InvalidObjectState"), "archived"),
        (answer("403 Forbidden", b"<html>the proxy says no<br></html>"), "may not read"),
    ],
)
def test_a_refusal_names_its_cause(serve, answered: bytes, says: str) -> None:
    server = serve(answered)
    with pytest.raises(AccessDeniedError, match=says):
        s3_origin(server).open(SHARD, 0, 5)
    assert len(server.heads) == 1


def test_a_server_that_redirects_in_a_circle_costs_six_requests(serve) -> None:
    server = serve(answer("302 Found", Location="/again"))
    with pytest.raises(ConfigError, match="redirects more than 5 times"):
        WebOrigin(connections=2, timeout=20).open(parse_url(f"{server.url}/a.tar"), 0, 5)
    assert len(server.heads) == 6


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_proxy_is_given_the_login_of_its_url(
    serve, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    server = serve(answer("206 Partial Content", b"hello", Content_Range="bytes 0-4/5"))
    place = server.url.removeprefix("http://")
    monkeypatch.setenv("http_proxy", f"{scheme}me:pass@{place}")
    monkeypatch.delenv("no_proxy", raising=False)
    WebOrigin(connections=2, timeout=20).open(parse_url("http://shards.invalid/a"), 0, 5).close()
    (head,) = server.heads
    assert head.startswith("GET http://shards.invalid/a ")
    assert "Proxy-Authorization: Basic bWU6cGFzcw==" in head
    refusing = serve(answer("407 Proxy Authentication Required"))
    monkeypatch.setenv("https_proxy", refusing.url)
    with pytest.raises(AccessDeniedError, match="407"):
        WebOrigin(connections=2, timeout=20).open(parse_url("https://shards.invalid/a"), 0, 5)
    assert len(refusing.heads) == 1
