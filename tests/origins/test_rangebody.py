"""Single requests over HTTP: validators, proxies, regions and signatures.

`tests/origins/test_answers.py` has the refused and the malformed responses.
"""

import contextlib

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from shardcache import AccessDeniedError
from shardcache.origins.base import ObjectInfo, Origin, TransientError
from shardcache.origins.http import WebOrigin
from shardcache.origins.s3 import S3Origin
from shardcache.urls import ShardURL, parse_url
from tests.support.webservers import Scripted, answer


def part(span: str, body: bytes, **headers: object) -> bytes:
    return answer("206 Partial Content", body, Content_Range=f"bytes {span}", **headers)


def web_origin(server: Scripted) -> tuple[WebOrigin, ShardURL]:
    return WebOrigin(timeout=20), parse_url(f"{server.url}/a.bin")


def read_all(origin: Origin, url: ShardURL, start: int, stop: int) -> bytes:
    buffer, received = memoryview(bytearray(1000)), b""
    pin = ObjectInfo(size=100, etag='"v1"')
    with contextlib.closing(origin.open(url, start, stop, pin)) as body:
        while count := body.readinto(buffer):
            received += bytes(buffer[:count])
    return received


#: Five bytes; the connection stays open.
HELLO = (
    b'HTTP/1.1 206 Partial Content\r\nETag: "a"\r\nContent-Range: bytes 0-4/5\r\n'
    b"Content-Length: 5\r\n\r\nhello"
)


def test_a_request_states_its_range_and_version_and_accepts_no_compression(serve) -> None:
    server = serve(part("0-4/100", b"hello"))
    assert read_all(*web_origin(server), 0, 5) == b"hello"
    head = server.heads[0].lower()
    assert 'if-match: "v1"' in head and "range: bytes=0-4" in head
    assert "accept-encoding: gzip" not in head


@pytest.mark.parametrize("status", ["500", "503", "429"])
def test_a_refusal_states_the_pause_that_the_server_requests(serve, status):
    server = serve(answer(status, Retry_After=7))
    with pytest.raises(TransientError, match=status) as caught:
        read_all(*web_origin(server), 10, 20)
    assert (caught.value.retry_after, len(server.heads)) == (7, 1)


def test_a_weak_etag_is_compared_but_not_sent_in_if_match(serve) -> None:
    refused, weak = answer("412 Precondition Failed"), part("0-4/5", b"hello", ETag='W/"a"')
    origin, url = web_origin(serve(lambda head: refused if "If-Match" in head else weak))
    pin = None
    for _ in range(2):
        with contextlib.closing(origin.open(url, 0, 5, pin)) as body:
            assert pin is None or pin.version == body.info.version
            pin = body.info


@pytest.mark.parametrize(
    ("scheme", "response", "kind", "first_line"),
    [
        ("http", part("0-4/5", b"hello"), None, "GET http://shards.invalid/a "),
        ("https", answer("407 Login"), AccessDeniedError, "CONNECT shards.invalid:443 "),
        ("https", b"HTTP/1.1 200 OK\r\n\r\nthis is no TLS", TransientError, "CONNECT "),
    ],
)
def test_a_proxy_receives_its_login(serve, monkeypatch, scheme, response, kind, first_line):
    server = serve(response)
    monkeypatch.setenv(f"{scheme}_proxy", server.url.replace("//", "//me:pass@"))
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(kind) if kind else contextlib.nullcontext():
        WebOrigin(timeout=20).open(parse_url(f"{scheme}://shards.invalid/a"), 0, 5).close()
    (head,) = server.heads
    assert head.startswith(first_line)
    assert "Proxy-Authorization: Basic bWU6cGFzcw==" in head


@pytest.mark.parametrize("header", [True, False])
def test_all_requests_after_a_redirect_go_to_the_region_of_the_bucket(serve, header: bool) -> None:
    error = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-3</Region></Error>"
    moved = answer("400 Bad Request", error)
    if header:
        moved = answer("301 Moved Permanently", x_amz_bucket_region="eu-west-3")
    server = serve(lambda head: HELLO if "/eu-west-3/s3/aws4_request" in head else moved, most=9)
    keys = {"key": "AK", "secret": "SK", "endpoint_url": server.url}
    origin, url = S3Origin(keys, timeout=20), parse_url("s3://lab/a.bin")
    for _ in range(2):
        assert read_all(origin, url, 0, 5) == b"hello"
    assert len(server.heads) == 3


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_signatures_equal_those_of_botocore(serve, style: str) -> None:
    page = b"<ListBucketResult><Contents><Key>a</Key></Contents></ListBucketResult>"
    server = serve(lambda head: answer("200 OK", page) if "list-type" in head else HELLO, most=9)
    # A proxy, because the host of the store does not exist.
    config = {"proxies": {"http": server.url}, "s3": {"addressing_style": style}}
    options = {"key": "AK", "secret": "SK", "token": "T0", "requester_pays": True}
    options |= {"config_kwargs": config, "endpoint_url": "http://store.invalid"}
    origin = S3Origin(options, timeout=20)
    for key in ("a.bin?versionId=v+1", "a b/ü%+*.tar", "x/../a//b.tar"):
        origin.open(parse_url(f"s3://lab/{key}"), 0, 5).close()
    origin.open(parse_url("s3://lab/a.bin"), 0, None).close()
    assert origin.list_page(parse_url("s3://lab/x y/"), {"delimiter": "/"}) == ({"a": 0}, "")
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
