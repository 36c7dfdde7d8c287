"""Prewarm a cache: expand shard specifications, make a plan, refuse what cannot fit, download.

Several prewarms may run on one cache at the same time, in one process or in several. Like all
readers, they share downloads: each shard is downloaded once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from shardcache import clock
from shardcache.download.pool import NODE, parse_rate
from shardcache.errors import CacheFullError, ConfigError, ShardCacheError
from shardcache.layout import Layout
from shardcache.origins.listing import Listing
from shardcache.prewarm.plan import Share, confirm, make_plan, wanted_shards
from shardcache.prewarm.pool import Pool
from shardcache.results import Event, Finished, Outcome, Planned, PrewarmReport, Stopped, is_full
from shardcache.store.root import make_root, unusable
from shardcache.units import format_bytes
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache

#: How many shards are downloaded at the same time by default.
JOBS = 32
#: Connections that keep one process busy. At S3's 80 MB/s each, they bring 0.64 GB/s, and a process
#: on a core of its own received 0.75 GB/s over TLS (loopback, November 2026).
_CONNECTIONS = 8


def most_processes(cache: Cache) -> int:
    """Return how many processes a prewarm may use, so that the node's connections keep all busy."""
    connections = max(NODE, cache.config.connections)
    return min(connections // _CONNECTIONS, len(os.sched_getaffinity(0)))


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
    skip_missing: bool = False,
    limit_rate: int | str | None = None,
    refresh: bool = False,
    processes: int = 1,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> PrewarmReport:
    """Download shards into the cache before they are needed.

    Args:
        cache: the cache to fill.
        urls: one shard specification or several (URLs, ``{braces}``, globs and prefixes; see
            `expand`), or results of `Cache.parse`, which are not expanded.
        share: the share of one node; shards that its ranks do not read are not downloaded.
        jobs: how many shards to download at the same time.
        check: download nothing; only report which shards are cached.
        dry_run: download nothing; only report the plan.
        deadline: seconds after which no shard is started and running downloads are cancelled.
        max_failures: stop when more shards than this have failed; None never stops.
        best_effort: leave out shards that do not fit instead of refusing all of them.
        skip_missing: do not count shards that their origins do not have (404) as failed.
        limit_rate: bytes per second for all connections together: a number, or text such as
            ``"50MB"``.
        refresh: query the origins for newer versions of the cached shards, and download these.
            Streams that are open continue with the version that they read.
        processes: how many processes share the work. The additional ones are forked, so this is
            ignored in a program that has other threads.
        on_event: called in the calling thread with each event; must not block.
        stop: an event that any thread or signal handler may set, to stop early.

    Returns:
        The plan, and the result of each shard.

    Raises:
        ConfigError: a URL or an option is invalid, or the directory cannot be used.
        CacheFullError: the shards do not fit; nothing was downloaded.
        ShardNotFoundError: nothing matches a prefix or a pattern.
        AccessDeniedError, TransferError: a prefix or a pattern cannot be listed.
        OSError: the directory cannot be read or created.
        KeyboardInterrupt: raised after the downloads have ended.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}. Give at least 1.", option="jobs")
    rate = None if limit_rate is None else parse_rate(limit_rate)
    start = clock.monotonic()
    plan_only = check or dry_run
    specs = [urls] if isinstance(urls, str | ShardURL) else list(urls)

    def report(events: Iterable[Event]) -> None:
        for event in events:
            if on_event is not None:
                on_event(event)

    listing = Listing(cache.config)
    shards = wanted_shards(cache, specs, listing, share)
    if not plan_only:
        _make_directory(cache)
    plan = make_plan(
        cache, shards, listing, best_effort=best_effort, list_sizes=not check, refresh=refresh
    )
    if plan_only:
        report([Planned(plan)])
        results = plan.results({}, Outcome.MISSING)
        return PrewarmReport(plan, results, clock.monotonic() - start)
    if plan.missing and not best_effort:
        report([Planned(plan)])
        raise CacheFullError(
            f"the shards to download need {format_bytes(plan.needed)} of disk, "
            f"{format_bytes(plan.missing)} more than {cache.dir} has room for. "
            "Raise max_size, free the disk, name fewer shards, or take those that fit "
            "(best_effort, --best-effort).",
            needed=plan.needed,
            missing=plan.missing,
        )
    stop = stop or threading.Event()
    events = list(confirm(cache, plan, stop))
    known = {each.shard.key: each.result for each in events if isinstance(each, Finished)}
    limits = best_effort, max_failures, skip_missing
    pool = Pool(cache, plan, stop, jobs, *limits, rate, results=known)
    pool.deadline = math.inf if deadline is None else start + deadline
    with contextlib.closing(pool):
        pool.fork(processes)  # before `report`, which may start a thread
        report([Planned(plan), *events])
        pool.run(report)
    full = best_effort and pool.stopped is Stopped.FULL
    results = plan.results(pool.results, Outcome.LEFT_OUT if full else Outcome.NOT_STARTED)
    return PrewarmReport(plan, results, clock.monotonic() - start, pool.stopped)


def _make_directory(cache: Cache) -> None:
    """Create the cache directory; raise one error if it is unusable, instead of one per shard."""
    try:
        make_root(cache.config)
        if not os.access(Layout.of_root(cache.dir).partial, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no write permission")
    except OSError as exn:
        if is_full(exn) or isinstance(exn, ShardCacheError):
            raise
        raise unusable(cache.dir, exn) from exn
