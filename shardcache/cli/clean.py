"""``shardcache clean``: evict shards by the limits, and remove orphans."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import click

from shardcache.cli import main as cli
from shardcache.cli.main import Invocation, command, flag
from shardcache.cli.output import counted
from shardcache.space.clean import CleanReport
from shardcache.space.eviction import Removal
from shardcache.store.directory import DamagedError
from shardcache.store.partial import read_progress
from shardcache.units import Limit, format_bytes


@command("clean")
@cli.dry_run_option
@cli.yes_option
@flag("--all", "everything", help="Remove all shards that are not in use or pinned.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another clean, or exit with 6 (default: wait)."
)
@flag("--orphans", help="Remove only partials of dead processes, also recent ones.")
@click.option(
    "--max-age", type=cli.DURATION, help="Evict shards that were unused for this long, such as 14d."
)
@click.option(
    "--min-free", type=cli.SIZE, help="Evict until this much space is free: 100GB or 10%."
)
@click.option(
    "--max-size", type=cli.SIZE, help="Evict until the cache has this size: 800GB or 80%."
)
def clean_command(
    invocation: Invocation,
    orphans: bool,
    everything: bool,
    yes: bool,
    dry_run: bool,
    wait: bool,
    **limits: Limit | float | None,
) -> None:
    """Evict shards over the limits, and remove partials of dead processes.

    Without options, the configured limits apply; a limit that is not configured is that of
    the last job. Shards stay if a process reads them, or if they were
    used since the oldest running job started. Partials younger than an hour stay, too, so
    that an interrupted prewarm can resume them; --orphans removes them.

    \b
    Examples:
      shardcache clean -n
      17 * * * *  /opt/venv/bin/shardcache --dir /local/nvme/shards clean -q
      shardcache clean --all -y
    """
    given: dict[str, Any] = {n: str(value) for n, value in limits.items() if value is not None}
    if everything and (given or orphans):
        raise click.UsageError("--all removes everything; omit limits and --orphans.")
    console, loaded = invocation.console, invocation.loaded_with_job_limits()
    with invocation.cache(loaded=loaded) as cache:
        if not cache.dir.exists():
            console.hint(f"{cache.dir} does not exist; there is nothing to clean.")
            console.object("clean", CleanReport((), 0, 0, 0, dry_run), freed=0, job_limits={})
            return
        if everything and not dry_run:
            invocation.confirm(f"Remove every shard in {cache.dir}?", yes)
        is_limited = not (everything or (orphans and not given))
        job_limits = invocation.show_job_limits(loaded, *given) if is_limited else {}
        report = cache.clean(
            **given, orphans=orphans, everything=everything, dry_run=dry_run, wait=wait
        )
        console.object("clean", report, freed=report.freed, job_limits=job_limits)
        if dry_run:
            rows = [(_url_of(r), format_bytes(r.size), r.reason) for r in report.removed]
            console.table(("SHARD", "SIZE", "REASON"), rows, right=("SIZE",))
        console.info(_summary(report))
        if report.missing:
            console.warning(
                f"the cache is still {format_bytes(report.missing)} too large: the other shards "
                "are in use, or were used since the running jobs started"
            )


def _url_of(removal: Removal) -> str:
    """Return the URL of a removed entry or partial; its directory if the URL is not known."""
    with contextlib.suppress(DamagedError, OSError):
        if removal.entries:
            return removal.entries[0].metadata().url
        if progress := read_progress(Path(removal.name)):
            return progress.metadata.url
    return removal.name


def _summary(report: CleanReport) -> str:
    removed, kept = ("would remove", "would keep") if report.dry_run else ("removed", "kept")
    rest = f"{kept} {counted(report.kept, 'shard')}, {format_bytes(report.kept_bytes)}"
    if not report.removed:
        return f"nothing to remove; {rest}"
    reasons = Counter(each.reason for each in report.removed)
    why = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
    shards, size = counted(len(report.removed), "shard"), format_bytes(report.freed)
    return f"{removed} {shards}, {size}: {why}\n{rest}"
