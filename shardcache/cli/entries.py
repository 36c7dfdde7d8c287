"""``shardcache ls``, ``rm``, ``pin`` and ``unpin``: single shards in the cache."""

from __future__ import annotations

import fnmatch
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from shardcache.cache import Cache
from shardcache.cli.main import (
    ExitCode,
    Invocation,
    command,
    dry_run_option,
    parsed,
    urls_argument,
    yes_option,
)
from shardcache.cli.output import Column, Console, counted, short_date
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
from shardcache.units import exact_duration, format_age, format_bytes, parse_duration
from shardcache.urls import ShardURL, redact

__all__ = ["ls_command", "matches_glob", "pin_command", "rm_command", "unpin_command"]

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


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard in the cache, as ``ls`` prints it; what cannot be read of a damaged one is None."""

    url: str | None
    size: int
    used_at: datetime
    fetched_at: datetime | None
    state: str
    tier: int
    key: str
    version: str
    path: str | None
    etag: str | None
    digest: str | None
    checked: str | None


@dataclass(frozen=True, slots=True)
class _Partial:
    """A fetch in flight, or what a dead process left of one, as ``ls --partial`` prints it."""

    url: str | None
    size: int | None
    written_bytes: int
    share: float | None
    state: str
    begun_at: datetime | None
    holder: str | None
    pid: int | None
    rank: int | None
    tier: int
    key: str
    dir: str


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
    list_rows, show = (_partials, _show_partials) if partial else (_shards, _show_shards)
    with invocation.cache(looking=True) as cache:
        every: list[Any] = []
        if is_cache(cache.dir):
            every = list(list_rows(cache))
        else:
            invocation.console.hint(f"Nothing was cached in {cache.dir} yet.")
        found = [row for row in every if glob is None or matches_glob(glob, row.url or "")]
        show(invocation.console, cache, every, _ordered(found, sort), limit, long)
    return ExitCode.DONE


def _ordered(rows: list[Any], sort: str) -> list[Any]:
    """Rows as ``--sort`` says; unknown values come last. A time sorts as its age."""
    field, _, turn = sort.partition(":")

    def value(row: Any) -> Any:
        found = getattr(row, _SORTED_BY[field], getattr(row, "begun_at", None))
        return -found.timestamp() if isinstance(found, datetime) else found

    known = sorted((row for row in rows if value(row) is not None), key=lambda row: str(row.url))
    known.sort(key=value, reverse=turn == "desc")
    return known + [row for row in rows if value(row) is None]


def _shards(cache: Cache) -> Iterator[_Shard]:
    store = (namespaces := Namespaces(cache.config, detect())).own
    pinned = pinned_keys(namespaces.node, time.time())
    for entry in cache.entries():
        metadata: Metadata | None = None
        state = "damaged"
        try:
            metadata = entry.metadata()
            state = _state(store, entry, metadata, pinned)
        except (DamagedError, OSError):
            if not entry.path.exists():
                continue  # evicted while we look
        yield _Shard(
            url=metadata.url if metadata else None,
            size=entry.size,
            used_at=utc(entry.used),
            fetched_at=utc(metadata.fetched_at) if metadata else None,
            state=state,
            tier=_tier(cache, entry.directory),
            key=entry.key,
            version=entry.version,
            path=_data_path(entry),
            etag=metadata.info.etag if metadata else None,
            digest=metadata.digest if metadata else None,
            checked=metadata.checked if metadata else None,
        )


def _state(store: Store, entry: Entry, metadata: Metadata, pinned: Container[str]) -> str:
    stated = (metadata.key, metadata.info.version, metadata.size)
    if stated != (entry.key, entry.version, entry.size) or entry.data.lstat().st_size != entry.size:
        return "damaged"
    if entry.key in pinned:
        return "pinned"
    return "in_use" if store.is_pinned(entry) else "ok"


def _tier(cache: Cache, path: str) -> int:
    """The number of the tier in which something is: 1 is the first that is filled."""
    tiers = cache.config.by_tier()
    inside = (n for n, tier in enumerate(tiers, 1) if path.startswith(f"{tier.dir}{os.sep}"))
    return next(inside, len(tiers))


def _data_path(entry: Entry) -> str | None:
    try:
        return str(entry.data)
    except (OSError, DamagedError):
        return None


def _show_shards(
    console: Console,
    cache: Cache,
    every: list[_Shard],
    found: list[_Shard],
    limit: int | None,
    long: bool,
) -> None:
    now = time.time()
    columns = [
        Column("url", "SHARD", lambda url: url or "?"),
        Column("size", "SIZE", format_bytes, right=True),
        Column("used_at", "USED", lambda t: format_age(now - t.timestamp()), right=True),
        Column("fetched_at", "FETCHED", lambda t: short_date(t.timestamp(), now) if t else "-"),
        Column("state", "STATE", style=_STATE_STYLES.get),
    ]
    if long:
        columns += [Column("version", "VERSION"), Column("path", "PATH", lambda path: path or "-")]
    shown, size = found[:limit], sum(shard.size for shard in every)
    most = Volume.of(cache.dir).budget(cache.config) if every else None
    evictable = _evictable(cache, every, now)
    footer = f"{counted(len(every), 'shard')}, {format_bytes(size)}"
    if most is not None:
        footer += f" of {format_bytes(most)} ({size / most:.0%})"
    if every:
        footer += f"; {format_bytes(evictable)} evictable"
    if len(found) != len(every):
        shown_bytes = format_bytes(sum(shard.size for shard in shown))
        footer = f"{len(shown):,} of {footer}; shown {shown_bytes}"
    summary = {
        "shards": len(every),
        "bytes": size,
        "max_size": most,
        "evictable_bytes": evictable,
        "matching": len(found),
        "shown": len(shown),
    }
    console.table("ls", "shard", columns, shown, summary=summary, footer=footer)


def _evictable(cache: Cache, shards: list[_Shard], now: float) -> int:
    policy = Policy.now(cache.config, Namespaces(cache.config, detect()).node, now)
    return sum(
        shard.size
        for shard in shards
        if shard.state not in ("pinned", "in_use")
        and not policy.protects(shard.used_at.timestamp(), now)
    )


def _partials(cache: Cache) -> Iterator[_Partial]:
    for store in cache.stores():
        for found in in_flight(store.layout):
            if found.key:  # the others are entries on their way out
                yield _partial(cache, store, found)


def _partial(cache: Cache, store: Store, found: InFlight) -> _Partial:
    try:
        metadata: Metadata | None = Metadata.decode(read_sidecar(found.path))
    except (OSError, DamagedError):
        metadata = None
    holder = read_holder(store.layout.holder(found.key)) if found.live else None
    progress = found.progress
    return _Partial(
        url=metadata.url if metadata else None,
        size=progress.total if progress else None,
        written_bytes=progress.written if progress else 0,
        share=progress.written / progress.total if progress and progress.total else None,
        state="live" if found.live else "orphan",
        begun_at=utc(metadata.fetched_at) if metadata else None,
        holder=str(holder) if holder else None,
        pid=holder.pid if holder else None,
        rank=holder.rank if holder else None,
        tier=_tier(cache, str(found.path)),
        key=found.key,
        dir=str(found.path),
    )


def _show_partials(
    console: Console,
    cache: Cache,
    every: list[_Partial],
    found: list[_Partial],
    limit: int | None,
    long: bool,
) -> None:
    now = time.time()
    columns = [
        Column("url", "SHARD", lambda url: url or "?"),
        Column("size", "SIZE", lambda size: "-" if size is None else format_bytes(size), True),
        Column("written_bytes", "WRITTEN", format_bytes, right=True),
        Column("share", "DONE", lambda share: "-" if share is None else f"{share:.0%}", True),
        Column("begun_at", "BEGUN", lambda t: format_age(now - t.timestamp()) if t else "-", True),
        Column("state", "STATE", style=_STATE_STYLES.get),
    ]
    if long:
        columns += [Column("holder", "HOLDER", lambda h: h or "-"), Column("dir", "DIRECTORY")]
    live = sum(partial.state == "live" for partial in every)
    written = sum(partial.written_bytes for partial in every)
    shown = found[:limit]
    summary = {
        "partials": len(every),
        "live": live,
        "orphans": len(every) - live,
        "written_bytes": written,
        "matching": len(found),
        "shown": len(shown),
    }
    footer = (
        f"{counted(len(every), 'partial')}, {format_bytes(written)}: {live:,} live, "
        f"{counted(len(every) - live, 'orphan')}"
    )
    console.table("ls", "partial", columns, shown, summary=summary, footer=footer)


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
@dry_run_option("Say what would go, remove nothing.")
@yes_option("Do not ask.")
@urls_argument()
def rm_command(invocation: Invocation, urls: tuple[str, ...], yes: bool, dry_run: bool) -> int:
    """Remove shards, all cached versions of them.

    Braces are expanded. Exit code 6 if a shard stays because it is pinned or being
    read, 1 if one was not cached.
    """
    cache = invocation.cache(looking=True)
    shards = _expand_shards(cache, urls)
    rows: list[dict[str, Any]] = []
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
    count, freed = _count(rows), sum(row["size"] for row in rows)
    console, text = invocation.console, ""
    if count("removed") or not count("not_cached"):
        verb = "would remove" if dry_run else "removed"
        text = f"{verb} {counted(count('removed'), 'shard')}, {format_bytes(freed)}"
    summary = {
        "dry_run": dry_run,
        "removed": count("removed"),
        "removed_bytes": freed,
        "in_use": count("in_use"),
        "not_cached": count("not_cached"),
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
    if count("in_use"):
        return ExitCode.BUSY
    return ExitCode.FAILED if count("not_cached") else ExitCode.DONE


def _count(rows: list[dict[str, Any]]) -> Callable[[str], int]:
    return lambda state: sum(row["state"] == state for row in rows)


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
    callback=parsed(parse_duration),
    metavar="DURATION",
    help="Keep them for so long, such as 3d; without it until `unpin`.",
)
@urls_argument()
def pin_command(invocation: Invocation, urls: tuple[str, ...], seconds: float | None) -> int:
    """Keep shards: no limit, no `clean --all` and no `rm` removes them.

    Braces are expanded. What is not cached is not fetched, but kept once it is. To pin
    a shard again sets the time anew.
    """
    cache = invocation.cache()
    rows: list[dict[str, Any]] = []
    with cache:
        for shard in _expand_shards(cache, urls).values():
            cache.pin(shard.raw, seconds)
            state = "cached" if shard.raw in cache else "not_cached"
            rows.append({"url": str(shard), "state": state})
    absent = _count(rows)("not_cached")
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
@urls_argument()
def unpin_command(invocation: Invocation, urls: tuple[str, ...]) -> int:
    """Keep shards no longer than the limits say.

    Braces are expanded. Exit code 1 if one was not pinned.
    """
    cache = invocation.cache()
    with cache:
        rows: list[dict[str, Any]] = [
            {"url": str(shard), "state": "unpinned" if cache.unpin(shard.raw) else "not_pinned"}
            for shard in _expand_shards(cache, urls).values()
        ]
    count = _count(rows)
    console, text = invocation.console, f"unpinned {counted(count('unpinned'), 'shard')}"
    summary = {"unpinned": count("unpinned"), "not_pinned": count("not_pinned")}
    console.table("unpin", "shard", [], rows, summary=summary, footer=text)
    for row in rows:
        if row["state"] == "not_pinned":
            console.error(f"{row['url']} was not pinned in {cache.dir}")
    return ExitCode.FAILED if count("not_pinned") else ExitCode.DONE
