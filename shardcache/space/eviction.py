"""What to remove, and removing it.

`plan` is pure: the same entries, limits and policy give the same plan, so a dry run shows exactly
what a run would do. `apply` carries a plan out and reports what really went: an entry that somebody
began to read in between stays.

What several ranks link is one file: it counts once, is as young as its latest use, and goes with
all its links or stays.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from shardcache.layout import is_idle
from shardcache.locks.sessions import remove_dead
from shardcache.space.policy import Policy
from shardcache.store.entry import DamagedError
from shardcache.store.store import Entry, Store
from shardcache.store.sweeping import (
    in_flight,
    remove_leftover,
    remove_locks,
    remove_quarantined,
    remove_unnamed,
)

__all__ = ["ENTRY_INODES", "EvictionPlan", "Limits", "Links", "Reason", "Removal", "Victim"]
__all__ += ["apply", "linked", "plan", "sweep", "total_bytes"]

logger = logging.getLogger(__name__)

#: A directory, the data, the sidecar.
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
    """What the cache may occupy; None means no such limit."""

    max_size: int | None = None  #: bytes of entries and fetches in flight together
    free_needed: int = 0  #: bytes to remove so that the filesystem keeps its free space
    inodes_needed: int = 0  #: inodes to free; an entry has `ENTRY_INODES`
    max_age: float | None = None  #: seconds since the last use
    everything: bool = False  #: remove all that may be removed


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
    """What would be removed and kept; what several entries link counts once."""

    victims: tuple[Victim, ...]  #: in the order in which they go
    kept: int  #: number of shards that stay
    kept_bytes: int  #: bytes of those
    missing: int  #: bytes that cannot be found; 0 when every limit is met
    missing_inodes: int  #: likewise inodes

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
        files: dict[object, list[Entry]] = {}
        for entry in sorted(alike):
            file: object = entry.directory  # of one that is gone, its own place
            if len(alike) > 1:
                with contextlib.suppress(OSError, DamagedError):
                    data = entry.data.lstat()
                    file = data.st_dev, data.st_ino
            files.setdefault(file, []).append(entry)
        found += map(tuple, files.values())
    return found


def total_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of entries; what several of them link counts once."""
    return sum(links[0].size for links in linked(entries))


def plan(
    entries: Iterable[Entry],
    limits: Limits,
    policy: Policy,
    *,
    reserved: int = 0,
    in_use: Callable[[Entry], bool] = lambda entry: False,
) -> EvictionPlan:
    """Choose victims, replaced versions first, then in the policy's order, until the limits hold.

    Args:
        entries: everything published.
        limits: what must hold afterwards.
        policy: what goes first, and what stays.
        reserved: bytes of fetches in flight, and of the one that needs room.
        in_use: asked only of entries that would otherwise go.
    """
    files = linked(entries)
    total = sum(links[0].size for links in files)
    over = 0 if limits.max_size is None else total + reserved - limits.max_size
    short, inodes = limits.free_needed, limits.inodes_needed

    def last_used(links: Links) -> float:
        return max(map(policy.last_used, links))

    versions: dict[str, dict[str, Entry]] = {}
    for first, *_ in files:
        versions.setdefault(first.key, {})[first.version] = first
    newest = {  # of shards that have several: what everybody is to be given; see `Store.open`
        key: max(found.values(), key=lambda entry: entry.published).version
        for key, found in versions.items()
        if len(found) > 1 and key not in policy.pinned
    }

    def superseded(links: Links) -> bool:
        """Whether a newer version is beside it: else that might go first, and this be served."""
        return newest.get(links[0].key, links[0].version) != links[0].version

    def order(links: Links) -> tuple[object, ...]:
        published = policy.kind == "fifo"
        date = min(entry.published for entry in links) if published else last_used(links)
        return not superseded(links), date, *links[0]  # of the same age: by their names

    victims: list[Victim] = []
    for links in sorted(files, key=order):
        if limits.everything:
            reason = Reason.ALL
        elif limits.max_age is not None and policy.now - last_used(links) > limits.max_age:
            reason = Reason.MAX_AGE
        elif over > 0:
            reason = Reason.MAX_SIZE
        elif short > 0:
            reason = Reason.MIN_FREE
        elif inodes > 0:
            reason = Reason.INODES
        else:
            continue
        kept = any(map(policy.keeps, links)) and not superseded(links)
        if kept or any(map(in_use, links)):
            continue
        victims.append(Victim(links, reason))
        over -= links[0].size
        short -= links[0].size
        inodes -= ENTRY_INODES * len(links)
    kept_bytes = total - sum(victim.size for victim in victims)
    return EvictionPlan(
        tuple(victims), len(files) - len(victims), kept_bytes, max(0, over, short), max(0, inodes)
    )


def apply(store: Store, chosen: Iterable[Victim]) -> Iterator[Victim]:
    """Evict; yields what went with its last link, as it goes."""
    for victim in chosen:
        if not all(store.evict(entry) for entry in victim.entries):
            continue  # somebody reads it by now, or removed it
        key, size, reason = victim.entries[0].key, victim.size, victim.reason.value
        say = {"event": "evicted", "key": key, "bytes": size, "reason": reason}
        logger.info("evicted %s, %d bytes (%s)", key, size, reason, extra=say)
        yield victim


def sweep(store: Store, *, keep: float = 0.0, dry_run: bool = False) -> Iterator[Removal]:
    """Remove what dead processes left, quarantined entries, and lock files of idle keys.

    Yields what had bytes of its own; lock files and sessions of dead processes go without saying.

    Args:
        store: where.
        keep: seconds for which the partials of dead processes stay, to be resumed.
        dry_run: only say what would go.
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
        remove_dead(layout)
        removed = remove_unnamed(layout) + remove_locks(layout)
        logger.debug("removed %d files and directories without bytes", removed)
