"""A real S3 server behind a proxy that injects faults: right bytes, or one clear error.

After every test, `Lab.audit` checks the cache.
"""

import gc
import gzip
import os
import re

import pytest

from shardcache import (
    AccessDeniedError,
    Cache,
    ConfigError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
    TransferTimeoutError,
)
from tests.support.proxy import Answer, Fault, Rule
from tests.support.storetools import descriptors, wait_until
from tests.support.tars import difference, labelled_tar

MIB = 1 << 20
#: Five parts, the last one short.
SIZE = 4 * MIB + 100 * 1024
PARTS = 5


class Lab:
    """A proxy before the server, a bucket with one object, a cache, and all stored versions."""

    def __init__(self, s3, proxy, bucket, path):
        self.s3, self.proxy, self.bucket, self.path = s3, proxy, bucket, path
        self.object, self.url = f"{bucket}/a.tar", f"s3://{bucket}/a.tar"
        self.stored: list[bytes] = []
        self.caches: list[Cache] = []

    def put(self, version=1, size=SIZE):
        self.stored.append(labelled_tar("a.tar", version, size))
        self.s3.put(self.bucket, "a.tar", self.stored[-1])

    def cache(self, **options):
        defaults = {"min_free": 0, "attempts": 3, "timeout": 20, "part_size": MIB, "connections": 4}
        # A replaced or damaged shard is downloaded again only if no reader has received bytes.
        defaults |= {"fill": "complete", "patience": 0}
        cache = Cache(self.path, **{**defaults, **options})
        self.caches.append(cache)
        return cache

    def gets(self):
        return len(self.proxy.of(self.object))

    def expect(self, cache, version=1, size=SIZE):
        """Assert that a read returns exactly this version."""
        with cache.open(self.url) as stream:
            assert not difference(stream.read(), labelled_tar("a.tar", version, size))

    def audit(self):
        """Assert that no wrong entry, wrong partial, file or connection remains."""
        while self.caches:
            self.caches.pop().close()
        self.proxy.script()
        with Cache(self.path, min_free=0) as reader:
            assert {finding.state for finding in reader.verify()} <= {"ok"}
            with reader.open(self.url) as stream:
                assert stream.read() in self.stored
        del reader, stream  # closes the connections
        assert not [each for each in descriptors() if f" {self.path}" in each]
        wait_until(lambda: gc.collect() >= 0 and not self.proxy.clients)


@pytest.fixture(scope="module")
def bucket(s3):
    """One bucket for the module, because the first object of a bucket takes long."""
    s3.create_bucket("faults")
    return "faults"


@pytest.fixture
def lab(s3, bucket, proxy, s3_environment, tmp_path):
    made = Lab(s3, proxy, bucket, tmp_path / "cache")
    made.put()
    gc.freeze()  # `audit` collects garbage: skip existing objects
    yield made
    try:
        made.audit()
    finally:
        gc.unfreeze()


def message(error, lab):
    """Return the message. Assert that it names the shard and a remedy, and contains no secret."""
    text = str(error.value)
    assert lab.url in text
    remedies = r"\b(check|set|wait|look|log in|restore|synchronise|again)\b"
    assert re.search(remedies, text, re.I), text
    assert "\n" not in text and len(text) < 600 and text.rstrip().endswith(".")
    assert lab.s3.secret_key not in text and "Signature" not in text
    return text


def page(status, code, **headers):
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'.encode()
    return Answer(status, [("Content-Type", "application/xml"), *headers.items()], body)


HTML = Answer(200, [("Content-Type", "text/html")], b"<html>Please log in to the network</html>")


def shifted(body):
    return body[4096:] + body[:4096]


GZIP = {"Content-Encoding": "gzip"}
#: claim -> (fault of one part, most additional GETs, or None if the download starts over)
HEALED: dict[str, tuple[Fault, int | None]] = {
    "a body cut short is continued": (Fault(cut=300_000), 1),
    "a reset in the body is continued": (Fault(cut=300_000, how="reset"), 1),
    "a reset before the head is repeated": (Fault(hang_up="reset"), 1),
    "other bytes under the right range fail the checksum": (Fault(body=shifted), None),
    "an error page of S3 with 200 is refused": (Fault(answer=page(200, "InternalError")), None),
    "an error page of HTML with 200 is refused": (Fault(answer=HTML), None),
    "an error page of HTML with 206 is refused": (Fault(answer=HTML._replace(status=206)), 1),
    "a header Content-Encoding changes no byte": (Fault(headers=GZIP), 0),
    "a compressed body is refused": (Fault(body=gzip.compress, headers=GZIP), 1),
    "a missing ETag in one response is another version": (Fault(headers={"ETag": None}), None),
    "503 is repeated": (Fault(answer=page(503, "SlowDown")), 1),
    "400 RequestTimeout is repeated": (Fault(answer=page(400, "RequestTimeout")), 1),
    "a connection closed between requests goes unnoticed": (Fault(cut=MIB), 0),
}


@pytest.mark.parametrize("start", [0, MIB], ids=["first part", "later part"])
@pytest.mark.parametrize("claim", HEALED)
def test_one_fault_is_healed(lab, claim, start):
    fault, more = HEALED[claim]
    rule = Rule(fault, start=start)
    lab.proxy.script(rule)
    lab.expect(lab.cache())
    assert rule.fired == 1
    assert lab.gets() <= (3 * PARTS if more is None else PARTS + more)


NO_ETAG, NO_LENGTH, NO_TIME = {"ETag": None}, {"Content-Length": None}, {"Last-Modified": None}
OLD = {"Last-Modified": "Mon, 02 Nov 2020 10:00:00 GMT"}
NOW = {**OLD, "Date": OLD["Last-Modified"]}
#: Expected ranges. A store that refuses HEAD describes the object in response to a GET.
IN_PARTS = [(at, min(at + MIB, SIZE)) for at in range(0, SIZE, MIB)]
IN_ONE, BY_GET = [IN_PARTS[0], None], [*IN_PARTS, (0, 1)]
#: claim -> (fault of all responses to this method, expected ranges)
LACKING: dict[str, tuple[Fault, str | None, list[tuple[int, int] | None]]] = {
    "HEAD is refused": (Fault(answer=page(403, "AccessDenied")), "HEAD", BY_GET),
    "HEAD is unknown": (Fault(answer=page(501, "NotImplemented")), "HEAD", BY_GET),
    "HEAD is throttled": (Fault(answer=page(503, "SlowDown")), "HEAD", IN_PARTS),
    "HEAD is redirected": (Fault(answer=page(301, "PermanentRedirect")), "HEAD", BY_GET),
    "HEAD returns a page": (Fault(answer=HTML), "HEAD", IN_PARTS),
    "a HEAD without an ETag is no change": (Fault(headers=NO_ETAG), "HEAD", IN_PARTS),
    "a HEAD without a length is no change": (Fault(headers=NO_LENGTH), "HEAD", IN_PARTS),
    "without ETags, times identify versions": (Fault(headers=NO_ETAG | OLD), None, IN_PARTS),
    "times within a minute of the response do not": (Fault(headers=NO_ETAG | NOW), None, IN_ONE),
    "without a version, one response has all": (Fault(headers=NO_ETAG | NO_TIME), None, IN_ONE),
}


@pytest.mark.parametrize("claim", LACKING)
def test_an_origin_that_lacks_a_feature(lab, claim):
    fault, method, ranges = LACKING[claim]
    lab.proxy.script(Rule(fault, method=method, times=None))
    lab.expect(cache := lab.cache())
    (entry,) = cache.entries()
    assert fault.answer is None or entry.metadata().checked is None
    found = [request.range for request in lab.proxy.of(lab.object)]
    assert sorted(found, key=str) == sorted(ranges, key=str)


#: claim -> (request during which the object is replaced, new size)
REPLACED: dict[str, tuple[dict[str, object], int]] = {
    "between two parts": ({"start": 3 * MIB}, SIZE),
    "by a longer one": ({"start": 3 * MIB}, SIZE + 4096),
    "by a shorter one": ({"start": 3 * MIB}, SIZE - MIB),
    "by a tiny one": ({"start": 3 * MIB}, 512 * 5),
    "before its checksum is requested": ({"method": "HEAD"}, SIZE),
}


@pytest.mark.parametrize("claim", REPLACED)
def test_a_replaced_object_is_read_in_its_new_version(lab, claim):
    when, size = REPLACED[claim]
    lab.proxy.script(Rule(Fault(before=lambda: lab.put(version=2, size=size)), **when))
    lab.expect(lab.cache(), version=2, size=size)
    assert lab.gets() <= 2 * PARTS + 1
    assert len(list(lab.caches[0].entries())) == 1


def test_an_object_that_keeps_changing_is_an_error(lab):
    versions = iter(range(2, 100))
    put = Fault(before=lambda: lab.put(version=next(versions)))
    lab.proxy.script(Rule(put, start=2 * MIB, times=None))
    with pytest.raises(TransferError, match="changed 4 times") as caught:
        lab.cache().open(lab.url)
    message(caught, lab)
    assert lab.gets() <= 4 * PARTS


SILENT = {"attempts": 2, "timeout": 0.5, "connections": 1}
SLOW = {"deadline": 0.8, "timeout": 5, "connections": 1}
#: claim -> (fault of all responses, options, a part of the message, most requests)
PERSISTENT: dict[str, tuple[Fault, dict[str, float | str], str, int]] = {
    "503": (Fault(answer=page(503, "SlowDown")), {}, "503 SlowDown", 4),
    "reset": (Fault(hang_up="reset"), {}, "does not answer", 4),
    "empty bodies": (Fault(cut=0), {}, "before the end", 16),  # 4 connections
    "resets in the body": (Fault(cut=1000, how="reset"), {}, "broke", 16),
    "compressed bodies": (Fault(body=gzip.compress, headers=GZIP), {}, "asked for bytes", 16),
    "silence": (Fault(hang_up="stall"), SILENT, "2 attempts failed", 2),
    "silence in the body": (Fault(cut=1000, how="stall"), SILENT, "2 attempts failed", 2),
    "a trickle": (Fault(rate=2000), SILENT, "2 attempts failed", 2),
    "slowness": (Fault(rate=20_000), SLOW, "deadline", 1),
    "no such host": (Fault(), {"endpoint_url": "http://nowhere.invalid:9"}, "nowhere.invalid:9", 0),
    "no server": (Fault(), {"endpoint_url": "http://127.0.0.1:9"}, "127.0.0.1:9", 0),
}


@pytest.mark.parametrize("claim", PERSISTENT)
def test_a_persistent_fault_ends_after_the_attempts(lab, claim):
    fault, options, text, requests = PERSISTENT[claim]
    lab.proxy.script(Rule(fault, times=None))
    with pytest.raises(TransferError, match=text) as caught:
        lab.cache(**{"attempts": 4, **options}).open(lab.url)
    assert isinstance(caught.value, TransferTimeoutError) == ("timeout" in options)
    assert "timeout" in options or "4 attempts failed" in str(caught.value)
    message(caught, lab)
    assert lab.gets() <= requests


ELSEWHERE = page(301, "PermanentRedirect", Location="http://127.0.0.1:9/x")
REGION = page(301, "PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"})
#: claim -> (response, error, a part of its message, requests)
PERMANENT: dict[str, tuple[Answer, type[ShardCacheError], str, int]] = {
    "404": (page(404, "NoSuchKey"), ShardNotFoundError, "not found", 1),
    "an expired token": (page(400, "ExpiredToken"), AccessDeniedError, "log in again", 1),
    "another host": (ELSEWHERE, ConfigError, "301", 1),
    "another region": (REGION, ConfigError, "Check the region", 2),  # the second one to that region
    "a shard in cold storage": (page(403, "InvalidObjectState"), AccessDeniedError, "403", 1),
}


@pytest.mark.parametrize("claim", PERMANENT)
def test_a_permanent_refusal_is_not_repeated(lab, claim):
    response, kind, text, requests = PERMANENT[claim]
    lab.proxy.script(Rule(Fault(answer=response), method=None, times=None))
    with pytest.raises(kind, match=text) as caught:
        lab.cache().open(lab.url)
    message(caught, lab)
    assert len(lab.proxy.requests()) == requests
    assert os.listdir(lab.path / "v1/partial") == []
