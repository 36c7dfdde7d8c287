"""Four nodes want the same shards at once, and their origin sends each shard once.

    node-1 ... node-4, a cache each --- nginx as in docs/clusters.md, or a NAS --- origin

Each of the nodes, nginx and the origin (SeaweedFS behind a proxy that counts what it sends) has a
network namespace of its own.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from shardcache.cli.demo import S3Server
from tests.stress.fuse import mounted
from tests.support.proxy import Proxy
from tests.support.storetools import PATIENCE, forked, wait_until
from tests.support.tars import make_tar
from tests.support.trainingtools import ROOT

pytestmark = pytest.mark.timeout(600)

NODES = [f"node-{number}" for number in range(4)]
ADDRESSES = {name: f"10.88.0.{n}" for n, name in enumerate(["origin", "engine", *NODES], 1)}
ORIGIN = f"http://{ADDRESSES['origin']}:9000"
SHARDS = {f"train-{n}.tar": make_tar(n, members=24, size=250_000) for n in range(8)}
SPEC = f"s3://lab/train-{{0..{len(SHARDS) - 1}}}.tar"
ANYONE = """{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": "*",
    "Action": "s3:GetObject", "Resource": "arn:aws:s3:::lab/*"}]}"""
NGINX = """
daemon off; error_log HOME/errors; pid HOME/pid; events { worker_connections 4096; }
http {
    access_log off; proxy_temp_path HOME/1; client_body_temp_path HOME/2;
    %s
}
"""


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def prefix():
    """Make the namespaces, and a switch between them; yields the first part of their names."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and the program ip")
    prefix, names = f"shardcache-{os.getpid()}-", ["switch", *ADDRESSES]
    switch = f"{prefix}switch"
    try:
        for name in names:
            ip("netns", "add", prefix + name)
        ip("-n", switch, "link", "add", "bridge", "up", "type", "bridge")
        for name, address in ADDRESSES.items():
            peer = ["type", "veth", "peer", "name", "eth0", "netns", prefix + name]
            ip("-n", switch, "link", "add", name, "up", "master", "bridge", *peer)
            ip("-n", prefix + name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", prefix + name, "link", "set", device, "up")
        yield prefix
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", prefix + name], capture_output=True)


def serve(parent, namespace, home):
    """Run an S3 server with the shards in a namespace, and say the environment of its clients.

    Then hear a limit, after which the proxy pauses each body, and say how many bytes it has sent.
    """
    with open(f"/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    with S3Server(directory=home) as server, Proxy(server, (ADDRESSES["origin"], 9000)) as proxy:
        server.create_bucket("lab")
        server.client().put_bucket_policy(Bucket="lab", Policy=ANYONE)
        for name, data in SHARDS.items():
            server.put("lab", name, data)
        parent.say(server.environment())
        while (limit := parent.hear()) != "end":
            proxy.limit = limit
            parent.say(proxy.received())
    parent.say()


class Cluster:
    """The processes in the namespaces."""

    def __init__(self, prefix, home, s3):
        self._prefix, self._home, self._s3 = prefix, home, s3
        self._environment = os.environ | s3.hear() | {"AWS_ENDPOINT_URL_S3": ORIGIN}

    def _start(self, name, *command, **options):
        return subprocess.Popen(["ip", "netns", "exec", self._prefix + name, *command], **options)

    @contextlib.contextmanager
    def nginx(self, http):
        """Run nginx; yields a function that kills it."""
        (home := self._home / "engine").mkdir()
        (home / "nginx.conf").write_text((NGINX % http).replace("HOME", str(home)))
        command = ["nginx", "-c", home / "nginx.conf", "-g", "user root;"]

        def kill():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        process = self._start("engine", *command, start_new_session=True)
        try:
            wait_until((home / "pid").exists)
            yield kill
        finally:
            kill()

    def prewarm(self, upstream, *arguments, midway=None):
        """Prewarm all nodes, and call ``midway`` in the middle; returns each node's warnings."""
        self._s3.ask(1_000_000 if midway else None)
        started = []
        for number, name in enumerate(NODES):
            (self._home / name).mkdir(exist_ok=True)
            config = self._home / name / "shardcache.toml"
            config.write_text(f'dir = "{config.parent}/cache"\nmin_free = "0"\n{upstream}')
            environment = self._environment | {"SHARDCACHE_CONFIG": str(config)}
            environment |= {"SLURM_NODEID": str(number), "SLURM_NNODES": str(len(NODES))}
            command = [sys.executable, "-m", "shardcache", "prewarm", "-v", SPEC, *arguments]
            pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            started.append(self._start(name, *command, env=environment, **pipes))
        if midway is not None:
            begun = [self._home / name / "cache" / "v1" for name in NODES]
            wait_until(lambda: all(path.exists() for path in begun))
            wait_until(lambda: any(any(self._files(name, "partial/*")) for name in NODES))
            midway()
            self._s3.ask(None)
        ends = [process.communicate(timeout=3 * PATIENCE)[1] for process in started]
        assert not any(process.returncode for process in started), ends
        return [[line for line in end.splitlines() if "warning:" in line] for end in ends]

    def _files(self, name, where):
        return (self._home / name).glob(f"cache/v1/{where}/*.tar")

    def fetches(self):
        """Check the bytes of every node. Return how often the origin sent the data set."""
        digests = {hashlib.md5(data).digest() for data in SHARDS.values()}
        for name in NODES:
            files = self._files(name, "objects/*/*/*")
            assert {hashlib.md5(path.read_bytes()).digest() for path in files} == digests
        return self._s3.ask(None) / sum(map(len, SHARDS.values()))


@pytest.fixture
def cluster(prefix, tmp_path):
    with forked(serve, f"{prefix}origin", tmp_path) as s3:
        yield Cluster(prefix, tmp_path, s3)
        s3.ask("end")


def one_each(warnings, upstream):
    """Return whether every node has logged one warning, that it does not use the upstream."""
    start = f"warning: not using the upstream {upstream} for a while: "
    return all(len(lines) == 1 and lines[0].startswith(start) for lines in warnings)


@pytest.mark.parametrize("dies", [False, True])
def test_nginx_fetches_each_shard_once(cluster, dies):
    if not shutil.which("nginx"):
        pytest.skip("needs the program nginx")
    text = (ROOT / "docs" / "clusters.md").read_text("utf-8")
    [http] = re.findall(r"```text\n(proxy_cache_path .*?)```", text, re.DOTALL)
    http = http.replace("https://s3.us-east-1.amazonaws.com", ORIGIN)
    upstream = f"http://{ADDRESSES['engine']}:8080"
    with cluster.nginx(http.replace("/var/cache/nginx", "HOME")) as kill:
        warnings = cluster.prewarm(f'upstreams = ["{upstream}"]', midway=kill if dies else None)
    if dies:
        assert 1 < cluster.fetches() < len(NODES) + 1 and one_each(warnings, upstream)
    else:
        assert cluster.fetches() == 1 and not any(warnings)


@pytest.mark.parametrize("dies", [False, True])
def test_two_steps_over_a_nas_fetch_each_shard_once(cluster, dies, tmp_path):
    with mounted(tmp_path, "nas") as nas:
        upstream = f'[[upstreams]]\nurl = "{nas.root}"\nwrite_back = true'
        assert not any(any(lines) for lines in cluster.prewarm(upstream, "--shard-by-node"))
        if dies:
            nas.crash()
        warnings = cluster.prewarm(upstream)
    if dies:
        assert cluster.fetches() == len(NODES) and one_each(warnings, nas.root)
    else:
        assert cluster.fetches() == 1 and not any(warnings)
