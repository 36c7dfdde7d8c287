"""Requests that botocore does not work out anew: the same answers, the same errors."""

from __future__ import annotations

import gzip
import io
from types import SimpleNamespace

import pytest
import urllib3

from shardcache.cli.demo import S3Server
from shardcache.errors import AccessDeniedError, ShardNotFoundError
from shardcache.origins.base import TransientError, VersionChangedError
from shardcache.origins.s3 import S3Origin
from shardcache.origins.s3shortcut import Shortcut
from shardcache.urls import parse_url
from tests.support.proxy import Proxy
from tests.support.tars import make_tar

KEYS = ["plain.tar", "a b/ü+%41.tar", "q?x=1.tar", "a::b.tar", "it's (1)&2=3;*.tar", "~t/-_..tar"]


def contents(body) -> bytes:
    buffer = memoryview(bytearray(1 << 20))
    found = b""
    while count := body.readinto(buffer):
        found += buffer[:count]
    body.close()
    return found


class Watched:
    """An origin, and how many requests botocore worked out for it."""

    def __init__(self, bucket: str, **options) -> None:
        self.origin = S3Origin(options, connections=2, timeout=30)
        self.long_way: list[str] = []
        client, _ = self.origin._ready_client()
        client.meta.events.register(
            "before-call.s3", lambda model, **_: self.long_way.append(model.name) or None
        )
        self._bucket = bucket

    def url(self, key: str):
        return parse_url(f"s3://{self._bucket}/{key}")

    def open(self, key: str, start: int = 0, stop: int | None = None, pin=None):
        return self.origin.open(self.url(key), start, stop, pin)


@pytest.fixture
def watched(s3: S3Server, bucket: str, s3_environment: None) -> Watched:
    s3.put(bucket, "first.tar", make_tar(0))
    found = Watched(bucket)
    found.open("first.tar").close()
    return found


@pytest.mark.parametrize("key", KEYS)
def test_only_the_first_request_is_worked_out(
    watched: Watched, s3: S3Server, bucket: str, key: str
) -> None:
    data = make_tar(len(key))
    s3.put(bucket, key, data)
    assert contents(watched.open(key)) == data
    assert contents(watched.open(key, 100, 200)) == data[100:200]
    assert watched.long_way == ["GetObject"]


def test_what_is_told_of_an_object_is_the_same(watched: Watched, s3: S3Server, bucket: str) -> None:
    short = watched.open("first.tar")
    whole = watched.origin.whole(watched.url("first.tar"), len(make_tar(0)), None)
    assert watched.long_way == ["GetObject"]
    long = Watched(bucket)
    direct = long.open("first.tar")
    assert long.long_way == ["GetObject"]
    assert (short.info, short.start, short.stop) == (direct.info, direct.start, direct.stop)
    assert whole.info == long.origin.stat(long.url("first.tar"))
    assert whole.info.checksum is not None
    assert contents(whole) == contents(short) == contents(direct) == make_tar(0)


@pytest.mark.parametrize("listed", [None, 5])
def test_of_an_object_that_is_too_long_comes_a_part(
    watched: Watched, proxy: Proxy, listed: int | None
) -> None:
    data = make_tar(0)
    body = watched.origin.whole(watched.url("first.tar"), 1000, listed)
    assert (body.start, body.stop, body.info.size) == (0, 1000, len(data))
    assert contents(body) == data[:1000]
    # What was still to come is not read by whoever has the connection next.
    assert contents(watched.open("first.tar")) == data
    assert contents(watched.origin.whole(watched.url("first.tar"), len(data), listed)) == data


def test_what_may_be_compressed_on_its_way_is_taken_whole_by_its_listed_size(
    watched: Watched, s3: S3Server, bucket: str
) -> None:
    data = gzip.compress(make_tar(0))
    client = s3.client()
    client.put_object(Bucket=bucket, Key="z.tar.gz", Body=data, ContentEncoding="gzip")
    url = watched.url("z.tar.gz")
    assert watched.origin.whole(url, 1 << 20, None) is None
    assert watched.origin.whole(url, 1 << 20, len(make_tar(0))) is None
    assert contents(watched.origin.whole(url, 1 << 20, len(data))) == data
    assert contents(watched.open("z.tar.gz")) == data


def test_an_empty_object_is_read(watched: Watched, s3: S3Server, bucket: str) -> None:
    s3.put(bucket, "empty.tar", b"")
    body = watched.open("empty.tar", 0, 100)
    assert (contents(body), body.info.size) == (b"", 0)
    assert watched.origin.whole(watched.url("empty.tar"), 0, 0).info.size == 0


def test_versions_are_insisted_on(watched: Watched, s3: S3Server, bucket: str) -> None:
    pin = watched.open("first.tar", 0, 10).info
    assert contents(watched.open("first.tar", 0, 10, pin)) == make_tar(0)[:10]
    s3.put(bucket, "first.tar", make_tar(1))
    with pytest.raises(VersionChangedError):
        watched.open("first.tar", 0, 10, pin)
    assert watched.long_way == ["GetObject"]


def test_a_version_that_is_named_goes_the_long_way(
    watched: Watched, s3: S3Server, bucket: str
) -> None:
    client = s3.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    version = client.put_object(Bucket=bucket, Key="v.tar", Body=make_tar(1))["VersionId"]
    s3.put(bucket, "v.tar", make_tar(2))
    assert contents(watched.open(f"v.tar?versionId={version}")) == make_tar(1)
    assert watched.long_way == ["GetObject", "GetObject"]
    assert contents(watched.open("v.tar")) == make_tar(2)
    assert watched.long_way == ["GetObject", "GetObject"]


def test_what_is_missing_is_said_at_once(watched: Watched, bucket: str, proxy: Proxy) -> None:
    proxy.reset()
    with pytest.raises(ShardNotFoundError, match=r"not found at .* \(404\)"):
        watched.open("nowhere.tar")
    assert watched.long_way == ["GetObject"]
    assert proxy.summary()[f"{bucket}/nowhere.tar"].gets == 1


def test_keys_that_are_refused_are_said_at_once(
    watched: Watched, s3: S3Server, bucket: str
) -> None:
    _, shortcut = watched.origin._ready_client()
    shortcut._credentials = SimpleNamespace(
        get_frozen_credentials=lambda: SimpleNamespace(
            access_key=s3.access_key, secret_key="wrong", token=None
        )
    )
    with pytest.raises(AccessDeniedError, match="does not belong to the access key"):
        watched.open("first.tar")


def test_nothing_is_signed_for_anybody(s3: S3Server, bucket: str, s3_environment: None) -> None:
    anybody = Watched(bucket, anon=True)
    with pytest.raises(AccessDeniedError):
        anybody.open("first.tar")
    template = learnt("http://h/b/k", {})
    assert "Authorization" not in dict(template._request(template._templates["b"], "x", {}).headers)


# -- with a client that answers as told ------------------------------------------------

SIGNED = "AWS4-HMAC-SHA256 Credential=a/b/20260101/eu-1/s3/aws4_request, SignedHeaders=host, S=1"


class FakeSession:
    """Botocore's HTTP session; keeps what was sent, answers what it is told."""

    def __init__(self) -> None:
        self.sent: list = []
        self.status, self.headers, self.body = 200, {}, b""

    def send(self, request):
        self.sent.append(request)
        raw = urllib3.HTTPResponse(
            io.BytesIO(self.body), headers=self.headers, status=self.status, preload_content=False
        )
        return SimpleNamespace(status_code=self.status, raw=raw)


def learnt(url: str, headers: dict, key: str = "k") -> Shortcut:
    """A shortcut whose client's first request was to ``url``."""
    handlers: list = []
    frozen = SimpleNamespace(access_key="ID", secret_key="secret", token="TOKEN")
    client = SimpleNamespace(
        meta=SimpleNamespace(
            config=SimpleNamespace(s3=None),
            events=SimpleNamespace(register_last=lambda name, handler: handlers.append(handler)),
        ),
        _request_signer=SimpleNamespace(
            _credentials=SimpleNamespace(get_frozen_credentials=lambda: frozen)
        ),
        _endpoint=SimpleNamespace(http_session=FakeSession()),
    )
    shortcut = Shortcut(client)
    handlers[0](request=SimpleNamespace(url=url, headers=headers))
    shortcut.learn("b", key)
    return shortcut


@pytest.mark.parametrize("prefix", ["http://host/b/", "https://b.host/", "https://host/x/b/"])
def test_only_key_range_and_condition_differ(prefix: str) -> None:
    first = {
        "Authorization": SIGNED,
        "User-Agent": b"me",
        "x-amz-request-payer": "requester",
        "X-Amz-Security-Token": "OLD",
        "X-Amz-Date": "OLD",
        "Range": "bytes=0-1",
        "If-Match": "old",
    }
    shortcut = learnt(f"{prefix}k", first)
    shortcut.get("b", "new key", {"Range": "bytes=5-6", "RequestPayer": "requester"})
    (request,) = shortcut._session.sent
    said = {k.lower(): v if isinstance(v, str) else v.decode() for k, v in request.headers.items()}
    assert (request.method, request.url, request.stream_output) == (
        "GET",
        f"{prefix}new%20key",
        True,
    )
    assert said["range"] == "bytes=5-6"
    assert said["user-agent"] == "me"
    assert said["x-amz-request-payer"] == "requester"
    assert said["x-amz-security-token"] == "TOKEN"
    assert said["x-amz-date"] != "OLD"
    assert "Credential=ID/" in said["authorization"]
    assert "/eu-1/s3/aws4_request" in said["authorization"]
    assert "if-match" not in said
    for name in ("range", "x-amz-security-token", "x-amz-request-payer"):
        assert name in said["authorization"]


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://h/b/k?versionId=1", {}),
        ("http://h/b/other", {}),
        ("http://h/bk", {}),
        ("http://h/b/k", {"Authorization": "AWS4-ECDSA-P256-SHA256 Credential=a/20260101/s3/x"}),
        ("http://h/b/k", {"Authorization": SIGNED.replace("/s3/", "/s3express/")}),
        ("http://h/b/k", {"Authorization": "AWS ID:signature"}),
    ],
)
def test_what_looks_unusual_is_left_to_botocore(url: str, headers: dict) -> None:
    shortcut = learnt(url, headers)
    assert shortcut.get("b", "k", {}) is None
    assert shortcut._session.sent == []


def test_what_is_asked_for_in_other_ways_is_left_to_botocore() -> None:
    shortcut = learnt("http://h/b/k", {"Authorization": SIGNED})
    assert shortcut.get("b", "k", {"VersionId": "1"}) is None
    assert shortcut.get("other", "k", {}) is None
    assert shortcut._session.sent == []


@pytest.mark.parametrize(
    ("status", "body"),
    [
        *((status, b"") for status in (301, 302, 307, 308)),
        (400, b"<Error><Code>AuthorizationHeaderMalformed</Code></Error>"),
    ],
)
def test_a_bucket_that_moved_is_left_to_botocore(status: int, body: bytes) -> None:
    shortcut = learnt("http://h/b/k", {"Authorization": SIGNED})
    shortcut._session.status, shortcut._session.body = status, body
    assert shortcut.get("b", "k", {}) is None
    assert shortcut.get("b", "k", {}) is None
    assert len(shortcut._session.sent) == 1  # until the next request was looked at


def test_an_answer_is_told_as_botocore_tells_it() -> None:
    shortcut = learnt("http://h/b/k", {"Authorization": SIGNED})
    shortcut._session.headers = {
        "ETag": '"1"',
        "Content-Length": "7",
        "Last-Modified": "Sun, 22 Nov 2026 01:02:03 GMT",
        "x-amz-version-id": "v",
        "x-amz-checksum-crc32": "AAAA",
        "x-amz-checksum-type": "FULL_OBJECT",
    }
    shortcut._session.body = b"content"
    answer = shortcut.get("b", "k", {})
    body = answer.pop("Body")
    assert body._raw_stream.read() == b"content"
    assert answer.pop("LastModified").isoformat() == "2026-11-22T01:02:03+00:00"
    assert answer == {
        "ResponseMetadata": {"HTTPStatusCode": 200},
        "ETag": '"1"',
        "ContentLength": 7,
        "VersionId": "v",
        "ChecksumCRC32": "AAAA",
        "ChecksumType": "FULL_OBJECT",
    }


@pytest.mark.parametrize(
    ("status", "body", "code", "message"),
    [
        (404, b"<Error><Code>NoSuchKey</Code><Message>gone</Message></Error>", "NoSuchKey", "gone"),
        (503, b"", "503", ""),
        (500, b"<html>" + b"x" * 100_000 + b"<Code>Late</Code>", "500", ""),
        (403, b"<Code>" + b"A" * 101 + b"</Code>", "403", ""),
    ],
)
def test_an_error_is_told_as_botocore_tells_it(status, body, code, message) -> None:
    from botocore.exceptions import ClientError

    shortcut = learnt("http://h/b/k", {"Authorization": SIGNED})
    shortcut._session.status, shortcut._session.body = status, body
    shortcut._session.headers = {"Retry-After": "3"}
    with pytest.raises(ClientError) as caught:
        shortcut.get("b", "k", {})
    assert caught.value.response == {
        "Error": {"Code": code, "Message": message},
        "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {"retry-after": "3"}},
    }


def test_a_botocore_without_these_parts_goes_the_long_way() -> None:
    client = SimpleNamespace(meta=SimpleNamespace(config=None, events=None))
    shortcut = Shortcut(client)
    shortcut.learn("b", "k")
    assert shortcut.get("b", "k", {}) is None


def test_a_busy_server_is_left_alone_for_as_long_as_it_says(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shortcut = watched.origin._ready_client()
    session = FakeSession()
    session.status, session.headers = 503, {"Retry-After": "7"}
    monkeypatch.setattr(shortcut, "_session", session)
    with pytest.raises(TransientError) as caught:
        watched.open("first.tar")
    assert caught.value.retry_after == 7
