"""Which shards a node of a job needs, where a data set is split among nodes.

WebDataset's ``split_by_node`` gives rank r of w the shards r, r + w, r + 2w, ... of the list as
it was expanded, before any shuffling. A node with several ranks needs the shards of all of them.

Ranks are numbered node by node, as torchrun and Slurm (``--distribution=block``) have it: with
k ranks per node, node n has the ranks n*k to n*k + k - 1.

Values and pure functions only; the environment is read and never changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shardcache.errors import ConfigError

__all__ = ["Share", "own_share"]

_Item = TypeVar("_Item")

#: Where launchers state the node's number and how many there are: a Slurm step (its own number
#: of nodes, else the allocation's), torchrun (one group of workers per node).
_STATED = (
    ("SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    ("GROUP_RANK", ("GROUP_WORLD_SIZE",)),
)


@dataclass(frozen=True, slots=True)
class Share:
    """One node's part of a list.

    Attributes:
        node: its number, from 0 on.
        count: how many nodes there are.
        ranks: processes of the training run on each node.

    Raises:
        ConfigError: numbers that do not fit each other.
    """

    node: int
    count: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.ranks < 1:
            raise ConfigError(
                f"{self.count} nodes with {self.ranks} ranks each is no split. Give at least 1."
            )
        if not 0 <= self.node < self.count:
            raise ConfigError(
                f"node {self.node} is not one of {self.count}: they are numbered from 0 to "
                f"{self.count - 1}. Correct --node-rank or --node-count."
            )

    @property
    def world(self) -> int:
        """Ranks altogether."""
        return self.count * self.ranks

    def of(self, items: Sequence[_Item]) -> list[_Item]:
        """The items that this node's ranks read, in the order of the list."""
        first = self.node * self.ranks
        mine = range(first, first + self.ranks)
        return [item for index, item in enumerate(items) if index % self.world in mine]


def own_share(
    node: int | None, count: int | None, ranks: int, environ: Mapping[str, str] | None = None
) -> Share:
    """This node's share: as stated, else as its launcher says.

    Raises:
        ConfigError: neither tells, or what they say cannot be.
    """
    if (node is None) != (count is None):
        raise ConfigError("--node-rank and --node-count go together: give both, or neither.")
    if node is not None and count is not None:
        return Share(node, count, ranks)
    env = os.environ if environ is None else environ
    for name, counts in _STATED:
        total = next((n for n in counts if env.get(n, "").strip()), None)
        if env.get(name, "").strip() and total is not None:
            return Share(_whole(env, name), _whole(env, total), ranks)
    raise ConfigError(
        "--shard-by-node needs to know which node this is: run it as a Slurm step (srun), with "
        "--nodes ray or slurm, or state --node-rank and --node-count."
    )


def _whole(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ConfigError(f"{name}={text[:40]!r} is no whole number. Correct it or unset it.")
    return int(text)
