"""Settings of S3 clients are read as botocore reads them, and a key has endpoint and partition."""

import itertools
import os
import random

import botocore.session
import pytest

from shardcache import TransferError
from shardcache.origins.aws import s3_region, written_keys
from shardcache.origins.s3 import _usual_address
from shardcache.urls import parse_url
from tests.support.webservers import answer

KEYS = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
CONFIG = """
[default]
endpoint_url = https://default
[profile lab]
services = near
endpoint_url = https://lab
[profile eu]
region = eu-west-1
[profile gov]
region = us-gov-west-1
[profile aws]
endpoint_url = https://never
ignore_configured_endpoint_urls = true
[services near]
s3 =
  endpoint_url = https://near
"""
CHINA = "lab.s3.cn-north-1.amazonaws.com.cn"
STANDARD = "lab.s3.us-east-1.amazonaws.com"
IRELAND = "lab.s3.eu-west-1.amazonaws.com"
GOVERNMENT = "lab.s3.us-gov-west-1.amazonaws.com"
ANY = {"AWS_ENDPOINT_URL": "https://any"}
NONE = {"AWS_CONFIG_FILE": "/dev/null"}


@pytest.mark.parametrize(
    ("environment", "options", "host"),
    [
        ({}, {}, "default"),
        ({"AWS_PROFILE": "lab"}, {}, "near"),
        ({"AWS_PROFILE": "shared"}, {}, "shared"),
        ({"AWS_PROFILE": "eu", "AWS_DEFAULT_PROFILE": "lab"}, {}, "near"),
        ({"AWS_PROFILE": "eu"}, {"profile": "lab", "key": "me", "secret": "x"}, "near"),
        ({"AWS_PROFILE": "lab", **ANY}, {}, "any"),
        ({**ANY, "AWS_ENDPOINT_URL_S3": "https://s3"}, {}, "s3"),
        (ANY, {"endpoint_url": "https://mine"}, "mine"),
        (ANY, {"client_kwargs": {"endpoint_url": "https://mine"}}, "mine"),
        (ANY, {"s3": {"endpoint_url": "https://mine"}}, "mine"),
        ({"AWS_PROFILE": "aws", **ANY}, {}, STANDARD),
        ({"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", **ANY}, {}, STANDARD),
        (NONE, {}, STANDARD),
        (NONE, {"endpoint_url": f"https://{CHINA[4:]}"}, CHINA[4:]),
        ({"AWS_DEFAULT_REGION": "cn-north-1", "AWS_PROFILE": "gov"}, {}, CHINA),
        ({"AWS_DEFAULT_REGION": "eu-west-1", "AWS_PROFILE": "gov"}, {}, IRELAND),
        ({"AWS_PROFILE": "gov", "AWS_REGION": "eu-west-1"}, {}, GOVERNMENT),
        ({"AWS_PROFILE": "eu", "AWS_REGION": "cn-north-1"}, {}, IRELAND),
        ({"AWS_REGION": "cn-north-1", **NONE}, {}, CHINA),
        ({"AWS_PROFILE": "eu"}, {"profile": "gov", "key": "me", "secret": "x"}, GOVERNMENT),
        ({"AWS_PROFILE": "gov"}, {"client_kwargs": {"region_name": "cn-north-1"}}, CHINA),
    ],
)
def test_the_key_has_the_endpoint_and_partition_of_the_request(
    environment, options, host, open_cache, tmp_path, set_variables, serve
):
    (tmp_path / "config").write_text(CONFIG)
    (tmp_path / "credentials").write_text("[shared]\nendpoint_url = https://shared\n")
    proxy = serve(answer("502 Bad Gateway"))
    files = {"AWS_CONFIG_FILE": "config", "AWS_SHARED_CREDENTIALS_FILE": "credentials"}
    given = {name: str(tmp_path / file) for name, file in files.items()} | KEYS | environment
    set_variables(**given, https_proxy=proxy.url)
    cache = open_cache(attempts=1, storage_options=options)
    for number, form in enumerate(("{}", "pipe:aws s3 cp {} -")):
        url = form.format("s3://lab/a.tar")
        key = cache.parse(url).key
        assert key == parse_url("s3://lab/a.tar", endpoint=host).key
        assert (key == parse_url("s3://lab/a.tar").key) == (host in (STANDARD, IRELAND))
        with pytest.raises(TransferError):
            cache.open(url)
        assert proxy.heads[number].startswith(f"CONNECT {host}:443 ")
    if not options:
        client = botocore.session.Session().create_client("s3", "us-east-1")
        at_aws = client.meta.endpoint_url == "https://s3.amazonaws.com"
        assert at_aws == host.startswith("lab.s3.")
        assert at_aws or client.meta.endpoint_url == f"https://{host}"


def test_the_region_of_a_command_sets_its_partition(open_cache):
    found = open_cache().parse("pipe:aws s3 cp s3://lab/a.tar - --region cn-north-1")
    assert found.key == parse_url("s3://lab/a.tar", endpoint=CHINA).key


@pytest.mark.parametrize(
    "text",
    [
        b"\xff\xfe endpoint_url cn-x",
        b"[default\nendpoint_url=x",
        b"[profile other]\nendpoint_url=x",
        b"[profile missing]\nservices=x\n[services x]\ns3=endpoint_url",
    ],
)
def test_a_broken_aws_configuration_harms_no_local_file(text, open_cache, tmp_path, set_variables):
    (tmp_path / "aws").write_bytes(text)
    set_variables(AWS_CONFIG_FILE=tmp_path / "aws", AWS_PROFILE="missing")
    (tmp_path / "shard.bin").write_bytes(b"bytes")
    cache = open_cache(cache_local=True)
    assert cache.open(str(tmp_path / "shard.bin")).read() == b"bytes"
    assert cache.parse("s3://lab/a.tar").endpoint == ""


USUAL = "", "https://store:9000/", "http://127.0.0.1"
OTHERS = "http://store:80", "http://store/below", "https://s3-accelerate.amazonaws.com"


@pytest.mark.parametrize("endpoint", [*USUAL, *OTHERS])
def test_usual_addresses_are_those_of_botocore(endpoint):
    def see(request, **others):
        raise LookupError(request.url)

    keys = {"aws_access_key_id": "me", "aws_secret_access_key": "mine"}
    session = botocore.session.Session()
    for region in ("eu-west-1", "us-east-2", "cn-north-1", "aws-global"):
        client = session.create_client("s3", region, endpoint_url=endpoint or None, **keys)
        client.meta.events.register("before-send.s3", see)
        is_standard = bool(endpoint) or region in ("eu-west-1", "us-east-2")
        for name in ("lab", "my.shards", "a" * 63, "Old_Bucket"):
            with pytest.raises(LookupError) as seen:
                client.get_object(Bucket=name, Key="key")
            usual, is_plain = _usual_address(endpoint, name, region), name in ("lab", "a" * 63)
            assert usual is None or str(seen.value.args[0]) == "".join(usual) + "/key"
            assert (usual is not None) == (endpoint in USUAL and is_standard and is_plain)


def test_the_key_has_the_server_or_account_that_options_name(open_cache, monkeypatch):
    def key(options, url="az://data/a.tar"):
        cache = open_cache(storage_options=options, allow_schemes=["sftp"])
        shard = cache.parse(url)
        assert str(shard) == url and cache.parse(str(shard)).key == shard.key
        return shard.key

    stated = "AccountName=bob;AccountKey=hidden"
    options = [
        *({"account_name": name} for name in ("alice", "bob")),
        *({"connection_string": text} for text in (stated, "BlobEndpoint=https://bob?sig=hidden")),
    ]
    keys = [key({}), *(key({"az": each}) for each in options)]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key({"az": {"sas_token": "x"}}) == key({"abfs": options[0]})
    assert keys[3] == key({"az": {"connection_string": stated.replace("hidden", "other")}})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "alice")
    assert key({}) == keys[1] and key({"az": options[1]}) == keys[2]
    assert key({}, "abfs://data/a.tar") == key({"abfs": options[0]}, "abfs://data/a.tar")
    plain, mirror = key({}, url := "hf://datasets/lab/a.tar"), {"endpoint": "https://hf.test"}
    monkeypatch.setenv("HF_ENDPOINT", mirror["endpoint"])
    assert key({}, url) == key({"hf": mirror}, url) != plain
    servers = {"host": "a"}, {"host": "b"}, {"host": "b", "port": 23}
    assert len({key({"sftp": each}, "sftp:///a.tar") for each in servers}) == 3


_KEYS = "aws_access_key_id = {0}\naws_secret_access_key = {0}secret\n"
_CONFIGS = (
    None,
    "[default]\nregion = eu-west-1\noutput = json\n",
    "[profile lab]\nregion = us-east-2\n[profile other]\nrole_arn = r\nsource_profile = lab\n",
    '[profile "lab"]\nregion = us-west-1\n[default]\nregion = eu-west-3\ns3 =\n  a = 1\n',
    "[profile lab]\ncredential_process = echo\n[services x]\n",
    "[default]\naws_session_token = from-config\nca_bundle = /x.pem\n",
    "[default\n",
)
_CREDENTIALS = (
    None,
    f"[default]\n{_KEYS.format('A')}",
    f"[default]\n{_KEYS.format('A')}aws_session_token = T\n[lab]\n{_KEYS.format('B')}",
    f"[lab]\n{_KEYS.format('B')}region = ap-south-1\n",
    "[default]\naws_access_key_id = A\n[lab]\naws_secret_access_key = S\n",
    f"[default]\n{_KEYS.format('A')}aws_account_id = 1\n",
)
_VARIABLES = """
ACCESS_KEY_ID=E ACCESS_KEY_ID= SECRET_ACCESS_KEY=Esecret SECRET_ACCESS_KEY= SESSION_TOKEN=Etoken
SECURITY_TOKEN=old PROFILE=lab PROFILE=default PROFILE=other PROFILE=missing PROFILE=
DEFAULT_PROFILE=lab REGION=ca-central-1 DEFAULT_REGION=sa-east-1 DEFAULT_REGION=
CA_BUNDLE=/bundle.pem CREDENTIAL_EXPIRATION=2050-01-01T00:00:00Z
"""
_PROFILES = (None, "lab", "default", "missing")


def test_settings_equal_those_of_botocore(tmp_path, monkeypatch):
    chance, known = random.Random(0), 0
    files = list(itertools.product(_CONFIGS, _CREDENTIALS, _PROFILES))
    for config, credentials, profile in files * 4:
        with monkeypatch.context() as patch:
            for name, text in (("CONFIG", config), ("SHARED_CREDENTIALS", credentials)):
                path = tmp_path / name
                path.unlink(missing_ok=True)
                if text is not None:
                    path.write_text(text)
                patch.setenv(f"AWS_{name}_FILE", str(path))
            for name, _, value in (each.partition("=") for each in _VARIABLES.split()):
                if chance.random() < 0.1:
                    patch.setenv(f"AWS_{name}", value)
            if (found := written_keys({"profile": profile})) is None:
                continue
            known += 1
            session = botocore.session.Session(profile=profile)
            keys = session.get_credentials().get_frozen_credentials()
            assert tuple(found) == (keys.access_key, keys.secret_key, keys.token or "")
            region = session.get_config_variable("region") or "us-east-1"
            assert s3_region({"profile": profile}, "https://store") == region
            assert session.get_config_variable("ca_bundle") == os.environ.get("AWS_CA_BUNDLE")
            for name in ("use_fips_endpoint", "use_dualstack_endpoint"):
                assert not session.get_config_variable(name)
            assert "s3" not in session.get_scoped_config()
    assert known > 50
