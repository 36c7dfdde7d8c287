"""``shardcache ls``, ``rm``, ``pin``, ``unpin`` and ``clean``: the shards in the cache."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli import main as cli
from shardcache.cli.main import ExitCode, Invocation, command, flag
from shardcache.cli.output import Console, counted, local_time, printable
from shardcache.clock import utc
from shardcache.config import Config
from shardcache.locks.flock import read_holder
from shardcache.space.clean import CleanReport
from shardcache.space.eviction import Policy, Removal, disk_bytes, linked
from shardcache.space.memory import Volume, allocation
from shardcache.store.directory import DamagedError, Metadata
from shardcache.store.entry import Entry
from shardcache.store.partial import in_flight, read_progress
from shardcache.store.root import is_cache
from shardcache.units import Limit, exact_duration, format_age, format_bytes

#: A shard or a fetch as it is printed: raw values by name.
Row = dict[str, Any]
_GAUGE = 24
_SORTED_BY = ("url", "size", "used", "fetched", "state")
_specs_argument = click.argument("specs", nargs=-1, required=True, metavar="SPEC...")
#: What is known of a shard in the cache.
_SHARD_FIELDS = (
    *("url", "size", "used_at", "fetched_at", "state", "key", "version", "path", "etag"),
    *("digest", "checked"),
)
#: Columns, without and with ``--long``.
_SHARD = ("SHARD", "SIZE", "USED", "FETCHED", "STATE"), ("VERSION", "PATH")
_PARTIAL = ("SHARD", "SIZE", "WRITTEN", "DONE", "BEGUN", "STATE"), ("HOLDER", "DIR")


# -- ls ----------------------------------------------------------------------------


@command("ls")
@flag("-l", "--long", help="Also show version and path.")
@flag("--partial", help="List fetches in flight instead of entries.")
@cli.number_option("--limit", help="Show the first N only.", least=0)
@click.option(
    "--sort",
    type=click.Choice([f"{field}{turn}" for field in _SORTED_BY for turn in ("", ":desc")]),
    default="url",
    metavar="FIELD[:desc]",
    help="Order by url, size, used, fetched or state.  [default: url]",
)
@click.argument("specs", nargs=-1, metavar="[SPEC]...")
def ls_command(
    invocation: Invocation,
    specs: tuple[str, ...],
    sort: str,
    limit: int | None,
    partial: bool,
    long: bool,
) -> None:
    """List the shards in the cache.

    A SPEC is a URL with {braces}, * or ?, a prefix ending in /, or without a slash the
    last part of URLs. States: ok, in_use (being read), pinned (see `pin`), not_cached
    (pinned, but not fetched yet), damaged (will be fetched again).
    With --partial: live (being fetched) and orphan (left by a dead process, will
    be resumed or swept).

    \b
    Examples:
      shardcache ls 'train-04*.tar' --sort size:desc --limit 10
      shardcache ls --partial
      shardcache ls --json | jq -r '.shards[] | select(.state == "pinned") | .url'
    """
    console = invocation.console
    with invocation.cache(loaded=invocation.upkeep()) as cache:
        if not is_cache(cache.dir):
            console.hint(f"Nothing was cached in {cache.dir} yet.")
        rows, summary, footer = (_list_partials if partial else _list_shards)(cache)
        selections = cache.selections(specs)
    found = [row for row in rows if not specs or any((row["url"] or "") in s for s in selections)]
    shown = _ordered(found, sort)[:limit]
    if len(found) != len(rows):
        footer = f"{sum(row['state'] != 'not_cached' for row in found):,} of {footer}"
    for selection in selections:
        if not any((row["url"] or "") in selection for row in found):
            console.hint(f"{selection.text}: nothing in {cache.dir} matches.")
    summary |= {"matching": len(found), "shown": len(shown)}
    console.object("ls", **{"partials" if partial else "shards": shown}, summary=summary)
    usual, more = _PARTIAL if partial else _SHARD
    titles = [*usual, *more] if long else usual
    cells = ([_cell(row, title) for title in titles] for row in shown)
    console.table(titles, cells, right=("SIZE", "USED", "WRITTEN", "DONE", "BEGUN"))
    console.data(footer)


def _ordered(rows: list[Row], sort: str) -> list[Row]:
    """Rows as ``--sort`` says, the latest time first; unknown values come last."""
    field, _, direction = sort.partition(":")
    name = {"used": "used_at", "fetched": "fetched_at"}.get(field, field)
    rows = sorted(rows, key=lambda row: str(row["url"]))
    known = [row for row in rows if row.get(name) is not None]
    known.sort(key=lambda row: row[name], reverse=(direction == "desc") != name.endswith("_at"))
    return known + [row for row in rows if row.get(name) is None]


def _cell(row: Row, title: str) -> str:
    name = {"SHARD": "url", "WRITTEN": "written_bytes"}.get(title, title.lower())
    match title:
        case "DONE":
            return f"{row['written_bytes'] / row['size']:.0%}" if row["size"] else "-"
        case "USED" | "BEGUN":
            moment = row[f"{name}_at"]
            return "-" if moment is None else format_age(time.time() - moment.timestamp())
        case "FETCHED":
            return local_time(row["fetched_at"])
        case "SIZE" | "WRITTEN":
            return "-" if row[name] is None else format_bytes(row[name])
    return row[name] or "-"


def _list_shards(cache: Cache) -> tuple[list[Row], Row, str]:
    """The shards in the cache, and their sum, for programs and for people."""
    home = cache.processes.here().home
    policy = Policy.of(cache.config, home.node, time.time())
    shards: dict[Entry, Row] = {}
    for entry in cache.entries():
        metadata: Metadata | None = None  # what cannot be read of a damaged one is None
        path: str | None = None
        state = "damaged"
        try:
            path = str(entry.data)
            metadata = entry.metadata()
            stated = metadata.key, metadata.info.version, metadata.size
            is_whole = entry.data.lstat().st_size == entry.size
            if is_whole and stated == (entry.key, entry.version, entry.size):
                state = "in_use" if home.store.in_use(entry) else "ok"
                state = "pinned" if entry.key in policy.pinned else state
        except (DamagedError, OSError):
            if not entry.path.exists():
                continue  # evicted meanwhile
        shards[entry] = {
            "url": metadata.url if metadata else None,
            "size": entry.size,
            "used_at": utc(entry.used),
            "fetched_at": utc(metadata.fetched_at) if metadata else None,
            "state": state,
            "key": entry.key,
            "version": entry.version,
            "path": path,
            "etag": metadata.info.etag if metadata else None,
            "digest": metadata.digest if metadata else None,
            "checked": metadata.checked if metadata else None,
        }

    cached = {entry.key for entry in shards}
    awaited: list[Row] = [
        {**dict.fromkeys(_SHARD_FIELDS), "url": url or None, "state": "not_cached", "key": key}
        for key, url in cache.pins().items()
        if key not in cached
    ]

    def stays(entry: Entry) -> bool:
        return shards[entry]["state"] in ("pinned", "in_use") or policy.protects(entry)

    files, allocated = linked(shards), home.space().allocated
    size = sum(links[0].size for links in files)
    used = sum(disk_bytes(links, allocated) for links in files)
    evictable = sum(links[0].size for links in files if not any(map(stays, links)))
    most = Volume.of(cache.dir).budget(cache.config) if shards else None
    footer = f"{counted(len(files), 'shard')}, {format_bytes(size)}"
    if most is not None:
        footer += f", {format_bytes(used)} of {format_bytes(most)} on disk ({used / most:.0%})"
    if shards:
        footer += f"; {format_bytes(evictable)} evictable"
    if awaited:
        footer += f"; {len(awaited):,} pinned, not cached yet"
    summary = {"shards": len(files), "bytes": size, "disk_bytes": used, "max_size": most}
    summary |= {"evictable_bytes": evictable, "not_cached": len(awaited)}
    return [*shards.values(), *awaited], summary, footer


def partials(cache: Cache) -> Iterator[Row]:
    """The fetches in flight, and what dead processes left of theirs."""
    for store in cache.processes.here().stores():
        for found in in_flight(store.layout):
            if not found.key:
                continue  # an entry on its way out
            progress = read_progress(found.path)
            metadata = progress.metadata if progress else None
            holder = read_holder(store.layout.holder(found.key)) if found.live else None
            yield {
                "url": metadata.url if metadata else None,
                "size": found.size,
                "written_bytes": progress.written if progress else found.occupied,
                "state": "live" if found.live else "orphan",
                "begun_at": utc(metadata.fetched_at) if metadata else None,
                "holder": str(holder) if holder else None,
                "pid": holder.pid if holder else None,
                "rank": holder.rank if holder else None,
                "key": found.key,
                "dir": str(found.path),
            }


def _list_partials(cache: Cache) -> tuple[list[Row], Row, str]:
    """`partials`, and their sum, for programs and for people."""
    rows = list(partials(cache))
    live = sum(row["state"] == "live" for row in rows)
    orphans, written = len(rows) - live, sum(row["written_bytes"] for row in rows)
    whole = f"{counted(len(rows), 'partial')}, {format_bytes(written)}"
    summary = {"partials": len(rows), "live": live, "orphans": orphans, "written_bytes": written}
    return rows, summary, f"{whole}: {live:,} live, {counted(orphans, 'orphan')}"


def tiers(cache: Cache, config: Config) -> Iterator[Row]:
    """How full each tier is; ``max_size`` is None where free space alone limits it."""
    entries = list(cache.entries())
    for number, tier in enumerate(config.by_tier(), 1):
        root, allocated = os.fspath(tier.dir), allocation(tier.dir)
        files = linked(entry for entry in entries if entry.directory.startswith(f"{root}/"))
        yield {
            "tier": number,
            "dir": root,
            "shards": len(files),
            "bytes": sum(links[0].size for links in files),
            "disk_bytes": sum(disk_bytes(links, allocated) for links in files),
            "max_size": Volume.of(tier.dir).budget(tier) if tier.dir.is_dir() else None,
        }


def gauge(tier: Row) -> str:
    """How full a tier is, in a line."""
    used, most, bar = tier["disk_bytes"], tier["max_size"], ""
    if most:
        bar = "#" * round(_GAUGE * min(1.0, used / most))
        bar = f"[{bar:-<{_GAUGE}}] {used / most:4.0%}  "
    return f"{printable(tier['dir'])}  {bar}{held(tier)}"


def held(tier: Row) -> str:
    """Shards and bytes of a tier, for people; beside its limit, the bytes on disk."""
    used, most = tier["disk_bytes"], tier["max_size"]
    size = f"{format_bytes(used)} of {format_bytes(most)} on disk" if most else None
    return f"{counted(tier['shards'], 'shard')}, {size or format_bytes(tier['bytes'])}"


# -- rm, pin and unpin --------------------------------------------------------------


def _print(
    console: Console, name: str, rows: list[Row], text: str, bad: Mapping[str, str], **summary: Any
) -> ExitCode:
    """Print what became of each shard; ``bad`` says what is wrong with a state."""
    console.object(name, shards=rows, summary=summary)
    console.info(text)
    for row in rows:
        if row["state"] in bad:
            console.error(f"{row['url']} {bad[row['state']]}")
    if any(row["state"] == "in_use" for row in rows):
        return ExitCode.BUSY
    return ExitCode.FAILED if any(row["state"] in bad for row in rows) else ExitCode.DONE


@command("rm")
@cli.dry_run_option
@cli.yes_option
@_specs_argument
def rm_command(
    invocation: Invocation, specs: tuple[str, ...], yes: bool, dry_run: bool
) -> ExitCode:
    """Remove shards, all cached versions of them.

    A SPEC is as for `ls`. Exit code 6 if a shard stays because it is pinned or being
    read, 1 if one was not cached or nothing matches.

    \b
    Examples:
      shardcache rm -y 's3://lab/old-{0000..0127}.tar'
      shardcache rm -n s3://lab/train-0412.tar
    """
    rows = list[Row]()
    with invocation.cache() as cache:
        shards = cache.select(specs)
        sizes = [cache.remove(shard, dry_run=True)[0] for shard in shards]
        if any(sizes) and not dry_run:
            number, total = counted(sum(map(bool, sizes)), "shard"), format_bytes(sum(sizes))
            invocation.confirm(f"Remove {number}, {total}, from {cache.dir}?", yes)
        for shard in shards:
            freed, in_use = cache.remove(shard, dry_run=dry_run)
            state = "in_use" if in_use else "removed" if freed else "not_cached"
            rows.append({"url": str(shard), "size": freed, "state": state})
    counts, freed = Counter(row["state"] for row in rows), sum(row["size"] for row in rows)
    removed = f"{counted(counts['removed'], 'shard')}, {format_bytes(freed)}"
    why = "stays: it is pinned or being read. See `shardcache unpin`, or try again when its job "
    return _print(
        invocation.console,
        "rm",
        rows,
        f"{'would remove' if dry_run else 'removed'} {removed}",
        {"in_use": f"{why}has ended.", "not_cached": f"is not cached in {cache.dir}"},
        **{name: counts[name] for name in ("removed", "in_use", "not_cached")},
        dry_run=dry_run,
        removed_bytes=freed,
    )


@command("pin")
@click.option(
    "--for", "seconds", type=cli.DURATION, help="So long, such as 3d; else until `unpin`."
)
@_specs_argument
def pin_command(invocation: Invocation, specs: tuple[str, ...], seconds: float | None) -> ExitCode:
    """Keep shards: no limit, no `clean --all`, no `rm` removes them.

    A SPEC is as for `ls`. A glob or a prefix pins what it matches in the cache now. A URL,
    also with {braces}, need not be cached: it is not fetched, but kept once it is. To
    pin a shard again sets the time anew.

    \b
    Examples:
      shardcache pin 's3://lab/val-{0000..0031}.tar' --for 3d
      shardcache prewarm 's3://lab/val-{0000..0031}.tar'
    """
    rows = list[Row]()
    with invocation.cache() as cache:
        for shard in cache.pin(specs, seconds):
            state = "cached" if shard.raw in cache else "not_cached"
            rows.append({"url": str(shard), "state": state})
    absent = sum(row["state"] == "not_cached" for row in rows)
    text = f"pinned {counted(len(rows), 'shard')} "
    text += "until unpinned" if seconds is None else f"for {exact_duration(seconds)}"
    if absent:
        text += f"; {absent:,} not cached yet, and kept once fetched"
    summary = {"pinned": len(rows), "not_cached": absent, "seconds": seconds}
    return _print(invocation.console, "pin", rows, text, {}, **summary)


@command("unpin")
@_specs_argument
def unpin_command(invocation: Invocation, specs: tuple[str, ...]) -> ExitCode:
    """Keep shards no longer than the limits say.

    A SPEC is as for `ls`; a glob or a prefix matches pinned shards. Exit code 1 if one
    was not pinned or nothing matches.

    \b
    Examples:
      shardcache unpin 's3://lab/val-{0000..0031}.tar'
    """
    with invocation.cache() as cache:
        shards = cache.select(specs, pinned=True)
        ended = cache.unpin(shards)
    rows = [
        {"url": str(shard), "state": "unpinned" if shard in ended else "not_pinned"}
        for shard in shards
    ]
    unpinned = sum(row["state"] == "unpinned" for row in rows)
    return _print(
        invocation.console,
        "unpin",
        rows,
        f"unpinned {counted(unpinned, 'shard')}",
        {"not_pinned": f"was not pinned in {cache.dir}"},
        unpinned=unpinned,
        not_pinned=len(rows) - unpinned,
    )


# -- clean -----------------------------------------------------------------------


@command("clean")
@cli.dry_run_option
@cli.yes_option
@flag("--all", "everything", help="Remove all that nobody is reading.")
@click.option(
    "--wait/--no-wait", default=True, help="Wait for another clean, or exit with 6 (default: wait)."
)
@flag("--orphans", help="Only what dead processes left, however new.")
@click.option(
    "--max-age", type=cli.DURATION, help="Remove what was unused for so long, such as 14d."
)
@click.option(
    "--min-free", type=cli.SIZE, help="Space to be free afterwards, such as 100GB or 10%."
)
@click.option("--max-size", type=cli.SIZE, help="Most the cache may hold, such as 800GB or 80%.")
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

    Without options the configured limits hold, and where none is configured those of the
    running job, or of the last one. What is being read, and what was
    used since the oldest running job began, stays. Partials younger than an hour
    stay, too, so that an interrupted prewarm resumes; --orphans removes them.

    \b
    Examples:
      shardcache clean -n
      17 * * * *  /opt/venv/bin/shardcache --dir /local/nvme/shards clean -q
      shardcache clean --all -y
    """
    given: dict[str, Any] = {n: str(value) for n, value in limits.items() if value is not None}
    if everything and (given or orphans):
        raise click.UsageError("--all removes everything; give no limit or --orphans with it.")
    console, loaded = invocation.console, invocation.upkeep()
    with invocation.cache(loaded=loaded) as cache:
        if not cache.dir.exists():
            console.hint(f"{cache.dir} does not exist; there is nothing to clean.")
            console.object("clean", CleanReport((), 0, 0, 0, dry_run), freed=0, job_limits={})
            return
        if everything and not dry_run:
            invocation.confirm(f"Remove every shard in {cache.dir}?", yes)
        is_limited = not (everything or (orphans and not given))
        job_limits = invocation.tell_limits(loaded, *given) if is_limited else {}
        report = cache.clean(
            **given, orphans=orphans, everything=everything, dry_run=dry_run, wait=wait
        )
        console.object("clean", report, freed=report.freed, job_limits=job_limits)
        if dry_run:
            rows = [(_url_of(r), format_bytes(r.size), r.reason) for r in report.removed]
            console.table(("SHARD", "SIZE", "WHY"), rows, right=("SIZE",))
        console.info(_clean_text(report))
        if report.missing:
            console.warning(
                f"{format_bytes(report.missing)} more would have to go, but the rest is in use "
                "or was used since the running jobs began"
            )


def _url_of(removal: Removal) -> str:
    """What would go: its URL, or its directory if that does not tell the URL."""
    with contextlib.suppress(DamagedError, OSError):
        if removal.entries:
            return removal.entries[0].metadata().url
        if progress := read_progress(Path(removal.name)):
            return progress.metadata.url
    return removal.name


def _clean_text(report: CleanReport) -> str:
    removed, kept = ("would remove", "would keep") if report.dry_run else ("removed", "kept")
    rest = f"{kept} {counted(report.kept, 'shard')}, {format_bytes(report.kept_bytes)}"
    if not report.removed:
        return f"nothing to remove; {rest}"
    reasons = Counter(each.reason for each in report.removed)
    why = ", ".join(f"{number:,} {reason}" for reason, number in reasons.items())
    shards, size = counted(len(report.removed), "shard"), format_bytes(report.freed)
    return f"{removed} {shards}, {size}: {why}\n{rest}"
