"""Shards in a real S3 server: options, versions, and one clear sentence per failure."""

from __future__ import annotations

import gzip
import pickle
import subprocess
import sys

import pytest

from shardcache import AccessDeniedError, Cache, ConfigError, ShardNotFoundError
from shardcache.origins.base import VersionChangedError, read_all
from shardcache.origins.s3 import S3Origin
from shardcache.urls import parse_url
from tests.support.tars import make_tar

pytestmark = pytest.mark.usefixtures("s3_environment")
KEYS = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"


@pytest.mark.parametrize("asked", [False, True])
def test_botocore_is_asked_only_for_what_is_not_stated(tmp_path, s3, bucket, monkeypatch, asked):
    s3.put(bucket, "a.tar", make_tar(1))
    if asked:
        stated = f"aws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n"
        (tmp_path / "credentials").write_text(f"[default]\n{stated}")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        for name in KEYS:
            monkeypatch.delenv(name)
    code = (
        "import sys, shardcache\n"
        f"cache = shardcache.Cache({str(tmp_path / 'cache')!r}, min_free=0)\n"
        f"cache.parse(url := 's3://{bucket}/a.tar')\n"  # the endpoint is part of its key
        "print('botocore' in sys.modules)\n"
        "print(len(cache.open(url).read()), 'botocore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", str(len(make_tar(1))), str(asked)], done.stderr


def test_every_stated_checksum_is_compared(tmp_path, s3, bucket):
    put = s3.client().put_object
    with Cache(tmp_path / "cache", min_free=0) as cache:
        for algorithm in ("CRC32C", "CRC64NVME", "SHA256", "SHA1"):
            put(Bucket=bucket, Key=algorithm, Body=make_tar(1), ChecksumAlgorithm=algorithm)
            assert cache.open(f"s3://{bucket}/{algorithm}").read() == make_tar(1)
            entry = cache.entry(f"s3://{bucket}/{algorithm}")
            assert entry.metadata().checked == algorithm.lower()


def test_a_version_id_in_the_url_is_honoured(tmp_path, s3, bucket):
    client, url = s3.client(), f"s3://{bucket}/v.tar"
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    bodies = [make_tar(seed) for seed in (1, 2)]
    put = [client.put_object(Bucket=bucket, Key="v.tar", Body=body) for body in bodies]
    urls = [*(f"{url}?versionId={answer['VersionId']}" for answer in put), url]
    with Cache(tmp_path / "cache", min_free=0) as cache:
        assert [cache.open(url).read() for url in urls] == [*bodies, bodies[1]]


@pytest.fixture
def origin(s3, bucket):
    s3.put(bucket, "first.tar", make_tar(0))
    return S3Origin({}, timeout=30)


def contents(body):
    return read_all(body, 1 << 20)


def test_keys_are_exact_bytes(origin, s3, bucket):
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
        listed, _ = origin.list_page(parse_url(f"s3://{bucket}/{key[:3]}"), {})
        assert listed[key] == len(data)


def test_a_whole_object_states_its_checksum_unless_it_may_be_compressed(origin, s3, bucket):
    url = parse_url(f"s3://{bucket}/first.tar")
    body = origin.open(url, 0, None)
    assert body.info == origin.stat(url) and body.info.checksum is not None
    assert contents(body) == make_tar(0)
    data = gzip.compress(make_tar(0))
    s3.client().put_object(Bucket=bucket, Key="z.tar.gz", Body=data, ContentEncoding="gzip")
    body = origin.open(parse_url(f"s3://{bucket}/z.tar.gz"), 0, None)
    assert body.status == 206 and contents(body) == data


def test_an_empty_answer_leaves_a_connection_that_can_be_used(origin, s3, bucket):
    s3.put(bucket, "empty.tar", b"")
    url = parse_url(f"s3://{bucket}/empty.tar")
    for _ in range(3):
        body = origin.open(url, 0, 100)
        assert (body.stop, contents(body)) == (0, b"")
    assert origin.open(url, 0, None).info.size == 0


def test_a_replaced_object_is_never_spliced(origin, s3, bucket):
    url = parse_url(f"s3://{bucket}/first.tar")
    pin = origin.open(url, 0, 10).info
    assert contents(origin.open(url, 0, 10, pin)) == make_tar(0)[:10]
    s3.put(bucket, "first.tar", b"shorter")
    with pytest.raises(VersionChangedError):
        origin.open(url, 0, 5, pin)
    with pytest.raises(VersionChangedError, match="shorter"):
        origin.open(url, 100, 200)


@pytest.mark.parametrize(
    ("options", "url", "kind", "said", "requests"),
    [
        ({}, "@/none.tar", ShardNotFoundError, r"@/none.tar: not found", 1),
        ({}, "s3://no-such-bucket/a.tar", ShardNotFoundError, "not found .*NoSuchBucket", 1),
        ({"key": "WRONG", "secret": "x"}, "@/a.tar", AccessDeniedError, "AWS_ACCESS_KEY_ID", 1),
        ({"anon": True}, "@/a.tar", AccessDeniedError, "access denied", 1),
        (None, "@/a.tar", AccessDeniedError, "Unable to locate credentials", 0),
        ({"profile": "nobody"}, "@/a.tar", ConfigError, "nobody", 0),
        ({"key": "AK\n", "secret": "x"}, "@/a.tar", ConfigError, "control character", 0),
        ({}, "s3://shards--use1-az4--x-s3/a.tar", ConfigError, "S3 Express", 0),
    ],
)
def test_what_cannot_be_read_costs_one_request_at_most_and_says_why(
    tmp_path, s3, bucket, proxy, monkeypatch, options, url, kind, said, requests
):
    """Options None: no credentials anywhere."""
    s3.put(bucket, "a.tar", make_tar(1))
    proxy.reset()
    for name in KEYS if options is None else ():
        monkeypatch.delenv(name)
    cache = Cache(tmp_path / "cache", min_free=0, storage_options=options or {})
    with cache, pytest.raises(kind, match=said.replace("@", f"s3://{bucket}")):
        cache.open(url.replace("@", f"s3://{bucket}"))
    assert len(proxy.requests()) == requests
