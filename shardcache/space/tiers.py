"""One directory of a cache in one process: its namespaces, session and budget.

A cache has one directory, or several with ``tiers``, such as a RAM disk in front of an SSD. Each
directory is a cache of its own, with a manifest, sessions, pins and limits, so another job may use
it alone. A namespace is a tree of entries, partials and locks: the node's, or with ``isolation`` a
rank's or job's. A session is a file that shows that a process uses the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache import clock
from shardcache.config import Config
from shardcache.layout import Layout, is_rank_name, list_names
from shardcache.locks.mounts import node_namespace
from shardcache.locks.sessions import Session, live_sessions, state_limits
from shardcache.ranks import Ranks, safe_name
from shardcache.store.entry import Store
from shardcache.store.root import (
    Identity,
    check_links,
    check_manifest,
    identity,
    is_cache,
    make_root,
)
from shardcache.units import format_duration

if TYPE_CHECKING:
    from shardcache.space.budget import Space
    from shardcache.space.eviction import Removal

#: The job of processes without a launcher. They share one namespace per rank.
_NO_JOB = "local"


class Tier:
    """One directory of a cache in one process.

    Args:
        config: options, with the ``dir`` and the limits of this tier.
        ranks: the job and the rank of this process.
        started: when the job began to use the cache (seconds since the epoch); None for a command.
        warn: logs a warning once per kind (`process.Process.warn`).
        evicted: called with every shard that is evicted here.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        started: float | None,
        warn: Callable[..., None],
        evicted: Callable[[Removal], None],
    ) -> None:
        self.config = config
        self._ranks = ranks
        self._started = started
        self._warn = warn
        self._evicted = evicted
        self._session: Session | None = None
        self._identity: Identity | None = None
        self._locate()

    def _locate(self) -> None:
        """Determine the namespaces from the configuration and the manifest."""
        config = self.config
        #: The node's namespace.
        self.node = node_namespace(config)
        own = self.node
        if config.isolation != "node":
            name = self._ranks.job or _NO_JOB
            if config.isolation == "rank":
                name += f"-{self._ranks.rank}"
            own = self.node.rank(safe_name(name))
        #: The namespace that this process stores into.
        self.store = self._store(own)

    def _store(self, layout: Layout) -> Store:
        return Store(layout, verify_after_boot=self.config.fsync == "verify-after-boot")

    def stores(self) -> list[Store]:
        """Return all namespaces on the disk, this process's namespace first."""
        # Symbolic links, and directories with other names, belong to other programs.
        ranks = map(self.node.rank, filter(is_rank_name, list_names(self.node.ranks)))
        every = [self.node, *(rank for rank in ranks if rank.linked() is None)]
        own = self.store.layout.base
        return [self.store, *(self._store(each) for each in every if each.base != own)]

    def check(self) -> None:
        """Raise ConfigError if the directory must not be used."""
        check_manifest(self.config)
        check_links(self.store.layout)

    @property
    def made(self) -> bool:
        """Whether the last call of `make` succeeded."""
        return self._identity is not None

    @property
    def present(self) -> bool:
        """Whether there is a cache in the directory."""
        return self.made or is_cache(self.config.dir)

    def make(self) -> None:
        """Create the directories that are missing, and a session for this process.

        Raises:
            ConfigError: the directory must not be used as this cache.
            OSError: the directory cannot be created or written.
        """
        self.end_session()
        self._identity = None
        node = make_root(self.config)
        self._locate()  # again, because the manifest names the directory of this node
        check_links(self.store.layout)
        if self.store.layout != node:
            self.store.layout.make()
        self._session = Session(self.node, self._started or clock.time())
        if self._started is not None:
            state_limits(self.node, self._started, self.config.limits())
        self._identity = identity(self.config.dir, self.store.layout)
        if self.node.grace is not None and self.config.locks == "auto":
            self._warn(
                "locking",
                "%s is not on a local disk, or was made where it is not, so shardcache uses leases "
                "instead of locks, and evicts entries only after %s without use. A local disk is "
                "faster.",
                self.config.dir,
                format_duration(self.node.grace),
            )

    def changed(self) -> bool:
        """Return whether the directory is gone, was replaced, or was never set up by `make`."""
        current = identity(self.config.dir, self.store.layout)
        return current is None or current != self._identity

    def space(self, config: Config | None = None) -> Space:
        """Return the budget of this tier, with the limits of ``config`` if it is given."""
        from shardcache.space.budget import Space  # not at the top: `import shardcache` stays fast

        return Space(self.node, self.stores, config or self.config, self._evicted)

    def owns(self, directory: str) -> bool:
        """Return whether an entry's directory is in this tier."""
        return directory.startswith(f"{self.node.base}/")

    def end_session(self) -> None:
        """Close the session, so that the shards that this job used may be evicted.

        They may be evicted unless another process has a session that began as early, such as the
        owner of a DataLoader's worker.
        """
        session, self._session = self._session, None
        if session is not None:
            session.close()
            with contextlib.suppress(OSError):
                others = live_sessions(self.node)
                if session.started < min(others, default=math.inf):
                    self.space().forget_refusal()
