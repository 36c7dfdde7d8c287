"""Want of room: whether it can be seen without a look at every entry, and what is said of it."""

from __future__ import annotations

from shardcache.errors import CacheFullError
from shardcache.space.eviction import Limits
from shardcache.space.ledger import State
from shardcache.units import format_bytes

__all__ = ["fits", "no_room", "not_free_yet"]


def fits(size: int, limits: Limits, state: State | None) -> bool:
    """Whether there is room for so many bytes, as far as can be told without a look."""
    if state is None or limits.max_size is None or limits.free_needed or limits.inodes_needed:
        return False
    return state.full + size <= limits.max_size


def no_room(url: str, missing: int, missing_inodes: int) -> CacheFullError:
    """What is said where so much more would have to go, and may not."""
    wanted = []
    if missing:
        wanted.append(format_bytes(missing))
    if missing_inodes:
        wanted.append(f"{missing_inodes} inodes (names of files, see df -i)")
    return CacheFullError(
        f"no room for {url}: {' and '.join(wanted) or 'some'} more would have to go, and "
        "the rest is in use or was used since the running jobs began. Raise max_size, "
        "free the disk, or let the shard be streamed.",
        url=url,
    )


def not_free_yet(url: str, pending: int) -> CacheFullError:
    """What is said where so many bytes were evicted, and somebody still holds them."""
    return CacheFullError(
        f"no room for {url}: {format_bytes(pending)} were evicted and are not free yet. Something "
        "has those files open by their paths (see lsof +L1); close it, or let the shard be "
        "streamed.",
        url=url,
    )
