"""Run the servers that clients download from, on 127.0.0.1 and in processes of their own.

| target | server |
|---|---|
| nginx, nginx-tls | the system's nginx (Debian: nginx-light), faster than any client |
| s3-like | `linkserver` with 30 ms to the first byte and 80 MB/s per connection, as S3 has |
| fast | `linkserver` without limits |

A link can have an nginx before it that adds TLS.

nginx serves files, with ranges. It checks no signatures, and has no listings.

Clients find endpoint and credentials as they do for any user: the endpoint in the environment, the
credentials in a profile of a credentials file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.buckets import BUCKET
from benchmarks.servers.linkserver import serve
from tests.support.storetools import forked

#: name -> title of `linkserver` in tables, seconds to the first byte, bytes per second of one
#: connection (0: no limit). In one region, S3 takes 20 to 50 ms and sends 50 to 100 MB/s.
LINKS = {
    "fast": ("S3-like server, no limits", 0.0, 0.0),
    "s3-like": ("S3-like link: 30 ms to the first byte, 80 MB/s per connection", 0.030, 80e6),
}
#: Targets of `benchmarks.transfers`, and their titles in tables.
TARGETS = {
    "nginx": "nginx, static files",
    "nginx-tls": "nginx with TLS",
    "s3-like": LINKS["s3-like"][0],
}
_PROFILE = "benchmark"
#: Ciphers of TLS 1.3 in the order of S3, which counts for all clients alike. In the order of the
#: clients, those in Go would get AES-128, and those with OpenSSL AES-256.
_CIPHERS = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"
_NGINX = """
daemon off;
{user}
worker_processes {workers};
pid {home}/nginx.pid;
error_log {home}/error.log warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    default_type application/x-tar;
    sendfile on;
    sendfile_max_chunk 2m;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_requests 1000000;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    server {{
        listen 127.0.0.1:{port} {tls} backlog=1024;
        ssl_certificate {home}/server.pem;
        ssl_certificate_key {home}/server.key;
        ssl_buffer_size 16k;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_prefer_server_ciphers on;
        ssl_ciphers ECDHE+AES128:ECDHE+AES256;
        ssl_conf_command Ciphersuites {ciphers};
        {source}
    }}
}}
"""


class UnavailableError(Exception):
    """A program that a target needs is not installed. The message says how to install it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    endpoint: str  # URL for S3 clients, with path-style addresses
    # variables from which clients find the endpoint, a profile and its credentials
    environment: Mapping[str, str] = field(default_factory=dict)
    authority: Path | None = None  # file of the certificate authority to trust; None without TLS
    #: shared number of downloads that began with an object's first byte; nginx does not count
    fetches: Any = field(default_factory=lambda: multiprocessing.Value("q"))

    def http_url(self, key: str) -> str:
        """Return the URL at which any HTTP client can read an object."""
        return f"{self.endpoint}/{BUCKET}/{quote(key)}"


def _environment(home: Path, endpoint: str, authority: Path | None = None) -> dict[str, str]:
    """Write a credentials file, and return the variables for clients of an endpoint."""
    credentials = home / "credentials"
    credentials.write_text(
        f"[{_PROFILE}]\naws_access_key_id = BENCHMARK\naws_secret_access_key = benchmark\n", "utf-8"
    )
    variables = {
        "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
        "AWS_PROFILE": _PROFILE,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ENDPOINT_URL": endpoint,
    }
    if authority is not None:
        names = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
        variables |= dict.fromkeys((*names, "RCLONE_CA_CERT"), str(authority))
    return variables


@contextlib.contextmanager
def target(name: str, root: Path, parent: Path) -> Iterator[Target]:
    """Run one of `TARGETS` over the buckets in ``root``, with its files below ``parent``.

    Raises `UnavailableError`.
    """
    with tempfile.TemporaryDirectory(prefix="shardcache-link-", dir=parent) as directory:
        home = Path(directory)
        with (
            link(root, home, name)
            if name in LINKS
            else _nginx(f"root {root};", home, tls=name == "nginx-tls")
        ) as running:
            yield running


@contextlib.contextmanager
def link(
    root: Path, home: Path, name: str, *, processes: int = 1, tls: bool = False
) -> Iterator[Target]:
    """Run one of `LINKS` over the buckets in ``root``, with its files in ``home``.

    With ``tls``, yield an nginx before the link.
    """
    _, delay, rate = LINKS[name]
    fetches, port = multiprocessing.Value("q"), 0
    with contextlib.ExitStack() as stack:
        for _ in range(processes):
            process = stack.enter_context(forked(serve, port, root, delay, rate, fetches))
            port = process.hear()
        endpoint = f"http://127.0.0.1:{port}"
        running = Target(endpoint, _environment(home, endpoint), fetches=fetches)
        if tls:
            # A new request on a kept connection would wait for the rate of the last one.
            source = f"location / {{ proxy_pass {endpoint}; proxy_buffering off; }}"
            running = stack.enter_context(_nginx(source, home, tls=True))
        yield running


def which(program: str) -> str | None:
    """Return the path of a program, also of one for administrators."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextlib.contextmanager
def _nginx(source: str, home: Path, *, tls: bool) -> Iterator[Target]:
    """Run nginx, with a directive that says where it finds the objects."""
    program = which("nginx")
    if program is None:
        raise UnavailableError("nginx is not installed (Debian: apt-get install nginx-light)")
    if shutil.which("openssl") is None:
        raise UnavailableError("the openssl command, which makes a certificate, is not installed")
    authority = _certificate(home)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    configuration, log = home / "nginx.conf", home / "error.log"
    text = _NGINX.format(
        home=home,
        source=source,
        port=port,
        ciphers=_CIPHERS,
        tls="ssl" if tls else "",
        workers=2 if tls else 1,  # one core encrypts less than the clients can receive
        user="user root;" if os.geteuid() == 0 else "",  # as which its workers run
    )
    configuration.write_text(text, "utf-8")
    process = subprocess.Popen(
        [program, "-p", str(home), "-e", str(log), "-c", str(configuration)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text("utf-8") if log.exists() else "no log"
                raise RuntimeError(f"nginx did not start: {text}")
            time.sleep(0.02)
        endpoint, trusted = f"http{'s' * tls}://127.0.0.1:{port}", authority if tls else None
        yield Target(endpoint, _environment(home, endpoint, trusted), trusted)
    finally:
        process.terminate()
        process.wait()


def _certificate(home: Path) -> Path:
    """Make a certificate for 127.0.0.1, and return the file of the authority that signed it.

    It is not self-signed, because some clients look for an authority in the chain.
    """
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    names = "-addext subjectAltName=IP:127.0.0.1,DNS:localhost -addext basicConstraints=CA:FALSE"
    for options in (
        "-subj /CN=benchmark -keyout authority.key -out authority.pem",
        f"-subj /CN=127.0.0.1 {names} -keyout server.key -out server.pem "
        "-CA authority.pem -CAkey authority.key",
    ):
        command = ["openssl", *new.split(), *options.split()]
        subprocess.run(command, cwd=home, check=True, capture_output=True)
    return home / "authority.pem"
