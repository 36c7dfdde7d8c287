"""Shards in a real S3 server: options, versions, and one clear sentence per failure."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardcache import AccessDeniedError, Cache, ConfigError, ShardNotFoundError
from shardcache.cli.demo import S3Server
from shardcache.origins.base import VersionChangedError
from shardcache.origins.s3 import S3Origin
from shardcache.urls import parse_url
from tests.support.proxy import Proxy
from tests.support.tars import make_tar

pytestmark = pytest.mark.usefixtures("s3_environment")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", min_free=0, attempts=2)


def read(cache: Cache, url: str) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


@pytest.mark.parametrize("asked", [False, True])
def test_botocore_is_asked_only_for_what_is_not_stated(tmp_path, s3, bucket, monkeypatch, asked):
    s3.put(bucket, "a.tar", make_tar(1))
    if asked:
        stated = f"aws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n"
        (tmp_path / "credentials").write_text(f"[default]\n{stated}")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    code = (
        "import sys, shardcache\n"
        f"cache = shardcache.Cache({str(tmp_path / 'cache')!r}, min_free=0)\n"
        f"print(len(cache.open('s3://{bucket}/a.tar').read()), 'botocore' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [str(len(make_tar(1))), str(asked)], done.stderr


@pytest.mark.parametrize("algorithm", ["CRC32C", "CRC64NVME", "SHA256", "SHA1"])
def test_every_stated_checksum_is_compared(cache, s3, bucket, algorithm):
    s3.client().put_object(
        Bucket=bucket, Key="a.tar", Body=make_tar(1), ChecksumAlgorithm=algorithm
    )
    assert read(cache, f"s3://{bucket}/a.tar") == make_tar(1)
    (entry,) = cache.entries()
    assert entry.metadata().checked == algorithm.lower()


def test_a_version_id_in_the_url_is_honoured(cache: Cache, s3: S3Server, bucket: str) -> None:
    client = s3.client()
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    versions = [
        client.put_object(Bucket=bucket, Key="v.tar", Body=make_tar(seed))["VersionId"]
        for seed in (1, 2)
    ]
    for seed, version in zip((1, 2), versions, strict=True):
        assert read(cache, f"s3://{bucket}/v.tar?versionId={version}") == make_tar(seed)
    assert read(cache, f"s3://{bucket}/v.tar") == make_tar(2)


@pytest.fixture
def origin(s3: S3Server, bucket: str) -> S3Origin:
    s3.put(bucket, "first.tar", make_tar(0))
    return S3Origin({}, timeout=30)


def contents(body: Any) -> bytes:
    buffer, found = memoryview(bytearray(1 << 20)), b""
    while count := body.readinto(buffer):
        found += buffer[:count]
    body.close()
    return found


@pytest.mark.parametrize(
    "key",
    [
        *("plain.tar", "a b/ü+%41.tar", "q?x=1.tar", "a::b.tar", "it's (1)&2=3;*.tar"),
        *("~t/-_..tar", "100%", '\U0001f600$@,[]{}|^`<>"#.tar'),
    ],
)
def test_keys_are_exact_bytes(origin: S3Origin, s3: S3Server, bucket: str, key: str) -> None:
    data = make_tar(len(key))
    s3.put(bucket, key, data)
    url = parse_url(f"s3://{bucket}/{key}")
    assert contents(origin.open(url, 0, None)) == data
    assert contents(origin.open(url, 100, 200)) == data[100:200]
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


def test_a_replaced_object_is_never_spliced(origin: S3Origin, s3: S3Server, bucket: str) -> None:
    url = parse_url(f"s3://{bucket}/first.tar")
    pin = origin.open(url, 0, 10).info
    assert contents(origin.open(url, 0, 10, pin)) == make_tar(0)[:10]
    s3.put(bucket, "first.tar", b"shorter")
    with pytest.raises(VersionChangedError):
        origin.open(url, 0, 5, pin)
    with pytest.raises(VersionChangedError, match="shorter"):
        origin.open(url, 100, 200)


def test_what_is_missing_costs_one_request_and_is_named(cache, bucket, proxy):
    with pytest.raises(ShardNotFoundError, match=rf"s3://{bucket}/none.tar: not found") as caught:
        cache.open(f"s3://{bucket}/none.tar")
    assert isinstance(caught.value, FileNotFoundError)
    assert len(proxy.requests()) == 1
    with pytest.raises(ShardNotFoundError, match=r"not found .*NoSuchBucket"):
        cache.open("s3://no-such-bucket/none.tar")


def test_wrong_keys_cost_one_request_and_say_so(tmp_path, bucket, proxy, s3):
    s3.put(bucket, "a.tar", make_tar(1))
    proxy.reset()
    options = {"key": "AKIAWRONG", "secret": "nope-canary"}
    cache = Cache(tmp_path / "cache", min_free=0, storage_options=options)
    with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID") as caught:
        cache.open(f"s3://{bucket}/a.tar")
    assert isinstance(caught.value, PermissionError)
    assert len(proxy.requests()) == 1
    assert "canary" not in repr(caught.value) + str(caught.value) + repr(cache)


def test_without_credentials_only_an_anonymous_reader_asks(
    cache: Cache, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch, proxy: Proxy
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDeniedError, match="Unable to locate credentials"):
        cache.open(f"s3://{bucket}/a.tar")
    assert proxy.requests() == []
    anonymous = Cache(tmp_path / "other", min_free=0, storage_options={"anon": True})
    with pytest.raises(AccessDeniedError, match="access denied"):  # the server wants signatures
        anonymous.open(f"s3://{bucket}/a.tar")
    assert [r.status for r in proxy.requests()] == [403]


def test_a_bucket_whose_signatures_are_others_is_refused(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache, pytest.raises(ConfigError, match="S3 Express"):
        cache.open("s3://shards--use1-az4--x-s3/a.tar")


@pytest.mark.parametrize(
    ("options", "said"),
    [({"profile": "nobody"}, "nobody"), ({"key": "AK\n", "secret": "x"}, "control character")],
)
def test_options_that_cannot_be_right_are_a_configuration_error(tmp_path, options, said) -> None:
    cache = Cache(tmp_path / "cache", min_free=0, storage_options=options)
    with pytest.raises(ConfigError, match=said):
        cache.open("s3://lab/a.tar")
