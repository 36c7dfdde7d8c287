"""Which shards go first, and which stay.

    working-set   what running jobs use stays; of the rest, the least recently used goes first
    lru           the least recently used goes first
    fifo          what was fetched first goes first

`plan` is pure: the same entries, limits and policy give the same plan, so a dry run shows exactly
what a run would do. What several ranks link is one file: it counts once, is as young as its latest
use, and goes with all its links or stays. Dates come from wall clocks: one in the future counts as
long ago, and a wrong one costs an unlucky eviction, never what is being read or pinned.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from shardcache.config import Config
from shardcache.layout import Layout, is_idle
from shardcache.locks.flock import remove_locks
from shardcache.locks.sessions import live_sessions, remove_dead
from shardcache.space.pins import pinned
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry, Store
from shardcache.store.partial import in_flight, remove_leftover, remove_unnamed
from shardcache.units import format_bytes

__all__ = ["CleanReport", "Limits", "Links", "Policy", "Reason", "Removal"]
__all__ += ["disk_bytes", "linked", "plan", "sweep", "total_bytes"]

#: Seconds by which clocks may differ. S3 refuses clocks that are off by more than 15 minutes.
SKEW = 3600.0


class Reason(StrEnum):
    """Why something is removed."""

    MAX_SIZE = "max_size"
    MIN_FREE = "min_free"
    MAX_AGE = "max_age"
    ALL = "all"
    ORPHAN = "orphan"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cache may occupy; None means no such limit."""

    max_size: int | None = None  #: bytes on disk of entries and fetches in flight together
    free_needed: int = 0  #: bytes to remove so that the filesystem keeps its free space
    spare: int = 0  #: bytes that go along with those, as far as they may
    max_age: float | None = None  #: seconds since the last use
    everything: bool = False  #: remove all that may be removed


#: The entries that are links of one file: the same version of a shard in several namespaces.
Links = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """Something that was removed (or would be): which directory, how big, why."""

    name: str
    size: int  #: bytes on disk
    reason: Reason
    entries: Links = field(default=(), repr=False)  #: of a shard: all links of its file

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "size": self.size, "reason": self.reason}


@dataclass(frozen=True, slots=True, repr=False)
class CleanReport:
    """What was removed, or would be; what several entries link counts once."""

    removed: tuple[Removal, ...]  #: entries and leftovers, in order
    kept: int  #: number of shards that stay
    kept_bytes: int  #: bytes of those on disk
    missing: int  #: bytes that could not be found because the rest is in use
    dry_run: bool  #: whether nothing was touched

    def __repr__(self) -> str:
        removed, kept = ("would remove", "would keep") if self.dry_run else ("removed", "kept")
        return (
            f"<CleanReport: {removed} {len(self.removed):,} things, {format_bytes(self.freed)}; "
            f"{kept} {self.kept:,} shards, {format_bytes(self.kept_bytes)}>"
        )

    @property
    def freed(self) -> int:
        """Bytes on disk of all that was removed."""
        return sum(removal.size for removal in self.removed)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy at one moment."""

    now: float  #: seconds since the epoch
    kind: Literal["working-set", "lru", "fifo"] = "working-set"
    since: float | None = None  #: what was used since then stays; None if nothing does for that
    pinned: frozenset[str] = frozenset()  #: keys that a user pinned

    @classmethod
    def of(cls, config: Config, node: Layout, now: float, *, jobs: bool = True) -> Policy:
        """The configured policy, for the jobs that run now; with ``jobs`` False, for none."""
        since = None
        if jobs and config.policy == "working-set" and (started := live_sessions(node)):
            oldest = min(_past(date, now) for date in started)
            since = max(oldest, now - config.protect_for)
        return cls(now, config.policy, since, frozenset(pinned(node, now)))

    def last_used(self, entry: Entry) -> float:
        """When an entry was last used; 0 if its date cannot be."""
        return _past(entry.used, self.now)

    def protects(self, entry: Entry) -> bool:
        """Whether an entry stays because a running job uses it."""
        return self.since is not None and self.last_used(entry) >= self.since

    def keeps(self, entry: Entry) -> bool:
        """Whether an entry stays, whatever it costs."""
        return entry.key in self.pinned or self.protects(entry)


def _past(date: float, now: float) -> float:
    return date if date <= now + SKEW else 0.0


def linked(entries: Iterable[Entry]) -> list[Links]:
    """Group entries by the file that they are links of.

    Only entries of one key, version and size in several namespaces can be links of one file, so
    only their inodes are read.
    """
    named: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in entries:
        named.setdefault((entry.key, entry.version, entry.size), []).append(entry)
    found: list[Links] = []
    for alike in named.values():
        files: dict[object, list[Entry]] = {}
        for entry in sorted(alike):
            file: object = entry.directory  # of one that is gone
            if len(alike) > 1:
                with contextlib.suppress(OSError, DamagedError):
                    data = entry.data.lstat()
                    file = data.st_dev, data.st_ino
            files.setdefault(file, []).append(entry)
        found += map(tuple, files.values())
    return found


def disk_bytes(links: Links, allocated: Callable[[int], int]) -> int:
    """Bytes on disk of one file and of the directories and sidecars of all its links."""
    return allocated(links[0].size) + (len(links) - 1) * allocated(0)


def total_bytes(entries: Iterable[Entry], allocated: Callable[[int], int]) -> int:
    """Bytes of entries on disk; a file that several of them link counts once."""
    return sum(disk_bytes(links, allocated) for links in linked(entries))


def plan(
    entries: Iterable[Entry],
    limits: Limits,
    policy: Policy,
    *,
    reserved: int = 0,
    in_use: Callable[[Entry], bool] = lambda entry: False,
    allocated: Callable[[int], int] = lambda size: size,
) -> CleanReport:
    """Choose victims, replaced versions first, then in the policy's order, until the limits hold.

    Args:
        entries: everything published.
        limits: what must hold afterwards.
        policy: what goes first, and what stays.
        reserved: bytes of fetches in flight, and of the one that needs room.
        in_use: asked only of entries that would otherwise go.
        allocated: computes the bytes on disk of a shard from its size.
    """
    files = linked(entries)
    total = sum(disk_bytes(links, allocated) for links in files)
    over = -math.inf if limits.max_size is None else total + reserved - limits.max_size
    short = limits.free_needed or -math.inf
    spare = limits.spare if max(over, short) > 0 else 0
    # Where a newer version went before an older one, the older would be served again.
    versions = Counter(links[0].key for links in files)
    several = [links[0] for links in files if versions[links[0].key] > 1]
    newest = {each.key: each.version for each in sorted(several, key=lambda each: each.published)}

    def is_replaced(links: Links) -> bool:
        key, version = links[0].key, links[0].version
        return newest.get(key, version) != version and key not in policy.pinned

    def last_used(links: Links) -> float:
        return max(map(policy.last_used, links))

    def order(links: Links) -> tuple[object, ...]:
        published = policy.kind == "fifo"
        date = min(entry.published for entry in links) if published else last_used(links)
        return not is_replaced(links), date, *links[0]  # of the same age: by their names

    removed: list[Removal] = []
    for links in sorted(files, key=order):
        if limits.everything:
            reason = Reason.ALL
        elif limits.max_age is not None and policy.now - last_used(links) > limits.max_age:
            reason = Reason.MAX_AGE
        elif over + spare > 0:
            reason = Reason.MAX_SIZE
        elif short + spare > 0:
            reason = Reason.MIN_FREE
        else:
            continue
        kept = any(map(policy.keeps, links)) and not is_replaced(links)
        if kept or any(map(in_use, links)):
            continue
        size = disk_bytes(links, allocated)
        removed.append(Removal(links[0].directory, size, reason, links))
        over -= size
        short -= size
    kept_bytes = total - sum(removal.size for removal in removed)
    missing = int(max(0, over, short))
    return CleanReport(tuple(removed), len(files) - len(removed), kept_bytes, missing, dry_run=True)


def sweep(
    store: Store, allocated: Callable[[int], int], *, keep: float = 0.0, dry_run: bool = False
) -> Iterator[Removal]:
    """Remove what dead processes left, and damaged entries; yields what had bytes of its own.

    Args:
        store: where.
        allocated: computes the bytes on disk of a shard from its size.
        keep: seconds for which the partials of dead processes stay, to be resumed.
        dry_run: only say what would go.
    """
    layout = store.layout
    for found in in_flight(layout):
        if found.live or (keep and found.occupied and found.key and not is_idle(found.path, keep)):
            continue
        if dry_run or remove_leftover(layout, found.path):
            yield Removal(str(found.path), allocated(found.occupied), Reason.ORPHAN)
    if not dry_run:
        remove_dead(layout)
        remove_unnamed(layout)
        remove_locks(layout)
