"""``shardcache top``: what goes on, again and again."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from datetime import datetime

import click

from shardcache.cli.arguments import Number
from shardcache.cli.invocation import Invocation, command
from shardcache.cli.output import counted, printable
from shardcache.clock import SYSTEM_CLOCK
from shardcache.locks.flock import Holder
from shardcache.stats.activity import Activity, Flight, TierUse, Waiting, Watcher
from shardcache.stats.summary import Stats
from shardcache.units import format_bytes, format_duration, format_rate

__all__ = ["top_command"]

_GAUGE = 24
_MOST_FLIGHTS = 12
_MOST_RANKS = 16
_MOST_WAITS = 8
_NAME = 48


@command(
    "top",
    short="Watch what goes on.",
    examples="""
        shardcache top
        shardcache top --interval 5
        shardcache top --count 1
        shardcache top --format jsonl --interval 10 > watch.jsonl
    """,
)
@click.option(
    "--interval",
    type=Number(0.2, 3600),
    default=2.0,
    metavar="SECONDS",
    help="Between two looks.  [default: 2]",
)
@click.option("--count", type=click.IntRange(1), metavar="N", help="Look so often, then end.")
def top_command(invocation: Invocation, interval: float, count: int | None) -> int:
    """Show rates, fetches in flight and how full the cache is, until it is interrupted.

    Without a terminal each look is printed below the last one. As JSON it is one look; as
    JSON lines there is a line for each.
    """
    if invocation.console.format == "json":
        if (count or 1) > 1:
            raise click.UsageError("--json is one object: give --format jsonl with --count.")
        count = 1
    cache = invocation.cache(looking=True)
    console = invocation.console
    with cache:
        watcher = Watcher(cache, SYSTEM_CLOCK)
        looks = _looks(invocation, watcher, interval, count)
        if not console.human:
            for activity in looks:
                if console.format == "jsonl":
                    console.line("activity", activity.as_dict())
                else:
                    console.record("top", activity.as_dict(), "")
        elif console.live:
            _draw(invocation, looks, str(cache.dir))
        else:
            for activity in looks:
                console.data("\n".join(frame(activity, str(cache.dir))) + "\n")
    return 0


def _looks(
    invocation: Invocation, watcher: Watcher, interval: float, count: int | None
) -> Iterator[Activity]:
    watcher.look()  # rates are of what changes from now on
    for number in itertools.count(1):
        end = time.monotonic() + interval
        while (left := end - time.monotonic()) > 0:
            if invocation.signals.received is not None:
                return
            time.sleep(min(left, 0.1))
        yield watcher.look()
        if number == count:
            return


def _draw(invocation: Invocation, looks: Iterator[Activity], directory: str) -> None:
    from rich.console import Console as Screen
    from rich.live import Live
    from rich.text import Text

    screen = Screen(stderr=False, highlight=False)
    last: list[str] = []
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        live.update(Text(f"shardcache top  {directory}  looking ..."), refresh=True)
        for activity in looks:
            last = frame(activity, directory)
            live.update(Text("\n".join(last), no_wrap=True, overflow="ellipsis"), refresh=True)
    if last:
        invocation.console.data("\n".join(last))


def frame(activity: Activity, directory: str) -> list[str]:
    """One look, as lines of text."""
    then = datetime.fromtimestamp(activity.at).astimezone()
    processes = _counted(activity.processes, "process")
    lines = [f"shardcache top  {printable(directory)}  {then:%H:%M:%S}  {processes}", ""]
    lines += _rates(activity)
    lines.append("")
    lines += [_gauge(tier) for tier in activity.tiers]
    if len(activity.ranks) > 1:
        lines += ["", "RANK     OPENS/s   HITS     FETCHED/s   WAIT P99"]
        shown = list(activity.ranks.items())[:_MOST_RANKS]
        lines += [_rank(activity, rank, found) for rank, found in shown]
        if len(activity.ranks) > len(shown):
            lines.append(f"... and {len(activity.ranks) - len(shown)} ranks more")
    lines += ["", f"{_counted(len(activity.flights), 'fetch')} in flight"]
    lines += [_flight(flight) for flight in activity.flights[:_MOST_FLIGHTS]]
    if len(activity.flights) > _MOST_FLIGHTS:
        lines.append(f"... and {len(activity.flights) - _MOST_FLIGHTS} more")
    if activity.waits:
        lines += ["", f"{'WAITS':<{_NAME + 2}} {'WHO':<20}{'FOR WHOM':<20}{'SINCE':>8}  HOW FAR"]
        lines += [_waiting(waiting) for waiting in activity.waits[:_MOST_WAITS]]
    if len(activity.waits) > _MOST_WAITS:
        lines.append(f"... and {len(activity.waits) - _MOST_WAITS} more wait")
    return lines


def _rates(activity: Activity) -> list[str]:
    total = activity.total
    rate = "-" if total.hit_rate is None else f"{total.hit_rate:.1%}"
    opens = total.opens / activity.seconds if activity.seconds else 0.0
    p99 = total.all_waits.percentile(0.99)
    wait = "-" if p99 is None else _short(p99)
    others = [f"{name} {activity.rate(name):,.1f}/s" for name in ("misses", "bypassed", "failed")]
    fetched, evicted = (format_rate(activity.rate(f"bytes_{n}")) for n in ("origin", "evicted"))
    return [
        f"opens     {opens:>10,.1f}/s    hits {rate:>6}    wait p99 {wait}",
        f"coalesced {activity.rate('coalesced'):>10,.1f}/s    {'    '.join(others)}",
        f"read      {format_rate(activity.rate('bytes_opened')):>12}    fetched {fetched}    "
        f"evicted {evicted}",
    ]


def _gauge(tier: TierUse) -> str:
    used = f"{counted(tier.entries, 'shard')}, {format_bytes(tier.used)}"
    name = printable(tier.directory)
    if not tier.limit:
        return f"{name}  {used}"
    share = tier.used / tier.limit
    full = round(_GAUGE * min(1.0, share))
    bar = "#" * full + "-" * (_GAUGE - full)
    return f"{name}  [{bar}] {share:4.0%}  {used} of {format_bytes(tier.limit)}"


def _rank(activity: Activity, rank: str, found: Stats) -> str:
    seconds = activity.seconds or 1.0
    rate = "-" if found.hit_rate is None else f"{found.hit_rate:.1%}"
    p99 = found.all_waits.percentile(0.99)
    wait = "-" if p99 is None else _short(p99)
    fetched = format_rate(found.counters["bytes_origin"] / seconds)
    return f"{rank:<6}{found.opens / seconds:>10,.1f}   {rate:>6}   {fetched:>11}   {wait:>8}"


def _flight(flight: Flight) -> str:
    share = f"{flight.written / flight.size:4.0%}" if flight.size else "   ?"
    rate = "" if flight.rate is None else format_rate(flight.rate)
    who = "" if flight.holder is None else _who(flight.holder)
    return f"  {_name(flight.url):<{_NAME}} {share}  {rate:>10}  {who}".rstrip()


def _waiting(waiting: Waiting) -> str:
    holder = waiting.holder
    whom = "?" if holder is None else _who(holder)
    if holder is not None and holder.host != waiting.wait.waiter.host:
        whom += f" on {printable(holder.host)}"
    far = f"{waiting.written / waiting.size:.0%}" if waiting.size and waiting.written else "0%"
    if waiting.written is None:
        far = "?"
    who, since = _who(waiting.wait.waiter), _short(waiting.seconds)
    return f"  {_name(waiting.wait.url):<{_NAME}} {who:<20}{whom:<20}{since:>8}  {far}"


def _name(url: str) -> str:
    name = printable(url)
    return name if len(name) <= _NAME else "..." + name[3 - _NAME :]


def _who(holder: Holder) -> str:
    rank = "" if holder.rank is None else f"rank {holder.rank}, "
    return f"{rank}pid {holder.pid}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es")


def _short(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 0.001 else format_duration(seconds)
