"""What a prewarm has to do, and whether it fits, before anything is fetched.

    expand: specifications -> URLs      wanted_shards: URLs -> shards      make_plan: shards -> plan

A plan reads names and sizes; it opens no shard and verifies no digest. Other processes may add
and evict entries meanwhile. The fetches that follow find that out by themselves, so a plan may be
outdated, but never harmful.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardcache.clock import SYSTEM_CLOCK
from shardcache.config import Config
from shardcache.errors import ConfigError, ShardCacheError
from shardcache.origins.listing import Listing, is_pattern, refuse_local
from shardcache.ranks import detect
from shardcache.results import PrewarmPlan
from shardcache.space.eviction import Limits, plan, total_bytes
from shardcache.space.memory import Volume
from shardcache.space.policy import Policy
from shardcache.store.entry import DamagedError
from shardcache.store.store import Entry, Namespaces
from shardcache.store.sweeping import in_flight
from shardcache.urls import ShardURL, redact

if TYPE_CHECKING:
    from shardcache.cache import Cache

#: Origins are asked about so many shards at a time. Each question is a round trip and no more.
_QUESTIONS = 16
_VARIABLE = re.compile(r"\$\{(\w+)\}")
#: WebDataset substitutes variables within variables to this depth.
_NESTED = 10
#: Where launchers state the node's number and the number of nodes: a Slurm step (the step's own
#: number of nodes, else the allocation's), torchrun (one group of workers per node).
_LAUNCHERS = (
    ("SLURM_NODEID", ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    ("GROUP_RANK", ("GROUP_WORLD_SIZE",)),
)


# -- specifications ------------------------------------------------------------


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

    Raises:
        ConfigError: the numbers contradict each other.
    """

    node: int
    count: int
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or self.ranks < 1:
            raise ConfigError(
                f"{self.count} nodes with {self.ranks} ranks each is no split. Give at least 1."
            )
        if not 0 <= self.node < self.count:
            raise ConfigError(
                f"node {self.node} is not one of {self.count}: they are numbered from 0 to "
                f"{self.count - 1}. Correct --node-rank or --node-count."
            )

    def of(self, urls: Sequence[str]) -> list[str]:
        """The URLs that this node's ranks read, in the order of the list."""
        first = self.node * self.ranks
        mine = range(first, first + self.ranks)
        world = self.count * self.ranks
        return [url for index, url in enumerate(urls) if index % world in mine]


def own_share(
    node: int | None, count: int | None, ranks: int, environ: Mapping[str, str] = os.environ
) -> Share:
    """This node's share.

    Args:
        node: number of this node, or None to ask the launcher's variables.
        count: number of nodes, or None likewise.
        ranks: processes of the training run on each node.
        environ: the environment.

    Raises:
        ConfigError: neither the caller nor a launcher tells, or the numbers are impossible.
    """
    if (node is None) != (count is None):
        raise ConfigError("--node-rank and --node-count go together: give both, or neither.")
    if node is not None and count is not None:
        return Share(node, count, ranks)
    for name, counts in _LAUNCHERS:
        total = next((n for n in counts if environ.get(n, "").strip()), None)
        if environ.get(name, "").strip() and total is not None:
            return Share(_whole_number(environ, name), _whole_number(environ, total), ranks)
    raise ConfigError(
        "--shard-by-node needs to know which node this is. Run it as a Slurm step "
        "(srun --ntasks-per-node=1), with --ray, or give --node-rank and --node-count."
    )


def _whole_number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ConfigError(f"{name}={text[:40]!r} is no whole number. Correct it or unset it.")
    return int(text)


def expand(
    specs: str | Iterable[str], cache: Cache | None = None, *, share: Share | None = None
) -> list[str]:
    """The URLs that ``specs`` stand for, each once, in order.

    A specification is split at ``::``; ``${X}`` is replaced by the variable ``WDS_X``; then
    braces are expanded. WebDataset does the same, but importing it imports torch.

    Args:
        specs: one shard specification, or several.
        cache: lists ``s3://bucket/prefix/`` (every tar file below it) and names with ``*`` or
            ``?``. Without a cache those stay as they are.
        share: keep only the shards that this node reads. As in WebDataset, a shard that is
            named twice counts twice in the split.

    Raises:
        ConfigError: a malformed specification, or a variable that is not set.
        ShardNotFoundError: nothing matches a prefix or a pattern.
        AccessDeniedError, TransferError: it cannot be listed.
    """
    found: list[str] = []
    listing = Listing(cache.config) if cache is not None else None
    for spec in [specs] if isinstance(specs, str) else specs:
        for url in _expand_braces(spec):
            if listing is not None and is_pattern(url):
                found += listing.matches(url)
            else:
                found.append(url)
    return list(dict.fromkeys(found if share is None else share.of(found)))


def _expand_braces(spec: str) -> list[str]:
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


def wanted_shards(cache: Cache, wanted: Iterable[str | ShardURL]) -> tuple[ShardURL, ...]:
    """The shards that are asked for; of two names of one object the first stays.

    Args:
        cache: of which configuration.
        wanted: specifications, which `expand` expands, and parsed URLs, which it does not.

    Raises:
        ConfigError: not a URL, or one that this cache does not store.
        ShardNotFoundError, AccessDeniedError, TransferError: as `expand`.
    """
    found: dict[str, ShardURL] = {}
    for each in wanted:
        parsed = [each] if isinstance(each, ShardURL) else map(cache.parse, expand(each, cache))
        for shard in parsed:
            refuse_local(shard, cache.config)
            found.setdefault(shard.key, shard)
    return tuple(found.values())


# -- plans ---------------------------------------------------------------------


def make_plan(
    cache: Cache,
    shards: tuple[ShardURL, ...],
    *,
    best_effort: bool,
    patience: float | None = None,
    refresh: bool = False,
) -> PrewarmPlan:
    """Compare what is wanted with what is cached.

    Args:
        cache: where.
        shards: from `wanted_shards`.
        best_effort: leave out what does not fit (``left_out``).
        patience: seconds that the origin has to tell sizes; 0 does not ask it.
        refresh: ask origins which of the cached shards they have replaced.

    Raises:
        OSError: the directory cannot be read.
    """
    wanted = {shard.key for shard in shards}
    entries = list(cache.entries())
    cached = {entry.key: entry for entry in entries if entry.key in wanted and _is_whole(entry)}
    outdated: Mapping[str, frozenset[str]] = {}
    unconfirmed: Mapping[str, Exception] = {}
    if refresh:
        outdated, unconfirmed = _replaced(cache, [s for s in shards if s.key in cached])
        cached = {key: entry for key, entry in cached.items() if key not in outdated}
    missing = [shard for shard in shards if shard.key not in cached]
    sizes: Mapping[str, int] = {}
    if missing and patience != 0:
        sizes = Listing(cache.config).sizes(missing, seconds=patience)
    room = _Room.in_tiers(cache.config, entries, wanted, sum(sizes.values()))
    return PrewarmPlan(
        shards,
        cached,
        sizes,
        room.free,
        room.evict,
        room.missing,
        left_out=_left_out(missing, sizes, room) if best_effort else frozenset(),
        outdated=outdated,
        unconfirmed=unconfirmed,
    )


def _replaced(
    cache: Cache, shards: Sequence[ShardURL]
) -> tuple[dict[str, frozenset[str]], dict[str, Exception]]:
    """`PrewarmPlan.outdated` and `unconfirmed`, of cached shards."""
    outdated: dict[str, frozenset[str]] = {}
    unconfirmed: dict[str, Exception] = {}

    def ask(shard: ShardURL) -> None:
        try:
            if versions := cache.outdated(shard):
                outdated[shard.key] = versions
        except (ShardCacheError, OSError) as exn:
            unconfirmed[shard.key] = exn

    with ThreadPoolExecutor(_QUESTIONS, "shardcache-refresh") as pool:
        list(pool.map(ask, shards))
    return outdated, unconfirmed


def _is_whole(entry: Entry) -> bool:
    try:
        return entry.data.lstat().st_size == entry.size
    except (OSError, DamagedError):
        return False


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes free, to be evicted, and missing for ``need`` more."""

    need: int
    free: int
    evict: int
    missing: int

    @classmethod
    def in_tiers(cls, config: Config, entries: list[Entry], wanted: set[str], need: int) -> _Room:
        """In all tiers together: what one has no room for is for the next."""
        free = evict = 0
        left = need
        for tier in config.by_tier():
            here = [entry for entry in entries if tier.dir in entry.path.parents]
            room = cls.of(tier, here, wanted, left)
            free, evict, left = free + room.free, evict + room.evict, room.missing
        return cls(need, free, evict, left)

    @classmethod
    def of(cls, config: Config, entries: list[Entry], wanted: set[str], need: int) -> _Room:
        namespaces = Namespaces(config, detect())
        others = resumable = 0
        for store in namespaces.all():
            for found in in_flight(store.layout):
                if found.key in wanted:
                    resumable += found.occupied  # part of `need`, and on disk already
                else:
                    others += found.reserved
        above = (config.dir, *config.dir.parents)
        volume = Volume.of(next(path for path in above if path.exists()))
        spare = volume.free - config.min_free.of(volume.size) + resumable
        limit = volume.budget(config)
        now = SYSTEM_CLOCK.time()
        chosen = plan(
            entries,
            Limits(max_size=limit, free_needed=max(0, need - spare)),
            now,
            reserved=others + need,
            policy=Policy.now(config, namespaces.node, now),
            in_use=lambda entry: entry.key in wanted or namespaces.own.is_pinned(entry),
        )
        free = spare
        if limit is not None:
            free = min(free, limit - others - total_bytes(entries))
        return cls(need, max(0, free), chosen.freed, chosen.missing)


def _left_out(missing: list[ShardURL], sizes: Mapping[str, int], room: _Room) -> frozenset[str]:
    """Which shards to give up so that the rest fits; earlier ones go first."""
    left = room.need - room.missing
    out = set()
    for shard in missing:
        size = sizes.get(shard.key, 0)
        if size <= left:
            left -= size
        else:
            out.add(shard.key)
    return frozenset(out)
