"""`Cache`: the one object users hold.

It may be shared by threads, pickled, forked and spawned: what belongs to a
process (descriptors, clients, locks, the session) is made on first use in that
process and never carried into another.

A fault of the cache never fails a read that the origin can serve, unless
``strict``: one warning, then shards are streamed.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, Unpack

from shardcache import config as configuration
from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.config import Config, __version__
from shardcache.errors import (
    ConfigError,
    ShardNotFoundError,
)
from shardcache.files import Modes
from shardcache.layout import Layout
from shardcache.origins.endpoints import endpoint_of
from shardcache.ranks import detect
from shardcache.runtime import Process, Processes, in_background
from shardcache.store.entry import DamagedError
from shardcache.store.root import check_links, is_cache, make_root
from shardcache.store.store import Entry, Opened, Store
from shardcache.streams.opener import Opener
from shardcache.streams.prefetch import Lookahead
from shardcache.units import parse_duration
from shardcache.urls import ShardURL, parse_url

if TYPE_CHECKING:
    from shardcache.fetch.background import Share
    from shardcache.fetch.transfer import FetchStatus
    from shardcache.options import Handler, Options, PrewarmOptions
    from shardcache.results import PrewarmReport
    from shardcache.space.clean import CleanReport, CleanStatus
    from shardcache.stats.database import Sample
    from shardcache.stats.summary import Stats
    from shardcache.store.verify import Finding, VerifyStatus

__all__ = ["Cache", "default_cache", "url_opener"]

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")

#: URLs remembered, about 500 bytes each.
_REMEMBERED = 100_000


class Cache:
    """A directory on a local disk that holds shards.

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
        loaded = configuration.load({"dir": dir, **options})
        self._setup(loaded.config, loaded.sources, SYSTEM_CLOCK, None)

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        sources: Mapping[str, str] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> Cache:
        """A cache with exactly this configuration, whatever the environment says."""
        cache = cls.__new__(cls)
        cache._setup(config, sources or {}, clock, None)
        return cache

    def _setup(
        self, config: Config, sources: Mapping[str, str], clock: Clock, started: float | None
    ) -> None:
        self.config = config
        self.sources = dict(sources)
        self._clock = clock
        self._started = clock.time() if started is None else started
        self._endpoint = endpoint_of(config)
        self._processes = Processes(config, detect(), clock, self._started)
        self._opener = Opener(config, self._processes.here, clock)
        # Parsing costs more than opening; epochs ask for the same URLs again.
        self._parsed: dict[str, ShardURL] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "sources": self.sources,
            "clock": self._clock,
            "started": self._started,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._setup(state["config"], state["sources"], state["clock"], state["started"])

    def __repr__(self) -> str:
        return f"<shardcache.Cache {str(self.dir)!r} isolation={self.config.isolation}>"

    def _repr_html_(self) -> str:
        """What notebooks show: where it is, and what it has done."""
        import html

        return f"<p><code>{html.escape(repr(self))}</code></p>{self.stats()._repr_html_()}"

    @property
    def dir(self) -> Path:
        """The root directory."""
        return self.config.dir

    def parse(self, url: str) -> ShardURL:
        """The shard's names under this cache's endpoint and schemes.

        Raises:
            ConfigError: not a URL this cache reads.
        """
        shard = self._parsed.get(url)
        if shard is None:
            shard = parse_url(url, endpoint=self._endpoint, allow_schemes=self.config.allow_schemes)
            if len(self._parsed) >= _REMEMBERED:
                self._parsed.clear()
            self._parsed[url] = shard
        return shard

    # -- reading ---------------------------------------------------------------

    def prepare(self, url: str | None = None) -> None:
        """Begin to make ready, in the background, what the first miss of this process needs.

        The directories, the engine's modules, and the client of the origin, which together
        take some tenths of a second. Nothing is fetched. What fails is reported by the read
        that needs it.

        Args:
            url: a shard, for its origin's client.
        """
        in_background(lambda: self.prepare_here(url))

    def prepare_here(self, url: str | None = None) -> None:
        """As `prepare`, in the calling thread.

        Raises:
            As `open` with ``strict``.
        """
        import filelock  # noqa: F401 - what is imported on first use, for `import shardcache`
        import xxhash  # noqa: F401

        import shardcache.streams.stream  # noqa: F401

        process = self._here()
        process.coordinator()
        if url is not None:
            process.origins.prepare(self.parse(url))

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
        shard = self._parsed.get(url) or self.parse(url)
        if shard.scheme == "file":
            return self.open_shard(shard)[0]
        return self._opener.open(shard)[0]

    def open_shard(
        self, shard: ShardURL, *, finish: bool = True, ahead: Share | None = None
    ) -> tuple[BinaryIO, str | None]:
        """As `open`, for a parsed URL; also the local path, or None while it has none.

        Args:
            shard: which.
            finish: whether a fetch goes on to its end when the stream is closed before.
            ahead: the fetch that was begun for it; see `lookahead`.
        """
        if shard.is_local and not self.config.cache_local:
            path = str(shard.local_path)
            try:
                return open(path, "rb"), path
            except FileNotFoundError as exn:
                raise ShardNotFoundError(
                    f"{path} does not exist. Check the pattern.", url=str(shard)
                ) from exn
        return self._opener.open(shard, finish=finish, ahead=ahead)

    def lookahead(self, data: Iterable[Any], url: Callable[[Any], str]) -> Lookahead:
        """The items of a list, whose next ``prefetch`` shards are fetched before they are opened.

        Args:
            data: the list; it may be endless.
            url: tells the URL of an item.
        """

        def begin(item: Any) -> Opened | Share | None:
            shard = self.parse(url(item))
            local = shard.is_local and not self.config.cache_local
            return None if local else self._opener.ahead(shard)

        def open_item(item: Any, share: Share | None) -> tuple[BinaryIO, str | None]:
            return self.open_shard(self.parse(url(item)), finish=False, ahead=share)

        return Lookahead(data, begin, open_item, self.config.prefetch)

    @contextlib.contextmanager
    def pinned(self, url: str) -> Iterator[Path]:
        """The shard as a file that stays while the context lasts.

        Raises:
            As `open` with ``strict``: a path needs a stored shard.
        """
        shard = self.parse(url)
        if shard.is_local and not self.config.cache_local:
            yield shard.local_path
            return
        opened = self._opener.pin(shard)
        try:
            yield Path(opened.path)
        finally:
            opened.close()

    def fetch(self, url: str, status: FetchStatus | None = None) -> Entry:
        """Make sure that the shard is in the cache; returns its entry.

        Args:
            url: the shard.
            status: is kept up to date while it is fetched.

        Raises:
            As `pinned`.
        """
        return self.fetch_shard(self.parse(url), status)[0]

    def fetch_shard(self, shard: ShardURL, status: FetchStatus | None = None) -> tuple[Entry, str]:
        """As `fetch`, for a parsed URL; also how it was had (`coordination.Outcome`)."""
        check_cached(shard, self.config)
        obtained = self._opener.obtain(shard, status, use=False)
        obtained.opened.close()
        return Store.entry_at(obtained.opened), obtained.outcome

    def outdated(self, shard: ShardURL) -> frozenset[str]:
        """Versions of a shard that are cached, if its origin has another one; else nothing.

        Raises:
            ShardNotFoundError, AccessDeniedError, ConfigError, TransferError: the origin
                cannot be asked.
            OSError: the disk fails.
        """
        from shardcache.store.verify import differs

        process = self._here()
        process.coordinator()
        found = [entry for store in process.stores() for entry in store.entries_of(shard.key)]
        if not found or shard.scheme == "pipe" or shard.version_id:
            return frozenset()
        origin, attempts = process.origins.of(shard), process.fetcher.policy.started(str(shard))
        now = attempts.call(lambda: origin.stat(shard), sleep=self._clock.sleep)
        for entry in found:
            try:
                if differs(entry.metadata().info, now) is None:
                    return frozenset()
            except ValueError:  # nothing tells versions apart
                return frozenset()
            except (DamagedError, FileNotFoundError):
                continue
        return frozenset(entry.version for entry in found)

    def path(self, url: str) -> Path | None:
        """Where the shard is, or None if it is not cached. Not pinned: it may go any time."""
        shard = self.parse(url)
        if shard.is_local and not self.config.cache_local:
            return shard.local_path if shard.local_path.exists() else None
        opened = self._look(shard)
        if opened is None:
            return None
        opened.close()
        return Path(opened.path)

    def entry(self, url: str) -> Entry | None:
        """The shard's entry, or None if it is not cached."""
        opened = self._look(self.parse(url))
        if opened is None:
            return None
        opened.close()
        return Store.entry_at(opened)

    def _look(self, shard: ShardURL) -> Opened | None:
        for store in self._here().stores():
            try:
                opened = store.open(shard.key, shard.basename)
            except DamagedError as exn:
                logger.info("%s: not used: %s", shard, exn)
                continue
            if opened is not None:
                return opened
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
        opened: Iterator[dict[str, Any]] = _room_above("wds").url_opener(
            data, handler, cache=self, **kw
        )
        return opened

    def gopen(self, url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> BinaryIO:
        """A handler for ``webdataset.gopen_schemes``; see `wds.register`."""
        if mode != "rb":
            raise ConfigError(f"{url}: the cache reads shards; mode {mode!r} is not supported")
        return self.open(url)

    def prewarm(
        self, urls: str | Iterable[str | ShardURL], **options: Unpack[PrewarmOptions]
    ) -> PrewarmReport:
        """Fetch many shards at once; see `prewarm.prewarm` for the options."""
        report: PrewarmReport = _room_above("prewarm").prewarm(self, urls, **options)
        return report

    # -- looking after it ------------------------------------------------------

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
        orphans: bool = False,
        limits: bool = True,
        everything: bool = False,
        dry_run: bool = False,
        wait: bool = True,
        status: CleanStatus | None = None,
    ) -> CleanReport:
        """Remove entries until the limits hold, and what dead processes left.

        Args:
            max_size, min_free, max_age: instead of the configured limits.
            orphans: also remove the partials that dead processes left within the last hour,
                which otherwise stay to be resumed.
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

    # -- ending ----------------------------------------------------------------

    def cancel(self) -> None:
        """Call off every fetch of this process. They raise `FetchCancelledError` in the
        threads that wait for them, and what was fetched is resumed by the next one.
        """
        if (process := self._processes.made()) is not None:
            process.cancel()

    def wait_for_copies(self, seconds: float) -> bool:
        """Wait until the upstreams have the shards that this process fetched; whether they do.

        Args:
            seconds: to wait at most.
        """
        process = self._processes.made()
        return process is None or process.ready is None or process.copier.drain(seconds)

    def close(self) -> None:
        """End this process's session; the cache can be used again afterwards."""
        self._processes.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _here(self) -> Process:
        return self._processes.here()


def check_cached(shard: ShardURL, config: Config) -> None:
    """Refuse what is read where it lies."""
    if shard.is_local and not config.cache_local:
        raise ConfigError(
            f"{shard.local_path} is opened where it is and not cached; set cache_local if it "
            "lies on a slow mount.",
            url=str(shard),
        )


_default: Cache | None = None


def default_cache() -> Cache:
    """The cache that ``SHARDCACHE_DIR``, ``SHARDCACHE_CONFIG`` and the like describe.

    Made once per process; a forked child uses the same object, safely.

    Raises:
        ConfigError: no directory is set anywhere, or an option cannot work.
    """
    global _default
    if _default is None:
        _default = Cache()
    return _default


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, **kw: Any
) -> Iterator[dict[str, Any]]:
    """A drop-in for ``webdataset.tariterators.url_opener`` on the default cache."""
    return default_cache().url_opener(data, handler, **kw)


def _room_above(name: str) -> Any:
    """A room that uses the cache, loaded when a method of `Cache` leads there."""
    return importlib.import_module(f"shardcache.{name}")
