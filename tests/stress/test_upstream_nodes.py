"""Four nodes want the same shards at once, and their origin sends each shard once.

the caches of four nodes --- nginx as in docs/clusters.md, or a NAS --- origin
"""

import hashlib
import json
import re
import shutil
import socket
import subprocess
from contextlib import ExitStack

import pytest

from tests.stress.fuse import mounted
from tests.support.clitools import Command
from tests.support.storetools import wait_until
from tests.support.tars import make_tar
from tests.support.trainingtools import ROOT

NODES = 4
SHARDS = {f"train-{n}.tar": make_tar(n, members=24, size=250_000) for n in range(8)}
NGINX = """
daemon off; master_process off;
error_log HOME/errors; pid HOME/pid; events { worker_connections 4096; }
http {
    access_log off; proxy_temp_path HOME/1; client_body_temp_path HOME/2;
    %s
}
"""


class Nodes:
    """Nodes that prewarm their caches from one bucket."""

    def __init__(self, bucket, proxy, home):
        self.spec, self._proxy = f"s3://{bucket}/train-{{0..{len(SHARDS) - 1}}}.tar", proxy
        self._homes = [home / f"node-{number}" for number in range(NODES)]

    def prewarm(self, upstream, *arguments, midway=None):
        """Prewarm all nodes, and call ``midway`` in the middle; returns each node's warnings."""
        self._proxy.limit = 1_000_000 if midway else None
        with ExitStack() as stack:
            commands = []
            for number, home in enumerate(self._homes):
                home.mkdir(exist_ok=True)
                (home / "shardcache.toml").write_text(upstream)
                environment = {"SHARDCACHE_CONFIG": str(home / "shardcache.toml")}
                environment |= {"SLURM_NODEID": str(number), "SLURM_NNODES": str(NODES)}
                options = {"directory": home / "cache", "environment": environment}
                command = Command("prewarm", "-v", self.spec, *arguments, **options)
                commands.append(stack.enter_context(command))
            if midway is not None:
                wait_until(lambda: all((home / "cache/v1").exists() for home in self._homes))
                wait_until(lambda: any(any(_files(home, "partial/*")) for home in self._homes))
                midway()
                self._proxy.resume()
            ends = [command.end() for command in commands]
        assert not any(code for code, *_ in ends), ends
        return [[line for line in err.splitlines() if "warning:" in line] for *_, err in ends]

    def fetches(self):
        """Check the bytes of every node. Return how often the origin sent the data set."""
        digests = {hashlib.md5(data).digest() for data in SHARDS.values()}
        for home in self._homes:
            files = _files(home, "objects/*/*/*")
            assert {hashlib.md5(path.read_bytes()).digest() for path in files} == digests
        return self._proxy.received() / sum(map(len, SHARDS.values()))


def _files(home, where):
    return home.glob(f"cache/v1/{where}/*.tar")


@pytest.fixture
def nodes(s3, bucket, s3_environment, proxy, tmp_path):
    for name, data in SHARDS.items():
        s3.put(bucket, name, data)
    return Nodes(bucket, proxy, tmp_path)


@pytest.fixture
def nginx(s3, bucket, s3_environment, proxy, tmp_path):
    """Run nginx in one process; returns its URL, and a function that kills it."""
    if not shutil.which("nginx"):
        pytest.skip("needs the program nginx")
    resource = f"arn:aws:s3:::{bucket}/*"
    allow = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": resource}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [allow]})
    s3.client().put_bucket_policy(Bucket=bucket, Policy=policy)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    text = (ROOT / "docs" / "clusters.md").read_text("utf-8")
    [http] = re.findall(r"```text\n(proxy_cache_path .*?)```", text, re.DOTALL)
    for name, value in {
        "https://s3.us-east-1.amazonaws.com": proxy.url,
        "/var/cache/nginx": "HOME",
        "listen 8080": f"listen {port}",
    }.items():
        http = http.replace(name, value)
    (home := tmp_path / "nginx").mkdir()
    (home / "nginx.conf").write_text((NGINX % http).replace("HOME", str(home)))
    with subprocess.Popen(["nginx", "-c", home / "nginx.conf"]) as process:
        try:
            wait_until((home / "pid").exists)
            yield f"http://127.0.0.1:{port}", process.kill
        finally:
            process.kill()


def one_each(warnings, upstream):
    """Return whether every node has logged one warning, that it does not use the upstream."""
    start = f"warning: not using the upstream {upstream} for a while: "
    return all(len(lines) == 1 and lines[0].startswith(start) for lines in warnings)


@pytest.mark.parametrize("dies", [False, True])
def test_nginx_fetches_each_shard_once(nodes, nginx, dies):
    upstream, kill = nginx
    warnings = nodes.prewarm(f'upstreams = ["{upstream}"]', midway=kill if dies else None)
    if dies:
        assert 1 < nodes.fetches() < NODES + 1 and one_each(warnings, upstream)
    else:
        assert nodes.fetches() == 1 and not any(warnings)


@pytest.mark.parametrize("dies", [False, True])
def test_two_steps_over_a_nas_fetch_each_shard_once(nodes, dies, tmp_path):
    with mounted(tmp_path, "nas") as nas:
        upstream = f'[[upstreams]]\nurl = "{nas.root}"\nwrite_back = true'
        assert not any(any(lines) for lines in nodes.prewarm(upstream, "--shard-by-node"))
        if dies:
            nas.crash()
        warnings = nodes.prewarm(upstream)
    if dies:
        assert nodes.fetches() == NODES and one_each(warnings, nas.root)
    else:
        assert nodes.fetches() == 1 and not any(warnings)
