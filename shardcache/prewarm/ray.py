"""One prewarm on every node of a Ray cluster.

    prewarm_nodes -> one task pinned to each live node -> `prewarm` of that node's cache
                  <- news every second (a streaming generator) <-

Each node has its own cache, configuration and credentials: those of the environment in which
``ray start`` ran there. Only shard specifications and the options of the prewarm are sent.

A node that fails or dies is reported; the others complete. The nodes that are alive at the start
take part. What was fetched stays in the caches, so the same call again fetches what is missing.
"""

from __future__ import annotations

import io
import ipaddress
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardcache import clock
from shardcache import config as configuration
from shardcache.cache import Cache
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.prewarm.plan import Share, expand
from shardcache.prewarm.run import JOBS, prewarm
from shardcache.results import (
    Event,
    Finished,
    Outcome,
    Planned,
    PrewarmPlan,
    PrewarmReport,
    ShardResult,
    Stopped,
    portable,
)

#: Seconds between two pieces of news of a node, and between two looks for them and for a stop.
_NEWS_EVERY, _TICK = 1.0, 0.2
#: Seconds that nodes have to end once they are cancelled: what `prewarm` needs, and some more.
_FAREWELL = 20.0
#: Ray itself tries for minutes to reach an address where nobody listens.
_CONNECT_SECONDS = 10.0
#: What a node tells: events, and in the end its report, or why there is none.
_News = list[Event | PrewarmReport | Exception]


class NodeLostError(ShardCacheError):
    """A node of the cluster, or its task, ended without a report."""


@dataclass(slots=True)
class NodeReport:
    """The prewarm of one node: what is known of it so far.

    Attributes:
        name: of the node; where two nodes share a name, with the beginning of its id.
        number: from 0 on, in the order of addresses and names.
        plan: what the node has to do, once it has told.
        results: by key, the shards that it is done with.
        interrupted: whether it was cancelled.
        error: why the node is not done, other than by single shards.
    """

    name: str
    number: int
    plan: PrewarmPlan | None = None
    results: dict[str, ShardResult] = field(default_factory=dict)
    interrupted: bool = False
    error: Exception | None = None
    _report: PrewarmReport | None = None

    @property
    def ended(self) -> bool:
        """Whether there will be no more news."""
        return self.interrupted or not (self._report is None and self.error is None)

    @property
    def lost(self) -> bool:
        """Whether the node did not live to tell how it ended."""
        return isinstance(self.error, NodeLostError)

    @property
    def received(self) -> int:
        """Bytes that came over the network, of the shards that it is done with."""
        return sum(result.received for result in self.results.values())

    @property
    def report(self) -> PrewarmReport:
        """The node's report, of what it told before it ended, was lost or was interrupted."""
        if self._report is not None:
            return self._report
        plan = self.plan or PrewarmPlan((), {}, {}, 0, 0, 0)
        results = plan.results(self.results, Outcome.NOT_STARTED)
        return PrewarmReport(plan, results, 0.0, Stopped.REQUESTED if self.interrupted else None)

    def take(self, news: _News) -> None:
        """Learn what the node tells."""
        for each in news:
            match each:
                case Planned(plan):
                    self.plan = plan
                case Finished(shard, result):
                    self.results[shard.key] = result
                case PrewarmReport():
                    self._report = each
                case Exception():
                    self.error = each


def prewarm_nodes(
    urls: str | Iterable[str],
    *,
    settings: Mapping[str, Any] | None = None,
    config_file: str | os.PathLike[str] | None = None,
    ranks_per_node: int | None = None,
    on_news: Callable[[Sequence[NodeReport]], None] = lambda nodes: None,
    stop: threading.Event | None = None,
    **options: Any,
) -> tuple[NodeReport, ...]:
    """Prewarm the cache of every live node of a Ray cluster.

    The cluster is the one that this process is connected to, else that of ``RAY_ADDRESS``, else
    the one that this machine belongs to. None is ever started.

    Args:
        urls: one shard specification or several; each node expands them itself.
        settings: options of `Cache` that are the same on all nodes, such as ``dir``; the others
            are those of each node's configuration.
        config_file: the configuration file to read on each node instead of the usual ones.
        ranks_per_node: give each node only the shards that ``split_by_node`` gives its ranks, of
            which each node has so many; None gives every node all shards.
        on_news: called in the calling thread with all nodes, again and again.
        stop: set it, from any thread or signal handler, to end early.
        options: of `prewarm`, apart from ``on_event`` and ``stop``.

    Returns:
        One report per node, in the order of their numbers.

    Raises:
        ConfigError: Ray is not installed, no cluster can be reached, or a malformed specification.
        KeyboardInterrupt: passed on once the tasks are cancelled.
    """
    specs = [urls] if isinstance(urls, str) else list(urls)
    expanded = expand(specs)  # a mistake is told once, not by every node
    if any("${" in spec for spec in specs):
        specs = expanded  # the nodes need not know the variables
    file = None if config_file is None else configuration.absolute(config_file)
    order = specs, dict(settings or {}), file, options
    stop, out = stop or threading.Event(), sys.stdout
    with _connected() as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # It asks for no processor, so that a busy cluster is prewarmed, too.
        task = ray.remote(num_cpus=0, max_retries=0, num_returns="streaming")(_prewarm_here)
        alive = sorted((node for node in ray.nodes() if node["Alive"]), key=_order)
        names = [str(node.get("NodeName") or node["NodeManagerAddress"]) for node in alive]
        nodes, streams = [], {}
        for number, (node, name) in enumerate(zip(alive, names, strict=True)):
            unique = name if names.count(name) == 1 else f"{name}/{node['NodeID'][:8]}"
            nodes.append(NodeReport(unique, number))
            share = None if ranks_per_node is None else Share(number, len(alive), ranks_per_node)
            pin = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            stream = task.options(scheduling_strategy=pin).remote(*order, share)
            streams[stream] = nodes[number]
        end: float | None = None
        try:
            while streams and (end is None or clock.monotonic() < end):
                if stop.is_set() and end is None:
                    end = clock.monotonic() + _FAREWELL
                    for stream in streams:
                        ray.cancel(stream)
                ready, _ = ray.wait(list(streams), num_returns=len(streams), timeout=_TICK)
                for stream in ready:
                    report = streams[stream]
                    try:
                        report.take(ray.get(next(stream)))
                    except StopIteration:
                        del streams[stream]
                    except ray.exceptions.RayError as exn:
                        del streams[stream]
                        report.interrupted = end is not None
                        if end is None:
                            report.error = _lost(ray, alive[report.number]["NodeID"], exn)
                with redirect_stdout(out):
                    on_news(nodes)
        finally:
            for stream, report in streams.items():  # they did not end in time
                ray.cancel(stream)
                report.interrupted = True
    on_news(nodes)
    return tuple(nodes)


def _order(node: Mapping[str, Any]) -> tuple[int, str, str]:
    """What nodes are ordered by: address, so that .9 is before .10, then name."""
    address = int(ipaddress.ip_address(node["NodeManagerAddress"]))
    return address, str(node.get("NodeName", "")), str(node["NodeID"])


def _lost(ray: Any, node_id: str, exn: Exception) -> NodeLostError:
    """Why a task ended, in a sentence: the last of Ray's own page."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if node_id not in alive or isinstance(exn, ray.exceptions.NodeDiedError):
        return NodeLostError("the node died")
    return NodeLostError(str(exn).strip().rpartition("\n")[2].strip() or type(exn).__name__)


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray, connected to a cluster for as long as the context lasts."""
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
            f"no Ray cluster could be reached at {address}. Set RAY_ADDRESS, such as "
            f"10.0.0.1:6379, on a machine that is one of its nodes. Ray says: {exn}"
        ) from exn
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray sets its own
    try:
        # A thread of Ray's prints that a node died, where a program may read JSON.
        with redirect_stdout(io.StringIO()):
            yield ray
    finally:
        ray.shutdown()


# -- on the nodes --------------------------------------------------------------


def _prewarm_here(
    specs: Sequence[str],
    settings: Mapping[str, Any],
    config_file: Path | None,
    options: Mapping[str, Any],
    share: Share | None,
) -> Iterator[_News]:
    """The task of one node: an ordinary prewarm in a thread, and news of it.

    `ray.cancel` raises KeyboardInterrupt in it, which ends the prewarm; Ray delivers no more news.
    """
    news, stop = queue.SimpleQueue[Event | PrewarmReport | Exception](), threading.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, Finished):
            news.put(event._replace(result=event.result.portable()))
        elif isinstance(event, Planned):
            news.put(event)

    def work() -> None:
        try:
            files = None if config_file is None else [config_file]
            config = configuration.load(settings, files=files).config
            connections = max(config.connections, options.get("jobs", JOBS))
            config = config.replace(strict=True, connections=connections)
            with Cache.from_config(config) as cache:
                found = prewarm(cache, specs, share=share, on_event=on_event, stop=stop, **options)
            results = tuple(result.portable() for result in found.results)
            news.put(replace(found, results=results))
        except Exception as exn:  # noqa: BLE001 - it belongs into the node's report
            news.put(portable(exn))

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            while not future.done() or not news.empty():
                wait([future], _NEWS_EVERY)
                yield [news.get() for _ in range(news.qsize())]
        finally:
            stop.set()
