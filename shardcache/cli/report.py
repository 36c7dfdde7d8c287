"""``shardcache report``: what the cache has done, as one page to send around.

The page is the template ``report.html`` with charts that matplotlib draws (the extra ``report``).
It needs no scripts and nothing from elsewhere, and is readable on a phone, light and dark.
"""

from __future__ import annotations

import functools
import html
import io
import math
import os
import string
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path

import click

from shardcache.cli.main import Invocation, command, since_option
from shardcache.cli.output import percentage, short_duration
from shardcache.cli.stats import ROW_TITLES, figures, row
from shardcache.cli.top import TierUse, tier_uses
from shardcache.clock import utc
from shardcache.config import __version__, describe
from shardcache.errors import ConfigError
from shardcache.stats.database import Sample
from shardcache.stats.summary import OUTCOMES, Stats, by_rank, rank_records, summed
from shardcache.units import format_bytes

#: Seconds of an interval of the charts, and how many there are at most.
_STEPS = (60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
_INTERVALS = 100
#: Readable on white and on black. Only what failed is red.
_COLORS = ("#3b82c4", "#d97706", "#8b5cf6", "#0d9488", "#64748b", "#dc2626")
_GREY = "#80868e"


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
    nothing from elsewhere, and can be sent around. The charts need the extra shardcache[report].
    With --json the same figures are printed and no file is written.

    \b
    Examples:
      shardcache report
      shardcache report --since 24h -o /var/www/html/shardcache.html
      shardcache report --json
    """
    console, settings = invocation.console, describe(invocation.loaded())
    settings = tuple(setting for setting in settings if setting.source != "default")
    with invocation.cache(existing=True) as cache:
        samples, tiers = cache.samples(since), tier_uses(cache)
    total, over_time, ranks = summed(samples), _over_time(samples), by_rank(samples)
    if console.json:
        console.object(
            "report",
            node=os.uname().nodename,
            at=utc(time.time()),
            total=total,
            over_time=[{"at": utc(at), **found.as_dict()} for at, found in over_time.items()],
            cached_bytes=sum(tier.bytes for tier in tiers),
            ranks=rank_records(ranks),
            tiers=tiers,
            settings=settings,
        )
        return
    span = "Nothing was counted"
    if total.since is not None and total.until is not None:
        span = f"{_local(total.since)} to {_local(total.until)}"
    template = resources.files("shardcache.cli") / "templates" / "report.html"
    text = string.Template(template.read_text("utf-8")).substitute(
        node=html.escape(os.uname().nodename),
        version=__version__,
        made=_local(time.time()),
        span=span,
        hits=percentage(total.hit_rate),
        opens=f"{total.opens:,}",
        read=format_bytes(total.bytes_opened),
        fetched=format_bytes(total.bytes_origin),
        saved=format_bytes(total.bytes_saved),
        wait=short_duration(total.all_waits.percentile(0.99)),
        evictions=f"{total.evicted:,}",
        errors=f"{total.errors:,}",
        charts=_charts(over_time),
        figures=html.escape(figures(total)),
        tiers="".join(map(_tier, tiers)),
        ranks=_table(("RANK", *ROW_TITLES), ((rank, *row(found)) for rank, found in ranks.items())),
        settings=_table(
            ("option", "value", "set by"), [(s.name, s.value, s.source) for s in settings]
        ),
    )
    size = output.write_bytes(text.encode())
    console.info(f"wrote {output}, {format_bytes(size)}")


def _over_time(samples: Sequence[Sample]) -> dict[float, Stats]:
    """A sum for each interval, by its start; the finest intervals that fit the page."""
    if not samples:
        return {}
    first = min(sample.start for sample in samples)
    last = max(sample.start for sample in samples)
    fine = max(sample.seconds for sample in samples)
    fits = (s for s in _STEPS if s >= fine and (last - first) / s <= _INTERVALS)
    step = next(fits, _STEPS[-1])
    groups: dict[float, list[Sample]] = {
        start: [] for start in range(first // step * step, last + 1, step)
    }
    for sample in samples:
        groups[sample.start // step * step].append(sample)
    return {start: summed(group) for start, group in groups.items()}


def _local(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M %Z}"


def _tier(tier: TierUse) -> str:
    size = tier.max_size
    limit = f"of {format_bytes(size)} ({tier.bytes / size:.0%})" if size else "no limit"
    text = f"{tier.dir}: {tier.shards:,} shards, {format_bytes(tier.bytes)} {limit}"
    return f"<p>{html.escape(text)}</p>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>' if body else ""


# -- charts --------------------------------------------------------------------------------


def _charts(over_time: Mapping[float, Stats]) -> str:
    if not over_time:
        return ""

    def series(**names: str) -> dict[str, list[float]]:
        found = {
            label: [float(getattr(each, name)) for each in over_time.values()]
            for label, name in names.items()
        }
        return {label: values for label, values in found.items() if any(values)}

    rates = [math.nan if s.hit_rate is None else 100 * s.hit_rate for s in over_time.values()]
    sources = series(cache="bytes_saved", origin="bytes_origin", upstreams="bytes_upstream")
    outcomes = series(**{name: name for name in OUTCOMES})
    evicted = series(evicted="bytes_evicted")
    chart = functools.partial(_chart, [*over_time])
    charts = {
        "Hit rate": chart({"hits": rates}, "%"),
        "Opens": chart(outcomes, ""),
        "Where bytes came from": chart(sources, "B"),
        "Bytes evicted": chart(evicted, "B"),
    }
    return "\n".join(f"<h2>{title}</h2>{drawn}" for title, drawn in charts.items() if drawn)


def _chart(times: Sequence[float], series: Mapping[str, Sequence[float]], unit: str) -> str:
    """Draw lines for ``%``, else bars that stand on each other, as SVG; without series nothing."""
    try:
        from matplotlib import dates, rcParams, ticker
        from matplotlib.figure import Figure
    except ImportError as exn:
        raise ConfigError(
            "The charts need matplotlib: pip install 'shardcache[report]'. `shardcache report "
            "--json` works without."
        ) from exn
    if not series:
        return ""
    rcParams["svg.hashsalt"] = "shardcache"  # the same page for the same figures
    figure = Figure(figsize=(8.4, 2.3), layout="constrained")
    axes = figure.subplots()
    x = [dates.date2num(utc(t)) for t in times]
    width = (x[1] - x[0]) * 0.8 if len(x) > 1 else 60 / 86400
    below = [0.0] * len(x)
    for (name, values), color in zip(series.items(), _COLORS, strict=False):
        if unit != "%":
            axes.bar(x, values, width, below, label=name, color=color, align="edge")
            below = [a + b for a, b in zip(below, values, strict=True)]
        else:
            axes.plot(x, values, marker=".", label=name, color=color)
    axes.set_ylim(0, 105 if unit == "%" else None)
    percent, plain = ticker.PercentFormatter(decimals=0), ticker.EngFormatter(unit=unit)
    axes.yaxis.set_major_formatter(percent if unit == "%" else plain)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=unit != "%"))
    zone = datetime.now().astimezone().tzinfo
    locator = dates.AutoDateLocator(tz=zone)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone))
    axes.tick_params(colors=_GREY, labelsize=8)
    axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.6)
    axes.spines[:].set_visible(False)
    if len(series) > 1:
        figure.legend(
            loc="outside upper left", ncols=6, frameon=False, fontsize=8, labelcolor=_GREY
        )
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]
