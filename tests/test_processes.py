"""Many processes on one node against a real server: economy, death, isolation."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcache import Cache
from shardcache.cli.demo import S3Server
from shardcache.layout import Layout
from shardcache.store.digest import BLOCK
from shardcache.store.partial import read_progress
from tests.support.proxy import Proxy
from tests.support.tars import make_tar

pytestmark = pytest.mark.usefixtures("s3_environment")

SHARD = make_tar(5, members=8, size=2 * BLOCK)  # 32 MiB
DIGEST = hashlib.sha256(SHARD).hexdigest()

READER = """
import hashlib, json, os, sys
import shardcache
options = json.loads(sys.argv[1])
with shardcache.Cache(min_free=0, **options) as cache:
    print("ready", flush=True)
    sys.stdin.readline()
    for url in sys.argv[2:]:
        with cache.open(url) as stream:
            digest = hashlib.sha256(stream.read()).hexdigest()
            local = not stream.name.startswith("s3://")
            print(json.dumps([url, digest, local]), flush=True)
"""


class Readers:
    """Processes that open shards when told to."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self, directory: Path, urls: list[str], environment: dict[str, str] | None = None, **options
    ) -> subprocess.Popen[str]:
        arguments = json.dumps({"dir": str(directory), **options})
        process = subprocess.Popen(
            [sys.executable, "-c", READER, arguments, *urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    @staticmethod
    def go(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    @staticmethod
    def results(process: subprocess.Popen[str]) -> list[list]:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def readers() -> Iterator[Readers]:
    found = Readers()
    yield found
    for process in found.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def wait_for(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to pass within a minute"
        time.sleep(0.01)


def progress(directory: Path) -> int:
    """Bytes written by the fetch in flight, if there is one."""
    partial = Layout.of_root(directory).partial
    names = os.listdir(partial) if partial.exists() else []
    found = [read_progress(partial / name) for name in names]
    return max((p.written for p in found if p), default=0)


@pytest.fixture
def url(s3: S3Server, bucket: str, proxy: Proxy) -> str:
    s3.put(bucket, "a.tar", SHARD)
    proxy.reset()
    return f"s3://{bucket}/a.tar"


def fetches(proxy: Proxy) -> int:
    return sum(traffic.object_fetches for traffic in proxy.summary().values())


@pytest.mark.locks_work
def test_eight_processes_and_four_cold_shards_cost_four_object_fetches(
    s3: S3Server, bucket: str, proxy: Proxy, tmp_path: Path, readers: Readers
) -> None:
    shards = {f"{n}.tar": make_tar(n, members=4, size=BLOCK) for n in range(4)}
    for name, data in shards.items():
        s3.put(bucket, name, data)
    proxy.reset()
    urls = [f"s3://{bucket}/{name}" for name in shards]
    started = [readers.start(tmp_path / "cache", urls) for _ in range(8)]
    for process in started:
        readers.go(process)
    expected = [
        [f"s3://{bucket}/{name}", hashlib.sha256(data).hexdigest(), True]
        for name, data in shards.items()
    ]
    for process in started:
        assert readers.results(process) == expected
    traffic = proxy.summary()
    assert {path: t.object_fetches for path, t in traffic.items()} == {
        f"{bucket}/{name}": 1 for name in shards
    }
    assert sum(t.body_bytes for t in traffic.values()) == sum(map(len, shards.values()))


@pytest.mark.locks_work
def test_killing_the_fetching_process_half_way_costs_the_others_little(
    url: str, proxy: Proxy, tmp_path: Path, readers: Readers
) -> None:
    victim = readers.start(tmp_path / "cache", [url])
    others = [readers.start(tmp_path / "cache", [url]) for _ in range(3)]
    proxy.pause(len(SHARD) // 4)  # of each part: half-way through both
    readers.go(victim)
    wait_for(lambda: progress(tmp_path / "cache") >= len(SHARD) // 2 - 4 * BLOCK)
    for process in others:
        readers.go(process)
    time.sleep(0.5)  # let them wait for the holder
    victim.kill()
    victim.wait()
    proxy.resume()
    for process in others:
        assert readers.results(process) == [[url, DIGEST, True]]
    received = sum(t.body_bytes for t in proxy.summary().values())
    assert received < 1.3 * len(SHARD)
    assert os.listdir(Layout.of_root(tmp_path / "cache").partial) == []


def test_a_stopped_holder_is_passed_by_and_does_no_harm_when_it_wakes(
    url: str, proxy: Proxy, tmp_path: Path, readers: Readers
) -> None:
    holder = readers.start(tmp_path / "cache", [url])
    other = readers.start(tmp_path / "cache", [url], stale_after=1)
    proxy.pause(len(SHARD) // 4)
    readers.go(holder)
    wait_for(lambda: progress(tmp_path / "cache") >= BLOCK)
    holder.send_signal(signal.SIGSTOP)
    proxy.resume()
    readers.go(other)
    assert readers.results(other) == [[url, DIGEST, True]]
    holder.send_signal(signal.SIGCONT)
    assert readers.results(holder) == [[url, DIGEST, True]]
    (entry,) = Cache(tmp_path / "cache").entries()
    assert hashlib.sha256(entry.data.read_bytes()).hexdigest() == DIGEST
    assert os.listdir(Layout.of_root(tmp_path / "cache").partial) == []


def rank_environment(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "SLURM_JOB_ID": "77"}


def test_ranks_apart_share_bytes_by_hard_link_and_do_not_wait(
    url: str, proxy: Proxy, tmp_path: Path, readers: Readers
) -> None:
    for rank in (0, 1):
        process = readers.start(tmp_path / "cache", [url], rank_environment(rank), isolation="rank")
        readers.go(process)
        assert readers.results(process) == [[url, DIGEST, True]]
    assert fetches(proxy) == 1
    entries = list(Cache(tmp_path / "cache").entries())
    assert {e.path.parents[3].name for e in entries} == {"77-0", "77-1"}
    assert len({e.data.stat().st_ino for e in entries}) == 1


@pytest.mark.locks_work
def test_ranks_of_one_job_share_a_namespace_of_their_own(
    url: str, proxy: Proxy, tmp_path: Path, readers: Readers
) -> None:
    started = [
        readers.start(tmp_path / "cache", [url], rank_environment(rank), isolation="job")
        for rank in (0, 1)
    ]
    for process in started:
        readers.go(process)
    for process in started:
        assert readers.results(process) == [[url, DIGEST, True]]
    assert fetches(proxy) == 1
    (entry,) = Cache(tmp_path / "cache").entries()
    assert entry.path.parents[3].name == "77"


def test_the_node_uses_what_an_isolated_rank_fetched(
    url: str, proxy: Proxy, tmp_path: Path, readers: Readers
) -> None:
    first = readers.start(tmp_path / "cache", [url], rank_environment(0), isolation="rank")
    readers.go(first)
    readers.results(first)
    second = readers.start(tmp_path / "cache", [url])
    readers.go(second)
    assert readers.results(second) == [[url, DIGEST, True]]
    assert fetches(proxy) == 1
