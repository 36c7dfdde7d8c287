"""Certificates: a server that is not trusted is refused in one sentence, a given CA is used."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError
from tests.support.tars import make_tar

SHARD = make_tar(11)

if shutil.which("openssl") is None:
    pytest.skip("the openssl command makes the test's certificate", allow_module_level=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(SHARD)

    def do_HEAD(self) -> None:
        self._answer(b"")

    def _answer(self, body: bytes) -> None:
        self.send_response(206 if body else 200)
        self.send_header("ETag", '"v1"')
        self.send_header("Content-Length", str(len(SHARD)))
        self.send_header("Content-Range", f"bytes 0-{len(SHARD) - 1}/{len(SHARD)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


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
def secure(authority: tuple[Path, Path]) -> Iterator[str]:
    """An https server's URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    # The handshake belongs to the connection's thread: one that fails must not stop the server.
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def read(cache: Cache, url: str) -> bytes:
    with cache.open(url) as stream:
        return stream.read()


def s3_cache(path: Path, endpoint: str, **client: object) -> Cache:
    options = {
        "key": "AK",
        "secret": "SK",
        "config_kwargs": {"s3": {"addressing_style": "path"}},
        "client_kwargs": client,
    }
    return Cache(path / "cache", min_free=0, endpoint_url=endpoint, storage_options=options)


def test_an_untrusted_certificate_is_a_configuration_error(secure: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AWS_CA_BUNDLE"):
        s3_cache(tmp_path, secure).open("s3://lab/a.tar")
    with pytest.raises(ConfigError, match="SSL_CERT_FILE"):
        Cache(tmp_path / "cache", min_free=0).open(f"{secure}/a.tar")


def test_a_ca_bundle_of_the_environment_is_used(
    secure: str, authority: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority[0]))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    assert read(s3_cache(tmp_path, secure), "s3://lab/a.tar") == SHARD
    assert read(Cache(tmp_path / "web", min_free=0), f"{secure}/a.tar") == SHARD


def test_a_ca_bundle_of_the_options_is_used(
    secure: str, authority: tuple[Path, Path], tmp_path: Path
) -> None:
    cache = s3_cache(tmp_path, secure, verify=str(authority[0]))
    assert read(cache, "s3://lab/a.tar") == SHARD
