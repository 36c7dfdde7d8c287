"""One directory of a cache, as one process has it: its namespaces, its session, its budget.

A cache has one, or with ``tiers`` several: a RAM disk before an SSD. Each is a cache of its own on
disk, with a manifest, sessions, pins and limits, so that any of them may be another job's only one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache import clock
from shardcache.config import Config, __version__
from shardcache.errors import ConfigError
from shardcache.files import Modes
from shardcache.layout import Layout, is_rank_name, list_names
from shardcache.locks.mounts import is_local, node_namespace
from shardcache.locks.sessions import Session, other_locks, stated_limits
from shardcache.ranks import Ranks, safe_name
from shardcache.space.memory import Volume
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

__all__ = ["Tier", "job_limits"]

#: The job of processes that no launcher named: they share one namespace per
#: rank, as they would without isolation.
_NO_JOB = "local"


def job_limits(config: Config) -> tuple[dict[str, str], str]:
    """The limits (see `Config.limits`) of the job that uses a cache, or of the last one.

    Of several jobs, those of the one with the smallest ``max_size``: it cleans until that holds.

    Returns:
        The limits, and ``running job`` or ``last job``.

    Raises:
        ConfigError, OSError: there is no such directory, or what is stated makes no sense.
    """
    found, running = stated_limits(_namespace(config, follow=True))
    volume = Volume.of(config.dir)

    def most(limits: dict[str, str]) -> float:
        budget = volume.budget(config.replace(**limits))
        return math.inf if budget is None else budget

    return min(found, key=most), "running job" if running else "last job"


def _namespace(config: Config, *, follow: bool) -> Layout:
    """The node's namespace.

    Args:
        config: options of the tier.
        follow: use the kind of lock that live processes use, whatever ``locks`` says. On a
            network filesystem, flock is not an option.
    """
    modes = Modes.of(config.shared_group)
    node = node_namespace(config.dir, config.locks, config.touch_interval, modes)
    with contextlib.suppress(OSError):
        other = other_locks(node) if follow else None
        # A network filesystem hides the flocks of other machines.
        if other == "lease" or (other == "flock" and is_local(config.dir)):
            return node_namespace(config.dir, other, config.touch_interval, modes)
    return node


class Tier:
    """See the module.

    Args:
        config: options; ``dir`` and the limits are this tier's.
        ranks: who we are.
        started: when the job began to use the cache, for the session; None for a command.
        warn: says something of a kind once (`process.Process.warn`).
        evicted: is told of every shard that is evicted here.

    Raises:
        ConfigError: others share the root than the configuration says, or our namespace
            leads elsewhere.
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
        self._look()

    def _look(self) -> None:
        """Find out where the namespaces are."""
        config = self.config
        check_manifest(config.dir, Modes.of(config.shared_group))
        #: The node's namespace. A command, which has no start, may lock in either way.
        self.node = _namespace(config, follow=self._started is None)
        own = self.node
        if config.isolation != "node":
            job = self._ranks.job or _NO_JOB
            name = job if config.isolation == "job" else f"{job}-{self._ranks.rank}"
            own = self.node.rank(safe_name(name))
            check_links(own)
        #: The namespace that this process stores into.
        self.store = self._store(own)

    def _store(self, layout: Layout) -> Store:
        return Store(layout, verify_after_boot=self.config.fsync == "verify-after-boot")

    def stores(self) -> list[Store]:
        """Every namespace as they are now, our own first."""
        # A name of another kind was not made by us, nor was what leads elsewhere.
        names = filter(is_rank_name, list_names(self.node.ranks))
        ranks = (rank for rank in map(self.node.rank, names) if rank.linked() is None)
        own = self.store.layout.base
        return [self.store, *(self._store(x) for x in (self.node, *ranks) if x.base != own)]

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
        node = make_root(self.config.dir, __version__, self.node.modes)
        self._look()  # anew: the directory of this node is named by the manifest
        if self.store.layout != node:
            self.store.layout.make()
        if self._started is None:
            self._session = Session(self.node, clock.time())
        else:
            self._session = Session(self.node, self._started, limits=self.config.limits())
        try:  # after registering: of two processes that start together, at least one is refused
            self.check_locks()
        except (ConfigError, OSError):
            self.end_session()
            raise
        self._identity = identity(self.config.dir, self.store.layout)
        if self.node.grace is not None and self.config.locks == "auto":
            self._warn(
                "locking",
                "%s is on no local filesystem. Nodes agree by leases on who fetches, and entries "
                "are evicted only after %s without use. A local disk is faster.",
                self.config.dir,
                format_duration(self.node.grace),
            )

    def check_locks(self) -> None:
        """Raise ConfigError if live processes use the other kind of lock."""
        if (other := other_locks(self.node)) is not None:
            kind = "flock" if other == "lease" else "lease"
            raise ConfigError(
                f"processes that use {self.config.dir} lock by {other}, and this one by {kind}: "
                "each kind would evict what the other one reads. Set locks to lease for all of "
                "them (SHARDCACHE_LOCKS=lease), use another directory, or wait until those "
                "processes have ended (for an hour if they were killed).",
                dir=self.config.dir,
            )

    def refresh_session(self) -> None:
        """See `Session.refresh`."""
        if (session := self._session) is not None:
            session.refresh()

    def changed(self) -> bool:
        """Whether the directory is not what it was, or was never made."""
        found = identity(self.config.dir, self.store.layout)
        return found is None or found != self._identity

    def space(self, config: Config | None = None) -> Space:
        """The budget, under these limits instead of its own; see `Space`."""
        from shardcache.space.budget import Space  # `import shardcache` stays light

        return Space(self.node, self.stores, config or self.config, self._evicted)

    def owns(self, directory: str) -> bool:
        """Whether an entry's directory is in it."""
        return directory.startswith(f"{self.node.base}/")

    def end_session(self) -> None:
        """Use it no longer. What this job used may go now."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            self.space().recount()
