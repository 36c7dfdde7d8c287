"""Process ids and host names mean nothing: reused, equal, or not visible to others.

Containers on one node share a cache, and each has a pid namespace, and often the host name,
of its own or of another. Who lives is told by flock alone.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardcache.cli.demo import S3Server
from shardcache.layout import Layout
from tests.support.proxy import Proxy
from tests.support.storetools import children, wait_until
from tests.support.tars import make_tar
from tests.support.workers import Worker

ROOT = Path(__file__).resolve().parent.parent
DATA = make_tar(1, 600, 2000)
DIGEST = hashlib.sha256(DATA).hexdigest()

#: As a container runtime starts its init: the worker gets the pid 2 in every one of them.
#: (As pid 1 it could not stop itself: signals to init are dropped.)
CONTAINER = (
    *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
    *("sh", "-c", '"$0" "$@"; true'),
)


@functools.cache
def may_unshare() -> bool:
    try:
        done = subprocess.run([*CONTAINER, "true"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    if not may_unshare():
        pytest.skip("this user may not make namespaces (needs root and unshare of util-linux)")


@pytest.fixture
def url(s3: S3Server, bucket: str, s3_environment: dict[str, str], proxy: Proxy) -> str:
    s3.put(bucket, "a.tar", DATA)
    proxy.reset()
    return f"s3://{bucket}/a.tar"


def fetches(proxy: Proxy) -> int:
    return sum(traffic.object_fetches for traffic in proxy.summary().values())


def test_containers_with_equal_pids_share_one_fetch(url: str, tmp_path: Path, proxy: Proxy) -> None:
    workers = [Worker(prefix=CONTAINER, dir=tmp_path / "cache") for _ in range(4)]
    try:
        for worker in workers:
            worker.__enter__()
        host = os.uname().nodename
        assert [worker.ask("who") for worker in workers] == [[2, host]] * 4
        for worker in workers:
            worker.tell("read", url)
        assert [worker.hear()[0] for worker in workers] == [[DIGEST, True]] * 4
        assert fetches(proxy) == 1
        sessions = list((tmp_path / "cache/v1/sessions").glob("*.session"))
        assert len(sessions) == 4  # and nobody took another's for its own
    finally:
        for worker in workers:
            worker.__exit__()


def test_a_holder_of_another_namespace_is_waited_for_and_passed_by_like_any_other(
    url: str, tmp_path: Path, proxy: Proxy
) -> None:
    """To its neighbour, process 2 is itself; to the node, something of the kernel's."""
    stop = "before shardcache.fetch.job:Job.finish"
    with (
        Worker(prefix=CONTAINER, dir=tmp_path / "cache", stop_at=stop) as holder,
        Worker(prefix=CONTAINER, dir=tmp_path / "cache", stale_after=1) as neighbour,
        Worker(dir=tmp_path / "cache", stale_after=600, lock_timeout=1, strict=True) as outside,
    ):
        assert holder.ask("who")[0] == 2
        holder.tell("read", url)
        (stopped,) = wait_until(lambda: [p for p in below(holder.process.pid) if state(p) == "T"])
        answer = outside.ask("read", url)  # it neither takes it for dead nor fetches beside it
        assert answer["error"] == "LockTimeoutError" and "process 2 on" in answer["message"]
        assert fetches(proxy) == 1
        assert neighbour.ask("read", url) == [DIGEST, True]
        os.kill(stopped, signal.SIGCONT)
        assert holder.hear()[0] == [DIGEST, True]
    assert len(list(tmp_path.glob("cache/v1/objects/*/*/*"))) == 1
    assert os.listdir(Layout.of_root(tmp_path / "cache").partial) == []


def below(pid: int) -> set[int]:
    """All processes below another, as this namespace numbers them."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        return {each for child in children(pid) for each in {child, *below(child)}}
    return set()


def state(pid: int) -> str:
    """As /proc/<pid>/stat has it, or X for one that has just ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


#: Runs as init of a pid namespace, in which it may say which pid comes next.
REUSE = """
import json, subprocess, sys
from pathlib import Path
from tests.support.workers import Worker

directory, url = sys.argv[1:]
options = {"dir": directory, "stale_after": 3600, "lock_timeout": 20, "strict": True}
with Worker(stop_at="before shardcache.fetch.job:Job.finish", **options) as holder:
    pid = holder.process.pid
    holder.tell("read", url)
    holder.stopped()
# Killed, with its lock record and its partial left behind.
Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
stranger = subprocess.Popen(["sleep", "60"])
assert stranger.pid == pid, (stranger.pid, pid)
with Worker(**options) as successor:
    print(json.dumps(successor.ask("read", url)))
"""


def test_the_pid_of_a_dead_holder_may_belong_to_anybody(
    url: str, tmp_path: Path, proxy: Proxy
) -> None:
    """The dead holder is not taken for alive."""
    done = subprocess.run(
        [*CONTAINER[:5], sys.executable, "-c", REUSE, str(tmp_path / "cache"), url],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [DIGEST, True]
    # All bytes were there: the successor resumed, and asked the origin for none again.
    assert sum(t.body_bytes for t in proxy.summary().values()) == len(DATA)
