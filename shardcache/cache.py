"""`Cache`: the one object that users hold.

Threads may share it, and it may be pickled and forked. Each process makes its own descriptors,
clients, locks and session when it first needs them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypedDict, TypeVar, Unpack

from shardcache import clock, threads
from shardcache.config import Config, Options, load
from shardcache.download.download import Download
from shardcache.errors import ConfigError, ShardNotFoundError
from shardcache.files import Modes
from shardcache.origins.endpoints import parser
from shardcache.process import Processes, log_unusable
from shardcache.ranks import detect, run_of_this_process
from shardcache.reading.opener import Opener
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry, Store
from shardcache.store.root import check_root, check_usable, make_root, require_cache
from shardcache.units import parse_duration
from shardcache.urls import ShardURL, redact

if TYPE_CHECKING:
    from shardcache.origins.listing import Selection
    from shardcache.results import Event, PrewarmReport
    from shardcache.space.clean import CleanReport
    from shardcache.stats.database import Sample
    from shardcache.stats.summary import Stats
    from shardcache.store.verify import Finding, VerifyStatus

__all__ = ["Cache", "attach", "default_cache", "url_opener"]

logger = logging.getLogger(__name__)

_Pipeline = TypeVar("_Pipeline")
#: WebDataset's error handler: returns True to continue, False to stop.
Handler = Callable[[Exception], bool]

#: One shard specification or several: URLs, ``{braces}``, globs, a ``prefix/``. A `ShardURL` is not
#: expanded.
Specs = str | ShardURL | Iterable[str | ShardURL]

#: Parsed URLs to remember, about 700 bytes each.
_REMEMBERED = 100_000


class PrewarmOptions(TypedDict, total=False):
    """Options of `Cache.prewarm`, for type checkers and editors; see `prewarm.prewarm`."""

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

    If the cache fails, it logs one warning and streams shards from their origin, unless ``strict``
    is set. It makes the directory on first use.

    Args:
        dir: the directory. The default comes from ``SHARDCACHE_DIR``, a configuration file or
            ``WDS_CACHE``, else it is ``shardcache`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
        **options: see docs/options.md. They have the same names in the environment
            (``SHARDCACHE_MAX_SIZE``) and in ``shardcache.toml``.

    Raises:
        ConfigError: an option cannot work; with ``strict`` also: the directory cannot be used.
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
            check_usable(config)
        except ConfigError as exn:
            if config.strict:
                raise
            # Before workers are started, so that not each of them logs it.
            log_unusable(exn, config.dir, detect())

    @classmethod
    def from_config(cls, config: Config, *, started: float | None = None) -> Cache:
        """Make a cache from a configuration alone, without the environment.

        Args:
            config: the options.
            started: when the job began to use the cache, in seconds since the epoch; None for a
                command, whose limits are not recorded as those of a job.
        """
        made = cls.__new__(cls)
        made._setup(config, started)
        return made

    def _setup(self, config: Config, started: float | None) -> None:
        self.config = config
        self._started = started
        self.processes = Processes(config, detect(), started)
        self.opener = Opener(config, self.processes.here)
        self._here = self.processes.here
        # Parsing costs more than opening a hit, and each epoch repeats the URLs.
        self._parse = lru_cache(_REMEMBERED)(parser(config))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self).from_config, started=self._started), (self.config,)

    def __repr__(self) -> str:
        return f"<shardcache.Cache {str(self.dir)!r} isolation={self.config.isolation}>"

    @property
    def dir(self) -> Path:
        """The root directory."""
        return self.config.dir

    def parse(self, url: str) -> ShardURL:
        """Parse a URL with the endpoint and the schemes of this cache.

        Raises:
            ConfigError: the URL is malformed, or its scheme is not allowed.
        """
        return self._parse(url)

    # -- reading ---------------------------------------------------------------

    def prepare(self, url: str | None = None) -> None:
        """Prepare the first download of this process, in the background.

        This makes the directories and the client of the origin of ``url``, which takes some tenths
        of a second. It downloads nothing and raises nothing: the first read raises the error.
        """

        def run() -> None:
            try:
                with threads.undivided():
                    process = self._here()
                    process.site()
                    if url is not None:
                        process.origins.prepare(self.parse(url))
            except Exception as exn:  # noqa: BLE001 - see above
                logger.debug("not prepared: %s", exn)

        with contextlib.suppress(RuntimeError):  # a limit of processes
            threads.start(run, "shardcache-prepare")

    def open(self, url: str) -> BinaryIO:
        """Open a shard for reading, and download it if it is not cached.

        With ``fill="follow"``, a stream can be read while the download runs. The download continues
        to its end even if the stream is closed early. Nothing evicts the shard while the stream is
        open.

        Returns:
            A stream. Its ``name`` is the local path, or the URL if the shard was not cached.

        Raises:
            ShardNotFoundError: the origin does not have the shard.
            AccessDeniedError: the origin refuses the credentials.
            TransferError: the origin does not respond, or stopped in the middle.
            IntegrityError: the bytes do not match the origin's checksum.
            ConfigError: the URL or the configuration cannot work.
            CacheFullError: with ``strict`` only: the cache has no room.
            LockTimeoutError: with ``strict`` only: another process took too long.
            OSError: with ``strict`` only: the disk failed.
        """
        return self.opener.open(self._parse(url))

    @contextlib.contextmanager
    def pinned(self, url: str) -> Iterator[Path]:
        """Download the shard if needed, and yield its path, which is valid within the context.

        Raises:
            The errors of `open` with ``strict``, because a path needs a shard on the disk.
        """
        shard = self._one(url)
        if self.opener.is_in_place(shard):
            yield shard.local_path
            return
        opened = self.opener.pin(shard)
        try:
            yield Path(opened.path)
        finally:
            opened.close()

    def fetch(self, url: str) -> Entry:
        """Download the shard unless it is cached. Raises the errors of `pinned`.

        Returns:
            The entry. Its `data` is the path of the shard, and its `size` is in bytes.
        """
        opened = self.opener.obtain(Download(self._one(url))).opened
        opened.close()
        return opened.entry

    def path(self, url: str | ShardURL) -> Path | None:
        """Return the local path of the shard, or None. Only within `pinned` is it sure to stay."""
        shard = self._one(url)
        if self.opener.is_in_place(shard):
            return shard.local_path if shard.local_path.exists() else None
        entry = self.entry(shard)
        return None if entry is None else entry.data

    def entry(self, url: str | ShardURL) -> Entry | None:
        """Return the shard's entry, or None if it is not cached."""
        shard = url if isinstance(url, ShardURL) else self.parse(url)
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

    def __contains__(self, url: str | ShardURL) -> bool:
        return self.path(url) is not None

    # -- pipelines and prewarming ----------------------------------------------

    def attach(self, dataset: _Pipeline, *, fast_tar: bool = True) -> _Pipeline:
        """Make a WebDataset pipeline read its shards through this cache.

        Args:
            dataset: a ``WebDataset`` or ``DataPipeline``, which is changed and returned.
            fast_tar: read the archives with shardcache, which yields the same samples several times
                faster than WebDataset.

        Raises:
            ConfigError: the pipeline has no stage that opens shards.
        """
        from shardcache import wds

        return wds.attach(dataset, self, fast_tar=fast_tar)

    def url_opener(
        self, data: Iterable[Any], handler: Handler | None = None, **kw: Any
    ) -> Iterator[dict[str, Any]]:
        """Open the shards of a pipeline, in place of ``webdataset.tariterators.url_opener``.

        Args:
            data: URLs, or dicts with a ``url``.
            handler: WebDataset's error handler; the default raises the error.
            **kw: further arguments of WebDataset's own opener; they are ignored.
        """
        from shardcache import wds

        yield from wds.url_opener(data, handler, cache=self, **kw)

    def prewarm(
        self,
        urls: Specs,
        *,
        progress: bool = False,
        **options: Unpack[PrewarmOptions],
    ) -> PrewarmReport:
        """Download many shards at once; see `prewarm.prewarm` for more options and the errors.

        A shard that fails neither raises an error nor stops the others: it is in the ``failures``
        of the report, and one warning counts them.

        Args:
            urls: one shard specification or several: URLs, ``{braces}``, globs and prefixes.
            progress: show bars on stderr; without a terminal, a line every ten seconds.
            **options: see `prewarm.prewarm`.
        """
        from shardcache import prewarm

        with contextlib.ExitStack() as stack:
            if progress:
                from shardcache.cli.progress import bars

                options["on_event"] = stack.enter_context(bars(options.get("on_event")))
            report = prewarm.prewarm(self, urls, **options)
        if failures := report.failures:
            first = str(next(iter(failures.values())))  # a record must not keep the error's frames
            text = "%d of %d shards failed to download; the first error: %s"
            logger.warning(text, len(failures), len(report.results), first)
        return report

    # -- maintenance -----------------------------------------------------------

    def entries(self, specs: Specs | None = None) -> Iterator[Entry]:
        """Return the entries of shards, in no order; of all if ``specs`` is None.

        Raises:
            ConfigError: a specification is malformed.
            ShardNotFoundError: nothing in the cache matches one.
        """
        return (entry for _, entry in self._chosen(specs))

    def _chosen(self, specs: Specs | None) -> Iterator[tuple[Store, Entry]]:
        found = ((store, entry) for store in self._here().stores() for entry in store.entries())
        if specs is None:
            return found
        named = [(entry.name(), store, entry) for store, entry in found]
        names = set[str]()
        for selection in self.selections(specs):
            matching = {name for name, *_ in named if name in selection}
            if not matching:
                raise self._nothing(selection)
            names |= matching
        return ((store, entry) for name, store, entry in named if name in names)

    def select(self, specs: Specs, *, pinned: bool = False) -> list[ShardURL]:
        """Return the shards that specifications stand for, each once.

        URLs and ``{braces}`` stand for shards that may be cached or not. Globs, a ``prefix/`` and
        basenames stand for shards in the cache, or with ``pinned`` for those that are pinned, also
        for those that came from other endpoints than the configured one (`other_endpoint`).

        Raises:
            ConfigError: a specification is malformed.
            ShardNotFoundError: nothing in the cache matches one.
        """
        found = dict[str, ShardURL]()
        selections = self.selections(specs)
        known = self._known(pinned) if any(each.patterns for each in selections) else {}
        for selection in selections:
            shards = list(selection.named.values())
            if selection.patterns:
                shards += [shard for shard in known.values() if str(shard) in selection]
            if not shards:
                raise self._nothing(selection)
            found |= {shard.key: shard for shard in shards}
        return list(found.values())

    def _one(self, spec: str | ShardURL) -> ShardURL:
        """Return the only shard that a specification stands for; ConfigError if it is not one."""
        if isinstance(spec, ShardURL):
            return spec
        shards = list[ShardURL]()
        if not {"{", "*", "?"}.isdisjoint(spec) or spec.endswith("/"):
            with contextlib.suppress(ShardNotFoundError):  # it is the literal URL of a shard
                shards = [each for each in self.select(spec) if not self.other_endpoint(each)]
        if len(shards) > 1:
            raise ConfigError(
                f"{redact(spec)} stands for {len(shards)} shards instead of one. "
                "Loop over Cache.select(...)."
            )
        return shards[0] if shards else self.parse(spec)

    def selections(self, specs: Specs) -> list[Selection]:
        """Parse specifications; raise ConfigError if one is malformed."""
        from shardcache.origins.listing import Selection

        each = [specs] if isinstance(specs, str | ShardURL) else specs
        return [Selection(spec, self.parse) for spec in each]

    def _known(self, pinned: bool) -> dict[str, ShardURL]:
        """Return the cached or pinned shards by key."""
        pairs = self.pins().items() if pinned else ((e.key, e.name()) for e in self.entries())
        found = dict[str, ShardURL]()
        for key, url in sorted(pairs, key=itemgetter(1)):
            with contextlib.suppress(ConfigError):  # a damaged record has no URL
                shard = self.parse(url)
                # A shard of another endpoint has another key.
                if shard.key == key or shard.scheme == "s3":
                    found[key] = replace(shard, key=key)
        return found

    def other_endpoint(self, shard: ShardURL) -> str | None:
        """Return the S3 endpoint that a shard of `select` came from, None if it is this cache's."""
        if shard.scheme != "s3" or shard.key == self.parse(str(shard)).key:
            return None
        for store in self._here().stores():
            for entry in store.entries_of(shard.key):
                with contextlib.suppress(DamagedError, OSError):
                    if (endpoint := entry.metadata().endpoint) is not None:
                        return endpoint or "AWS"
        return "unknown"

    def _nothing(self, selection: Selection) -> ShardNotFoundError:
        text = f"{selection.text}: nothing in {self.dir} matches. See `shardcache ls`."
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
        """Remove leftovers of dead processes, and entries until the limits hold.

        Args:
            max_size: the size limit of the cache, in bytes or as text such as "800GB"; the default
                is the configured limit.
            min_free: the space to keep free on the filesystem, likewise.
            max_age: the longest time without use, in seconds or as text such as "14d", likewise.
            orphans: also remove the unfinished downloads of the last hour, which could be resumed.
                Unless a limit is given, no entry is removed.
            everything: remove all entries that no process uses.
            remove_dir: with ``everything``, remove the directories as well. They stay if shards or
                files of other programs stay, or if a process uses the cache.
            dry_run: remove nothing; the report counts the entries that would be removed.
            wait: if another process cleans, wait for up to ``lock_timeout``.

        Raises:
            ConfigError: the directory is not a cache, or is locked in another way.
            LockTimeoutError: another process is cleaning.
            OSError: the filesystem is read-only or failing.
        """
        from shardcache.locks.sessions import live_sessions
        from shardcache.space import clean as cleaning
        from shardcache.space.eviction import Limits
        from shardcache.store.root import remove_root

        require_cache(self.dir)
        sweep_only = orphans and max_size is min_free is max_age is None
        process = self._here()
        reports = []
        for tier in process.present:
            if not dry_run and os.geteuid() != 0:  # root may clean the caches of other users
                check_root(tier.config)
            given = {"max_age": max_age}
            if tier is process.home:  # other tiers keep their own limits
                given |= {"max_size": max_size, "min_free": min_free}
            changes = {name: value for name, value in given.items() if value is not None}
            space = tier.space(tier.config.replace(**changes))
            with contextlib.nullcontext() if dry_run else space.sole_cleaner(wait=wait):
                limits = Limits(everything=everything)
                if not (everything or sweep_only):
                    limits = space.limits()
                reports.append(cleaning.clean(space, limits, orphans=orphans, dry_run=dry_run))
            is_used = reports[-1].kept or live_sessions(tier.node)
            if remove_dir and everything and not (dry_run or is_used):
                process.counters.flush()  # which writes into the directory
                remove_root(tier.node)
        return cleaning.joined(reports)

    def verify(
        self,
        specs: Specs | None = None,
        *,
        quick: bool = False,
        remote: bool = False,
        repair: bool = False,
        sample: float = 1.0,
        status: VerifyStatus | None = None,
        stop: threading.Event | None = None,
    ) -> Generator[Finding, None, None]:
        """Compare the cached shards with the digests of their downloads. Jobs may run meanwhile.

        No process evicts an entry while it is verified, and this does not count as an access.

        Args:
            specs: the shards, see `select`; None stands for all.
            quick: compare sizes only, and read no data.
            remote: compare the versions of entries with those at the origins, too.
            repair: set damaged entries aside, so that the next reader downloads them again.
            sample: the share of shards to check, above 0 and up to 1; at least one is checked.
            status: the object that shows the progress.
            stop: set it to end early.

        Raises:
            ConfigError: the directory is not a cache, or ``sample`` is not a share.
            ShardNotFoundError: nothing in the cache matches a specification.
            OSError: the directory cannot be read.
        """
        from shardcache.store.verify import Verifier, VerifyStatus

        require_cache(self.dir)
        process = self._here()
        return Verifier(
            entries=list(self._chosen(specs)),
            origins=process.origins,
            policy=process.engine.policy,
            parse=self.parse,
            quick=quick,
            remote=remote,
            sample=sample,
            sole=process.site().locked if repair else None,
            status=status or VerifyStatus(),
            stop=stop or threading.Event(),
        ).findings()

    def pin(self, specs: Specs, seconds: float | None = None) -> list[ShardURL]:
        """Pin shards: no process evicts them, and neither does ``clean --all``.

        Args:
            specs: the shards, see `select`, which are also returned.
            seconds: the duration; None pins them until `unpin`.

        Raises:
            ConfigError: the directory must not be used, or a URL's scheme is not cached.
            ShardNotFoundError: nothing in the cache matches a specification.
            OSError: the disk is full, read-only or failing.
        """
        from shardcache.space import pins

        shards = self.select(specs)
        for shard in shards:
            self.opener.refuse_in_place(shard)
        until = None if seconds is None else clock.time() + seconds
        for config in self.config.by_tier():
            node = make_root(config)
            for shard in shards:
                pins.pin(node, shard, until)
        return shards

    def pins(self) -> dict[str, str]:
        """Return the pinned shards: URLs by key, an empty one if the record of a pin is damaged."""
        from shardcache.space.pins import pinned

        tiers, now = self._here().present, clock.time()
        return {key: url for tier in tiers for key, url in pinned(tier.node, now).items()}

    def unpin(self, specs: Specs) -> list[ShardURL]:
        """Unpin shards, see `select` with ``pinned``. Return those that had been pinned.

        Raises:
            The errors of `pin`.
        """
        from shardcache.space import pins

        require_cache(self.dir)
        shards, keys = self.select(specs, pinned=True), set[str]()
        for tier in self._here().present:
            keys |= {shard.key for shard in shards if pins.unpin(tier.node, shard.key)}
            tier.space().recount()
        return [shard for shard in shards if shard.key in keys]

    def remove(self, specs: Specs, *, dry_run: bool = False) -> tuple[int, int]:
        """Remove all versions of shards that no process uses.

        Args:
            specs: the shards, see `select`.
            dry_run: remove nothing; the result counts the entries that would be removed.

        Returns:
            The size of the removed shards in bytes, and the number of entries that are pinned or in
            use and stay.

        Raises:
            ConfigError: the directory is not a cache, is locked in another way, or a URL is
                malformed.
            ShardNotFoundError: nothing in the cache matches a specification.
            OSError: the filesystem is read-only or failing.
        """
        from shardcache.space import clean as cleaning

        require_cache(self.dir)
        keys, pins = [shard.key for shard in self.select(specs)], self.pins()
        freed = stay = 0
        process = self._here()
        for tier, key in product(process.present, keys):
            stores, pinned = tier.stores(), key in pins
            removed, size, in_use = cleaning.remove(stores, key, pinned=pinned, dry_run=dry_run)
            if removed and not dry_run:
                tier.space().recount()
                process.counters.add({"evicted_asked": removed, "bytes_evicted": size})
            freed += size
            stay += in_use
        return freed, stay

    def stats(self, since: float | str | None = None) -> Stats:
        """Return the counters of all processes of this node: opens, bytes, waits, evictions.

        Args:
            since: the length of the period up to now, in seconds or as text such as "24h"; the
                default is the 30 days that are stored.

        Raises:
            ConfigError: ``since`` is not a duration.
            OSError: the directory cannot be read.
        """
        from shardcache.stats.summary import summed

        return summed(self.samples(since))

    def samples(self, since: float | str | None = None, *, ever: bool = False) -> list[Sample]:
        """Return the counters of `stats` per minute, and per hour if older than two hours.

        With ``ever``, the counters older than 30 days are one more sample, which starts at 0.
        """
        from shardcache.stats.database import samples

        self._here().counters.flush()
        begin = 0.0 if since is None else clock.time() - parse_duration(since)
        return samples(self._here().home.node, begin, ever=ever)

    # -- ending ----------------------------------------------------------------

    def close(self) -> None:
        """End the session of this process. The cache can be used again afterwards."""
        if (process := self.processes.made()) is not None:
            process.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@cache
def default_cache() -> Cache:
    """Return the cache that the environment and configuration files describe; all callers share it.

    Raises:
        ConfigError: an option cannot work.
    """
    return Cache()


def attach(dataset: _Pipeline, *, fast_tar: bool = True) -> _Pipeline:
    """Make a WebDataset pipeline read through the default cache; see `Cache.attach`."""
    return default_cache().attach(dataset, fast_tar=fast_tar)


def url_opener(
    data: Iterable[Any], handler: Handler | None = None, **kw: Any
) -> Iterator[dict[str, Any]]:
    """Open the shards of a pipeline through the default cache; see `Cache.url_opener`."""
    return default_cache().url_opener(data, handler, **kw)
