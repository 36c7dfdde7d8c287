"""``shardcache top``: a live view of rates, running downloads and disk usage."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from shardcache import clock
from shardcache.cache import Cache
from shardcache.cli.entries import partials
from shardcache.cli.main import Invocation, command, number_option
from shardcache.cli.output import Row, Shortened, counted, printable, short_duration, text_table
from shardcache.cli.stats import ROW_TITLES, cells, fill_text, tiers
from shardcache.clock import utc
from shardcache.config import Config
from shardcache.locks.keys import Holder, read_holder
from shardcache.locks.sessions import live_sessions, live_waits
from shardcache.space.tiers import lock_layout
from shardcache.stats.database import Sample
from shardcache.stats.summary import Stats, by_rank, rank_records, summed
from shardcache.units import format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

#: Number of intervals over which rates are averaged, because processes write their counters only
#: once a second.
_SMOOTH = 3
#: The bar of a tier turns yellow above this share of the tier's limit. A full tier has to evict
#: shards, or to stream new ones without storing them.
_NEARLY_FULL = 0.9
#: Width of the bar of a tier, in columns.
_GAUGE = 24
_HINT = "  Ctrl-C to quit"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a cache at one moment, and its counters since an earlier one."""

    at: datetime
    seconds: float | None  #: seconds that the counters cover; None in the first snapshot
    processes: int  #: number of processes that use the cache
    total: Stats  #: the counters of all ranks together
    ranks: Mapping[str, Stats]  #: the counters of each rank that opened shards
    fetches: Sequence[Row]  #: rows of running downloads (`partials`), most bytes written first
    tiers: Sequence[Row]  #: rows of `shardcache.cli.stats.tiers`
    waits: Sequence[Row]  #: processes that wait for another's download, the longest wait first


class Watcher:
    """Takes snapshots of a cache, and remembers the last ones to compute rates."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        #: For each of the last snapshots: its time, the counters (samples by start and rank), and
        #: the bytes written by partial.
        self._history: deque[tuple[float, dict[Any, Sample], dict[str, int]]] = deque(
            maxlen=_SMOOTH + 1
        )

    def snapshot(self, config: Config | None = None) -> Snapshot:
        """Return a snapshot whose counters and rates cover the last `_SMOOTH` intervals.

        ``config`` has the current limits, which change when a job starts (default: the cache's).
        """
        now, history = clock.monotonic(), self._history
        # The samples of the last hour, which is longer than any rate is averaged over.
        after = {(each.start, each.rank): each for each in self._cache.samples(3600.0)}
        live = [row for row in partials(self._cache) if row["state"] == "live"]
        history.append((now, after, {row["dir"]: row["written_bytes"] for row in live}))
        for row in live:
            name = row["dir"]
            at, written = next((at, sizes[name]) for at, _, sizes in history if name in sizes)
            row["bytes_per_second"] = max(0, row["written_bytes"] - written) / max(1e-3, now - at)
            row["url"] = row["url"] or row["key"]
        began, before, _ = history[0]
        changed = [
            replace(each, counters=each.counters - before[key].counters) if key in before else each
            for key, each in after.items()
        ]
        return Snapshot(
            at=utc(clock.time()),
            seconds=max(1e-3, now - began) if len(history) > 1 else None,
            processes=len(live_sessions(self._cache.process.home.node)),
            total=summed(changed),
            ranks={rank: each for rank, each in by_rank(changed).items() if each.opens},
            fetches=sorted(live, key=lambda row: (-row["written_bytes"], row["url"])),
            tiers=list(tiers(self._cache, config or self._cache.config)),
            waits=self._waits(),
        )

    def _waits(self) -> list[Row]:
        now, rows, process = clock.time(), list[Row](), self._cache.process
        for store in process.stores():
            for key, waiter in live_waits(store.layout):
                locks = lock_layout(process.home, store.layout.base)
                holder = read_holder(locks.holder(key))
                row = {
                    "url": waiter.url or key,
                    **_process(waiter),
                    "since": utc(waiter.started),
                    "seconds": max(0.0, now - waiter.started),
                    "holder": _process(holder) if holder else None,
                }
                rows.append(row)
        return sorted(rows, key=lambda row: (-row["seconds"], row["url"]))


def _process(holder: Holder) -> Row:
    return {"pid": holder.pid, "host": holder.host, "rank": holder.rank, "job": holder.job}


@command("top")
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    metavar="SECONDS",
    help="Time between two refreshes.  [default: 2]",
)
@number_option("--count", help="Quit after N refreshes.")
def top_command(invocation: Invocation, interval: float, count: int | None) -> None:
    """Watch rates, running downloads and disk usage.

    Press Ctrl-C to quit. Without a terminal, each refresh is printed below the last one. With
    --json, it prints one refresh, or --count of them, one per line.

    \b
    Examples:
      shardcache top
      shardcache top --json --count 360 --interval 10 > watch.jsonl
    """
    console = invocation.console
    count = count or (1 if console.json else None)
    with invocation.cache() as cache, contextlib.suppress(KeyboardInterrupt), ExitStack() as stack:
        watcher = Watcher(cache)
        snapshot = watcher.snapshot()  # the first rates are relative to this snapshot
        display: Live | None = None
        if console.live and sys.stdout.isatty() and not console.json:
            from rich.live import Live

            display = Live(
                frame(snapshot, _HINT), console=console.terminal(sys.stdout), auto_refresh=False
            )
            stack.callback(display.stop)  # registered before start(), which a signal may interrupt
            display.start(refresh=True)
        for _ in itertools.count() if count is None else range(count):
            time.sleep(interval)
            snapshot = watcher.snapshot(invocation.loaded_with_job_limits().config)
            console.object("top", snapshot, ranks=rank_records(snapshot.ranks))
            if display is not None:
                display.update(frame(snapshot, _HINT), refresh=True)
            elif not console.json:
                console.render(frame(snapshot))


def frame(snapshot: Snapshot, hint: str = "") -> RenderableType:
    """Draw a snapshot, with a hint in its heading."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    using = counted(snapshot.processes, "process", "processes")
    head = f"  {snapshot.at.astimezone():%H:%M:%S}  {using}{hint}\n"
    parts: list[RenderableType] = [Text.assemble(("shardcache top", "bold"), head)]
    for tier in snapshot.tiers:
        parts.append(Shortened(printable(tier["dir"])))
        cells_of_tier: list[RenderableType] = [fill_text(tier)]
        if limit := tier["max_size"]:
            used = tier["disk_bytes"] / limit
            color = "yellow" if used > _NEARLY_FULL else "green"
            bar = ProgressBar(1.0, used, _GAUGE, complete_style=color, finished_style=color)
            cells_of_tier = [bar, f"{used:.0%}", *cells_of_tier]
        parts.append(grid := Table.grid(padding=(0, 2, 0, 0)))
        grid.add_row(*cells_of_tier)
    by_rank = {"all": snapshot.total, **(snapshot.ranks if len(snapshot.ranks) > 1 else {})}
    seconds = snapshot.seconds  # the first snapshot has no rates yet
    rates = [
        [rank, *(cells(stats, seconds) if seconds else ["-"] * len(ROW_TITLES))]
        for rank, stats in by_rank.items()
    ]
    parts.append(text_table(["RANK", *ROW_TITLES], rates, ROW_TITLES))
    running = f"\n{counted(len(snapshot.fetches), 'download')} running"
    parts.append(Text(running, "green" if snapshot.fetches else ""))
    if snapshot.fetches:
        rows = [
            [each["url"], _share(each), format_rate(each["bytes_per_second"]), _name(each)]
            for each in snapshot.fetches
        ]
        titles = ["SHARD", "DONE", "RATE", "PROCESS"]
        parts.append(text_table(titles, rows, ["DONE", "RATE"], shorten=True))
    if snapshot.waits:
        waiting = counted(len(snapshot.waits), "waiting process", "waiting processes")
        parts.append(Text(f"\n{waiting}", "yellow"))
        rows = [
            [each["url"], _name(each), _name(each["holder"] or {}), short_duration(each["seconds"])]
            for each in snapshot.waits
        ]
        titles = ["SHARD", "PROCESS", "WAITS FOR", "TIME"]
        parts.append(text_table(titles, rows, ["TIME"], shorten=True))
    return Group(*parts)


def _share(row: Row) -> str:
    written, size = row["written_bytes"], row["size"]
    return "?" if written is None or not size else f"{written / size:.0%}"


def _name(process: Row) -> str:
    """Return ``rank 3, pid 4711``, with the host if it is another one; ``?`` if unknown."""
    rank = "" if process.get("rank") is None else f"rank {process['rank']}, "
    host = process.get("host") or os.uname().nodename
    host = "" if host == os.uname().nodename else f" on {host}"
    return f"{rank}pid {process['pid']}{host}" if process.get("pid") else "?"
