"""``shardcache prewarm`` and ``shardcache path``: the commands that fetch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardcache.cli.arguments import dry_run_option, duration, rate
from shardcache.cli.invocation import Invocation, command
from shardcache.cli.output import Column, Console
from shardcache.cli.warmtext import (
    check_text,
    plan_record,
    plan_text,
    shard_record,
    summary_record,
    summary_text,
    tell_failures,
)
from shardcache.errors import ConfigError, ShardNotFoundError
from shardcache.prewarm.fleetcommand import FleetOptions, fleet_options, prewarm_nodes
from shardcache.prewarm.fleetmember import Member

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.prewarm.fill import Event, PrewarmReport

__all__ = ["path_command", "prewarm_command"]

_DEFAULT_JOBS = 32
_COLUMNS = [
    Column(name)
    for name in ("url", "outcome", "size", "seconds", "received_bytes", "retries", "error")
]


@command(
    "prewarm",
    short="Fill the cache before the job.",
    examples="""
        shardcache prewarm 's3://lab/train-{0000..2047}.tar' -j 16
        shardcache prewarm s3://lab/val/ 's3://lab/test-*.tar'
        shardcache prewarm -f shards.txt --deadline 5m --best-effort
        shardcache prewarm s3://lab/val/ --limit-rate 50MB
        shardcache prewarm --refresh 's3://lab/train-{0000..2047}.tar'
        shardcache prewarm --check 's3://lab/train-{0000..2047}.tar'
        shardcache prewarm --nodes slurm 's3://lab/train-{0000..2047}.tar'
    """,
)
@dry_run_option("Say what would be fetched, fetch nothing.")
@click.option(
    "--limit-rate",
    callback=rate,
    metavar="RATE",
    help="Most bytes per second, such as 50MB, of all connections together.",
)
@click.option("--best-effort", is_flag=True, help="Leave out what does not fit; do not refuse.")
@click.option(
    "--max-failures",
    type=click.IntRange(0),
    metavar="N",
    help="Accept up to N failed shards, stop at the next.",
)
@click.option(
    "--deadline", callback=duration, metavar="DURATION", help="Stop after this long, such as 5m."
)
@click.option("--check", is_flag=True, help="Only tell whether all is cached (exit 4 if not).")
@click.option(
    "--refresh", is_flag=True, help="Ask origins for what is cached; fetch what they replaced."
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    metavar="N",
    help="Fetch in N processes.  [default: where there is much to do, one per processor up to 8]",
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1, 256),
    metavar="N",
    help=f"Most shards at a time.  [default: {_DEFAULT_JOBS}]",
)
@click.option(
    "-f",
    "--file",
    "lists",
    multiple=True,
    metavar="LIST",
    help="Read SPECs from a file, one per line; - is stdin. May be repeated.",
)
@fleet_options
@click.argument("specs", nargs=-1, metavar="SPEC...")
def prewarm_command(
    invocation: Invocation,
    specs: tuple[str, ...],
    lists: tuple[str, ...],
    jobs: int | None,
    processes: int | None,
    check: bool,
    refresh: bool,
    deadline: float | None,
    max_failures: int | None,
    best_effort: bool,
    limit_rate: int | None,
    dry_run: bool,
    fleet: FleetOptions,
) -> int:
    """Fetch shards into the cache, several at once, and show how it goes.

    A SPEC is a WebDataset shard specification with {braces}, a prefix ending in /
    (every tar file below it), or a name with * or ?. Interrupted, it leaves
    partials behind; the same command goes on where it ended.

    Shards that do not exist do not stop the others. When the first shards of a
    bucket are all refused (credentials, endpoint), the rest of it is not tried.

    With --nodes every node prewarms its own cache, with its own configuration and
    credentials. A node that fails or dies is named; the others go on.
    """
    fleet.check()
    wanted = [*specs, *(spec for name in lists for spec in _read_list(name))]
    if not wanted and not lists:
        raise click.UsageError("Which shards? Give a SPEC, or a list with -f.")
    wish = _Wish(
        jobs,
        processes,
        check,
        deadline,
        max_failures,
        best_effort,
        limit_rate,
        refresh,
        dry_run,
    )
    if fleet.nodes is not None:
        return prewarm_nodes(
            invocation, fleet, wanted, wish.arguments(), check=check, dry_run=dry_run
        )
    return _prewarm_here(invocation, fleet, wanted, wish)


@dataclass(frozen=True, slots=True)
class _Wish:
    """The options of ``prewarm`` that say how."""

    jobs: int | None
    processes: int | None
    check: bool
    deadline: float | None
    max_failures: int | None
    best_effort: bool
    limit_rate: int | None
    refresh: bool
    dry_run: bool

    def arguments(self) -> list[str]:
        """As they are said to another prewarm."""
        found = []
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and value is not False:
                found.append(f"--{item.name.replace('_', '-')}")
                found += [] if value is True else [str(value)]
        return found


def _prewarm_here(
    invocation: Invocation, fleet: FleetOptions, wanted: Sequence[str], wish: _Wish
) -> int:
    from shardcache.prewarm.fill import expand, prewarm

    share = fleet.share()
    cache = invocation.cache(connections=wish.jobs or 0, looking=wish.check)
    console = invocation.console
    looking = wish.check or wish.dry_run
    member = Member(console, cache.dir, share, fleet.tied_fd) if fleet.member else None
    told: set[str] = set()

    def tell(event: Event) -> None:
        if not wish.check:
            _stream(console, event, told)

    def run(on_event: Callable[[Event], None]) -> PrewarmReport:
        return prewarm(
            cache,
            expand(wanted, cache, share=share),
            jobs=wish.jobs or _DEFAULT_JOBS,
            processes=wish.processes,
            check=wish.check,
            dry_run=wish.dry_run,
            deadline=wish.deadline,
            max_failures=wish.max_failures,
            best_effort=wish.best_effort,
            limit_rate=wish.limit_rate,
            refresh=wish.refresh,
            on_event=on_event,
            stop=invocation.signals.stop,
        )

    with cache, member or contextlib.nullcontext():
        telling = member.telling(tell) if member is not None else tell
        report = _attended(invocation, run, telling, show=not looking)
    _report(console, report, told, check=wish.check, dry_run=wish.dry_run)
    tell_failures(console, report, wish.max_failures)
    code = _exit_code(report, wish.check, wish.max_failures, wish.best_effort)
    if member is not None:
        signalled = invocation.signals.exit_code
        member.end(code if signalled is None else signalled)
    return code


def _read_list(name: str) -> Iterator[str]:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exn:
        reason = exn.strerror if isinstance(exn, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"the list {name} cannot be read: {reason}") from exn
    for line in text.splitlines():
        spec = line.strip()
        if spec and not spec.startswith("#"):
            yield spec


def _attended(
    invocation: Invocation,
    run: Callable[[Callable[[Event], None]], PrewarmReport],
    tell: Callable[[Event], None],
    *,
    show: bool,
) -> PrewarmReport:
    """Run with progress; from the plan on, a signal winds down instead of raising."""
    from shardcache.cli.progress import Progress
    from shardcache.prewarm.fill import Planned

    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(invocation.console))

        def on_event(event: Event) -> None:
            tell(event)
            if show:
                if isinstance(event, Planned):
                    stack.enter_context(invocation.signals.graceful())
                progress(event)

        return run(on_event)


def _stream(console: Console, event: Event, told: set[str]) -> None:
    """Say what there is to say while it runs; notes in ``told`` whose end was told."""
    from shardcache.prewarm.fill import Finished, Planned

    if isinstance(event, Planned):
        console.said(plan_text(event.plan))
        console.line("plan", plan_record(event.plan))
    elif isinstance(event, Finished):
        console.line("shard", shard_record(event.result))
        told.add(event.result.url)


def _report(
    console: Console, report: PrewarmReport, told: set[str], *, check: bool, dry_run: bool
) -> None:
    if console.human:
        if check:
            console.said(check_text(report))
        elif not dry_run:
            console.said(summary_text(report))
        return
    records = [shard_record(result) for result in report.results]
    if console.format == "jsonl":
        records = [record for record in records if record["url"] not in told]
    summary = summary_record(report)
    if console.format == "json":
        summary = {"plan": plan_record(report.plan), **summary}
    console.table("prewarm", "shard", _COLUMNS, records, summary=summary)


def _exit_code(
    report: PrewarmReport, check: bool, max_failures: int | None, best_effort: bool
) -> int:
    if check:
        return 0 if report.cached == len(report.results) else 4
    if report.full or (report.missing and report.plan.missing and not best_effort):
        return 5
    if report.failed > (max_failures or 0):
        return 3
    return 3 if report.not_started and not best_effort else 0


@command(
    "path",
    short="Print where a shard is.",
    examples="""
        shardcache path s3://lab/train-0000.tar
        tar tf "$(shardcache path --fetch s3://lab/train-0000.tar)"
    """,
)
@click.option("--fetch", is_flag=True, help="Fetch it first if it is not cached.")
@click.argument("url", metavar="URL")
def path_command(invocation: Invocation, url: str, fetch: bool) -> int:
    """Print the local path of a cached shard, and nothing else.

    Not cached: exit code 1. The path is not pinned: another process may evict the
    shard later.
    """
    cache = invocation.cache(looking=not fetch)
    with cache:
        found = cache.path(url)
        if found is None and fetch:
            _fetch(invocation, cache, url)
            found = cache.path(url)
        shard = cache.parse(url)
    if found is None:
        advice = "Pass --fetch to fetch it." if not fetch else "It was evicted again at once."
        raise ShardNotFoundError(f"{shard} is not cached in {cache.dir}. {advice}", url=str(shard))
    record = {"url": str(shard), "path": os.fspath(found)}
    invocation.console.record("path", record, os.fspath(found))
    return 0


def _fetch(invocation: Invocation, cache: Cache, url: str) -> None:
    """Fetch one shard with progress.

    Raises:
        As `Cache.fetch`; KeyboardInterrupt after a signal.
    """
    from shardcache.prewarm.fill import prewarm

    report = _attended(
        invocation,
        lambda on_event: prewarm(
            cache, [url], jobs=1, on_event=on_event, stop=invocation.signals.stop
        ),
        lambda event: None,
        show=True,
    )
    if report.interrupted:
        raise KeyboardInterrupt
    for result in report.results:
        if result.error is not None:
            raise result.error
