"""``shardcache report``: a page of charts.

The page is the template ``report.html`` with charts by matplotlib (the extra ``report``). It needs
no scripts and no other files, and is readable on a phone, and in light and dark mode.
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

from shardcache.cli.contents import Row, fill_text, tiers
from shardcache.cli.main import Invocation, command, since_option
from shardcache.cli.output import local_time
from shardcache.cli.stats import ROW_TITLES, cells, figures, write_text
from shardcache.clock import utc
from shardcache.config import __version__
from shardcache.errors import ConfigError
from shardcache.stats.database import Sample
from shardcache.stats.summary import OUTCOMES, by_rank, summed
from shardcache.units import format_bytes

#: Lengths of the intervals of a chart in seconds, and their maximum number.
_STEPS = (60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
_INTERVALS = 100
#: Readable on white and on black. Red is for errors only.
_COLORS = ("#3b82c4", "#d97706", "#8b5cf6", "#0d9488", "#64748b", "#dc2626")
_GREY = "#80868e"
#: Title, unit, and counters by label of the charts of sums.
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
    "svg.hashsalt": "shardcache",  # equal figures make equal pages
    "svg.fonttype": "none",  # text stays text, in the fonts of the page
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


@command("report")
@since_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("shardcache-report.html"),
    metavar="FILE",
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
    with invocation.cache(loaded=invocation.loaded_with_job_limits()) as cache:
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
    write_text(output, text)
    size, console = len(text.encode()), invocation.console
    console.object("report", path=output, size=size)
    console.info(f"wrote {output}, {format_bytes(size)}")


def _meter(tier: Row) -> str:
    """Return how full a tier is, as HTML."""
    used, limit = tier["disk_bytes"], tier["max_size"]
    text = f"{tier['dir']}: {fill_text(tier)}"
    if not limit:
        return f"<p>{html.escape(text)}</p>"
    text += f" ({used / limit:.0%})"
    return f'<p>{html.escape(text)} <meter max="{limit}" value="{used}"></meter></p>'


def _charts(samples: Sequence[Sample]) -> str:
    """Draw the counters over time as SVG: rates as lines, sums as bars."""
    try:
        from matplotlib import dates, rc_context, ticker
        from matplotlib.figure import Figure
    except ImportError as exn:
        raise ConfigError(
            "The charts need matplotlib: pip install 'shardcache[report]'. `shardcache stats "
            "--json` prints the figures without it."
        ) from exn
    # Choose the shortest intervals that fit the page.
    starts = [sample.start for sample in samples]
    finest, span = max(sample.seconds for sample in samples), max(starts) - min(starts)
    step = next((s for s in _STEPS if s >= finest and span / s <= _INTERVALS), _STEPS[-1])
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
    for title, (unit, series) in charts.items():
        with rc_context(_STYLE):
            figure = Figure(layout="constrained")
            axes, below = figure.subplots(), [0.0] * len(x)
            for (name, values), color in zip(series.items(), _COLORS, strict=False):
                if unit == "%":
                    axes.plot(x, values, marker=".", label=name, color=color)
                elif any(values):  # each name keeps its colour
                    axes.bar(x, values, 0.8 * width, below, label=name, color=color)
                    below = [a + b for a, b in zip(below, values, strict=True)]
            steps = ticker.MaxNLocator(4, steps=[1, 2, 5, 10], integer=True)
            labels = range(0, 101, 20) if unit == "%" else steps.tick_values(0, max(below))
            axes.set_yticks(labels)
            axes.set_ylim(0, labels[-1] * 1.02)  # just above the last label, which no bar exceeds
            axes.yaxis.set_major_formatter(ticker.EngFormatter(unit=unit))
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
