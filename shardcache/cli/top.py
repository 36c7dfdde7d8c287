"""``shardcache top``: rates, fetches in flight and how full the cache is, again and again."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
from shardcache.store.partial import read_progress
from shardcache.units import format_bytes, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Intervals that a rate is of: processes write their counters once a second only.
_SMOOTH = 3
#: Seconds of statistics that are read each time: the last minutes of every process are in them.
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
    """The cache at one moment, and what was counted since an earlier one."""

    at: datetime
    seconds: float | None  #: over which rates are taken; None at first
    processes: int  #: that use the cache
    total: Stats  #: what was counted in these seconds
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
    """Looks at a cache now and then; rates are what changed meanwhile."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._samples: deque[tuple[float, dict[Any, Sample]]] = deque(maxlen=_SMOOTH + 1)
        self._written: dict[str, int] = {}

    def look(self) -> Activity:
        """The cache at this moment."""
        now, kept = clock.monotonic(), self._samples
        last = kept[-1][0] if kept else now
        samples = self._cache.samples(_WINDOW)
        kept.append((now, {(each.start, each.rank, each.job): each for each in samples}))
        (began, before), (_, after) = kept[0], kept[-1]
        changed = [
            replace(each, counters=each.counters - before[key].counters) if key in before else each
            for key, each in after.items()
        ]
        return Activity(
            at=utc(clock.time()),
            seconds=max(1e-3, now - began) if len(kept) > 1 else None,
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
                holder, progress = read_holder(store.layout.holder(wait.key)), None
                name = holder.partial if holder else None
                if name is not None and parse_partial_name(name) is not None:
                    # In whichever tier it grows.
                    grows = (read_progress(each.layout.partial / name) for each in stores)
                    progress = next(filter(None, grows), None)
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


def tier_uses(cache: Cache) -> list[TierUse]:
    """How full each tier is."""
    entries, found = list(cache.entries()), []
    for number, config in enumerate(cache.config.by_tier(), 1):
        root = os.fspath(config.dir)
        files = linked(entry for entry in entries if entry.directory.startswith(f"{root}/"))
        limit = Volume.of(config.dir).budget(config) if config.dir.is_dir() else None
        used = sum(links[0].size for links in files)
        found.append(TierUse(number, root, len(files), used, limit))
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
      shardcache top --json --count 360 --interval 10 > watch.jsonl
    """
    console = invocation.console
    count = count or (1 if console.json else None)
    with invocation.cache(existing=True) as cache:
        title = f"shardcache top  {printable(str(cache.dir))}"
        activities = _watch(Watcher(cache), interval, count)
        if console.live and not console.json:
            _draw(console, activities, title)
            return
        for activity in activities:
            console.object("top", activity)
            console.render(frame(activity, title))
            console.data("")


def _watch(watcher: Watcher, interval: float, count: int | None) -> Iterator[Activity]:
    watcher.look()  # rates are of what changes from now on
    for _ in itertools.count() if count is None else range(count):
        time.sleep(interval)
        yield watcher.look()


def _draw(console: Console, activities: Iterator[Activity], title: str) -> None:
    """Redraw on a screen of its own; the last state stays."""
    from rich.live import Live

    shown: RenderableType = f"{title}  ..."
    try:
        with Live(
            shown, console=console.terminal(sys.stdout), screen=True, auto_refresh=False
        ) as live:
            for activity in activities:
                shown = frame(activity, title)
                live.update(shown, refresh=True)
    finally:
        console.render(shown)


def frame(activity: Activity, title: str) -> RenderableType:
    """An activity for people."""
    from rich.console import Group
    from rich.text import Text

    total, seconds = activity.total, activity.seconds or 1.0
    others = [f"{name} {activity.rate(name):,.1f}/s" for name in ("misses", "bypassed", "failed")]
    fetched, evicted = (format_rate(activity.rate(f"bytes_{n}")) for n in ("origin", "evicted"))
    lines = [
        f"{title}  {activity.at.astimezone():%H:%M:%S}  "
        f"{counted(activity.processes, 'process', 'processes')}",
        "",
        f"opens     {total.opens / seconds:>10,.1f}/s    hits {percentage(total.hit_rate):>6}    "
        f"wait p99 {_p99(total)}",
        f"coalesced {activity.rate('coalesced'):>10,.1f}/s    {'    '.join(others)}",
        f"read      {format_rate(activity.rate('bytes_opened')):>12}    fetched {fetched}    "
        f"evicted {evicted}",
        "",
        *map(_gauge, activity.tiers),
        "",
    ]
    parts: list[RenderableType] = [Text("\n".join(lines), no_wrap=True, overflow="ellipsis")]
    if len(activity.by_rank) > 1:
        titles = ["RANK", "OPENS/s", "HITS", "FETCHED/s", "WAIT P99"]
        rows = [
            [
                rank,
                f"{found.opens / seconds:,.1f}",
                percentage(found.hit_rate),
                format_rate(found.bytes_origin / seconds),
                _p99(found),
            ]
            for rank, found in activity.by_rank.items()
        ]
        parts.append(text_table(titles, _first(rows), titles))
    parts.append(Text(f"{counted(len(activity.fetches), 'fetch', 'fetches')} in flight"))
    if activity.fetches:
        rows = []
        for row in activity.fetches:
            rate = row["bytes_per_second"]
            speed = "" if rate is None else format_rate(rate)
            rows.append([row["url"], _share(row), speed, _name(row)])
        parts.append(text_table(["SHARD", "DONE", "RATE", "WHO"], _first(rows), ["DONE", "RATE"]))
    if activity.waits:
        titles = ["WAITS", "WHO", "FOR WHOM", "SINCE", "HOW FAR"]
        rows = []
        for row in activity.waits:
            holder = row["holder"]
            whom = "?" if holder is None else _name(holder)
            if holder is not None and holder["host"] != row["host"]:
                whom += f" on {holder['host']}"
            since = short_duration(row["seconds"])
            rows.append([row["url"], _name(row), whom, since, _share(row)])
        parts.append(text_table(titles, _first(rows), ["SINCE", "HOW FAR"]))
    return Group(*parts)


def _first(rows: list[list[str]]) -> list[list[str]]:
    more = len(rows) - _MOST
    return [*rows[:_MOST], [f"... and {more:,} more"]] if more > 0 else rows


def _gauge(tier: TierUse) -> str:
    used = f"{counted(tier.shards, 'shard')}, {format_bytes(tier.bytes)}"
    name = printable(tier.dir)
    if not tier.max_size:
        return f"{name}  {used}"
    share = tier.bytes / tier.max_size
    full = round(_GAUGE * min(1.0, share))
    bar = "#" * full + "-" * (_GAUGE - full)
    return f"{name}  [{bar}] {share:4.0%}  {used} of {format_bytes(tier.max_size)}"


def _share(row: Row) -> str:
    written, size = row["written_bytes"], row["size"]
    return "?" if written is None or not size else f"{written / size:.0%}"


def _name(row: Row) -> str:
    rank = "" if row["rank"] is None else f"rank {row['rank']}, "
    return "" if row["pid"] is None else f"{rank}pid {row['pid']}"


def _p99(found: Stats) -> str:
    return short_duration(found.all_waits.percentile(0.99))
