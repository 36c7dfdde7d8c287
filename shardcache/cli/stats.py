"""``shardcache stats``: what the cache has done on this node."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from shardcache.cli.main import ExitCode, Invocation, command, since_option
from shardcache.cli.output import Column, counted, short_date
from shardcache.clock import utc
from shardcache.stats.prometheus import exposition
from shardcache.stats.summary import OUTCOMES, Stats, Waits, by_hour, by_rank, summed
from shardcache.units import format_bytes, format_duration

__all__ = ["stats_command"]

#: Shown even where there were none.
_ALWAYS = ("hits", "coalesced", "misses")
_WAITS = {"disk": "for the disk", "lock": "for others", "network": "for the network"}


@command(
    "stats",
    short="Show hits, bytes and waits.",
    examples="""
        shardcache stats
        shardcache stats --since 24h --by hour
        shardcache stats --by rank --json
        shardcache stats --format prometheus > /var/lib/node_exporter/shardcache.prom
        shardcache stats --zero
    """,
    formats=("prometheus",),
)
@since_option()
@click.option("--by", type=click.Choice(["rank", "hour"]), help="One row for each.")
@click.option("--zero", is_flag=True, help="Begin to count anew.")
def stats_command(invocation: Invocation, since: float | None, by: str | None, zero: bool) -> int:
    """Show what the cache has done on this node, all processes together.

    A hit was there; a coalesced open waited for a fetch that somebody else had begun; a miss
    was fetched; a bypass was streamed and not stored. Minutes are kept for two hours, hours for
    30 days. The format prometheus is for the textfile collector of its node exporter.
    """
    console = invocation.console
    prometheus = console.format == "prometheus"
    if zero and (since is not None or by or prometheus):
        raise click.UsageError("--zero goes with nothing else.")
    if prometheus and (since is not None or by):
        raise click.UsageError("--format prometheus prints everything; Prometheus selects.")
    cache = invocation.cache(looking=True)
    with cache:
        if zero:
            cache.zero_stats()
            if console.human:
                console.said("counting anew")
            else:
                console.record("stats", {"zeroed": True}, "")
        elif prometheus:
            console.data(exposition(summed(cache.samples(ever=True)), str(cache.dir)).rstrip())
        elif by is not None:
            _show_rows(invocation, cache.samples(since), by)
        else:
            found = cache.stats(since)
            console.record("stats", found.as_dict(), _human(found))
    return ExitCode.DONE


def _human(found: Stats) -> str:
    if not found.opens and not found.counters["fetches"]:
        return "Nothing was counted."
    lines = [f"Opens         {found.opens:>13,}"]
    for name in OUTCOMES:
        if found.counters[name] or name in _ALWAYS:
            lines.append(f"  {name.capitalize():<12}{_share(found.counters[name], found.opens)}")
    read, origin = found.counters["bytes_opened"], found.counters["bytes_origin"]
    parts = [f"Read through the cache {format_bytes(read)}", f"Fetched {format_bytes(origin)}"]
    if found.counters["bytes_upstream"]:
        parts.append(f"From upstreams {format_bytes(found.counters['bytes_upstream'])}")
    parts.append(f"Saved {format_bytes(found.bytes_saved)} of egress")
    lines.append("    ".join(parts))
    tiers = [found.counters[f"hits_tier_{number}"] for number in (1, 2, 3)]
    if any(tiers):
        each = [f"tier {number} {n:,}" for number, n in enumerate(tiers, 1) if n]
        lines.append("Hits by tier  " + "   ".join(each))
    lines.append("Wait for data   " + _percentiles(found.all_waits))
    for wait, text in _WAITS.items():
        if found.waits[wait].count:
            lines.append(f"  {text:<18}{_percentiles(found.waits[wait])}")
    evicted = f"Evicted {found.evicted:,}"
    if found.evicted:
        evicted += f" ({format_bytes(found.counters['bytes_evicted'])}: {_reasons(found)})"
    lines.append(f"{evicted}    Retries {found.counters['retries']:,}    {_errors(found)}")
    return "\n".join(lines)


def _share(count: int, total: int) -> str:
    share = count / total if total else 0.0
    return f"{count:>13,} / {total:,} ({share:6.2%})"


def _percentiles(waits: Waits) -> str:
    found = [(name, waits.percentile(share)) for name, share in (("p50", 0.5), ("p99", 0.99))]
    shown = [f"{name} {_short(seconds)}" for name, seconds in found if seconds is not None]
    return "  ".join(shown) or "none"


def _short(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    return format_duration(seconds)


def _reasons(found: Stats) -> str:
    names = [name for name in found.counters if name.startswith("evicted_")]
    each = [
        f"{found.counters[name]:,} {name.removeprefix('evicted_')}"
        for name in names
        if found.counters[name]
    ]
    return ", ".join(each)


def _errors(found: Stats) -> str:
    names = [name for name in found.counters if name.startswith("errors_")]
    each = [
        f"{found.counters[name]:,} {name.removeprefix('errors_')}"
        for name in names
        if found.counters[name]
    ]
    return f"Errors {found.errors:,}" + (f" ({', '.join(each)})" if each else "")


def _show_rows(invocation: Invocation, samples: Any, by: str) -> None:
    now = time.time()
    groups: Mapping[Any, Stats] = by_rank(samples) if by == "rank" else by_hour(samples)
    rows: list[dict[str, Any]] = [{by: name, **_row(found)} for name, found in groups.items()]
    total = summed(samples)
    first = Column(by, by.upper(), lambda rank: "-" if rank is None else str(rank))
    if by == "rank":
        for row in rows:
            row["rank"] = None if row["rank"] == "-" else int(row["rank"])
    else:
        first = Column(by, "HOUR", lambda hour: short_date(hour.timestamp(), now))
        for row in rows:
            row["hour"] = utc(row["hour"])
    columns = [
        first,
        Column("opens", "OPENS", "{:,}".format, right=True),
        Column("hits", "HITS", "{:,}".format, right=True),
        Column("hit_rate", "HIT RATE", _rate, right=True),
        Column("misses", "MISSES", "{:,}".format, right=True),
        Column("bypassed", "BYPASSED", "{:,}".format, right=True),
        Column("bytes_origin", "FETCHED", format_bytes, right=True),
        Column("bytes_saved", "SAVED", format_bytes, right=True),
        Column(
            "wait_p99_seconds", "WAIT P99", lambda s: "-" if s is None else _short(s), right=True
        ),
    ]
    footer = f"{counted(total.opens, 'open')}, {_rate(total.hit_rate)} hits"
    invocation.console.table("stats", by, columns, rows, summary=total.as_dict(), footer=footer)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.2%}"


def _row(found: Stats) -> dict[str, Any]:
    names = ("hits", "coalesced", "linked", "misses", "bypassed", "failed", "bytes_origin")
    return {
        "opens": found.opens,
        "hit_rate": found.hit_rate,
        **{name: found.counters[name] for name in names},
        "bytes_saved": found.bytes_saved,
        "evicted": found.evicted,
        "errors": found.errors,
        "wait_p99_seconds": found.all_waits.percentile(0.99),
    }
