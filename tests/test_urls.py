"""URLs: two objects have two keys, signatures are not part of a key, and secrets are hidden."""

import os
import pickle
import re
from copy import deepcopy
from dataclasses import replace
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache.cache import Cache
from shardcache.errors import ConfigError
from shardcache.layout import META
from shardcache.urls import SIDE_FILES, parse_url, redact

CANARY = "cAnArY0123456789"

#: All special characters, and letters that form no credential.
names = st.text("aAb01 .-_/%?#&=+:;,~@[]()'\u00e9e\u0301\u4e2d", min_size=1, max_size=12).filter(
    lambda name: not re.search("::|[ ,][aAb01_]+://", name)
)  # which would be a chain, or two URLs
hosts = st.from_regex(r"[a-z][a-z0-9-]{1,8}(\.[a-z]{2,3})?", fullmatch=True)


def key_of(url, **options):
    return parse_url(url, **options).key


schemes = st.sampled_from(["s3", "gs", "hf"])
OSS = "x-oss-credential=c&x-oss-signature=s"
SIGV4 = f"X-Amz-Algorithm=A&X-Amz-Credential={CANARY}&X-Amz-Date=D&X-Amz-Signature={CANARY}"


@given(st.sets(st.tuples(schemes, hosts, names), min_size=2, max_size=6))
def test_two_objects_of_bucket_stores_never_share_a_key(objects):
    keys = {key_of(f"{scheme}://{host}/{name}") for scheme, host, name in objects}
    assert len(keys) == len(objects)


@given(st.sampled_from(["s3", "gs", "https", "az"]), hosts, names, st.sampled_from([None, "h:1"]))
def test_the_canonical_url_and_a_pickle_name_the_same_shard(scheme, host, name, place):
    def parse(url):
        return parse_url(url, endpoint=place, servers={"az": place} if place else {})

    shard = parse(f"{scheme}://{host}/{name}")
    for again in parse(shard.canonical), pickle.loads(pickle.dumps(shard)):
        assert replace(again, raw=shard.raw) == shard


@given(st.sets(st.tuples(hosts, names, names), min_size=2, max_size=6))
def test_two_resources_of_the_web_never_share_a_key(resources):
    urls = [f"https://{host}/{path.replace('?', '')}?{query}" for host, path, query in resources]
    requested = {url: url.partition("#")[0] for url in urls}
    keys = {(sent, key_of(url)) for url, sent in requested.items()}
    assert len(keys) == len(set(requested.values())) == len({key for _, key in keys})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://b/\u00e9.tar", "s3://b/e\u0301.tar"),  # composed and decomposed
        ("s3://b/a%2Fb.tar", "s3://b/a/b.tar"),
        ("s3://b/x/../b.tar", "s3://b/b.tar"),
        ("/data/link/../b.tar", "/data/b.tar"),  # .. follows symbolic links
        ("az://box-a@account/k.tar", "az://box-b@account/k.tar"),
        ("s3://b/k?", "s3://b/k"),
        ("https://h/k?a&&b", "https://h/k?a&b"),
        ("s3://b/k", "gs://b/k"),
        ("http://h/k", "https://h/k"),
        ("https://h/k", "https://h:444/k"),
        ("s3://b/k?versionId=1", "s3://b/k?versionId=2"),
        ("pipe:cat /k;1", "pipe:cat /k;2"),
        # In a bucket, the query is part of the object's name.
        ("s3://b/k.tar?token=1", "s3://b/k.tar"),
        ("s3://b/k?sig=x?token=1&versionId=1", "s3://b/k?versionId=1"),
        (f"s3://b/k?{SIGV4}", "s3://b/k"),
        # On the web, only complete signatures are not part of the key.
        ("https://h/k?token=AAA", "https://h/k?token=BBB"),
        ("https://h/k?sig=x&se=1&sp=2", "https://h/k?sp=2"),
        ("https://h/k?signature=x&expires=1", "https://h/k"),
        ("https://h/k?X-Amz-Signature=x&X-Amz-Date=1", "https://h/k?X-Amz-Date=1"),
        (f"https://h/k?{SIGV4}&part=1", f"https://h/k?{SIGV4}&part=2"),
        (f"https://h/k?{OSS}&x-oss-process=image/resize,w_9", f"https://h/k?{OSS}"),
    ],
)
def test_similar_urls_have_different_keys(one, other):
    assert key_of(one, allow_schemes=["pipe"]) != key_of(other, allow_schemes=["pipe"])


def test_endpoints_are_part_of_the_key():
    url = "s3://lab/a.tar"
    endpoints = [None, "http://minio:9000", "http://minio:9001", "https://ceph", "https://ceph/s3"]
    domains = ["cn-north-1.amazonaws.com.cn", "eusc-de-east-1.amazonaws.eu"]
    regions = ("us-gov-west-1", "us-iso-east-1", "us-isob-east-1", "eu-isoe-west-1")
    domains += [f"{region}.amazonaws.com" for region in regions]
    endpoints += [f"https://s3.{domain}" for domain in domains]
    assert len({key_of(url, endpoint=endpoint) for endpoint in endpoints}) == len(endpoints)
    assert parse_url(url, endpoint="http://minio:9000").canonical == url
    assert key_of("gs://b/k", endpoint="http://minio:9000") == key_of("gs://b/k")


_HEX = st.text("0123456789abcdef", min_size=4, max_size=16).map(lambda text: CANARY + text)
_BASE64 = _HEX.map(lambda text: quote(text + "+/=", safe=""))
SIGNATURES = [
    "X-Amz-Algorithm X-Amz-Credential X-Amz-Security-Token X-Amz-Signature",
    "AWSAccessKeyId Expires Signature x-amz-security-token",
    "Policy Signature Key-Pair-Id",  # CloudFront's
    "Expires Signature Key-Pair-Id Hash-Algorithm",
    "Policy Signature Key-Pair-Id X-Xet-Cas-Uid user_id xip",  # Hugging Face's
    "X-Goog-Algorithm X-Goog-Credential X-Goog-Signature",
    "GoogleAccessId Expires Signature",
    "sv se sr sp sig",  # Azure's
    "sv si sr sig",
    "x-oss-signature x-oss-credential x-oss-date",
    "OSSAccessKeyId Expires Signature security-token",
    "q-sign-algorithm q-ak q-sign-time q-signature x-cos-security-token",
]
#: Parts of a signature that are no secrets.
HARMLESS = {"Expires", "X-Amz-Algorithm", "X-Goog-Algorithm", "sv", "se", "sr", "sp", "si", "xip"}
PLAIN = [
    "https://h.example/dir/a.tar",
    "https://h.example/dir/a.tar?part=7&versionId=abc",
    "http://h.example/get?file=dir/train-000000.tar&&flag",
]


@settings(max_examples=300)
@given(kind=st.sampled_from(SIGNATURES), plain=st.sampled_from(PLAIN), data=st.data())
def test_signatures_are_hidden_and_not_part_of_the_key(kind, plain, data):
    base, mark, query = plain.partition("?")
    pairs = query.split("&") if mark else []
    for name in kind.split():
        value = "20260101" if name in HARMLESS else data.draw(_HEX | _BASE64)
        pairs.insert(data.draw(st.integers(0, len(pairs))), f"{name}={value}")
    signed = f"{base}?{'&'.join(pairs)}"
    shard = parse_url(signed)
    assert replace(shard, raw=plain) == parse_url(plain) and shard.raw == signed
    for text in (str(shard), repr(shard), shard.canonical, shard.basename, redact(signed)):
        assert CANARY.lower() not in text.lower()


ARNS = [
    *(f"arn:aws:s3:us-west-2:123456789012:accesspoint{mark}point" for mark in "/:"),
    "arn:aws-cn:s3::123456789012:accesspoint/m1.mrap",
    "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-1/accesspoint/point",
]
SHOWN = [
    "https://h/k?versionId=3sL4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY+MTRCxf3vjVBH40Nr8X8gdRQBpUMLUo",
    "az://box/k?snapshot=2026-01-01T00:00:00.0000000Z",
    "s3://b/k.tar?token=A&sig=B",
]


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        # Logins.
        (f"https://me:{CANARY}@h/k.tar", "https://h/k.tar"),
        (f"s3://AKIA:{CANARY}@bucket/k.tar", "s3://bucket/k.tar"),
        (f"s3://{CANARY}@bucket/k.tar", "s3://bucket/k.tar"),
        *((f"s3://AKIA:{CANARY}@{arn}/a@b.tar", f"s3://{arn}/a@b.tar") for arn in ARNS),
        # Spellings.
        ("S3://bucket/k", "s3://bucket/k"),
        ("s3a://bucket/k", "s3://bucket/k"),
        ("gcs://bucket/k", "gs://bucket/k"),
        ("shardcache::s3://bucket/k", "s3://bucket/k"),
        ("shardcache://s3://bucket/k", "s3://bucket/k"),
        ("HTTPS://H.Example:443/k", "https://h.example/k"),
        ("http://h:80/k", "http://h/k"),
        ("http://h", "http://h/"),
        ("https://h/k#part", "https://h/k"),
        ("/data//x/./k", "file:///data/x/k"),
        ("file://localhost/data/x", "file:///data/x"),
        # Schemes that are allowed by name.
        ("sftp://me@h/k.tar", "sftp://h/k.tar"),
        ("swift://box@h/k", "swift://box@h/k"),
        # Parameters that are shown.
        *((url, url) for url in SHOWN),
        ("/data/k?token=A", "file:///data/k?token=A"),
        # Parameters that may be secrets: they are part of the key, which is shown in their place.
        (f"https://h/k?token={CANARY}", "https://h/k?token=***"),
        (f"https://h/k?x?sig={CANARY};key={CANARY}#{CANARY}", "https://h/k?***?sig=***;key=***"),
        (f"https://h/k?{CANARY}", "https://h/k?***"),
        (f"https://h/k?u={CANARY}&session=1", "https://h/k?u=***&session=***"),
        (f"https://me:{CANARY}@h/k?jwt=1", "https://h/k?jwt=***"),
        (f"https://h/k?u=http://me:{CANARY}@h/a.tar", "https://h/k?u=***"),
        (f"https://h/k?key={CANARY}/a.tar", "https://h/k?key=***"),
        (f"az://box/k?sv=2&sig={CANARY}", "az://box/k?sv=***&sig=***"),
        (f"gs://box/k?token={CANARY}#{CANARY}", "gs://box/k?token=***"),
    ],
)
def test_a_shard_has_one_name_without_secrets(url, canonical):
    allowed = {"allow_schemes": ["sftp", "swift"]}
    shard, is_masked = parse_url(url, **allowed), "***" in canonical
    assert shard.canonical == canonical + f"#{shard.key}" * is_masked
    again = parse_url(shard.canonical, **allowed)
    assert again.key == shard.key and (not is_masked or replace(again, raw=url) == shard)
    assert (again.is_masked, shard.is_masked) == (is_masked, False)
    for text in (repr(shard), str(shard), redact(url), redact(f"see {shard}, {url}.")):
        assert CANARY not in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, "https://s3.eu-west-1.amazonaws.com"),
        ("", "s3.amazonaws.com:443"),
        ("http://minio:9000", "https://MINIO:9000/"),
        ("https://minio:443", "minio"),
        (f"http://me:{CANARY}@minio", "http://minio"),
        ("s3.cn-north-1.amazonaws.com", "https://s3.dualstack.cn-northwest-1.amazonaws.com.cn"),
        ("s3-fips.us-gov-east-1.amazonaws.com", "https://s3-us-gov-west-1.amazonaws.com"),
        ("s3.us-iso-east-1.amazonaws.com", "https://s3.us-iso-west-1.c2s.ic.gov"),
        (None, "https://vpce-1-cn.s3.us-east-1.vpce.amazonaws.com"),
    ],
)
def test_spellings_of_one_endpoint_share_a_key(one, other):
    assert key_of("s3://lab/a.tar", endpoint=one) == key_of("s3://lab/a.tar", endpoint=other)


def test_relative_and_absolute_paths_share_a_key(tmp_path, monkeypatch):
    assert os.fsencode(parse_url(os.fsdecode(b"/data/\xff")).local_path) == b"/data/\xff"
    monkeypatch.chdir(tmp_path)
    assert key_of("a.tar") == key_of("./a.tar") == key_of(f"{tmp_path}/a.tar")


def test_keys_do_not_change_between_releases():
    # A change would orphan all entries on all disks.
    assert key_of("s3://bucket/train-0000.tar") == "e486067e1fd02cc3f3c6274d88862d12"
    assert key_of("https://h/k?a=1") == "e412643f52b5e6f880e616d162f49c57"
    assert key_of("/data/\u00e9.tar") == "4e15c395e5c38908be392c8b443adbb3"
    assert key_of("s3://b/k", endpoint="http://minio:9000") == "17cb8d3ae3d15c660f5a7e7c483708cd"


@given(scheme=st.sampled_from(["s3", "https", "gs"]), host=hosts, name=names)
def test_names_are_safe_on_disk_and_exact_at_the_origin(scheme, host, name):
    shard = parse_url(f"{scheme}://{host}/{name}")
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,129}", shard.basename)
    assert shard.basename not in SIDE_FILES
    assert parse_url(f"{scheme}://{host}/{'x' * 300}.tar").basename.endswith("xxx.tar")
    assert parse_url(f"{scheme}://{host}/{META}").basename == f"shard-{META}"
    for version in "", "?versionId=v.1":
        assert parse_url(f"s3://{host}/{name}{version}").bucket_and_key() == (host, name)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        (f"https://h/k?sig=abc\n{CANARY}", "control character"),
        (f"simplecache::https://h/k?sig={CANARY}", "chain"),
        (f"s3://b/a.tar https://h/k?sig={CANARY}", "shards by ::, or pass"),
        ("/data/a.tar pipe:cat /data/b.tar", "shards by ::"),
        ("/data/a.tar /data/b.tar", "shards by ::, or pass several words or a list"),
        (f" https://h/k?sig={CANARY}", "begins with a space. Remove it."),
        (f"foo://me:{CANARY}@h/k", r"allow_schemes=\['foo'\]"),
        (f"https://me:{CANARY}@[h/k", "not a URL"),
        (f"https://me:{CANARY}@h:99999/k", "not a URL"),
        (f"https://me:{CANARY}@/k", "no host"),
        (f"gs://?token={CANARY}", "no object"),
        (f"s3://AKIA:a/{CANARY}@bucket/k", "colon"),
        ("s3://arn:aws:s3:us-west-2:1:accesspoint/point/k", "ACCOUNT:accesspoint/NAME"),
        ("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/point", "no object"),
        (f"gs://me:{CANARY}@bucket/k", "password"),
        (f"https://h/{'x' * 9000}?sig={CANARY}", "bytes"),
        (f"gs://b/\ud800?sig={CANARY}", "UTF-8"),
        (f"pipe:curl -u {CANARY} https://h/\ud800", "UTF-8"),
        ("file://", "no file"),
        ("s3://b/k", "endpoint .* is not a URL"),
        (None, "NoneType"),
        (f"pipe:curl https://h/k?sig={CANARY}", r"allow_schemes=\['pipe'\]"),
        ("shardcache::pipe:touch a", r"shell.* allow_schemes=\['pipe'\]"),
    ],
)
def test_a_refused_url_is_explained_without_secrets(url, says):
    schemes = ["pipe"] if says == "UTF-8" else []
    for host in "[minio", "min\u2100io":  # the error of urllib quotes the latter
        with pytest.raises(ConfigError, match=says) as caught:
            parse_url(url, endpoint=f"http://me:{CANARY}@{host}", allow_schemes=schemes)
        exn = caught.value
        while exn is not None:  # programs may log the context, too
            assert CANARY not in str(exn) + ascii(exn.args)
            exn = exn.__context__


@given(st.text(max_size=40) | names.map(lambda name: f"s3://{name}"))
def test_any_url_is_parsed_or_refused(url):
    try:
        shard = parse_url(url, allow_schemes=["pipe"])
    except ConfigError:
        return
    again = parse_url(shard.canonical, allow_schemes=["pipe"])
    assert again.basename == shard.basename
    if shard.scheme != "pipe":
        assert (again.key, again.canonical) == (shard.key, shard.canonical)


def test_secret_parameters_are_redacted_in_any_text():
    names = "access_token api_key apikey auth_token Authorization AWSAccessKeyId GoogleAccessId"
    names += " password secret security-token sig Signature token Key-Pair-Id Policy x-amz-a"
    for name in names.split():
        for mark in "?&; ":
            found = redact(f"no 'https://h/k?x=1{mark}{name}={CANARY}/+%3D&y=2': refused")
            assert CANARY not in found
            assert "y=" in found and "refused" in found


def test_redact_keeps_other_text():
    for text in (
        "s3://bucket/a@b.tar",
        "https://h:8080/p@v1/k?versionId=abc",
        "abfs://box@account/k and oci://bucket@space/k, az://box@a/k",
        "bucket/key=7/part=3.tar, monkey=1, tokens=3, user@example.org",
    ):
        assert redact(text) == text
    logins = f"https://a:{CANARY}@h/k -> s3://AK:x/{CANARY}@b/k; abfs://me:{CANARY}@acc/k"
    assert redact(logins) == "https://h/k -> s3://b/k; abfs://acc/k"


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{CANARY}@h/k?sig={CANARY}&x=1#{CANARY}",
        f"s3://me:{CANARY}@b/k?versionId=7",
        f"pipe:curl -H 'X-Token: {CANARY}' https://h/k?sig={CANARY}",
        f"pipe:curl -H 'Authorization: Bearer {CANARY}' https://h/k",
    ],
)
def test_only_spawned_children_get_credentials_in_a_pickle(url, monkeypatch):
    shard = Cache(allow_schemes=["pipe"]).parse(url)
    assert deepcopy([shard]) == [shard]
    data = pickle.dumps([shard])
    assert CANARY not in data.decode("latin-1") + str(shard) + repr(shard) + shard.basename
    (found,) = pickle.loads(data)
    assert replace(found, raw=shard.raw, options=shard.options) == shard
    assert found.is_masked == (shard.scheme != "s3")  # then it must not be read
    monkeypatch.setattr("multiprocessing.context.get_spawning_popen", object)
    assert pickle.loads(pickle.dumps([shard])) == [shard]
