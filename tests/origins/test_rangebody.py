"""Single requests over HTTP: proxies, logins, regions, signatures and redirects.

`tests/origins/test_answers.py` has the refused and the malformed responses.
"""

import contextlib
import socket
import urllib.request
from collections.abc import Callable

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from shardcache import AccessDeniedError, Cache, TransferError
from shardcache.origins.base import TransientError
from shardcache.origins.http import WebOrigin
from shardcache.origins.retry import try_once
from shardcache.origins.s3 import S3Origin
from shardcache.urls import parse_url
from tests.support.tars import make_tar
from tests.support.webservers import Scripted, answer, listing, part_of, store_of

SHARD = make_tar(3, members=3, size=1_200_000)
KEYS = {"key": "AK", "secret": "SK"}


#: Five bytes; the connection stays open.
HELLO = answer("206 Partial Content", b"hello", Content_Range="bytes 0-4/5", Connection=None)


def test_a_refusal_states_the_pause_that_the_server_requests(serve):
    server = serve(answer("500 Oh", Retry_After=7))
    with pytest.raises(TransientError, match="500") as caught:
        WebOrigin("https", {}, 20).open(parse_url(f"{server.url}/a.bin"), 10, 20)
    assert (caught.value.retry_after, len(server.heads)) == (7, 1)


@pytest.mark.parametrize(
    ("scheme", "response", "kind", "first_line"),
    [
        ("http", HELLO, None, "GET http://shards.invalid/a "),
        ("https", answer("407 Login"), AccessDeniedError, "CONNECT shards.invalid:443 "),
        ("https", b"HTTP/1.1 200 OK\r\n\r\nthis is no TLS", TransientError, "CONNECT "),
    ],
)
def test_a_proxy_receives_its_login(serve, monkeypatch, scheme, response, kind, first_line):
    server = serve(response)
    monkeypatch.setenv(f"{scheme}_proxy", server.url.replace("//", "//me:pass@"))
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(kind) if kind else contextlib.nullcontext():
        WebOrigin("https", {}, 20).open(parse_url(f"{scheme}://shards.invalid/a"), 0, 5).close()
    (head,) = server.heads
    assert head.startswith(first_line)
    assert "Proxy-Authorization: Basic bWU6cGFzcw==" in head


@pytest.mark.parametrize(
    ("host", "exceptions", "direct"),
    [
        ("127.0.0.1", "minio:9000,127.0.0.1:{port}", True),
        ("127.0.0.1", "127.0.0.1:1", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "10.0.0.0/8, 127.0.0.0/8", True),
        ("127.0.0.1", "127.0.0.1/8:{port}", True),
        ("127.0.0.1", "10.0.0.0/8 127.0.0 ::/0", False),
        ("node.minio.test", "MinIO.test:{port}", True),
        ("node.minio.test", ".minio.test", True),
        ("node.minio.test", "*.minio.test", True),
        ("node.minio.test", "io.test,minio,:{port},node.minio.test:1,,", False),
        ("node.minio.test", "none,*", True),
        ("[::1]", "::1", True),
        ("[::1]", "[::1]:{port}", True),
        ("[::1]", "fe80::/10,[::1]:1", False),
    ],
)
def test_no_proxy_takes_hosts_and_ports(serve, make_cache, monkeypatch, host, exceptions, direct):
    look_up, find, found = socket.getaddrinfo, urllib.request.getproxies, list[object]()
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *a, **n: look_up("127.0.0.1", *a, **n))
    monkeypatch.setattr("urllib.request.getproxies", lambda: found.append(0) or find())
    server, proxy = (serve(lambda head: b"".join(part_of(SHARD, head)), 9) for _ in range(2))
    port = server.server_address[1]
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("no_proxy", exceptions.format(port=port))
    cache = make_cache(part_size="1MiB", connections=1)
    assert cache.open(f"http://{host}:{port}/a.tar").read() == SHARD
    assert (bool(server.heads), bool(proxy.heads)) == (direct, not direct)
    assert len(found) < len(server.heads + proxy.heads)  # not for each request
    monkeypatch.delenv("http_proxy")
    assert make_cache().open(f"http://{host}:{port}/b.tar").read() == SHARD
    assert "/b.tar" in server.heads[-1]


@pytest.mark.parametrize("url", ["http://store.test/a.tar", "https://store.test/a.tar", "s3://b/a"])
@pytest.mark.parametrize("dies", [True, False])
def test_the_error_of_a_dead_proxy_names_the_proxy(serve, open_cache, monkeypatch, url, dies):
    place = "127.0.0.1:1" if dies else serve(b"").url.removeprefix("http://")
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", f"http://me:secret@{place}")
    monkeypatch.delenv("no_proxy", raising=False)
    cache = open_cache(endpoint_url="http://s3.test", storage_options=KEYS, attempts=1)
    with pytest.raises(TransferError, match=rf"\.test through the proxy {place} ") as caught:
        cache.open(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("header", [True, False])
def test_all_requests_after_a_redirect_go_to_the_region_of_the_bucket(serve, header: bool) -> None:
    error = b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-3</Region></Error>"
    moved = answer("400 Bad Request", error)
    if header:
        moved = answer("301 Moved Permanently", x_amz_bucket_region="eu-west-3")
    server = serve(lambda head: HELLO if "/eu-west-3/s3/aws4_request" in head else moved, most=9)
    origin = S3Origin("s3", {**KEYS, "endpoint_url": server.url}, 20)
    url = parse_url("s3://lab/a.bin")
    for _ in range(2):
        try_once("", lambda: origin.open(url, 0, 5).close())
    assert len(server.heads) == 3


@pytest.mark.parametrize("style", ["path", "virtual"])
def test_signatures_equal_those_of_botocore(serve, style: str) -> None:
    page = answer("200 OK", listing("x y/a"))
    server = serve(lambda head: page if "list-type" in head else HELLO, most=9)
    # A proxy, because the host of the store does not exist.
    config = {"proxies": {"http": server.url}, "s3": {"addressing_style": style}}
    options = {**KEYS, "token": "T0", "requester_pays": True, "config_kwargs": config}
    options["endpoint_url"] = "http://store.invalid"
    origin = S3Origin("s3", options, 20)
    for key in ("a.bin?versionId=v+1", "a b/ü%+*.tar", "x/../a//b.tar"):
        origin.open(parse_url(f"s3://lab/{key}"), 0, 5).close()
    origin.open(parse_url("s3://lab/a.bin"), 0, None).close()
    directory = parse_url("s3://lab/x y/")
    assert origin.list_page(directory, "p", "", deep=False) == ({"a": 1}, "")
    assert len(server.heads) == 5 and "/x/../a//b.tar HTTP" in server.heads[2]
    place = "http://store.invalid/lab/" if style == "path" else "http://lab.store.invalid/"
    for head in server.heads:
        url = head.split(" ")[1]
        assert url.startswith(place.removesuffix("/"))
        assert "x-amz-request-payer" in head
        assert_signed(head, url, "T0")


def assert_signed(head: str, url: str, token: str | None = None) -> None:
    """Compare the signature of a request with that of botocore."""
    first, *lines = head.strip().splitlines()
    headers = dict(line.split(": ", 1) for line in lines)
    stated = headers.pop("Authorization")
    signed = stated.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    assert {n.lower() for n in headers if n.startswith("x-amz-")} <= set(signed)
    request = AWSRequest(
        first.split(" ")[0], url, {n: v for n, v in headers.items() if n.lower() in signed}
    )
    request.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(Credentials("AK", "SK", token), "s3", "us-east-1")
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert stated.endswith(f"Signature={signer.signature(text, request)}")


def redirect(status: str, server: str) -> Callable[[str], bytes]:
    """Redirect requests to the same path of another server, with one more parameter."""

    def respond(head: str) -> bytes:
        target = head.split(" ")[1]
        location = f"{server}{target}{'&' if '?' in target else '?'}node=a%7E"
        return answer(status, Location=location, Connection=None)

    return respond


@pytest.fixture
def node(serve) -> Scripted:
    """A server of one shard, which also lists it."""
    return serve(store_of(SHARD, "d/a b.tar"), most=99)


@pytest.fixture
def cache_of(open_cache) -> Callable[..., Cache]:
    """Return a function that opens a cache of the shards of a server."""
    given = {"storage_options": KEYS, "attempts": 1, "connections": 1, "part_size": "1MiB"}
    return lambda front, **more: open_cache(endpoint_url=front.url, **{**given, **more})


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 Temporary", "308 Permanent"])
def test_a_redirect_of_a_store_is_followed_with_a_new_signature(serve, node, cache_of, status):
    second = serve(redirect(status, node.url), most=99)
    front = serve(redirect(status, second.url), most=99)
    cache = cache_of(front)
    assert cache.prewarm("s3://lab/d/*.tar").failures == {}
    assert cache.open("s3://lab/d/a b.tar").read() == SHARD
    assert cache.prewarm("s3://lab/d/a b.tar", refresh=True).failures == {}
    for server in (front, second, node):
        for head in server.heads:
            assert "\r\nAccept-Encoding: identity\r\n" in head
            assert_signed(head, f"{server.url}{head.split(' ')[1]}")
    parts = [head for head in node.heads if head.startswith("GET") and "Range: bytes=" in head]
    assert len(parts) == 7 and all('If-Match: "v1"' in head for head in parts[1:])


@pytest.mark.parametrize(
    "signed",
    [
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=me&X-Amz-Signature=s1gned",
        "AWSAccessKeyId=me&Expires=9&Signature=s1gned",
        "X-Goog-Algorithm=GOOG4&X-Goog-Credential=me&X-Goog-Signature=s1gned",
        "Expires=9&Signature=s1gned&Key-Pair-Id=me",
    ],
)
def test_a_target_with_a_signature_of_its_own_is_not_signed_again(serve, node, cache_of, signed):
    target = f"{node.url}/d/a?{signed}"
    front = serve(answer("307 Moved", Location=target, Connection=None), most=99)
    assert cache_of(front).open("s3://lab/d/a b.tar").read() == SHARD
    assert node.heads and not [head for head in node.heads if "\r\nauthorization:" in head.lower()]
    assert "x-amz-" not in "".join(head.partition("\r\n")[2] for head in node.heads).lower()


def test_the_store_is_asked_again_after_six_dead_targets(serve, node, cache_of):
    dead = iter(["http://127.0.0.1:1"] * 6)
    front = serve(lambda head: redirect("307", next(dead, node.url))(head), most=99)
    assert cache_of(front, attempts=7).open("s3://lab/d/a b.tar").read() == SHARD
