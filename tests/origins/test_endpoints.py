"""The endpoint in force is part of a shard's key, whichever way the S3 client is told it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardcache import Cache
from shardcache.origins.endpoints import s3_endpoint
from tests.origins.test_generic import Server, served

Set = Callable[[str, str], None]


@pytest.fixture
def endpoints() -> Iterator[list[Server]]:
    """Two servers that keep different bytes under one name."""
    with ExitStack() as stack:
        servers = [stack.enter_context(served()) for _ in range(2)]
        for number, server in enumerate(servers):
            server.files["/lab/a.bin"] = f"bytes of server {number}".encode()
        yield servers


def tell(way: str, url: str, home: Path, setenv: Set) -> dict[str, object]:
    """Options of a cache that is told an endpoint in one of the ways botocore knows."""
    where, _, variable = way.partition(" by ")
    match where:
        case "endpoint_url":
            return {"endpoint_url": url}
        case "storage_options":
            return {"storage_options": {"endpoint_url": url}}
        case "client_kwargs":
            return {"storage_options": {"client_kwargs": {"endpoint_url": url}}}
        case "storage_options.s3":
            return {"storage_options": {"s3": {"endpoint_url": url}}}
        case "AWS_ENDPOINT_URL" | "AWS_ENDPOINT_URL_S3":
            setenv(where, url)
            return {}
    section = "lab" if where == "credentials" else "profile lab"
    text = f"[{section}]\nregion = us-east-1\nendpoint_url = {url}\n"
    if where == "services":
        text = f"[profile lab]\nservices = near\n[services near]\ns3 =\n  endpoint_url = {url}\n"
    path = home / f"{where}-{url.rpartition(':')[2]}"
    path.write_text(text)
    setenv(
        "AWS_SHARED_CREDENTIALS_FILE" if where == "credentials" else "AWS_CONFIG_FILE", str(path)
    )
    if variable == "option":
        return {"storage_options": {"profile": "lab", "key": "me", "secret": "mine"}}
    setenv(variable, "lab")
    return {}


@pytest.mark.parametrize(
    "way",
    [
        *("endpoint_url", "storage_options", "client_kwargs", "storage_options.s3"),
        *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
        *("config by AWS_PROFILE", "config by AWS_DEFAULT_PROFILE", "config by option"),
        *("credentials by AWS_PROFILE", "credentials by AWS_DEFAULT_PROFILE"),
        *("services by AWS_PROFILE", "services by AWS_DEFAULT_PROFILE"),
    ],
)
def test_two_endpoints_that_share_a_directory_keep_their_own_bytes(
    way: str, endpoints: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    for server in [*endpoints, *endpoints]:
        options = tell(way, server.url, tmp_path, monkeypatch.setenv)
        cache = Cache(tmp_path / "cache", min_free=0, **options)
        with cache, cache.open("s3://lab/a.bin") as stream:
            assert stream.read() == server.files["/lab/a.bin"]
    for server in endpoints:  # and the second look was a hit
        assert [method for method, _ in server.requests].count("GET") == 1


AWS_CONFIG = """
[default]
endpoint_url = http://default
[profile lab]
services = near
endpoint_url = http://lab
[profile plain]
region = eu-west-1
[profile aws]
endpoint_url = http://never
ignore_configured_endpoint_urls = true
[services near]
s3 =
  endpoint_url = http://lab-s3
"""


@pytest.mark.parametrize(
    ("environment", "options", "endpoint"),
    [
        ({}, {}, "http://default"),
        ({"AWS_PROFILE": "plain"}, {}, None),
        ({"AWS_PROFILE": "plain", "AWS_DEFAULT_PROFILE": "lab"}, {}, "http://lab-s3"),
        ({"AWS_PROFILE": "plain"}, {"profile": "lab"}, "http://lab-s3"),
        ({"AWS_PROFILE": "lab", "AWS_ENDPOINT_URL": "http://any"}, {}, "http://any"),
        ({"AWS_ENDPOINT_URL": "http://any", "AWS_ENDPOINT_URL_S3": "http://s3"}, {}, "http://s3"),
        ({"AWS_ENDPOINT_URL_S3": "http://s3"}, {"endpoint_url": "http://mine"}, "http://mine"),
        ({"AWS_PROFILE": "aws", "AWS_ENDPOINT_URL": "http://any"}, {}, None),
        ({"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true", "AWS_ENDPOINT_URL": "http://x"}, {}, None),
        (
            {"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            {"config_kwargs": {"ignore_configured_endpoint_urls": False}},
            "http://default",
        ),
        ({"AWS_PROFILE": "missing"}, {}, None),
    ],
)
def test_the_order_of_places_is_botocores(
    environment: dict[str, str],
    options: dict[str, object],
    endpoint: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the client then uses is asserted, too: an endpoint that only the key knew is no use."""
    (tmp_path / "aws").write_text(AWS_CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert s3_endpoint(options) == endpoint
    if environment.get("AWS_PROFILE") != "missing":
        import botocore.session
        from botocore.config import Config

        session = botocore.session.Session(profile=options.get("profile"))
        settings = Config(**options.get("config_kwargs", {}))
        client = session.create_client(
            "s3", "us-east-1", config=settings, endpoint_url=options.get("endpoint_url")
        )
        assert client.meta.endpoint_url == (endpoint or "https://s3.amazonaws.com")


@pytest.mark.parametrize(
    "text", [b"\xff\xfe endpoint_url", b"[default\nendpoint_url=x", b"endpoint_url = x"]
)
def test_a_configuration_that_cannot_be_read_fails_no_other_origin(
    text: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aws").write_bytes(text)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    assert s3_endpoint({}) is None
    (tmp_path / "shard.bin").write_bytes(b"bytes")
    with Cache(tmp_path / "cache", cache_local=True, min_free=0) as cache:
        assert cache.open(str(tmp_path / "shard.bin")).read() == b"bytes"


def test_an_endpoint_of_the_environment_costs_no_import_of_botocore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aws").write_text("[default]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    code = (
        "import sys, shardcache; c = shardcache.Cache(sys.argv[1]); "
        "c.parse('s3://lab/a.bin'); assert not {'botocore', 'aiohttp'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
