"""A Ray cluster of several node processes on this machine, as a process of its own.

Apart from the tests, which fork: Ray's client has threads. Each line of standard input is an order,
answered by one line; the cluster ends with its standard input::

    {"add": NAME, "environment": {...}}   starts a raylet with that environment
    {"kill": NAME}                        SIGKILL for it and all that it started, until the
                                          cluster has noticed

`RayCluster` is the test's side; it also ends whatever did not end by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.storetools import PATIENCE, children

ROOT = Path(__file__).resolve().parents[2]
#: A node that says nothing is dead after two seconds instead of some twenty.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_initial_delay_ms": "500",
}
_NOTICED = 300.0


def below(pid: int) -> list[int]:
    """Descriptors of all processes below one; none of them comes to mean another process."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for child in children(pid):
            with contextlib.suppress(ProcessLookupError):
                found.append(os.pidfd_open(child))
            found += below(child)
    return found


def kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


class RayCluster:
    """Nodes are added and killed by name; all are gone when the context ends."""

    def __enter__(self) -> RayCluster:
        # Short: below it are sockets, whose paths have 107 bytes.
        self._directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        environment |= {**_SETTINGS, "RAY_TMPDIR": self._directory, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.raycluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.address = ""
        return self

    def __exit__(self, *exc: object) -> None:
        started = below(self._process.pid)
        try:
            self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kill(started)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _ask(self, **order: object) -> None:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the cluster has ended"

    def add(self, name: str, environment: dict[str, str]) -> None:
        self._ask(add=name, environment=environment)

    def kill(self, name: str) -> None:
        self._ask(kill=name)


def main() -> None:
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    cluster, nodes = Cluster(shutdown_at_exit=True), {}
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    for line in sys.stdin:
        order = json.loads(line)
        if name := order.get("add"):
            environment = order["environment"]
            nodes[name] = cluster.add_node(node_name=name, env_vars=environment, **options)
        else:
            node = nodes.pop(order["kill"])
            raylet = node.all_processes["raylet"][0].process
            started = below(raylet.pid)
            raylet.kill()
            kill(started)
            raylet.wait()
            cluster.worker_nodes.discard(node)
            cluster.wait_for_nodes(_NOTICED)  # the cluster knows that it is dead
        print(cluster.address, file=out, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
