"""What to remove, and removing it.

`plan` is pure: the same entries, limits and time give the same plan, so a dry
run shows exactly what a run would do. `apply` carries a plan out and reports
what really went: an entry that somebody began to read in between stays.

What is being read is never a victim, and what else stays and what goes first is said by a
`policy.Policy`. What several ranks link is one file: it counts once, is as young as its latest
use, and goes with all its links or stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from shardcache.layout import is_idle
from shardcache.locks.sessions import remove_dead_sessions, remove_dead_waits
from shardcache.space.policy import Policy, is_dated, tells_time
from shardcache.store.entry import DamagedError
from shardcache.store.store import Entry, Store
from shardcache.store.sweeping import (
    in_flight,
    remove_dead_leases,
    remove_free_locks,
    remove_leftover,
    remove_quarantined,
    remove_temporaries,
    remove_unnamed,
)

__all__ = ["ENTRY_INODES", "EvictionPlan", "Limits", "Links", "Reason", "Removal", "Victim"]
__all__ += ["apply", "linked", "plan", "sweep", "total_bytes"]

logger = logging.getLogger(__name__)

#: A directory, the data, the sidecar. The key's directory goes too if it was its last one.
ENTRY_INODES = 3


class Reason(StrEnum):
    """Why something is removed."""

    MAX_SIZE = "max_size"
    MIN_FREE = "min_free"
    INODES = "inodes"
    MAX_AGE = "max_age"
    ALL = "all"
    ASKED = "asked"
    ORPHAN = "orphan"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the cache may occupy; None means no such limit.

    Attributes:
        max_size: bytes of entries and fetches in flight together.
        free_needed: bytes to remove so that the filesystem keeps its free space.
        inodes_needed: inodes to free; an entry has `ENTRY_INODES`.
        max_age: seconds since the last use.
        everything: remove all that may be removed.
    """

    max_size: int | None = None
    free_needed: int = 0
    inodes_needed: int = 0
    max_age: float | None = None
    everything: bool = False


#: The entries that are links of one file: the same version of a shard in several namespaces.
Links = tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Victim:
    """A file to remove, with all entries that are links of it, and why."""

    entries: Links
    reason: Reason

    @property
    def size(self) -> int:
        """Bytes that are free when its last link is gone."""
        return self.entries[0].size


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What would be removed and kept; what several entries link counts once.

    Attributes:
        victims: in the order in which they go.
        kept: number of shards that stay.
        kept_bytes: bytes of those.
        missing: bytes that cannot be found; 0 when every limit is met.
        missing_inodes: likewise inodes.
        undated: entries that stay and were last used in the future; dated now, their age
            begins to count.
    """

    victims: tuple[Victim, ...]
    kept: int
    kept_bytes: int
    missing: int
    undated: tuple[Entry, ...] = ()
    missing_inodes: int = 0

    @property
    def suffices(self) -> bool:
        """Whether every limit is met when the victims are gone."""
        return not self.missing and not self.missing_inodes

    @property
    def freed(self) -> int:
        """Bytes of all victims."""
        return sum(victim.size for victim in self.victims)


@dataclass(frozen=True, slots=True)
class Removal:
    """Something that was removed (or would be): which directory, how big, why."""

    name: str
    size: int
    reason: Reason


def linked(entries: Iterable[Entry]) -> list[Links]:
    """Group entries by the file that they are links of.

    Names tell most of it: only entries of one key, version and size in several namespaces are
    looked at.
    """
    named: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in entries:
        named.setdefault((entry.key, entry.version, entry.size), []).append(entry)
    found: list[Links] = []
    for alike in named.values():
        if len(alike) == 1:
            found.append((alike[0],))
            continue
        files: dict[object, list[Entry]] = {}
        for entry in sorted(alike):
            files.setdefault(_file_of(entry), []).append(entry)
        found += map(tuple, files.values())
    return found


def _file_of(entry: Entry) -> object:
    """What tells an entry's file from others; the entry's own place where it is gone."""
    try:
        found = entry.data.lstat()
    except (OSError, DamagedError):
        return entry.directory
    return found.st_dev, found.st_ino


def total_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of entries; what several of them link counts once."""
    return sum(links[0].size for links in linked(entries))


def plan(
    entries: Iterable[Entry],
    limits: Limits,
    now: float,
    *,
    reserved: int = 0,
    policy: Policy = Policy(),  # noqa: B008 - immutable
    in_use: Callable[[Entry], bool] = lambda entry: False,
) -> EvictionPlan:
    """Choose victims: superseded, undated and too old first, then the policy's, until limits hold.

    Args:
        entries: everything published.
        limits: what must hold afterwards.
        now: seconds since the epoch.
        reserved: bytes of fetches in flight, and of the one that needs room.
        policy: what goes first, and what stays.
        in_use: asked only of entries that would otherwise go.
    """
    found = list(entries)
    files = linked(found)
    total = sum(links[0].size for links in files)
    over = max(0, total + reserved - limits.max_size) if limits.max_size is not None else 0
    short = limits.free_needed
    inodes = limits.inodes_needed
    superseded = policy.superseded(found)

    def turn(links: Links) -> tuple[object, ...]:
        first, used = links[0], _used(links)
        order = used if policy.kind != "fifo" else min(e.published for e in links)
        # The directory last: two namespaces may have copies of their own, of the same age.
        ahead = first not in superseded, is_dated(used, now), order
        return (*ahead, first.key, first.version, first.directory)

    victims: list[Victim] = []
    undated: list[Entry] = []
    asked = limits.everything or limits.max_age is not None
    needed = asked or max(over, short, inodes) > 0
    for links in sorted(files, key=turn) if needed else files:
        reason = _reason(_used(links), limits, now, over, short, inodes)
        protected = links[0] not in superseded and any(policy.keeps(e, now) for e in links)
        if reason is not None and not protected and not any(map(in_use, links)):
            victims.append(Victim(links, reason))
            over -= links[0].size
            short -= links[0].size
            inodes -= ENTRY_INODES * len(links)
        elif tells_time(now):
            undated += [entry for entry in links if not is_dated(entry.used, now)]
    freed = sum(victim.size for victim in victims)
    return EvictionPlan(
        tuple(victims),
        len(files) - len(victims),
        total - freed,
        max(0, over, short),
        tuple(undated),
        max(0, inodes),
    )


def _used(links: Links) -> float:
    """When any of them was last used."""
    return max(entry.used for entry in links)


def _reason(
    used: float, limits: Limits, now: float, over: int, short: int, inodes: int
) -> Reason | None:
    if limits.everything:
        return Reason.ALL
    if limits.max_age is not None and now - used > limits.max_age:
        return Reason.MAX_AGE
    if over > 0:
        return Reason.MAX_SIZE
    if short > 0:
        return Reason.MIN_FREE
    return Reason.INODES if inodes > 0 else None


def apply(store: Store, chosen: Iterable[Victim]) -> Iterator[Victim]:
    """Evict; yields what went with its last link, as it goes.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    for victim in chosen:
        if not all(store.owning(entry).evict(entry) for entry in victim.entries):
            continue  # somebody reads it by now, or removed it
        key, size, reason = victim.entries[0].key, victim.size, victim.reason.value
        say = {"event": "evicted", "key": key, "bytes": size, "reason": reason}
        logger.info("evicted %s, %d bytes (%s)", key, size, reason, extra=say)
        yield victim


def sweep(store: Store, *, keep: float = 0.0, dry_run: bool = False) -> Iterator[Removal]:
    """Remove what dead processes left, quarantined entries, and lock files of idle keys.

    Yields what had bytes of its own; lock files and sessions of dead processes
    go without saying.

    Args:
        store: where.
        keep: seconds for which the partials of dead processes stay, to be resumed.
        dry_run: only say what would go.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    layout = store.layout
    for found in in_flight(layout):
        if found.live or (keep and found.occupied and found.key and not is_idle(found.path, keep)):
            continue
        if dry_run or remove_leftover(layout, found.path):
            yield Removal(str(found.path), found.occupied, Reason.ORPHAN)
    for path, size in remove_quarantined(layout, dry_run=dry_run):
        yield Removal(str(path), size, Reason.QUARANTINED)
    if not dry_run:
        remove_dead_sessions(layout)
        removed = remove_temporaries(layout) + remove_unnamed(layout)
        removed += remove_free_locks(layout) + remove_dead_leases(layout)
        removed += remove_dead_waits(layout)
        logger.debug("removed %d files and directories without bytes", removed)
