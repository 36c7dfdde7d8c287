"""``shardcache clean``: the library's own cleaning, started by hand or by cron."""

from __future__ import annotations

from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli.main import (
    DURATION,
    SIZE,
    Invocation,
    command,
    dry_run_option,
    flag,
    yes_option,
)
from shardcache.cli.output import counted
from shardcache.space.clean import CleanReport
from shardcache.space.eviction import Reason
from shardcache.space.memory import Volume
from shardcache.units import Limit, exact_duration, format_bytes, parse_duration


@command("clean")
@dry_run_option
@yes_option
@flag("--all", "everything", help="Remove all that nobody is reading.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another clean, or exit with 6 (default: wait)."
)
@flag("--orphans", help="Only what dead processes left, however new.")
@click.option("--max-age", type=DURATION, help="Remove what was unused for so long, such as 14d.")
@click.option("--min-free", type=SIZE, help="Space to be free afterwards, such as 100GB or 10%.")
@click.option("--max-size", type=SIZE, help="Most the cache may hold, such as 800GB or 80%.")
def clean_command(
    invocation: Invocation,
    orphans: bool,
    everything: bool,
    yes: bool,
    dry_run: bool,
    wait: bool,
    **limits: Limit | float | None,
) -> None:
    """Remove what the limits say, and what dead processes left.

    Without options the configured limits hold. What is being read, and what was
    used since the oldest running job began, stays. Partials younger than an hour
    stay, too, so that an interrupted prewarm resumes; --orphans removes them.

    \b
    Examples:
      shardcache clean -n
      shardcache clean --max-size 800GB --max-age 14d
      17 * * * *  /opt/venv/bin/shardcache --dir /local/nvme/shards clean -q
      shardcache clean --all -y
    """
    given: dict[str, Any] = {n: str(value) for n, value in limits.items() if value is not None}
    if everything and (given or orphans):
        raise click.UsageError("--all removes everything; give no limit or --orphans with it.")
    console = invocation.console
    with invocation.cache() as cache:
        if not cache.dir.exists():
            console.hint(f"{cache.dir} does not exist; there is nothing to clean.")
            console.object("clean", CleanReport((), 0, 0, 0, dry_run), freed=0)
            return
        if everything and not dry_run:
            invocation.confirm(f"Remove every shard in {cache.dir}?", yes)
        report = cache.clean(
            **given,
            orphans=orphans,
            limits=bool(given) or not orphans,
            everything=everything,
            dry_run=dry_run,
            wait=wait,
        )
        console.object("clean", report, freed=report.freed)
        console.info(_clean_text(cache, report, given))
        if report.missing:
            console.warning(
                f"{format_bytes(report.missing)} more would have to go, but the rest is in use "
                "or was used since the running jobs began"
            )


def _clean_text(cache: Cache, report: CleanReport, given: dict[str, Any]) -> str:
    removed, kept = ("would remove", "would keep") if report.dry_run else ("removed", "kept")
    rest = f"{kept} {counted(report.kept, 'shard')}, {format_bytes(report.kept_bytes)}"
    max_size = given.get("max_size", cache.config.max_size)
    limit = Volume.of(cache.dir).budget(cache.config.replace(max_size=max_size))
    if limit:
        rest += f" ({report.kept_bytes / limit:.0%} of {format_bytes(limit)})"
    if not report.removed:
        return f"nothing to remove; {rest}"
    max_age = parse_duration(given.get("max_age", cache.config.max_age or 0.0))
    reasons = {
        Reason.MAX_SIZE: "over max_size",
        Reason.MIN_FREE: "for min_free",
        Reason.MAX_AGE: f"older than {exact_duration(max_age)}",
        Reason.ORPHAN: "left by dead processes",
    }
    found = [f"{n:,} {why}" for reason, why in reasons.items() if (n := report.count(reason))]
    why = f": {', '.join(found)}" if found else ""
    shards, size = counted(len(report.removed), "shard"), format_bytes(report.freed)
    return f"{removed} {shards}, {size}{why}\n{rest}"
