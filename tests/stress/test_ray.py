"""``prewarm --ray`` on a real Ray cluster of three raylets, each with its own cache."""

import contextlib
import json
import os
import shutil
import signal
import tempfile

import pytest

from shardcache.layout import Layout
from shardcache.store.partial import in_flight
from tests.support.clitools import Command
from tests.support.proxy import Proxy
from tests.support.storetools import BLOCK, PATIENCE, forked, wait_until
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
SETTINGS = {
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
    os.environ |= {**SETTINGS, "RAY_TMPDIR": directory}
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

    def prewarm(self, *arguments):
        """Start the command, without a cache and credentials."""
        return Command(
            *("prewarm", "--ray", *arguments),
            directory="",
            environment={"RAY_ADDRESS": self._address},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


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
        cluster.cached(name, bucket) == FILES[2:]
        and [size >= BLOCK for size in cluster.under_way(name)] == [True] * 2
        for name in NODES
    )


@pytest.mark.parametrize("split", [False, True])
def test_one_command_fills_the_cache_of_every_node(cluster, s3, bucket, split):
    names = [f"{number}.tar" for number in range(6)]
    for name in names:
        s3.put(bucket, name, SMALL)
    start = len(cluster.proxy.requests())
    shares = {node: names[n::3] if split else names for n, node in enumerate(NODES)}
    options = ["--no-progress", *["--shard-by-node"] * split]
    with cluster.prewarm(f"s3://{bucket}/{{0..5}}.tar", *options) as command:
        code, out, err = command.end()
    assert (code, err) == (0, "")
    assert out.startswith("3 nodes: node-a, node-b, node-c\n")
    for node, share in shares.items():
        assert f"{node}  Need {len(share)} shards" in out
        assert f"{node}  Warmed {len(share)} of {len(share)} shards" in out
        assert cluster.cached(node, bucket) == share
    assert out.splitlines()[-1].startswith("Warmed 3 of 3 nodes in ")
    fetches = [r.path for r in cluster.proxy.requests()[start:] if r.is_object_fetch]
    wanted = [f"{bucket}/{name}" for share in shares.values() for name in share]
    assert sorted(fetches) == sorted(wanted)


def test_a_killed_node_is_named_and_the_others_complete(cluster, spec, bucket):
    with cluster.prewarm(spec, "--json") as command:
        wait_until(lambda: half_done(cluster, bucket))
        cluster.kill("node-c")
        cluster.proxy.resume()
        code, out, err = command.end()
    assert code == 3
    nodes = json.loads(out)["summary"]["nodes"]
    assert [name for name in NODES if nodes[name]["lost"]] == ["node-c"]
    assert "lost  node-c: the node died" in err
    assert [cluster.cached(name, bucket) for name in NODES] == [FILES, FILES, FILES[2:]]

    cluster.add("node-c")
    start = len(cluster.proxy.requests())
    with cluster.prewarm(spec, "--json") as command:
        code, out, err = command.end()
    assert code == 0, err
    nodes = json.loads(out)["summary"]["nodes"]
    assert [node["cached"] for node in nodes.values()] == [4, 4, 2]
    assert cluster.cached("node-c", bucket) == FILES
    # node-c resumed what it had of the big ones
    assert not any(r.is_object_fetch for r in cluster.proxy.requests()[start:])


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_all_nodes_stop_when_the_command_ends(cluster, spec, bucket, number, code):
    with cluster.prewarm(spec, "--json") as command:
        wait_until(lambda: half_done(cluster, bucket))
        command.process.send_signal(number)
        ended, out, err = command.end()
    assert ended == code, err
    if number != signal.SIGKILL:
        nodes = json.loads(out)["summary"]["nodes"]
        assert all(node["interrupted"] for node in nodes.values())
    wait_until(lambda: not any(cluster.under_way(name) for name in NODES))
    for name in NODES:
        assert cluster.cached(name, bucket) == FILES[2:]
