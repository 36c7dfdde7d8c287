"""The engine that prewarms the nodes of a Ray cluster: a driver in a process of its own.

This module imports nothing of Ray; it only looks whether Ray is there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from shardcache.errors import ConfigError
from shardcache.prewarm.fleet import Order
from shardcache.prewarm.fleetlines import Complained, Heard, decode
from shardcache.prewarm.fleetrun import Engine

__all__ = ["RayEngine"]

#: What `ray.init` would take for "start a cluster here".
_NOT_AN_ADDRESS = frozenset({"local"})


class RayEngine(Engine):
    """See the module.

    Args:
        order: what to do.
        address: of the cluster; None: ``RAY_ADDRESS``, else the one this machine is part of.
        only: names of nodes, in the order of their ranks; empty: all that are alive.

    Raises:
        ConfigError: Ray is not installed, or the address is none.
    """

    name = "Ray"

    def __init__(self, order: Order, address: str | None, only: Sequence[str]) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "--nodes ray needs Ray, which is not installed here. "
                "Install it: pip install 'shardcache[ray]'."
            )
        self._address = address or os.environ.get("RAY_ADDRESS") or "auto"
        if self._address in _NOT_AN_ADDRESS:
            raise ConfigError(
                f"{self._address} would start a cluster instead of using one. Give the address of "
                "a running one with --ray-address or RAY_ADDRESS, such as 10.0.0.1:6379."
            )
        self._order = order
        self._only = list(only)

    def command(self) -> Sequence[str]:
        """The driver."""
        return [sys.executable, "-m", "shardcache.prewarm.fleetraydriver"]

    def environment(self) -> Mapping[str, str]:
        """Ours; Ray hands none of it to its workers."""
        return os.environ

    def before(self) -> Iterator[Heard]:
        """Nothing: the cluster knows its nodes."""
        return iter(())

    def heard(self, line: str) -> Iterator[Heard]:
        """An event of the driver."""
        event = decode(line)
        yield event if event is not None else Complained(None, line)

    def complained(self, line: str) -> Iterator[Heard]:
        """What Ray says, which matters only if the driver says nothing itself."""
        if line.strip():
            yield Complained(None, line)

    def feed(self) -> tuple[str, bool]:
        """The order; what comes later is ``stop``, or the end."""
        order = {
            "address": self._address,
            "only": self._only,
            "options": list(self._order.options),
            "arguments": list(self._order.arguments),
            "specs": list(self._order.specs),
            "split": bool(self._order.ranks),
        }
        return json.dumps(order) + "\n", True

    def stop(self, process: subprocess.Popen[str]) -> None:
        """Through the driver, to all actors."""
        assert process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is ending anyway
            process.stdin.write("stop\n")
            process.stdin.flush()
