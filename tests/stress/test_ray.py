"""``prewarm --ray`` on a real Ray cluster of three raylets, each with its own cache."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from shardcache.layout import Layout
from shardcache.store.partial import in_flight
from tests.support.proxy import Proxy
from tests.support.storetools import PATIENCE, forked, wait_until
from tests.support.tars import make_tar

pytest.importorskip("ray", reason="pip install 'shardcache[ray]'")
psutil = pytest.importorskip("psutil")  # Ray brings one
pytestmark = pytest.mark.timeout(1200)  # a busy machine starts raylets slowly

NODES = ["node-a", "node-b", "node-c"]
SMALL, BIG = make_tar(1, 20), make_tar(2, 60, 70_000)
FILES = ["big-0.tar", "big-1.tar", "small-0.tar", "small-1.tar"]
#: Bytes of a body that the proxy passes: a small shard, or two MiB of a big one.
HANGS_AFTER = 2_500_000
#: The cluster declares a silent node dead after two seconds instead of some twenty.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_initial_delay_ms": "500",
}


def kill(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def serve(parent, directory):
    """Run a Ray cluster in its own process: Ray's client has threads, and the tests fork."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {**_SETTINGS, "RAY_TMPDIR": directory}
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(silence, fd)
    from ray.cluster_utils import Cluster as Raylets

    raylets, nodes = Raylets(shutdown_at_exit=True), {}
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    while order := parent.hear():
        name, environment = order
        if environment:
            nodes[name] = raylets.add_node(node_name=name, env_vars=environment, **options)
        else:
            node = nodes.pop(name)
            process = node.all_processes["raylet"][0].process
            kill([process, *psutil.Process(process.pid).children(recursive=True)])
            process.wait()
            raylets.worker_nodes.discard(node)
            raylets.wait_for_nodes(PATIENCE)
        parent.say(raylets.address)
    raylets.shutdown()
    parent.say(None)


class Cluster:
    """The raylets, their caches, and the S3 server behind the proxy."""

    def __init__(self, raylets, s3, proxy, root):
        self._raylets, self._s3, self.proxy, self.root = raylets, s3, proxy, root

    def add(self, name):
        """Start a raylet."""
        environment = self._s3.environment() | {"AWS_ENDPOINT_URL_S3": self.proxy.url}
        environment |= {"SHARDCACHE_DIR": str(self.root / name), "SHARDCACHE_MIN_FREE": "0"}
        self._address = self._raylets.ask((name, environment))

    def kill(self, name):
        """Kill a raylet and its children, and wait until the cluster has noticed."""
        self._raylets.ask((name, None))

    def cached(self, name, bucket):
        """Return the names of the shards of a bucket that a node has published."""
        urls = [
            json.loads(path.read_text())["url"]
            for path in (self.root / name).glob("v1/objects/*/*/*/meta.json")
        ]
        return sorted(url.rpartition("/")[2] for url in urls if url.startswith(f"s3://{bucket}/"))

    def under_way(self, name):
        """Return the bytes on disk of each shard that a node is downloading."""
        found = in_flight(Layout.of_root(self.root / name))
        return [each.occupied for each in found if each.live]

    def fetches(self, start):
        """Return the paths of the objects downloaded since request ``start``."""
        return [r.path for r in self.proxy.requests()[start:] if r.is_object_fetch]

    def prewarm(self, *arguments):
        """Start the command, without a cache and credentials."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        return subprocess.Popen(
            [sys.executable, "-m", "shardcache", "prewarm", "--ray", *arguments],
            env={**environment, "RAY_ADDRESS": self._address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def end(command):
    out, err = command.communicate(timeout=5 * PATIENCE)
    return command.returncode, out, err


def nodes_in(out):
    return json.loads(out)["summary"]["nodes"]


def put(s3, bucket, count):
    """Store small shards; returns the names."""
    names = [f"{number}.tar" for number in range(count)]
    for number, name in enumerate(names):
        s3.put(bucket, name, make_tar(number, 20))
    return names


@pytest.fixture(scope="module")
def cluster(s3, tmp_path_factory):
    # A short path: those of sockets below it have at most 107 bytes.
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    with Proxy(s3) as proxy, forked(serve, directory) as raylets:
        found = Cluster(raylets, s3, proxy, tmp_path_factory.mktemp("nodes"))
        for name in NODES:
            found.add(name)
        yield found
        proxy.resume()
        started = psutil.Process(raylets.pid).children(recursive=True)
        raylets.ask(None)
        kill(started)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def spec(cluster, s3, bucket):
    """The spec of two small shards, and two big ones whose downloads hang."""
    for name in FILES:
        s3.put(bucket, name, SMALL if name.startswith("small") else BIG)
    cluster.proxy.pause(after=HANGS_AFTER)
    yield f"s3://{bucket}/{{small,big}}-{{0..1}}.tar"
    cluster.proxy.resume()


def half_done(cluster, bucket):
    """Return whether all nodes have published the small shards and written parts of the others."""
    return all(
        cluster.cached(name, bucket) == FILES[2:] and sum(cluster.under_way(name)) >= 1 << 20
        for name in NODES
    )


def test_one_command_fills_the_cache_of_every_node(cluster, s3, bucket):
    names = put(s3, bucket, 4)
    start = len(cluster.proxy.requests())
    code, out, err = end(cluster.prewarm(f"s3://{bucket}/{{0..3}}.tar", "--no-progress"))
    assert (code, err) == (0, "")
    assert out.startswith("3 nodes: node-a, node-b, node-c\n")
    for node in NODES:
        assert f"{node}  Need 4 shards" in out
        assert f"{node}  Warmed 4 of 4 shards" in out
        assert cluster.cached(node, bucket) == names
    assert out.splitlines()[-1].startswith("Warmed 3 of 3 nodes in ")
    assert sorted(cluster.fetches(start)) == sorted(f"{bucket}/{name}" for name in names * 3)


def test_each_node_gets_the_shards_of_its_ranks(cluster, s3, bucket):
    names = put(s3, bucket, 6)
    command = cluster.prewarm(f"s3://{bucket}/{{0..5}}.tar", "--shard-by-node", "--json")
    code, out, err = end(command)
    assert code == 0, err
    for name, node in nodes_in(out).items():
        assert cluster.cached(name, bucket) == names[node["number"] :: 3]


def test_a_killed_node_is_named_and_the_others_complete(cluster, spec, bucket):
    command = cluster.prewarm(spec, "--json")
    wait_until(lambda: half_done(cluster, bucket))
    cluster.kill("node-c")
    cluster.proxy.resume()
    code, out, err = end(command)
    assert code == 3
    nodes = nodes_in(out)
    assert [name for name in NODES if nodes[name]["lost"]] == ["node-c"]
    assert "lost  node-c: the node died" in err
    assert cluster.cached("node-a", bucket) == cluster.cached("node-b", bucket) == FILES
    assert cluster.cached("node-c", bucket) == FILES[2:]

    cluster.add("node-c")
    start = len(cluster.proxy.requests())
    code, out, err = end(cluster.prewarm(spec, "--json"))
    assert code == 0, err
    assert [node["cached"] for node in nodes_in(out).values()] == [4, 4, 2]
    assert cluster.cached("node-c", bucket) == FILES
    assert cluster.fetches(start) == []  # node-c resumed what it had of the big ones


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_all_nodes_stop_when_the_command_ends(cluster, spec, bucket, number, code):
    command = cluster.prewarm(spec, "--json")
    wait_until(lambda: half_done(cluster, bucket))
    assert all(cluster.under_way(name) for name in NODES)
    command.send_signal(number)
    ended, out, err = end(command)
    assert ended == code, err
    if number != signal.SIGKILL:
        assert all(node["interrupted"] for node in nodes_in(out).values())
    wait_until(lambda: not any(cluster.under_way(name) for name in NODES))
    for name in NODES:
        assert cluster.cached(name, bucket) == FILES[2:]
