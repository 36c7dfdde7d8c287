"""``shardcache stats`` and ``report``: what the cache has done, as text and as a page.

The page is the template ``report.html`` with charts that matplotlib draws (the extra ``report``).
It needs no scripts and nothing from elsewhere, and is readable on a phone, light and dark.
"""

from __future__ import annotations

import html
import io
import math
import os
import string
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from shardcache.cli.entries import Row, held, tiers
from shardcache.cli.main import Invocation, command, flag, since_option
from shardcache.cli.output import Console, counted, local_time, percentage, short_duration
from shardcache.clock import utc
from shardcache.config import __version__
from shardcache.errors import ConfigError
from shardcache.stats import database
from shardcache.stats.database import Sample
from shardcache.stats.metrics import exposition
from shardcache.stats.summary import OUTCOMES, Stats, Waits, by_hour, by_rank, rank_records, summed
from shardcache.sync import atomic_write
from shardcache.units import format_bytes, format_rate

#: Seconds of an interval of the charts, and how many there are at most.
_STEPS = (60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
_INTERVALS = 100
#: Readable on white and on black. Only what failed is red.
_COLORS = ("#3b82c4", "#d97706", "#8b5cf6", "#0d9488", "#64748b", "#dc2626")
_GREY = "#80868e"
#: Shown even if there were none.
_ALWAYS = ("hits", "coalesced", "misses")
ROW_TITLES = ("OPENS", "HIT RATE", "BYPASSED", "STREAMED", "FETCHED", "SAVED", "WAIT P99")
_WAITS = {"disk": "for the disk", "lock": "for others", "network": "for the network"}


@command("stats")
@since_option
@click.option("--by", type=click.Choice(["rank", "hour"]), help="One row for each.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["prometheus"]),
    help="Print for the textfile collector of Prometheus' node exporter.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --format: write there, all at once.",
)
@flag("--zero", help="Begin to count anew.")
def stats_command(
    invocation: Invocation,
    since: float | None,
    by: str | None,
    form: str | None,
    output: Path | None,
    zero: bool,
) -> None:
    """Show hits, bytes and waits of all processes of this node.

    A hit found the shard; a coalesced open waited for a fetch that somebody else had begun; a
    miss was fetched; a bypass was streamed and not stored. Bytes are counted as they are read.
    Minutes are kept for two hours, hours for 30 days.

    \b
    Examples:
      shardcache stats --since 24h --by hour
      shardcache stats --by rank --json
      shardcache stats --format prometheus -o /var/lib/node_exporter/shardcache.prom
    """
    console = invocation.console
    if zero and (since is not None or by or form):
        raise click.UsageError("--zero goes with nothing else.")
    if output is not None and not form:
        raise click.UsageError("-o goes with --format prometheus.")
    if form and (since is not None or by or console.json):
        raise click.UsageError("--format prometheus prints everything; Prometheus selects.")
    with invocation.cache() as cache:
        if zero:
            process = cache.processes.here()
            process.counters.flush()
            database.zero(process.home.node)
            console.object("stats", zeroed=True)
            console.info("counting anew")
        elif form:
            text = exposition(summed(cache.samples(ever=True)), str(cache.dir))
            if output is None:
                console.data(text.rstrip())
            else:
                _write(output, text)
        elif by is not None:
            _print_rows(console, cache.samples(since), by)
        else:
            found = cache.stats(since)
            console.object("stats", found)
            console.data(figures(found))


def _write(path: Path, text: str) -> None:
    """Write a file all at once, so that nobody reads half of it."""
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_text(text, "utf-8")
            return
        with atomic_write(path, "w", sync=False) as file:
            file.write(text)
    except OSError as exn:  # it names the temporary file, or none
        raise OSError(exn.errno, exn.strerror, str(path)) from exn


def figures(found: Stats) -> str:
    """All figures as lines."""
    if not found.opens and not found.fetches:
        return "Nothing was counted."
    lines = [f"Opens         {found.opens:>13,}"]
    for name in OUTCOMES:
        if (count := found.counters[name]) or name in _ALWAYS:
            share = count / found.opens if found.opens else 0.0
            lines.append(f"  {name.capitalize():<12}{count:>13,} / {found.opens:,} ({share:6.2%})")
    streamed = upstream = ""
    if found.bypassed:
        shards = counted(found.bypassed, "shard")
        streamed = f"    Streamed {format_bytes(found.bytes_bypassed)} ({shards})"
    if found.bytes_upstream:
        upstream = f"    From upstreams {format_bytes(found.bytes_upstream)}"
    lines.append(
        f"Read from cache {format_bytes(found.bytes_opened)}    "
        f"Fetched {format_bytes(found.bytes_fetched)}{streamed}{upstream}    "
        f"Saved {format_bytes(found.bytes_saved)} of egress"
    )
    if tiers := _each(found, "hits_tier_", "tier {} {:,}"):
        lines.append("Hits by tier  " + "   ".join(tiers))
    lines.append(f"Wait for data   {_percentiles(found.all_waits)}")
    for wait, text in _WAITS.items():
        if found.waits[wait].count:
            lines.append(f"  {text:<18}{_percentiles(found.waits[wait])}")
    evicted, errors = f"Evicted {found.evicted:,}", f"Errors {found.errors:,}"
    if reasons := _each(found, "evicted_", "{1:,} {0}"):
        evicted += f" ({format_bytes(found.bytes_evicted)}: {', '.join(reasons)})"
    if kinds := _each(found, "errors_", "{1:,} {0}"):
        errors += f" ({', '.join(kinds)})"
    lines.append(f"{evicted}    Retries {found.retries:,}    {errors}")
    return "\n".join(lines)


def _each(found: Stats, prefix: str, form: str) -> list[str]:
    """The counters above 0 whose names begin with ``prefix``, by the rest of the name."""
    names = [name for name, n in found.counters.items() if n and name.startswith(prefix)]
    return [form.format(name.removeprefix(prefix), found.counters[name]) for name in names]


def _percentiles(waits: Waits) -> str:
    p50, p99 = waits.percentile(0.5), waits.percentile(0.99)
    return f"p50 {short_duration(p50)}  p99 {short_duration(p99)}" if waits.count else "none"


def _print_rows(console: Console, samples: Sequence[Sample], by: str) -> None:
    total = summed(samples)
    if by == "rank":
        groups = by_rank(samples)
        records = rank_records(groups)
    else:
        hours = {utc(hour): found for hour, found in by_hour(samples).items()}
        records = [{"hour": hour, **found.as_dict()} for hour, found in hours.items()]
        groups = {local_time(hour): found for hour, found in hours.items()}
    console.object("stats", **{f"{by}s": records}, summary=total)
    rows = ((name, *cells(found)) for name, found in groups.items())
    console.table([by.upper(), *ROW_TITLES], rows, ROW_TITLES)
    console.data(f"{counted(total.opens, 'open')}, {percentage(total.hit_rate, 2)} hits")


def cells(found: Stats, seconds: float | None = None) -> list[str]:
    """The cells under `ROW_TITLES`; with ``seconds`` they are per second."""

    def number(n: int) -> str:
        return f"{n:,}" if seconds is None else f"{n / seconds:,.1f}/s"

    def size(n: int) -> str:
        return format_bytes(n) if seconds is None else format_rate(n / seconds)

    return [
        number(found.opens),
        percentage(found.hit_rate, 2),
        number(found.bypassed),
        size(found.bytes_bypassed),
        size(found.bytes_fetched),
        size(found.bytes_saved),
        short_duration(found.all_waits.percentile(0.99)),
    ]


# -- report ----------------------------------------------------------------------


@command("report")
@since_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("shardcache-report.html"),
    metavar="FILE",
    help="Where to.  [default: shardcache-report.html]",
)
def report_command(invocation: Invocation, since: float | None, output: Path) -> None:
    """Write a page of charts: one HTML file.

    Hit rate over time, bytes from cache and origin, waits, evictions. It needs no scripts and
    nothing from elsewhere, and can be sent around. The charts need the extra shardcache[report];
    `stats --json` has the same figures.

    \b
    Examples:
      shardcache report
      shardcache report --since 24h -o /var/www/html/shardcache.html
    """
    with invocation.cache(loaded=invocation.upkeep()) as cache:
        samples, gauges = cache.samples(since), map(_meter, tiers(cache, cache.config))
        total = summed(samples)
        span = "Nothing was counted"
        if total.since is not None and total.until is not None:
            span = f"{local_time(utc(total.since))} to {local_time(utc(total.until))}"
        rows = [(rank, *cells(found)) for rank, found in by_rank(samples).items()]
        template = Path(__file__).parent / "templates" / "report.html"
        text = string.Template(template.read_text("utf-8")).substitute(
            node=html.escape(os.uname().nodename),
            version=__version__,
            made=local_time(utc(time.time())),
            span=span,
            tiers="\n".join(gauges),
            figures=html.escape(figures(total)),
            charts=_charts(samples) if samples else "",
            ranks="\n".join(
                f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in line)}</tr>"
                for line in (("RANK", *ROW_TITLES), *rows)
            ),
        )
    _write(output, text)
    size, console = len(text.encode()), invocation.console
    console.object("report", path=output, size=size)
    console.info(f"wrote {output}, {format_bytes(size)}")


def _meter(tier: Row) -> str:
    """How full a tier is, as HTML."""
    used, most = tier["disk_bytes"], tier["max_size"]
    text = f"{tier['dir']}: {held(tier)}"
    if not most:
        return f"<p>{html.escape(text)}</p>"
    text += f" ({used / most:.0%})"
    return f'<p>{html.escape(text)} <meter max="{most}" value="{used}"></meter></p>'


def _charts(samples: Sequence[Sample]) -> str:
    """Draw what was counted over time, as SVG: rates as a line, sums as bars."""
    try:
        from matplotlib import dates, rcParams, ticker
        from matplotlib.figure import Figure
    except ImportError as exn:
        raise ConfigError(
            "The charts need matplotlib: pip install 'shardcache[report]'. `shardcache stats "
            "--json` works without."
        ) from exn
    # The finest intervals that fit the page.
    starts = [sample.start for sample in samples]
    fine, span = max(sample.seconds for sample in samples), max(starts) - min(starts)
    step = next((s for s in _STEPS if s >= fine and span / s <= _INTERVALS), _STEPS[-1])
    groups = defaultdict[int, list[Sample]](list)
    for sample in sorted(samples, key=lambda sample: sample.start):
        groups[sample.start // step * step].append(sample)
    sums = [*map(summed, groups.values())]
    rates = [math.nan if each.hit_rate is None else 100 * each.hit_rate for each in sums]
    sources = {"cache": "bytes_saved", "origin": "bytes_origin", "upstreams": "bytes_upstream"}
    charts: dict[str, tuple[str, dict[str, list[Any]]]] = {}
    if any(each.opens for each in sums):
        charts["Hit rate"] = "%", {"hits": rates}
    for title, unit, names in (
        ("Opens", "", {name: name for name in OUTCOMES}),
        ("Where bytes came from", "B", sources),
        ("Bytes streamed past the cache", "B", {"streamed": "bytes_bypassed"}),
        ("Bytes evicted", "B", {"evicted": "bytes_evicted"}),
    ):
        found = {label: [getattr(each, name) for each in sums] for label, name in names.items()}
        if any(map(any, found.values())):
            charts[title] = unit, found
    rcParams["svg.hashsalt"] = "shardcache"  # the same page for the same figures
    rcParams["svg.fonttype"] = "none"  # text, in the fonts of the page
    zone, drawings = datetime.now().astimezone().tzinfo, list[str]()
    x, width = [dates.date2num(utc(start)) for start in groups], step / 86400
    for title, (unit, series) in charts.items():
        figure = Figure(figsize=(4.8, 2.4), layout="constrained")  # inches; legible on a phone
        axes, below = figure.subplots(), [0.0] * len(x)
        for (name, values), color in zip(series.items(), _COLORS, strict=False):
            if unit == "%":
                axes.plot(x, values, marker=".", label=name, color=color)
            elif any(values):  # the others keep their colours
                axes.bar(x, values, 0.8 * width, below, label=name, color=color)
                below = [a + b for a, b in zip(below, values, strict=True)]
        axes.set_title(
            title, loc="left", color=_GREY, fontsize=11, pad=20 if len(series) > 1 else 6
        )
        steps = ticker.MaxNLocator(4, steps=[1, 2, 5, 10], integer=True)
        labels = range(0, 101, 20) if unit == "%" else steps.tick_values(0, max(below))
        axes.set_yticks(labels)
        axes.set_ylim(0, labels[-1] * 1.02)  # no bar is higher than the last label
        axes.yaxis.set_major_formatter(ticker.EngFormatter(unit=unit))
        axes.set_xlim(x[0] - width, x[-1] + width)
        locator = dates.AutoDateLocator(tz=zone, minticks=min(3, len(x)), maxticks=6)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone))
        axes.tick_params(colors=_GREY, labelsize=9)
        axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        if len(series) > 1:
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(0, 1),
                ncols=len(series),
                frameon=False,
                fontsize=8,
                labelcolor=_GREY,
                handlelength=0.7,
                columnspacing=0.9,
                borderaxespad=0,
                borderpad=0.2,
            )
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        drawings.append(drawn.getvalue()[drawn.getvalue().index("<svg") :])
    return "\n".join(drawings)
