"""Expanding shard specifications to URLs, and sizes from listings."""

from pathlib import Path

import fsspec
import pytest

from shardcache import expand
from shardcache.errors import AccessDeniedError, ConfigError, ShardNotFoundError, TransferError
from shardcache.origins.listing import Listing
from tests.support.tars import make_tar
from tests.support.webservers import answer, listing


@pytest.mark.parametrize(
    "spec",
    [
        "s3://b/{train,val}-{0000..0011}.tar::s3://c/x.tar",
        "s3://b/{a..e..2}/{07..09}.tar",
        "${OUTER}/x-{0..2}.tar::${BASE}/y.tar",
        *("pipe:cat /data/{a,b}.tar", "/plain/path.tar", r"s3://b/\{literal\}.tar", ""),
    ],
)
def test_braces_expand_as_in_webdataset(spec, set_variables):
    from webdataset.shardlists import expand_urls

    set_variables(WDS_BASE="s3://base/{p,q}", WDS_OUTER="${BASE}/deeper")
    assert expand([spec]) == list(dict.fromkeys(expand_urls(spec)))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("${NOWHERE}/x.tar", "WDS_NOWHERE"),
        ("s3://b/{0..3.tar", "braces"),
        ("https://h/0..3}?X-Amz-Signature=abcdef12", "braces"),
        ("s3://b/*.tar https://h/a.tar?sig=abcdef12", "Separate shards by ::"),
    ],
)
def test_an_invalid_specification_is_refused_without_its_secret(spec, message, make_cache):
    with pytest.raises(ConfigError, match=message) as caught:
        expand([spec], make_cache())
    assert "abcdef12" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("s3://b/x.tar", "s3://b/x.tar?versionId=abc", "pipe:/x/*.tar"),
        *("https://h/dir/", "https://h/x.tar?sig=1", "https://h/x.tar?a=*&b=?"),
    ],
)
def test_other_urls_need_no_listing(url, make_cache):
    assert expand(url, make_cache()) == [url]


def test_a_store_that_ignores_the_prefix_is_refused(make_cache, serve):
    server = serve(answer("200 OK", listing("d/a.tar", "e/b.tar")), most=9)
    cache = make_cache(endpoint_url=server.url, storage_options={"anon": True})
    with pytest.raises(ConfigError, match=r"it has e/b\.tar"):
        expand("s3://lab/d/", cache)


def test_patterns_of_an_origin_that_lists_nothing_are_refused(make_cache, origin, monkeypatch):
    monkeypatch.setattr("shardcache.origins.resolve._make", lambda *arguments: origin)
    with pytest.raises(ConfigError, match=r"own:// cannot be listed. Write ranges"):
        expand("own://lab/*.tar", make_cache(allow_schemes=["own"]))


FILES = ["a.tar", "b.tar", "b.tar.idx", "deep/c.tar.gz", "deep/er/d.tgz", "notes.txt"]
PATTERNS = {
    "": ["a.tar", "b.tar", "deep/c.tar.gz", "deep/er/d.tgz"],
    "*.tar": ["a.tar", "b.tar"],
    "?.tar": ["a.tar", "b.tar"],
    "**.tgz": ["deep/er/d.tgz"],
    "deep/**/*.t*": ["deep/c.tar.gz", "deep/er/d.tgz"],
    "d*/*.gz": ["deep/c.tar.gz"],
    "d*/": ["deep/c.tar.gz", "deep/er/d.tgz"],
}


@pytest.mark.parametrize("scheme", ["file", "memory", "s3"])
def test_patterns_find_the_same_shards_at_all_origins(scheme, make_cache, tmp_path, request):
    root = f"{tmp_path}/nas"
    if scheme == "s3":
        request.getfixturevalue("s3_environment")
        bucket = request.getfixturevalue("bucket")
        for name in ("", *FILES):  # the first is an object that stands for the folder
            request.getfixturevalue("s3").put(bucket, f"nas/{name}", b"x" if name else b"")
        root = f"s3://{bucket}/nas"
    else:
        for name in FILES:
            fsspec.filesystem(scheme, auto_mkdir=True).pipe(f"{root}/{name}", make_tar(1))
        root = f"memory:/{root}" if scheme == "memory" else root
    cache = make_cache(cache_local=True)
    if scheme == "file":
        cache.prewarm(f"{root}/")
    for pattern, found in PATTERNS.items():
        assert expand([f"{root}/{pattern}"], cache) == [f"{root}/{name}" for name in found]
        if scheme == "file":  # the same pattern selects cached shards
            cached = map(str, cache.select(f"{root}/{pattern}"))
            assert [*cached] == [f"file://{root}/{name}" for name in found]
    assert expand([f"{root}/*"], cache) == [f"{root}/{name}" for name in FILES if "/" not in name]
    for pattern in ("nothing-*.tar", "nowhere/", "nowhere/*.tar"):
        with pytest.raises(ShardNotFoundError):
            expand([f"{root}/{pattern}"], cache)


@pytest.mark.parametrize("pattern", ["s3://b/*.tar", "s3://b/", "*.tar"])
def test_a_question_mark_in_an_s3_key_is_no_query(make_cache, origin, pattern):
    cache, urls = make_cache(), [f"s3://b/a.tar{end}" for end in ("", "?versionId=1", "?part=1")]
    origin.objects |= dict.fromkeys(urls, make_tar(1))
    cache.prewarm(list(map(cache.parse, urls)))
    assert list(map(str, cache.select(pattern))) == urls[:2]


def test_without_cache_local_one_directory_is_listed_but_no_disk(make_cache, tmp_path, monkeypatch):
    paths = [f"{tmp_path}/{name}.tar" for name in "ab"]
    for path in paths:
        Path(path).write_bytes(make_tar(1))
    cache = make_cache()
    assert expand([f"{tmp_path}/*.tar"], cache) == paths
    with pytest.raises(ConfigError, match="cache_local = true"):
        cache.prewarm(f"{tmp_path}/*.tar")
    listed = "shardcache.origins.filesystem.FsspecOrigin.list_page"
    monkeypatch.setattr(listed, lambda *a, **k: pytest.fail())
    for spec in ("/", "file:///", "/proc/**.tar"):
        with pytest.raises(ConfigError, match="cache_local = true"):
            expand([spec], cache)


@pytest.fixture
def stocked(s3, bucket, s3_environment):
    for number in range(8):
        s3.put(bucket, f"train/x-{number}.tar", b"x" * (100 + number))
    s3.put(bucket, "val-0.tar", b"yy")
    return bucket


def numbered(cache, bucket, numbers):
    return [cache.parse(f"s3://{bucket}/train/x-{number}.tar") for number in numbers]


def test_a_listing_sends_no_more_requests_than_needed(stocked, make_cache, proxy, monkeypatch):
    cache = make_cache()
    shards = numbered(cache, stocked, range(12))
    sizes = Listing(cache.config).sizes(shards)
    assert [sizes.get(shard.key) for shard in shards] == [*range(100, 108), *([None] * 4)]
    assert [(r.method, r.reads_object) for r in proxy.requests()] == [("GET", False)]
    proxy.reset()
    monkeypatch.setattr("shardcache.origins.s3._PAGE", 3)
    assert expand([f"s3://{stocked}/*.tar"], cache) == [f"s3://{stocked}/val-0.tar"]
    assert len(proxy.requests()) == 1  # not one for each page of deeper names
    proxy.reset()
    monkeypatch.setattr("shardcache.origins.listing._SPARE_PAGES", 1)
    elsewhere = cache.parse(f"s3://{stocked}/z/a.tar")  # in a folder that is not listed any more
    assert len(Listing(cache.config).sizes([shards[0], shards[7], elsewhere])) == 1
    assert len(proxy.requests()) == 1


def test_after_a_refused_listing_sizes_are_unknown(stocked, make_cache, monkeypatch):
    cache = make_cache(attempts=2)
    for spec, kind, message in (
        ("s3://nobucket-here/*.tar", ShardNotFoundError, "nobucket-here"),
        ("s3://no*/x.tar", ConfigError, "bucket"),
    ):
        with pytest.raises(kind, match=message):
            expand([spec], cache)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    assert Listing(cache.config).sizes(numbered(cache, stocked, [0])) == {}
    with pytest.raises(AccessDeniedError, match="ListBucket"):
        expand([f"s3://{stocked}/train/"], cache)


def test_a_failing_server_receives_one_request_for_all_sizes(make_cache, serve):
    server = serve(answer("500 Trouble"), most=9)
    options = {"key": "AK", "secret": "SK"}
    cache = make_cache(endpoint_url=server.url, storage_options=options, attempts=2)
    shards = [cache.parse(f"s3://b{number}/x.tar") for number in range(5)]
    assert Listing(cache.config).sizes(shards) == {}
    assert len(server.heads) == 1
    with pytest.raises(TransferError, match="2 attempts failed"):
        expand(["s3://b/x*.tar"], cache)


def page(name, more=""):
    return listing(f"p/{name}.tar", more=more)


def more(token):
    token = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return f"<IsTruncated>true</IsTruncated>{token}"


@pytest.mark.parametrize(
    ("pages", "names"),
    [
        ([page("a", more("1")), b"<Error><Code>InternalError</Code></Error>", page("b")], "ab"),
        ([page("a", more("same").replace("true", "false"))], "a"),
        ([page("a", more(""))], "does not know ListObjectsV2"),
        ([page("a", more("1")), page("b", more("2"))] * 20, "repeats a page"),
        ([b"<html>Log in</html>"], "not a listing of S3.*begins with html"),
        ([b'<?xml version="1.0" encoding="gbk"?><a/>'], "not a listing of S3"),
    ],
)
def test_a_listing_is_complete_or_an_error(make_cache, serve, pages, names):
    answers = iter(pages)
    server = serve(lambda head: answer("200 OK", next(answers), Connection=None), most=99)
    cache = make_cache(endpoint_url=server.url, storage_options={"key": "AK", "secret": "SK"})
    if names in ("a", "ab"):
        assert expand(["s3://b/p/"], cache) == [f"s3://b/p/{name}.tar" for name in names]
    else:
        with pytest.raises(ConfigError, match=names):
            expand(["s3://b/p/"], cache)
