"""nginx with a configuration of its own, serving a directory of buckets with and without TLS.

It is the system's program (Debian: nginx-light) run as a child process on ports of 127.0.0.1,
with its configuration, its logs and its temporary files in a directory of this run's. It knows
neither buckets nor signatures: a path is a path, which is enough for GET, HEAD, Range and
If-Match. It lists nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Nginx", "certificate", "free_port", "nginx", "unavailable"]

_READY_SECONDS = 20.0
_POLL_SECONDS = 0.02

_CONFIGURATION = """
daemon off;
master_process off;
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
        listen 127.0.0.1:{plain} backlog=1024;
        listen 127.0.0.1:{tls} ssl backlog=1024;
        ssl_certificate {certificate};
        ssl_certificate_key {key};
        ssl_buffer_size 16k;
        root {root};
    }}
}}
"""


@dataclass(frozen=True, slots=True)
class Nginx:
    """A running nginx.

    Attributes:
        plain: its URL without TLS.
        tls: its URL with TLS.
        authority: file of the certificate that signs its own.
    """

    plain: str
    tls: str
    authority: Path


def _program() -> str | None:
    # Debian keeps it where only root's PATH leads.
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def unavailable() -> str | None:
    """Why nginx cannot be run, or None."""
    if _program() is None:
        return "nginx is not installed (Debian: apt-get install nginx-light)"
    if shutil.which("openssl") is None:
        return "nginx needs a certificate, and the openssl command is not installed"
    return None


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificate(home: Path) -> tuple[Path, Path, Path]:
    """A certificate for 127.0.0.1: the authority's, the server's, the server's key.

    Signed by an authority of its own, as clients that look for one in a chain want it.
    """
    authority, authority_key = home / "authority.pem", home / "authority.key"
    server, key, request = home / "server.pem", home / "server.key", home / "server.csr"
    names = home / "names.ext"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n", "utf-8")
    fresh = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    issue = ["x509", "-req", "-in", str(request), "-CA", str(authority)]
    issue += ["-CAkey", str(authority_key), "-CAcreateserial", "-days", "2"]
    itself = ["req", "-x509", *fresh, "-days", "2", "-subj", "/CN=benchmark authority"]
    for command in (
        [*itself, "-keyout", str(authority_key), "-out", str(authority)],
        ["req", *fresh, "-subj", "/CN=127.0.0.1", "-keyout", str(key), "-out", str(request)],
        [*issue, "-extfile", str(names), "-out", str(server)],
    ):
        subprocess.run(["openssl", *command], check=True, capture_output=True)
    return authority, server, key


@contextlib.contextmanager
def nginx(root: Path, home: Path) -> Iterator[Nginx]:
    """Run nginx over the buckets in ``root``.

    Args:
        root: directory of buckets.
        home: an empty directory for what it writes.

    Raises:
        RuntimeError: it did not come up; with its log.
    """
    program = _program()
    assert program is not None
    authority, server, key = certificate(home)
    plain, tls = free_port(), free_port()
    configuration = home / "nginx.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            home=home, root=root, plain=plain, tls=tls, certificate=server, key=key
        ),
        "utf-8",
    )
    process = subprocess.Popen(
        [program, "-p", str(home), "-e", str(home / "error.log"), "-c", str(configuration)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", "")},
    )
    try:
        _wait(process, (plain, tls), home)
        yield Nginx(f"http://127.0.0.1:{plain}", f"https://127.0.0.1:{tls}", authority)
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], ports: tuple[int, ...], home: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = home / "error.log"
                    text = said.read_text("utf-8") if said.exists() else "no log"
                    raise RuntimeError(f"nginx did not come up: {text}") from None
                time.sleep(_POLL_SECONDS)
