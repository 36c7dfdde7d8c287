"""The tiers and partials of a cache as rows, for `ls`, `top` and `report`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from shardcache.cache import Cache
from shardcache.cli.output import counted, printable
from shardcache.clock import utc
from shardcache.config import Config
from shardcache.locks.flock import read_holder
from shardcache.space.eviction import disk_bytes, linked
from shardcache.space.memory import Volume, allocation
from shardcache.store.partial import in_flight, read_progress
from shardcache.units import format_bytes

#: Values by name, as JSON has them.
Row = dict[str, Any]
#: Width of the bar of `gauge`, in columns.
_GAUGE = 24


def partials(cache: Cache) -> Iterator[Row]:
    """Yield the partials of all processes, dead or alive."""
    for store in cache.processes.here().stores():
        for partial in in_flight(store.layout):
            if not partial.key:
                continue  # an entry that is being removed
            progress = read_progress(partial.path)
            metadata = progress.metadata if progress else None
            holder = read_holder(store.layout.holder(partial.key)) if partial.live else None
            yield {
                "url": metadata.url if metadata else None,
                "size": partial.size,
                "written_bytes": progress.written if progress else partial.occupied,
                "state": "live" if partial.live else "orphan",
                "begun_at": utc(metadata.fetched_at) if metadata else None,
                "holder": str(holder) if holder else None,
                "pid": holder.pid if holder else None,
                "rank": holder.rank if holder else None,
                "key": partial.key,
                "dir": str(partial.path),
            }


def tiers(cache: Cache, config: Config) -> Iterator[Row]:
    """Yield the shards, bytes and limit of each tier. The limit is None if only min_free applies.

    Args:
        cache: the cache.
        config: has the limits.
    """
    entries = list(cache.entries())
    for number, tier in enumerate(config.by_tier(), 1):
        root, allocated = os.fspath(tier.dir), allocation(tier.dir)
        files = linked(entry for entry in entries if entry.directory.startswith(f"{root}/"))
        yield {
            "tier": number,
            "dir": root,
            "shards": len(files),
            "bytes": sum(links[0].size for links in files),
            "disk_bytes": sum(disk_bytes(links, allocated) for links in files),
            "max_size": Volume.of(tier.dir).budget(tier) if tier.dir.is_dir() else None,
        }


def gauge(tier: Row) -> str:
    """Return a line with a bar that shows how full a tier is."""
    used, limit, bar = tier["disk_bytes"], tier["max_size"], ""
    if limit:
        bar = "#" * round(_GAUGE * min(1.0, used / limit))
        bar = f"[{bar:-<{_GAUGE}}] {used / limit:4.0%}  "
    return f"{printable(tier['dir'])}  {bar}{fill_text(tier)}"


def fill_text(tier: Row) -> str:
    """Return ``4 shards, 1.2 GB of 2.0 GB on disk``; without a limit the bytes of the shards."""
    used, limit = tier["disk_bytes"], tier["max_size"]
    size = f"{format_bytes(used)} of {format_bytes(limit)} on disk" if limit else None
    return f"{counted(tier['shards'], 'shard')}, {size or format_bytes(tier['bytes'])}"
