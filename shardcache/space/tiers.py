"""One directory of a cache, as one process has it: its namespaces, its session, its budget.

A cache has one, or with ``tiers`` several: a RAM disk before an SSD. Each is a cache of its own on
disk, with a manifest, sessions, pins and limits, so that any of them may be another job's only one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache.config import Config, __version__
from shardcache.locks.sessions import Session
from shardcache.ranks import Ranks
from shardcache.store.root import Identity, identity, is_cache, make_root
from shardcache.store.store import Namespaces, Store
from shardcache.units import format_duration

if TYPE_CHECKING:
    from shardcache.space.budget import Space
    from shardcache.space.eviction import Removal

__all__ = ["Tier"]


class Tier:
    """See the module.

    Args:
        config: options; ``dir`` and the limits are this tier's.
        ranks: who we are.
        started: when the job began to use the cache, for the session.
        warn: says something of a kind once (`runtime.Process.warn`).
        evicted: is told of every shard that is evicted here.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        started: float,
        warn: Callable[..., None],
        evicted: Callable[[Removal], None],
    ) -> None:
        self.config = config
        self.namespaces = Namespaces(config, ranks)
        self._ranks = ranks
        self._started = started
        self._warn = warn
        self._evicted = evicted
        self._session: Session | None = None
        self._identity: Identity | None = None

    @property
    def store(self) -> Store:
        """The namespace that this process stores into."""
        return self.namespaces.own

    @property
    def made(self) -> bool:
        """Whether it could be made, or was there, when that was last tried."""
        return self._identity is not None

    @property
    def present(self) -> bool:
        """Whether there is a cache in its directory."""
        return self.made or is_cache(self.config.dir)

    def make(self) -> None:
        """Make the directories, and register this process.

        Raises:
            ConfigError: the directory must not be used.
            OSError: it cannot be made or written.
        """
        self.end_session()
        self._identity = None
        node = make_root(self.config.dir, __version__, self.namespaces.node.modes)
        # Anew: the directory of this node is named by the manifest.
        self.namespaces = Namespaces(self.config, self._ranks)
        own, layout = self.namespaces.own.layout, self.namespaces.node
        if own != node:
            own.make()
        self._identity = identity(self.config.dir, own)
        if layout.grace is not None and self.config.locks == "auto":
            self._warn(
                "locking",
                "%s is on no local filesystem. Nodes agree by leases on who fetches, and entries "
                "are evicted only after %s without use. A local disk is faster.",
                self.config.dir,
                format_duration(layout.grace),
            )
        self._session = Session(layout, self._started)

    def changed(self) -> bool:
        """Whether the directory is not what it was, or was never made."""
        found = identity(self.config.dir, self.namespaces.own.layout)
        return found is None or found != self._identity

    def space(self, config: Config | None = None) -> Space:
        """The budget, under these limits instead of its own; see `Space`."""
        from shardcache.space.budget import Space  # `import shardcache` stays light

        return Space(
            self.namespaces.node, self.namespaces.all, config or self.config, self._evicted
        )

    def owns(self, directory: str) -> bool:
        """Whether an entry's directory is in it."""
        return directory.startswith(f"{self.namespaces.node.base}/")

    def end_session(self) -> None:
        """Use it no longer. What this job used may go now."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            self.space().recount()
