"""Prewarm the caches of all nodes of a Ray cluster, with one task on each live node.

Each node uses its own cache, configuration and credentials, from the environment in which ``ray
start`` ran there. If a node fails or dies, its report says so, and the other nodes complete.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardcache import config as configuration
from shardcache.cache import Cache
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.origins.listing import expand_braces
from shardcache.prewarm.plan import Share
from shardcache.prewarm.results import PrewarmPlan, PrewarmReport, portable
from shardcache.prewarm.run import JOBS, check_options, prewarm
from shardcache.urls import absolute

#: Seconds between two checks in the calling process.
_TICK = 0.2
#: Seconds to wait for nodes whose tasks were cancelled. A prewarm takes up to 5 to stop
#: (`run._CANCEL_TIMEOUT`).
_CANCEL_TIMEOUT = 20.0
#: Seconds to test whether an address accepts connections; Ray itself would try for minutes.
_CONNECT_SECONDS = 10.0
#: The report of a node whose prewarm did not end.
_EMPTY = PrewarmReport(PrewarmPlan((), {}), (), 0.0)


class NodeLostError(ShardCacheError):
    """A node of the cluster died, or its task ended, before it sent a report."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """How the prewarm of one node ended."""

    name: str  #: the node's name, and the start of its id if several nodes have this name
    number: int  #: from 0, in the order of addresses and then names
    report: PrewarmReport = _EMPTY  #: of the prewarm, if it ended
    error: Exception | None = None  #: an error that concerns more than single shards
    interrupted: bool = False  #: whether the node's task was cancelled

    @property
    def lost(self) -> bool:
        """Whether the node died, or its task ended, before it sent a report."""
        return isinstance(self.error, NodeLostError)


def prewarm_nodes(
    urls: str | Iterable[str],
    *,
    settings: Mapping[str, Any] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    ranks_per_node: int | None = None,
    on_progress: Callable[[int, int], None] = lambda ended, nodes: None,
    stop: threading.Event | None = None,
    **options: Any,
) -> tuple[NodeReport, ...]:
    """Prewarm the cache of every live node of a Ray cluster.

    The cluster is the one that this process is connected to. Without a connection, it is the one at
    ``RAY_ADDRESS`` if that is set, and otherwise the one that this machine belongs to. A second
    call downloads only the shards that are still missing.

    Args:
        urls: one shard specification or several; each node lists prefixes and patterns itself.
        settings: options of `Cache` to use on all nodes, such as ``dir``. Each node takes all other
            options from its own configuration.
        config_file: the configuration file to read on each node instead of the usual ones.
        ranks_per_node: number of training processes on each node. A node then downloads only the
            shards that ``split_by_node`` gives its ranks; with None, it downloads all shards.
        on_progress: called in the calling thread, several times a second, with the number of nodes
            that have ended, and of all nodes.
        stop: an event that any thread or signal handler may set, to stop early.
        options: arguments of `prewarm` other than ``on_event`` and ``stop``.

    Returns:
        One report per node, ordered by number.

    Raises:
        ConfigError: Ray is not installed, no cluster can be reached, or a specification is
            malformed.
        TypeError: `prewarm` has no argument of that name.
        KeyboardInterrupt: raised after the tasks were cancelled.
    """
    # Here, because a node's task would only report an unknown argument.
    check_options(options)
    if own := {"share", "on_event"} & options.keys():
        raise TypeError(f"prewarm_nodes() has no option {', '.join(sorted(own))}")
    specs = [urls] if isinstance(urls, str) else list(urls)
    # Here, so that a mistake is reported once, not by every node.
    expanded = list(dict.fromkeys(url for spec in specs for url in expand_braces(spec)))
    if any("${" in spec for spec in specs):
        specs = expanded  # the nodes may lack these variables
    file = None if config_file is None else absolute(config_file)
    arguments = specs, dict(settings or {}), file, options
    stop, reports = stop or threading.Event(), dict[Any, NodeReport]()  # by task
    with _connected() as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The task claims no processor, so that it also runs on a busy cluster.
        task = ray.remote(num_cpus=0, max_retries=0)(_prewarm_here)
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=_sort_key)
        names = [str(node.get("NodeName") or node["NodeManagerAddress"]) for node in nodes]
        for number, (node, name) in enumerate(zip(nodes, names, strict=True)):
            unique = name if names.count(name) == 1 else f"{name}/{node['NodeID'][:8]}"
            report = NodeReport(unique, number, interrupted=True)  # until the task ends
            share = None if ranks_per_node is None else Share(number, len(nodes), ranks_per_node)
            pin = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            placed = task.options(scheduling_strategy=pin)
            reports[placed.remote(report, *arguments, share)] = report
        running = list(reports)
        try:
            while running and not stop.is_set():
                ended, running = ray.wait(running, num_returns=len(running), timeout=_TICK)
                for result in ended:
                    try:
                        reports[result] = ray.get(result)
                    except ray.exceptions.RayError as exn:
                        report = reports[result]
                        error = _lost(ray, nodes[report.number]["NodeID"], exn)
                        reports[result] = replace(report, error=error, interrupted=False)
                on_progress(len(reports) - len(running), len(reports))
        finally:
            for result in running:
                ray.cancel(result)
        if running:
            ended, _ = ray.wait(running, num_returns=len(running), timeout=_CANCEL_TIMEOUT)
            for result in ended:
                with suppress(ray.exceptions.RayError):  # it was cancelled
                    reports[result] = ray.get(result)
    return tuple(reports.values())


def _sort_key(node: Mapping[str, Any]) -> tuple[int, str, str]:
    address = int(ipaddress.ip_address(node["NodeManagerAddress"]))  # .9 precedes .10
    return address, str(node.get("NodeName", "")), str(node["NodeID"])


def _lost(ray: Any, node_id: str, exn: Exception) -> NodeLostError:
    """Return the error of a task that ended without a report: the last line of Ray's message."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if node_id not in alive or isinstance(exn, ray.exceptions.NodeDiedError):
        return NodeLostError("the node died")
    return NodeLostError(str(exn).strip().rpartition("\n")[2].strip() or type(exn).__name__)


@contextmanager
def _connected() -> Iterator[Any]:
    """Yield the module `ray`, connected to a cluster; end the connection if it was made here."""
    try:
        import ray
    except ImportError as exn:
        raise ConfigError("Ray is not installed. Run: pip install 'shardcache[ray]'") from exn
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    handler = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, OSError) as exn:
        raise ConfigError(
            f"no Ray cluster could be reached at {address}. On one of its nodes, set RAY_ADDRESS "
            f"to its address, such as 10.0.0.1:6379. Ray's error: {exn}"
        ) from exn
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
    try:
        yield ray
    finally:
        ray.shutdown()


def _prewarm_here(
    node: NodeReport,
    specs: Sequence[str],
    settings: Mapping[str, Any],
    config_file: Path | None,
    options: Mapping[str, Any],
    share: Share | None,
) -> NodeReport:
    """Prewarm the cache of this node. This is the Ray task; `ray.cancel` interrupts it."""
    try:
        files = None if config_file is None else [config_file]
        config = configuration.load(settings, files=files).config
        connections = max(config.connections, options.get("jobs", JOBS))
        config = config.replace(strict=True, connections=connections)
        with Cache.from_config(config) as cache:
            report = prewarm(cache, specs, share=share, **options)
        return replace(node, report=report, interrupted=False)
    except Exception as exn:  # noqa: BLE001 - Ray would wrap it
        return replace(node, error=portable(exn), interrupted=False)
