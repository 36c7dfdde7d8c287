"""Looking after a cache: what is in it, what it has done, cleaning, verifying, pins.

The half of `Cache` that reads no shards. Nothing here makes a cache of a directory that is
none, but for a pin, which may come before the first shard. Safe beside jobs that read, in any
number of processes and threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.files import Modes
from shardcache.layout import Layout
from shardcache.runtime import Process, Processes
from shardcache.store.root import check_links, is_cache, make_root
from shardcache.store.store import Entry, Store
from shardcache.units import parse_duration
from shardcache.urls import ShardURL
from shardcache.version import __version__

if TYPE_CHECKING:
    from shardcache.space.clean import CleanReport, CleanStatus
    from shardcache.stats.database import Sample
    from shardcache.stats.summary import Stats
    from shardcache.store.verify import Finding, VerifyStatus

__all__ = ["Upkeep", "check_cached"]


class Upkeep:
    """What a `Cache` is asked for by those who look after it; see there."""

    # `Cache` sets them.
    config: Config
    _clock: Clock
    _processes: Processes

    if TYPE_CHECKING:

        def parse(self, url: str) -> ShardURL:
            """See `Cache.parse`."""

    def _here(self) -> Process:
        return self._processes.here()

    def entries(self) -> Iterator[Entry]:
        """Every entry, of all tiers and namespaces, in no order."""
        for store in self.stores():
            yield from store.entries()

    def stores(self) -> Sequence[Store]:
        """Every namespace of every tier, for what looks at its files."""
        return self._here().stores()

    def clean(
        self,
        *,
        max_size: int | str | None = None,
        min_free: int | str | None = None,
        max_age: float | str | None = None,
        orphans: bool = True,
        limits: bool = True,
        everything: bool = False,
        dry_run: bool = False,
        wait: bool = True,
        status: CleanStatus | None = None,
    ) -> CleanReport:
        """Remove entries until the limits hold, and what dead processes left.

        Args:
            max_size, min_free, max_age: instead of the configured limits.
            orphans: sweep what dead processes left.
            limits: apply limits; False sweeps only.
            everything: remove all that nobody uses.
            dry_run: touch nothing, tell what would go.
            wait: whether to wait for somebody else who cleans it, ``lock_timeout`` at most.
            status: is kept up to date while it runs.

        Raises:
            ConfigError: the directory is not a cache.
            LockTimeoutError: somebody else cleans it.
            OSError: the filesystem is read-only or failing.
        """
        from shardcache.space import clean as cleaning
        from shardcache.space.eviction import Limits

        self._require_cache()
        # The sizes that are given are those of `dir`; other tiers have their own.
        sizes = {"max_size": max_size, "min_free": min_free}
        process = self._here()
        reports = []
        if not dry_run:
            for tier in process.present:
                tier.check()
        for tier in process.present:
            given = {"max_age": max_age, **(sizes if tier is process.home else {})}
            changes = {name: value for name, value in given.items() if value is not None}
            space = tier.space(tier.config.replace(**changes) if changes else None)
            chosen = space.limits() if limits else Limits()
            if everything:
                chosen = Limits(everything=True)
            alone = contextlib.nullcontext() if dry_run else space.sole_cleaner(wait=wait)
            with alone:
                report = cleaning.clean(
                    space, tier.stores(), chosen, orphans=orphans, dry_run=dry_run, status=status
                )
                reports.append(report)
        return cleaning.joined(reports)

    def verify(
        self,
        wanted: Callable[[str], bool] | None = None,
        *,
        quick: bool = False,
        remote: bool = False,
        repair: bool = False,
        sample: float = 1.0,
        status: VerifyStatus | None = None,
        stop: threading.Event | None = None,
    ) -> Generator[Finding, None, None]:
        """Compare entries with what was fetched; yields what was found of each, in no order.

        Safe beside jobs: entries are pinned while they are read, no last use changes, and
        what is evicted meanwhile is left out.

        Args:
            wanted: says of a URL whether its shard is to be looked at, or of the data file's
                name where the sidecar does not tell the URL; None takes all.
            quick: compare sizes, read no data.
            remote: ask the origin of each shard which version it has.
            repair: set damaged entries aside, so that the next reader fetches them anew.
            sample: share of the shards to look at, above 0 and up to 1; at least one is.
            status: is kept up to date.
            stop: ends it early once set.

        Raises:
            ConfigError: the directory is not a cache, or no such ``sample``.
            OSError: it cannot be read, or with ``repair`` and ``strict`` not be written.
        """
        from shardcache.origins.resolve import Origins
        from shardcache.origins.retry import RetryPolicy
        from shardcache.store.verify import Checks, verify

        self._require_cache()
        checks = Checks(quick=quick, remote=remote, sample=sample)
        config, process = self.config, self._here()
        origins = process.origins if process.ready else Origins(config, self._clock)
        policy = RetryPolicy(config.attempts, config.deadline, self._clock)
        return verify(
            process.stores(),
            origins,
            policy,
            self.parse,
            checks=checks,
            sole=process.coordinator().sole if repair else None,
            wanted=wanted,
            status=status,
            stop=stop,
        )

    def pin(self, url: str, seconds: float | None = None) -> None:
        """Keep a shard, now or once it is fetched: nothing evicts it, nor ``clean --all``.

        Args:
            url: the shard.
            seconds: for how long; None until `unpin`.

        Raises:
            ConfigError: the directory must not be used, or not a URL that is cached.
            OSError: the disk is full, read-only or failing.
        """
        from shardcache.space import pins

        shard = self.parse(url)
        check_cached(shard, self.config)
        until = None if seconds is None else self._clock.time() + seconds
        for config in self.config.by_tier():
            node = make_root(config.dir, __version__, Modes.of(config.shared_group))
            pins.pin(node, shard, until)

    def unpin(self, url: str) -> bool:
        """Keep a shard no longer; False if it was not pinned.

        Raises:
            As `pin`.
        """
        from shardcache.space import pins

        self._require_cache()
        key = self.parse(url).key
        found = False
        for tier in self._here().present:
            found |= pins.unpin(tier.namespaces.node, key)
            tier.space().recount()
        return found

    def remove(self, url: str, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove one shard, all versions that nobody uses.

        Returns:
            Bytes freed, and how many entries stay because they are pinned or in use.

        Raises:
            ConfigError: the directory is not a cache, or not a URL.
            OSError: the filesystem is read-only or failing.
        """
        from shardcache.space import clean as cleaning
        from shardcache.space.pins import pinned_keys

        self._require_cache()
        key, now = self.parse(url).key, self._clock.time()
        freed = stay = 0
        for tier in self._here().present:
            pinned = key in pinned_keys(tier.namespaces.node, now)
            removed, in_use = cleaning.remove(tier.stores(), key, pinned=pinned, dry_run=dry_run)
            if removed and not dry_run:
                tier.space().recount()
                count = {"evicted_asked": len(removed)}
                count["bytes_evicted"] = sum(removal.size for removal in removed)
                self._here().counters.add(count)
            freed += sum(removal.size for removal in removed)
            stay += in_use
        return freed, stay

    def stats(self, since: float | str | None = None) -> Stats:
        """What the cache has done on this node: opens, bytes, waits, evictions, by all processes.

        Args:
            since: how far back, in seconds or as text such as "24h"; None for the 30 days that
                are kept.

        Raises:
            ConfigError: ``since`` is no duration.
            OSError: the directory cannot be read.
        """
        from shardcache.stats.summary import summed

        return summed(self.samples(since))

    def samples(self, since: float | str | None = None, *, ever: bool = False) -> list[Sample]:
        """What was counted, minute by minute, or hour by hour where that is longer ago.

        Args:
            since: as for `stats`.
            ever: also what is older than 30 days, as one sample from the epoch.

        Raises:
            As `stats`.
        """
        from shardcache.stats.database import samples

        self._here().counters.flush()
        begin = 0.0
        if since is not None:
            begin = self._clock.time() - parse_duration(since)
        return samples(self._here().home.namespaces.node, begin, ever=ever)

    @property
    def node_layout(self) -> Layout:
        """The node's namespace of ``dir``, for what looks at its files."""
        return self._here().home.namespaces.node

    def counted(self) -> list[int]:
        """What this process alone has counted since it began, in the order of `counters.blank`."""
        return self._processes.counted()

    def under_way(self) -> int:
        """How many shards this process fetches or waits for at this moment, for its readers."""
        process = self._processes.made()
        return 0 if process is None or process.ready is None else process.unfinished

    def zero_stats(self) -> None:
        """Begin to count anew, for all processes.

        Raises:
            ConfigError: the directory is not a cache.
            OSError: the filesystem is read-only or failing.
        """
        from shardcache.stats import database

        self._require_cache()
        process = self._here()
        process.counters.flush()
        database.zero(process.home.namespaces.node)

    def _require_cache(self) -> None:
        root = self.config.dir
        check_links(Layout.of_root(root))
        if not is_cache(root):
            raise ConfigError(
                f"{root} is not a shardcache directory (it has no manifest.json), so nothing in it "
                "is touched. Check dir.",
                dir=root,
            )


def check_cached(shard: ShardURL, config: Config) -> None:
    """Refuse what is read where it lies."""
    if shard.is_local and not config.cache_local:
        raise ConfigError(
            f"{shard.local_path} is opened where it is and not cached; set cache_local if it "
            "lies on a slow mount.",
            url=str(shard),
        )
