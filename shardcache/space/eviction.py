"""The policies and pins: which shards are evicted first, and which stay.

A file to which several ranks have hard links counts once. Its last use is the latest use of any
link, and it is removed with all its links or not at all. Timestamps come from wall clocks, and a
timestamp in the future counts as long ago. So a wrong clock may evict a shard too early, but never
one that is being read or pinned.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from shardcache.config import PolicyName
from shardcache.faults import ignoring
from shardcache.files import is_directory, is_idle, list_names, read_json, remove_old
from shardcache.layout import Layout, is_pin_name, is_temporary_name
from shardcache.locks.keys import remove_locks
from shardcache.locks.sessions import live_sessions, remove_dead
from shardcache.store.directory import DamagedError, remove_free
from shardcache.store.entry import DAMAGED, Entry, Store, stored_at
from shardcache.store.partial import in_flight
from shardcache.units import counted, format_bytes
from shardcache.urls import ShardURL

logger = logging.getLogger(__name__)

#: Seconds by which clocks may differ: four times the clock skew that S3 accepts.
SKEW = 3600.0
#: Seconds after its last use for which a running job keeps a shard. An epoch that takes longer than
#: a day gains little from a cache, and a job may leave a data set for good while it runs.
_PROTECTED_FOR = 86_400.0
#: Seconds for which a partial without bytes stays.
_NEW = 10.0


class Reason(StrEnum):
    """Why an entry or a partial is removed."""

    MAX_SIZE = "max_size"
    MIN_FREE = "min_free"
    MAX_AGE = "max_age"
    ALL = "all"
    ASKED = "asked"  # a user named the shard
    ORPHAN = "orphan"


class Limits(NamedTuple):
    """Limits that must hold after an eviction; None means no such limit."""

    max_size: int | None = None  #: bytes on disk of entries and shards in flight together
    free_needed: int = 0  #: bytes to remove so that the filesystem keeps min_free
    max_age: float | None = None  #: seconds since the last use
    everything: bool = False  #: remove all entries that are not pinned or in use

    def excess(self, total: int) -> int:
        """Return the bytes to remove, if above 0, from a cache with ``total`` bytes on disk."""
        over = 0 if self.max_size is None else total - self.max_size
        return max(over, self.free_needed)


#: The entries that are hard links to one file: the same version of a shard in several namespaces.
Links = tuple[Entry, ...]


class Policy(NamedTuple):
    """Which shards stay, besides those that are pinned or in use, and which are evicted first."""

    keeps_used: bool = False  #: whether the shards stay that running jobs have used
    #: Returns a number for a file and the time of its last use. The lowest number is evicted first.
    rank: Callable[[Links, float], float] = lambda links, last_used: last_used

    def kept_since(self, node: Layout, now: float) -> float:
        """Return the earliest use for which running jobs keep a shard; infinity to keep none."""
        started = live_sessions(node) if self.keeps_used else []
        oldest = min((_zero_if_future(date, now) for date in started), default=math.inf)
        return max(oldest, now - _PROTECTED_FOR)


#: The policies, by the names that the option ``policy`` takes.
POLICIES: dict[PolicyName, Policy] = {"working-set": Policy(keeps_used=True), "lru": Policy()}


@dataclass(frozen=True, slots=True)
class Removal:
    """An entry or a partial that was removed, or that a dry run would remove."""

    name: str  #: directory of the entry or partial
    size: int  #: bytes on disk
    reason: Reason
    entries: Links = field(default=(), repr=False)  #: all links to the file; empty for a partial

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "reason": self.reason}


@dataclass(frozen=True, slots=True, repr=False)
class CleanReport:
    """The result of a cleaning or of a dry run. A file with several links counts once."""

    removed: tuple[Removal, ...]  #: leftovers of dead processes, then entries, in order of removal
    kept: int  #: number of shards that stay
    kept_bytes: int  #: bytes on disk of the shards that stay
    missing: int  #: bytes still above the limits, because the remaining shards must stay
    dry_run: bool  #: True if this is only a plan, and nothing was removed
    pinned: int = 0  #: number of shards that stay because a user pinned them

    def __repr__(self) -> str:
        removed, kept = ("would remove", "would keep") if self.dry_run else ("removed", "kept")
        rest = f"{kept} {counted(self.kept, 'shard')}, {format_bytes(self.kept_bytes)} on disk"
        rest += f" ({self.pinned:,} pinned)" if self.pinned else ""
        rest += f", {format_bytes(self.missing)} above the limits" if self.missing else ""
        if not self.removed:
            return f"nothing to remove; {rest}"
        reasons = Counter(removal.reason for removal in self.removed)
        partials = reasons.pop(Reason.ORPHAN, 0)
        what = [counted(reasons.total(), "shard")] if reasons else []
        what += [counted(partials, "partial download")] if partials else []
        why = ", ".join(f"{n:,} {reason}" for reason, n in reasons.items() if reason != Reason.ALL)
        size = format_bytes(self.freed)
        return f"{removed} {' and '.join(what)}, {size} on disk{why and f': {why}'}\n{rest}"

    @property
    def freed(self) -> int:
        """Bytes on disk of the entries and leftovers in `removed`."""
        return sum(removal.size for removal in self.removed)


def merged(reports: Sequence[CleanReport]) -> CleanReport:
    """Merge the reports of several tiers into one."""
    removed = tuple(removal for report in reports for removal in report.removed)
    names = "kept", "kept_bytes", "missing", "pinned"
    sums = {name: sum(getattr(report, name) for report in reports) for name in names}
    return CleanReport(removed, dry_run=all(report.dry_run for report in reports), **sums)


def pin(layout: Layout, shard: ShardURL, until: float | None) -> None:
    """Pin a shard until a time in seconds since the epoch; None pins it forever."""
    layout.modes.make_directory(layout.pins, levels=0)
    record = {"schema": 1, "url": str(shard), "until": until}
    layout.write(layout.pin(shard.key), json.dumps(record).encode())


def unpin(layout: Layout, key: str) -> bool:
    """Remove a pin; return False if the shard was not pinned."""
    try:
        layout.pin(key).unlink()
    except FileNotFoundError:
        return False
    return True


def pinned(
    layouts: Iterable[Layout], now: float, keys: Container[str] | None = None
) -> dict[str, str]:
    """Return the URL of each pinned shard among ``keys`` (default: all) by key; "" if damaged."""
    every = (pin for layout in layouts for pin in _pins(layout, keys))
    return {key: url for key, until, url in every if now < until}


def remove_expired(layout: Layout, now: float) -> int:
    """Remove expired pins, and return their number."""
    return sum(unpin(layout, key) for key, until, _ in _pins(layout) if now >= until)


def _pins(layout: Layout, keys: Container[str] | None = None) -> Iterator[tuple[str, float, str]]:
    """Yield key, expiry and URL. A damaged pin does not expire and has an empty URL."""
    for name in filter(is_pin_name, list_names(layout.pins)):
        key = name.removesuffix(".pin")
        if keys is not None and key not in keys:
            continue
        record = read_json(layout.pin(key))
        try:
            until = math.inf if record["until"] is None else float(record["until"])
            yield key, until, str(record["url"])
        except (ValueError, TypeError, KeyError) as exn:
            logger.info("the pin of %s cannot be read (%s), so the shard is kept", key, exn)
            yield key, math.inf, ""


def _zero_if_future(date: float, now: float) -> float:
    return date if date <= now + SKEW else 0.0


def group_links(entries: Iterable[Entry]) -> list[Links]:
    """Group the entries that are links to one file. Inodes are read only of repeated versions."""
    entries, files = list(entries), dict[object, list[Entry]]()
    copies = Counter(entry[1:4] for entry in entries)
    for entry in entries:
        file: object = entry.directory  # a group of its own, also if the entry is gone
        if copies[entry[1:4]] > 1:
            with ignoring(OSError, DamagedError):
                data = entry.data.lstat()
                file = entry.key, data.st_dev, data.st_ino
        files.setdefault(file, []).append(entry)
    return [tuple(sorted(links)) for links in files.values()]


def disk_bytes(links: Links, allocated: Callable[[int], int]) -> int:
    """Return the bytes on disk of one file and of the directories and sidecars of its links."""
    return allocated(links[0].size) + (len(links) - 1) * allocated(0)


def total_bytes(entries: Iterable[Entry], allocated: Callable[[int], int]) -> int:
    """Return the bytes on disk of entries. A file with several links counts once."""
    return sum(disk_bytes(links, allocated) for links in group_links(entries))


def plan(
    entries: Iterable[Entry],
    limits: Limits,
    policy: Policy,
    now: float,
    *,
    since: float = math.inf,
    pinned: Collection[str] = (),
    in_use: Callable[[Entry], bool] = lambda entry: False,
    allocated: Callable[[int], int] = lambda size: size,
    reserved: int = 0,
    later: int = 0,
    spare: int = 0,
) -> CleanReport:
    """Choose the shards to evict, replaced versions first; return the report of a dry run.

    Shards used ``since`` a timestamp stay, and those whose keys are ``pinned``. ``allocated``
    computes the bytes on disk of a shard from its size. ``reserved`` are the bytes on disk of the
    shards in flight and of the shard that needs room. Of the bytes that `max_size` and
    `free_needed` require, ``later`` are left to later evictions, and ``spare`` more are removed.
    """
    files = group_links(entries)
    total = sum(disk_bytes(links, allocated) for links in files)
    excess = limits.excess(total + reserved)
    needed = excess - later
    left = needed + spare if needed > 0 else 0
    stricter = Reason.MAX_SIZE if excess > limits.free_needed else Reason.MIN_FREE
    # Evict older versions of a shard before its newest one. If the newest one were evicted first,
    # readers would get an older version again.
    versions = Counter(links[0].key for links in files)
    several = [links[0] for links in files if versions[links[0].key] > 1]
    times = {entry: stored_at(entry.directory) for entry in several}
    several.sort(key=lambda entry: (times[entry] != DAMAGED, times[entry]))  # damaged ones first
    newest = {entry.key: entry.version for entry in several}

    def is_replaced(links: Links) -> bool:
        key, version = links[0].key, links[0].version
        return newest.get(key, version) != version and key not in pinned

    def last_used(links: Links) -> float:
        return max(_zero_if_future(entry.used, now) for entry in links)

    def is_aged(links: Links) -> bool:
        return limits.max_age is not None and now - last_used(links) > limits.max_age

    def order(links: Links) -> tuple[object, ...]:
        # Aged shards are evicted in any case, so they make room for others.
        rank = policy.rank(links, last_used(links))
        return not is_replaced(links), not is_aged(links), rank, *links[0]

    removed: list[Removal] = []
    for links in sorted(files, key=order):
        if limits.everything:
            reason = Reason.ALL
        elif is_aged(links):
            reason = Reason.MAX_AGE
        elif left > 0:
            reason = stricter
        else:
            continue
        kept = links[0].key in pinned or last_used(links) >= since
        if (kept and not is_replaced(links)) or any(map(in_use, links)):
            continue
        size = disk_bytes(links, allocated)
        removed.append(Removal(links[0].directory, size, reason, links))
        left -= size
    freed = sum(removal.size for removal in removed)
    missing = max(0, needed - freed)
    kept_pins, stay = sum(f[0].key in pinned for f in files), len(files) - len(removed)
    return CleanReport(tuple(removed), stay, total - freed, missing, dry_run=True, pinned=kept_pins)


def sweep(
    store: Store, allocated: Callable[[int], int], *, keep: float = 0.0, dry_run: bool = False
) -> Iterator[Removal]:
    """Remove the partials, sessions and locks of dead processes, and damaged entries.

    Yields the partials and entries; with ``dry_run``, only that. Partials stay for ``keep`` seconds
    after their last write. Exhaust the iterator: sessions come last.
    """
    layout = store.layout
    for flight in in_flight(layout):
        path, occupied = flight.path, flight.occupied
        seconds = keep if occupied else _NEW  # its process may be about to lock it
        if flight.live or (seconds and flight.key and not is_idle(path, seconds)):
            continue
        if dry_run or remove_free(path, layout.grace):
            yield Removal(str(path), allocated(occupied), Reason.ORPHAN)
    if not dry_run:
        remove_dead(layout)
        for name in filter(is_temporary_name, list_names(layout.partials)):
            remove_old(layout.partials / name)
        remove_locks(layout)


def remove_unused(layout: Layout) -> None:
    """Remove the directories of a job's namespace, if it is empty and was unused for a day.

    Each miss looks into all namespaces, and each job leaves one.
    """
    if is_directory(layout.base) and is_idle(layout.partials, _PROTECTED_FOR):
        for base in filter(None, (layout.base, layout.local)):
            for directory, _, _ in os.walk(base, topdown=False):
                with ignoring(OSError):  # it is not empty
                    os.rmdir(directory)  # noqa: PTH106 - one of hundreds
