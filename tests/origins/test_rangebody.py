"""Answers that are not what was asked, from servers that speak HTTP badly, on real sockets."""

from __future__ import annotations

import contextlib
import gzip

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from shardcache import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import ObjectInfo, Origin, TransientError, VersionChangedError
from shardcache.origins.http import WebOrigin
from shardcache.origins.s3 import S3Origin
from shardcache.urls import ShardURL, parse_url
from tests.support.webservers import Scripted, answer


def part(span: str, body: bytes, **headers: object) -> bytes:
    return answer("206 Partial Content", body, Content_Range=f"bytes {span}", **headers)


def web_origin(server: Scripted) -> tuple[WebOrigin, ShardURL]:
    return WebOrigin(timeout=20), parse_url(f"{server.url}/a.bin")


def read_all(origin: Origin, url: ShardURL, start: int = 0, stop: int = 100) -> bytes:
    buffer, received = memoryview(bytearray(1000)), b""
    pin = ObjectInfo(size=100, etag='"v1"')
    with contextlib.closing(origin.open(url, start, stop, pin)) as body:
        while count := body.readinto(buffer):
            received += bytes(buffer[:count])
    return received


PACKED = gzip.compress(b"x" * 5000, mtime=0)  # it names a test
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: "a"\r\n\r\n'
#: Five bytes, over a connection that may be used again.
HELLO = (
    b'HTTP/1.1 206 Partial Content\r\nETag: "a"\r\nContent-Range: bytes 0-4/5\r\n'
    b"Content-Length: 5\r\n\r\nhello"
)
HELLO_CHUNKED = HELLO.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked")[:-5]


@pytest.mark.parametrize(
    ("answered", "found"),
    [
        (part("0-4/100", b"hello"), b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (HELLO_CHUNKED + b"2;name=value\r\nhe\r\n3\r\nllo\r\n0\r\nTrailer: x\r\n\r\n", b"hello"),
    ],
)
def test_a_right_answer_is_read_as_it_is(serve, answered: bytes, found: bytes) -> None:
    server = serve(answered)
    assert read_all(*web_origin(server), 0, len(found)) == found
    head = server.heads[0].lower()
    assert 'if-match: "v1"' in head and f"range: bytes=0-{len(found) - 1}" in head
    assert "accept-encoding: gzip" not in head


WHOLE = part("10-19/100", b"x" * 10)
#: What answers a request for bytes 10 to 20, the error, and what it says.
WRONG = [
    *(
        (part(span, b"x" * 10), TransientError, "asked for bytes 10 to 20")
        # another range, a shorter one, a longer one, one of unknown size, nonsense
        for span in ("0-9/100", "10-18/100", "10-29/100", "10-19/*", "nonsense")
    ),
    (part("10-19/100", b"x" * 9), TransientError, "asked for bytes 10 to 20"),
    # in the body, in the first line, before the head's empty line, at once
    *((WHOLE[:cut], TransientError, None) for cut in (-4, 20, -13, 0)),
    *((CHUNKED + b"5\r\n" + cut, TransientError, None) for cut in (b"hello", b"hel")),
    (CHUNKED + b"5\r\nhello\r\nworld\r\n", TransientError, "not HTTP"),
    (CHUNKED + b"5\r\nhello!\r\n0\r\n\r\n", TransientError, "not HTTP"),
    (part("0-9/10", PACKED[:10], Content_Encoding="gzip"), ConfigError, "Content-Encoding gzip"),
    (answer("200 OK", b"<html>", Content_Type="text/html", ETag=None), TransientError, "a page"),
    *((answer(status, Retry_After=7), TransientError, status) for status in ("500", "503", "429")),
    (answer("412 Precondition Failed"), VersionChangedError, None),
    (answer("416 Range Not Satisfiable"), VersionChangedError, "shorter"),
    (answer("204 No Content"), ConfigError, "204"),
    (answer("400 Bad Request"), ConfigError, "400"),
    (answer("403 Forbidden"), AccessDeniedError, "a.bin: access denied"),
    (answer("404 Not Found"), ShardNotFoundError, "a.bin: not found"),
]


@pytest.mark.parametrize(("answered", "kind", "said"), WRONG)
def test_a_wrong_answer_costs_one_request_and_is_sorted(serve, answered, kind, said):
    server = serve(answered)
    span = () if b"chunked" in answered else (10, 20)
    with pytest.raises(kind, match=said) as caught:
        read_all(*web_origin(server), *span)
    assert len(server.heads) == 1
    if b"Retry-After" in answered:
        assert caught.value.retry_after == 7


def test_a_weak_validator_is_compared_but_not_insisted_on(serve) -> None:
    refused, weak = answer("412 Precondition Failed"), part("0-4/5", b"hello", ETag='W/"a"')
    origin, url = web_origin(serve(lambda head: refused if "If-Match" in head else weak))
    pin = None
    for _ in range(2):
        with contextlib.closing(origin.open(url, 0, 5, pin)) as body:
            assert pin is None or pin.version == body.info.version
            pin = body.info


@pytest.mark.parametrize(
    ("scheme", "answered", "kind", "said"),
    [
        ("http", part("0-4/5", b"hello"), None, "GET http://shards.invalid/a "),
        ("https", answer("407 Login"), AccessDeniedError, "CONNECT shards.invalid:443 "),
        ("https", b"HTTP/1.1 200 OK\r\n\r\nthis is no TLS", TransientError, "CONNECT "),
    ],
)
def test_a_proxy_is_given_the_login_of_its_url(serve, monkeypatch, scheme, answered, kind, said):
    server = serve(answered)
    monkeypatch.setenv(f"{scheme}_proxy", server.url.replace("//", "//me:pass@"))
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(kind) if kind else contextlib.nullcontext():
        WebOrigin(timeout=20).open(parse_url(f"{scheme}://shards.invalid/a"), 0, 5).close()
    (head,) = server.heads
    assert head.startswith(said)
    assert "Proxy-Authorization: Basic bWU6cGFzcw==" in head


@pytest.mark.parametrize("header", [True, False])
def test_a_bucket_in_another_region_is_asked_for_there_from_then_on(serve, header: bool) -> None:
    told = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-3</Region></Error>"
    moved = answer("400 Bad Request", told)
    if header:
        moved = answer("301 Moved Permanently", x_amz_bucket_region="eu-west-3")
    server = serve(lambda head: HELLO if "/eu-west-3/s3/aws4_request" in head else moved, most=9)
    keys = {"key": "AK", "secret": "SK", "endpoint_url": server.url}
    origin, url = S3Origin(keys, timeout=20), parse_url("s3://lab/a.bin")
    for _ in range(2):
        assert read_all(origin, url, 0, 5) == b"hello"
    assert len(server.heads) == 3


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_requests_are_signed_as_botocore_signs_them(serve, style: str) -> None:
    page = b"<R><Contents><Key>a</Key><Size>5</Size></Contents></R>"
    server = serve(lambda head: answer("200 OK", page) if "list-type" in head else HELLO, most=9)
    # Through a proxy, so that any name will do for the store.
    config = {"proxies": {"http": server.url}, "s3": {"addressing_style": style}}
    options = {"key": "AK", "secret": "SK", "token": "T0", "requester_pays": True}
    options |= {"config_kwargs": config, "endpoint_url": "http://store.invalid"}
    origin = S3Origin(options, timeout=20)
    for key in ("a.bin?versionId=v+1", "a b/ü%+*.tar", "x/../a//b.tar"):
        origin.open(parse_url(f"s3://lab/{key}"), 0, 5).close()
    origin.open(parse_url("s3://lab/a.bin"), 0, None).close()
    assert origin.list_page(parse_url("s3://lab/x y/"), {"delimiter": "/"}) == ({"a": 5}, "")
    assert len(server.heads) == 5 and "/x/../a//b.tar HTTP" in server.heads[2]
    place = "http://store.invalid/lab/" if style == "path" else "http://lab.store.invalid/"
    for head in server.heads:
        first, *lines = head.strip().splitlines()
        method, url, _ = first.split()
        assert url.startswith(place.removesuffix("/"))
        headers = dict(line.split(": ", 1) for line in lines)
        stated = headers.pop("Authorization")
        signed = stated.partition("SignedHeaders=")[2].partition(",")[0].split(";")
        assert {"x-amz-request-payer", "x-amz-security-token"} < set(signed)
        request = AWSRequest(method, url, {n: v for n, v in headers.items() if n.lower() in signed})
        request.context["timestamp"] = headers["x-amz-date"]
        signer = S3SigV4Auth(Credentials("AK", "SK", "T0"), "s3", "us-east-1")
        text = signer.string_to_sign(request, signer.canonical_request(request))
        assert stated.endswith(f"Signature={signer.signature(text, request)}")
