"""``shardcache stats``: hits, bytes and waits of all processes of this node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from shardcache.cli.main import Invocation, command, flag, since_option
from shardcache.cli.output import Console, counted, local_time, percentage, short_duration
from shardcache.clock import utc
from shardcache.stats import database
from shardcache.stats.database import Sample
from shardcache.stats.metrics import exposition
from shardcache.stats.summary import OUTCOMES, Stats, Waits, by_hour, by_rank, rank_records, summed
from shardcache.sync import atomic_write
from shardcache.units import format_bytes, format_rate

#: Outcomes that `figures` shows even if their number is 0.
_ALWAYS = ("hits", "coalesced", "misses")
ROW_TITLES = ("OPENS", "HIT RATE", "BYPASSED", "STREAMED", "FETCHED", "SAVED", "WAIT P99")
_WAITS = {"disk": "for the disk", "lock": "for downloads", "network": "for the network"}


@command("stats")
@since_option
@click.option("--by", type=click.Choice(["rank", "hour"]), help="Print one row for each.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["prometheus"]),
    help="Print metrics for the textfile collector of Prometheus' node exporter.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --format: write to this file atomically.",
)
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
    when they are read. The counters have minutes for two hours, and hours for 30 days.

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
            process = cache.processes.here()
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
    """Write a file atomically, so that no reader sees a part of it."""
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_text(text, "utf-8")
            return
        with atomic_write(path, "w", sync=False) as file:
            file.write(text)
    except OSError as exn:  # it may name the temporary file
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
    streamed = upstream = ""
    if stats.bypassed:
        shards = counted(stats.bypassed, "shard")
        streamed = f"    Streamed {format_bytes(stats.bytes_bypassed)} ({shards})"
    if stats.bytes_upstream:
        upstream = f"    From upstreams {format_bytes(stats.bytes_upstream)}"
    lines.append(
        f"Read from cache {format_bytes(stats.bytes_opened)}    "
        f"Fetched {format_bytes(stats.bytes_fetched)}{streamed}{upstream}    "
        f"Saved {format_bytes(stats.bytes_saved)} of egress"
    )
    if by_tier := _each(stats, "hits_tier_", "tier {} {:,}"):
        lines.append("Hits by tier  " + "   ".join(by_tier))
    lines.append(f"Wait for data   {_percentiles(stats.all_waits)}")
    for wait, text in _WAITS.items():
        if stats.waits[wait].count:
            lines.append(f"  {text:<18}{_percentiles(stats.waits[wait])}")
    evicted, errors = f"Evicted {stats.evicted:,}", f"Errors {stats.errors:,}"
    if reasons := _each(stats, "evicted_", "{1:,} {0}"):
        evicted += f" ({format_bytes(stats.bytes_evicted)}: {', '.join(reasons)})"
    if kinds := _each(stats, "errors_", "{1:,} {0}"):
        errors += f" ({', '.join(kinds)})"
    lines.append(f"{evicted}    Retries {stats.retries:,}    {errors}")
    return "\n".join(lines)


def _each(stats: Stats, prefix: str, form: str) -> list[str]:
    """Format the counters above 0 with a prefix: their names without it, and their values."""
    names = [name for name, n in stats.counters.items() if n and name.startswith(prefix)]
    return [form.format(name.removeprefix(prefix), stats.counters[name]) for name in names]


def _percentiles(waits: Waits) -> str:
    p50, p99 = waits.percentile(0.5), waits.percentile(0.99)
    return f"p50 {short_duration(p50)}  p99 {short_duration(p99)}" if waits.count else "none"


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
    console.data(f"{counted(total.opens, 'open')}, {percentage(total.hit_rate, 2)} hits")


def cells(stats: Stats, seconds: float | None = None) -> list[str]:
    """Return the cells for `ROW_TITLES`; with ``seconds``, as rates over that time."""

    def number(n: int) -> str:
        return f"{n:,}" if seconds is None else f"{n / seconds:,.1f}/s"

    def size(n: int) -> str:
        return format_bytes(n) if seconds is None else format_rate(n / seconds)

    return [
        number(stats.opens),
        percentage(stats.hit_rate, 2),
        number(stats.bypassed),
        size(stats.bytes_bypassed),
        size(stats.bytes_fetched),
        size(stats.bytes_saved),
        short_duration(stats.all_waits.percentile(0.99)),
    ]
