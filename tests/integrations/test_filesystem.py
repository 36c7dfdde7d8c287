"""``shardcache::s3://...`` in fsspec."""

import pickle

import fsspec
import pytest

from shardcache import ConfigError, default_cache
from shardcache.integrations.fsspec import ShardCacheFileSystem
from tests.support.storetools import forked
from tests.support.tars import make_tar

SHARD = make_tar(6)
NAMES = ("a.tar", "b.tar", "part/c.tar")


@pytest.fixture
def url(s3, bucket, s3_environment, proxy):
    for name in NAMES:
        s3.put(bucket, name, SHARD)
    proxy.reset()
    for protocol in ("s3", "shardcache"):  # fsspec keeps instances for another test's server
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
    return f"shardcache::s3://{bucket}/a.tar"


@pytest.fixture
def default(tmp_path, monkeypatch):
    """The directory of the default cache."""
    default_cache.cache_clear()
    monkeypatch.setenv("SHARDCACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    return tmp_path / "cache"


def named(bucket, *names):
    return [f"shardcache://s3://{bucket}/{name}" for name in names]


def test_open_and_cat_read_through_the_default_cache(url, default, proxy):
    for _ in range(2):
        with fsspec.open(url) as stream:
            assert stream.read(10) == SHARD[:10]
            stream.seek(-5, 2)
            assert stream.read() == SHARD[-5:]
    fs, path = fsspec.core.url_to_fs(url)
    assert [fs.cat_file(path, 5, 15), fs.cat_file(path, -7)] == [SHARD[5:15], SHARD[-7:]]
    assert fs.cat_file(path) == SHARD
    assert proxy.fetches().total() == 1 and list(default.rglob("a.tar"))
    assert default_cache() is default_cache()


def test_info_is_the_same_before_and_after_a_download(url, default, proxy):
    """Hugging Face's datasets name their own cache after this information."""
    fs, path = fsspec.url_to_fs(url)
    before = fs.info(path)
    fs.cat_file(path)
    proxy.reset()
    after = fs.info(path)
    assert proxy.requests() == []
    assert after == {key: before[key] for key in ("name", "size", "type", "ETag")}
    assert after["ETag"].startswith('"') and after["size"] == len(SHARD)
    assert fs.info(url) == fs.info(f"s3://{path}") == after


def test_a_listing_costs_one_request(url, default, proxy):
    fs, path = fsspec.url_to_fs(url)
    bucket = path.partition("/")[0]
    whole = f"shardcache::s3://{bucket}"
    for method, argument in (fs.find, whole), (fs.glob, f"{bucket}/**/*.tar"):
        fs.invalidate_cache()
        proxy.reset()
        assert method(argument) == named(bucket, *NAMES)
        assert len(proxy.requests()) == 1  # a walk would send one for each directory
    assert fs.isfile(path) and fs.isdir(bucket) and not fs.exists(f"{bucket}/none.tar")
    assert fs.ls(f"{bucket}/part", detail=False) == named(bucket, "part/c.tar")


@pytest.mark.parametrize("form", ["shardcache::s3://{}", "shardcache://s3://{}"])
def test_listed_names_open_again_through_the_cache(form, url, default, proxy, tmp_path):
    bucket = url.split("/")[2]
    fs, path = fsspec.url_to_fs(form.format(bucket))
    for start in path, form.format(bucket), fs.unstrip_protocol(bucket):
        expected = named(bucket, *NAMES)
        assert fs.ls(start, detail=False) == named(bucket, "a.tar", "b.tar", "part")
        assert fs.find(start) == fs.glob(f"{start}/*.tar") + fs.glob(f"{start}/*/c*") == expected
        walked = [f"{root}/{name}" for root, _, names in fs.walk(start) for name in names]
        assert sorted(walked) == expected
        # Arrow requires names below the directory that it lists.
        assert list(fs.find(bucket, detail=True)) == [f"{bucket}/{n}" for n in NAMES]
    for name in expected:
        with fsspec.open(name) as stream:
            assert stream.read() == fs.cat_file(name) == SHARD
        assert default_cache().path(name).read_bytes() == SHARD
    assert proxy.fetches().total() == 3
    fs.get(bucket, f"{tmp_path}/copy", recursive=True)
    assert (tmp_path / "copy" / "part" / "c.tar").read_bytes() == SHARD


def test_a_name_with_its_target_takes_options_as_a_chain_does(url, tmp_path, s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = {
        "s3": {"key": s3.access_key, "secret": s3.secret_key},
        "shardcache": {"dir": str(tmp_path / "own"), "min_free": 0},
    }
    fs, path = fsspec.url_to_fs(url, **options)
    for name in url, *fs.glob(path):
        with fsspec.open(name, **options) as stream:
            assert stream.read() == SHARD


def test_writing_and_a_chain_without_an_origin_are_refused(url, default):
    with pytest.raises(ConfigError, match="mode 'wb'"), fsspec.open(url, "wb") as stream:
        stream.write(b"x")
    with pytest.raises(ConfigError, match=r"sig=\*\*\* .* mode 'wb'"):
        fsspec.open("shardcache::https://h/k?sig=secret", "wb").open()
    with pytest.raises(ConfigError, match="URL of the origin"):
        ShardCacheFileSystem(skip_instance_cache=True)


def test_the_path_can_be_in_the_first_link_of_a_chain(url, default):
    """Hugging Face's datasets use this form, and add options."""
    path = url.removeprefix("shardcache::s3://")
    bucket, form = path.partition("/")[0], f"shardcache://{path}::s3://"
    fs, _, (found,) = fsspec.get_fs_token_paths(form, storage_options={"block_size": 0})
    assert fs.open(found, "rb", block_size=0).read() == SHARD
    assert list(default.rglob("a.tar"))  # in the default cache: the options are not the cache's
    fs, pattern = fsspec.url_to_fs(f"shardcache://{bucket}/*.tar::s3://")
    assert fs.glob(pattern) == named(bucket, "a.tar", "b.tar")
    with fsspec.open(f"{fs.glob(pattern)[0]}::s3://") as stream:  # they may add the target again
        assert stream.read() == SHARD


def test_a_pickle_keeps_the_cache_and_a_fork_makes_its_own_target(url, tmp_path, proxy):
    """s3fs needs a thread, which a forked child does not have."""
    fs, path = fsspec.url_to_fs(url, shardcache={"dir": str(tmp_path / "own"), "min_free": 0})
    assert fs.cat_file(path) == SHARD and list((tmp_path / "own").rglob("a.tar"))
    fs.clear_instance_cache()
    again = pickle.loads(pickle.dumps(fs))
    assert again is not fs
    assert again.cat_ranges([path, path], [0, -3], [4, None]) == [SHARD[:4], SHARD[-3:]]
    bucket, parents = path.partition("/")[0], fs.fs
    assert len(fs.ls(bucket)) == 3

    def look(parent):
        listed = fs.glob(f"{bucket}/b*")
        parent.say([fs.fs is parents, fs.size(path), listed, fs.cat_file(path, 0, 3)])

    with forked(look) as child:
        assert child.hear() == [False, len(SHARD), named(bucket, "b.tar"), SHARD[:3]]
    assert fs.fs is parents and proxy.fetches().total() == 1
