"""``shardcache ls``, ``rm``, ``pin`` and ``unpin``: single shards in the cache."""

from __future__ import annotations

import fnmatch
import os
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
from shardcache.cli.output import Console, counted, short_date
from shardcache.clock import utc
from shardcache.locks.flock import read_holder
from shardcache.prewarm.plan import expand
from shardcache.ranks import detect
from shardcache.space.eviction import Policy, linked
from shardcache.space.memory import Volume
from shardcache.space.pins import pinned_keys
from shardcache.store.entry import DamagedError, Metadata
from shardcache.store.partial import read_progress
from shardcache.store.root import is_cache
from shardcache.store.store import Entry, Namespaces
from shardcache.store.sweeping import in_flight
from shardcache.units import exact_duration, format_age, format_bytes
from shardcache.urls import ShardURL, redact

#: A shard or a fetch as it is printed: raw values by name.
Row = dict[str, Any]
#: What ``--sort`` knows -> field of a row; partials have ``begun_at`` alone.
_SORTED_BY = {"url": "url", "size": "size", "used": "used_at", "fetched": "fetched_at",
              "state": "state"}  # fmt: skip


def matches_glob(glob: str, url: str) -> bool:
    """Whether ``glob`` means ``url``: all of it, or its last part if ``glob`` has no slash.

    ``*`` matches across slashes. Credentials in ``glob`` do not count.
    """
    subject = url if "/" in glob else url.rpartition("/")[2]
    return fnmatch.fnmatchcase(subject, redact(glob))


def _expand_shards(cache: Cache, urls: Iterable[str]) -> list[ShardURL]:
    """Each shard once; braces are expanded."""
    return list({shard.key: shard for shard in map(cache.parse, expand(urls))}.values())


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
      shardcache ls
      shardcache ls 'train-04*.tar' --sort size:desc --limit 10
      shardcache ls --partial
      shardcache ls --json | jq -r '.shards[] | select(.state == "pinned") | .url'
    """
    console = invocation.console
    with invocation.cache(looking=True) as cache:
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
    titles, cells = (_PARTIAL, _partial_cells) if partial else (_SHARD, _shard_cells)
    last = len(titles) if long else -2
    console.table(titles[:last], (cells(row)[:last] for row in shown), right=_RIGHT)
    console.data(footer)


def _ordered(rows: list[Row], sort: str) -> list[Row]:
    """Rows as ``--sort`` says; unknown values come last. A time sorts as its age."""
    field, _, turn = sort.partition(":")

    def value(row: Row) -> Any:
        found = row.get(_SORTED_BY[field], row.get("begun_at"))
        return -found.timestamp() if isinstance(found, datetime) else found

    known = sorted((row for row in rows if value(row) is not None), key=lambda row: str(row["url"]))
    known.sort(key=value, reverse=turn == "desc")
    return known + [row for row in rows if value(row) is None]


#: The last two are for ``--long``.
_SHARD = ("SHARD", "SIZE", "USED", "FETCHED", "STATE", "VERSION", "PATH")
_PARTIAL = ("SHARD", "SIZE", "WRITTEN", "DONE", "BEGUN", "STATE", "HOLDER", "DIRECTORY")
_RIGHT = ("SIZE", "USED", "WRITTEN", "DONE", "BEGUN")


def _shard_cells(row: Row) -> tuple[str, ...]:
    fetched = row["fetched_at"] and short_date(row["fetched_at"].timestamp(), time.time())
    size, used, path = format_bytes(row["size"]), _age(row["used_at"]), row["path"] or "-"
    return row["url"] or "?", size, used, fetched or "-", row["state"], row["version"], path


def _partial_cells(row: Row) -> tuple[str, ...]:
    share = f"{row['written_bytes'] / row['size']:.0%}" if row["size"] else "-"
    size = "-" if row["size"] is None else format_bytes(row["size"])
    where = row["state"], row["holder"] or "-", row["dir"]
    written, begun = format_bytes(row["written_bytes"]), _age(row["begun_at"])
    return row["url"] or "?", size, written, share, begun, *where


def _age(moment: datetime | None) -> str:
    return "-" if moment is None else format_age(time.time() - moment.timestamp())


def _tier(cache: Cache, path: str) -> int:
    """The number of the tier in which something is: 1 is the first that is filled."""
    tiers = cache.config.by_tier()
    inside = (n for n, tier in enumerate(tiers, 1) if path.startswith(f"{tier.dir}{os.sep}"))
    return next(inside, len(tiers))


def _shards(cache: Cache) -> Iterator[tuple[Entry, Row]]:
    """The shards in the cache; what cannot be read of a damaged one is None."""
    store = (namespaces := Namespaces(cache.config, detect())).own
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
                state = "in_use" if store.is_pinned(entry) else "ok"
                state = "pinned" if entry.key in pinned else state
        except (DamagedError, OSError):
            if not entry.path.exists():
                continue  # evicted while we look
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
    """What the shards come to, for machines and for people."""
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
    """What the partials come to, for machines and for people."""
    live = sum(row["state"] == "live" for row in rows)
    orphans, written = len(rows) - live, sum(row["written_bytes"] for row in rows)
    whole = f"{counted(len(rows), 'partial')}, {format_bytes(written)}"
    summary = {"partials": len(rows), "live": live, "orphans": orphans, "written_bytes": written}
    return summary, f"{whole}: {live:,} live, {counted(orphans, 'orphan')}"


# -- rm ----------------------------------------------------------------------------


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
      shardcache rm s3://lab/train-0412.tar
      shardcache rm -y 's3://lab/old-{0000..0127}.tar'
      shardcache rm -n s3://lab/train-0412.tar
    """
    console, rows = invocation.console, list[Row]()
    with invocation.cache(looking=True) as cache:
        shards = _expand_shards(cache, urls)
        sizes = [cache.remove(shard.raw, dry_run=True)[0] for shard in shards]
        if any(sizes) and not dry_run:
            number, total = sum(map(bool, sizes)), format_bytes(sum(sizes))
            question = f"Remove {counted(number, 'shard')}, {total}, from {cache.dir}?"
            invocation.confirm(question, yes)
        for shard in shards:
            freed, in_use = cache.remove(shard.raw, dry_run=dry_run)
            state = "in_use" if in_use else "removed" if freed else "not_cached"
            rows.append({"url": str(shard), "size": freed, "state": state})
    counts, freed = _count(rows, "removed", "in_use", "not_cached"), sum(r["size"] for r in rows)
    verb = "would remove" if dry_run else "removed"
    said = f"{verb} {counted(counts['removed'], 'shard')}, {format_bytes(freed)}"
    summary = {"dry_run": dry_run, **counts, "removed_bytes": freed}
    return _finish(console, cache, "rm", rows, said, **summary)


#: What is wrong with a shard in a state.
_PROBLEMS = {
    "in_use": "stays: it is pinned or being read. See `shardcache unpin`, or try again when its "
    "job has ended.",
    "not_cached": "is not cached in {dir}",
    "not_pinned": "was not pinned in {dir}",
}


def _finish(
    console: Console, cache: Cache, command: str, rows: list[Row], said: str, **summary: Any
) -> ExitCode:
    """Tell what became of each shard, and the problems."""
    states = Counter(row["state"] for row in rows)
    console.object(command, shards=rows, summary=summary)
    console.said(said)
    for row in rows:
        if problem := _PROBLEMS.get(row["state"]):
            console.error(f"{row['url']} {problem.format(dir=cache.dir)}")
    if states["in_use"]:
        return ExitCode.BUSY
    return ExitCode.FAILED if states.keys() & _PROBLEMS.keys() else ExitCode.DONE


def _count(rows: list[Row], *states: str) -> dict[str, int]:
    return {state: sum(row["state"] == state for row in rows) for state in states}


# -- pin and unpin -----------------------------------------------------------------


@command("pin")
@click.option("--for", "seconds", type=DURATION, help="So long, such as 3d; else until `unpin`.")
@urls_argument
def pin_command(invocation: Invocation, urls: tuple[str, ...], seconds: float | None) -> None:
    """Keep shards: no limit, no `clean --all`, no `rm` removes them.

    Braces are expanded. What is not cached is not fetched, but kept once it is. To pin
    a shard again sets the time anew.

    \b
    Examples:
      shardcache pin s3://lab/val-0000.tar
      shardcache pin 's3://lab/val-{0000..0031}.tar' --for 3d
      shardcache prewarm 's3://lab/val-{0000..0031}.tar'
    """
    console, rows = invocation.console, list[Row]()
    with invocation.cache() as cache:
        for shard in _expand_shards(cache, urls):
            cache.pin(shard.raw, seconds)
            state = "cached" if shard.raw in cache else "not_cached"
            rows.append({"url": str(shard), "state": state})
    absent = _count(rows, "not_cached")["not_cached"]
    summary = {"pinned": len(rows), "not_cached": absent, "seconds": seconds}
    console.object("pin", shards=rows, summary=summary)
    for row in rows if console.verbosity else ():
        console.said(f"{row['url']}  {row['state'].replace('_', ' ')}")
    until = "until they are unpinned" if seconds is None else f"for {exact_duration(seconds)}"
    console.said(f"pinned {counted(len(rows), 'shard')} {until}")
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
        rows = [
            {"url": str(shard), "state": "unpinned" if cache.unpin(shard.raw) else "not_pinned"}
            for shard in _expand_shards(cache, urls)
        ]
    counts = _count(rows, "unpinned", "not_pinned")
    said = f"unpinned {counted(counts['unpinned'], 'shard')}"
    return _finish(console, cache, "unpin", rows, said, **counts)
