"""`Cache`: the one object users hold.

It may be shared by threads, pickled, forked and spawned: what belongs to a
process (descriptors, clients, locks, the session) is made on first use in that
process and never carried into another. Here is how shards are read; how a cache is cleaned,
verified and asked what it holds and has done is in `upkeep`, from which `Cache` has it.

A fault of the cache never fails a read that the origin can serve, unless
``strict``: one warning, then shards are streamed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, Unpack

from shardcache import config as configuration
from shardcache.clock import SYSTEM_CLOCK, Clock
from shardcache.config import Config
from shardcache.errors import (
    ConfigError,
    ShardNotFoundError,
)
from shardcache.origins.endpoints import endpoint_of
from shardcache.ranks import detect
from shardcache.runtime import Processes, in_background
from shardcache.store.entry import DamagedError
from shardcache.store.store import Entry, Opened, Store
from shardcache.streams.opener import Opener
from shardcache.upkeep import Upkeep, check_cached
from shardcache.urls import ShardURL, parse_url

if TYPE_CHECKING:
    from shardcache.fetch.background import Share
    from shardcache.fetch.transfer import FetchStatus
    from shardcache.options import Handler, Options, PrewarmOptions
    from shardcache.prewarm.report import PrewarmReport

__all__ = ["Cache"]

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")

#: URLs remembered, about 500 bytes each.
_REMEMBERED = 100_000


class Cache(Upkeep):
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
        import tenacity  # noqa: F401
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
            ahead: what `begin_ahead` returned for it.
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

    def begin_ahead(self, shard: ShardURL) -> Opened | Share | None:
        """Pin a shard that will be opened soon, or begin to fetch it; see `lookahead`."""
        if shard.is_local and not self.config.cache_local:
            return None
        return self._opener.ahead(shard)

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
        from shardcache import wds

        return wds.attach(dataset, self, fast_tar=fast_tar)

    def url_opener(
        self, data: Iterable[Any], handler: Handler | None = None, **kw: Any
    ) -> Iterator[dict[str, Any]]:
        """A stage in place of ``webdataset.tariterators.url_opener``; see `wds.url_opener`."""
        from shardcache import wds

        return wds.url_opener(data, handler, cache=self, **kw)

    def gopen(self, url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> BinaryIO:
        """A handler for ``webdataset.gopen_schemes``; see `wds.register`."""
        if mode != "rb":
            raise ConfigError(f"{url}: the cache reads shards; mode {mode!r} is not supported")
        return self.open(url)

    def prewarm(
        self, urls: str | Iterable[str | ShardURL], **options: Unpack[PrewarmOptions]
    ) -> PrewarmReport:
        """Fetch many shards at once; see `prewarm.prewarm` for the options."""
        from shardcache.prewarm import prewarm

        return prewarm(self, urls, **options)

    # -- ending ----------------------------------------------------------------

    def cancel(self) -> None:
        """Call off every fetch of this process. They raise `FetchCancelledError` in the
        threads that wait for them, and what was fetched is resumed by the next one.
        """
        if (process := self._processes.made()) is not None:
            process.cancel()

    def close(self) -> None:
        """End this process's session; the cache can be used again afterwards."""
        self._processes.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
