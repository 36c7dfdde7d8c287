"""A Ray cluster of several node processes on this machine, as a process of its own.

Run as ``python -m tests.stress.raycluster``. Each line of standard input is an order::

    {"add": NAME, "environment": {...}}   starts a raylet with that environment
    {"kill": NAME}                        SIGKILL for it and all that it started, until the
                                          cluster has noticed

and is answered by one line. The cluster ends with its standard input. `RayCluster` is the test's
side; it also ends, by process id, whatever did not end by itself.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: A node that says nothing is dead after two seconds instead of some twenty.
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_initial_delay_ms": "500",
}
_MEMORY = 80 << 20
_FAREWELL = 30.0
_NOTICED = 300.0


def started(pid: int) -> int | None:
    """When a process began, in ticks: with its id it names that process and no later one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def descendants(pid: int) -> dict[int, int]:
    """All processes below one, and when they began."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                when = started(child)
                if when is not None:
                    found[child] = when
                found |= descendants(child)
    return found


def kill(processes: dict[int, int]) -> None:
    for pid, when in processes.items():
        if started(pid) == when:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class RayCluster:
    """Nodes are added and killed by name; all are gone when the context ends."""

    def __enter__(self) -> RayCluster:
        # Short: below it are sockets, whose paths have 107 bytes.
        self._directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stress.raycluster"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={
                **environment,
                **_SETTINGS,
                "RAY_TMPDIR": self._directory,
                "PYTHONPATH": str(ROOT),
            },
            start_new_session=True,
        )
        self.address = ""
        return self

    def __exit__(self, *exc: object) -> None:
        below = descendants(self._process.pid)
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kill(below)
        self._process.stdout.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _ask(self, **order: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the cluster has ended"
        return json.loads(answer)

    def add(self, name: str, environment: dict[str, str]) -> None:
        self.address = self._ask(add=name, environment=environment)["address"]

    def kill(self, name: str) -> None:
        self._ask(kill=name)


def main() -> None:
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints
    cluster, nodes = Cluster(shutdown_at_exit=True), {}
    try:
        for line in sys.stdin:
            order = json.loads(line)
            if name := order.get("add"):
                nodes[name] = cluster.add_node(
                    node_name=name,
                    num_cpus=1,
                    include_dashboard=False,
                    object_store_memory=_MEMORY,
                    env_vars=order["environment"],
                )
            else:
                node = nodes.pop(order["kill"])
                raylet = node.all_processes["raylet"][0].process
                below = descendants(raylet.pid)
                raylet.kill()
                kill(below)
                raylet.wait()
                cluster.worker_nodes.discard(node)
                cluster.wait_for_nodes(_NOTICED)  # the cluster knows that it is dead
            out.write(json.dumps({"address": cluster.address}) + "\n")
            out.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
