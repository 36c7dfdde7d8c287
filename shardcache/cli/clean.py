"""``shardcache clean``: the library's own cleaning, started by hand or by cron.

What a running job uses stays, and a dry run shows what would happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli.main import DURATION, SIZE, ExitCode, Invocation, command
from shardcache.cli.output import Console, counted
from shardcache.cli.progress import Display, Position, Rate
from shardcache.space.clean import CleanReport, CleanStatus
from shardcache.space.eviction import Reason, Removal
from shardcache.space.memory import Volume
from shardcache.units import Limit, exact_duration, format_bytes


@command(
    "clean",
    short="Remove what the limits say, and what dead processes left.",
    examples="""
        shardcache clean -n
        shardcache clean --max-size 800GB --max-age 14d
        17 * * * *  /opt/venv/bin/shardcache --dir /local/nvme/shards clean -q
        shardcache clean --all -y
    """,
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would go, remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before --all.")
@click.option("--all", "everything", is_flag=True, help="Remove all that nobody is reading.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another clean, or exit with 6 (default: wait)."
)
@click.option("--orphans", is_flag=True, help="Only what dead processes left, however new.")
@click.option("--max-age", type=DURATION, help="Remove what was unused for so long, such as 14d.")
@click.option("--min-free", type=SIZE, help="Space to be free afterwards, such as 100GB or 10%.")
@click.option("--max-size", type=SIZE, help="Most the cache may hold, such as 800GB or 80%.")
def clean_command(
    invocation: Invocation,
    max_size: Limit | None,
    min_free: Limit | None,
    max_age: float | None,
    orphans: bool,
    everything: bool,
    yes: bool,
    dry_run: bool,
    wait: bool,
) -> int:
    """Bring the cache within its limits, and sweep what dead processes left.

    Without options the configured limits hold. What is being read, and what was
    used since the oldest running job began, stays. Partials younger than an hour
    stay, too, so that an interrupted prewarm resumes; --orphans removes them.
    """
    limits = {"max_size": max_size, "min_free": min_free, "max_age": max_age}
    given = {name: value for name, value in limits.items() if value is not None}
    if everything and (given or orphans):
        raise click.UsageError("--all removes everything; give no limit or --orphans with it.")
    options: dict[str, Any] = {name: str(value) for name, value in given.items()}
    cache, console = invocation.cache(), invocation.console
    if not cache.dir.exists():
        console.hint(f"{cache.dir} does not exist; there is nothing to clean.")
        _show(console, cache, CleanReport((), 0, 0, 0, dry_run), given)
        return ExitCode.DONE
    if everything and not dry_run:
        invocation.confirm(f"Remove every shard in {cache.dir}?", yes)
    # As lines of JSON each removal is printed when it happens.
    status = CleanStatus(listener=lambda removal: console.line("removal", _row(removal)))
    with cache:
        with Display(console, _progress(status)):
            report = cache.clean(
                **options,
                orphans=orphans,
                limits=bool(given) or not orphans,
                everything=everything,
                dry_run=dry_run,
                wait=wait,
                status=status,
            )
        _show(console, cache, report, given)
    return ExitCode.DONE


def _row(removal: Removal) -> dict[str, Any]:
    return {"dir": removal.name, "size": removal.size, "reason": removal.reason.value}


def _progress(status: CleanStatus) -> Callable[[float], Position]:
    """``12%, 820/6,800 shards, 41.0 GB of 340.0 GB, ETA 0:03:50``."""
    known = Rate()

    def look(now: float) -> Position:
        if status.victims is None:
            return Position(None, ["looking for shards to remove"])
        size = f"{format_bytes(status.done_bytes)} of {format_bytes(status.victim_bytes)}"
        parts = [f"{status.done:,}/{status.victims:,} shards", size]
        return Position.of(status.done, status.victims, known.update(now, status.done), parts)

    return look


def _show(console: Console, cache: Cache, report: CleanReport, given: dict[str, Any]) -> None:
    # As lines of JSON they are printed already.
    rows = [] if console.format == "jsonl" else map(_row, report.removed)
    for removal in report.removed if console.verbosity else ():
        console.said(f"{removal.name}  {format_bytes(removal.size)}  {removal.reason}")
    summary = {
        "dry_run": report.dry_run,
        "removed": len(report.removed),
        "removed_bytes": report.freed,
        "kept": report.kept,
        "kept_bytes": report.kept_bytes,
        "missing_bytes": report.missing,
        "missing_inodes": report.missing_inodes,
    }
    text = _clean_text(cache, report, given) if cache.dir.exists() else ""
    console.table("clean", "removal", [], rows, summary=summary, footer=text)
    if report.missing or report.missing_inodes:
        inodes = counted(report.missing_inodes, "inode")
        console.warning(
            f"{format_bytes(report.missing) if report.missing else inodes} more would have to go, "
            "but the rest is in use or was used since the running jobs began"
        )


def _clean_text(cache: Cache, report: CleanReport, given: dict[str, Any]) -> str:
    removed, kept = ("would remove", "would keep") if report.dry_run else ("removed", "kept")
    rest = f"{kept} {counted(report.kept, 'shard')}, {format_bytes(report.kept_bytes)}"
    changes = {name: str(value) for name, value in given.items() if name == "max_size"}
    limit = Volume.of(cache.dir).budget(cache.config.replace(**changes))
    if limit:
        rest += f" ({report.kept_bytes / limit:.0%} of {format_bytes(limit)})"
    if not report.removed:
        return f"nothing to remove; {rest}"
    text = f"{removed} {counted(len(report.removed), 'shard')}, {format_bytes(report.freed)}"
    reasons = _reasons(cache, report, given)
    return f"{text}: {reasons}\n{rest}" if reasons else f"{text}\n{rest}"


def _reasons(cache: Cache, report: CleanReport, given: dict[str, Any]) -> str:
    def option(name: str) -> str:
        return f"--{name.replace('_', '-')}" if name in given else name

    max_age = given.get("max_age", cache.config.max_age)
    texts = {
        Reason.MAX_SIZE: f"over {option('max_size')}",
        Reason.MIN_FREE: f"for {option('min_free')}",
        Reason.INODES: "for free inodes",
        Reason.MAX_AGE: f"older than {exact_duration(max_age or 0.0)}",
    }
    found = [f"{n:,} {text}" for reason, text in texts.items() if (n := report.count(reason))]
    if orphans := report.count(Reason.ORPHAN):
        found.append(counted(orphans, "orphan"))
    if damaged := report.count(Reason.QUARANTINED):
        found.append(f"{damaged:,} damaged")
    return ", ".join(found)
