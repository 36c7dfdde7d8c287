"""From shard specifications to URLs, and sizes without a request each."""

from __future__ import annotations

import fsspec
import pytest

from shardcache.cache import Cache
from shardcache.config import Config
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.origins.listing import Listing, is_pattern
from shardcache.origins.s3 import S3Origin
from shardcache.prewarm.plan import expand
from tests.support.tars import make_tar


@pytest.mark.parametrize("spec", ["/", "file:///", "/proc/**.tar"])
def test_a_disk_is_not_listed_for_what_would_be_refused(tmp_path, spec, monkeypatch):
    monkeypatch.setattr(
        "shardcache.origins.listing.FsspecOrigin.names_below", lambda *a, **k: pytest.fail()
    )
    with pytest.raises(ConfigError, match="cache_local = true"):
        Listing(Config(tmp_path)).matches(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "s3://b/{train,val}-{0000..0011}.tar::s3://c/x.tar",
        "s3://b/{a..e..2}/{07..09}.tar",
        "${OUTER}/x-{0..2}.tar::${BASE}/y.tar",
        *("pipe:cat /data/{a,b}.tar", "/plain/path.tar", r"s3://b/\{literal\}.tar", ""),
    ],
)
def test_expansion_is_that_of_webdataset(spec, monkeypatch):
    from webdataset.shardlists import expand_urls

    monkeypatch.setenv("WDS_BASE", "s3://base/{p,q}")
    monkeypatch.setenv("WDS_OUTER", "${BASE}/deeper")
    assert expand([spec]) == list(dict.fromkeys(expand_urls(spec)))


def test_missing_variable_is_named():
    with pytest.raises(ConfigError, match="WDS_NOWHERE"):
        expand(["${NOWHERE}/x.tar"])


@pytest.mark.parametrize("spec", ["s3://b/{0..3.tar", "https://h/0..3}?X-Amz-Signature=abcdef12"])
def test_unbalanced_braces_are_an_error_that_shows_no_secret(spec):
    with pytest.raises(ConfigError, match="braces") as caught:
        expand([spec])
    assert "abcdef12" not in str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "urls"),
    [
        (True, "s3://b/p/ s3://b/x-*.tar s3://b/x-?.tar https://h/x-*.tar /nas/*.tar"),
        (False, "s3://b/x.tar s3://b/x.tar?versionId=abc https://h/dir/ pipe:/x/*.tar"),
        (False, "https://h/x.tar?sig=1 https://h/x.tar?a=*&b=?"),
    ],
)
def test_what_needs_a_listing(pattern, urls):
    assert {is_pattern(url) for url in urls.split()} == {pattern}


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "nas"
    for name in ("a.tar", "b.tar", "b.tar.idx", "deep/c.tar.gz", "deep/er/d.tgz", "notes.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(make_tar(1))
    return root


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["a.tar", "b.tar", "deep/c.tar.gz", "deep/er/d.tgz"]),
        ("*.tar", ["a.tar", "b.tar"]),
        ("?.tar", ["a.tar", "b.tar"]),
        ("**.tgz", ["deep/er/d.tgz"]),
        ("deep/**/*.t*", ["deep/c.tar.gz", "deep/er/d.tgz"]),
        ("d*/*.gz", ["deep/c.tar.gz"]),
        ("d*/", ["deep/c.tar.gz", "deep/er/d.tgz"]),
    ],
)
def test_patterns_find_local_shards(tree, tmp_path, pattern, found):
    cache = Cache(tmp_path / "cache", cache_local=True)
    assert expand([f"{tree}/{pattern}"], cache) == [f"{tree}/{name}" for name in found]


def test_patterns_work_on_any_fsspec_filesystem(tmp_path):
    memory = fsspec.filesystem("memory")
    for number in (1, 2):
        memory.pipe(f"/pw/x-{number}.tar", b"1")
    found = expand(["memory://pw/x-*.tar"], Cache(tmp_path / "cache"))
    assert found == ["memory://pw/x-1.tar", "memory://pw/x-2.tar"]
    memory.rm("/pw", recursive=True)


def test_a_pattern_without_shards_is_an_error(tree, tmp_path):
    cache = Cache(tmp_path / "cache", cache_local=True)
    for pattern in (f"{tree}/nothing-*.tar", f"{tree}/nowhere/", f"{tree}/nowhere/*.tar"):
        with pytest.raises(ShardNotFoundError):
            expand([pattern], cache)


@pytest.fixture
def stocked(s3, bucket, s3_environment, monkeypatch):
    """A bucket with more keys than one page holds."""
    monkeypatch.setattr("shardcache.origins.listing._PAGE", 3)
    for number in range(8):
        s3.put(bucket, f"train/x-{number}.tar", b"x" * (100 + number))
    for name in ("train/x-1.tar.idx", "train/more/y.tgz", "val-0.tar"):
        s3.put(bucket, name, b"yy")
    return bucket


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache", attempts=2)


X = [f"train/x-{number}.tar" for number in range(8)]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("train/", ["train/more/y.tgz", *X]),
        ("train/x-?.tar", X),
        ("*.tar", ["val-0.tar"]),
        ("**/y*", ["train/more/y.tgz"]),
    ],
)
def test_patterns_find_shards_in_s3(stocked, cache, proxy, pattern, found):
    assert expand([f"s3://{stocked}/{pattern}"], cache) == [f"s3://{stocked}/{n}" for n in found]
    if pattern == "*.tar":
        assert len(proxy.requests()) == 1  # what lies deeper is not listed, page by page


def test_s3_pattern_in_a_bucket_that_is_not_there(stocked, cache):
    with pytest.raises(ShardNotFoundError, match="nobucket-here"):
        expand(["s3://nobucket-here/*.tar"], cache)
    with pytest.raises(ConfigError, match="bucket"):
        expand(["s3://no*/x.tar"], cache)


def numbered(cache, bucket, numbers):
    return [cache.parse(f"s3://{bucket}/train/x-{number}.tar") for number in numbers]


def test_sizes_come_from_listings_not_from_heads(stocked, cache, proxy, monkeypatch):
    monkeypatch.setattr("shardcache.origins.listing._PAGE", 1000)
    shards = numbered(cache, stocked, range(12))
    sizes = Listing(cache.config).sizes(shards)
    assert [sizes.get(shard.key) for shard in shards] == [*range(100, 108), *([None] * 4)]
    assert [(r.method, r.reads_object) for r in proxy.requests()] == [("GET", False)]


def test_learning_sizes_is_bounded(stocked, cache, proxy, monkeypatch):
    monkeypatch.setattr("shardcache.origins.listing._SPARE_PAGES", 1)
    assert len(Listing(cache.config).sizes(numbered(cache, stocked, (0, 7)))) == 1
    assert len(proxy.requests()) == 1


def test_forbidden_listing_leaves_sizes_unknown(stocked, cache, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    assert Listing(cache.config).sizes(numbered(cache, stocked, [0])) == {}
    with pytest.raises(AccessDeniedError, match="ListBucket"):
        expand([f"s3://{stocked}/train/"], cache)


def test_unreachable_endpoint_leaves_sizes_unknown_at_once(cache, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    asked = []
    page = S3Origin.list_page
    monkeypatch.setattr(S3Origin, "list_page", lambda *a, **k: asked.append(a) or page(*a, **k))
    shards = [cache.parse(f"s3://b{n}/x.tar") for n in range(5)]
    assert Listing(cache.config).sizes(shards) == {}
    assert len(asked) == 1
    with pytest.raises(TransferError):
        expand(["s3://b/x*.tar"], cache)
