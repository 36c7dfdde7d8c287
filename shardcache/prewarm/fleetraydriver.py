"""The process between a fleet's command line and a Ray cluster.

Run as ``python -m shardcache.prewarm.fleetraydriver``, so that Ray's threads, signal handlers and
words stay out of the terminal's process. The first line of standard input is the order (JSON);
``stop`` asks all nodes to end in order; the end of standard input ends everything at once, so the
driver never outlives the command line. Standard output has events of `fleetlines` and nothing
else.

One actor for each node, pinned there and never restarted; it asks for no CPU, so that a busy
cluster is prewarmed, too. When the driver ends, Ray ends its actors, and each takes the prewarm of
its node along (`fleetmember`).

One thread talks to Ray; another reads standard input.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from shardcache.errors import ConfigError
from shardcache.prewarm.fleetlines import (
    Complained,
    Ended,
    Fault,
    Joiner,
    Members,
    encode,
)
from shardcache.prewarm.fleetrayactor import NodePrewarm

__all__ = ["choose", "main"]

#: Seconds until a node that has nothing to say answers so.
_PATIENCE = 2.0
#: Seconds between two looks at all nodes; also how soon a stop is heard.
_ROUND = 0.2
#: Digits of a node's id that tell two of one name apart.
_ID_DIGITS = 8
_KNOCK_SECONDS = 10.0
#: What Ray says before it says why.
_TERMINATED = "the actor's node was terminated unexpectedly: "
#: A host's name in place of an address comes after all IP versions.
_NO_IP = 9
#: Threads of an actor: lines, stop and a lines whose answer was lost.
_THREADS = 4


@dataclass(slots=True)
class _Node:
    """A node at work."""

    number: int
    id: str
    actor: Any
    joiner: Joiner
    seen: int = 0
    started: bool = False
    pending: Any = None
    stopping: Any = None


def choose(nodes: Sequence[Mapping[str, Any]], only: Sequence[str]) -> list[tuple[str, str]]:
    """Names and ids of the nodes to use, in the order of their ranks.

    All that are alive, by address, then by name; or those of ``only``, in its order. A node is
    called by its name, where two have the same by name and id.

    Raises:
        ConfigError: a name that no node that is alive has, or several.
    """
    alive = sorted((node for node in nodes if node.get("Alive")), key=_place)
    names = [str(node.get("NodeName") or node["NodeManagerAddress"]) for node in alive]
    named = {}
    for node, name in zip(alive, names, strict=True):
        unique = name if names.count(name) == 1 else f"{name}/{node['NodeID'][:_ID_DIGITS]}"
        named[unique] = node
    if not only:
        return [(name, node["NodeID"]) for name, node in named.items()]
    chosen = {}
    for wanted in only:
        found = [name for name, node in named.items() if wanted in _aliases(name, node)]
        if len(found) != 1:
            what = "no node that is alive" if not found else f"{len(found)} nodes"
            raise ConfigError(f"{wanted} is {what}. Those there are: {', '.join(named)}.")
        chosen[found[0]] = named[found[0]]["NodeID"]
    return list(chosen.items())


def _place(node: Mapping[str, Any]) -> tuple[int, int, str, str]:
    address = str(node.get("NodeManagerAddress", ""))
    try:
        ip = ipaddress.ip_address(address)
        version, number = int(ip.version), int(ip)
    except ValueError:
        version, number = _NO_IP, 0
    return (version, number, str(node.get("NodeName", "")), str(node["NodeID"]))


def _aliases(name: str, node: Mapping[str, Any]) -> set[str]:
    return {
        name,
        str(node.get("NodeManagerAddress")),
        str(node.get("NodeManagerHostname")),
        str(node["NodeID"]),
        str(node["NodeID"])[:_ID_DIGITS],
    }


class _Fleet:
    """All nodes, from this one thread's point of view."""

    def __init__(self, ray: Any, order: Mapping[str, Any], out: TextIO) -> None:
        self._ray = ray
        self._order = order
        self._out = out
        self._nodes: dict[Any, _Node] = {}

    def say(self, event: Members | Complained | Ended | Fault | Any) -> None:
        self._out.write(encode(event) + "\n")
        self._out.flush()

    def start(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray, order = self._ray, self._order
        chosen = choose(ray.nodes(), order["only"])
        place = ray.get_runtime_context().gcs_address
        self.say(Members(tuple(name for name, _ in chosen), place))
        kind = ray.remote(num_cpus=0, max_concurrency=_THREADS, max_restarts=0)(NodePrewarm)
        for number, (_, node_id) in enumerate(chosen):
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
            actor = kind.options(scheduling_strategy=strategy).remote()
            arguments = list(order["arguments"])
            if order["split"]:
                arguments += ["--node-rank", str(number), "--node-count", str(len(chosen))]
            node = _Node(number, node_id, actor, Joiner(number))
            node.pending = actor.start.remote(order["options"], arguments, order["specs"])
            self._nodes[node.pending] = node

    def run(self, stop: threading.Event, gone: threading.Event) -> None:
        """Pass on what the nodes say until all have ended, or the command line has."""
        asked = False
        while self._nodes and not gone.is_set():
            if stop.is_set() and not asked:
                asked = True
                for node in self._nodes.values():
                    node.stopping = node.actor.stop.remote()
            waiting = list(self._nodes)
            ready, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=_ROUND)
            for reference in ready:
                self._hear(reference, self._nodes.pop(reference))

    def _hear(self, reference: Any, node: _Node) -> None:
        exceptions = self._ray.exceptions
        try:
            answer = self._ray.get(reference)
        except exceptions.ActorUnavailableError:
            if not node.started:
                self.say(Ended(node.number, None, "Ray could not reach it"))
                return
            answer = []  # the network; asked again, until Ray says that the actor is dead
        except exceptions.RayError as exn:
            self.say(Ended(node.number, None, self._why(exn, node)))
            return
        lines = answer if node.started else []
        node.started = True
        node.seen += len(lines)
        for kind, text in lines:
            if kind == "end":
                self.say(Ended(node.number, int(text)))
                self._ray.kill(node.actor)
                return
            said = node.joiner.take(text) if kind == "out" else Complained(node.number, text)
            if said is not None:
                self.say(said)
        node.pending = node.actor.lines.remote(node.seen, _PATIENCE)
        self._nodes[node.pending] = node

    def _why(self, exn: Exception, node: _Node) -> str:
        """Why an actor is no more, in a few words: Ray's own are a page."""
        text = str(exn)
        if "No module named 'shardcache'" in text:
            return "shardcache is not installed for Ray's workers there"
        alive = {found["NodeID"] for found in self._ray.nodes() if found.get("Alive")}
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        detail = lines[-1].removeprefix(_TERMINATED) if lines else ""
        if node.id not in alive or "node has died" in text:
            return f"the node died ({detail})" if "health" in detail else "the node died"
        if isinstance(exn, self._ray.exceptions.RayTaskError):
            return f"it could not be started: {detail}"
        return "its process was killed"


def _listen(stop: threading.Event, gone: threading.Event) -> None:
    for line in sys.stdin:
        if line.strip() == "stop":
            stop.set()
    gone.set()


def _knock(address: str) -> None:
    """Ray itself tries for minutes where nobody listens.

    Raises:
        OSError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS).close()


def main() -> int:
    """Serve one order; the exit code is 0 unless there is a `Fault`."""
    order = json.loads(sys.stdin.readline())
    # Ray, and what it imports, may print: that is for standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    stop, gone = threading.Event(), threading.Event()
    threading.Thread(target=_listen, args=(stop, gone), daemon=True).start()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    fleet = _Fleet(ray, order, out)
    try:
        try:
            _knock(order["address"])
            ray.init(
                address=order["address"],
                namespace="shardcache",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as exn:
            first = (str(exn).strip().splitlines() or [type(exn).__name__])[0].rstrip(".")
            raise ConfigError(
                f"no Ray cluster could be reached at {order['address']}: {first}. Give its address "
                "with --ray-address or RAY_ADDRESS, on a machine that is one of its nodes."
            ) from exn
        fleet.start()
        fleet.run(stop, gone)
    except ConfigError as exn:
        fleet.say(Fault(exn.message, usage=True))
        return 1
    except Exception as exn:  # noqa: BLE001 - told to the command line, which says it
        fleet.say(Fault(f"Ray failed: {type(exn).__name__}: {exn}"))
        return 1
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
