"""``shardcache::s3://...`` for everything that opens URLs through fsspec."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from shardcache import ConfigError
from shardcache.demoserver import S3Server
from shardcache.meter import Meter
from tests.conftest import make_tar

SHARD = make_tar(6)


@pytest.fixture
def url(s3: S3Server, bucket: str, s3_environment: dict, meter: Meter) -> str:
    s3.put(bucket, "a.tar", SHARD)
    s3.put(bucket, "b.tar", SHARD)
    meter.reset()
    return f"shardcache::s3://{bucket}/a.tar"


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("shardcache.defaults._default", None)
    monkeypatch.setenv("SHARDCACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    fsspec.filesystem("memory").clear_instance_cache()
    return tmp_path / "cache"


def gets(meter: Meter) -> int:
    return sum(t.object_fetches for t in meter.summary().values())


def test_open_reads_through_the_default_cache(url: str, default: Path, meter: Meter) -> None:
    for _ in range(2):
        with fsspec.open(url) as stream:
            assert stream.read(10) == SHARD[:10]
            stream.seek(-5, 2)
            assert stream.read() == SHARD[-5:]
    assert gets(meter) == 1
    assert list(default.rglob("a.tar"))


def test_a_cache_of_its_own_is_named_in_options(url: str, tmp_path: Path, meter: Meter) -> None:
    with fsspec.open(url, shardcache={"dir": str(tmp_path / "own"), "min_free": 0}) as stream:
        assert stream.read() == SHARD
    assert list((tmp_path / "own").rglob("a.tar"))


def test_the_filesystem_lists_describes_and_cuts(url: str, default: Path) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    names = [name.rpartition("/")[2] for name in fs.ls(path.rpartition("/")[0], detail=False)]
    assert names == ["a.tar", "b.tar"]
    assert fs.info(path)["size"] == len(SHARD)
    assert fs.cat_file(path, 5, 15) == SHARD[5:15]
    assert fs.cat_file(path, -7) == SHARD[-7:]
    assert fs.cat_file(path) == SHARD
    assert fs.info(path)["size"] == len(SHARD)
    assert fs.exists(path)


def test_writing_is_refused(url: str, default: Path) -> None:
    with pytest.raises(ConfigError, match="mode 'wb'"), fsspec.open(url, "wb") as stream:
        stream.write(b"x")


def test_a_chain_without_an_origin_is_refused() -> None:
    from shardcache.filesystem import ShardCacheFileSystem

    with pytest.raises(ConfigError, match="needs the origin"):
        ShardCacheFileSystem(skip_instance_cache=True)


def test_pandas_style_readers_get_bytes(url: str, default: Path) -> None:
    import tarfile

    with fsspec.open(url) as stream, tarfile.open(fileobj=stream) as archive:
        assert len(archive.getnames()) == 8
