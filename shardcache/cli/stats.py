"""``shardcache stats``: what the cache has done on this node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from shardcache.cli.main import ExitCode, Invocation, command, since_option
from shardcache.cli.output import Column, Console, counted, percentage, short_date, short_duration
from shardcache.clock import utc
from shardcache.stats.database import Sample
from shardcache.stats.prometheus import exposition
from shardcache.stats.summary import OUTCOMES, Stats, Waits, by_hour, by_rank, summed
from shardcache.units import format_bytes

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
@since_option
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
            _show_rows(console, cache.samples(since), by)
        else:
            found = cache.stats(since)
            console.record("stats", found, _human(found))
    return ExitCode.DONE


def _human(found: Stats) -> str:
    if not found.opens and not found.fetches:
        return "Nothing was counted."
    lines = [f"Opens         {found.opens:>13,}"]
    for name in OUTCOMES:
        if (count := found.counters[name]) or name in _ALWAYS:
            share = count / found.opens if found.opens else 0.0
            lines.append(f"  {name.capitalize():<12}{count:>13,} / {found.opens:,} ({share:6.2%})")
    parts = [
        f"Read through the cache {format_bytes(found.bytes_opened)}",
        f"Fetched {format_bytes(found.bytes_origin)}",
    ]
    if found.bytes_upstream:
        parts.append(f"From upstreams {format_bytes(found.bytes_upstream)}")
    parts.append(f"Saved {format_bytes(found.bytes_saved)} of egress")
    lines.append("    ".join(parts))
    if tiers := _each(found, "hits_tier_", "tier {} {:,}"):
        lines.append("Hits by tier  " + "   ".join(tiers))
    lines.append("Wait for data   " + _percentiles(found.all_waits))
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
    """The counters whose names begin so and that counted something, by what follows."""
    names = [name for name, n in found.counters.items() if n and name.startswith(prefix)]
    return [form.format(name.removeprefix(prefix), found.counters[name]) for name in names]


def _percentiles(waits: Waits) -> str:
    p50, p99 = waits.percentile(0.5), waits.percentile(0.99)
    if p50 is None or p99 is None:
        return "none"
    return f"p50 {short_duration(p50)}  p99 {short_duration(p99)}"


def _show_rows(console: Console, samples: Sequence[Sample], by: str) -> None:
    now = time.time()
    if by == "rank":
        groups = by_rank(samples).items()
        rows = [{"rank": None if r == "-" else int(r), **_row(found)} for r, found in groups]
        first = Column("rank", "RANK", lambda rank: "-" if rank is None else str(rank))
    else:
        rows = [{"hour": utc(hour), **_row(found)} for hour, found in by_hour(samples).items()]
        first = Column("hour", "HOUR", lambda hour: short_date(hour.timestamp(), now))
    columns = [
        first,
        Column("opens", "OPENS", "{:,}".format, right=True),
        Column("hits", "HITS", "{:,}".format, right=True),
        Column("hit_rate", "HIT RATE", lambda rate: percentage(rate, 2), right=True),
        Column("misses", "MISSES", "{:,}".format, right=True),
        Column("bypassed", "BYPASSED", "{:,}".format, right=True),
        Column("bytes_origin", "FETCHED", format_bytes, right=True),
        Column("bytes_saved", "SAVED", format_bytes, right=True),
        Column("wait_p99_seconds", "WAIT P99", short_duration, right=True),
    ]
    total = summed(samples)
    footer = f"{counted(total.opens, 'open')}, {percentage(total.hit_rate, 2)} hits"
    console.table("stats", by, columns, rows, summary=total, footer=footer)


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
