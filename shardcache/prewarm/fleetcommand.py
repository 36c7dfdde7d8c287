"""``prewarm --nodes``: the options of a fleet, and running one from the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from shardcache.cli.invocation import Invocation
from shardcache.cli.output import Column
from shardcache.nodes import Share, own_share
from shardcache.prewarm.fleet import Order
from shardcache.prewarm.fleetray import RayEngine
from shardcache.prewarm.fleetrun import Engine, run_fleet
from shardcache.prewarm.fleetslurm import SlurmEngine
from shardcache.prewarm.fleettext import (
    exit_code,
    shard_records,
    summary_record,
    tell_failures,
    total_text,
)
from shardcache.prewarm.fleetview import FleetView

__all__ = ["FleetOptions", "fleet_options", "prewarm_nodes"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_COLUMNS = [
    Column(name)
    for name in ("node", "url", "outcome", "size", "seconds", "received_bytes", "retries", "error")
]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of ``prewarm`` that have to do with several nodes; see their help texts."""

    nodes: str | None
    ray_address: str | None
    ray_nodes: str | None
    shard_by_node: bool
    ranks_per_node: int | None
    node_rank: int | None
    node_count: int | None
    member: bool
    tied_fd: int | None

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            click.UsageError: an option without the one that it belongs to.
        """
        if self.nodes != "ray" and (self.ray_address or self.ray_nodes):
            raise click.UsageError("--ray-address and --ray-nodes go with --nodes ray.")
        stated = self.node_rank is not None or self.node_count is not None
        if not self.shard_by_node and (stated or self.ranks_per_node is not None):
            raise click.UsageError(
                "--ranks-per-node, --node-rank and --node-count go with --shard-by-node."
            )
        if self.nodes is not None and stated:
            raise click.UsageError("With --nodes each node is told which one it is.")
        if self.nodes is not None and self.member:
            raise click.UsageError("A member of a fleet has no --nodes.")

    def share(self) -> Share | None:
        """This node's part of the shards, where they are split.

        Raises:
            ConfigError: see `own_share`.
        """
        if not self.shard_by_node:
            return None
        return own_share(self.node_rank, self.node_count, self.ranks_per_node or 1)


def fleet_options(function: _Function) -> _Function:
    """Give a command the options of a fleet, as its argument ``fleet``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        own = {name: kwargs.pop(name) for name in FleetOptions.__dataclass_fields__}
        return function(*args, fleet=FleetOptions(**own), **kwargs)

    for option in (
        click.option("--tied-fd", type=int, hidden=True),
        click.option("--member", is_flag=True, hidden=True),
        click.option("--node-count", type=click.IntRange(1), metavar="N",
                     help="So many nodes, where no launcher tells; with --node-rank."),
        click.option("--node-rank", type=click.IntRange(0), metavar="N",
                     help="This node's number from 0 on, where no launcher tells."),
        click.option("--ranks-per-node", type=click.IntRange(1), metavar="N",
                     help="Processes of the training run on each node.  [default: 1]"),
        click.option("--shard-by-node", is_flag=True,
                     help="Only the shards that split_by_node gives this node's ranks."),
        click.option("--ray-nodes", metavar="NAMES",
                     help="Only these nodes, in the order of their ranks: names or addresses, "
                     "with commas."),
        click.option("--ray-address", metavar="ADDRESS",
                     help="Of the Ray cluster.  [default: RAY_ADDRESS, else the one here]"),
        click.option("--nodes", type=click.Choice(["ray", "slurm"]),
                     help="Prewarm every node of the Ray cluster, or of the Slurm allocation."),
    ):  # fmt: skip
        call = option(call)
    return call  # type: ignore[return-value]


def prewarm_nodes(
    invocation: Invocation,
    fleet: FleetOptions,
    specs: Sequence[str],
    arguments: Sequence[str],
    *,
    check: bool,
    dry_run: bool,
) -> int:
    """Run ``prewarm`` on many nodes; returns the exit code.

    Args:
        invocation: of the command line.
        fleet: which nodes.
        specs: shards, expanded by each node.
        arguments: the other options of ``prewarm``, for each node.
        check: they contain ``--check``.
        dry_run: they contain ``--dry-run``.

    Raises:
        ConfigError: a malformed specification, or the engine cannot work as it was asked.
        ShardCacheError: it could not start anything.
    """
    from shardcache.prewarm.fill import expand

    console = invocation.console
    expanded = expand(specs)  # a mistake in one is refused here, not by every node
    if any("${" in spec for spec in specs):
        specs = expanded  # the nodes need not know the variables
    engine = _engine(invocation, fleet, specs, arguments)
    if dry_run and isinstance(engine, SlurmEngine):
        text = engine.text()
        console.record("prewarm", {"command_line": text, "nodes": engine.names}, text)
        return 0
    doing = "Checking" if check else "Planning for" if dry_run else "Prewarming"
    with FleetView(console, engine.name, doing) as view, invocation.signals.graceful():
        found = run_fleet(engine, view, invocation.signals.stop)
    if console.human:
        console.said(total_text(found, check=check))
    else:
        # JSON lines have had their shards; the others get all at once.
        rows = [] if console.format == "jsonl" else shard_records(found)
        console.table("prewarm", "shard", _COLUMNS, rows, summary=summary_record(found))
    tell_failures(console, found)
    return exit_code(found)


def _engine(
    invocation: Invocation, fleet: FleetOptions, specs: Sequence[str], arguments: Sequence[str]
) -> Engine:
    slurm = fleet.nodes == "slurm"
    # What is only looked up is printed at once: the command line of Slurm.
    own = [name for name in arguments if not (slurm and name == "--dry-run")]
    if fleet.shard_by_node:
        own += ["--shard-by-node", "--ranks-per-node", str(fleet.ranks_per_node or 1)]
    order = Order(
        specs=specs,
        options=invocation.handed_down(),
        arguments=own,
        ranks=(fleet.ranks_per_node or 1) if fleet.shard_by_node else 0,
    )
    if slurm:
        return SlurmEngine(order)
    only = [name.strip() for name in (fleet.ray_nodes or "").split(",") if name.strip()]
    return RayEngine(order, fleet.ray_address, only)
