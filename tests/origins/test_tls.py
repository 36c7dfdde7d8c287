"""Certificates: a server that is not trusted is refused in one sentence, a given CA is used."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache import Cache, ConfigError
from tests.origins.test_generic import served
from tests.support.tars import make_tar

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
def secure(authority: tuple[Path, Path]) -> Iterator[str]:
    """An https server's URL."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority)
    with served(context) as server:
        server.files = {"/a.tar": SHARD, "/lab/a.tar": SHARD}
        yield server.url.replace("http:", "https:")


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


def test_a_ca_bundle_of_the_options_or_the_environment_is_used(
    secure: str, authority: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = s3_cache(tmp_path / "options", secure, verify=str(authority[0]))
    assert read(cache, "s3://lab/a.tar") == SHARD
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority[0]))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
    assert read(s3_cache(tmp_path, secure), "s3://lab/a.tar") == SHARD
    assert read(Cache(tmp_path / "web", min_free=0), f"{secure}/a.tar") == SHARD
