"""``shardcache ls``: list cached shards, or the partials of downloads."""

from __future__ import annotations

import time
from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli.contents import Row, partials
from shardcache.cli.main import Invocation, command, flag, number_option
from shardcache.cli.output import counted, local_time
from shardcache.clock import utc
from shardcache.space.eviction import Policy, disk_bytes, linked
from shardcache.space.memory import Volume
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry
from shardcache.store.root import is_cache
from shardcache.units import format_age, format_bytes

_SORTED_BY = ("url", "size", "used", "fetched", "state")
_SHARD_FIELDS = (
    *("url", "size", "used_at", "fetched_at", "state", "key", "version", "path", "etag"),
    *("digest", "checked"),
)
#: Titles of columns: always, and with ``--long``.
_SHARD_TITLES = ("SHARD", "SIZE", "USED", "FETCHED", "STATE"), ("VERSION", "PATH")
_PARTIAL_TITLES = ("SHARD", "SIZE", "WRITTEN", "DONE", "BEGUN", "STATE"), ("HOLDER", "DIR")


@command("ls")
@flag("-l", "--long", help="Also show version and path.")
@flag("--partial", help="List partial downloads instead of cached shards.")
@number_option("--limit", help="Show only the first N.", minimum=0)
@click.option(
    "--sort",
    type=click.Choice([f"{field}{order}" for field in _SORTED_BY for order in ("", ":desc")]),
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

    A SPEC is a URL with {braces}, * or ?, a prefix ending in /, or, without a slash, the
    last part of a URL. The states are ok, in_use (a process reads it), pinned (see `pin`),
    not_cached (pinned, but not downloaded yet) and damaged (its next reader downloads it
    again). With --partial they are live (a process downloads it) and orphan (its process is
    dead; the next reader resumes it, or `clean` removes it).

    \b
    Examples:
      shardcache ls 'train-04*.tar' --sort size:desc --limit 10
      shardcache ls --partial
      shardcache ls --json | jq -r '.shards[] | select(.state == "pinned") | .url'
    """
    console = invocation.console
    with invocation.cache(loaded=invocation.loaded_with_job_limits()) as cache:
        if not is_cache(cache.dir):
            console.hint(f"Nothing was cached in {cache.dir} yet.")
        rows, summary, footer = (_list_partials if partial else _list_shards)(cache)
        selections = cache.selections(specs)
    found = [row for row in rows if not specs or any((row["url"] or "") in s for s in selections)]
    shown = _sorted(found, sort)[:limit]
    if len(found) != len(rows):
        footer = f"{sum(row['state'] != 'not_cached' for row in found):,} of {footer}"
    for selection in selections:
        if not any((row["url"] or "") in selection for row in found):
            console.hint(f"{selection.text}: nothing in {cache.dir} matches.")
    summary |= {"matching": len(found), "shown": len(shown)}
    console.object("ls", **{"partials" if partial else "shards": shown}, summary=summary)
    always, more = _PARTIAL_TITLES if partial else _SHARD_TITLES
    titles = [*always, *more] if long else always
    cells = ([_cell(row, title) for title in titles] for row in shown)
    console.table(titles, cells, right=("SIZE", "USED", "WRITTEN", "DONE", "BEGUN"))
    console.data(footer)


def _sorted(rows: list[Row], sort: str) -> list[Row]:
    """Sort rows by ``--sort``. The latest times come first, unknown values last."""
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


def _shard_row(**known: Any) -> Row:
    return {**dict.fromkeys(_SHARD_FIELDS), **known}


def _list_shards(cache: Cache) -> tuple[list[Row], Row, str]:
    """Return rows of the shards, and their totals as a row and as text."""
    home = cache.processes.here().home
    policy = Policy.of(cache.config, home.node, time.time())
    shards: dict[Entry, Row] = {}
    for entry in cache.entries():
        row = _shard_row(
            size=entry.size,
            used_at=utc(entry.used),
            state="damaged",
            key=entry.key,
            version=entry.version,
        )
        try:  # a damaged entry has a row with the values that can be read
            row["path"] = str(entry.data)
            metadata = entry.metadata()
            row["url"], row["fetched_at"] = metadata.url, utc(metadata.fetched_at)
            row["etag"], row["checked"] = metadata.info.etag, metadata.checked
            row["digest"] = metadata.digest
            recorded = metadata.key, metadata.info.version, metadata.size
            is_whole = entry.data.lstat().st_size == entry.size
            if is_whole and recorded == (entry.key, entry.version, entry.size):
                row["state"] = "in_use" if home.store.in_use(entry) else "ok"
                row["state"] = "pinned" if entry.key in policy.pinned else row["state"]
        except (DamagedError, OSError):
            if not entry.path.exists():
                continue  # another process has evicted it
        shards[entry] = row

    cached = {entry.key for entry in shards}
    not_cached = [
        _shard_row(url=url or None, state="not_cached", key=key)
        for key, url in cache.pins().items()
        if key not in cached
    ]

    def is_kept(entry: Entry) -> bool:
        return shards[entry]["state"] in ("pinned", "in_use") or policy.protects(entry)

    files, allocated = linked(shards), home.space().allocated
    size = sum(links[0].size for links in files)
    used = sum(disk_bytes(links, allocated) for links in files)
    evictable = sum(links[0].size for links in files if not any(map(is_kept, links)))
    limit = Volume.of(cache.dir).budget(cache.config) if shards else None
    footer = f"{counted(len(files), 'shard')}, {format_bytes(size)}"
    if limit is not None:
        footer += f", {format_bytes(used)} of {format_bytes(limit)} on disk ({used / limit:.0%})"
    if shards:
        footer += f"; {format_bytes(evictable)} evictable"
    if not_cached:
        footer += f"; {len(not_cached):,} pinned, not cached yet"
    summary = {"shards": len(files), "bytes": size, "disk_bytes": used, "max_size": limit}
    summary |= {"evictable_bytes": evictable, "not_cached": len(not_cached)}
    return [*shards.values(), *not_cached], summary, footer


def _list_partials(cache: Cache) -> tuple[list[Row], Row, str]:
    """Return `partials`, and their totals as a row and as text."""
    rows = list(partials(cache))
    live = sum(row["state"] == "live" for row in rows)
    orphans, written = len(rows) - live, sum(row["written_bytes"] for row in rows)
    text = f"{counted(len(rows), 'partial')}, {format_bytes(written)}"
    summary = {"partials": len(rows), "live": live, "orphans": orphans, "written_bytes": written}
    return rows, summary, f"{text}: {live:,} live, {counted(orphans, 'orphan')}"
