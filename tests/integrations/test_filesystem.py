"""``shardcache::s3://...`` for everything that opens URLs through fsspec."""

from __future__ import annotations

import pickle
from pathlib import Path

import fsspec
import pytest

from shardcache import ConfigError, default_cache
from shardcache.cli.demo import S3Server
from tests.support.proxy import Proxy
from tests.support.storetools import Parent, forked
from tests.support.tars import make_tar

SHARD = make_tar(6)


@pytest.fixture
def url(s3: S3Server, bucket: str, s3_environment: dict, proxy: Proxy) -> str:
    s3.put(bucket, "a.tar", SHARD)
    s3.put(bucket, "b.tar", SHARD)
    proxy.reset()
    for protocol in ("s3", "shardcache"):  # fsspec keeps them, with another test's server
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
    return f"shardcache::s3://{bucket}/a.tar"


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    default_cache.cache_clear()
    monkeypatch.setenv("SHARDCACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    return tmp_path / "cache"


def gets(proxy: Proxy) -> int:
    return sum(t.object_fetches for t in proxy.summary().values())


def test_open_and_cat_read_through_the_default_cache(url: str, default: Path, proxy: Proxy) -> None:
    for _ in range(2):
        with fsspec.open(url) as stream:
            assert stream.read(10) == SHARD[:10]
            stream.seek(-5, 2)
            assert stream.read() == SHARD[-5:]
    fs, path = fsspec.core.url_to_fs(url)
    assert [fs.cat_file(path, 5, 15), fs.cat_file(path, -7)] == [SHARD[5:15], SHARD[-7:]]
    assert fs.cat_file(path) == SHARD
    assert gets(proxy) == 1
    assert list(default.rglob("a.tar"))


def test_what_it_says_of_a_shard_is_the_same_before_and_after_it_is_cached(
    url: str, default: Path, proxy: Proxy
) -> None:
    """Hugging Face's datasets name their own cache after it."""
    fs, path = fsspec.url_to_fs(url)
    before = fs.info(path)
    fs.cat_file(path)
    proxy.reset()
    after = fs.info(path)
    assert proxy.requests() == []
    assert after == {key: before[key] for key in ("name", "size", "type", "ETag")}
    assert after["ETag"].startswith('"') and after["size"] == len(SHARD)
    assert fs.info(url) == fs.info(f"s3://{path}") == after  # whichever way it is named


def test_listings_are_the_origins_and_cost_what_it_takes_for_them(
    url: str, s3: S3Server, default: Path, proxy: Proxy
) -> None:
    fs, path = fsspec.url_to_fs(url)
    bucket = path.partition("/")[0]
    s3.put(bucket, "part/c.tar", SHARD)
    for listed in (
        lambda: fs.find(f"shardcache::s3://{bucket}"),
        lambda: fs.glob(f"{bucket}/**/*.tar"),
    ):
        fs.invalidate_cache()
        proxy.reset()
        assert listed() == [f"{bucket}/{name}" for name in ("a.tar", "b.tar", "part/c.tar")]
        assert len(proxy.requests()) == 1  # a walk asks for each directory
    assert fs.isfile(path) and fs.isdir(bucket) and not fs.exists(f"{bucket}/none.tar")
    assert fs.ls(f"{bucket}/part", detail=False) == [f"{bucket}/part/c.tar"]


def test_writing_and_a_chain_without_an_origin_are_refused(url: str, default: Path) -> None:
    from shardcache.integrations.fsspec import ShardCacheFileSystem

    with pytest.raises(ConfigError, match="mode 'wb'"), fsspec.open(url, "wb") as stream:
        stream.write(b"x")
    with pytest.raises(ConfigError, match="needs the origin"):
        ShardCacheFileSystem(skip_instance_cache=True)


def test_the_path_may_stand_in_the_first_link(url: str, default: Path, proxy: Proxy) -> None:
    """The form that Hugging Face's datasets take, with the options that they add."""
    path = url.removeprefix("shardcache::s3://")
    bucket = path.partition("/")[0]
    form = f"shardcache://{path}::s3://"
    fs, _, (found,) = fsspec.get_fs_token_paths(form, storage_options={"block_size": 0})
    with fs.open(found, "rb", block_size=0) as stream:
        assert stream.read() == SHARD
    assert list(default.rglob("a.tar"))  # the default cache: these are no options of one
    fs, pattern = fsspec.url_to_fs(f"shardcache://{bucket}/*.tar::s3://")
    assert fs.glob(pattern) == [f"{bucket}/a.tar", f"{bucket}/b.tar"]
    own = {"dir": str(default.parent / "own"), "min_free": 0}
    with fsspec.open(form, shardcache=own) as stream:
        assert stream.read() == SHARD
    assert list((default.parent / "own").rglob("a.tar"))


def test_it_travels_with_its_cache(url: str, tmp_path: Path, proxy: Proxy) -> None:
    fs, path = fsspec.url_to_fs(url, shardcache={"dir": str(tmp_path / "own"), "min_free": 0})
    assert fs.cat_file(path) == SHARD
    fs.clear_instance_cache()
    again = pickle.loads(pickle.dumps(fs))
    assert again is not fs
    assert again.cat_ranges([path, path], [0, -3], [4, None]) == [SHARD[:4], SHARD[-3:]]
    assert gets(proxy) == 1


def test_a_forked_child_has_a_target_filesystem_of_its_own(
    url: str, default: Path, proxy: Proxy
) -> None:
    """s3fs refuses to work with the thread of a parent, which no child has."""
    fs, path = fsspec.url_to_fs(url)
    bucket = path.partition("/")[0]
    parents = fs.fs
    assert len(fs.ls(bucket)) == 2

    def look(parent: Parent) -> None:
        parent.say(
            [fs.fs is parents, fs.size(path), fs.glob(f"{bucket}/b*"), fs.cat_file(path, 0, 3)]
        )

    with forked(look) as child:
        assert child.hear() == [False, len(SHARD), [f"{bucket}/b.tar"], SHARD[:3]]
    assert fs.fs is parents
