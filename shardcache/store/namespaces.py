"""Who shares a copy: the node, or one rank or job for itself.

``isolation="node"`` (the default) is one namespace for everybody. With "rank"
or "job" each has entries, partials and locks of its own below ``v1/ranks``, so
nobody waits for anybody else; an entry that a sibling already has is shared by
hard link.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcache.config import Config
from shardcache.layout import Layout, is_directory, list_names
from shardcache.locks.mode import decide
from shardcache.modes import Modes
from shardcache.names import is_rank_name
from shardcache.ranks import Ranks, safe_name
from shardcache.store.root import check_group, check_links
from shardcache.store.store import Store

__all__ = ["Namespaces", "own_layout", "rank_layouts"]

#: The job of processes that no launcher named: they share one namespace per
#: rank, as they would without isolation.
_NO_JOB = "local"


def own_layout(node: Layout, config: Config, ranks: Ranks) -> Layout:
    """The namespace this process stores into, in the root whose node namespace is ``node``."""
    if config.isolation == "node":
        return node
    job = ranks.job or _NO_JOB
    name = job if config.isolation == "job" else f"{job}-{ranks.rank}"
    return node.rank(safe_name(name))


class Namespaces:
    """All namespaces of one root, as stores; safe between threads.

    Args:
        config: isolation and fsync policy.
        ranks: who we are.

    Raises:
        ConfigError: others share the root than the configuration says, or our namespace
            leads elsewhere.
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        modes = Modes.of(config.shared_group)
        check_group(config.dir, modes)
        self.locking = decide(config.dir, config.locks, config.touch_interval, modes)
        self.node = self.locking.layout(config.dir)
        self._verify = config.fsync == "verify-after-boot"
        layout = own_layout(self.node, config, ranks)
        if layout != self.node:
            check_links(layout)
        self.own = self._store(layout)
        self._others: dict[str, Store] = {}

    def _store(self, layout: Layout) -> Store:
        return Store(layout, verify_after_boot=self._verify)

    def siblings(self) -> Sequence[Store]:
        """Every namespace but our own, as they are now."""
        found = []
        for layout in (self.node, *rank_layouts(self.node)):
            if layout.base != self.own.layout.base:
                name = str(layout.base)
                store = self._others.get(name)
                if store is None:
                    store = self._others[name] = self._store(layout)
                found.append(store)
        return found

    def all(self) -> Sequence[Store]:
        """Every namespace, our own first."""
        return [self.own, *self.siblings()]


def rank_layouts(node: Layout) -> list[Layout]:
    """The namespaces of ranks and jobs that are in a root, as they are now.

    Raises:
        OSError: they cannot be listed.
    """
    # A name of another kind was not made by us, nor was what leads elsewhere.
    layouts = [node.rank(name) for name in list_names(node.ranks) if is_rank_name(name)]
    return [layout for layout in layouts if is_directory(layout.base) and not layout.linked()]
