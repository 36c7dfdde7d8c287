"""``shardcache report``: what the cache has done, as one page to send around.

The page is the template ``report.html`` with charts that matplotlib draws (the extra
``report``). It needs no scripts and nothing from elsewhere, and is readable on a phone, light and
dark.
"""

from __future__ import annotations

import html
import io
import os
import string
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import click

from shardcache.cli.main import Invocation, command, since_option
from shardcache.cli.output import percentage, short_duration
from shardcache.cli.top import TierUse, tier_uses
from shardcache.clock import utc
from shardcache.config import __version__, describe
from shardcache.errors import ConfigError
from shardcache.stats.database import Fetch, Sample, fetches
from shardcache.stats.summary import OUTCOMES, Stats, by_rank, rank_records, summed
from shardcache.units import format_bytes

#: Seconds of an interval of the charts, and how many there are at most.
_STEPS = (60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
_INTERVALS = 100
#: Shards in the table of those that were fetched more than once.
_MOST_SHARDS = 20
#: Readable on white and on black. Only what failed is red.
_COLORS = ("#3b82c4", "#d97706", "#8b5cf6", "#0d9488", "#64748b", "#dc2626")
_GREY = "#80868e"


@dataclass(frozen=True, slots=True)
class _Report:
    """What the page is made of; a setting has a name, a value, and where it comes from."""

    node: str
    made: float
    samples: Sequence[Sample]
    fetches: Sequence[Fetch]
    tiers: Sequence[TierUse]
    settings: Sequence[tuple[str, str, str]]


@command(
    "report",
    short="Write a page of charts.",
    examples="""
        shardcache report
        shardcache report --since 24h -o /var/www/html/shardcache.html
        shardcache report --json
    """,
)
@since_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("shardcache-report.html"),
    metavar="FILE",
    help="Where to.  [default: shardcache-report.html]",
)
def report_command(invocation: Invocation, since: float | None, output: Path) -> int:
    """Write one HTML file: hit rate over time, bytes from cache and origin, waits, evictions.

    It needs no scripts and nothing from elsewhere, and can be sent around. The charts need the
    extra shardcache[report]. With --json the same figures are printed and no file is written.
    """
    loaded = invocation.loaded()
    cache = invocation.cache(looking=True)
    with cache:
        settings = [
            (setting.name, setting.value, setting.source)
            for setting in describe(loaded)
            if setting.source != "default"
        ]
        then = 0.0 if since is None else time.time() - since
        report = _Report(
            node=os.uname().nodename,
            made=time.time(),
            samples=cache.samples(since),
            fetches=list(fetches(cache.node_layout, then)),
            tiers=tier_uses(cache),
            settings=settings,
        )
    console = invocation.console
    if not console.human:
        console.record("report", _record(report), "")
        return 0
    text = _page(report).encode()
    output.write_bytes(text)
    console.said(f"wrote {output}, {format_bytes(len(text))}")
    return 0


def _record(report: _Report) -> dict[str, Any]:
    """Everything that the page shows, for JSON."""
    times, sums = _over_time(report.samples)
    occupied = _occupied(report, sums)
    return {
        "node": report.node,
        "at": utc(report.made),
        "total": summed(report.samples).as_dict(),
        "over_time": [
            {"at": utc(start), **found.as_dict(), "cached_bytes": cached}
            for start, found, cached in zip(times, sums, occupied, strict=True)
        ],
        "cached_bytes": sum(tier.bytes for tier in report.tiers),
        "ranks": rank_records(by_rank(report.samples)),
        "refetched": [
            {"url": url, "fetches": count, "bytes": size}
            for url, count, size in _refetched(report.fetches)
        ],
        "tiers": list(report.tiers),
        "settings": [
            {"option": name, "value": value, "source": source}
            for name, value, source in report.settings
        ],
    }


def _over_time(samples: Sequence[Sample]) -> tuple[list[float], list[Stats]]:
    """Beginnings of intervals, without gaps, and what was counted in each."""
    if not samples:
        return [], []
    first = min(sample.start for sample in samples)
    last = max(sample.start for sample in samples)
    fine = max(sample.seconds for sample in samples)
    fits = (s for s in _STEPS if s >= fine and (last - first) / s <= _INTERVALS)
    step = next(fits, _STEPS[-1])
    groups: dict[int, list[Sample]] = {
        start: [] for start in range(first // step * step, last + 1, step)
    }
    for sample in samples:
        groups[sample.start // step * step].append(sample)
    return [float(start) for start in groups], [summed(group) for group in groups.values()]


def _occupied(report: _Report, sums: Sequence[Stats]) -> list[int]:
    """Bytes in the cache at the end of each interval, reckoned back from what is there now.

    What went without being counted (damaged, removed by hand) is missing from what was before.
    """
    found = [sum(tier.bytes for tier in report.tiers)] * len(sums)
    for number in reversed(range(len(sums) - 1)):
        after = sums[number + 1]
        found[number] = max(0, found[number + 1] - after.bytes_stored + after.bytes_evicted)
    return found


def _refetched(fetches: Iterable[Fetch]) -> list[tuple[str, int, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for fetch in fetches:
        counts[fetch.url] += 1
        sizes[fetch.url] += fetch.size
    found = [(url, count, sizes[url]) for url, count in counts.items() if count > 1]
    return sorted(found, key=lambda row: (-row[1], -row[2], row[0]))[:_MOST_SHARDS]


# -- the page ------------------------------------------------------------------------------


def _page(report: _Report) -> str:
    total, ranks = summed(report.samples), by_rank(report.samples)
    again, shards = _refetched(report.fetches), len({fetch.url for fetch in report.fetches})
    fields = {
        "node": html.escape(report.node),
        "version": __version__,
        "made": f"{datetime.fromtimestamp(report.made).astimezone():%Y-%m-%d %H:%M %Z}",
        "span": "Nothing was counted",
        "cards": "".join(
            f'<div class="card"><b>{html.escape(value)}</b>{name}</div>'
            for name, value in _cards(total).items()
        ),
        "charts": _charts(report),
        "waits": _waits(total),
        "tiers": "".join(map(_tier, report.tiers)) or "<p>Nothing is cached.</p>",
        "evicted": _evicted(total),
        "ranks": _ranks(ranks) if len(ranks) > 1 else "",
        "refetched": f"<p>None of {shards:,} shards.</p>",
        "settings": _table(("option", "value", "set by"), report.settings),
    }
    if total.since is not None and total.until is not None:
        first, last = (datetime.fromtimestamp(t).astimezone() for t in (total.since, total.until))
        fields["span"] = f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"
    if again:
        rows = [(url, f"{count:,}", format_bytes(size)) for url, count, size in again]
        fields["refetched"] = _table(("shard", "fetches", "bytes"), rows)
    template = resources.files("shardcache.cli") / "templates" / "report.html"
    return string.Template(template.read_text("utf-8")).substitute(fields)


def _cards(total: Stats) -> dict[str, str]:
    return {
        "hits": percentage(total.hit_rate),
        "opens": f"{total.opens:,}",
        "read through the cache": format_bytes(total.bytes_opened),
        "fetched": format_bytes(total.bytes_origin),
        "saved": format_bytes(total.bytes_saved),
        "99 % waited less": short_duration(total.all_waits.percentile(0.99)),
        "evicted": f"{total.evicted:,}",
        "errors": f"{total.errors:,}",
    }


def _waits(total: Stats) -> str:
    what = {
        "disk": "for the disk (hits)",
        "lock": "for another process's fetch",
        "network": "for its own fetch",
    }
    rows = [
        (text, f"{found.count:,}", *(short_duration(found.percentile(p)) for p in (0.5, 0.9, 0.99)))
        for text, found in ((text, total.waits[wait]) for wait, text in what.items())
    ]
    return _table(("waited", "times", "p50", "p90", "p99"), rows)


def _tier(tier: TierUse) -> str:
    size = tier.max_size
    limit = "no limit but free space" if size is None else f"of {format_bytes(size)}"
    share = f" ({tier.bytes / size:.0%})" if size else ""
    text = f"{tier.dir}: {tier.shards:,} shards, {format_bytes(tier.bytes)} {limit}{share}"
    return f"<p>{html.escape(text)}</p>"


def _evicted(total: Stats) -> str:
    rows = [
        (name.removeprefix("evicted_"), f"{count:,}")
        for name, count in total.counters.items()
        if name.startswith("evicted_") and count
    ]
    if not rows:
        return "<p>Nothing.</p>"
    rows.append(("together", f"{total.evicted:,}, {format_bytes(total.bytes_evicted)}"))
    return _table(("reason", "entries"), rows)


def _ranks(ranks: Mapping[str, Stats]) -> str:
    rows = [
        (
            rank,
            f"{found.opens:,}",
            percentage(found.hit_rate),
            format_bytes(found.bytes_origin),
            short_duration(found.all_waits.percentile(0.99)),
        )
        for rank, found in ranks.items()
    ]
    return f"<h2>By rank</h2>{_table(('rank', 'opens', 'hits', 'fetched', 'wait p99'), rows)}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


# -- charts --------------------------------------------------------------------------------


def _charts(report: _Report) -> str:
    times, sums = _over_time(report.samples)
    if not times:
        return ""
    outcomes = {
        name: [float(found.counters[name]) for found in sums]
        for name in OUTCOMES
        if any(found.counters[name] for found in sums)
    }
    sources = {
        "cache": [float(found.bytes_saved) for found in sums],
        "origin": [float(found.bytes_origin) for found in sums],
        "upstreams": [float(found.bytes_upstream) for found in sums],
    }
    if not any(sources["upstreams"]):
        del sources["upstreams"]
    rates = [float("nan") if s.hit_rate is None else 100 * s.hit_rate for s in sums]
    evicted = [float(found.bytes_evicted) for found in sums]
    limits = [tier.max_size or 0 for tier in report.tiers]
    occupied = {"cached": [float(size) for size in _occupied(report, sums)]}
    charts = [
        ("Hit rate", _chart(times, {"hits": rates}, "%", limit=100.0)),
        ("Opens", _chart(times, outcomes, "", stacked=True)),
        ("Where bytes came from", _chart(times, sources, "B", stacked=True)),
        (
            "Bytes in the cache",
            _chart(times, occupied, "B", limit=sum(limits) if all(limits) else 0),
        ),
    ]
    if any(evicted):
        charts.append(("Bytes evicted", _chart(times, {"evicted": evicted}, "B", stacked=True)))
    return "\n".join(f"<h2>{title}</h2>{drawn}" for title, drawn in charts)


def _chart(
    times: Sequence[float],
    series: Mapping[str, Sequence[float]],
    unit: str,
    *,
    stacked: bool = False,
    limit: float = 0.0,
) -> str:
    """Draw lines, or bars that stand on each other, as SVG.

    Args:
        times: seconds since the epoch.
        series: a value for each time, by name.
        unit: of the values.
        stacked: draw bars.
        limit: draw a line there, unless it is more than twice as high as the highest value.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import dates, rcParams, ticker
        from matplotlib.figure import Figure
    except ImportError as exn:
        raise ConfigError(
            "The charts need matplotlib: pip install 'shardcache[report]'. `shardcache report "
            "--json` works without."
        ) from exn
    rcParams["svg.hashsalt"] = "shardcache"  # the same page for the same figures
    figure = Figure(figsize=(8.4, 2.3), layout="constrained")
    axes = figure.subplots()
    x = [dates.date2num(utc(t)) for t in times]
    width = (x[1] - x[0]) * 0.8 if len(x) > 1 else 60 / 86400
    below = [0.0] * len(x)
    for (name, values), color in zip(series.items(), _COLORS, strict=False):
        if stacked:
            axes.bar(x, values, width, below, label=name, color=color, align="edge")
            below = [a + b for a, b in zip(below, values, strict=True)]
        else:
            axes.plot(x, values, marker=".", label=name, color=color)
    highest = max((v for values in series.values() for v in values if v == v), default=0.0)
    if limit and limit <= 2 * highest:
        axes.axhline(limit, color=_GREY, linestyle=":", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(
        ticker.PercentFormatter(decimals=0) if unit == "%" else ticker.EngFormatter(unit=unit)
    )
    axes.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=unit != "%"))
    zone = datetime.now().astimezone().tzinfo
    locator = dates.AutoDateLocator(tz=zone)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator, tz=zone))
    axes.tick_params(colors=_GREY, labelsize=8)
    axes.grid(axis="y", color=_GREY, alpha=0.25, linewidth=0.6)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(series) > 1:
        legend = figure.legend(loc="outside upper left", ncols=6, frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_color(_GREY)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]
