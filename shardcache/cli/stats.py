"""``shardcache stats`` and ``report``: the counters of a node as text, metrics and charts.

The report is the template ``report.html`` with charts by matplotlib (the extra ``report``). It
needs no scripts or other files, and is readable on a phone, and in light and dark mode.
"""

from __future__ import annotations

import functools
import html
import io
import math
import os
import string
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli import main as cli
from shardcache.cli.main import Invocation, command, flag
from shardcache.cli.output import Console, Row, counted, fields_of, local_time, short_duration
from shardcache.clock import utc
from shardcache.config import Config, __version__
from shardcache.errors import ConfigError
from shardcache.space.budget import Holdings
from shardcache.space.memory import Volume
from shardcache.stats import database
from shardcache.stats.database import Sample
from shardcache.stats.metrics import exposition
from shardcache.stats.summary import OUTCOMES, Stats, Waits, by_hour, by_rank, rank_records, summed
from shardcache.sync import atomic_write
from shardcache.units import format_bytes, format_rate

#: Outcomes that `figures` shows even if their count is 0.
_ALWAYS = ("hits", "coalesced", "misses")
ROW_TITLES = ("OPENS", "HIT RATE", "STREAMED", "FETCHED", "SAVED", "MEAN WAIT")
_WAITS = {"disk": "for the disk", "lock": "for downloads", "network": "for the network"}

since_option = click.option(
    "--since",
    type=cli.DURATION,
    help="Count only this last period, such as 24h.  [default: 30 days]",
)
output_option = functools.partial(
    click.option, "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE"
)
#: Possible lengths of the intervals of a chart in seconds, and the maximum number of intervals.
_STEPS = (database.PERIOD, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
_INTERVALS = 100
#: Colours that are readable on white and on black. Red is only for errors.
_COLORS = ("#3b82c4", "#d97706", "#8b5cf6", "#0d9488", "#64748b", "#dc2626")
_GREY = "#80868e"
#: The charts of sums: title, unit, and label -> counter.
_SUMS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Opens", "", {name: name for name in OUTCOMES}),
    (
        "Where bytes came from",
        "B",
        {"cache": "bytes_saved", "origin": "bytes_origin", "upstreams": "bytes_upstream"},
    ),
    ("Bytes streamed past the cache", "B", {"streamed": "bytes_bypassed"}),
    ("Bytes evicted", "B", {"evicted": "bytes_evicted"}),
)
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shardcache",  # a fixed salt, so that equal counters make equal pages
    "svg.fonttype": "none",  # keep text as text, in the fonts of the page
    "figure.figsize": (4.8, 2.4),  # inches, legible on a phone
    "savefig.transparent": True,
    "axes.titlelocation": "left", "axes.titlesize": 11, "axes.titlecolor": _GREY,
    "xtick.color": _GREY, "ytick.color": _GREY, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": _GREY, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "axes.spines.left": False, "axes.spines.right": False,
    "axes.spines.top": False, "axes.spines.bottom": False,
    "legend.frameon": False, "legend.fontsize": 8, "legend.labelcolor": _GREY,
    "legend.handlelength": 0.7, "legend.columnspacing": 0.9,
    "legend.borderaxespad": 0, "legend.borderpad": 0.2,
}  # fmt: skip


@command("stats")
@since_option
@click.option("--by", type=click.Choice(["rank", "hour"]), help="Print one row per rank or hour.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["prometheus"]),
    help="Print metrics for the textfile collector of Prometheus' node exporter.",
)
@output_option(help="With --format: write to this file atomically.")
@flag("--zero", help="Reset all counters.")
def stats_command(
    invocation: Invocation,
    since: float | None,
    by: str | None,
    form: str | None,
    output: Path | None,
    zero: bool,
) -> None:
    """Show hits, bytes and waits of all processes of this node.

    A hit found the shard in the cache; a coalesced open waited for the download of another
    reader; a miss downloaded the shard; a bypass streamed it and stored nothing. Bytes count
    when they are read. Counters are kept in periods of ten minutes for 30 days. The
    rank `none` stands for processes that no launcher has given a rank.

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
        raise click.UsageError(
            "--format prometheus takes no --since, --by or --json; select in Prometheus."
        )
    with invocation.cache() as cache:
        if zero:
            process = cache.process
            process.counters.flush()
            database.zero(process.home.node)
            console.object("stats", zeroed=True)
            console.info("counters are reset")
        elif form:
            text = exposition(summed(cache.samples(ever=True)), str(cache.dir))
            if output is None:
                console.data(text.rstrip())
            else:
                write_text(output, text)
        elif by is not None:
            _print_rows(console, cache.samples(since), by)
        else:
            stats = cache.stats(since)
            console.object("stats", stats)
            console.data(figures(stats))


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, so that no reader sees only a part of it."""
    try:
        if path.exists() and not path.is_file():  # /dev/stdout or a pipe cannot be replaced
            path.write_text(text, "utf-8")
            return
        with atomic_write(path, "w", sync=False) as file:
            file.write(text)
    except OSError as exn:  # the error may name the temporary file, so name the file itself
        raise OSError(exn.errno, exn.strerror, str(path)) from exn


def figures(stats: Stats) -> str:
    """Return all figures as lines of text."""
    if not stats.opens and not stats.fetches:
        return "Nothing was counted."
    lines = [f"Opens         {stats.opens:>13,}"]
    for name in OUTCOMES:
        if (count := stats.counters[name]) or name in _ALWAYS:
            share = count / stats.opens if stats.opens else 0.0
            lines.append(f"  {name.capitalize():<12}{count:>13,} / {stats.opens:,} ({share:6.2%})")
    read = f"Read from cache {format_bytes(stats.bytes_opened)}"
    read += f"    Fetched {format_bytes(stats.bytes_fetched)}"
    if stats.bypassed:
        shards = counted(stats.bypassed, "shard")
        read += f"    Streamed {format_bytes(stats.bytes_bypassed)} ({shards})"
    if stats.bytes_upstream:
        read += f"    From upstreams {format_bytes(stats.bytes_upstream)}"
    lines.append(f"{read}    Saved {format_bytes(stats.bytes_saved)} of egress")
    if by_tier := _each(stats, "hits_tier_", "tier {} {:,}"):
        lines.append("Hits by tier  " + "   ".join(by_tier))
    lines.append(f"Wait for data   {_waits(stats.all_waits)}")
    for wait, text in _WAITS.items():
        if stats.waits[wait].count:
            lines.append(f"  {text:<18}{_waits(stats.waits[wait])}")
    evicted, errors = f"Evicted {stats.evicted:,}", f"Errors {stats.errors:,}"
    if reasons := _each(stats, "evicted_", "{1:,} {0}"):
        evicted += f" ({format_bytes(stats.bytes_evicted)}: {', '.join(reasons)})"
    if kinds := _each(stats, "errors_", "{1:,} {0}"):
        errors += f" ({', '.join(kinds)})"
    lines.append(f"{evicted}    Retries {stats.retries:,}    {errors}")
    return "\n".join(lines)


def _each(stats: Stats, prefix: str, form: str) -> list[str]:
    """Format each counter above 0 that has a prefix: its name without the prefix, its value."""
    names = [name for name, n in stats.counters.items() if n and name.startswith(prefix)]
    return [form.format(name.removeprefix(prefix), stats.counters[name]) for name in names]


def _percentage(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _waits(waits: Waits) -> str:
    mean, total = short_duration(waits.mean), short_duration(waits.seconds)
    return f"mean {mean}  total {total}" if waits.count else "none"


def _print_rows(console: Console, samples: Sequence[Sample], by: str) -> None:
    total = summed(samples)
    if by == "rank":
        groups = by_rank(samples)
        records = rank_records(groups)
    else:
        hours = {utc(hour): stats for hour, stats in by_hour(samples).items()}
        records = [{"hour": hour, **stats.as_dict()} for hour, stats in hours.items()]
        groups = {local_time(hour): stats for hour, stats in hours.items()}
    console.object("stats", **{f"{by}s": records}, summary=total)
    rows = ((name, *cells(stats)) for name, stats in groups.items())
    console.table([by.upper(), *ROW_TITLES], rows, ROW_TITLES)
    console.data(f"{counted(total.opens, 'open')}, {_percentage(total.hit_rate)} hits")


def cells(stats: Stats, seconds: float | None = None) -> list[str]:
    """Return the cells of the columns `ROW_TITLES`; with ``seconds``, as rates over that time."""

    def number(n: int) -> str:
        return f"{n:,}" if seconds is None else f"{n / seconds:,.1f}/s"

    def size(n: int) -> str:
        return format_bytes(n) if seconds is None else format_rate(n / seconds)

    return [
        number(stats.opens),
        _percentage(stats.hit_rate),
        size(stats.bytes_bypassed),
        size(stats.bytes_fetched),
        size(stats.bytes_saved),
        short_duration(stats.all_waits.mean),
    ]


@command("report")
@since_option
@output_option(
    default=Path("shardcache-report.html"),
    help="The file to write.  [default: shardcache-report.html]",
)
def report_command(invocation: Invocation, since: float | None, output: Path) -> None:
    """Write an HTML page with charts.

    The page shows the hit rate over time, bytes from cache and origin, waits and evictions. It
    is one file without scripts. The charts need the extra shardcache[report]; `stats --json` has
    the same figures.

    \b
    Examples:
      shardcache report
      shardcache report --since 24h -o /var/www/html/shardcache.html
    """
    with invocation.cache() as cache:
        samples, gauges = cache.samples(since), map(_meter, tiers(cache, cache.config))
        total = summed(samples)
        span = "Nothing was counted"
        if total.since is not None and total.until is not None:
            span = f"{local_time(utc(total.since))} to {local_time(utc(total.until))}"
        rows = [(rank, *cells(found)) for rank, found in by_rank(samples).items()]
        template = Path(__file__).with_name("report.html")
        text = string.Template(template.read_text("utf-8")).substitute(
            node=html.escape(os.uname().nodename),
            version=__version__,
            made=local_time(utc(time.time())),
            span=span,
            tiers="\n".join(gauges),
            figures=html.escape(figures(total)),
            note="<p>Rank none: processes that no launcher has given a rank.</p>"
            if any(rank == "none" for rank, *_ in rows)
            else "",
            charts=_charts(samples) if samples else "",
            ranks="\n".join(
                f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>"
                for line in (("RANK", *ROW_TITLES), *rows)
            ),
        )
    write_text(output, text)
    size, console = len(text.encode()), invocation.console
    console.object("report", path=output, size=size)
    console.info(f"wrote {output}, {format_bytes(size)}")


def tiers(cache: Cache, config: Config) -> Iterator[Row]:
    """Yield a row with the `Holdings` and the limit (in ``config``) of each tier.

    The limit is None if only min_free applies, or if the tier has no directory yet.
    """
    present = {tier.config.dir: tier for tier in cache.process.present}
    for number, tier in enumerate(config.by_tier(), 1):
        known = present.get(tier.dir)
        yield {
            "tier": number,
            "dir": os.fspath(tier.dir),
            **fields_of(known.space.holdings() if known else Holdings()),
            "max_size": Volume.of(tier.dir).budget(tier) if tier.dir.is_dir() else None,
        }


def fill_text(tier: Row) -> str:
    """Return ``4 shards, 1.2 GB of 2.0 GB on disk``; without a limit, ``4 shards, 1.2 GB``.

    An estimate begins with ``about``.
    """
    used, limit, shards = tier["disk_bytes"], tier["max_size"], tier["shards"]
    text = counted(shards, "shard")
    if tier["estimated"]:
        text = f"about {float(f'{shards:.2g}'):,.0f} shards"
    size = f"{format_bytes(used)} of {format_bytes(limit)} on disk" if limit else None
    return f"{text}, {size or format_bytes(tier['bytes'])}"


def _meter(tier: Row) -> str:
    """Return HTML that shows how full a tier is."""
    used, limit = tier["disk_bytes"], tier["max_size"]
    text = f"{tier['dir']}: {fill_text(tier)}"
    if not limit:
        return f"<p>{html.escape(text)}</p>"
    text += f" ({used / limit:.0%})"
    return f'<p>{html.escape(text)} <meter max="{limit}" value="{used}"></meter></p>'


def _charts(samples: Sequence[Sample]) -> str:
    """Return SVG charts of the counters over time: rates as lines, sums as bars."""
    try:
        from matplotlib import dates, rc_context, ticker
        from matplotlib.figure import Figure
    except ImportError as exn:
        raise ConfigError(
            "The charts need matplotlib: pip install 'shardcache[report]'. `shardcache stats "
            "--json` prints the figures without it."
        ) from exn
    # Choose the shortest intervals with which at most `_INTERVALS` cover the period.
    starts = [sample.start for sample in samples]
    span = max(starts) - min(starts)
    step = next((step for step in _STEPS if span / step <= _INTERVALS), _STEPS[-1])
    groups = defaultdict[int, list[Sample]](list)
    for sample in sorted(samples, key=lambda sample: sample.start):
        groups[sample.start // step * step].append(sample)
    sums = [*map(summed, groups.values())]
    charts: dict[str, tuple[str, dict[str, list[Any]]]] = {}
    if any(each.opens for each in sums):
        rates = [math.nan if each.hit_rate is None else 100 * each.hit_rate for each in sums]
        charts["Hit rate"] = "%", {"hits": rates}
    for title, unit, names in _SUMS:
        series = {label: [getattr(each, name) for each in sums] for label, name in names.items()}
        if any(map(any, series.values())):
            charts[title] = unit, series
    zone, drawings = datetime.now().astimezone().tzinfo, list[str]()
    x, width = [dates.date2num(utc(start)) for start in groups], step / 86400
    size = 3 if len(x) > 1 else 9  # points; a single point has no line that would show it
    for title, (unit, series) in charts.items():
        with rc_context(_STYLE):
            figure = Figure(layout="constrained")
            axes, below = figure.subplots(), [0.0] * len(x)
            for (name, values), color in zip(series.items(), _COLORS, strict=False):
                if unit == "%":
                    axes.plot(x, values, "o-", markersize=size, label=name, color=color)
                elif any(values):  # each name keeps its colour
                    axes.bar(x, values, 0.8 * width, below, label=name, color=color)
                    below = [a + b for a, b in zip(below, values, strict=True)]
            steps = ticker.MaxNLocator(4, steps=[1, 2, 5, 10], integer=True)
            labels = range(0, 101, 20) if unit == "%" else steps.tick_values(0, max(below))
            axes.set_yticks(labels)
            axes.set_ylim(0, labels[-1] * 1.02)  # just above the last label, which no bar exceeds
            axes.yaxis.set_major_formatter(functools.partial(_label, unit))
            axes.set_xlim(x[0] - width, x[-1] + width)
            locator = dates.AutoDateLocator(tz=zone, minticks=min(3, len(x)), maxticks=6)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone))
            axes.set_title(title, pad=20 if len(series) > 1 else 6)
            if len(series) > 1:
                axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(series))
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
        drawings.append(text.getvalue()[text.getvalue().index("<svg") :])
    return "\n".join(drawings)


def _label(unit: str, value: float, position: int | None) -> str:
    """Return a label of an axis, with the units of the rest of the page."""
    return format_bytes(value).replace(".0 ", " ") if unit == "B" else f"{value:,.0f}{unit}"
