"""What a prewarm has to do, and whether it fits, before anything is fetched.

    expand: specifications -> URLs      wanted_shards: URLs -> shards      make_plan: shards -> plan

A plan reads names and sizes; it opens no shard and verifies no digest. Other processes may add
and evict entries meanwhile. The fetches that follow find that out by themselves, so a plan may be
outdated, but never harmful.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shardcache import clock
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.origins.listing import Listing, expand_braces, is_pattern, refuse_local
from shardcache.ranks import whole_number
from shardcache.results import PrewarmPlan
from shardcache.space.eviction import Limits, total_bytes
from shardcache.space.memory import Volume
from shardcache.space.tiers import Tier
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry
from shardcache.store.verify import differs
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache

T = TypeVar("T")

#: Origins are asked about so many shards at a time. Each question is a round trip and no more.
_QUESTIONS = 16
#: Where launchers state the node's number and the number of nodes: a Slurm step (the step's own
#: number of nodes, else the allocation's), torchrun (one group of workers per node).
_LAUNCHERS = (
    ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NODEID", "SLURM_NNODES"),
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a list of shards that one node's ranks read.

    WebDataset's ``split_by_node`` gives rank r of w the shards r, r + w, r + 2w, ... of the
    expanded list. Ranks are numbered node by node, as torchrun and Slurm
    (``--distribution=block``) do: with k ranks per node, node n has the ranks n*k to n*k + k - 1.

    Attributes:
        node: number of the node, from 0 on.
        count: number of nodes.
        ranks: processes of the training run on each node.
    """

    node: int
    count: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.node < self.count:
            raise ConfigError(
                f"node {self.node} is not one of {self.count} with {self.ranks} ranks each: nodes "
                "are numbered from 0 on. Correct --node-rank, --node-count or --ranks-per-node."
            )

    def of(self, shards: Sequence[T]) -> list[T]:
        """The shards that this node's ranks read, in the order of the list."""
        world = self.count * self.ranks
        return [each for n, each in enumerate(shards) if n % world // self.ranks == self.node]


def own_share(node: int | None, count: int | None, ranks: int) -> Share:
    """This node's share; without ``node`` and ``count``, by the launcher's variables.

    Raises:
        ConfigError: neither the caller nor a launcher tells, or the numbers are impossible.
    """
    if (node is None) != (count is None):
        raise ConfigError("--node-rank and --node-count go together: give both, or neither.")
    for name, size in _LAUNCHERS:
        if node is None or count is None:
            node, count = whole_number(os.environ, name), whole_number(os.environ, size)
    if node is None or count is None:
        raise ConfigError(
            "--shard-by-node needs to know which node this is. Run it as a Slurm step "
            "(srun --ntasks-per-node=1), with --ray, or give --node-rank and --node-count."
        )
    return Share(node, count, ranks)


def expand(specs: str | Iterable[str], cache: Cache | None = None) -> list[str]:
    """The URLs that ``specs`` stand for, each once, in order.

    Args:
        specs: one shard specification, or several.
        cache: lists ``s3://bucket/prefix/`` (every tar file below it) and names with ``*`` or
            ``?``. Without a cache those stay as they are.

    Raises:
        ConfigError: a malformed specification, or a variable that is not set.
        ShardNotFoundError: nothing matches a prefix or a pattern.
        AccessDeniedError, TransferError: it cannot be listed.
    """
    listing = None if cache is None else Listing(cache.config)
    specs = [specs] if isinstance(specs, str) else specs
    return list(dict.fromkeys(url for spec in specs for url in _expand(spec, listing)))


def _expand(spec: str, listing: Listing | None) -> Iterator[str]:
    for url in expand_braces(spec):
        yield from listing.matches(url) if listing and is_pattern(url) else [url]


def wanted_shards(
    cache: Cache,
    wanted: Iterable[str | ShardURL],
    listing: Listing,
    share: Share | None = None,
) -> tuple[ShardURL, ...]:
    """The shards that are asked for; of two names of one object the first stays.

    Specifications are expanded, parsed URLs are not. Of a ``share`` only what this node reads is
    kept; as in WebDataset, a shard that is named twice counts twice in the split.

    Raises:
        ConfigError: not a URL, or one that this cache does not store; and as `expand`.
    """
    shards: list[ShardURL] = []
    for each in wanted:
        shards += [each] if isinstance(each, ShardURL) else map(cache.parse, _expand(each, listing))
    found: dict[str, ShardURL] = {}
    for shard in shards if share is None else share.of(shards):
        refuse_local(shard, cache.config)
        found.setdefault(shard.key, shard)
    return tuple(found.values())


def make_plan(
    cache: Cache,
    shards: tuple[ShardURL, ...],
    listing: Listing,
    *,
    best_effort: bool = False,
    ask_sizes: bool = True,
    refresh: bool = False,
) -> PrewarmPlan:
    """Compare what is wanted with what is cached.

    With ``ask_sizes`` the origin is asked how large the missing shards are, with ``refresh`` which
    of the cached ones it has replaced; ``best_effort`` leaves out what does not fit.

    Raises:
        OSError: the directory cannot be read.
    """
    wanted = {shard.key for shard in shards}
    entries = list(cache.entries())
    cached = {entry.key: entry for entry in entries if entry.key in wanted}
    outdated: dict[str, frozenset[str]] = {}
    unconfirmed: dict[str, Exception] = {}
    if refresh:
        known = [shard for shard in shards if shard.key in cached]
        with ThreadPoolExecutor(_QUESTIONS, "shardcache-refresh") as pool:
            answers = list(pool.map(partial(_outdated, cache), known))
        for shard, answer in zip(known, answers, strict=True):
            if isinstance(answer, Exception):
                unconfirmed[shard.key] = answer
            elif answer:
                outdated[shard.key] = answer
                del cached[shard.key]
    missing = [shard for shard in shards if shard.key not in cached]
    sizes: Mapping[str, int] = {}
    if missing and ask_sizes:
        sizes = listing.sizes(missing)
    free = evict = 0
    process = cache.processes.here()
    allocated = process.home.space().allocated
    room = {key: allocated(size) for key, size in sizes.items()}
    need = too_much = sum(room.values())
    for tier in process.tiers:  # what one has no room for is for the next
        more, freed, lacking = _room(tier, entries, wanted, too_much)
        too_much = min(too_much, lacking)  # more may be over its limits, but is not to be fetched
        free, evict = free + more, evict + freed
    left_out = set()
    left = need - too_much
    for shard in missing if best_effort else ():  # the rest fits; earlier ones go first
        if (size := room.get(shard.key, 0)) <= left:
            left -= size
        else:
            left_out.add(shard.key)
    return PrewarmPlan(
        shards,
        cached,
        sizes,
        free,
        evict,
        too_much,
        left_out=frozenset(left_out),
        outdated=outdated,
        unconfirmed=unconfirmed,
        needed=need,
    )


def _outdated(cache: Cache, shard: ShardURL) -> frozenset[str] | Exception:
    """Cached versions of a shard whose origin has another one; or why that is unknown."""
    process = cache.processes.here()
    process.site()
    found = [entry for store in process.stores() for entry in store.entries_of(shard.key)]
    if not found or shard.scheme == "pipe" or shard.version_id:
        return frozenset()
    try:
        origin, attempts = process.origins.of(shard), process.engine.policy.started(str(shard))
        now = attempts.call(lambda: origin.stat(shard), sleep=clock.sleep)
    except (ShardCacheError, OSError) as exn:
        return exn
    try:
        is_current = any(differs(entry.metadata().info, now) is None for entry in found)
    except (ValueError, DamagedError, FileNotFoundError):
        is_current = True  # nothing tells versions apart; or whoever opens it will see to it
    return frozenset() if is_current else frozenset(entry.version for entry in found)


def _room(tier: Tier, entries: list[Entry], wanted: set[str], need: int) -> tuple[int, int, int]:
    """Bytes on disk that are free, to be evicted, and missing for ``need`` more, in one tier."""
    config, space = tier.config, tier.space()
    here = [entry for entry in entries if tier.owns(entry.directory)]
    flights = space.flights()
    # Part of `need`, and on disk already.
    resumable = sum(flight.occupied for flight in flights if flight.key in wanted)
    others = sum(flight.reserved for flight in flights if flight.key not in wanted)
    above = (config.dir, *config.dir.parents)
    volume = Volume.of(next(path for path in above if path.exists()))
    limit = volume.budget(config)
    free = spare = volume.free - config.min_free.of(volume.size) + resumable
    kept = total_bytes([entry for entry in here if entry.key in wanted], space.allocated)
    chosen = space.plan(
        Limits(max_size=limit, free_needed=max(0, need - spare)),
        reserved=others + need + kept,
        entries=[entry for entry in here if entry.key not in wanted],
    )
    if limit is not None:
        free = min(free, limit - others - total_bytes(here, space.allocated))
    return max(0, free), chosen.freed, chosen.missing
