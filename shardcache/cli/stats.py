"""``shardcache stats``, ``report`` and ``top``: the counters of a node as text, charts and rates.

The report is the template ``report.html`` with charts by matplotlib (the extra ``report``).
"""

from __future__ import annotations

import contextlib
import functools
import html
import io
import itertools
import math
import os
import select
import string
import sys
import termios
import tty
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache import clock
from shardcache.cache import Cache
from shardcache.cli import main as cli
from shardcache.cli.entries import cell, partials
from shardcache.cli.main import Invocation, command, flag
from shardcache.cli.output import (
    Console,
    Fitted,
    Row,
    Shortened,
    drawn,
    fields_of,
    local_time,
    printable,
    text_table,
)
from shardcache.clock import utc
from shardcache.config import __version__
from shardcache.errors import ConfigError
from shardcache.layout import MANIFEST
from shardcache.locks.sessions import live_sessions
from shardcache.space.memory import Volume
from shardcache.stats import database
from shardcache.stats.database import Sample
from shardcache.stats.summary import METRICS, WAITED, Stats, by_rank, exposition, summed, summed_by
from shardcache.sync import atomic_write
from shardcache.units import counted, format_bytes, format_duration, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_ROW_TITLES = ("OPENS", "HIT RATE", "STREAMED", "FETCHED", "SAVED", "MEAN WAIT")

_since_option = click.option(
    "--since",
    type=cli.DURATION,
    help="Count only this last period, such as 24h.  [default: 30 days]",
)
_output_option = functools.partial(click.option, "-o", "--output", type=cli.FILE)
#: Maximum number of the intervals of a chart.
_INTERVALS = 120
#: Number of intervals over which `top` averages rates, because processes write their counters only
#: once a second.
_SMOOTH = 3
_SHOW_CURSOR = "\x1b[?25h"


@command("stats")
@_since_option
@click.option("--by", type=click.Choice(["rank", "hour"]), help="Print one row per rank or hour.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["prometheus"]),
    help="Print metrics for the textfile collector of Prometheus' node exporter.",
)
@_output_option(help="With --format: write to this file atomically.")
@flag("--zero", help="Reset all counters.")
def stats_command(
    invocation: Invocation,
    since: float | None,
    by: str | None,
    form: str | None,
    output: str | None,
    zero: bool,
) -> None:
    """Show hits, bytes and waits of all processes of this node.

    A hit found the shard in the cache; a coalesced open waited for the download of another
    reader; a miss downloaded the shard; a streamed one was read past the cache, which stored
    nothing. Bytes count when they are read. Counters are kept in periods of ten minutes for 30
    days. The rank `none` stands for processes that no launcher has given a rank.

    \b
    Examples:
      shardcache stats --since 24h --by hour
      shardcache stats --by rank --json
      shardcache stats --format prometheus -o /var/lib/node_exporter/shardcache.prom
    """
    console = invocation.console
    if zero and (since is not None or by or form):
        raise click.UsageError("--zero cannot be combined with other options.")
    if output is not None and not form:
        raise click.UsageError("-o needs --format prometheus.")
    if form and (since is not None or by or console.json):
        raise click.UsageError("--format prometheus takes no --since, --by or --json.")
    with invocation.cache(existing=True) as cache:
        samples = [] if zero else cache.samples(since, ever=form is not None)
        total = summed(samples)
        if zero:
            database.zero(cache.process.last_tier.node)
            console.object("stats", zeroed=True)
            console.info("counters are reset")
        elif form:
            text = exposition(total, str(cache.dir), _gauges(cache))
            if output is not None:
                _write_text(output, text)
            else:
                console.data(text.rstrip())
        elif by is None:
            console.object("stats", total)
            console.data(_figures(total))
        else:
            groups: Mapping[Any, Stats] = by_rank(samples)
            if by == "hour":
                hours = summed_by(samples, lambda sample: sample.start // 3600 * 3600)
                groups = {utc(hour): stats for hour, stats in hours.items()}
            records = [{by: key, **stats.as_dict()} for key, stats in groups.items()]
            console.object("stats", **{f"{by}s": records}, summary=total)
            rows = ([_group_name(key), *_cells(stats)] for key, stats in groups.items())
            console.table([by.upper(), *_ROW_TITLES], rows)
            console.data(str(total))


def _gauges(cache: Cache) -> list[Row]:
    """Return the fields of `GAUGES`: a row for the whole cache, and one for each tier."""
    node = cache.process.last_tier.node
    live = sum(row["state"] == "live" for row in partials(cache))
    whole: Row = {"dir": str(cache.dir), "downloads": live, "processes": len(live_sessions(node))}
    cleaned, manifest = node.named_lock("clean"), cache.dir / MANIFEST
    # Before the first cleaning, an alert must count from somewhere.
    whole["cleaned"] = (cleaned if cleaned.exists() else manifest).lstat().st_mtime
    return [whole, *_tiers(cache)]


def _write_text(name: str, text: str) -> int:
    """Write a file atomically, so that no reader sees only a part of it; return its bytes."""
    path, data = Path(name), text.encode("utf-8", "backslashreplace")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout or a pipe cannot be replaced
            path.write_bytes(data)
        else:
            with atomic_write(path, "wb", sync=False) as file:
                file.write(data)
    except OSError as exn:  # the error may name the temporary file, so name the file itself
        raise OSError(exn.errno, exn.strerror, name) from exn
    return len(data)


def _figures(stats: Stats) -> str:
    if not any(stats.counters.values()):
        return "Nothing was counted."
    begin, end = (local_time(utc(date or 0.0)) for date in (stats.since, stats.until))
    rows = [("Period", f"{begin} to {end}")]
    for name, (about, kind, counters) in METRICS.items():
        text = functools.partial(_shown, name)
        total = sum(getattr(stats, each) for each in counters.values())
        if kind == "tier" and not total:
            continue
        rows.append((about, text(total)))
        for label, counter in counters.items():
            if label and (n := getattr(stats, counter)):
                rows.append((f"  {label}", f"{text(n)} / {text(total)} ({n / total:.2%})"))
    rows.append(("Bytes saved at the origin.", format_bytes(stats.bytes_saved)))
    for name, waits in {"a shard": stats.all_waits, **stats.waits}.items():
        if waits.mean is not None:
            times = f"mean {format_duration(waits.mean)}, total {format_duration(waits.seconds)}"
            rows.append((f"Waits for {name}", times))
    return "\n".join(f"{name.rstrip('.'):<36}{text}" for name, text in rows)


def _shown(family: str, n: float, position: int | None = None) -> str:
    """Return a number of a family of counters as text. matplotlib also passes a ``position``."""
    if family.endswith("bytes"):
        return format_bytes(n)
    return f"{n / 1e6:,.10g} s" if family.endswith("us") else f"{n:,.0f}"


def _group_name(key: datetime | int | None) -> str:
    return local_time(key) if isinstance(key, datetime) else "none" if key is None else str(key)


def _cells(stats: Stats, seconds: float | None = None) -> list[str]:
    """Return the cells of the columns `_ROW_TITLES`; with ``seconds``, as rates over that time."""
    opens = f"{stats.opens:,}" if seconds is None else f"{stats.opens / seconds:,.1f}/s"
    sizes = stats.bytes_streamed, stats.bytes_fetched, stats.bytes_saved
    amounts = (format_bytes(n) if seconds is None else format_rate(n / seconds) for n in sizes)
    rate, mean = stats.hit_rate, stats.all_waits.mean
    wait = "-" if mean is None else format_duration(mean)
    return [opens, "-" if rate is None else f"{rate:.2%}", *amounts, wait]


@command("report")
@_since_option
@_output_option(
    default="shardcache-report.html", help="The file to write.  [default: shardcache-report.html]"
)
def report_command(invocation: Invocation, since: float | None, output: str) -> None:
    """Write an HTML page with charts.

    The page shows hits, bytes from cache and origin, waits and the size of the cache over time.
    It is one file without scripts. The charts need the extra shardcache[report]; `stats --json`
    has the same figures.

    \b
    Examples:
      shardcache report
      shardcache report --since 24h -o /var/www/html/shardcache.html
    """
    with invocation.cache(existing=True) as cache:
        samples, tiers = cache.samples(since), _tiers(cache)
        begin = clock.time() - (since or clock.time())
        charted = database.samples(cache.process.last_tier.node, begin, period=database.STEP)
    held = sum(tier["bytes"] for tier in tiers)
    rows = [[_group_name(rank), *_cells(stats)] for rank, stats in by_rank(samples).items()]
    table = drawn(text_table(["RANK", *_ROW_TITLES], rows), Console().terminal(io.StringIO()))
    fill = [f"{tier['dir']}: {_fill_text(tier)}" for tier in tiers]
    text = "\n".join([*fill, "", _figures(summed(samples)), "", table])
    template = Path(__file__).with_name("report.html")
    page = string.Template(template.read_text("utf-8")).substitute(
        node=html.escape(os.uname().nodename),
        version=__version__,
        made=local_time(utc(clock.time())),
        figures=html.escape(text),
        charts="\n".join(_charts(charted, held) if charted else ()),
    )
    size, console = _write_text(output, page), invocation.console
    console.object("report", path=output, size=size)
    console.info(f"wrote {output}, {format_bytes(size)}")


def _tiers(cache: Cache) -> list[Row]:
    """Return the `Contents`, the limit and the free room of each tier with a cache."""
    present = cache.process.present
    return [
        {
            "tier": number,
            "dir": str(tier.config.dir),
            **fields_of(tier.space.contents()),
            "max_size": tier.space.max_size,
            "free_bytes": Volume.of(tier.config.dir).free,
        }
        for number, tier in enumerate(cache.process.tiers, 1)
        if tier in present
    ]


def _fill_text(tier: Row) -> str:
    """Return ``4 shards, 1.2 GB of 2.0 GB on disk (60%)``, or ``about 4 shards`` if estimated."""
    used, limit = tier["disk_bytes"], tier["max_size"]
    shards = f"{'about ' if tier['estimated'] else ''}{counted(tier['shards'], 'shard')}"
    size = format_bytes(tier["bytes"])
    if limit:
        size = f"{format_bytes(used)} of {format_bytes(limit)} on disk ({used / limit:.0%})"
    return f"{shards}, {size}"


def _charts(samples: Sequence[Sample], size: int) -> Iterator[str]:
    """Yield SVG charts of the counters over time. ``size`` are the bytes in the cache now."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as exn:
        raise ConfigError("The charts need matplotlib: pip install 'shardcache[report]'.") from exn
    starts = {sample.start for sample in samples}
    span = max(starts) - min(starts)
    # Samples of ten seconds become samples of ten minutes after an hour.
    period = math.gcd(database.PERIOD, *starts) if span <= database.RECENT else database.PERIOD
    step = period * max(1, math.ceil(span / period / _INTERVALS))
    groups = summed_by(samples, lambda sample: sample.start // step * step)
    x: Any = [datetime.fromtimestamp(start + step / 2) for start in groups]  # local time
    width: Any = timedelta(seconds=0.8 * step)
    sums = list(groups.values())
    changes = [stats.bytes_evicted - stats.bytes_stored for stats in sums[:0:-1]]  # back in time
    sizes = [*itertools.accumulate(changes, initial=size)][::-1]
    charts: dict[str, tuple[str, Any]] = {"Size of the cache": ("bytes", {"stored": sizes})}
    for name, (title, _, counters) in {**METRICS, **WAITED}.items():
        series = {label: [getattr(stats, n) for stats in sums] for label, n in counters.items()}
        charts[title.rstrip(".")] = name, series
    for title, (family, series) in charts.items():
        if not any(map(any, series.values())):
            continue
        with rc_context(fname=Path(__file__).with_name("report.mplstyle")):
            figure = Figure()
            axes, below = figure.subplots(), [0] * len(x)
            for number, (label, values) in enumerate(series.items()):
                if any(values):  # each label keeps its colour
                    axes.bar(x, values, width, below, label=label, color=f"C{number}")
                    below = [a + b for a, b in zip(below, values, strict=True)]
            axes.locator_params("y", nbins=4, steps=[1, 2, 5, 10], integer=True)
            axes.yaxis.set_major_formatter(functools.partial(_shown, family))
            axes.set_title(title, pad=20 if len(series) > 1 else 6)
            if len(series) > 1:
                axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(series))
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
        yield file.getvalue()[file.getvalue().index("<svg") :]


def snapshots(cache: Cache) -> Iterator[Row]:
    """Yield the state of a cache, with its counters over the last `_SMOOTH` intervals."""
    # For each of the last snapshots: its time, the counters by start and rank of their sample, and
    # the bytes written by partial.
    history = deque[tuple[float, dict[Any, Any], dict[str, int]]](maxlen=_SMOOTH + 1)
    while True:
        now = clock.monotonic()
        # The samples of the last hour, which is longer than any rate is averaged over.
        after = {(sample.start, sample.rank): sample.counters for sample in cache.samples(3600.0)}
        live = [row for row in partials(cache) if row["state"] == "live"]
        history.append((now, after, {row["dir"]: row["written_bytes"] for row in live}))
        for row in live:
            name = row["dir"]
            at, written = next((at, sizes[name]) for at, _, sizes in history if name in sizes)
            row["bytes_per_second"] = max(0, row["written_bytes"] - written) / max(1e-3, now - at)
            row["url"] = row["url"] or row["key"]
        began, before, _ = history[0]
        changed = [Sample(*key, new - before.get(key, Counter())) for key, new in after.items()]
        yield {
            "at": utc(clock.time()),
            "seconds": max(1e-3, now - began) if len(history) > 1 else None,
            "processes": len(live_sessions(cache.process.last_tier.node)),
            "total": summed(changed),
            "ranks": {rank: stats for rank, stats in by_rank(changed).items() if stats.opens},
            "fetches": sorted(live, key=lambda row: (-row["written_bytes"], row["url"])),
            "tiers": _tiers(cache),
        }


@command("top")
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    metavar="SECONDS",
    help="Time between two refreshes.  [default: 2]",
)
@cli.number_option("--count", help="Quit after N refreshes.")
def top_command(invocation: Invocation, interval: float, count: int | None) -> None:
    """Watch rates, running downloads and disk usage.

    Press q to quit. Without a terminal, each refresh is printed below the last one. With
    --json, it prints one refresh, or --count of them, one per line.

    \b
    Examples:
      shardcache top
      shardcache top --json --count 360 --interval 10 > watch.jsonl
    """
    console = invocation.console
    count = count or (1 if console.json else None)
    with invocation.cache(existing=True) as cache, ExitStack() as stack:
        stack.enter_context(contextlib.suppress(SystemExit))
        display: Live | None = None
        if console.live and sys.stdout.isatty() and not console.json:
            from rich.live import Live

            display = Live(console=console.terminal(sys.stdout), auto_refresh=False)
            stack.callback(sys.stdout.write, _SHOW_CURSOR)  # rich does not if Ctrl-C ends a redraw
            stack.callback(display.stop)  # registered before start(), which a signal may interrupt
            display.start()
        keys = [sys.stdin] if display is not None and sys.stdin and sys.stdin.isatty() else []
        for stdin in keys:  # keys are passed on at once, and not shown
            stack.callback(termios.tcsetattr, stdin, termios.TCSAFLUSH, termios.tcgetattr(stdin))
            tty.setcbreak(stdin, termios.TCSANOW)
        for number, snapshot in enumerate(snapshots(cache)):
            if display is not None:
                display.update(frame(snapshot, "q to quit"), refresh=True)
            elif number and console.json:  # the rates are relative to the first snapshot
                ranks = [{"rank": n, **stats.as_dict()} for n, stats in snapshot["ranks"].items()]
                console.object("top", **{**snapshot, "ranks": ranks})
            elif number:
                console.render(frame(snapshot))
            if number == count:
                break
            typed, _, _ = select.select(keys, [], [], interval)  # any key refreshes
            if typed and os.read(typed[0].fileno(), 1) in (b"q", b""):  # empty: no more terminal
                break


def frame(snapshot: Row, hint: str = "") -> RenderableType:
    """Draw one of `snapshots`, with a hint in its heading."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    using = counted(snapshot["processes"], "process", "processes")
    head = [f"{snapshot['at'].astimezone():%H:%M:%S}", using, *filter(None, [hint])]
    beside = functools.partial(Columns, padding=(0, 2))  # below each other on a narrow terminal
    parts: list[RenderableType] = [beside([Text("shardcache top", "bold"), *head]), ""]
    for tier in snapshot["tiers"]:
        used, limit = tier["disk_bytes"], tier["max_size"]
        gauge = [ProgressBar(limit, used, width=24)] if limit else []
        parts += [Shortened(printable(tier["dir"])), beside([*gauge, _fill_text(tier)])]
    ranks = {_group_name(rank): stats for rank, stats in snapshot["ranks"].items()}
    seconds = snapshot["seconds"]  # the first snapshot has no rates yet
    rates = [
        [rank, *(_cells(stats, seconds) if seconds else ["-"] * len(_ROW_TITLES))]
        for rank, stats in {"all": snapshot["total"], **(ranks if len(ranks) > 1 else {})}.items()
    ]
    parts.append(Fitted(["RANK", *_ROW_TITLES], rates))
    fetches = snapshot["fetches"]
    running = f"\n{counted(len(fetches), 'download')} running"
    parts.append(Text(running, "green" if fetches else ""))
    if fetches:
        titles = ["SHARD", "DONE", "RATE"]
        rows = [[*(cell(row, title) for title in titles), _name(row)] for row in fetches]
        parts.append(Fitted([*titles, "PROCESS"], rows))
    return Group(*parts)


def _name(process: Row) -> str:
    """Return ``rank 3, pid 4711``, with the host if it is another one; ``?`` if unknown."""
    rank = "" if process.get("rank") is None else f"rank {process['rank']}, "
    host = process.get("host") or os.uname().nodename
    host = "" if host == os.uname().nodename else f" on {host}"
    return f"{rank}pid {process['pid']}{host}" if process.get("pid") else "?"
