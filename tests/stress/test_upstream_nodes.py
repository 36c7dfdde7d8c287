"""Four nodes want the same shards at once; a cache or a NAS near them asks the origin once.

    node-1 ... node-4 (a cache each) --- engine (nginx) --- origin (SeaweedFS behind a log)

Each is a network namespace of its own. The configuration of nginx is the one in docs/clusters.md.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from shardcache.cli.demo import S3Server
from tests.stress.fuse import mounted
from tests.support.storetools import PATIENCE, forked, wait_until
from tests.support.tars import make_tar
from tests.support.trainingtools import ROOT

pytestmark = pytest.mark.timeout(600)

NODES = [f"node-{number}" for number in range(1, 5)]
ADDRESSES = {
    name: f"10.88.0.{number}" for number, name in enumerate(["origin", "engine", *NODES], 1)
}
#: Number of shards, and MiB of each. SHARDS=32x64 RATE=0 measures the figures of docs/clusters.md.
COUNT, MIB = map(int, os.environ.get("SHARDS", "8x12").split("x"))
#: Bytes per second of a connection to the origin, as in nginx; 0 for no limit.
RATE = os.environ.get("RATE", "2m")
SPEC = f"s3://lab/train-{{0..{COUNT - 1}}}.tar"
WARNING = "warning: not using the upstream"
POLICY = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:GetObject",
            "Resource": "arn:aws:s3:::lab/*",
        }
    ],
}
LOG = """
daemon off; error_log {home}/errors; pid {home}/pid; events {{ worker_connections 4096; }}
http {{
    access_log off; client_max_body_size 0;
    proxy_temp_path {home}/1; client_body_temp_path {home}/2; fastcgi_temp_path {home}/3;
    uwsgi_temp_path {home}/4; scgi_temp_path {home}/5;
    {http}
}}
"""
COUNTING = """
log_format sent '$request_method $uri $status $body_bytes_sent';
server {{
    listen 9000; access_log {home}/requests sent;
    location / {{
        proxy_pass {origin}; proxy_set_header Host $http_host; proxy_buffering off;
        limit_rate {rate};
    }}
}}
"""


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def prefix():
    """Make a namespace for each address, and a switch between them."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and the program ip, for network namespaces")
    prefix = f"shardcache-{os.getpid()}-"
    switch = f"{prefix}switch"
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for name, address in ADDRESSES.items():
            there = prefix + name
            ip("netns", "add", there)
            peer = ["type", "veth", "peer", "name", "eth0", "netns", there]
            ip("-n", switch, "link", "add", name, *peer)
            ip("-n", switch, "link", "set", name, "master", "bridge", "up")
            ip("-n", there, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", there, "link", "set", "eth0", "up")
            ip("-n", there, "link", "set", "lo", "up")
        yield prefix
    finally:
        for name in ["switch", *ADDRESSES]:
            subprocess.run(["ip", "netns", "delete", prefix + name], capture_output=True)


def serve(parent, namespace, home):
    """Run S3 in a namespace. Says the environment of its clients, and digests of the shards."""
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    with S3Server(directory=home) as server:
        server.create_bucket("lab")
        server.client().put_bucket_policy(Bucket="lab", Policy=json.dumps(POLICY))
        digests = {}
        for number in range(COUNT):
            data = make_tar(number, members=24, size=MIB * 21_000)
            server.put("lab", f"train-{number}.tar", data)
            digests[f"train-{number}.tar"] = hashlib.sha256(data).hexdigest()
        parent.say((server.environment(), digests, number * len(data) + len(data)))
        parent.hear()


class Cluster:
    """The namespaces, and the processes in them."""

    def __init__(self, prefix, home, environment, digests, size):
        self._prefix, self._home = prefix, home
        self._environment, self._digests, self._size = environment, digests, size

    @contextlib.contextmanager
    def nginx(self, name, http):
        """Run nginx with this part of its configuration; yields its process."""
        home = self._home / name
        home.mkdir()
        (home / "nginx.conf").write_text(
            LOG.format(home=home, http=http.replace("HOME", str(home)))
        )
        command = ["nginx", "-c", home / "nginx.conf", "-g", "user root;"]
        with self.start(name, command, start_new_session=True) as process:
            wait_until(lambda: (home / "pid").exists())
            yield process
            kill(process)

    def start(self, name, command, **options):
        return subprocess.Popen(["ip", "netns", "exec", self._prefix + name, *command], **options)

    def prewarm(self, upstream, *arguments):
        """Start a prewarm on every node; a number in the arguments is the node's."""
        started = []
        for number, name in enumerate(NODES):
            environment = {key: v for key, v in os.environ.items() if not key.startswith("AWS_")}
            environment |= self._environment | {
                "AWS_ENDPOINT_URL_S3": f"http://{ADDRESSES['origin']}:9000",
                "SHARDCACHE_DIR": str(self._home / "caches" / name),
                "SHARDCACHE_MIN_FREE": "0",
                "SHARDCACHE_CONFIG": str(self._home / "shardcache.toml"),
                "SLURM_NODEID": str(number),
                "SLURM_NNODES": str(len(NODES)),
            }
            (self._home / "shardcache.toml").write_text(f"[[upstreams]]\n{upstream}\n")
            command = [sys.executable, "-m", "shardcache", "prewarm", "-v", SPEC, *arguments]
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            started.append(self.start(name, command, env=environment, **pipes))
        return started

    def end(self, started):
        """Return the warnings of each node."""
        ends = [process.communicate(timeout=3 * PATIENCE)[1] for process in started]
        assert [process.returncode for process in started] == [0] * len(NODES), ends
        return [[line for line in end.splitlines() if "warning:" in line] for end in ends]

    def all_right(self):
        """Return whether every node has every shard with the right bytes."""
        found = list((self._home / "caches").glob("*/v1/objects/*/*/*/*.tar"))
        right = [hashlib.sha256(p.read_bytes()).hexdigest() == self._digests[p.name] for p in found]
        return all(right) and len(right) == len(NODES) * len(self._digests)

    def under_way(self, name):
        return any((self._home / "caches" / name).glob("v1/partial/*/*.tar"))

    def sent(self):
        """Return the bytes that the origin has sent, divided by those of all shards."""
        lines = (self._home / "origin" / "requests").read_text().splitlines()
        rows = [line.split() for line in lines]
        return sum(int(row[3]) for row in rows if row[0] == "GET" and ".tar" in row[1]) / self._size


def kill(process):
    """Kill nginx and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def cluster(prefix, tmp_path):
    if not shutil.which("nginx"):
        pytest.skip("needs nginx")
    (tmp_path / "s3").mkdir()
    with forked(serve, f"{prefix}origin", tmp_path / "s3") as s3:
        environment, *shards = s3.hear(2 * PATIENCE)
        cluster = Cluster(prefix, tmp_path, environment, *shards)
        origin = environment["AWS_ENDPOINT_URL_S3"]
        with cluster.nginx("origin", COUNTING.format(home="HOME", origin=origin, rate=RATE)):
            yield cluster
        s3.tell()
        s3.wait()


def documented():
    """Return the configuration of nginx in docs/clusters.md, for this origin."""
    text = (ROOT / "docs" / "clusters.md").read_text("utf-8")
    [conf] = re.findall(r"```text\n(proxy_cache_path.*?)```", text, re.DOTALL)
    conf = conf.replace("/var/cache/nginx", "HOME")
    return conf.replace("https://s3.us-east-1.amazonaws.com", f"http://{ADDRESSES['origin']}:9000")


@pytest.mark.parametrize("dies", [False, True])
def test_nginx_fetches_each_shard_once_for_all_nodes(cluster, dies):
    with cluster.nginx("engine", documented()) as engine:
        began = time.monotonic()
        started = cluster.prewarm(f'url = "http://{ADDRESSES["engine"]}:8080"')
        if dies:
            wait_until(lambda: all(map(cluster.under_way, NODES)))
            kill(engine)
        warnings = cluster.end(started)
        print(*map(str, warnings), sep="\n")
    print(f"{cluster.sent():.3f} of the data set in {time.monotonic() - began:.1f} s")
    assert cluster.all_right()
    if dies:
        assert [len(w) for w in warnings] == [1] * len(NODES) and cluster.sent() < len(NODES) + 1
        assert all(WARNING in warning for [warning] in warnings)
    else:
        assert not any(warnings) and cluster.sent() == 1


@pytest.mark.parametrize("dies", [False, True])
def test_two_steps_over_a_nas_fetch_each_shard_once(cluster, dies, tmp_path):
    with mounted(tmp_path, "nas") as nas:
        upstream, began = f'url = "{nas.root}"\nwrite_back = true', time.monotonic()
        assert not any(cluster.end(cluster.prewarm(upstream, "--shard-by-node")))
        if dies:
            nas.crash()
        warnings = cluster.end(cluster.prewarm(upstream))
    print(f"{cluster.sent():.3f} of the data set in {time.monotonic() - began:.1f} s")
    assert cluster.all_right()
    if dies:
        assert [len(w) for w in warnings] == [1] * len(NODES) and cluster.sent() == len(NODES)
        assert all(WARNING in warning for [warning] in warnings)
    else:
        assert not any(warnings) and cluster.sent() == 1
