"""``shardcache stats``: what the cache has done on this node."""

from __future__ import annotations

from collections.abc import Sequence

import click

from shardcache.cli.main import Invocation, command, flag, since_option
from shardcache.cli.output import Console, counted, percentage, short_date, short_duration
from shardcache.clock import utc
from shardcache.stats import database
from shardcache.stats.database import Sample
from shardcache.stats.prometheus import exposition
from shardcache.stats.summary import OUTCOMES, Stats, Waits, by_hour, by_rank, rank_records, summed
from shardcache.units import format_bytes

#: Shown even if there were none.
_ALWAYS = ("hits", "coalesced", "misses")
ROW_TITLES = ("OPENS", "HITS", "HIT RATE", "MISSES", "BYPASSED", "FETCHED", "SAVED", "WAIT P99")
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
@flag("--zero", help="Begin to count anew.")
def stats_command(
    invocation: Invocation, since: float | None, by: str | None, form: str | None, zero: bool
) -> None:
    """Show hits, bytes and waits of all processes of this node.

    A hit found the shard; a coalesced open waited for a fetch that somebody else had begun; a
    miss was fetched; a bypass was streamed and not stored. Minutes are kept for two hours, hours
    for 30 days.

    \b
    Examples:
      shardcache stats --since 24h --by hour
      shardcache stats --by rank --json
      shardcache stats --format prometheus > /var/lib/node_exporter/shardcache.prom
    """
    console = invocation.console
    if zero and (since is not None or by or form):
        raise click.UsageError("--zero goes with nothing else.")
    if form and (since is not None or by or console.json):
        raise click.UsageError("--format prometheus prints everything; Prometheus selects.")
    with invocation.cache(existing=True) as cache:
        if zero:
            process = cache.processes.here()
            process.counters.flush()
            database.zero(process.namespaces.node)
            console.object("stats", zeroed=True)
            console.info("counting anew")
        elif form:
            console.data(exposition(summed(cache.samples(ever=True)), str(cache.dir)).rstrip())
        elif by is not None:
            _print_rows(console, cache.samples(since), by)
        else:
            found = cache.stats(since)
            console.object("stats", found)
            console.data(figures(found))


def figures(found: Stats) -> str:
    """All figures as lines."""
    if not found.opens and not found.fetches:
        return "Nothing was counted."
    lines = [f"Opens         {found.opens:>13,}"]
    for name in OUTCOMES:
        if (count := found.counters[name]) or name in _ALWAYS:
            share = count / found.opens if found.opens else 0.0
            lines.append(f"  {name.capitalize():<12}{count:>13,} / {found.opens:,} ({share:6.2%})")
    upstream = ""
    if found.bytes_upstream:
        upstream = f"    From upstreams {format_bytes(found.bytes_upstream)}"
    lines.append(
        f"Read through the cache {format_bytes(found.bytes_opened)}    "
        f"Fetched {format_bytes(found.bytes_origin)}{upstream}    "
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
        groups = {short_date(hour): found for hour, found in hours.items()}
    console.object("stats", {f"{by}s": records, "summary": total})
    rows = ((name, *row(found)) for name, found in groups.items())
    console.table([by.upper(), *ROW_TITLES], rows, ROW_TITLES)
    console.data(f"{counted(total.opens, 'open')}, {percentage(total.hit_rate, 2)} hits")


def row(found: Stats) -> tuple[str, ...]:
    """The cells under `ROW_TITLES`."""
    return (
        f"{found.opens:,}",
        f"{found.hits:,}",
        percentage(found.hit_rate, 2),
        f"{found.misses:,}",
        f"{found.bypassed:,}",
        format_bytes(found.bytes_origin),
        format_bytes(found.bytes_saved),
        short_duration(found.all_waits.percentile(0.99)),
    )
