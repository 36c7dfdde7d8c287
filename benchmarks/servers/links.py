"""What clients fetch from: S3-shaped targets that outrun them, and links as slow as S3's.

| target | what it is |
|---|---|
| nginx, nginx-tls | static files: no signatures, no listing; its own authority for TLS |
| seaweedfs | a real S3 server, which shares the machine's cores with the client |
| fast | the S3-like server as fast as it goes |
| s3-like | the same with 30 ms to the first byte and 80 MB/s per connection |

Each runs in processes of its own on 127.0.0.1 while its ``with`` block does, and serves the
objects below a directory of buckets. One that cannot be run raises `UnavailableError` with
the reason.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from benchmarks.buckets import BUCKET
from benchmarks.servers import nginx as nginx_server
from shardcache.cli.demo import S3Server
from shardcache.errors import ConfigError

__all__ = ["TARGETS", "Target", "UnavailableError", "link", "target"]

ROOT = Path(__file__).resolve().parents[2]
#: Seconds to the first byte and bytes per second of one connection, as S3 in one region has
#: them: 20 to 50 ms, 50 to 100 MB/s.
S3_DELAY = 0.030
S3_RATE = 80e6
#: Without an environment of its own a target takes any signature.
_ANYBODY = {
    "AWS_ACCESS_KEY_ID": "BENCHMARK",
    "AWS_SECRET_ACCESS_KEY": "benchmark",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
#: Long enough for any run.
_PRESIGNED_SECONDS = 7 * 24 * 3600


class UnavailableError(Exception):
    """A target or a peer cannot be run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running target.

    Attributes:
        name: which.
        endpoint: URL for S3 clients; path-style addresses.
        environment: variables that lead clients there, credentials included.
        authority: file of the authority to trust, or None without TLS.
        presigned: key to URL for clients that cannot sign; empty where nobody checks.
        log: file with a line per answer, where the target keeps one.
    """

    name: str
    endpoint: str
    environment: Mapping[str, str] = field(default_factory=dict)
    authority: Path | None = None
    presigned: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None

    def http_url(self, key: str) -> str:
        """A URL that any HTTP client can read the object by."""
        return self.presigned.get(key) or f"{self.endpoint}/{BUCKET}/{quote(key)}"

    def object_fetches(self) -> int:
        """How often the first byte of an object was sent, by the log."""
        assert self.log is not None
        count = 0
        for line in self.log.read_text("utf-8").splitlines():
            method, status, start, stop, path = line.split(" ", 4)
            is_object = method == "GET" and status in ("200", "206") and "/" in path.rstrip("/")
            count += is_object and start == "0" != stop
        return count


def _variables(endpoint: str, authority: Path | None = None) -> dict[str, str]:
    values = {**_ANYBODY, "AWS_ENDPOINT_URL_S3": endpoint, "AWS_ENDPOINT_URL": endpoint}
    if authority is not None:
        names = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE")
        values |= dict.fromkeys((*names, "RCLONE_CA_CERT"), str(authority))
    return values


@contextlib.contextmanager
def link(
    root: Path,
    home: Path,
    *,
    name: str = "fast",
    delay: float = 0.0,
    rate: float = 0.0,
    processes: int = 1,
    log: bool = False,
) -> Iterator[Target]:
    """The S3-like server; see `benchmarks.servers.linkserver`. It ends with its standard input."""
    written = home / f"{name}.log"
    command = [sys.executable, "-m", "benchmarks.servers.linkserver", "--root", str(root)]
    command += ["--delay", f"{delay}", "--rate", f"{rate}", "--processes", str(processes)]
    if log:
        written.touch()
        command += ["--log", str(written)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        port = process.stdout.readline()
        if not port:
            raise RuntimeError(f"the link did not come up: exit code {process.wait()}")
        endpoint = f"http://127.0.0.1:{int(port)}"
        try:
            yield Target(name, endpoint, _variables(endpoint), log=written if log else None)
        finally:
            process.stdin.close()


@contextlib.contextmanager
def _nginx(root: Path, home: Path, *, tls: bool = False) -> Iterator[Target]:
    reason = nginx_server.unavailable()
    if reason is not None:
        raise UnavailableError(reason)
    with nginx_server.nginx(root, home) as running:
        if tls:
            variables = _variables(running.tls, running.authority)
            yield Target("nginx-tls", running.tls, variables, running.authority)
        else:
            yield Target("nginx", running.plain, _variables(running.plain))


@contextlib.contextmanager
def _seaweedfs(root: Path, home: Path) -> Iterator[Target]:
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(S3Server(directory=home))
        except ConfigError as exn:
            raise UnavailableError(str(exn)) from None
        server.create_bucket(BUCKET)
        client = server.client()
        stack.callback(client.close)
        presigned = {}
        base = root / BUCKET
        for path in sorted(p for p in base.rglob("*") if p.is_file()):
            key = str(path.relative_to(base))
            with path.open("rb") as file:
                client.put_object(Bucket=BUCKET, Key=key, Body=file)
            presigned[key] = client.generate_presigned_url(
                "get_object", Params={"Bucket": BUCKET, "Key": key}, ExpiresIn=_PRESIGNED_SECONDS
            )
        variables = {**_variables(server.endpoint_url), **server.environment()}
        yield Target("seaweedfs", server.endpoint_url, variables, presigned=presigned)


Opener = Callable[[Path, Path], "contextlib.AbstractContextManager[Target]"]

#: name -> (title in tables, how it is run).
TARGETS: dict[str, tuple[str, Opener]] = {
    "nginx": ("nginx, static files", _nginx),
    "nginx-tls": ("nginx with TLS", lambda root, home: _nginx(root, home, tls=True)),
    "seaweedfs": ("SeaweedFS on the same cores", _seaweedfs),
    "fast": (
        "S3-like server, no limits",
        lambda root, home: link(root, home, name="fast", processes=2),
    ),
    "s3-like": (
        f"S3-like link: {S3_DELAY * 1000:.0f} ms to the first byte, "
        f"{S3_RATE / 1e6:.0f} MB/s per connection",
        lambda root, home: link(root, home, name="s3-like", delay=S3_DELAY, rate=S3_RATE),
    ),
}


@contextlib.contextmanager
def target(name: str, root: Path, parent: Path | None = None) -> Iterator[Target]:
    """Run a target over the buckets in ``root``.

    Args:
        name: of `TARGETS`.
        root: directory of buckets.
        parent: where its own directory is made.

    Raises:
        UnavailableError: it cannot be run here.
    """
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="shardcache-link-", dir=parent)
        home = Path(stack.enter_context(temporary))
        yield stack.enter_context(TARGETS[name][1](root, home))
