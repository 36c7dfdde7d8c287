"""Identity of URLs: no two objects share a key, no signature splits one, no secret shows."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache import urls
from shardcache.errors import ConfigError
from shardcache.layout import META, PROGRESS
from shardcache.urls import parse_url, redact

CANARY = "cAnArY0123456789"

#: Everything that is special somewhere, and letters that spell no credential.
names = st.text("aAb01 .-_/%?#&=+:;,~@[]()'\u00e9e\u0301\u4e2d", min_size=1, max_size=12).filter(
    lambda name: "::" not in name
)  # that would be a chain
hosts = st.from_regex(r"[a-z][a-z0-9-]{1,8}(\.[a-z]{2,3})?", fullmatch=True)


def key_of(url: str, **options: object) -> str:
    return parse_url(url, **options).key


# -- two objects, two keys -----------------------------------------------------


@given(st.sets(st.tuples(hosts, names), min_size=2, max_size=12))
@pytest.mark.parametrize("scheme", ["s3", "gs", "hf"])
def test_two_objects_of_a_bucket_store_never_share_a_key(scheme: str, objects) -> None:
    keys = {key_of(f"{scheme}://{bucket}/{name}") for bucket, name in objects}
    assert len(keys) == len(objects)


@given(st.sets(st.tuples(hosts, names, names), min_size=2, max_size=12))
def test_two_resources_of_the_web_never_share_a_key(resources) -> None:
    seen = {}
    for host, path, query in resources:
        url = f"https://{host}/{path.replace('?', '')}?{query}"
        sent = url.partition("#")[0]  # what a client asks for
        seen.setdefault(sent, set()).add(key_of(url))
    assert all(len(keys) == 1 for keys in seen.values())
    assert len({key for keys in seen.values() for key in keys}) == len(seen)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/\u00e9.tar", "s3://b/e\u0301.tar"),  # composed and decomposed
        ("s3://b/a%2Fb.tar", "s3://b/a/b.tar"),
        ("s3://b/x/../b.tar", "s3://b/b.tar"),
        ("/data/link/../b.tar", "/data/b.tar"),  # behind a link, .. is elsewhere
        ("az://box-a@account/k.tar", "az://box-b@account/k.tar"),
        ("s3://b/k?", "s3://b/k"),
        ("https://h/k?a&&b", "https://h/k?a&b"),
        ("s3://b/k", "gs://b/k"),
        ("http://h/k", "https://h/k"),
        ("https://h/k", "https://h:444/k"),
        ("s3://b/k?versionId=1", "s3://b/k?versionId=2"),
    ],
)
def test_what_looks_alike_is_two_objects(one: str, other: str) -> None:
    assert key_of(one) != key_of(other)


def test_one_bucket_name_on_two_endpoints_is_two_objects() -> None:
    url = "s3://lab/a.tar"
    endpoints = [None, "http://minio:9000", "http://minio:9001", "https://ceph", "https://ceph/s3"]
    assert len({key_of(url, endpoint=endpoint) for endpoint in endpoints}) == len(endpoints)
    assert parse_url(url, endpoint="http://minio:9000").canonical == url
    assert key_of("gs://b/k", endpoint="http://minio:9000") == key_of("gs://b/k")


# -- one object, one key -------------------------------------------------------

_HEX = st.text("0123456789abcdef", min_size=4, max_size=16).map(lambda text: CANARY + text)
_BASE64 = _HEX.map(lambda text: quote(text + "+/=", safe=""))
SIGNATURES = {
    "aws4": ["X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Security-Token", "X-Amz-Signature"],
    "aws2": ["AWSAccessKeyId", "Expires", "Signature"],
    "cloudfront": ["Policy", "Signature", "Key-Pair-Id"],
    "google": ["X-Goog-Algorithm", "X-Goog-Credential", "X-Goog-Signature"],
    "google2": ["GoogleAccessId", "Expires", "Signature"],
    "azure": ["sv", "se", "sr", "sp", "sig"],
    "oss": ["x-oss-signature", "x-oss-credential"],
    "token": ["access_token"],
    "api": ["api_key"],
    "lower": ["x-amz-signature", "x-amz-date"],
}
#: Parts of a signature that give nothing away.
HARMLESS = {"Expires", "X-Amz-Algorithm", "X-Goog-Algorithm", "sv", "se", "sr", "sp"}
PLAIN = [
    "https://h.example/dir/a.tar",
    "https://h.example/dir/a.tar?part=7&versionId=abc",
    "az://box/a.tar?snapshot=2",
    "s3://bucket/dir/a.tar?versionId=abc",
    "s3://bucket/dir/a?b=c",
]


@settings(max_examples=300)
@given(kind=st.sampled_from(sorted(SIGNATURES)), plain=st.sampled_from(PLAIN), data=st.data())
def test_no_signature_splits_an_object_or_shows(kind: str, plain: str, data) -> None:
    base, mark, query = plain.partition("?")
    pairs = query.split("&") if mark else []
    for name in SIGNATURES[kind]:
        value = "20260101" if name in HARMLESS else data.draw(_HEX | _BASE64)
        pairs.insert(data.draw(st.integers(0, len(pairs))), f"{name}={value}")
    signed = f"{base}?{'&'.join(pairs)}"
    shard, expected = parse_url(signed), parse_url(plain)
    assert replace(shard, raw=plain) == expected
    assert shard.raw == signed
    for text in (str(shard), repr(shard), shard.canonical, shard.basename, redact(signed)):
        assert CANARY.lower() not in text.lower()


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        # Logins and tokens.
        (f"https://me:{CANARY}@h/k.tar", "https://h/k.tar"),
        (f"s3://AKIA:{CANARY}@bucket/k.tar", "s3://bucket/k.tar"),
        (f"s3://{CANARY}@bucket/k.tar", "s3://bucket/k.tar"),
        (f"s3://bucket/k.tar?token={CANARY}&x=1", "s3://bucket/k.tar?x=1"),
        (f"s3://bucket/k?x?sig={CANARY}?token={CANARY}", "s3://bucket/k?x"),
        # Short names are credentials only beside a signature.
        ("https://h/k?se=1&sp=2", "https://h/k?se=1&sp=2"),
        ("https://h/k?expires=1&policy=2", "https://h/k?expires=1&policy=2"),
        (f"https://h/k?se=1&sig={CANARY}", "https://h/k"),
        # Spellings.
        ("S3://bucket/k", "s3://bucket/k"),
        ("s3a://bucket/k", "s3://bucket/k"),
        ("gcs://bucket/k", "gs://bucket/k"),
        ("shardcache::s3://bucket/k", "s3://bucket/k"),
        ("HTTPS://H.Example:443/k", "https://h.example/k"),
        ("http://h:80/k", "http://h/k"),
        ("http://h", "http://h/"),
        ("https://h/k#part", "https://h/k"),
        ("/data//x/./k", "file:///data/x/k"),
    ],
)
def test_spellings_of_one_object_share_a_key(url: str, canonical: str) -> None:
    shard = parse_url(url)
    assert shard.key == key_of(canonical)
    assert shard.canonical == canonical
    assert CANARY not in repr(shard) + str(shard) + redact(url)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, "https://s3.eu-west-1.amazonaws.com"),
        ("", "s3.amazonaws.com:443"),
        ("http://minio:9000", "https://MINIO:9000/"),
        ("http://minio:80", "http://minio"),
        ("https://minio:443", "minio"),
        (f"http://me:{CANARY}@minio", "http://minio"),
    ],
)
def test_spellings_of_one_endpoint_are_one(one: str | None, other: str | None) -> None:
    assert key_of("s3://lab/a.tar", endpoint=one) == key_of("s3://lab/a.tar", endpoint=other)


def test_a_relative_path_is_one_object_with_its_absolute_one(tmp_path, monkeypatch):
    assert os.fsencode(parse_url(os.fsdecode(b"/data/\xff")).local_path) == b"/data/\xff"
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert key_of("a.tar") == key_of("./a.tar") == key_of(f"{gone}/a.tar")
    gone.rmdir()
    with pytest.raises(ConfigError, match="removed"):
        parse_url("a.tar")


def test_keys_do_not_change_between_releases() -> None:
    # A change here would orphan every entry on every disk.
    assert key_of("s3://bucket/train-0000.tar") == "e486067e1fd02cc3f3c6274d88862d12"
    assert key_of("https://h/k?a=1") == "e412643f52b5e6f880e616d162f49c57"
    assert key_of("/data/\u00e9.tar") == "4e15c395e5c38908be392c8b443adbb3"
    minio = key_of("s3://b/k", endpoint="http://minio:9000")
    assert minio == "17cb8d3ae3d15c660f5a7e7c483708cd"


# -- names on disk and at the origin -------------------------------------------


@given(scheme=st.sampled_from(["s3", "https", "gs"]), host=hosts, name=names)
def test_a_basename_is_a_plain_short_file_name(scheme: str, host: str, name: str) -> None:
    basename = parse_url(f"{scheme}://{host}/{name}").basename
    assert 1 <= len(basename) <= 130
    assert set(basename) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert not basename.startswith(".")
    assert basename not in (META, PROGRESS, ".", "..")
    assert parse_url(f"{scheme}://{host}/{'x' * 300}.tar").basename.endswith("xxx.tar")
    assert parse_url(f"{scheme}://{host}/{META}").basename == f"shard-{META}"


@given(hosts, names)
def test_bucket_and_key_are_exactly_those_of_the_url(bucket: str, name: str) -> None:
    assert parse_url(f"s3://{bucket}/{name}").bucket_and_key() == (bucket, name)
    versioned = parse_url(f"s3://{bucket}/{name}?versionId=v.1")
    assert versioned.version_id == "v.1"
    assert versioned.bucket_and_key() == (bucket, name)


# -- refusals ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        (f"https://h/k?sig={CANARY}\n", "control character"),
        (f"https://h/k?sig=abc\n{CANARY}", "control character"),
        (f"simplecache::https://h/k?sig={CANARY}", "chain"),
        (f"foo://me:{CANARY}@h/k", r"allow_schemes=\['foo'\]"),
        (f"https://me:{CANARY}@[h/k", "not a URL"),
        (f"https://me:{CANARY}@h:99999/k", "not a URL"),
        (f"https://me:{CANARY}@/k", "no host"),
        (f"gs://?token={CANARY}", "no object"),
        (f"s3://AKIA:{CANARY}@/k", "no object"),
        (f"s3://AKIA:a/{CANARY}@bucket/k", "colon"),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/point/k", "by its alias"),
        (f"gs://me:{CANARY}@bucket/k", "password"),
        (f"https://h/{'x' * 9000}?sig={CANARY}", "bytes"),
        (f"gs://b/\ud800?sig={CANARY}", "UTF-8"),
        ("file://", "no file"),
        ("s3://b/k", "endpoint .* is not a URL"),
        (None, "NoneType"),
        (f"pipe:curl https://h/k?sig={CANARY}", "shell"),
    ],
)
def test_a_refusal_says_why_and_shows_no_secret(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_url(url, endpoint=f"http://me:{CANARY}@[minio")
    assert CANARY not in str(caught.value) + ascii(caught.value.args)


@given(st.text(max_size=40) | names.map(lambda name: f"s3://{name}"))
def test_a_url_is_named_or_refused_and_nothing_else(url: str) -> None:
    try:
        shard = parse_url(url, allow_schemes=["pipe"])
    except ConfigError:
        return
    assert len(shard.key) == 32
    if shard.scheme != "pipe":
        again = parse_url(shard.canonical)
        assert (again.key, again.canonical) == (shard.key, shard.canonical)


def test_more_schemes_are_allowed_by_name() -> None:
    assert parse_url("sftp://me@h/k.tar", allow_schemes=["sftp"]).canonical == "sftp://h/k.tar"
    assert parse_url("swift://box@h/k", allow_schemes=["swift"]).canonical == "swift://box@h/k"


def test_a_command_is_told_apart_by_all_of_it_and_shown_without_secrets() -> None:
    command = f"pipe:curl -H 'Authorization: Bearer {CANARY}' https://h/k?sig={CANARY}"
    shards = [parse_url(command + end, allow_schemes={"pipe"}) for end in "12"]
    assert shards[0].key != shards[1].key
    assert all(CANARY not in str(s) + repr(s) + s.basename for s in shards)
    assert (shards[0].basename, shards[0].raw) == ("pipe", command + "1")


# -- text for people, and pickles ----------------------------------------------


def test_every_secret_parameter_is_redacted_anywhere_in_a_text() -> None:
    for name in urls._SECRETS | {"Key-Pair-Id", "Policy"}:
        for mark in "?&; ":
            found = redact(f"no 'https://h/k?x=1{mark}{name}={CANARY}/+%3D&y=2': refused")
            assert CANARY not in found
            assert "y=2" in found and "refused" in found


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/a@b.tar", None),
        ("https://h:8080/p@v1/k?versionId=abc", None),
        ("abfs://box@account/k and oci://bucket@space/k, az://box@a/k", None),
        ("bucket/key=7/part=3.tar, monkey=1, tokens=3, user@example.org", None),
        (
            f"https://a:{CANARY}@h/k -> s3://AK:x/{CANARY}@b/k; abfs://me:{CANARY}@acc/k",
            "https://h/k -> s3://b/k; abfs://acc/k",
        ),
    ],
)
def test_redacting_leaves_what_is_no_secret(text: str, shown: str | None) -> None:
    assert redact(text) == (shown or text)


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{CANARY}@h/k?sig={CANARY}&x=1#{CANARY}",
        f"s3://me:{CANARY}@b/k?versionId=7",
        f"pipe:curl -H 'X-Key: {CANARY}' https://h/k",
    ],
)
def test_a_pickle_of_a_shard_url_leaves_credentials_out_unless_a_child_is_spawned(url, monkeypatch):
    shard = parse_url(url, allow_schemes=["pipe"])
    data = pickle.dumps([shard])
    assert CANARY.encode() not in data
    (found,) = pickle.loads(data)
    assert replace(found, raw=url) == shard
    # Half a command must not be run.
    assert found.raw == "" if shard.scheme == "pipe" else key_of(found.raw) == shard.key
    monkeypatch.setattr("multiprocessing.context.get_spawning_popen", object)
    assert pickle.loads(pickle.dumps([shard])) == [shard]
