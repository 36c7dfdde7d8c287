"""`Cache`, the main class of the library, and the default cache."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict, TypeVar, Unpack

from shardcache import clock, threads
from shardcache.config import Config, Options, load
from shardcache.download.download import Download
from shardcache.errors import ConfigError, ShardNotFoundError
from shardcache.faults import ignoring
from shardcache.files import Modes
from shardcache.locks.sessions import live_sessions
from shardcache.notices import log_read_only, log_unusable
from shardcache.origins.aws import url_parser
from shardcache.process import ProcessCache
from shardcache.ranks import detect, run_of_this_process
from shardcache.reading.stream import open_shard, pin_shard
from shardcache.space import eviction
from shardcache.space.eviction import POLICIES, CleanReport, Limits, Reason
from shardcache.stats import database
from shardcache.store import root
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry, OpenEntry, Store, open_first
from shardcache.threads import lazy, no_fork
from shardcache.units import parse_duration
from shardcache.urls import ShardURL, advise_name, find_scheme, refuse_in_place, unexpanded

if TYPE_CHECKING:
    from shardcache.origins.listing import Selection
    from shardcache.prewarm import Event, PrewarmReport, Share
    from shardcache.stats.summary import Stats
    from shardcache.store.verify import Finding, VerifyStatus

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")
#: An error handler of WebDataset. It returns True to continue with the next shard, False to stop.
Handler = Callable[[Exception], bool]

#: One or more shard specifications: URLs, URLs with ``{braces}``, globs, or a ``prefix/``. A
#: `ShardURL` stands for exactly one shard and is not expanded.
Specs = str | ShardURL | Iterable[str | ShardURL]

#: Number of parsed URLs to keep in memory. Each takes about 700 bytes.
_PARSED_URLS = 100_000
#: Matches URLs that always name the same shard: not commands and relative paths.
_FIXED = re.compile(r"/|(?!pipe:|file:|shardcache:)[a-z0-9]+://")


class PrewarmOptions(TypedDict, total=False):
    """The options of `Cache.prewarm` and `prewarm.prewarm`, for type checkers."""

    jobs: int
    check: bool
    dry_run: bool
    deadline: float | None
    max_failures: int | None
    best_effort: bool
    skip_missing: bool
    limit_rate: int | str | None
    refresh: bool
    processes: int | None
    share: Share | None
    sources: Mapping[str, Path]
    on_event: Callable[[Event], None] | None
    stop: threading.Event | None


class Cache:
    """A cache of shards in a directory on a local disk.

    If the cache fails, shardcache logs a warning and streams shards from their origin, unless
    ``strict`` is set. The directory is created on first use. Threads may share a `Cache`, and it
    may be pickled and used after a fork.

    Args:
        dir: the directory. The default comes from ``SHARDCACHE_DIR``, a configuration file or
            ``WDS_CACHE``; if none of them is set, it is ``shardcache`` in ``XDG_CACHE_HOME`` or
            ``~/.cache``.
        **options: the options in docs/options.md. They can also be set in the environment
            (``max_size`` is ``SHARDCACHE_MAX_SIZE``) and in ``shardcache.toml``.

    Raises:
        ConfigError: an option is unknown or not valid, or a configuration file cannot be read; with
            ``strict`` also: the directory cannot be used.
    """

    def __init__(
        self, dir: str | os.PathLike[str] | None = None, **options: Unpack[Options]
    ) -> None:
        config, sources = load({"dir": dir, **options})
        if sources["dir"] == "default":
            logger.info("caching in %s; set SHARDCACHE_DIR to use another directory", config.dir)
        self._setup(config, run_of_this_process()[0] or clock.time())
        Modes.of(config.shared_group)  # raises an error for a user outside the group
        try:
            root.check_usable(config)
        except ConfigError as exn:
            if config.strict:
                raise
            # Before workers are started, so that not each of them logs it.
            log_unusable(exn, config.dir, detect())
        if root.is_read_only(config.dir):
            log_read_only(config.dir, detect())

    @classmethod
    def from_config(cls, config: Config, *, started: float | None = None) -> Cache:
        """Create a cache from a configuration alone, without reading the environment.

        ``started`` is when the job began to use the cache, in seconds since the epoch. With None,
        as in commands, the limits are not recorded as those of a job.
        """
        cache = cls.__new__(cls)
        cache._setup(config, started)
        return cache

    def _setup(self, config: Config, started: float | None) -> None:
        threads.refuse_patches()
        self.config = config
        self._started = started
        with no_fork():  # from here on, forks wait for imports in other threads
            self._ranks = detect()
        self._parse = url_parser(config)
        # Each epoch repeats the URLs, and parsing a URL takes longer than opening a cached shard.
        self._parse_once = lru_cache(_PARSED_URLS)(self._parse)

    @lazy
    def process(self) -> ProcessCache:
        """The cache as this process uses it. It is created on first use."""
        return ProcessCache(self.config, self._ranks, self._started)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self).from_config, started=self._started), (self.config,)

    def __repr__(self) -> str:
        return f"<shardcache.Cache {str(self.dir)!r} isolation={self.config.isolation}>"

    @property
    def dir(self) -> Path:
        """The root directory."""
        return self.config.dir

    def parse(self, url: str | ShardURL) -> ShardURL:
        """Parse a URL with the endpoint and the schemes of this cache. Raises ConfigError."""
        if isinstance(url, ShardURL):
            return url
        # The working directory may change, and so may the variables in a command.
        is_fixed = isinstance(url, str) and _FIXED.match(url)
        return self._parse_once(url) if is_fixed else self._parse(url)

    # -- reading ---------------------------------------------------------------

    def prepare(self, url: str | None = None) -> None:
        """Create directories and the client for the origin of ``url`` in a background thread.

        This takes a few tenths of a second. All errors are left to the first read.
        """

        def run() -> None:
            try:
                with threads.no_fork():
                    self.process.prepare()
                    if url is not None:
                        self.process.origins.of(self.parse(url)).prepare()
            except Exception as exn:  # noqa: BLE001 - the first read raises it
                logger.debug("not prepared: %s", exn)

        with contextlib.suppress(threads.NoThreadError):
            threads.start(run, "shardcache-prepare")

    def open(self, url: str) -> BinaryIO:
        """Open a shard for reading, and download it if it is not cached.

        With ``fill="follow"``, the stream can be read while the download runs. The download
        completes even if the stream is closed early. No open shard is evicted.

        Returns:
            A binary stream. Its ``name`` is the local path, or the URL if the shard was not cached.

        Raises:
            ShardNotFoundError: the origin does not have the shard.
            AccessDeniedError: the origin refuses the credentials.
            TransferError: the origin does not respond, or stopped sending before the end.
            IntegrityError: the bytes do not match the origin's checksum.
            ConfigError: the URL is not valid, or an option cannot be used.
            CacheFullError: the cache has no room (only with ``strict``).
            LockTimeoutError: another process held the shard's lock too long (only with ``strict``).
            OSError: the disk failed (only with ``strict``).
        """
        return open_shard(self.process, self.parse(url))

    @contextlib.contextmanager
    def pinned(self, url: str | ShardURL) -> Iterator[Path]:
        """Download the shard unless it is cached, and yield its path for use inside the context.

        Raises the same errors as `open` with ``strict``, because only a shard on disk has a path.
        """
        shard = self.parse(url)
        if self.process.is_in_place(shard):
            with open_shard(self.process, shard):  # raises an error if the file cannot be read
                yield shard.local_path
        else:
            with contextlib.closing(pin_shard(self.process, shard)) as opened:
                yield Path(opened.path)

    def fetch(self, url: str | ShardURL) -> Entry:
        """Download the shard unless it is cached. Raises the same errors as `pinned`.

        Returns:
            The shard's entry. Its `data` is the path of the shard, and its `size` is in bytes.
        """
        download = Download(self.process.downloads, self.parse(url))
        with contextlib.closing(self.process.fetch(download)) as opened:
            return opened.entry

    def add(self, url: str, file: str | os.PathLike[str]) -> Entry:
        """Import a file of this machine as a shard, unless the shard is cached; return its entry.

        The file is hard-linked if possible, and then loses its write permissions, else copied; see
        ``shardcache import --help``. Raises the errors of `pinned`; IntegrityError if the shard is
        cached with other bytes, or if no checksum or ETag shows that the file is the object.
        """
        path = Path(file).resolve(strict=True)
        download = Download(self.process.downloads, self.parse(url), file=path)
        with contextlib.closing(self.process.fetch(download)) as opened:
            return opened.entry

    def path(self, url: str | ShardURL) -> Path | None:
        """Return the shard's local path, or None if it is not cached; ConfigError for a pattern.

        The file may be evicted at any time, except inside `pinned`.
        """
        shard = self.parse(url)
        if self.process.is_in_place(shard):
            return shard.local_path if shard.local_path.exists() else None
        return None if (opened := self._look_up(shard)) is None else Path(opened.path)

    def entry(self, url: str | ShardURL) -> Entry | None:
        """Return the shard's entry, or None if it is not cached; ConfigError for a pattern."""
        return None if (opened := self._look_up(self.parse(url))) is None else opened.entry

    def _look_up(self, shard: ShardURL) -> OpenEntry | None:
        """Return the shard's entry with its path, as it was opened; its file is closed again."""
        try:
            opened = open_first(self.process.stores(), shard.key, shard.basename)
        except DamagedError as exn:
            logger.info("%s: not used: %s", shard, exn)
            return None
        if opened is not None:
            opened.close()
        elif error := unexpanded(shard):
            raise error
        return opened

    def __contains__(self, url: str | ShardURL) -> bool:
        return self.path(url) is not None

    # -- pipelines and prewarming ----------------------------------------------

    def attach(
        self, dataset: _Pipeline, *, fast_tar: bool = True, resume: bool = False
    ) -> _Pipeline:
        """Make a WebDataset pipeline read its shards through this cache.

        Args:
            dataset: a ``WebDataset`` or ``DataPipeline``. It is changed in place and returned.
            fast_tar: parse the archives with shardcache's reader, which yields the same samples
                several times faster than WebDataset's. With ``resume``, it always does.
            resume: add ``state_dict`` and ``load_state_dict``, which continue an epoch exactly, and
                let ``shuffle`` hold places of samples, not their bytes; see docs/samples.md.

        Raises:
            ConfigError: the pipeline has no stage that opens shards; or with ``resume``, a stage
                does not give the same samples again.
        """
        if resume:
            from shardcache.dataset.pipeline import attach_resumable

            return attach_resumable(dataset, self)
        from shardcache import wds

        return wds.attach(dataset, self, fast_tar=fast_tar)

    def url_opener(
        self, data: Iterable[Any], handler: Handler | None = None, **kw: Any
    ) -> Iterator[dict[str, Any]]:
        """Open the shards of a pipeline; replaces ``webdataset.tariterators.url_opener``.

        Args:
            data: URLs, or dicts with a ``url``.
            handler: an error handler of WebDataset; the default raises the error.
            **kw: other arguments of WebDataset's function. They are ignored.
        """
        from shardcache import wds

        yield from wds.url_opener(data, handler, cache=self, **kw)

    def prewarm(
        self, urls: Specs, *, progress: bool = False, **options: Unpack[PrewarmOptions]
    ) -> PrewarmReport:
        """Download many shards at once, and return a report.

        A shard that fails does not stop the others. The report's ``failures`` lists it, and one
        warning states how many shards failed. `prewarm.prewarm` lists the errors that are raised.

        Args:
            urls: one or more shard specifications: URLs, ``{braces}``, globs and prefixes.
            progress: show progress bars on stderr; without a terminal, a line every ten seconds.
            **options: the options of `prewarm.prewarm`.
        """
        from shardcache import prewarm

        with contextlib.ExitStack() as stack:
            if progress:
                from shardcache.cli.prewarm import PrewarmProgress

                bars = PrewarmProgress(options.get("on_event"))
                options["on_event"] = stack.enter_context(bars)
            report = prewarm.prewarm(self, urls, **options)
        if failures := report.failures:
            # The error as text: a log record that holds the error would keep its frames alive.
            first = str(next(iter(failures.values())))
            text = "%d of %d shards failed to download; the first error: %s"
            logger.warning(text, len(failures), len(report.results), first)
        return report

    # -- maintenance -----------------------------------------------------------

    def entries(self, specs: Specs | None = None) -> Iterator[Entry]:
        """Return an iterator over the entries that match ``specs`` (default: all), in any order.

        Raises:
            ConfigError: a specification is malformed.
            ShardNotFoundError: nothing in the cache matches a specification.
        """
        return (entry for _, entry in self._matching(specs))

    def _matching(self, specs: Specs | None) -> Iterator[tuple[Store, Entry]]:
        pairs = ((store, entry) for store in self.process.stores() for entry in store.entries())
        if specs is None:
            return pairs
        named = [(entry.name(), (store, entry)) for store, entry in pairs]
        names = set[str]()
        for selection in self._selections(specs):
            matching = {name for name, _ in named if name in selection}
            if not matching:
                raise self._not_found(selection)
            names |= matching
        return (pair for name, pair in named if name in names)

    def select(self, specs: Specs, *, pinned: bool = False) -> list[ShardURL]:
        """Return the shards that specifications stand for, without duplicates.

        URLs and ``{braces}`` stand for shards whether they are cached or not. Globs, a ``prefix/``
        and basenames stand for matching shards in the cache, or with ``pinned`` for matching pins,
        also those from another endpoint than the configured one (`other_endpoint`).

        Raises:
            ConfigError: a specification is malformed.
            ShardNotFoundError: nothing in the cache matches a specification.
        """
        chosen = dict[str, ShardURL]()
        selections = self._selections(specs)
        known = self._known(pinned) if any(s.patterns for s in selections) else {}
        for selection in selections:
            shards = list(selection.named.values())
            if selection.patterns:
                shards += [shard for shard in known.values() if str(shard) in selection]
            if not shards:
                raise self._not_found(selection, " that is pinned" if pinned else "")
            chosen |= {shard.key: shard for shard in shards}
        return list(chosen.values())

    def _selections(self, specs: Specs) -> list[Selection]:
        from shardcache.origins.listing import Selection, spec_list

        return [Selection(spec, self.parse) for spec in spec_list(specs)]

    def _known(self, pinned: bool) -> dict[str, ShardURL]:
        """Return the cached or pinned shards by key."""
        pairs = self.pins().items() if pinned else ((e.key, e.name()) for e in self.entries())
        known = dict[str, ShardURL]()
        for key, url in sorted(pairs, key=itemgetter(1)):
            with contextlib.suppress(ConfigError):  # a damaged record has no valid URL
                shard = self.parse(url)
                if shard.key == key or not find_scheme(shard.scheme).names_server:
                    known[key] = replace(shard, key=key)
        return known

    def other_endpoint(self, shard: ShardURL) -> str | None:
        """Return the endpoint of a shard of `select`, None if it is this cache's."""
        if find_scheme(shard.scheme).names_server or shard.key == self.parse(str(shard)).key:
            return None
        for store in self.process.stores():
            for entry in store.entries_of(shard.key):
                with ignoring(DamagedError, OSError):
                    if (endpoint := entry.metadata().endpoint) is not None:
                        return endpoint or "AWS"
        return "unknown"

    def _not_found(self, selection: Selection, kind: str = "") -> ShardNotFoundError:
        text = f"{selection.text}: nothing{kind} in {self.dir} matches. See `shardcache ls`."
        text += advise_name(selection.text)
        return ShardNotFoundError(text, url=selection.text)

    def clean(
        self,
        *,
        max_size: int | str | None = None,
        min_free: int | str | None = None,
        max_age: float | str | None = None,
        orphans: bool = False,
        everything: bool = False,
        remove_dir: bool = False,
        dry_run: bool = False,
        wait: bool = True,
    ) -> CleanReport:
        """Remove leftovers of dead processes, and evict entries until all limits are met.

        Args:
            max_size: the size limit of the cache, in bytes or as text such as "800GB". The default
                of each limit is the configured one.
            min_free: the space to keep free on the filesystem, in the same form as ``max_size``.
            max_age: the longest time without use, in seconds or as text such as "14d".
            orphans: also remove unfinished downloads of the last hour, although they could resume.
                Unless a limit or ``everything`` is given, no entry is removed.
            everything: remove all entries that are neither pinned nor in use.
            remove_dir: with ``everything``, remove the directories as well. They stay if shards or
                files of other programs stay, or if a process uses the cache.
            dry_run: remove nothing; the report counts the entries that would be removed.
            wait: if another process is cleaning, wait for it up to ``lock_timeout``.

        Raises:
            ConfigError: the directory is not a cache, or it uses another kind of lock.
            LockTimeoutError: another process is cleaning.
            OSError: the filesystem is read-only or failing.
        """
        root.require_cache(self.dir)
        sweep_only = orphans and max_size is min_free is max_age is None
        process = self.process
        reports = []
        for tier in process.present:
            with process.tolerating(tier):
                if not dry_run:
                    root.check_user(tier.config)
                if not dry_run and root.is_read_only(tier.config.dir):
                    raise OSError(errno.EROFS, "it cannot be written", str(tier.config.dir))
                given = {"max_age": max_age}
                if tier is process.last_tier:  # other tiers keep their own limits
                    given |= {"max_size": max_size, "min_free": min_free}
                changes = {name: value for name, value in given.items() if value is not None}
                space = tier.space_with(tier.config.replace(**changes))
                limits = Limits(everything=everything) if everything or sweep_only else None
                report = space.clean(limits, orphans=orphans, dry_run=dry_run, wait=wait)
                reports.append(report)
                is_used = report.kept or live_sessions(tier.node) or self.pins()
                if remove_dir and everything and not (dry_run or is_used):
                    process.counters.flush()  # which writes into the directory
                    root.remove_root(tier.node)
        return eviction.merged(reports)

    def verify(
        self,
        specs: Specs | None = None,
        *,
        quick: bool = False,
        repair: bool = False,
        status: VerifyStatus | None = None,
        stop: threading.Event | None = None,
    ) -> Generator[Finding, None, None]:
        """Compare cached shards with the digests recorded by their downloads; yield the results.

        Jobs may run at the same time: no process evicts an entry while it is being verified, and
        the verification does not count as an access.

        Args:
            specs: the shards, as in `select`; None stands for all.
            quick: compare only sizes, without reading data.
            repair: set damaged entries aside, so that the next reader downloads the shards again.
            status: an object that is updated with the progress.
            stop: an event that ends the verification early when it is set.

        Raises the errors of `select`; ConfigError if the directory is not a cache, and OSError.
        """
        from shardcache.store.verify import VerifyStatus, verify

        root.require_cache(self.dir)
        process = self.process
        return verify(
            list(self._matching(specs)),
            quick=quick,
            locked=process.prepare().key_locked if repair else None,
            status=status or VerifyStatus(),
            stop=stop or threading.Event(),
        )

    def pin(self, specs: Specs, seconds: float | str | None = None) -> list[ShardURL]:
        """Pin shards, so that no process evicts them, not even ``clean --all``. Return the shards.

        Args:
            specs: the shards, as in `select`.
            seconds: how long to pin the shards, in seconds or as text such as "3d"; None pins them
                until `unpin` is called.

        Raises the errors of `select`; ConfigError if a shard is a file that is not cached, or the
        directory cannot be a cache; OSError if the disk is full, read-only or failing.
        """
        shards = self.select(specs)
        for shard in shards:
            refuse_in_place(shard, self.config.cache_local)
        length = None if seconds is None else parse_duration(seconds)
        if length == 0:
            raise ConfigError("a pin for 0 s protects nothing. Give a longer time, or call unpin.")
        until = None if length is None else clock.time() + length
        for tier in reversed(self.process.tiers):  # those in ``dir`` hold in all tiers
            with self.process.tolerating(tier):
                node = root.make_root(tier.config)
                for shard in shards:
                    eviction.pin(node, shard, until)
        return shards

    def pins(self) -> dict[str, str]:
        """Return the URLs of pinned shards by key; the URL is empty if a pin's file is damaged."""
        return eviction.pinned((tier.node for tier in self.process.present), clock.time())

    def unpin(self, specs: Specs) -> list[ShardURL]:
        """Unpin shards; return those that were pinned. Arguments and errors are as in `pin`."""
        root.require_cache(self.dir)
        shards, keys = self.select(specs, pinned=True), set[str]()
        for tier in self.process.present:
            with self.process.tolerating(tier):
                keys |= {shard.key for shard in shards if eviction.unpin(tier.node, shard.key)}
                tier.space.forget_refusal()
        return [shard for shard in shards if shard.key in keys]

    def remove(self, specs: Specs, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove all versions of shards, except entries that are pinned or in use.

        Args:
            specs: the shards, as in `select`.
            dry_run: remove nothing; the result states what would be removed.

        Returns the size of the removed entries in bytes, and the number of entries that remain.
        Raises the errors of `select` and `clean`; ConfigError if a shard is a file that is not
        cached.
        """
        root.require_cache(self.dir)
        shards, freed, stay = self.select(specs), 0, 0
        for shard in shards:
            refuse_in_place(shard, self.config.cache_local)
        for tier in self.process.present:
            stores, space = tier.stores(), tier.space
            entries = [e for store in stores for s in shards for e in store.entries_of(s.key)]
            report = space.plan(entries, Limits(everything=True), POLICIES["lru"])
            removals = [replace(removal, reason=Reason.ASKED) for removal in report.removed]
            stay += report.kept
            if not dry_run:
                evicted = space.evict(removals)
                space.forget_refusal()
                gone = {removal.name for removal in evicted}
                failed = [removal.entries for removal in removals if removal.name not in gone]
                stay += sum(any(entry.path.exists() for entry in links) for links in failed)
                removals = evicted
            freed += sum(removal.entries[0].size for removal in removals)
        return freed, stay

    def stats(self, since: float | str | None = None) -> Stats:
        """Return the counters of all processes of this node: opens, bytes, waits, evictions.

        Other processes, such as workers, write theirs once a second, at the end of an epoch of an
        attached pipeline, and when they end. So their counts of the last second may be missing.

        Args:
            since: the length of the period that ends now, in seconds or as text such as "24h"; the
                default is all 30 days that are stored.

        Raises ConfigError if ``since`` is not a duration, and OSError.
        """
        from shardcache.stats.summary import summed

        return summed(self.samples(since))

    def samples(
        self, since: float | str | None = None, *, ever: bool = False
    ) -> list[database.Sample]:
        """Return the counters of `stats`, one sample per rank and period of ten minutes.

        With ``ever``, one more sample, with the start 0, is the sum of all older counters.
        """
        self.process.counters.flush()
        begin = 0.0 if since is None else clock.time() - parse_duration(since)
        return database.samples(self.process.last_tier.node, begin, ever=ever)

    # -- ending ----------------------------------------------------------------

    def close(self) -> None:
        """End the session of this process. The cache can be used again afterwards."""
        if "process" in vars(self):  # otherwise, this would make it
            self.process.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@cache
def default_cache() -> Cache:
    """Return the cache that environment and configuration files describe. All callers share it.

    Raises the errors of `Cache`.
    """
    return Cache()


def attach(dataset: _Pipeline, *, fast_tar: bool = True, resume: bool = False) -> _Pipeline:
    """Make a WebDataset pipeline read its shards through the default cache; see `Cache.attach`."""
    return default_cache().attach(dataset, fast_tar=fast_tar, resume=resume)


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, **kw: Any
) -> Iterator[dict[str, Any]]:
    """Open the shards of a pipeline through the default cache; see `Cache.url_opener`."""
    return default_cache().url_opener(data, handler, **kw)
