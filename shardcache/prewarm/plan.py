"""Plan a prewarm: which shards it has to download, and whether they fit.

Planning reads names and sizes, and opens no shard. If other processes add or evict entries in the
meantime, `confirm` and the downloads notice it.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache import clock, threads
from shardcache.cache import default_cache
from shardcache.download.download import Progress
from shardcache.download.worker import evict_outdated, refused_file
from shardcache.errors import ConfigError, FetchCancelledError, ShardCacheError, ShardNotFoundError
from shardcache.faults import system_error
from shardcache.files import existing, open_file
from shardcache.origins.base import ObjectInfo
from shardcache.origins.listing import Listing, is_pattern, spec_list
from shardcache.prewarm.results import Finished, Outcome, PrewarmPlan, ShardResult, Started, is_full
from shardcache.process import ProcessCache
from shardcache.ranks import whole_number
from shardcache.space.eviction import Limits, total_bytes
from shardcache.space.memory import Volume
from shardcache.store.digest import identify
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry
from shardcache.store.partial import InFlight, read_journal
from shardcache.store.root import check_usable, is_read_only
from shardcache.tiers import Tier
from shardcache.urls import ShardURL, parse_listed, refuse_in_place

if TYPE_CHECKING:
    from shardcache.cache import Cache, PrewarmOptions

#: HEAD requests in flight at once before a plan. Each takes one round trip and has no body.
_REQUESTS = 16
#: Environment variables with the number of this node and the number of nodes, of Slurm's steps and
#: allocations, and of torchrun, which starts one group of workers per node.
_LAUNCHERS = (
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NODEID", "SLURM_NNODES"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a list of shards that the ranks of one node read.

    WebDataset's ``split_by_node`` gives rank r of w the shards r, r + w, r + 2w, ... of the
    expanded list. Ranks are numbered node by node, as torchrun and Slurm
    (``--distribution=block``) do: with k ranks per node, node n has the ranks n*k to n*k + k - 1.
    """

    node: int  #: number of this node, from 0
    count: int  #: number of nodes
    ranks: int = 1  #: number of ranks on each node

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.node < self.count:
            raise ConfigError(
                f"node {self.node} is not one of {self.count} with {self.ranks} ranks each: nodes "
                "are numbered from 0. Correct --node-rank, --node-count or --ranks-per-node."
            )

    def of(self, shards: Sequence[ShardURL]) -> list[ShardURL]:
        """Return the shards that this node's ranks read, in the order of the list."""
        world = self.count * self.ranks
        return [shard for n, shard in enumerate(shards) if n % world // self.ranks == self.node]


def own_share(node: int | None, count: int | None, ranks: int) -> Share:
    """Return this node's share. Without ``node`` and ``count``, read the launcher's variables."""
    if (node is None) != (count is None):
        raise ConfigError("--node-rank and --node-count go together: give both, or neither.")
    for names in _LAUNCHERS:
        if node is None or count is None:
            node, count = map(whole_number, names)
    if node is None or count is None:
        raise ConfigError(
            "--shard-by-node needs to know which node this is. Run it as a Slurm step "
            "(srun --ntasks-per-node=1), with --ray, or give --node-rank and --node-count."
        )
    return Share(node, count, ranks)


def expand(specs: str | Iterable[str], cache: Cache | None = None) -> list[str]:
    """Return the URLs that shard specifications stand for, in order and without duplicates.

    Args:
        specs: one shard specification, or several. A prefix (``s3://bucket/prefix/``) stands for
            every tar file below it, and a name with ``*`` or ``?`` for those that match.
        cache: the cache whose options are used to list them; default: the default cache.

    Raises:
        ConfigError: a specification is malformed, or names a variable that is not set.
        ShardNotFoundError: nothing matches a prefix or a pattern.
        AccessDeniedError, TransferError: a prefix or a pattern cannot be listed.
    """
    listing = Listing((cache or default_cache()).config)
    urls = (url for spec in spec_list(specs) for url in listing.expand(str(spec)))
    return list(dict.fromkeys(urls))


def wanted_shards(
    cache: Cache, wanted: Iterable[str | ShardURL], listing: Listing, share: Share | None = None
) -> tuple[ShardURL, ...]:
    """Expand and parse shard specifications, and return each shard of the share once, in order.

    As in WebDataset, a shard that is named twice counts twice in the split. Raises the errors of
    `expand`.
    """
    shards: list[ShardURL] = []
    for spec in wanted:
        if isinstance(spec, ShardURL):
            # `Origins.of` refuses a name with a control character.
            is_parsed = not spec.options and spec.raw.isprintable()
            if is_parsed and (endpoint := cache.other_endpoint(spec)):
                raise ConfigError(
                    f"{spec} came from another endpoint ({endpoint}). Set that endpoint."
                )
            shards.append(spec)
            continue
        parse = partial(parse_listed, cache.parse) if is_pattern(spec) else cache.parse
        shards += map(parse, listing.expand(spec))
    by_key: dict[str, ShardURL] = {}
    for shard in shards if share is None else share.of(shards):
        refuse_in_place(shard, cache.config.cache_local)
        by_key.setdefault(shard.key, shard)
    return tuple(by_key.values())


def outcome_of(error: Exception, options: PrewarmOptions) -> Outcome:
    """Return the outcome of a shard that an error keeps out of the cache."""
    if isinstance(error, FetchCancelledError):
        return Outcome.NOT_STARTED
    if options.get("best_effort") and is_full(error):
        return Outcome.LEFT_OUT
    is_skipped = options.get("skip_missing") and isinstance(error, ShardNotFoundError)
    return Outcome.SKIPPED if is_skipped else Outcome.FAILED


def make_plan(
    cache: Cache, shards: tuple[ShardURL, ...], listing: Listing, options: PrewarmOptions
) -> PrewarmPlan:
    """Compare the wanted shards, each once, with the cache, and return what to download."""
    refresh, best_effort = options.get("refresh"), options.get("best_effort")
    sources = (options.get("sources") if options.get("dry_run") else None) or {}
    wanted = {shard.key: shard for shard in shards}
    entries = list(cache.entries())
    stored = {entry.key for entry in entries}
    process = cache.process
    compared = [s for s in shards if s.key in sources or (refresh and s.key in stored)]
    if refresh and compared:
        process.prepare()
    compare = partial(_compare, process, sources)
    compared_versions = threads.each(compare, compared, _REQUESTS, "shardcache-compare")
    pairs = [(compared[number].key, result) for number, result in compared_versions]
    errors = {key: result for key, result in pairs if isinstance(result, Exception)}
    outdated = {key: old for key, old in pairs if old and not isinstance(old, Exception)}
    current = (e for e in entries if e.key in wanted and e.version not in outdated.get(e.key, ()))
    cached = {e.key: e for e in current if e.has_data(wanted[e.key].basename)}
    missing = [s for s in shards if s.key not in cached and s.key not in errors]
    level = logging.WARNING if options.get("dry_run") else logging.INFO
    sizes = listing.sizes(missing, level, ask=not options.get("check"))
    allocated = process.last_tier.space.allocated
    on_disk = {key: allocated(size) for key, size in sizes.items()}
    needed = sum(on_disk.values())
    rooms, disks, resumable = dict[Tier, int](), defaultdict[int, list[tuple[int, int]]](list), 0
    for tier in process.tiers:
        with process.tolerating(tier):
            check_usable(tier.config)
            flights = tier.space.flights()
            paths = [flight.path for flight in flights if flight.key in sizes and not flight.live]
            journals = filter(None, map(read_journal, paths))
            resumable += sum(journal.written for journal in journals if journal.metadata.resumable)
            if not is_read_only(tier.config.dir):
                device, room, spare = _room(tier, flights, entries, wanted)
                rooms[tier] = room
                disks[device].append((max(0, room), spare))
    # Several tiers may share a disk.
    free = sum(min(sum(r for r, _ in each), max(s for _, s in each)) for each in disks.values())
    left_in, lacking, evict = rooms.copy(), 0, 0
    for need in on_disk.values():  # a shard is not divided among tiers
        if fitting := [tier for tier, room in left_in.items() if need <= room]:
            left_in[fitting[0]] -= need
        else:
            lacking += need
    lacking = max(lacking, needed - free)
    for tier, room in rooms.items() if lacking else ():  # in the order of `Worker._reserve`
        unwanted = [e for e in entries if e.key not in wanted and tier.owns(e.directory)]
        policy = tier.space.policy
        policy = policy if tier is process.last_tier else policy._replace(keeps_used=True)
        planned = tier.space.plan(unwanted, Limits(free_needed=lacking - min(0, room)), policy)
        evict, lacking = evict + planned.freed, min(lacking, planned.missing)
    results, left = dict[str, ShardResult](), needed - lacking
    for shard in shards:
        key, error = shard.key, errors.get(shard.key)
        size = cached[key].size if key in cached else sizes.get(key)
        outcome = Outcome.CACHED if key in cached else Outcome.MISSING
        if error is not None:
            outcome = outcome_of(error, options)
        elif best_effort and on_disk.get(key, 0) > left:
            outcome = Outcome.LEFT_OUT
        left -= on_disk.get(key, 0) if outcome is Outcome.MISSING else 0
        results[key] = ShardResult(str(shard), outcome, size, error=error)
    totals = {"free": free, "evict": evict, "missing": lacking, "needed": needed}
    over = sum(max(0, -room) for room in rooms.values())
    return PrewarmPlan(shards, results, cached, outdated, **totals, resumable=resumable, over=over)


def confirm(cache: Cache, plan: PrewarmPlan, stop: threading.Event) -> Iterator[Started | Finished]:
    """Record a use of the cached shards of a plan, so that its downloads do not evict them.

    Yields the events of the shards that need no download. The others could not be compared with
    their origin, are damaged, belong to another rank, or were stored under another boot.
    """
    process = cache.process
    directories, now = process.prepare(), clock.time()  # after the start of a command's session
    for shard in plan.shards:
        if stop.is_set():
            return
        if (entry := plan.cached.get(shard.key)) is not None:
            store = process.tier_of(entry.directory).store
            store.touch(entry.directory, now)
            evict_outdated(directories, shard.key, plan.outdated.get(shard.key, frozenset()))
            result = plan.results[shard.key]
            if result.outcome is Outcome.CACHED and store.is_intact(entry, shard.basename):
                yield Started(shard, Progress)
                yield Finished(shard, result)


def _compare(
    process: ProcessCache, sources: Mapping[str, Path], shard: ShardURL
) -> frozenset[str] | Exception:
    """Return the outdated versions of a shard, or why it or its file cannot be used.

    If another rank or job has the current version, its versions do not count.
    """
    file, is_fixed = sources.get(shard.key), shard.scheme == "pipe" or shard.version_id
    try:
        entries = [entry for store in process.stores() for entry in store.entries_of(shard.key)]
        if file is None and (is_fixed or not entries):  # cannot be outdated
            return frozenset()
        retries = process.resources.retry_limits.started(str(shard))
        origin = process.origins.of(shard)
        latest = retries.call(lambda: origin.stat(shard), sleep=clock.sleep)
        if file is not None:
            with open_file(file) as opened:
                is_object = identify(opened.fileno(), latest)
                return frozenset() if is_object else refused_file(shard, file, latest)
        try:
            old = [entry for entry in entries if not same_version(entry.metadata().info, latest)]
        except (ValueError, DamagedError, FileNotFoundError):
            # Either the origin states nothing that identifies a version, so nothing can be
            # compared, or the entry is damaged, which its next open will discover.
            return frozenset()
    except (ShardCacheError, system_error()) as exn:
        return exn
    if len(old) < len(entries):
        own_namespaces = tuple(f"{tier.store.layout.base}/objects/" for tier in process.tiers)
        old = [entry for entry in old if entry.directory.startswith(own_namespaces)]
    return frozenset(entry.version for entry in old)


def same_version(then: ObjectInfo, now: ObjectInfo) -> bool:
    """Return whether an object has not changed; ValueError if the origin does not show it."""
    if then.version_id and now.version_id and "null" not in (then.version_id, now.version_id):
        return then.version_id == now.version_id
    if then.size is not None and now.size is not None and then.size != now.size:
        return False
    if then.etag and now.etag:
        # A gateway that compresses responses marks the ETag as weak, but the object is the same.
        return then.etag.removeprefix("W/") == now.etag.removeprefix("W/")
    if then.modified and now.modified:
        return then.modified == now.modified
    raise ValueError("the origin states nothing to compare versions by")


def _room(
    tier: Tier, flights: list[InFlight], entries: list[Entry], wanted: Collection[str]
) -> tuple[int, int, int]:
    """Return the disk, and the free bytes of the tier (below zero over its limits) and the disk."""
    config, space = tier.config, tier.space
    # These bytes of unfinished downloads are already on the disk, but the plan includes them.
    resumable = sum(flight.occupied for flight in flights if flight.key in wanted)
    volume = Volume.of(path := existing(config.dir))
    free = spare = volume.free - config.min_free.of(volume.size) + resumable
    if (limit := volume.budget(config)) is not None:
        used = total_bytes((e for e in entries if tier.owns(e.directory)), space.allocated)
        others = sum(flight.reserved for flight in flights if flight.key not in wanted)
        free = min(free, limit - others - used)
    return path.stat().st_dev, free, max(0, spare)
