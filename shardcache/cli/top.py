"""``shardcache top``: rates, fetches in flight and how full the cache is, again and again."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from shardcache import clock
from shardcache.cache import Cache
from shardcache.cli.entries import Row, gauge, partials, tiers
from shardcache.cli.main import Invocation, command, number_option
from shardcache.cli.output import counted, short_duration, text_table
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
    from rich.live import Live

#: Intervals that a rate is of: processes write their counters once a second only.
_SMOOTH = 3
#: Share of its limit from which a cache is nearly full: it evicts or streams soon.
_NEARLY_FULL = 0.9
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
        #: When it was, what had been counted, and how much of each partial had been written.
        self._looks: deque[tuple[float, dict[Any, Sample], dict[str, int]]] = deque(
            maxlen=_SMOOTH + 1
        )

    def look(self) -> Activity:
        """The cache at this moment."""
        now, kept = clock.monotonic(), self._looks
        after = {(each.start, each.rank): each for each in self._cache.samples(_WINDOW)}
        live = [row for row in partials(self._cache) if row["state"] == "live"]
        kept.append((now, after, {row["dir"]: row["written_bytes"] for row in live}))
        for row in live:
            # Blocks of a slow fetch come one by one, so its rate is of several looks, too.
            name = row["dir"]
            at, written = next((at, seen[name]) for at, _, seen in kept if name in seen)
            row["bytes_per_second"] = max(0, row["written_bytes"] - written) / max(1e-3, now - at)
            row["url"] = row["url"] or row["key"]
        began, before, _ = kept[0]
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
            fetches=sorted(live, key=lambda row: (-row["written_bytes"], row["url"])),
            tiers=list(tiers(self._cache, self._config())),
            waits=self._waits(),
        )

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

    Until q or Ctrl-C. Without a terminal each look is printed below the last one. As JSON it is
    one look, or with --count a line for each.

    \b
    Examples:
      shardcache top
      shardcache top --json --count 360 --interval 10 > watch.jsonl
    """
    console = invocation.console
    count = count or (1 if console.json else None)
    with invocation.cache() as cache, contextlib.suppress(KeyboardInterrupt), ExitStack() as stack:
        watcher = Watcher(cache, lambda: invocation.upkeep().config)
        activity = watcher.look()  # rates are of what changes from now on
        display: Live | None = None
        wait: Callable[[float], bool | None] = time.sleep
        if console.live and sys.stdout.isatty() and not console.json:
            from rich.live import Live

            wait = stack.enter_context(_keys())
            display = Live(
                frame(activity), console=console.terminal(sys.stdout), auto_refresh=False
            )
            stack.callback(display.stop)  # also if the interrupt comes while it starts
            display.start(refresh=True)
        for _ in itertools.count() if count is None else range(count):
            if wait(interval):
                break
            activity = watcher.look()
            console.object("top", activity, ranks=rank_records(activity.ranks))
            if display is not None:
                display.update(frame(activity), refresh=True)
            elif not console.json:
                console.render(frame(activity))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool | None]]:
    """Give a function that waits for so many seconds, or until ``q`` is typed, which it tells.

    Without a keyboard it only waits.
    """
    if sys.stdin is None or not sys.stdin.isatty() or _in_background():
        yield time.sleep
        return

    def wait(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            # Not longer: an interrupt just before select begins is handled when it ends.
            if select.select([0], [], [], min(left, 1.0))[0] and os.read(0, 1) in (b"q", b"Q", b""):
                return True
        return False

    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)  # keys come as they are typed, and are not echoed
        yield wait
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _in_background() -> bool:
    """Whether the kernel would stop us for changing the terminal, as under ``timeout``."""
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no job control on this terminal
        return False


def frame(activity: Activity) -> RenderableType:
    """An activity for people."""
    from rich.console import Group
    from rich.text import Text

    using = counted(activity.processes, "process", "processes")
    head = f"  {activity.at.astimezone():%H:%M:%S}  {using}\n"
    parts: list[RenderableType] = [Text.assemble(("shardcache top", "bold"), head)]
    for tier in activity.tiers:
        full = tier["max_size"] and tier["disk_bytes"] > _NEARLY_FULL * tier["max_size"]
        parts.append(text := Text(gauge(tier)))
        text.highlight_regex(r"(?<= \[)#+(?=-*\] )", "yellow" if full else "green")
    counted_by = {"all": activity.total, **(activity.ranks if len(activity.ranks) > 1 else {})}
    rates = [[rank, *cells(found, activity.seconds or 1.0)] for rank, found in counted_by.items()]
    parts.append(text_table(["RANK", *ROW_TITLES], rates, ROW_TITLES))
    flying = counted(len(activity.fetches), "fetch", "fetches") + " in flight"
    parts.append(Text(f"\n{flying}", "green" if activity.fetches else ""))
    if activity.fetches:
        rows = [
            [each["url"], _share(each), format_rate(each["bytes_per_second"]), _name(each)]
            for each in activity.fetches
        ]
        titles = ["SHARD", "DONE", "RATE", "WHO"]
        parts.append(text_table(titles, rows, ["DONE", "RATE"], shorten=True))
    if activity.waits:
        rows = []
        for each in activity.waits:
            names = _name(each), _name(each["holder"] or {})
            rows.append([each["url"], *names, short_duration(each["seconds"])])
        parts.append(Text(f"\n{counted(len(rows), 'waiter')}", "yellow"))
        titles = ["SHARD", "WHO", "FOR WHOM", "SINCE"]
        parts.append(text_table(titles, rows, ["SINCE"], shorten=True))
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
