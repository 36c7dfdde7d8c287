"""What a cache has done, as one page of HTML: no scripts, nothing from elsewhere.

It is readable on a phone, light and dark, and years later: all of it is in the one file.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from shardcache.cli.charts import Series, bars, gauge, line
from shardcache.cli.top import TierUse
from shardcache.clock import utc
from shardcache.stats.database import Fetch, Sample
from shardcache.stats.summary import OUTCOMES, Stats, by_rank, rank_records, summed
from shardcache.units import format_bytes, format_duration
from shardcache.version import __version__

__all__ = ["Report", "page"]

#: Intervals of charts, seconds; and how many bars there are at most.
_STEPS = (60, 300, 900, 3600, 4 * 3600, 86_400)
_BARS = 72
_MOST_SHARDS = 20
#: Only what failed is red.
_COLORS = dict(zip(OUTCOMES, (0, 1, 2, 3, 5, 4), strict=True))

_STYLE = """
:root{--bg:#fff;--fg:#1a1d21;--dim:#5c6570;--line:#dfe3e8;--card:#f6f8fa;
--s0:#2563a8;--s1:#d97706;--s2:#7c3aed;--s3:#0f766e;--s4:#b91c1c;--s5:#64748b}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e9ec;--dim:#9aa4af;--line:#2c3238;
--card:#1c2024;--s0:#60a5fa;--s1:#f59e0b;--s2:#a78bfa;--s3:#2dd4bf;--s4:#f87171;--s5:#94a3b8}}
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:880px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4em;margin:.2em 0}h2{font-size:1.05em;margin:2em 0 .5em}
p,.dim{color:var(--dim);margin:.2em 0}
.cards{display:grid;grid-template-columns:repeat(4,1fr);gap:10px;margin:1em 0}
.card{background:var(--card);border-radius:8px;padding:10px 12px}
.card b{display:block;font-size:1.35em;font-variant-numeric:tabular-nums}
svg{width:100%;height:auto;display:block}svg text{fill:var(--dim);font-size:11px}
.gauge{height:10px;border-radius:5px;margin:.3em 0}
.legend span{margin-right:14px;color:var(--dim)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left;white-space:normal;overflow-wrap:anywhere}
th{color:var(--dim);font-weight:500;overflow-wrap:normal!important}
@media(max-width:520px){.cards{grid-template-columns:1fr 1fr}svg text{font-size:19px}
th,td{padding:4px 6px}}
"""


@dataclass(frozen=True, slots=True)
class Report:
    """What the page is made of.

    Attributes:
        node: name of the machine.
        made: when, in seconds since the epoch.
        samples: what was counted.
        fetches: what was fetched.
        tiers: how full they are.
        settings: options that are set: name, value, where they come from.
    """

    node: str
    made: float
    samples: Sequence[Sample]
    fetches: Sequence[Fetch]
    tiers: Sequence[TierUse]
    settings: Sequence[tuple[str, str, str]]

    @property
    def cached_bytes(self) -> int:
        """Bytes in the cache, in all tiers together."""
        return sum(tier.bytes for tier in self.tiers)

    @property
    def room(self) -> int | None:
        """Bytes that may be in it; None where only free space limits them."""
        limits = [tier.max_size for tier in self.tiers]
        return sum(n for n in limits if n) if limits and all(limits) else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything that the page shows."""
        times, groups = _over_time(self.samples)
        sums = [summed(group) for group in groups]
        occupied = _occupied(self.cached_bytes, sums)
        return {
            "node": self.node,
            "at": utc(self.made),
            "total": summed(self.samples).as_dict(),
            "over_time": [
                {"at": utc(start), **found.as_dict(), "cached_bytes": cached}
                for start, found, cached in zip(times, sums, occupied, strict=True)
            ],
            "cached_bytes": self.cached_bytes,
            "ranks": rank_records(by_rank(self.samples)),
            "refetched": [
                {"url": url, "fetches": count, "bytes": size}
                for url, count, size in _refetched(self.fetches)
            ],
            "tiers": [asdict(tier) for tier in self.tiers],
            "settings": [
                {"option": name, "value": value, "source": source}
                for name, value, source in self.settings
            ],
        }


def page(report: Report) -> str:
    """The page."""
    total = summed(report.samples)
    made = datetime.fromtimestamp(report.made).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    parts = [
        f"<h1>shardcache on {html.escape(report.node)}</h1>",
        f"<p>{html.escape(_span(total))}; made {html.escape(made)} by shardcache {__version__}</p>",
        _cards(total),
        *_charts(report),
        "<h2>Waiting for data</h2>",
        _waits(total),
        "<h2>How full it is</h2>",
        "".join(_tier(tier) for tier in report.tiers) or "<p>Nothing is cached.</p>",
        "<h2>Evicted</h2>",
        _evicted(total),
    ]
    ranks = by_rank(report.samples)
    if len(ranks) > 1:
        parts += ["<h2>By rank</h2>", _by_rank(ranks)]
    parts += ["<h2>Fetched more than once</h2>", _shards(report.fetches)]
    parts += ["<h2>Configuration</h2>", _table(("option", "value", "set by"), report.settings)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>shardcache on {html.escape(report.node)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _span(total: Stats) -> str:
    if total.since is None or total.until is None:
        return "Nothing was counted"
    first, last = (datetime.fromtimestamp(t).astimezone() for t in (total.since, total.until))
    return f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M}"


def _cards(total: Stats) -> str:
    rate = "-" if total.hit_rate is None else f"{total.hit_rate:.1%}"
    p99 = total.all_waits.percentile(0.99)
    facts = [
        (rate, "hits"),
        (f"{total.opens:,}", "opens"),
        (format_bytes(total.counters["bytes_opened"]), "read through the cache"),
        (format_bytes(total.counters["bytes_origin"]), "fetched"),
        (format_bytes(total.bytes_saved), "saved"),
        ("-" if p99 is None else _short(p99), "99 % waited less"),
        (f"{total.evicted:,}", "evicted"),
        (f"{total.errors:,}", "errors"),
    ]
    cards = (f'<div class="card"><b>{html.escape(a)}</b>{html.escape(b)}</div>' for a, b in facts)
    return f'<div class="cards">{"".join(cards)}</div>'


def _charts(report: Report) -> list[str]:
    times, groups = _over_time(report.samples)
    if not times:
        return []
    sums = [summed(group) for group in groups]
    outcomes = [
        Series(name, _COLORS[name], [float(found.counters[name]) for found in sums])
        for name in OUTCOMES
        if any(found.counters[name] for found in sums)
    ]
    names = (("cache", "bytes_saved"), ("origin", "bytes_origin"), ("upstreams", "bytes_upstream"))
    sources = [
        Series(name, number, [float(found.as_dict()[key]) for found in sums])
        for number, (name, key) in enumerate(names)
        if number < 2 or any(found.counters["bytes_upstream"] for found in sums)
    ]
    return [
        "<h2>Hit rate</h2>",
        line("hit rate", times, [found.hit_rate for found in sums], lambda v: f"{v:.0%}"),
        "<h2>Opens</h2>",
        bars("opens", times, outcomes, lambda v: f"{v:,.0f}"),
        "<h2>Where bytes came from</h2>",
        bars("bytes by source", times, sources, format_bytes),
        *_occupancy(report, times, sums),
        *_evictions(times, sums),
    ]


def _occupied(now: int, sums: Sequence[Stats]) -> list[int]:
    """Bytes in the cache at the end of each interval, reckoned back from what is there now.

    What went without being counted (damaged, removed by hand) is missing from what was before.
    """
    found = [max(0, now)] * len(sums)
    for number in reversed(range(len(sums) - 1)):
        counted = sums[number + 1].counters
        before = found[number + 1] - counted["bytes_stored"] + counted["bytes_evicted"]
        found[number] = max(0, before)
    return found


def _occupancy(report: Report, times: Sequence[float], sums: Sequence[Stats]) -> list[str]:
    values = [float(n) for n in _occupied(report.cached_bytes, sums)]
    most = max(values)
    if not most:
        return []
    # A limit that is far away would make the line a flat one.
    room = report.room if report.room and report.room <= 2 * most else None
    top = max(most, room or 0) * 1.04
    return [
        "<h2>Bytes in the cache</h2>",
        line("bytes in the cache", times, values, format_bytes, top=top, limit=room),
    ]


def _evictions(times: Sequence[float], sums: Sequence[Stats]) -> list[str]:
    values = [float(found.counters["bytes_evicted"]) for found in sums]
    if not any(values):
        return []
    series = [Series("evicted", 4, values)]
    return ["<h2>Bytes evicted</h2>", bars("bytes evicted", times, series, format_bytes)]


def _over_time(samples: Sequence[Sample]) -> tuple[list[float], list[list[Sample]]]:
    """Beginnings of intervals, without gaps, and what was counted in each."""
    if not samples:
        return [], []
    first = min(sample.start for sample in samples)
    last = max(sample.start for sample in samples)
    fine = max(sample.seconds for sample in samples)
    step = next((s for s in _STEPS if s >= fine and (last - first) / s <= _BARS), _STEPS[-1])
    groups: dict[int, list[Sample]] = {
        start: [] for start in range(first // step * step, last + 1, step)
    }
    for sample in samples:
        groups[sample.start // step * step].append(sample)
    return [float(start) for start in groups], list(groups.values())


def _waits(total: Stats) -> str:
    what = {
        "disk": "for the disk (hits)",
        "lock": "for another process's fetch",
        "network": "for its own fetch",
    }
    rows = []
    for wait, text in what.items():
        found = total.waits[wait]
        marks = [found.percentile(share) for share in (0.5, 0.9, 0.99)]
        rows.append((text, f"{found.count:,}", *("-" if m is None else _short(m) for m in marks)))
    return _table(("waited", "times", "p50", "p90", "p99"), rows)


def _tier(tier: TierUse) -> str:
    limit = (
        "no limit but free space" if tier.max_size is None else f"of {format_bytes(tier.max_size)}"
    )
    text = f"{tier.dir}: {tier.shards:,} shards, {format_bytes(tier.bytes)} {limit}"
    drawn = "" if not tier.max_size else gauge(tier.dir, tier.bytes / tier.max_size)
    return f"<p>{html.escape(text)}</p>{drawn}"


def _evicted(total: Stats) -> str:
    rows = [
        (name.removeprefix("evicted_"), f"{count:,}")
        for name, count in total.counters.items()
        if name.startswith("evicted_") and count
    ]
    if not rows:
        return "<p>Nothing.</p>"
    rows.append(("together", f"{total.evicted:,}, {format_bytes(total.counters['bytes_evicted'])}"))
    return _table(("reason", "entries"), rows)


def _by_rank(ranks: Mapping[str, Stats]) -> str:
    rows = []
    for rank, found in ranks.items():
        rate = "-" if found.hit_rate is None else f"{found.hit_rate:.1%}"
        p99 = found.all_waits.percentile(0.99)
        fetched = format_bytes(found.counters["bytes_origin"])
        wait = "-" if p99 is None else _short(p99)
        rows.append((rank, f"{found.opens:,}", rate, fetched, wait))
    return _table(("rank", "opens", "hits", "fetched", "wait p99"), rows)


def _refetched(fetches: Iterable[Fetch]) -> list[tuple[str, int, int]]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for fetch in fetches:
        counts[fetch.url] += 1
        sizes[fetch.url] += fetch.size
    found = [(url, count, sizes[url]) for url, count in counts.items() if count > 1]
    return sorted(found, key=lambda row: (-row[1], -row[2], row[0]))[:_MOST_SHARDS]


def _shards(fetches: Sequence[Fetch]) -> str:
    again = _refetched(fetches)
    if not again:
        return f"<p>None of {len({fetch.url for fetch in fetches}):,} shards.</p>"
    rows = [(url, f"{count:,}", format_bytes(size)) for url, count, size in again]
    return _table(("shard", "fetches", "bytes"), rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _short(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.001 else format_duration(seconds)
