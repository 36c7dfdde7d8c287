"""``shardcache ls``, ``rm``, ``pin`` and ``unpin``: single shards in the cache."""

from __future__ import annotations

import fnmatch
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli.main import (
    DURATION,
    ExitCode,
    Invocation,
    command,
    dry_run_option,
    flag,
    number_option,
    urls_argument,
    yes_option,
)
from shardcache.cli.output import counted, short_date
from shardcache.clock import utc
from shardcache.locks.flock import read_holder
from shardcache.prewarm.plan import expand
from shardcache.ranks import detect
from shardcache.space.eviction import Policy, linked
from shardcache.space.memory import Volume
from shardcache.space.pins import pinned_keys
from shardcache.store.entry import DamagedError, Metadata
from shardcache.store.partial import in_flight, read_progress
from shardcache.store.root import is_cache
from shardcache.store.store import Entry, Namespaces
from shardcache.units import exact_duration, format_age, format_bytes
from shardcache.urls import ShardURL, redact

#: A shard or a fetch as it is printed: raw values by name.
Row = dict[str, Any]
#: What ``--sort`` knows -> field of a row; partials have ``begun_at`` alone.
_SORTED_BY = {"url": "url", "size": "size", "used": "used_at", "fetched": "fetched_at",
              "state": "state"}  # fmt: skip
#: Columns, without and with ``--long``.
_SHARD = ("SHARD", "SIZE", "USED", "FETCHED", "STATE"), ("VERSION", "PATH")
_PARTIAL = ("SHARD", "SIZE", "WRITTEN", "DONE", "BEGUN", "STATE"), ("HOLDER", "DIRECTORY")


def matches_glob(glob: str, url: str) -> bool:
    """Whether ``glob`` means ``url``: all of it, or its last part if ``glob`` has no slash.

    ``*`` matches across slashes. Credentials in ``glob`` do not count.
    """
    subject = url if "/" in glob else url.rpartition("/")[2]
    return fnmatch.fnmatchcase(subject, redact(glob))


# -- ls ----------------------------------------------------------------------------


@command("ls")
@flag("-l", "--long", help="Also show version and path.")
@flag("--partial", help="List fetches in flight instead of entries.")
@number_option("--limit", help="Show the first N only.", least=0)
@click.option(
    "--sort",
    type=click.Choice([f"{field}{turn}" for field in _SORTED_BY for turn in ("", ":asc", ":desc")]),
    default="url",
    metavar="FIELD[:desc]",
    help="Order by url, size, used, fetched or state.  [default: url]",
)
@click.argument("glob", required=False)
def ls_command(
    invocation: Invocation,
    glob: str | None,
    sort: str,
    limit: int | None,
    partial: bool,
    long: bool,
) -> None:
    """List the shards in the cache.

    GLOB is matched against whole URLs, or against the last part of them if it has
    no slash. States: ok, in_use (being read), pinned (see `pin`), damaged (will be
    fetched again).
    With --partial: live (being fetched) and orphan (left by a dead process, will
    be resumed or swept).

    \b
    Examples:
      shardcache ls 'train-04*.tar' --sort size:desc --limit 10
      shardcache ls --partial
      shardcache ls --json | jq -r '.shards[] | select(.state == "pinned") | .url'
    """
    console = invocation.console
    with invocation.cache(existing=True) as cache:
        if not is_cache(cache.dir):
            console.hint(f"Nothing was cached in {cache.dir} yet.")
        if partial:
            rows = list(partials(cache))
            summary, footer = _sum_partials(rows)
        else:
            shards = dict(_shards(cache))
            rows = list(shards.values())
            summary, footer = _sum_shards(cache, shards)
    found = [row for row in rows if glob is None or matches_glob(glob, row["url"] or "")]
    shown = _ordered(found, sort)[:limit]
    if len(found) != len(rows):
        footer = f"{len(found):,} of {footer}"
    summary |= {"matching": len(found), "shown": len(shown)}
    console.object("ls", {"partials" if partial else "shards": shown, "summary": summary})
    usual, more = _PARTIAL if partial else _SHARD
    titles = [*usual, *more] if long else usual
    cells = ([_cell(row, title) for title in titles] for row in shown)
    console.table(titles, cells, right=("SIZE", "USED", "WRITTEN", "DONE", "BEGUN"))
    console.data(footer)


def _ordered(rows: list[Row], sort: str) -> list[Row]:
    """Rows as ``--sort`` says; unknown values come last. A time sorts as its age."""
    field, _, direction = sort.partition(":")
    is_reversed = direction == "desc"

    def key(row: Row) -> tuple[bool, Any]:
        value = row.get(_SORTED_BY[field], row.get("begun_at"))
        value = -value.timestamp() if isinstance(value, datetime) else value
        return (value is None) != is_reversed, 0 if value is None else value

    return sorted(sorted(rows, key=lambda row: str(row["url"])), key=key, reverse=is_reversed)


def _cell(row: Row, title: str) -> str:
    match title:
        case "SHARD":
            return row["url"] or "?"
        case "SIZE" | "WRITTEN":
            size = row["size" if title == "SIZE" else "written_bytes"]
            return "-" if size is None else format_bytes(size)
        case "DONE":
            return f"{row['written_bytes'] / row['size']:.0%}" if row["size"] else "-"
        case "USED" | "BEGUN":
            moment = row["used_at" if title == "USED" else "begun_at"]
            return "-" if moment is None else format_age(time.time() - moment.timestamp())
        case "FETCHED":
            return short_date(row["fetched_at"])
    return row["dir" if title == "DIRECTORY" else title.lower()] or "-"


def _tier(cache: Cache, path: str) -> int:
    """The number of the tier that ``path`` is in: 1 is the first that is filled."""
    tiers = cache.config.by_tier()
    inside = (n for n, tier in enumerate(tiers, 1) if path.startswith(f"{tier.dir}/"))
    return next(inside, len(tiers))


def _shards(cache: Cache) -> Iterator[tuple[Entry, Row]]:
    """The shards in the cache; what cannot be read of a damaged one is None."""
    namespaces = Namespaces(cache.config, detect())
    pinned = pinned_keys(namespaces.node, time.time())
    for entry in cache.entries():
        metadata: Metadata | None = None
        path: str | None = None
        state = "damaged"
        try:
            path = str(entry.data)
            metadata = entry.metadata()
            stated = metadata.key, metadata.info.version, metadata.size
            is_whole = entry.data.lstat().st_size == entry.size
            if is_whole and stated == (entry.key, entry.version, entry.size):
                state = "in_use" if namespaces.own.is_pinned(entry) else "ok"
                state = "pinned" if entry.key in pinned else state
        except (DamagedError, OSError):
            if not entry.path.exists():
                continue  # evicted meanwhile
        row = {
            "url": metadata.url if metadata else None,
            "size": entry.size,
            "used_at": utc(entry.used),
            "fetched_at": utc(metadata.fetched_at) if metadata else None,
            "state": state,
            "tier": _tier(cache, entry.directory),
            "key": entry.key,
            "version": entry.version,
            "path": path,
            "etag": metadata.info.etag if metadata else None,
            "digest": metadata.digest if metadata else None,
            "checked": metadata.checked if metadata else None,
        }
        yield entry, row


def _sum_shards(cache: Cache, shards: dict[Entry, Row]) -> tuple[Row, str]:
    """The sum of the shards, for programs and for people."""
    files = linked(shards)
    policy = Policy.of(cache.config, Namespaces(cache.config, detect()).node, time.time())

    def stays(entry: Entry) -> bool:
        return shards[entry]["state"] in ("pinned", "in_use") or policy.protects(entry)

    size = sum(links[0].size for links in files)
    evictable = sum(links[0].size for links in files if not any(map(stays, links)))
    most = Volume.of(cache.dir).budget(cache.config) if shards else None
    footer = f"{counted(len(files), 'shard')}, {format_bytes(size)}"
    if most is not None:
        footer += f" of {format_bytes(most)} ({size / most:.0%})"
    if shards:
        footer += f"; {format_bytes(evictable)} evictable"
    summary = {"shards": len(files), "bytes": size, "max_size": most, "evictable_bytes": evictable}
    return summary, footer


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
                "tier": _tier(cache, str(found.path)),
                "key": found.key,
                "dir": str(found.path),
            }


def _sum_partials(rows: list[Row]) -> tuple[Row, str]:
    """The sum of the partials, for programs and for people."""
    live = sum(row["state"] == "live" for row in rows)
    orphans, written = len(rows) - live, sum(row["written_bytes"] for row in rows)
    whole = f"{counted(len(rows), 'partial')}, {format_bytes(written)}"
    summary = {"partials": len(rows), "live": live, "orphans": orphans, "written_bytes": written}
    return summary, f"{whole}: {live:,} live, {counted(orphans, 'orphan')}"


# -- rm, pin and unpin --------------------------------------------------------------


def _parse_shards(cache: Cache, urls: Iterable[str]) -> list[ShardURL]:
    """Each shard once; braces are expanded."""
    return list({shard.key: shard for shard in map(cache.parse, expand(urls))}.values())


@command("rm")
@dry_run_option
@yes_option
@urls_argument
def rm_command(invocation: Invocation, urls: tuple[str, ...], yes: bool, dry_run: bool) -> ExitCode:
    """Remove shards, all cached versions of them.

    Braces are expanded. Exit code 6 if a shard stays because it is pinned or being
    read, 1 if one was not cached.

    \b
    Examples:
      shardcache rm -y 's3://lab/old-{0000..0127}.tar'
      shardcache rm -n s3://lab/train-0412.tar
    """
    console, rows, counts = invocation.console, list[Row](), Counter[str]()
    with invocation.cache(existing=True) as cache:
        shards = _parse_shards(cache, urls)
        sizes = [cache.remove(shard.raw, dry_run=True)[0] for shard in shards]
        if any(sizes) and not dry_run:
            number, total = counted(sum(map(bool, sizes)), "shard"), format_bytes(sum(sizes))
            invocation.confirm(f"Remove {number}, {total}, from {cache.dir}?", yes)
        for shard in shards:
            freed, in_use = cache.remove(shard.raw, dry_run=dry_run)
            state = "in_use" if in_use else "removed" if freed else "not_cached"
            rows.append({"url": str(shard), "size": freed, "state": state})
            counts[state] += 1
    freed = sum(row["size"] for row in rows)
    summary = {name: counts[name] for name in ("removed", "in_use", "not_cached")}
    summary |= {"dry_run": dry_run, "removed_bytes": freed}
    console.object("rm", shards=rows, summary=summary)
    verb = "would remove" if dry_run else "removed"
    console.info(f"{verb} {counted(counts['removed'], 'shard')}, {format_bytes(freed)}")
    for row in rows:
        if row["state"] == "in_use":
            console.error(
                f"{row['url']} stays: it is pinned or being read. See `shardcache unpin`, or try "
                "again when its job has ended."
            )
        elif row["state"] == "not_cached":
            console.error(f"{row['url']} is not cached in {cache.dir}")
    if counts["in_use"]:
        return ExitCode.BUSY
    return ExitCode.FAILED if counts["not_cached"] else ExitCode.DONE


@command("pin")
@click.option("--for", "seconds", type=DURATION, help="So long, such as 3d; else until `unpin`.")
@urls_argument
def pin_command(invocation: Invocation, urls: tuple[str, ...], seconds: float | None) -> None:
    """Keep shards: no limit, no `clean --all`, no `rm` removes them.

    Braces are expanded. What is not cached is not fetched, but kept once it is. To pin
    a shard again sets the time anew.

    \b
    Examples:
      shardcache pin 's3://lab/val-{0000..0031}.tar' --for 3d
      shardcache prewarm 's3://lab/val-{0000..0031}.tar'
    """
    console, rows = invocation.console, list[Row]()
    with invocation.cache() as cache:
        for shard in _parse_shards(cache, urls):
            cache.pin(shard.raw, seconds)
            state = "cached" if shard.raw in cache else "not_cached"
            rows.append({"url": str(shard), "state": state})
    absent = sum(row["state"] == "not_cached" for row in rows)
    summary = {"pinned": len(rows), "not_cached": absent, "seconds": seconds}
    console.object("pin", shards=rows, summary=summary)
    until = "until they are unpinned" if seconds is None else f"for {exact_duration(seconds)}"
    console.info(f"pinned {counted(len(rows), 'shard')} {until}")
    if absent:
        are = "is" if absent == 1 else "are"
        console.hint(f"{absent:,} of them {are} not cached yet, and kept once fetched.")


@command("unpin")
@urls_argument
def unpin_command(invocation: Invocation, urls: tuple[str, ...]) -> ExitCode:
    """Keep shards no longer than the limits say.

    Braces are expanded. Exit code 1 if one was not pinned.

    \b
    Examples:
      shardcache unpin 's3://lab/val-{0000..0031}.tar'
    """
    console = invocation.console
    with invocation.cache() as cache:
        found = {str(shard): cache.unpin(shard.raw) for shard in _parse_shards(cache, urls)}
    unpinned = sum(found.values())
    rows = [
        {"url": url, "state": "unpinned" if was else "not_pinned"} for url, was in found.items()
    ]
    summary = {"unpinned": unpinned, "not_pinned": len(rows) - unpinned}
    console.object("unpin", shards=rows, summary=summary)
    console.info(f"unpinned {counted(unpinned, 'shard')}")
    for url in (url for url, was_pinned in found.items() if not was_pinned):
        console.error(f"{url} was not pinned in {cache.dir}")
    return ExitCode.DONE if all(found.values()) else ExitCode.FAILED
