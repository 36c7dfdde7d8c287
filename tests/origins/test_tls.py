"""Certificates: a server that is not trusted is refused in one sentence, a given CA is used."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError
from shardcache.origins.base import TransientError, read_all
from shardcache.origins.http import WebOrigin
from shardcache.urls import parse_url
from tests.support.tars import make_tar
from tests.support.webservers import Connection, Files, Scripted, answer, running

SHARD = make_tar(11)

if shutil.which("openssl") is None:
    pytest.skip("the openssl command makes the test's certificate", allow_module_level=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    home = tmp_path_factory.mktemp("tls")
    certificate, key = home / "ca.pem", home / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture
def context(authority: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority)
    return context


@pytest.fixture
def secure(context: ssl.SSLContext) -> Iterator[str]:
    """An https server's URL."""
    server = Files()
    server.files = {"/a.tar": SHARD, "/lab/a.tar": SHARD}
    with running(server, context):
        yield server.url.replace("http:", "https:")


def read(path: Path, url: str, endpoint: str | None = None, **client: object) -> bytes:
    """A shard, through a new cache."""
    options = {"key": "AK", "secret": "SK", "client_kwargs": client}
    cache = Cache(path, min_free=0, endpoint_url=endpoint, storage_options=options)
    with cache, cache.open(url) as stream:
        return stream.read()


def test_an_untrusted_certificate_is_a_configuration_error(secure, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="AWS_CA_BUNDLE"):
        read(tmp_path, "s3://lab/a.tar", secure)
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        read(tmp_path, f"{secure}/a.tar")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere.pem")
    with pytest.raises(ConfigError, match="not where AWS_CA_BUNDLE or verify say"):
        read(tmp_path, "s3://lab/a.tar", secure)


def test_a_ca_bundle_of_the_options_or_the_environment_is_used(
    secure: str, authority: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = str(authority[0])
    assert read(tmp_path / "options", "s3://lab/a.tar", secure, verify=trusted) == SHARD
    monkeypatch.setenv("AWS_CA_BUNDLE", trusted)
    monkeypatch.setenv("SSL_CERT_FILE", trusted)
    assert read(tmp_path / "s3", "s3://lab/a.tar", secure) == SHARD
    assert read(tmp_path / "web", f"{secure}/a.tar") == SHARD


def test_tls_goes_through_a_proxy_in_one_tunnel(context, authority, monkeypatch):
    class Tunnel(Connection):
        """A proxy that is the server, too."""

        def handle(self) -> None:
            super().handle()
            self.request = context.wrap_socket(self.request, server_side=True)
            self.setup()
            for _ in range(3):
                super().handle()

    file = answer("206 Partial", SHARD[:9], Content_Range="bytes 0-8/99", Connection=None)
    proxy = Scripted(lambda head: b"HTTP/1.1 200 OK\r\n\r\n" if "CONNECT" in head else file)
    proxy.RequestHandlerClass = Tunnel
    monkeypatch.setenv("https_proxy", proxy.url.removeprefix("http://"))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    origin = WebOrigin(timeout=60)
    with running(proxy):
        for _ in range(3):
            body = origin.open(parse_url("https://127.0.0.1:9/a.tar"), 0, 9)
            assert read_all(body, 99) == SHARD[:9]
    assert [head.split(" HTTP")[0] for head in proxy.heads] == [
        "CONNECT 127.0.0.1:9",
        *["GET /a.tar"] * 3,
    ]


def test_a_blocked_read_of_tls_can_be_aborted(context, authority, monkeypatch):
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    server = Scripted(lambda head: half, most=2)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    url = parse_url(f"{server.url.replace('http:', 'https:')}/a")
    with running(server, context), closing(WebOrigin(timeout=60).open(url, 0, None)) as body:
        assert body.readinto(memoryview(bytearray(4))) == 4
        threading.Timer(0.2, body.abort).start()
        with pytest.raises(TransientError, match="called off"):
            body.readinto(memoryview(bytearray(96)))
