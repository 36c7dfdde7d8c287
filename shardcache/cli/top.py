"""``shardcache top``: rates, fetches in flight and how full the cache is, again and again."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from shardcache import clock
from shardcache.cache import Cache
from shardcache.cli.entries import Row, gauge, partials, tiers
from shardcache.cli.main import Invocation, command, number_option
from shardcache.cli.output import counted, printable, short_duration, text_table
from shardcache.cli.stats import ROW_TITLES, cells
from shardcache.clock import utc
from shardcache.config import Config
from shardcache.locks.flock import Holder, read_holder
from shardcache.locks.sessions import live_sessions, live_waits
from shardcache.stats.database import Sample
from shardcache.stats.summary import Stats, by_rank, rank_records, summed
from shardcache.units import format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

#: Intervals that a rate is of: processes write their counters once a second only.
_SMOOTH = 3
#: Seconds of statistics that are read each time: the last minutes of every process are in them.
_WINDOW = 3600.0


@dataclass(frozen=True, slots=True)
class Activity:
    """The cache at one moment, and what was counted since an earlier one."""

    at: datetime
    seconds: float | None  #: over which rates are taken; None at first
    processes: int  #: that use the cache
    total: Stats  #: what was counted in these seconds
    ranks: Mapping[str, Stats]
    fetches: Sequence[Row]  #: `partials` in flight with ``bytes_per_second``, the furthest first
    tiers: Sequence[Row]
    waits: Sequence[Row]  #: who waits for whom, the longest first


class Watcher:
    """Looks at a cache now and then; rates are what changed meanwhile.

    Args:
        cache: which.
        config: gives the limits as they are at each look: a job may begin later than we do.
    """

    def __init__(self, cache: Cache, config: Callable[[], Config] | None = None) -> None:
        self._cache = cache
        self._config = config or (lambda: cache.config)
        self._samples: deque[tuple[float, dict[Any, Sample]]] = deque(maxlen=_SMOOTH + 1)
        self._written: dict[str, int] = {}

    def look(self) -> Activity:
        """The cache at this moment."""
        now, kept = clock.monotonic(), self._samples
        last = kept[-1][0] if kept else now
        samples = self._cache.samples(_WINDOW)
        kept.append((now, {(each.start, each.rank): each for each in samples}))
        (began, before), (_, after) = kept[0], kept[-1]
        changed = [
            replace(each, counters=each.counters - before[key].counters) if key in before else each
            for key, each in after.items()
        ]
        return Activity(
            at=utc(clock.time()),
            seconds=max(1e-3, now - began) if len(kept) > 1 else None,
            processes=len(live_sessions(self._cache.processes.here().home.node)),
            total=summed(changed),
            ranks={rank: each for rank, each in by_rank(changed).items() if each.opens},
            fetches=self._fetches(now - last),
            tiers=list(tiers(self._cache, self._config())),
            waits=self._waits(),
        )

    def _fetches(self, seconds: float) -> list[Row]:
        live = [row for row in partials(self._cache) if row["state"] == "live"]
        before, self._written = self._written, {row["dir"]: row["written_bytes"] for row in live}
        for row in live:
            more = row["written_bytes"] - before.get(row["dir"], row["written_bytes"])
            row["bytes_per_second"] = max(0, more) / seconds if seconds else 0.0
            row["url"] = row["url"] or row["key"]
        return sorted(live, key=lambda row: (-row["written_bytes"], row["url"]))

    def _waits(self) -> list[Row]:
        now, found = clock.time(), list[Row]()
        for store in self._cache.processes.here().stores():
            for key, waiter in live_waits(store.layout):
                holder = read_holder(store.layout.holder(key))
                row = {
                    "url": waiter.url or key,
                    **_process(waiter),
                    "since": utc(waiter.started),
                    "seconds": max(0.0, now - waiter.started),
                    "holder": _process(holder) if holder else None,
                }
                found.append(row)
        return sorted(found, key=lambda row: (-row["seconds"], row["url"]))


def _process(holder: Holder) -> Row:
    return {"pid": holder.pid, "host": holder.host, "rank": holder.rank, "job": holder.job}


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
    with invocation.cache() as cache, contextlib.suppress(KeyboardInterrupt):
        title = f"shardcache top  {printable(str(cache.dir))}"
        watcher = Watcher(cache, lambda: invocation.upkeep().config)
        activities = _watch(watcher, interval, count)
        if console.live and not console.json:
            from rich.live import Live

            terminal = console.terminal(sys.stdout)
            with Live(f"{title}  ...", console=terminal, auto_refresh=False) as live:
                for activity in activities:
                    live.update(frame(activity, title), refresh=True)
            return
        for activity in activities:
            console.object("top", activity, ranks=rank_records(activity.ranks))
            if not console.json:
                console.render(frame(activity, title))


def _watch(watcher: Watcher, interval: float, count: int | None) -> Iterator[Activity]:
    watcher.look()  # rates are of what changes from now on
    for _ in itertools.count() if count is None else range(count):
        time.sleep(interval)
        yield watcher.look()


def frame(activity: Activity, title: str) -> RenderableType:
    """An activity for people."""
    from rich.console import Group
    from rich.text import Text

    using = counted(activity.processes, "process", "processes")
    gauges = [Text(gauge(tier), no_wrap=True, overflow="ellipsis") for tier in activity.tiers]
    counted_by = {"all": activity.total, **(activity.ranks if len(activity.ranks) > 1 else {})}
    rates = [[rank, *cells(found, activity.seconds or 1.0)] for rank, found in counted_by.items()]
    flying = counted(len(activity.fetches), "fetch", "fetches")
    parts: list[RenderableType] = [
        Text(f"{title}  {activity.at.astimezone():%H:%M:%S}  {using}\n", no_wrap=True),
        *gauges,
        text_table(["RANK", *ROW_TITLES], rates, ROW_TITLES),
        Text(f"\n{flying} in flight"),
    ]
    if activity.fetches:
        rows = [
            [each["url"], _share(each), format_rate(each["bytes_per_second"]), _name(each)]
            for each in activity.fetches
        ]
        parts.append(text_table(["SHARD", "DONE", "RATE", "WHO"], rows, ["DONE", "RATE"]))
    if activity.waits:
        rows = []
        for each in activity.waits:
            names = _name(each), _name(each["holder"] or {})
            rows.append([each["url"], *names, short_duration(each["seconds"])])
        titles = ["WAITS", "WHO", "FOR WHOM", "SINCE"]
        parts.append(text_table(titles, rows, ["SINCE"]))
    return Group(*parts)


def _share(row: Row) -> str:
    written, size = row["written_bytes"], row["size"]
    return "?" if written is None or not size else f"{written / size:.0%}"


def _name(process: Row) -> str:
    """``rank 3, pid 4711``, of another host also its name."""
    rank = "" if process.get("rank") is None else f"rank {process['rank']}, "
    host = process.get("host") or os.uname().nodename
    host = "" if host == os.uname().nodename else f" on {host}"
    return f"{rank}pid {process['pid']}{host}" if process.get("pid") else "?"
