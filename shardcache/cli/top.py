"""``shardcache top``: rates, fetches in flight and how full the cache is, again and again."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from shardcache import clock
from shardcache.cache import Cache
from shardcache.cli.entries import Row, partials
from shardcache.cli.main import Invocation, command, number_option
from shardcache.cli.output import (
    Console,
    counted,
    percentage,
    printable,
    short_duration,
    text_table,
)
from shardcache.clock import utc
from shardcache.layout import parse_partial_name
from shardcache.locks.flock import Holder, read_holder
from shardcache.locks.sessions import live_sessions, live_waits
from shardcache.space.eviction import linked
from shardcache.space.memory import Volume
from shardcache.stats.database import Sample
from shardcache.stats.summary import Stats, by_rank, rank_records, summed
from shardcache.store.partial import Progress, read_progress
from shardcache.store.store import Store
from shardcache.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

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
class Activity:
    """What one look at the cache found."""

    at: datetime
    seconds: float | None  #: over which rates are taken; None on the first look
    processes: int  #: that use the cache
    total: Stats  #: what was counted meanwhile
    by_rank: Mapping[str, Stats]
    fetches: Sequence[Row]  #: `partials` in flight with ``bytes_per_second``, the furthest first
    tiers: Sequence[TierUse]
    waits: Sequence[Row]  #: who waits for whom, the longest first

    def rate(self, name: str) -> float:
        """How often a thing was counted per second."""
        return self.total.counters[name] / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**found, "ranks": rank_records(found.pop("by_rank"))}


class Watcher:
    """Looks at a cache now and then; rates are what changed between two looks."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._looks: deque[tuple[float, dict[Any, Sample]]] = deque()
        self._written: dict[str, int] = {}

    def look(self) -> Activity:
        """What goes on now."""
        now, looks = clock.monotonic(), self._looks
        last = looks[-1][0] if looks else now
        samples = self._cache.samples(_WINDOW)
        looks.append((now, {(each.start, each.rank, each.job): each for each in samples}))
        # Processes write once a second: over a shorter time rates would jump.
        while len(looks) > 2 and now - looks[1][0] >= _SMOOTH:
            looks.popleft()
        (began, before), (_, after) = looks[0], looks[-1]
        changed = [
            replace(each, counters=each.counters - before[key].counters) if key in before else each
            for key, each in after.items()
        ]
        return Activity(
            at=utc(clock.time()),
            seconds=max(1e-3, now - began) if len(looks) > 1 else None,
            processes=len(live_sessions(self._cache.processes.here().namespaces.node)),
            total=summed(changed),
            by_rank={rank: each for rank, each in by_rank(changed).items() if each.opens},
            fetches=self._fetches(now - last),
            tiers=tier_uses(self._cache),
            waits=self._waits(),
        )

    def _fetches(self, seconds: float) -> list[Row]:
        live = [row for row in partials(self._cache) if row["state"] == "live"]
        before, self._written = self._written, {row["dir"]: row["written_bytes"] for row in live}
        for row in live:
            more = row["written_bytes"] - before.get(row["dir"], row["written_bytes"])
            is_known = row["dir"] in before and seconds
            row["bytes_per_second"] = max(0, more) / seconds if is_known else None
            row["url"] = row["url"] or row["key"]
        return sorted(live, key=lambda row: (-row["written_bytes"], row["url"]))

    def _waits(self) -> list[Row]:
        now, stores = clock.time(), self._cache.processes.here().stores()
        found = []
        for store in stores:
            for wait in live_waits(store.layout):
                holder = read_holder(store.layout.holder(wait.key))
                progress = _progress(holder, stores)
                row = {
                    "url": wait.url,
                    **_process(wait.waiter),
                    "since": utc(wait.waiter.started),
                    "seconds": max(0.0, now - wait.waiter.started),
                    "holder": _process(holder) if holder else None,
                    "written_bytes": progress.written if progress else None,
                    "size": progress.total if progress else None,
                }
                found.append(row)
        return sorted(found, key=lambda row: (-row["seconds"], row["url"]))


def _process(holder: Holder) -> Row:
    return {"pid": holder.pid, "host": holder.host, "rank": holder.rank, "job": holder.job}


def _progress(holder: Holder | None, stores: Sequence[Store]) -> Progress | None:
    """How far a holder is, in whichever tier its partial grows."""
    name = holder.partial if holder else None
    if name is None or parse_partial_name(name) is None:
        return None
    return next(filter(None, (read_progress(each.layout.partial / name) for each in stores)), None)


def tier_uses(cache: Cache) -> list[TierUse]:
    """How full each tier is."""
    entries, found = list(cache.entries()), []
    for number, config in enumerate(cache.config.by_tier(), 1):
        place = os.fspath(config.dir)
        files = linked(entry for entry in entries if entry.directory.startswith(f"{place}/"))
        limit = Volume.of(config.dir).budget(config) if config.dir.is_dir() else None
        used = sum(links[0].size for links in files)
        found.append(TierUse(number, place, len(files), used, limit))
    return found


# -- the command -------------------------------------------------------------------


@command("top")
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    metavar="SECONDS",
    help="Between two looks.  [default: 2]",
)
@number_option("--count", help="Look so often, then end.")
def top_command(invocation: Invocation, interval: float, count: int | None) -> None:
    """Watch rates, fetches in flight and how full the cache is.

    Until it is interrupted. Without a terminal each look is printed below the last one. As JSON
    it is one look, or with --count a line for each.

    \b
    Examples:
      shardcache top
      shardcache top --interval 5
      shardcache top --count 1
      shardcache top --json --count 360 --interval 10 > watch.jsonl
    """
    console = invocation.console
    if console.json:
        count = count or 1
    with invocation.cache(looking=True) as cache:
        title = f"shardcache top  {printable(str(cache.dir))}"
        looks = _looks(Watcher(cache), interval, count)
        if console.live and not console.json:
            _draw(console, looks, title)
            return
        for activity in looks:
            console.object("top", activity)
            console.render(frame(activity, title))
            console.data("")


def _looks(watcher: Watcher, interval: float, count: int | None) -> Iterator[Activity]:
    watcher.look()  # rates are of what changes from now on
    for _ in itertools.count() if count is None else range(count):
        time.sleep(interval)
        yield watcher.look()


def _draw(console: Console, looks: Iterator[Activity], title: str) -> None:
    """Redraw each look on a screen of its own; the last one stays."""
    from rich.live import Live
    from rich.text import Text

    shown: RenderableType = Text(f"{title}  looking ...")
    terminal = console.terminal(sys.stdout)
    try:
        with Live(shown, console=terminal, screen=True, auto_refresh=False) as live:
            for activity in looks:
                shown = frame(activity, title)
                live.update(shown, refresh=True)
    finally:
        console.render(shown)


def frame(activity: Activity, title: str) -> RenderableType:
    """One look, as people read it."""
    from rich.console import Group
    from rich.text import Text

    processes = counted(activity.processes, "process", "processes")
    lines = [f"{title}  {activity.at.astimezone():%H:%M:%S}  {processes}", ""]
    lines += [*_rates(activity), "", *map(_gauge, activity.tiers), ""]
    parts: list[RenderableType] = [Text("\n".join(lines), no_wrap=True, overflow="ellipsis")]
    if len(activity.by_rank) > 1:
        titles = ["RANK", "OPENS/s", "HITS", "FETCHED/s", "WAIT P99"]
        seconds = activity.seconds or 1.0
        rows = (_rank(rank, found, seconds) for rank, found in activity.by_rank.items())
        parts.append(_table(titles, rows, titles))
    parts.append(Text(f"{counted(len(activity.fetches), 'fetch', 'fetches')} in flight"))
    if activity.fetches:
        titles = ["SHARD", "DONE", "RATE", "WHO"]
        parts.append(_table(titles, map(_fetch, activity.fetches), ["DONE", "RATE"]))
    if activity.waits:
        titles = ["WAITS", "WHO", "FOR WHOM", "SINCE", "HOW FAR"]
        parts.append(_table(titles, map(_waiting, activity.waits), ["SINCE", "HOW FAR"]))
    return Group(*parts)


def _table(titles: list[str], rows: Iterable[list[str]], right: list[str]) -> RenderableType:
    every = list(rows)
    more = [[f"... and {len(every) - _MOST:,} more"]] if len(every) > _MOST else []
    return text_table(titles, every[:_MOST] + more, right)


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


def _rank(rank: str, found: Stats, seconds: float) -> list[str]:
    opens, fetched = f"{found.opens / seconds:,.1f}", format_rate(found.bytes_origin / seconds)
    return [rank, opens, percentage(found.hit_rate), fetched, _p99(found)]


def _fetch(row: Row) -> list[str]:
    rate = row["bytes_per_second"]
    return [row["url"], _share(row), "" if rate is None else format_rate(rate), _who(row)]


def _waiting(row: Row) -> list[str]:
    holder = row["holder"]
    whom = "?" if holder is None else _who(holder)
    if holder is not None and holder["host"] != row["host"]:
        whom += f" on {holder['host']}"
    return [row["url"], _who(row), whom, short_duration(row["seconds"]), _share(row)]


def _share(row: Row) -> str:
    written, size = row["written_bytes"], row["size"]
    return "?" if written is None or not size else f"{written / size:.0%}"


def _who(row: Row) -> str:
    rank = "" if row["rank"] is None else f"rank {row['rank']}, "
    return "" if row["pid"] is None else f"{rank}pid {row['pid']}"


def _p99(found: Stats) -> str:
    return short_duration(found.all_waits.percentile(0.99))
