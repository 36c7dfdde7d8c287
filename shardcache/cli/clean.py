"""``shardcache clean`` and ``shardcache rm``: the commands that remove.

Both go through the library's own planner: what a running job uses stays, and a
dry run shows what would happen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.arguments import (
    dry_run_option,
    duration,
    expand_shards,
    limit,
    urls_argument,
    yes_option,
)
from shardcache.cli.invocation import Invocation, command
from shardcache.cli.output import Column, Console, counted
from shardcache.cli.statusline import Rate, StatusLine, share_done
from shardcache.units import Limit, exact_duration, format_bytes

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.space.clean import CleanReport, CleanStatus
    from shardcache.space.eviction import Removal

__all__ = ["clean_command", "rm_command"]

_BUSY = 6
_REMOVED = [Column("dir"), Column("size"), Column("reason")]


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
@dry_run_option("Say what would go, remove nothing.")
@yes_option("Do not ask before --all.")
@click.option("--all", "everything", is_flag=True, help="Remove all that nobody is reading.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another clean, or exit with 6 (default: wait)."
)
@click.option("--orphans", is_flag=True, help="Only what dead processes left.")
@click.option(
    "--max-age",
    callback=duration,
    metavar="DURATION",
    help="Remove what was unused for so long, such as 14d.",
)
@click.option(
    "--min-free",
    callback=limit,
    metavar="SIZE",
    help="Space to be free afterwards, such as 100GB or 10%.",
)
@click.option(
    "--max-size",
    callback=limit,
    metavar="SIZE",
    help="Most the cache may hold, such as 800GB or 80%.",
)
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
    used since the oldest running job began, stays.
    """
    limits = {"max_size": max_size, "min_free": min_free, "max_age": max_age}
    given = {name: value for name, value in limits.items() if value is not None}
    if everything and (given or orphans):
        raise click.UsageError("--all removes everything; give no limit or --orphans with it.")
    options: dict[str, Any] = {name: str(value) for name, value in given.items()}
    cache = invocation.cache()
    if not cache.dir.exists():
        invocation.console.hint(f"{cache.dir} does not exist; there is nothing to clean.")
        if not invocation.console.human:
            from shardcache.space.clean import CleanReport

            _show(invocation, cache, CleanReport((), 0, 0, 0, dry_run), given)
        return 0
    if everything and not dry_run:
        invocation.confirm(f"Remove every shard in {cache.dir}?", yes)
    status = _status(invocation.console)
    with cache:
        with StatusLine(invocation.console, _progress(status)):
            report = cache.clean(
                **options,
                limits=bool(given) or not orphans,
                everything=everything,
                dry_run=dry_run,
                wait=wait,
                status=status,
            )
        _show(invocation, cache, report, given)
    return 0


def _status(console: Console) -> CleanStatus:
    """As lines of JSON each thing is told as it goes."""
    from shardcache.space.clean import CleanStatus

    return CleanStatus(listener=lambda removal: console.line("removal", _row(removal)))


def _row(removal: Removal) -> dict[str, Any]:
    return {"dir": removal.name, "size": removal.size, "reason": removal.reason.value}


def _progress(status: CleanStatus) -> Callable[[float], str]:
    """``12%, 820/6,800 shards, 41.0 GB of 340.0 GB, ETA 0:03:50``."""
    known = Rate()

    def text(now: float) -> str:
        if status.victims is None:
            return "looking for what is to go"
        size = f"{format_bytes(status.done_bytes)} of {format_bytes(status.victim_bytes)}"
        parts = [f"{status.done:,}/{status.victims:,} shards", size]
        return share_done(status.done, status.victims, known.update(now, status.done), parts)

    return text


def _show(invocation: Invocation, cache: Cache, report: CleanReport, given: dict[str, Any]) -> None:
    console = invocation.console
    if console.human:
        if console.verbosity:
            for removal in report.removed:
                console.said(f"{removal.name}  {format_bytes(removal.size)}  {removal.reason}")
        for line in _clean_text(cache, report, given):
            console.said(line)
    else:
        # As lines they were told when they went.
        rows = [] if console.format == "jsonl" else list(map(_row, report.removed))
        summary = {
            "dry_run": report.dry_run,
            "removed": len(report.removed),
            "removed_bytes": report.freed,
            "kept": report.kept,
            "kept_bytes": report.kept_bytes,
            "missing_bytes": report.missing,
            "missing_inodes": report.missing_inodes,
        }
        console.table("clean", "removal", _REMOVED, rows, summary=summary)
    if report.missing or report.missing_inodes:
        inodes = counted(report.missing_inodes, "inode")
        console.warning(
            f"{format_bytes(report.missing) if report.missing else inodes} more would have to go, "
            "but the rest is in use or was used since the running jobs began"
        )


def _clean_text(cache: Cache, report: CleanReport, given: dict[str, Any]) -> list[str]:
    removed, kept = ("would remove", "would keep") if report.dry_run else ("removed", "kept")
    rest = f"{kept} {counted(report.kept, 'shard')}, {format_bytes(report.kept_bytes)}"
    limit = _limit(cache, given)
    if limit:
        rest += f" ({report.kept_bytes / limit:.0%} of {format_bytes(limit)})"
    if not report.removed:
        return [f"nothing to remove; {rest}"]
    count = counted(len(report.removed), "shard")
    text = f"{removed} {count}, {format_bytes(report.freed)}"
    reasons = _reasons(cache, report, given)
    return [f"{text}: {reasons}" if reasons else text, rest]


def _reasons(cache: Cache, report: CleanReport, given: dict[str, Any]) -> str:
    from shardcache.space.eviction import Reason

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


def _limit(cache: Cache, given: dict[str, Any]) -> int | None:
    from shardcache.space.volume import Volume

    changes = {name: str(value) for name, value in given.items() if name == "max_size"}
    return Volume.of(cache.dir).budget(cache.config.replace(**changes))


@command(
    "rm",
    short="Remove shards.",
    examples="""
        shardcache rm s3://lab/train-0412.tar
        shardcache rm -y 's3://lab/old-{0000..0127}.tar'
        shardcache rm -n s3://lab/train-0412.tar
    """,
)
@dry_run_option("Say what would go, remove nothing.")
@yes_option("Do not ask.")
@urls_argument()
def rm_command(invocation: Invocation, urls: tuple[str, ...], yes: bool, dry_run: bool) -> int:
    """Remove shards, all cached versions of them.

    Braces are expanded. Exit code 6 if a shard stays because it is pinned or being
    read, 1 if one was not cached.
    """
    cache = invocation.cache(looking=True)
    shards = expand_shards(cache, urls)
    with cache:
        sizes = _sizes(cache, shards)
        if sizes and not dry_run:
            total = format_bytes(sum(sizes.values()))
            question = f"Remove {counted(len(sizes), 'shard')}, {total}, from {cache.dir}?"
            invocation.confirm(question, yes)
        rows = []
        for key in sizes:
            freed, in_use = cache.remove(shards[key].raw, dry_run=dry_run)
            state = "in_use" if in_use else "removed"
            rows.append({"url": str(shards[key]), "size": freed, "state": state})
    rows += [
        {"url": str(shard), "size": 0, "state": "not_cached"}
        for key, shard in shards.items()
        if key not in sizes
    ]
    return _show_removed(invocation, cache, rows, dry_run)


def _sizes(cache: Cache, keys: Iterable[str]) -> dict[str, int]:
    """Bytes of those shards that are there, all versions together."""
    from shardcache.layout import Layout
    from shardcache.ranks import detect
    from shardcache.store.root import check_links
    from shardcache.store.store import Namespaces

    check_links(Layout.of_root(cache.dir))
    stores = Namespaces(cache.config, detect()).all()
    found = {key: [e.size for store in stores for e in store.entries_of(key)] for key in keys}
    return {key: sum(sizes) for key, sizes in found.items() if sizes}


def _show_removed(
    invocation: Invocation, cache: Cache, rows: list[dict[str, Any]], dry_run: bool
) -> int:
    console = invocation.console
    removed = [row for row in rows if row["state"] == "removed"]
    in_use = [row for row in rows if row["state"] == "in_use"]
    absent = [row for row in rows if row["state"] == "not_cached"]
    freed = sum(row["size"] for row in rows)
    if console.human:
        verb = "would remove" if dry_run else "removed"
        if removed or not absent:
            console.said(f"{verb} {counted(len(removed), 'shard')}, {format_bytes(freed)}")
    else:
        summary = {
            "dry_run": dry_run,
            "removed": len(removed),
            "removed_bytes": freed,
            "in_use": len(in_use),
            "not_cached": len(absent),
        }
        columns = [Column("url"), Column("size"), Column("state")]
        console.table("rm", "shard", columns, rows, summary=summary)
    for row in in_use:
        console.error(
            f"{row['url']} stays: it is pinned or being read. See `shardcache unpin`, or try again "
            "when its job has ended."
        )
    for row in absent:
        console.error(f"{row['url']} is not cached in {cache.dir}")
    return _BUSY if in_use else 1 if absent else 0
