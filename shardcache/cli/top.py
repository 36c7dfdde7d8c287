"""``shardcache top``: rates, fetches in flight and how full the cache is, again and again.

A `Watcher` looks at the cache now and then; rates are what changed between two looks. Looking
changes nothing and waits for nobody.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardcache.cache import Cache
from shardcache.cli.main import ExitCode, Invocation, command
from shardcache.cli.output import (
    Console,
    counted,
    percentage,
    printable,
    short_duration,
    text_table,
)
from shardcache.clock import SYSTEM_CLOCK, Clock, utc
from shardcache.layout import parse_partial_name
from shardcache.locks.flock import Holder, read_holder
from shardcache.locks.sessions import live_sessions, live_waits
from shardcache.space.eviction import linked
from shardcache.space.memory import Volume
from shardcache.stats.summary import Stats, Waits, by_rank, rank_records, summed
from shardcache.store.entry import DamagedError, Entry, Metadata, read_sidecar
from shardcache.store.partial import Progress, read_progress
from shardcache.store.sweeping import in_flight
from shardcache.units import format_bytes, format_rate

#: Seconds over which rates are taken, if so much is known.
_SMOOTH = 5.0
#: Seconds of statistics that a look reads: what a process writes may be a minute old.
_WINDOW = 3600.0

_GAUGE = 24
#: Rows of each kind that a screen has room for.
_MOST = 12


@dataclass(frozen=True, slots=True)
class TierUse:
    """How full a tier is; ``max_size`` is None where free space alone limits it."""

    tier: int
    dir: str
    shards: int
    bytes: int
    max_size: int | None


@dataclass(frozen=True, slots=True)
class Process:
    """A process that fetches."""

    pid: int
    host: str
    rank: int | None
    job: str | None

    @classmethod
    def of(cls, holder: Holder) -> Self:
        """The process that a lock's record names."""
        return cls(holder.pid, holder.host, holder.rank, holder.job)


@dataclass(frozen=True, slots=True)
class Flight:
    """A fetch in flight.

    Attributes:
        url: of the shard; its key where nothing says the URL.
        size: bytes that it will have, once known.
        written_bytes: how many are on disk.
        bytes_per_second: since the last look; None on the first.
        pid, rank: of the process that fetches it, where they are known.
    """

    url: str
    size: int | None
    written_bytes: int
    bytes_per_second: float | None
    pid: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A process that waits for another one's fetch.

    Attributes:
        url: of the shard.
        pid, host, rank, job: of the process that waits.
        since: when that began.
        seconds: how long by now.
        holder: the process that fetches; None where that is not known.
        written_bytes: how much is on disk, where that is known.
        size: bytes that the shard will have, likewise.
    """

    url: str
    pid: int
    host: str
    rank: int | None
    job: str | None
    since: datetime
    seconds: float
    holder: Process | None
    written_bytes: int | None
    size: int | None


@dataclass(frozen=True, slots=True)
class Activity:
    """One look.

    Attributes:
        at: when that was.
        seconds: over which rates are taken; None on the first look.
        processes: how many use the cache.
        total: what was counted meanwhile.
        by_rank: the same by rank.
        fetches: those in flight, the furthest first.
        tiers: how full they are.
        waits: who waits for whom, the longest first.
    """

    at: datetime
    seconds: float | None
    processes: int
    total: Stats
    by_rank: Mapping[str, Stats]
    fetches: Sequence[Flight]
    tiers: Sequence[TierUse]
    waits: Sequence[Waiting]

    def rate(self, name: str) -> float:
        """How often a thing was counted per second."""
        return self.total.counters[name] / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times, numbers of things, bytes and seconds."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**found, "ranks": rank_records(found.pop("by_rank"))}


class Watcher:
    """Looks at a cache now and then; for one thread.

    Args:
        cache: what is watched.
        clock: time.
    """

    def __init__(self, cache: Cache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._looks: deque[tuple[float, Stats, dict[str, Stats]]] = deque()
        self._written: dict[str, int] = {}

    def look(self) -> Activity:
        """What goes on now.

        Raises:
            OSError: the directory cannot be read.
        """
        now = self._clock.monotonic()
        found = self._cache.samples(_WINDOW)
        total, ranks = summed(found), by_rank(found)
        # Processes write once a second: over a shorter time rates would jump.
        while len(self._looks) > 1 and now - self._looks[1][0] >= _SMOOTH:
            self._looks.popleft()
        first, nothing = not self._looks, summed([])
        began, total_before, ranks_before = self._looks[0] if self._looks else (now, total, ranks)
        last = self._looks[-1][0] if self._looks else now
        self._looks.append((now, total, ranks))
        changed = {
            rank: _difference(each, ranks_before.get(rank, nothing)) for rank, each in ranks.items()
        }
        return Activity(
            at=utc(self._clock.time()),
            seconds=None if first else max(1e-3, now - began),
            processes=len(live_sessions(self._cache.node_layout)),
            total=_difference(total, total_before),
            by_rank={rank: each for rank, each in changed.items() if each.opens},
            fetches=self._flights(None if first else max(1e-3, now - last)),
            tiers=tier_uses(self._cache),
            waits=self._waits(),
        )

    def _flights(self, seconds: float | None) -> list[Flight]:
        flights, written = [], {}
        for store in self._cache.stores():
            for found in in_flight(store.layout):
                if not found.live or not found.key:
                    continue
                name = found.path.name
                done = written[name] = found.progress.written if found.progress else found.occupied
                last = self._written.get(name)
                rate = None if last is None or not seconds else max(0, done - last) / seconds
                holder = read_holder(store.layout.holder(found.key))
                flights.append(
                    Flight(
                        url=_url(found.path, found.key),
                        size=found.progress.total if found.progress else None,
                        written_bytes=done,
                        bytes_per_second=rate,
                        pid=holder.pid if holder else None,
                        rank=holder.rank if holder else None,
                    )
                )
        self._written = written
        return sorted(flights, key=lambda flight: (-flight.written_bytes, flight.url))

    def _waits(self) -> list[Waiting]:
        now, stores = self._clock.time(), self._cache.stores()
        partials = [store.layout.partial for store in stores]
        found = []
        for store in stores:
            for wait in live_waits(store.layout):
                waiter = wait.waiter
                holder = read_holder(store.layout.holder(wait.key)) or wait.holder
                progress = _progress(holder, partials)
                found.append(
                    Waiting(
                        url=wait.url,
                        pid=waiter.pid,
                        host=waiter.host,
                        rank=waiter.rank,
                        job=waiter.job,
                        since=utc(waiter.started),
                        seconds=max(0.0, now - waiter.started),
                        holder=Process.of(holder) if holder else None,
                        written_bytes=progress.written if progress else None,
                        size=progress.total if progress else None,
                    )
                )
        return sorted(found, key=lambda each: (-each.seconds, each.url))


def tier_uses(cache: Cache) -> list[TierUse]:
    """How full each tier is.

    Raises:
        OSError: a directory cannot be read.
    """
    configs = {os.fspath(config.dir): config for config in cache.config.by_tier()}
    entries: dict[str, list[Entry]] = {directory: [] for directory in configs}
    for entry in cache.entries():
        home = next((d for d in configs if entry.directory.startswith(f"{d}/")), None)
        if home is not None:
            entries[home].append(entry)
    found = []
    for number, (directory, config) in enumerate(configs.items(), 1):
        exists = Path(directory).is_dir()
        limit = Volume.of(Path(directory)).budget(config) if exists else None
        shards = linked(entries[directory])
        used = sum(links[0].size for links in shards)
        found.append(TierUse(number, directory, len(shards), used, limit))
    return found


def _progress(holder: Holder | None, partials: Sequence[Path]) -> Progress | None:
    """How far a holder is, in whichever tier its partial grows."""
    name = holder.partial if holder else None
    if name is None or parse_partial_name(name) is None:
        return None
    return next((p for d in partials if (p := read_progress(d / name)) is not None), None)


def _url(path: Path, key: str) -> str:
    try:
        return Metadata.decode(read_sidecar(path)).url
    except (DamagedError, OSError):
        return key


def _difference(now: Stats, before: Stats) -> Stats:
    """What was counted between two looks; nothing is less than before, unless it was zeroed."""
    counters = {name: max(0, n - before.counters[name]) for name, n in now.counters.items()}
    waits = {}
    for name, found in now.waits.items():
        less = before.waits[name].buckets
        waits[name] = Waits({b: max(0, n - less.get(b, 0)) for b, n in found.buckets.items()})
    return Stats(before.until, now.until, counters, waits)


# -- the command -------------------------------------------------------------------


@command(
    "top",
    short="Watch what goes on.",
    examples="""
        shardcache top
        shardcache top --interval 5
        shardcache top --count 1
        shardcache top --format jsonl --interval 10 > watch.jsonl
    """,
)
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    metavar="SECONDS",
    help="Between two looks.  [default: 2]",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="Look so often, then end.")
def top_command(invocation: Invocation, interval: float, count: int | None) -> int:
    """Show rates, fetches in flight and how full the cache is, until it is interrupted.

    Without a terminal each look is printed below the last one. As JSON it is one look; as
    JSON lines there is a line for each.
    """
    console = invocation.console
    if console.format == "json":
        if (count or 1) > 1:
            raise click.UsageError("--json is one object: give --format jsonl with --count.")
        count = 1
    with invocation.cache(looking=True) as cache:
        title = f"shardcache top  {printable(str(cache.dir))}"
        looks = _looks(Watcher(cache, SYSTEM_CLOCK), interval, count)
        if console.human and console.live:
            _draw(console, looks, title)
        else:
            for activity in looks:
                if console.human:
                    console.render(frame(activity, title))
                    console.data("")
                    console.flush()
                elif console.format == "jsonl":
                    console.line("activity", activity)
                else:
                    console.record("top", activity, "")
    return ExitCode.DONE


def _looks(watcher: Watcher, interval: float, count: int | None) -> Iterator[Activity]:
    watcher.look()  # rates are of what changes from now on
    for _ in itertools.count() if count is None else range(count):
        time.sleep(interval)
        yield watcher.look()


def _draw(console: Console, looks: Iterator[Activity], title: str) -> None:
    """Redraw each look on a screen of its own; the last one stays."""
    shown: RenderableType = Text(f"{title}  looking ...")
    try:
        with Live(
            shown, console=console.terminal(sys.stdout), screen=True, auto_refresh=False
        ) as live:
            for activity in looks:
                shown = frame(activity, title)
                live.update(shown, refresh=True)
    finally:
        console.render(shown)


def frame(activity: Activity, title: str) -> RenderableType:
    """One look, as people read it."""
    processes = counted(activity.processes, "process", "processes")
    lines = [f"{title}  {activity.at.astimezone():%H:%M:%S}  {processes}", ""]
    lines += [*_rates(activity), "", *map(_gauge, activity.tiers), ""]
    parts: list[RenderableType] = [Text("\n".join(lines), no_wrap=True, overflow="ellipsis")]
    if len(activity.by_rank) > 1:
        titles = ["RANK", "OPENS/s", "HITS", "FETCHED/s", "WAIT P99"]
        rows = [_rank(activity, rank, found) for rank, found in activity.by_rank.items()]
        parts.append(_table(titles, rows, titles))
    flights = counted(len(activity.fetches), "fetch", "fetches")
    parts.append(Text(f"{flights} in flight"))
    if activity.fetches:
        titles = ["SHARD", "DONE", "RATE", "WHO"]
        parts.append(_table(titles, map(_flight, activity.fetches), ["DONE", "RATE"]))
    if activity.waits:
        titles = ["WAITS", "WHO", "FOR WHOM", "SINCE", "HOW FAR"]
        parts.append(_table(titles, map(_waiting, activity.waits), ["SINCE", "HOW FAR"]))
    return Group(*parts)


def _table(titles: list[str], rows: Iterable[list[str]], right: Container[str]) -> Table:
    every = list(rows)
    shown: list[list[Text]] = [[Text(printable(cell)) for cell in row] for row in every[:_MOST]]
    if len(every) > _MOST:
        shown.append([Text(f"... and {len(every) - _MOST:,} more")])
    return text_table(titles, shown, right)


def _rates(activity: Activity) -> list[str]:
    total = activity.total
    opens = total.opens / activity.seconds if activity.seconds else 0.0
    others = [f"{name} {activity.rate(name):,.1f}/s" for name in ("misses", "bypassed", "failed")]
    fetched, evicted = (format_rate(activity.rate(f"bytes_{n}")) for n in ("origin", "evicted"))
    return [
        f"opens     {opens:>10,.1f}/s    hits {percentage(total.hit_rate):>6}    "
        f"wait p99 {_p99(total)}",
        f"coalesced {activity.rate('coalesced'):>10,.1f}/s    {'    '.join(others)}",
        f"read      {format_rate(activity.rate('bytes_opened')):>12}    fetched {fetched}    "
        f"evicted {evicted}",
    ]


def _gauge(tier: TierUse) -> str:
    used = f"{counted(tier.shards, 'shard')}, {format_bytes(tier.bytes)}"
    name = printable(tier.dir)
    if not tier.max_size:
        return f"{name}  {used}"
    share = tier.bytes / tier.max_size
    full = round(_GAUGE * min(1.0, share))
    bar = "#" * full + "-" * (_GAUGE - full)
    return f"{name}  [{bar}] {share:4.0%}  {used} of {format_bytes(tier.max_size)}"


def _rank(activity: Activity, rank: str, found: Stats) -> list[str]:
    seconds = activity.seconds or 1.0
    fetched = format_rate(found.bytes_origin / seconds)
    return [
        rank,
        f"{found.opens / seconds:,.1f}",
        percentage(found.hit_rate),
        fetched,
        _p99(found),
    ]


def _flight(flight: Flight) -> list[str]:
    share = f"{flight.written_bytes / flight.size:.0%}" if flight.size else "?"
    rate = "" if flight.bytes_per_second is None else format_rate(flight.bytes_per_second)
    return [flight.url, share, rate, _who(flight)]


def _waiting(waiting: Waiting) -> list[str]:
    holder, written = waiting.holder, waiting.written_bytes
    whom = "?" if holder is None else _who(holder)
    if holder is not None and holder.host != waiting.host:
        whom += f" on {holder.host}"
    far = "?" if written is None or not waiting.size else f"{written / waiting.size:.0%}"
    return [waiting.url, _who(waiting), whom, short_duration(waiting.seconds), far]


def _who(process: Flight | Waiting | Process) -> str:
    rank = "" if process.rank is None else f"rank {process.rank}, "
    return "" if process.pid is None else f"{rank}pid {process.pid}"


def _p99(found: Stats) -> str:
    return short_duration(found.all_waits.percentile(0.99))
