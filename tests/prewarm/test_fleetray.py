"""``prewarm --nodes ray`` on a real Ray cluster of three node processes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.prewarm.test_fleet import ended, is_running
from tests.support.jsontools import Seen
from tests.support.proxy import Proxy
from tests.support.raycluster import RayCluster
from tests.support.storetools import PATIENCE, wait_until
from tests.support.tars import make_tar

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed: pip install 'shardcache[ray]'",
    ),
    pytest.mark.timeout(400),  # a machine that does many things starts raylets slowly
]

NODES = ["node-a", "node-b", "node-c"]
SMALL, BIG = make_tar(1, 20), make_tar(2, 3000, 700)
#: More than the small shards have, less than the big ones; on disk are whole MiB of it.
HANGS_AFTER = 2_500_000


class Site:
    """The cluster, its caches, and the server with a proxy in front."""

    def __init__(self, cluster, s3, proxy, root):
        self.cluster, self.s3, self.proxy, self.root = cluster, s3, proxy, root

    def add(self, name):
        self.cluster.add(
            name,
            {
                **self.s3.environment(),
                "AWS_ENDPOINT_URL_S3": self.proxy.endpoint_url,
                "AWS_EC2_METADATA_DISABLED": "true",
                "SHARDCACHE_DIR": str(self.root / name),
                "SHARDCACHE_MIN_FREE": "0",
            },
        )

    def cached(self, name, bucket):
        """Shards of a bucket that a node has, by what it wrote of them itself."""
        found = []
        for path in (self.root / name).glob("v1/objects/*/*/*/meta.json"):
            url = json.loads(path.read_text())["url"]
            if url.startswith(f"s3://{bucket}/"):
                found.append(url.rpartition("/")[2])
        return sorted(found)

    def objects(self, start):
        """Requests for objects from number ``start`` on."""
        found = self.proxy.requests()[start:]
        return [request for request in found if request.method == "GET" and request.reads_object]


@pytest.fixture(scope="module")
def site(s3, tmp_path_factory):
    root = tmp_path_factory.mktemp("nodes")
    with Proxy(s3.endpoint_url) as proxy, RayCluster() as cluster:
        found = Site(cluster, s3, proxy, root)
        for name in NODES:
            found.add(name)
        yield found
        proxy.resume()


class Prewarm:
    """The command, on a machine that has neither a cache nor credentials of its own."""

    def __init__(self, site, *arguments, form="jsonl"):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardcache", "--format", form, "prewarm", *arguments,
             "--nodes", "ray", "--ray-address", site.cluster.address],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        self.lines = []
        self.seen = Seen("prewarm-nodes")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.process.kill()
        self.process.communicate()

    def until(self, condition):
        """Read lines until all nodes have had one for which this is true."""
        had = set()
        while had != set(NODES):
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            self.lines += self.seen.lines(line)
            if condition(self.lines[-1]):
                had.add(self.lines[-1]["node"])

    def pids(self):
        return {line["node"]: line["pid"] for line in self.lines if line["type"] == "node"}

    def end(self):
        out, err = self.process.communicate(timeout=2 * PATIENCE)
        return self.process.returncode, out, err

    def summary(self):
        code, out, err = self.end()
        assert out, err
        return code, self.seen.lines(out)[-1], err


def test_one_command_prewarms_the_caches_of_all_nodes(site, s3, bucket):
    for number in range(4):
        s3.put(bucket, f"{number}.tar", make_tar(number, 20))
    start = len(site.proxy.requests())
    with Prewarm(site, f"s3://{bucket}/{{0..3}}.tar", "--no-progress", form="human") as command:
        code, out, err = command.end()
    assert (code, err) == (0, "")
    first, *_, last = out.splitlines()
    assert first == f"Prewarming 3 nodes of Ray {site.cluster.address}: node-a, node-b, node-c"
    for name in NODES:
        assert f"{name}  Need 4 shards" in out
        assert f"{name}  Warmed 4 of 4 shards" in out
        assert site.cached(name, bucket) == [f"{number}.tar" for number in range(4)]
    assert last.startswith("Warmed 3 of 3 nodes: 12 shards ")
    fetches = [request for request in site.objects(start) if request.is_object_fetch]
    assert len(fetches) == 12


def test_nodes_have_the_shards_of_their_ranks_in_the_order_that_was_given(site, s3, bucket):
    for number in range(4):
        s3.put(bucket, f"{number}.tar", make_tar(number, 20))
    with Prewarm(
        site, f"s3://{bucket}/{{0..3}}.tar", "--shard-by-node", "--ray-nodes", "node-c,node-a"
    ) as command:
        code, summary, _ = command.summary()
    assert code == 0
    assert [(name, node["number"]) for name, node in summary["nodes"].items()] == [
        ("node-c", 0),
        ("node-a", 1),
    ]
    assert site.cached("node-c", bucket) == ["0.tar", "2.tar"]
    assert site.cached("node-a", bucket) == ["1.tar", "3.tar"]
    assert site.cached("node-b", bucket) == []


@pytest.fixture
def slow(site, s3, bucket):
    """Two small shards that come at once, and two big ones that hang; their specification."""
    for name, content in (("small", SMALL), ("big", BIG)):
        for number in range(2):
            s3.put(bucket, f"{name}-{number}.tar", content)
    site.proxy.pause(after=HANGS_AFTER)
    yield f"s3://{bucket}/{{small,big}}-{{0..1}}.tar"
    site.proxy.resume()


def half_done(line):
    return line["type"] == "progress" and line["done"] == 2 and line["done_bytes"] > HANGS_AFTER


def test_an_interrupt_ends_the_work_on_all_nodes(site, slow):
    with Prewarm(site, slow) as command:
        command.until(half_done)
        pids = command.pids()
        command.process.send_signal(signal.SIGINT)
        code, summary, _ = command.summary()
        assert (code, ended(summary)) == (130, {"interrupted": 3})
        assert all(node["fetched"] == 2 for node in summary["nodes"].values())
        assert not any(is_running(pid) for pid in pids.values())


def test_nothing_outlives_a_command_that_is_killed(site, slow):
    with Prewarm(site, slow) as command:
        command.until(half_done)
        command.process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in command.pids().values()))


def test_a_node_that_dies_is_named_and_what_it_missed_is_done_by_the_next_run(site, slow, bucket):
    names = ["big-0.tar", "big-1.tar", "small-0.tar", "small-1.tar"]
    start = len(site.proxy.requests())
    with Prewarm(site, slow) as command:
        command.until(half_done)
        site.cluster.kill("node-c")
        site.proxy.resume()
        code, summary, err = command.summary()
    assert code == 3
    assert {name: node["outcome"] for name, node in summary["nodes"].items()} == {
        "node-a": "done",
        "node-b": "done",
        "node-c": "lost",
    }
    assert summary["nodes"]["node-c"]["in_cache"] == 2
    assert "lost  node-c: the node died" in err
    assert site.cached("node-a", bucket) == site.cached("node-b", bucket) == names
    assert site.cached("node-c", bucket) == ["small-0.tar", "small-1.tar"]

    site.add("node-c")
    again = len(site.proxy.requests())
    with Prewarm(site, slow) as command:
        code, summary, _ = command.summary()
    assert (code, ended(summary)) == (0, {"done": 3})
    assert (summary["cached"], summary["fetched"]) == (10, 2)
    assert site.cached("node-c", bucket) == names
    # Only the two that were cut short, and of those only what was not on disk.
    missing = site.objects(again)
    assert {request.path for request in missing} == {f"{bucket}/big-0.tar", f"{bucket}/big-1.tar"}
    assert not any(request.is_object_fetch for request in missing)
    assert sum(request.body_bytes for request in missing) < 2 * (len(BIG) - (1 << 20))
    assert sum(request.is_object_fetch for request in site.objects(start)) == 12
