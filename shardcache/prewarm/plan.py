"""What a prewarm has to do, and whether it fits, before anything is fetched.

A plan only looks: it reads names and sizes, opens no shard and verifies no
digest. Entries may come and go beside it; the fetches that follow find out by
themselves, so a plan may be wrong by what others do meanwhile and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardcache.clock import SYSTEM_CLOCK
from shardcache.config import Config
from shardcache.errors import ShardCacheError
from shardcache.origins.listing import Listing, refuse_local
from shardcache.ranks import detect
from shardcache.space.eviction import Limits, plan
from shardcache.space.policy import Policy
from shardcache.space.volume import Volume
from shardcache.store.entry import DamagedError
from shardcache.store.store import Entry, Namespaces
from shardcache.store.sweeping import in_flight
from shardcache.units import format_bytes
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache

__all__ = ["PrewarmPlan", "make_plan", "wanted_shards"]

#: Questions to origins at a time. Each is a round trip and nothing else.
_QUESTIONS = 16


@dataclass(frozen=True, slots=True, repr=False)
class PrewarmPlan:
    """What is there, what has to be fetched, and what room there is.

    Attributes:
        shards: everything that is wanted, in order, each once.
        cached: entries of those that are there, by key.
        sizes: bytes of those to fetch, by key, as far as known.
        free: bytes that can be stored without removing anything.
        evict: bytes that would be removed to make room.
        missing: bytes too many for the cache; 0 when all known sizes fit.
        left_out: keys of shards there is no room for; empty unless asked for.
        outdated: versions on disk of those that their origin has replaced, by key; they count
            as not there. Empty unless asked for.
        unconfirmed: why it is not known whether an origin has replaced a shard, by key.
    """

    shards: tuple[ShardURL, ...]
    cached: Mapping[str, Entry]
    sizes: Mapping[str, int]
    free: int
    evict: int
    missing: int
    left_out: frozenset[str] = frozenset()
    outdated: Mapping[str, frozenset[str]] = field(default_factory=dict)
    unconfirmed: Mapping[str, Exception] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<PrewarmPlan: {len(self.shards):,} shards, {len(self.cached):,} cached, "
            f"{format_bytes(self.fetch_bytes)} to fetch, {format_bytes(self.free)} free>"
        )

    @property
    def to_fetch(self) -> tuple[ShardURL, ...]:
        """The shards that are not there."""
        return tuple(shard for shard in self.shards if shard.key not in self.cached)

    @property
    def fetch_bytes(self) -> int:
        """Bytes of those, as far as their sizes are known."""
        return sum(self.sizes.values())

    @property
    def cached_bytes(self) -> int:
        """Bytes of what is there already."""
        return sum(entry.size for entry in self.cached.values())

    @property
    def unknown(self) -> int:
        """How many shards have a size that is not known yet."""
        return len(self.shards) - len(self.cached) - len(self.sizes)

    def size_of(self, shard: ShardURL) -> int | None:
        """Bytes of a shard, or None while unknown."""
        entry = self.cached.get(shard.key)
        return entry.size if entry is not None else self.sizes.get(shard.key)


def wanted_shards(cache: Cache, urls: Iterable[str]) -> tuple[ShardURL, ...]:
    """Parse ``urls``; of two names of one object the first stays.

    Raises:
        ConfigError: not a URL, or one that this cache does not store.
    """
    found: dict[str, ShardURL] = {}
    for url in urls:
        shard = cache.parse(url)
        refuse_local(shard, cache.config)
        found.setdefault(shard.key, shard)
    return tuple(found.values())


def make_plan(
    cache: Cache,
    shards: tuple[ShardURL, ...],
    *,
    best_effort: bool,
    patience: float | None = None,
    refresh: bool = False,
) -> PrewarmPlan:
    """Compare what is wanted with what is there.

    Args:
        cache: where.
        shards: from `wanted_shards`.
        best_effort: name those that there is no room for in ``left_out``.
        patience: seconds that the origin has to tell sizes; 0 does not ask it.
        refresh: ask origins which of the shards that are there they have replaced.

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
    left_out = _left_out(missing, sizes, room) if best_effort else frozenset()
    return PrewarmPlan(
        shards,
        cached,
        sizes,
        room.free,
        room.evict,
        room.missing,
        left_out,
        outdated,
        unconfirmed,
    )


def _replaced(
    cache: Cache, shards: Sequence[ShardURL]
) -> tuple[dict[str, frozenset[str]], dict[str, Exception]]:
    """`PrewarmPlan.outdated` and `unconfirmed`, of shards that are there."""
    outdated: dict[str, frozenset[str]] = {}
    unconfirmed: dict[str, Exception] = {}

    def ask(shard: ShardURL) -> None:
        try:
            versions = cache.outdated(shard)
            if versions:
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
        volume = Volume.of(_existing(config.dir))
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
            free = min(free, limit - others - sum(entry.size for entry in entries))
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


def _existing(path: Path) -> Path:
    """``path``, or the nearest directory above it that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
