"""``shardcache ls``, ``rm``, ``pin`` and ``unpin``: single shards in the cache."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from datetime import datetime
from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli.main import DURATION, ExitCode, Invocation, command, urls_argument
from shardcache.cli.output import Column, counted, short_date
from shardcache.clock import utc
from shardcache.layout import Layout
from shardcache.locks.flock import read_holder
from shardcache.prewarm.plan import expand
from shardcache.ranks import detect
from shardcache.space.memory import Volume
from shardcache.space.pins import pinned_keys
from shardcache.space.policy import Policy
from shardcache.store.entry import DamagedError, Metadata, read_sidecar
from shardcache.store.root import check_links, is_cache
from shardcache.store.store import Entry, Namespaces, Store
from shardcache.store.sweeping import InFlight, in_flight
from shardcache.units import exact_duration, format_age, format_bytes
from shardcache.urls import ShardURL, redact

#: A shard or a fetch as it is printed: raw values by name.
_Row = dict[str, Any]
_STATE_STYLES = {
    "pinned": "cyan",
    "in_use": "cyan",
    "damaged": "red",
    "live": "green",
    "orphan": "yellow",
}


def matches_glob(glob: str, url: str) -> bool:
    """Whether ``glob`` means ``url``: all of it, or its last part if ``glob`` has no slash.

    ``*`` matches across slashes. Credentials in ``glob`` do not count.
    """
    subject = url if "/" in glob else url.rpartition("/")[2]
    return fnmatch.fnmatchcase(subject, redact(glob))


def _expand_shards(cache: Cache, urls: Iterable[str]) -> dict[str, ShardURL]:
    """Key -> shard, each once; braces are expanded.

    Raises:
        ConfigError: not a URL that the cache reads.
    """
    return {shard.key: shard for shard in map(cache.parse, expand(urls))}


# -- ls ----------------------------------------------------------------------------


#: What ``--sort`` knows -> field of a row; partials have ``begun_at`` alone.
_SORTED_BY = {
    "url": "url",
    "size": "size",
    "used": "used_at",
    "fetched": "fetched_at",
    "state": "state",
}


@command(
    "ls",
    short="List what is resident.",
    examples="""
        shardcache ls
        shardcache ls 'train-04*.tar' --sort size:desc --limit 10
        shardcache ls --partial
        shardcache ls --json | jq -r '.shards[] | select(.state == "pinned") | .url'
    """,
)
@click.option("-l", "--long", is_flag=True, help="Also show version and path.")
@click.option("--partial", is_flag=True, help="List fetches in flight instead of entries.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show the first N only.")
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
) -> int:
    """List the shards in the cache.

    GLOB is matched against whole URLs, or against the last part of them if it has
    no slash. States: ok, in_use (being read), pinned (see `pin`), damaged (will be
    fetched again).
    With --partial: live (being fetched) and orphan (left by a dead process, will
    be resumed or swept).
    """
    console = invocation.console
    with invocation.cache(looking=True) as cache:
        every: list[_Row] = []
        if is_cache(cache.dir):
            every = list(_partials(cache) if partial else _shards(cache))
        else:
            console.hint(f"Nothing was cached in {cache.dir} yet.")
        found = [row for row in every if glob is None or matches_glob(glob, row["url"] or "")]
        shown = _ordered(found, sort)[:limit]
        columns = _partial_columns(long) if partial else _shard_columns(long)
        summary, footer = _sum_partials(every) if partial else _sum_shards(cache, every)
        if len(found) != len(every) and not partial:
            files = _by_file(shown)
            shown_bytes = format_bytes(sum(links[0]["size"] for links in files))
            footer = f"{len(files):,} of {footer}; shown {shown_bytes}"
        summary |= {"matching": len(found), "shown": len(shown)}
        noun = "partial" if partial else "shard"
        console.table("ls", noun, columns, shown, summary=summary, footer=footer)
    return ExitCode.DONE


def _ordered(rows: list[_Row], sort: str) -> list[_Row]:
    """Rows as ``--sort`` says; unknown values come last. A time sorts as its age."""
    field, _, turn = sort.partition(":")

    def value(row: _Row) -> Any:
        found = row.get(_SORTED_BY[field], row.get("begun_at"))
        return -found.timestamp() if isinstance(found, datetime) else found

    known = sorted((row for row in rows if value(row) is not None), key=lambda row: str(row["url"]))
    known.sort(key=value, reverse=turn == "desc")
    return known + [row for row in rows if value(row) is None]


def _tier(cache: Cache, path: str) -> int:
    """The number of the tier in which something is: 1 is the first that is filled."""
    tiers = cache.config.by_tier()
    inside = (n for n, tier in enumerate(tiers, 1) if path.startswith(f"{tier.dir}{os.sep}"))
    return next(inside, len(tiers))


def _age(moment: datetime | None) -> str:
    return "-" if moment is None else format_age(time.time() - moment.timestamp())


def _shards(cache: Cache) -> Iterator[_Row]:
    """The shards in the cache; what cannot be read of a damaged one is None."""
    store = (namespaces := Namespaces(cache.config, detect())).own
    pinned = pinned_keys(namespaces.node, time.time())
    for entry in cache.entries():
        metadata: Metadata | None = None
        path: str | None = None
        state = "damaged"
        with contextlib.suppress(DamagedError, OSError):
            path = str(entry.data)
        try:
            metadata = entry.metadata()
            state = _state(store, entry, metadata, pinned)
        except (DamagedError, OSError):
            if not entry.path.exists():
                continue  # evicted while we look
        yield {
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


def _state(store: Store, entry: Entry, metadata: Metadata, pinned: Container[str]) -> str:
    stated = (metadata.key, metadata.info.version, metadata.size)
    if stated != (entry.key, entry.version, entry.size) or entry.data.lstat().st_size != entry.size:
        return "damaged"
    if entry.key in pinned:
        return "pinned"
    return "in_use" if store.is_pinned(entry) else "ok"


def _shard_columns(long: bool) -> list[Column]:
    now = time.time()
    columns = [
        Column("url", "SHARD", lambda url: url or "?"),
        Column("size", "SIZE", format_bytes, right=True),
        Column("used_at", "USED", _age, right=True),
        Column("fetched_at", "FETCHED", lambda t: short_date(t.timestamp(), now) if t else "-"),
        Column("state", "STATE", style=_STATE_STYLES.get),
    ]
    if long:
        columns += [Column("version", "VERSION"), Column("path", "PATH", lambda path: path or "-")]
    return columns


def _sum_shards(cache: Cache, shards: list[_Row]) -> tuple[_Row, str]:
    """What the shards come to, for machines and for people."""
    now = time.time()
    policy = Policy.now(cache.config, Namespaces(cache.config, detect()).node, now)
    files = _by_file(shards)
    size = sum(links[0]["size"] for links in files)
    evictable = sum(
        links[0]["size"]
        for links in files
        if not any(
            link["state"] in ("pinned", "in_use")
            or policy.protects(link["used_at"].timestamp(), now)
            for link in links
        )
    )
    footer = f"{counted(len(files), 'shard')}, {format_bytes(size)}"
    most = Volume.of(cache.dir).budget(cache.config) if shards else None
    if most is not None:
        footer += f" of {format_bytes(most)} ({size / most:.0%})"
    if shards:
        footer += f"; {format_bytes(evictable)} evictable"
    summary = {
        "shards": len(files),
        "bytes": size,
        "max_size": most,
        "evictable_bytes": evictable,
    }
    return summary, footer


def _by_file(shards: list[_Row]) -> list[list[_Row]]:
    """The rows of shards by file: several ranks may link one, which occupies its bytes once."""
    files: dict[object, list[_Row]] = {}
    for number, shard in enumerate(shards):
        file: object = number
        with contextlib.suppress(OSError, TypeError):  # damaged, or evicted while we look
            found = os.lstat(shard["path"])
            file = found.st_dev, found.st_ino
        files.setdefault(file, []).append(shard)
    return list(files.values())


def _partials(cache: Cache) -> Iterator[_Row]:
    """The fetches in flight, and what dead processes left of theirs."""
    for store in cache.stores():
        for found in in_flight(store.layout):
            if found.key:  # the others are entries on their way out
                yield _partial(cache, store, found)


def _partial(cache: Cache, store: Store, found: InFlight) -> _Row:
    metadata: Metadata | None = None
    with contextlib.suppress(DamagedError, OSError):
        metadata = Metadata.decode(read_sidecar(found.path))
    holder = read_holder(store.layout.holder(found.key)) if found.live else None
    progress = found.progress
    return {
        "url": metadata.url if metadata else None,
        "size": progress.total if progress else None,
        "written_bytes": progress.written if progress else 0,
        "share": progress.written / progress.total if progress and progress.total else None,
        "state": "live" if found.live else "orphan",
        "begun_at": utc(metadata.fetched_at) if metadata else None,
        "holder": str(holder) if holder else None,
        "pid": holder.pid if holder else None,
        "rank": holder.rank if holder else None,
        "tier": _tier(cache, str(found.path)),
        "key": found.key,
        "dir": str(found.path),
    }


def _partial_columns(long: bool) -> list[Column]:
    columns = [
        Column("url", "SHARD", lambda url: url or "?"),
        Column("size", "SIZE", lambda size: "-" if size is None else format_bytes(size), True),
        Column("written_bytes", "WRITTEN", format_bytes, right=True),
        Column("share", "DONE", lambda share: "-" if share is None else f"{share:.0%}", True),
        Column("begun_at", "BEGUN", _age, right=True),
        Column("state", "STATE", style=_STATE_STYLES.get),
    ]
    if long:
        columns += [Column("holder", "HOLDER", lambda h: h or "-"), Column("dir", "DIRECTORY")]
    return columns


def _sum_partials(partials: list[_Row]) -> tuple[_Row, str]:
    """What the partials come to, for machines and for people."""
    live = sum(partial["state"] == "live" for partial in partials)
    orphans = len(partials) - live
    written = sum(partial["written_bytes"] for partial in partials)
    summary = {
        "partials": len(partials),
        "live": live,
        "orphans": orphans,
        "written_bytes": written,
    }
    whole = f"{counted(len(partials), 'partial')}, {format_bytes(written)}"
    return summary, f"{whole}: {live:,} live, {counted(orphans, 'orphan')}"


# -- rm ----------------------------------------------------------------------------


@command(
    "rm",
    short="Remove shards.",
    examples="""
        shardcache rm s3://lab/train-0412.tar
        shardcache rm -y 's3://lab/old-{0000..0127}.tar'
        shardcache rm -n s3://lab/train-0412.tar
    """,
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what would go, remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@urls_argument
def rm_command(invocation: Invocation, urls: tuple[str, ...], yes: bool, dry_run: bool) -> int:
    """Remove shards, all cached versions of them.

    Braces are expanded. Exit code 6 if a shard stays because it is pinned or being
    read, 1 if one was not cached.
    """
    cache = invocation.cache(looking=True)
    shards = _expand_shards(cache, urls)
    rows: list[_Row] = []
    with cache:
        sizes = _sizes(cache, shards)
        if sizes and not dry_run:
            total = format_bytes(sum(sizes.values()))
            question = f"Remove {counted(len(sizes), 'shard')}, {total}, from {cache.dir}?"
            invocation.confirm(question, yes)
        for key, shard in shards.items():
            freed, state = 0, "not_cached"
            if key in sizes:
                freed, in_use = cache.remove(shard.raw, dry_run=dry_run)
                state = "in_use" if in_use else "removed"
            rows.append({"url": str(shard), "size": freed, "state": state})
    states, freed = Counter(row["state"] for row in rows), sum(row["size"] for row in rows)
    console, text = invocation.console, ""
    if states["removed"] or not states["not_cached"]:
        verb = "would remove" if dry_run else "removed"
        text = f"{verb} {counted(states['removed'], 'shard')}, {format_bytes(freed)}"
    summary = {
        "dry_run": dry_run,
        "removed": states["removed"],
        "removed_bytes": freed,
        "in_use": states["in_use"],
        "not_cached": states["not_cached"],
    }
    console.table("rm", "shard", [], rows, summary=summary, footer=text)
    for row in rows:
        if row["state"] == "in_use":
            console.error(
                f"{row['url']} stays: it is pinned or being read. See `shardcache unpin`, or try "
                "again when its job has ended."
            )
        elif row["state"] == "not_cached":
            console.error(f"{row['url']} is not cached in {cache.dir}")
    if states["in_use"]:
        return ExitCode.BUSY
    return ExitCode.FAILED if states["not_cached"] else ExitCode.DONE


def _sizes(cache: Cache, keys: Iterable[str]) -> dict[str, int]:
    """Bytes of those shards that are there, all versions together."""
    check_links(Layout.of_root(cache.dir))
    stores = Namespaces(cache.config, detect()).all()
    found = {key: [e.size for store in stores for e in store.entries_of(key)] for key in keys}
    return {key: sum(sizes) for key, sizes in found.items() if sizes}


# -- pin and unpin -----------------------------------------------------------------


@command(
    "pin",
    short="Keep shards, whatever the limits say.",
    examples="""
        shardcache pin s3://lab/val-0000.tar
        shardcache pin 's3://lab/val-{0000..0031}.tar' --for 3d
        shardcache prewarm 's3://lab/val-{0000..0031}.tar'
    """,
)
@click.option(
    "--for",
    "seconds",
    type=DURATION,
    help="Keep them for so long, such as 3d; without it until `unpin`.",
)
@urls_argument
def pin_command(invocation: Invocation, urls: tuple[str, ...], seconds: float | None) -> int:
    """Keep shards: no limit, no `clean --all` and no `rm` removes them.

    Braces are expanded. What is not cached is not fetched, but kept once it is. To pin
    a shard again sets the time anew.
    """
    cache = invocation.cache()
    rows: list[_Row] = []
    with cache:
        for shard in _expand_shards(cache, urls).values():
            cache.pin(shard.raw, seconds)
            state = "cached" if shard.raw in cache else "not_cached"
            rows.append({"url": str(shard), "state": state})
    absent = sum(row["state"] == "not_cached" for row in rows)
    console = invocation.console
    for row in rows if console.verbosity else ():
        console.said(f"{row['url']}  {row['state'].replace('_', ' ')}")
    until = "until they are unpinned" if seconds is None else f"for {exact_duration(seconds)}"
    text = f"pinned {counted(len(rows), 'shard')} {until}"
    summary = {"pinned": len(rows), "not_cached": absent, "seconds": seconds}
    console.table("pin", "shard", [], rows, summary=summary, footer=text)
    if absent:
        are = "is" if absent == 1 else "are"
        console.hint(f"{absent:,} of them {are} not cached yet, and kept once fetched.")
    return ExitCode.DONE


@command(
    "unpin",
    short="Keep shards no longer.",
    examples="""
        shardcache unpin 's3://lab/val-{0000..0031}.tar'
    """,
)
@urls_argument
def unpin_command(invocation: Invocation, urls: tuple[str, ...]) -> int:
    """Keep shards no longer than the limits say.

    Braces are expanded. Exit code 1 if one was not pinned.
    """
    cache = invocation.cache()
    with cache:
        rows: list[_Row] = [
            {"url": str(shard), "state": "unpinned" if cache.unpin(shard.raw) else "not_pinned"}
            for shard in _expand_shards(cache, urls).values()
        ]
    states = Counter(row["state"] for row in rows)
    console, text = invocation.console, f"unpinned {counted(states['unpinned'], 'shard')}"
    summary = {"unpinned": states["unpinned"], "not_pinned": states["not_pinned"]}
    console.table("unpin", "shard", [], rows, summary=summary, footer=text)
    for row in rows:
        if row["state"] == "not_pinned":
            console.error(f"{row['url']} was not pinned in {cache.dir}")
    return ExitCode.FAILED if states["not_pinned"] else ExitCode.DONE
