"""Reads shards from moto, an implementation of S3 that is independent of SeaweedFS."""

import boto3
import moto.backends
import moto.settings
import pytest
from moto.server import ThreadedMotoServer

from shardcache import AccessDeniedError, Cache
from tests.support import caches
from tests.support.tars import make_tar

KEYS = {"key": "AK", "secret": "SK"}


@pytest.fixture(scope="module")
def server():
    running = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


@pytest.fixture
def client(server):
    """A client of the server, which stores nothing but the empty bucket ``lab``."""
    moto.backends.get_backend("s3").reset()
    made = boto3.client(
        "s3",
        endpoint_url=server,
        aws_access_key_id=KEYS["key"],
        aws_secret_access_key=KEYS["secret"],
        region_name="us-east-1",
    )
    made.create_bucket(Bucket="lab")
    return made


@pytest.fixture
def cache(client, server, tmp_path):
    """A cache that downloads in parts of 1 MiB."""
    options = {"min_free": 0, "attempts": 2, "part_size": 1 << 20, "endpoint_url": server}
    with Cache(tmp_path / "cache", storage_options=KEYS, **options) as cache:
        yield cache


def put(client, key, **options):
    """Upload a shard of 3 MB, and return it."""
    data = make_tar(1, members=30, size=50_000)
    client.put_object(Bucket="lab", Key=key, Body=data, **options)
    return data


def read(cache, key):
    return caches.read(cache, f"s3://lab/{key}")


@pytest.mark.parametrize("key", ["a.tar", "a b/ü+%41.tar", "it's (1)&2=3;*.tar", "q?x=1.tar"])
def test_a_shard_is_read_in_parts_under_any_key(cache, client, key):
    data = put(client, key)
    assert read(cache, key) == data
    assert cache.path(f"s3://lab/{key}").read_bytes() == data


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_a_stated_checksum_is_compared(cache, client, algorithm):
    data = put(client, "a.tar", ChecksumAlgorithm=algorithm)
    assert read(cache, "a.tar") == data
    assert cache.entry("s3://lab/a.tar").metadata().checked == algorithm.lower()


def test_unknown_keys_are_denied(cache, client, monkeypatch):
    put(client, "a.tar")
    monkeypatch.setattr(moto.settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    with pytest.raises(AccessDeniedError, match="InvalidAccessKeyId.*log in again"):
        read(cache, "a.tar")
