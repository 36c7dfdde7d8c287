"""One prewarm: expand, plan, refuse what cannot fit, fetch, report.

    wanted_shards -> make_plan -> does it fit? -> Pool: fetch, fetch, ... -> report

Any number of prewarms in any number of processes may run on one cache; like all readers they
share the fetches.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from shardcache import clock
from shardcache.config import __version__
from shardcache.download.pool import parse_rate
from shardcache.errors import CacheFullError, ConfigError, ShardCacheError
from shardcache.files import Modes
from shardcache.layout import Layout
from shardcache.origins.listing import Listing
from shardcache.prewarm.helpers import Helper
from shardcache.prewarm.plan import Share, make_plan, wanted_shards
from shardcache.prewarm.pool import Pool, serve
from shardcache.results import Event, Outcome, Planned, PrewarmReport, Stopped, is_full
from shardcache.store.root import make_root
from shardcache.units import format_bytes
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache

#: Shards at a time unless the caller says otherwise.
JOBS = 32
#: Modules of the engine that `import shardcache` leaves out; the client of S3 among them.
_ENGINE = ("download.acquire", "space.clean", "stats.database", "origins.s3")


def prewarm(
    cache: Cache,
    urls: str | ShardURL | Iterable[str | ShardURL],
    *,
    share: Share | None = None,
    jobs: int = JOBS,
    check: bool = False,
    dry_run: bool = False,
    deadline: float | None = None,
    max_failures: int | None = None,
    best_effort: bool = False,
    limit_rate: int | str | None = None,
    refresh: bool = False,
    processes: int = 1,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> PrewarmReport:
    """Bring shards into the cache before they are needed.

    Args:
        cache: the cache to fill.
        urls: one shard specification or several, see `expand`: URLs, ``{braces}``, globs and
            prefixes. What `Cache.parse` returned is not expanded.
        share: only the shards that one node's ranks read.
        jobs: most shards at a time.
        check: only tell which shards are cached.
        dry_run: only tell what would be done.
        deadline: seconds after which no shard is started and running fetches are cut short.
        max_failures: stop at the next failure after so many; None goes on.
        best_effort: leave out what does not fit instead of refusing everything.
        limit_rate: most bytes per second of all connections together: a number, or text such
            as ``"50MB"``.
        refresh: ask origins for the cached shards, and fetch those that they have replaced.
            Open streams go on with the version that they read.
        processes: how many processes share the work. The others are forked at once, so give more
            than 1 only in programs without threads.
        on_event: called with each event, in the calling thread; must not block.
        stop: set it, from any thread or signal handler, to end early.

    Returns:
        What became of each shard.

    Raises:
        ConfigError: a URL or option that cannot work, or an unusable directory.
        CacheFullError: it does not fit; nothing was fetched.
        ShardNotFoundError: nothing matches a prefix or a pattern.
        AccessDeniedError, TransferError: a prefix or a pattern cannot be listed.
        OSError: the directory cannot be read or made.
        KeyboardInterrupt: passed on once the fetches have ended.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}. Give at least 1.", option="jobs")
    rate = None if limit_rate is None else parse_rate(limit_rate)
    began = clock.monotonic()
    looking = check or dry_run
    count = 0 if looking else min(processes, jobs) - 1
    if count:
        for name in _ENGINE:  # once, not in each process
            importlib.import_module(f"shardcache.{name}")
    helpers = [Helper(partial(serve, cache)) for _ in range(count)]

    def report(events: Iterable[Event]) -> None:
        for event in events:
            if on_event is not None:
                on_event(event)

    try:
        listing = Listing(cache.config)
        shards = wanted_shards(
            cache, [urls] if isinstance(urls, str | ShardURL) else urls, listing, share
        )
        if not looking:
            _prepare(cache)
        plan = make_plan(
            cache, shards, listing, best_effort=best_effort, ask_sizes=not check, refresh=refresh
        )
        report([Planned(plan)])
        if looking:
            results = plan.results({}, Outcome.MISSING)
            return PrewarmReport(plan, results, clock.monotonic() - began)
        if plan.missing and not best_effort:
            raise CacheFullError(
                f"the shards to fetch need {format_bytes(plan.needed)} of disk, "
                f"{format_bytes(plan.missing)} more than there is room for in {cache.dir}. "
                "Raise max_size, free the disk, ask for fewer shards, or take what fits "
                "(best_effort, --best-effort).",
                needed=plan.needed,
                missing=plan.missing,
            )
        pool = Pool(cache, plan, stop or threading.Event(), jobs, best_effort, max_failures, rate)
        pool.end = math.inf if deadline is None else began + deadline
        pool.share(helpers)
        pool.work(report)
    finally:
        for helper in helpers:
            helper.close()
    full = best_effort and pool.stopped is Stopped.FULL
    results = plan.results(pool.results, Outcome.LEFT_OUT if full else Outcome.NOT_STARTED)
    return PrewarmReport(plan, results, clock.monotonic() - began, pool.stopped)


def _prepare(cache: Cache) -> None:
    """Make the directory, so that its faults are told once and not per shard."""
    try:
        make_root(cache.dir, __version__, Modes.of(cache.config.shared_group))
        if not os.access(Layout.of_root(cache.dir).partial, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except OSError as exn:
        if is_full(exn) or isinstance(exn, ShardCacheError):
            raise
        raise ConfigError(
            f"{cache.dir} cannot be used for the cache: {exn.strerror or exn}. "
            "Give a directory that this user may write to.",
            dir=cache.dir,
        ) from exn
