"""`Cache`: the one object users hold.

It may be shared by threads, pickled, forked and spawned: what belongs to a
process (descriptors, clients, locks, the session) is made on first use in that
process and never carried into another.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict, TypeVar, Unpack

from shardcache import clock, threads
from shardcache.config import Config, Options, __version__, load
from shardcache.files import Modes
from shardcache.origins.endpoints import endpoint_of
from shardcache.ranks import detect
from shardcache.runtime import Processes
from shardcache.store.entry import DamagedError, Entry
from shardcache.store.root import check_root, make_root, require_cache
from shardcache.streams.opener import Opener
from shardcache.units import parse_duration
from shardcache.urls import ShardURL, parse_url

if TYPE_CHECKING:
    from shardcache.fetch.status import FetchStatus
    from shardcache.results import Event, PrewarmReport
    from shardcache.space.clean import CleanReport
    from shardcache.stats.database import Sample
    from shardcache.stats.summary import Stats
    from shardcache.store.verify import Finding, VerifyStatus

__all__ = ["Cache", "default_cache", "url_opener"]

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")
#: What WebDataset asks about an error: True goes on, False stops.
Handler = Callable[[Exception], bool]

#: URLs remembered, about 700 bytes each.
_REMEMBERED = 100_000


class PrewarmOptions(TypedDict, total=False):
    """What `Cache.prewarm` takes by name, for type checkers and editors; see `prewarm.prewarm`."""

    jobs: int
    check: bool
    dry_run: bool
    deadline: float | None
    max_failures: int | None
    best_effort: bool
    limit_rate: int | str | None
    refresh: bool
    processes: int
    on_event: Callable[[Event], None] | None
    stop: threading.Event | None


class Cache:
    """A directory on a local disk that holds shards.

    A fault of the cache never fails a read that the origin can serve, unless ``strict``: one
    warning, then shards are streamed.

    Args:
        dir: where; also from ``SHARDCACHE_DIR`` or a configuration file.
        **options: see `Config`; the same names as in the environment
            (``SHARDCACHE_MAX_SIZE``) and in ``shardcache.toml``.

    Raises:
        ConfigError: an option that cannot work. The directory is made on first
            use, not here.
    """

    def __init__(
        self, dir: str | os.PathLike[str] | None = None, **options: Unpack[Options]
    ) -> None:
        self._setup(load({"dir": dir, **options}).config, clock.time())

    @classmethod
    def from_config(cls, config: Config, *, started: float | None = None) -> Cache:
        """A cache with exactly this configuration, whatever the environment says.

        Args:
            config: the options.
            started: when the job began to use the cache, in seconds since the epoch; the
                default is now.
        """
        made = cls.__new__(cls)
        made._setup(config, clock.time() if started is None else started)
        return made

    def _setup(self, config: Config, started: float) -> None:
        self.config = config
        self._started = started
        #: What belongs to each process, and what opens shards; for the rooms of this package.
        self.processes = Processes(config, detect(), started)
        self.opener = Opener(config, self.processes.here)
        self._here = self.processes.here
        endpoint, schemes = endpoint_of(config), config.allow_schemes
        # Parsing costs more than opening; epochs ask for the same URLs again.
        self._parse = lru_cache(_REMEMBERED)(
            partial(parse_url, endpoint=endpoint, allow_schemes=schemes)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self).from_config, started=self._started), (self.config,)

    def __repr__(self) -> str:
        return f"<shardcache.Cache {str(self.dir)!r} isolation={self.config.isolation}>"

    @property
    def dir(self) -> Path:
        """The root directory."""
        return self.config.dir

    def parse(self, url: str) -> ShardURL:
        """The shard's names under this cache's endpoint and schemes (ConfigError: no such URL)."""
        return self._parse(url)

    # -- reading ---------------------------------------------------------------

    def prepare(self, url: str | None = None) -> None:
        """Begin to make ready, in the background, what the first miss of this process needs.

        The directories, the engine's modules, and the client of the origin of ``url``, which
        together take some tenths of a second. Nothing is fetched. What fails is reported by the
        read that needs it.
        """

        def run() -> None:
            try:
                with threads.undivided():
                    process = self._here()
                    process.coordinator()
                    if url is not None:
                        process.origins.prepare(self.parse(url))
            except Exception as exn:  # noqa: BLE001 - see above
                logger.debug("not prepared: %s", exn)

        with contextlib.suppress(RuntimeError):  # a limit of processes
            threads.start(run, "shardcache-prepare")

    def open(self, url: str) -> BinaryIO:
        """Open a shard for reading: from the cache, fetched meanwhile if need be.

        The first bytes can be read while the others are on their way (``fill="follow"``);
        the fetch goes on to its end even if the stream is closed before. The stream's
        ``name`` is the local path, or the URL where the shard was not in the cache.
        While it is open the entry cannot be evicted.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError,
            IntegrityError: the origin cannot serve it.
            CacheFullError, LockTimeoutError, OSError: with ``strict`` only.
        """
        return self.opener.open(self._parse(url))[0]

    @contextlib.contextmanager
    def pinned(self, url: str) -> Iterator[Path]:
        """The shard as a file that stays while the context lasts.

        Raises:
            As `open` with ``strict``: a path needs a stored shard.
        """
        shard = self.parse(url)
        if self.opener.is_in_place(shard):
            yield shard.local_path
            return
        opened = self.opener.pin(shard)
        try:
            yield Path(opened.path)
        finally:
            opened.close()

    def fetch(self, url: str, status: FetchStatus | None = None) -> Entry:
        """Make sure that the shard is in the cache; returns its entry, and raises as `pinned`.

        ``status`` is kept up to date while it is fetched.
        """
        return self.opener.fetch(self.parse(url), status)[0]

    def path(self, url: str) -> Path | None:
        """Where the shard is, or None if it is not cached. Not pinned: it may go any time."""
        shard = self.parse(url)
        if self.opener.is_in_place(shard):
            return shard.local_path if shard.local_path.exists() else None
        entry = self.entry(url)
        return None if entry is None else entry.data

    def entry(self, url: str) -> Entry | None:
        """The shard's entry, or None if it is not cached."""
        shard = self.parse(url)
        for store in self._here().stores():
            try:
                opened = store.open(shard.key, shard.basename)
            except DamagedError as exn:
                logger.info("%s: not used: %s", shard, exn)
                continue
            if opened is not None:
                opened.close()
                return opened.entry
        return None

    def __contains__(self, url: str) -> bool:
        return self.path(url) is not None

    # -- ways in ---------------------------------------------------------------

    def attach(self, dataset: _Pipeline, *, fast_tar: bool = True) -> _Pipeline:
        """Make a WebDataset pipeline read its shards through this cache; see `wds.attach`."""
        attached: _Pipeline = _room_above("wds").attach(dataset, self, fast_tar=fast_tar)
        return attached

    def url_opener(
        self, data: Iterable[Any], handler: Handler | None = None, **kw: Any
    ) -> Iterator[dict[str, Any]]:
        """A stage in place of ``webdataset.tariterators.url_opener``; see `wds.url_opener`."""
        yield from _room_above("wds").url_opener(data, handler, cache=self, **kw)

    def prewarm(
        self, urls: str | Iterable[str | ShardURL], **options: Unpack[PrewarmOptions]
    ) -> PrewarmReport:
        """Fetch many shards at once; see `prewarm.prewarm` for the options."""
        report: PrewarmReport = _room_above("prewarm").prewarm(self, urls, **options)
        return report

    # -- looking after it ------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """Every entry, of all tiers and namespaces, in no order."""
        for store in self._here().stores():
            yield from store.entries()

    def clean(
        self,
        *,
        max_size: int | str | None = None,
        min_free: int | str | None = None,
        max_age: float | str | None = None,
        orphans: bool = False,
        everything: bool = False,
        dry_run: bool = False,
        wait: bool = True,
    ) -> CleanReport:
        """Remove entries until the limits hold, and what dead processes left.

        Args:
            max_size, min_free, max_age: instead of the configured limits.
            orphans: also remove the partials that dead processes left within the last hour,
                which otherwise stay to be resumed; and nothing else, unless limits are given.
            everything: remove all that nobody uses.
            dry_run: touch nothing, tell what would go.
            wait: whether to wait for somebody else who cleans it, ``lock_timeout`` at most.

        Raises:
            ConfigError: the directory is not a cache.
            LockTimeoutError: somebody else cleans it.
            OSError: the filesystem is read-only or failing.
        """
        from shardcache.space import clean as cleaning
        from shardcache.space.eviction import Limits

        require_cache(self.dir)
        # The sizes that are given are those of `dir`; other tiers have their own.
        sizes = {"max_size": max_size, "min_free": min_free}
        sweep_only = orphans and max_size is min_free is max_age is None
        process = self._here()
        reports = []
        for tier in process.present:
            if not dry_run and os.geteuid() != 0:  # root may clean for others
                check_root(tier.config.dir, tier.node.modes)
            given = {"max_age": max_age, **(sizes if tier is process.home else {})}
            changes = {name: value for name, value in given.items() if value is not None}
            space = tier.space(tier.config.replace(**changes) if changes else None)
            with contextlib.nullcontext() if dry_run else space.sole_cleaner(wait=wait):
                none = Limits(everything=everything)
                chosen = none if everything or sweep_only else space.limits()
                reports.append(cleaning.clean(space, chosen, orphans=orphans, dry_run=dry_run))
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
        from shardcache.store.verify import Verifier, VerifyStatus

        require_cache(self.dir)
        process = self._here()
        return Verifier(
            stores=process.stores(),
            origins=process.origins if process.ready else Origins(self.config),
            policy=RetryPolicy(self.config.attempts, self.config.deadline),
            parse=self.parse,
            quick=quick,
            remote=remote,
            sample=sample,
            sole=process.coordinator().sole if repair else None,
            wanted=wanted,
            status=status or VerifyStatus(),
            stop=stop or threading.Event(),
        ).findings()

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
        self.opener.refuse_in_place(shard)
        until = None if seconds is None else clock.time() + seconds
        for config in self.config.by_tier():
            node = make_root(config.dir, __version__, Modes.of(config.shared_group))
            pins.pin(node, shard, until)

    def unpin(self, url: str) -> bool:
        """Keep a shard no longer; False if it was not pinned. Raises as `pin`."""
        from shardcache.space import pins

        require_cache(self.dir)
        key = self.parse(url).key
        found = False
        for tier in self._here().present:
            found |= pins.unpin(tier.node, key)
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

        require_cache(self.dir)
        key, now = self.parse(url).key, clock.time()
        freed = stay = 0
        for tier in self._here().present:
            pinned = key in pinned_keys(tier.node, now)
            stores = tier.stores()
            removed, size, in_use = cleaning.remove(stores, key, pinned=pinned, dry_run=dry_run)
            if removed and not dry_run:
                tier.space().recount()
                self._here().counters.add({"evicted_asked": removed, "bytes_evicted": size})
            freed += size
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

        Args and errors as for `stats`; with ``ever`` also what is older than 30 days, as one
        sample from the epoch.
        """
        from shardcache.stats.database import samples

        self._here().counters.flush()
        begin = 0.0 if since is None else clock.time() - parse_duration(since)
        return samples(self._here().home.node, begin, ever=ever)

    # -- ending ----------------------------------------------------------------

    def close(self) -> None:
        """End this process's session; the cache can be used again afterwards."""
        if (process := self.processes.made()) is not None:
            process.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@cache
def default_cache() -> Cache:
    """The cache that ``SHARDCACHE_DIR``, ``SHARDCACHE_CONFIG`` and the like describe.

    Made once per process; a forked child uses the same object, safely.

    Raises:
        ConfigError: no directory is set anywhere, or an option cannot work.
    """
    return Cache()


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, **kw: Any
) -> Iterator[dict[str, Any]]:
    """A drop-in for ``webdataset.tariterators.url_opener`` on the default cache."""
    return default_cache().url_opener(data, handler, **kw)


def _room_above(name: str) -> Any:
    """A room that uses the cache, loaded when a method of `Cache` leads there."""
    return importlib.import_module(f"shardcache.{name}")
