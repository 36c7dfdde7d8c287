"""Shards in a real S3 server: options, versions, errors and buckets that need s3fs."""

import dataclasses
import gzip
import pickle
import socket
import sys
from urllib.parse import urlsplit

import pytest
from aiobotocore.session import AioSession

from shardcache import AccessDeniedError, ConfigError, ShardNotFoundError
from shardcache.origins.base import VersionChangedError, read_all
from shardcache.origins.s3 import S3Origin
from shardcache.urls import parse_url
from tests.support.clitools import run_process
from tests.support.tars import make_tar
from tests.support.webservers import answer, store_of

pytestmark = pytest.mark.usefixtures("s3_environment")
KEYS = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
SSE = {"s3_additional_kwargs": {"SSECustomerKey": "k" * 32, "SSECustomerAlgorithm": "AES256"}}
EXPRESS = "shards--use1-az4--x-s3"
POINT = "arn:aws:s3:us-west-2:123456789012:accesspoint/point"
MRAP = "arn:aws:s3::123456789012:accesspoint/point.mrap"


def test_a_key_needs_no_botocore_and_a_read_no_session_of_it(tmp_path, s3, bucket):
    s3.put(bucket, "a.tar", make_tar(1))
    code = (
        "import sys, shardcache\n"
        f"cache = shardcache.Cache({str(tmp_path / 'cache')!r}, min_free=0)\n"
        f"cache.parse(url := 's3://{bucket}/a.tar')\n"  # the endpoint is part of its key
        "print('botocore' in sys.modules, len(cache.open(url).read()))\n"
        "print('botocore.session' in sys.modules)"
    )
    ended = run_process(python=[sys.executable, "-c", code])
    assert ended == (0, f"False {len(make_tar(1))}\nFalse\n", "")


def test_every_stated_checksum_is_compared(open_cache, s3, bucket):
    put = s3.client().put_object
    cache = open_cache()
    for algorithm in ("CRC32C", "CRC64NVME", "SHA256", "SHA1"):
        put(Bucket=bucket, Key=algorithm, Body=make_tar(1), ChecksumAlgorithm=algorithm)
        assert cache.open(f"s3://{bucket}/{algorithm}").read() == make_tar(1)
        assert cache.entry(f"s3://{bucket}/{algorithm}").metadata().checked == algorithm.lower()


@pytest.fixture
def origin(s3, bucket):
    s3.put(bucket, "first.tar", make_tar(0))
    return S3Origin("s3", {}, 30)


def contents(body):
    return read_all(body, 1 << 20)


def test_keys_with_special_characters_are_read(origin, s3, bucket):
    for key in (
        *("plain.tar", "a b/ü+%41.tar", "q?x=1.tar", "a::b.tar", "it's (1)&2=3;*.tar"),
        *("k.tar", "k.tar?token=1", "k.tar?x?sig=2&Signature=3&X-Amz-Signature=4"),
        *("~t/-_..tar", "100%", '\U0001f600$@,[]{}|^`<>"#.tar'),
    ):
        data = make_tar(len(key))
        s3.put(bucket, key, data)
        url = parse_url(f"s3://{bucket}/{key}")
        assert contents(origin.open(url, 0, None)) == data
        assert contents(origin.open(pickle.loads(pickle.dumps(url)), 100, 200)) == data[100:200]
        folder, _, name = key.rpartition("/")
        directory = dataclasses.replace(url, canonical=f"s3://{bucket}/{folder and folder + '/'}")
        listed, _ = origin.list_page(directory, name[:3], "", deep=False)
        assert listed[name] == len(data)


def test_a_response_has_a_checksum_unless_it_may_be_compressed(origin, s3, bucket):
    url = parse_url(f"s3://{bucket}/first.tar")
    body = origin.open(url, 0, None)
    assert body.info == origin.stat(url) and body.info.checksum is not None
    assert contents(body) == make_tar(0)
    data = gzip.compress(make_tar(0))
    s3.client().put_object(Bucket=bucket, Key="z.tar.gz", Body=data, ContentEncoding="gzip")
    body = origin.open(parse_url(f"s3://{bucket}/z.tar.gz"), 0, None)
    assert body.status == 206 and contents(body) == data


def test_a_request_for_a_replaced_version_fails(origin, s3, bucket):
    url = parse_url(f"s3://{bucket}/first.tar")
    pin = origin.open(url, 0, 10).info
    assert contents(origin.open(url, 0, 10, pin)) == make_tar(0)[:10]
    s3.put(bucket, "first.tar", b"shorter")
    with pytest.raises(VersionChangedError):
        origin.open(url, 0, 5, pin)
    with pytest.raises(VersionChangedError, match="shorter"):
        origin.open(url, 100, 200)


@pytest.mark.parametrize(
    ("options", "url", "kind", "message", "requests"),
    [
        ({}, "@/none.tar", ShardNotFoundError, r"@/none.tar: not found", 1),
        ({}, "s3://none/a.tar", ShardNotFoundError, "there is no bucket none .*NoSuchBucket", 1),
        ({"key": "WRONG", "secret": "x"}, "@/a.tar", AccessDeniedError, "AWS_ACCESS_KEY_ID", 1),
        ({"anon": True}, "@/a.tar", AccessDeniedError, "access denied", 1),
        (None, "@/a.tar", AccessDeniedError, "Unable to locate credentials", 0),
        ({"profile": "nobody"}, "@/a.tar", ConfigError, "nobody", 0),
        ({"key": "AK\n", "secret": "x"}, "@/a.tar", ConfigError, "control character", 0),
        ({}, "s3://shards--use1-az4--x-s3/a.tar", ConfigError, "501 NotImplemented", 1),
        ({"profile": "none", **SSE}, "@/a.tar", AccessDeniedError, "none", 0),
        (SSE, "@/a.tar?versionId=1", ConfigError, "version_aware", 0),
    ],
)
def test_a_permanent_error_costs_at_most_one_request_and_states_its_cause(
    open_cache, s3, bucket, proxy, monkeypatch, options, url, kind, message, requests
):
    """With ``options=None``, there are no credentials."""
    s3.put(bucket, "a.tar", make_tar(1))
    proxy.reset()
    for name in KEYS if options is None else ():
        monkeypatch.delenv(name)
    cache = open_cache(storage_options=options or {})
    with pytest.raises(kind, match=message.replace("@", f"s3://{bucket}")):
        cache.open(url.replace("@", f"s3://{bucket}"))
    assert len(proxy.requests()) == requests


SHARD = make_tar(7, members=3, size=3_000_000)
SESSION = (
    b"<CreateSessionResult><Credentials><SessionToken>TOKEN</SessionToken><SecretAccessKey>S"
    b"</SecretAccessKey><AccessKeyId>SESSION</AccessKeyId><Expiration>2199-01-01T00:00:00Z"
    b"</Expiration></Credentials></CreateSessionResult>"
)


@pytest.fixture
def store(serve, monkeypatch):
    """A server for every host: it opens sessions, and lists and serves a shard."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *a, **n: look_up("127.0.0.1", *a, **n))
    server = serve(store_of(SHARD, "d/k.tar"), most=1000)
    server.refuse = lambda head: answer("200 OK", SESSION) if "?session" in head else None
    return server


def header(head, name):
    return dict(line.split(": ", 1) for line in head.lower().split("\r\n")[1:-2])[name]


@pytest.mark.parametrize("name", ["d/k.tar", "d/"])
def test_an_s3_express_bucket_is_read_in_a_session(open_cache, store, caplog, name):
    caplog.set_level("INFO", "shardcache")
    cache = open_cache(endpoint_url=store.url)
    cache.prewarm([f"s3://{EXPRESS}/{name}"])
    assert cache.open(f"s3://{EXPRESS}/d/k.tar").read() == SHARD
    rest = [head for head in store.heads if "?session" not in head]
    assert len(store.heads) - len(rest) <= 2  # one for the listing, one for the reads
    assert all("/us-east-1/s3express/" in header(head, "authorization") for head in store.heads)
    assert {header(head, "x-amz-s3session-token") for head in rest} == {"token"}
    assert "S3 Express buckets: reading through s3fs" in caplog.text


@pytest.mark.parametrize("files", [True, False], ids=["botocore", "own client"])
def test_an_access_point_is_read_by_its_arn(open_cache, tmp_path, store, monkeypatch, files):
    if files:
        (tmp_path / "config").write_text("[default]\nregion = us-east-1\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    cache = open_cache(endpoint_url=store.url.replace("127.0.0.1", "localhost"))
    cache.prewarm([f"s3://{POINT}/d/"])
    assert cache.open(f"s3://{POINT}/d/k.tar").read() == SHARD
    hosts = {header(head, "host").partition(":")[0] for head in store.heads}
    assert hosts == {"point-123456789012.localhost"}
    assert {head.split(" ")[1].partition("?")[0] for head in store.heads} == {"/", "/d/k.tar"}
    assert all("/us-west-2/s3/" in header(head, "authorization") for head in store.heads)


def test_a_multi_region_access_point_is_signed_for_all_regions(open_cache, store):
    """The address is always one of AWS, so a session redirects the requests to the store."""
    session, urls = AioSession(), []

    def redirect(request, **_):
        parts = urlsplit(request.url)
        urls.append(f"{parts.scheme}://{parts.netloc}")
        request.url = request.url.replace(urls[-1], store.url)

    session.register("before-send.s3", redirect)
    cache = open_cache(storage_options={"session": session})
    cache.prewarm([f"s3://{MRAP}/d/{{k,none}}.tar::s3://{MRAP}/d/*.tar"])
    assert cache.open(f"s3://{MRAP}/d/k.tar").read() == SHARD
    assert set(urls) == {"https://point.mrap.accesspoint.s3-global.amazonaws.com"}
    assert all("aws4-ecdsa-p256" in header(head, "authorization") for head in store.heads)
    assert {header(head, "x-amz-region-set") for head in store.heads} == {"*"}


def test_s3fs_lists_and_reads_shards_that_the_user_has_encrypted(open_cache, tmp_path, s3, bucket):
    names, put = ["d/a.tar", "d/b.tar", "d/e/c.tar"], s3.client().put_object
    for name in names:
        put(Bucket=bucket, Key=name, Body=make_tar(len(name)), **SSE["s3_additional_kwargs"])
    cache = open_cache(storage_options=SSE)
    cache.prewarm([f"s3://{bucket}/d/?.tar", f"s3://{bucket}:secret@{bucket}/d/e/"])
    for name in names:
        assert cache.entry(f"s3://{bucket}/{name}") is not None
        assert cache.open(f"s3://{bucket}/{name}").read() == make_tar(len(name))
    with pytest.raises(ConfigError):
        open_cache(dir=tmp_path / "other").open(f"s3://{bucket}/d/a.tar")
