"""The main job, end to end, on an embedded S3 server.

    write shards -> prewarm half -> 2 ranks x 2 workers x 2 epochs -> what it cost

What came from the origin is counted outside the library, by a meter between its
processes and the server. Everything lives in one temporary directory and in
child processes that end with this one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardcache.cli.demoserver import S3Server
from shardcache.cli.meter import Meter
from shardcache.errors import ShardCacheError

__all__ = ["DemoReport", "Step", "run"]

SHARDS = 16
SAMPLES = 320
#: 320 samples of 100 kB and their tar headers: shards of 32 MB.
SAMPLE_BYTES = 100_000
RANKS = 2
WORKERS = 2
EPOCHS = 2
BUCKET = "demo"


@dataclass(frozen=True, slots=True)
class Step:
    """One row of the table.

    Attributes:
        name: what was done.
        object_fetches: shards that came over the network, by first byte.
        most_fetches: of any one shard.
        origin_bytes: bytes that came over the network.
        expected_bytes: bytes that should have.
        samples: samples seen, or None where nothing was read.
        complete: whether every sample was seen exactly once.
        seconds: wall time.
    """

    name: str
    object_fetches: int
    most_fetches: int
    origin_bytes: int
    expected_bytes: int
    samples: int | None
    complete: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What happened.

    Attributes:
        steps: in order.
        shards: number of shards.
        shard_bytes: bytes of one.
        fetches_per_shard: (fewest, most) object fetches of any shard over the whole run.
        directory: where everything was kept, or None when it was removed.
    """

    steps: tuple[Step, ...]
    shards: int
    shard_bytes: int
    fetches_per_shard: tuple[int, int]
    directory: Path | None

    @property
    def ok(self) -> bool:
        """Whether the library kept its promise."""
        return self.fetches_per_shard == (1, 1) and all(
            step.complete and step.origin_bytes == step.expected_bytes for step in self.steps
        )


def run(
    *, directory: Path | None = None, keep: bool = False, say: Callable[[str], None]
) -> DemoReport:
    """Run the demo; takes some 10 to 30 seconds and about 1.5 GB of disk.

    Args:
        directory: where to make its temporary directory; the system's by default.
        keep: leave shards and cache behind and name them in the report.
        say: told what goes on, a line each.

    Raises:
        ConfigError: the embedded server is not installed.
        ShardCacheError: a child process failed.
        OSError: no room.
    """
    with contextlib.ExitStack() as stack:
        home = Path(tempfile.mkdtemp(prefix="shardcache-demo-", dir=directory))
        if not keep:
            stack.callback(shutil.rmtree, home, ignore_errors=True)
        say(f"starting an S3 server in {home}")
        server = stack.enter_context(S3Server(directory=home))
        shard_bytes = _write_shards(server, say)
        meter = stack.enter_context(Meter(server.endpoint_url))
        environment = {
            **os.environ,
            **server.environment(),
            "AWS_ENDPOINT_URL_S3": meter.endpoint_url,
            # The demo must show the same on a disk that is nearly full.
            "SHARDCACHE_MIN_FREE": "0",
        }
        children = _Children()
        stack.callback(children.end)
        job = _Job(home / "cache", environment, meter, shard_bytes, children)
        steps = [job.prewarm(say)]
        workers = job.workers()
        for epoch in range(1, EPOCHS + 1):
            steps.append(job.epoch(epoch, workers, say))
        counts = [t.object_fetches for t in meter.summary().values()]
        return DemoReport(
            tuple(steps),
            SHARDS,
            shard_bytes,
            (min(counts, default=0) if len(counts) == SHARDS else 0, max(counts, default=0)),
            home if keep else None,
        )


def _write_shards(server: S3Server, say: Callable[[str], None]) -> int:
    server.create_bucket(BUCKET)
    say(f"writing {SHARDS} shards of {SAMPLES} samples")
    sizes = set()
    # Two uploads at a time: more only wait for the server's disk.
    with ThreadPoolExecutor(2) as pool:
        for size in pool.map(lambda number: _write_shard(server, number), range(SHARDS)):
            sizes.add(size)
    (size,) = sizes
    return size


def _write_shard(server: S3Server, number: int) -> int:
    noise = random.Random(number).randbytes(SAMPLE_BYTES + SAMPLES)  # noqa: S311 - the same again
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for sample in range(SAMPLES):
            info = tarfile.TarInfo(f"{number:04d}-{sample:05d}.bin")
            info.size = SAMPLE_BYTES
            archive.addfile(info, io.BytesIO(noise[sample : sample + SAMPLE_BYTES]))
    data = buffer.getvalue()
    server.put(BUCKET, f"train-{number:04d}.tar", data)
    return len(data)


def _keys() -> set[str]:
    return {f"{n:04d}-{sample:05d}" for n in range(SHARDS) for sample in range(SAMPLES)}


class _Children:
    """The demo's child processes, none of which outlives `end`.

    They are started by a thread of their own: an interrupt reaches the main
    thread only, so it cannot fall between the start of a process and our
    knowing of it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        # Now: an executor does not know of a thread whose start was interrupted.
        self._pool.submit(int).result()
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start a process; standard input and both outputs are pipes."""
        return self._pool.submit(self._launch, command, environment).result()

    def _launch(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # An interrupt from the terminal is ours to pass on.
            start_new_session=True,
        )
        self._started.append(process)  # here, where no interrupt can come before it
        return process

    def end(self) -> None:
        """Kill and reap every one of them."""
        self._pool.shutdown()
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # unsent input has no reader any more
                        pipe.close()


class _Job:
    """The job's processes, and what they cost."""

    def __init__(
        self,
        cache: Path,
        environment: dict[str, str],
        meter: Meter,
        shard_bytes: int,
        children: _Children,
    ) -> None:
        self._children = children
        self._cache = cache
        self._environment = environment
        self._meter = meter
        self._shard_bytes = shard_bytes
        self._fetches: dict[str, int] = {}
        self._bytes = 0

    def _cost(self) -> tuple[int, int, int]:
        """(object fetches, most of any one shard, bytes) since the last call."""
        traffic = self._meter.summary()
        fetches = {path: t.object_fetches for path, t in traffic.items()}
        new = [count - self._fetches.get(path, 0) for path, count in fetches.items()]
        received = sum(t.body_bytes for t in traffic.values())
        cost = sum(new), max(new, default=0), received - self._bytes
        self._fetches, self._bytes = fetches, received
        return cost

    def prewarm(self, say: Callable[[str], None]) -> Step:
        """Fill half of the cache with the command line."""
        half = SHARDS // 2
        spec = f"s3://{BUCKET}/train-{{0000..{half - 1:04d}}}.tar"
        say(f"shardcache prewarm '{spec}'")
        begun = time.monotonic()
        command = [sys.executable, "-m", "shardcache", "--dir", str(self._cache), "-q"]
        process = self._children.start([*command, "prewarm", spec], self._environment)
        _, errors = process.communicate()
        if process.returncode != 0:
            raise ShardCacheError(
                f"prewarm ended with exit code {process.returncode}: {errors.strip()}"
            )
        seconds = time.monotonic() - begun
        fetches, most, received = self._cost()
        expected = half * self._shard_bytes
        whole = fetches == half
        return Step(
            f"prewarm {half} shards", fetches, most, received, expected, None, whole, seconds
        )

    def workers(self) -> list[subprocess.Popen[str]]:
        """Start all workers of all ranks."""
        spec = f"s3://{BUCKET}/train-{{0000..{SHARDS - 1:04d}}}.tar"
        command = [sys.executable, "-m", "shardcache.cli.demoworker", spec, str(self._cache)]
        started = []
        for rank in range(RANKS):
            for worker in range(WORKERS):
                place = {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "LOCAL_RANK": str(rank),
                    "WORKER": str(worker),
                    "NUM_WORKERS": str(WORKERS),
                }
                started.append(self._children.start(command, {**self._environment, **place}))
        for process in started:
            if _answer(process) != "ready":
                raise ShardCacheError("a worker did not get ready")
        return started

    def epoch(
        self, number: int, workers: list[subprocess.Popen[str]], say: Callable[[str], None]
    ) -> Step:
        """Let every worker run one epoch at the same time."""
        say(f"epoch {number}: {RANKS} ranks x {WORKERS} workers")
        begun = time.monotonic()
        for process in workers:
            assert process.stdin is not None
            process.stdin.write("epoch\n")
            process.stdin.flush()
        seen: list[str] = []
        for process in workers:
            seen += json.loads(_answer(process))
        seconds = time.monotonic() - begun
        fetches, most, received = self._cost()
        expected = (SHARDS - SHARDS // 2) * self._shard_bytes if number == 1 else 0
        complete = len(seen) == SHARDS * SAMPLES and set(seen) == _keys()
        return Step(
            f"epoch {number}", fetches, most, received, expected, len(seen), complete, seconds
        )


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        errors = process.stderr.read().strip()
        raise ShardCacheError(
            f"a worker of the demo ended with exit code {process.wait()}: {errors}"
        )
    return line.strip()
