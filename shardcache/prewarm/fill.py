"""Filling the cache before a job: many shards, several at once, nothing lost.

    expand -> plan -> does it fit? -> workers: fetch, fetch, ... -> report

Any number of prewarms of any number of processes may run on one cache: they
share the fetches, as all readers do. What is cut short is kept as a partial:
the same call goes on where it ended.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from shardcache.clock import SYSTEM_CLOCK
from shardcache.errors import CacheFullError, ConfigError, ShardCacheError
from shardcache.fetch.connections import Throttle, parse_rate
from shardcache.files import Modes
from shardcache.layout import Layout
from shardcache.nodes import Share
from shardcache.origins.listing import Listing, is_pattern
from shardcache.prewarm.crew import Crew, suitable
from shardcache.prewarm.plan import PrewarmPlan, make_plan, wanted_shards
from shardcache.prewarm.report import (
    Event,
    Finished,
    Outcome,
    Planned,
    PrewarmReport,
    ShardResult,
    Started,
    Stopped,
    Stopping,
    is_full,
    plan_failure,
)
from shardcache.prewarm.run import Run
from shardcache.store.root import make_root
from shardcache.units import format_bytes
from shardcache.urls import ShardURL, redact
from shardcache.version import __version__

if TYPE_CHECKING:
    from shardcache.cache import Cache

__all__ = [
    "Event",
    "Finished",
    "Outcome",
    "Planned",
    "PrewarmPlan",
    "PrewarmReport",
    "ShardResult",
    "Started",
    "Stopped",
    "Stopping",
    "expand",
    "prewarm",
]

_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: WebDataset substitutes variables of variables this deep.
_NESTED = 10


def expand(
    specs: Iterable[str], cache: Cache | None = None, *, share: Share | None = None
) -> list[str]:
    """The shards that ``specs`` stand for, each once, in order.

    As WebDataset does it: split at ``::``, ``${X}`` from the variable ``WDS_X``,
    then braces. Not through its own function, because importing webdataset
    imports torch.

    Args:
        specs: shard specifications.
        cache: lists ``s3://bucket/prefix/`` (every tar file below) and names with
            ``*`` or ``?``; without one those stay as they are.
        share: only those that this node of several reads. As for WebDataset, a shard that is
            named twice counts twice in the split.

    Raises:
        ConfigError: a malformed specification, or a variable that is not set.
        ShardNotFoundError: nothing is there under a prefix or a pattern.
        AccessDeniedError, TransferError: it cannot be listed.
    """
    found: list[str] = []
    listing = Listing(cache.config) if cache is not None else None
    for spec in specs:
        for url in _expanded(spec):
            if listing is not None and is_pattern(url):
                found += listing.matches(url)
            else:
                found.append(url)
    return list(dict.fromkeys(found if share is None else share.of(found)))


def _expanded(spec: str) -> list[str]:
    import braceexpand

    urls: list[str] = []
    for part in spec.split("::"):
        for _ in range(_NESTED):
            last, part = part, _VARIABLE.sub(_variable, part)
            if part == last:
                break
        try:
            urls += braceexpand.braceexpand(part)
        except ValueError as exn:
            raise ConfigError(
                f"{redact(part)}: {redact(str(exn))}. Write ranges as {{0000..0127}}, lists as "
                "{a,b}, and a brace of the name itself as \\{.",
            ) from exn
    return urls


def _variable(found: re.Match[str]) -> str:
    name = f"WDS_{found[1]}"
    value = os.environ.get(name)
    if value is None:
        raise ConfigError(f"${{{found[1]}}} in a shard specification needs {name}: set it.")
    return value


def prewarm(
    cache: Cache,
    urls: str | Iterable[str],
    *,
    jobs: int = 32,
    processes: int | None = None,
    check: bool = False,
    dry_run: bool = False,
    deadline: float | None = None,
    max_failures: int | None = None,
    best_effort: bool = False,
    limit_rate: int | str | None = None,
    refresh: bool = False,
    on_event: Callable[[Event], None] | None = None,
    stop: threading.Event | None = None,
) -> PrewarmReport:
    """Bring shards into the cache before they are needed.

    Args:
        cache: where to; while this runs, `Cache.cancel` ends it.
        urls: shards; a string is expanded like a WebDataset specification.
        jobs: most shards at a time; no more are used than bring the bytes faster. They share
            the ``connections`` of the configuration.
        processes: fetch in so many forked processes, which share the ``jobs``; 1 forks none.
            None: up to one per processor, and 8, where there is enough to do, and if this
            process has a single thread and less than a GiB of memory.
        check: only tell which are cached.
        dry_run: only tell what would be done.
        deadline: seconds after which no shard is started and running ones are cut short.
        max_failures: stop at the next failure after so many; None goes on.
        best_effort: leave out what does not fit instead of refusing everything.
        limit_rate: most bytes per second of all connections together: a number, or text such
            as ``"50MB"``.
        refresh: ask origins for the shards that are there, and fetch those that were replaced
            anew. Running jobs go on with the version that they read.
        on_event: told what happens, in the calling thread; must not block.
        stop: set it, from any thread or signal handler, to end early.

    Raises:
        ConfigError: a URL or option that cannot work, or an unusable directory.
        CacheFullError: it does not fit; nothing was fetched.
        OSError: the directory cannot be read or made.
        KeyboardInterrupt: passed on once the fetches have let go.
    """
    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}. Give at least 1.", option="jobs")
    if processes is not None and processes < 1:
        raise ConfigError(f"processes is {processes}. Give at least 1.", option="processes")
    rate = None if limit_rate is None else parse_rate(limit_rate)
    begun = SYSTEM_CLOCK.monotonic()
    emit = on_event or (lambda event: None)
    names = expand([urls], cache) if isinstance(urls, str) else urls
    shards = wanted_shards(cache, names)
    looking = check or dry_run
    if not looking:
        _prepare(cache)
    plan = make_plan(
        cache,
        shards,
        best_effort=best_effort,
        patience=0.0 if check else deadline,
        refresh=refresh,
    )
    if looking:
        emit(Planned(plan))
        results = tuple(_looked_at(plan, shard) for shard in shards)
        return PrewarmReport(plan, results, SYSTEM_CLOCK.monotonic() - begun)
    if plan.missing and not best_effort:
        emit(Planned(plan))
        raise CacheFullError(
            f"{format_bytes(plan.fetch_bytes)} to fetch, {format_bytes(plan.missing)} more than "
            f"there is room for in {cache.dir}. Raise max_size, free the disk, ask for fewer "
            "shards, or take what fits (best_effort, --best-effort).",
            needed=plan.fetch_bytes,
            missing=plan.missing,
        )
    count = len(plan.to_fetch) - len(plan.left_out)
    if any(upstream.write_back for upstream in cache.config.upstreams):
        processes = 1  # the copies are made by the process that fetched, which must outlast them
    processes = processes or suitable(count, plan.fetch_bytes)
    with (
        contextlib.nullcontext() if rate is None else Throttle(rate) as throttle,
        Crew(cache, processes, jobs, throttle) as crew,
        cache.calling_off(crew.cancel),
    ):
        # Once there are all processes: who is told may start a thread.
        emit(Planned(plan))
        run = Run(
            cache,
            plan,
            jobs=jobs,
            max_failures=max_failures,
            best_effort=best_effort,
            emit=emit,
            end=None if deadline is None else begun + deadline,
            stop=stop or threading.Event(),
            crew=crew,
            throttle=throttle,
        )
        run.run()
    return PrewarmReport(plan, run.results(), SYSTEM_CLOCK.monotonic() - begun, run.stopped)


def _prepare(cache: Cache) -> None:
    """Make the directory, so that its faults are told once and not per shard."""
    try:
        make_root(cache.dir, __version__, Modes.of(cache.config.shared_group))
        if not os.access(Layout.of_root(cache.dir).partial, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written")
    except ShardCacheError:
        raise
    except OSError as exn:
        if is_full(exn):
            raise
        raise ConfigError(
            f"{cache.dir} cannot be used for the cache: {exn.strerror or exn}. "
            "Give a directory that this user may write to.",
            dir=cache.dir,
        ) from exn


def _looked_at(plan: PrewarmPlan, shard: ShardURL) -> ShardResult:
    outcome = Outcome.MISSING
    if shard.key in plan.unconfirmed:
        return plan_failure(plan, shard)
    if shard.key in plan.cached:
        outcome = Outcome.CACHED
    elif shard.key in plan.left_out:
        outcome = Outcome.LEFT_OUT
    return ShardResult(str(shard), outcome, plan.size_of(shard))
