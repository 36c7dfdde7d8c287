"""``shardcache ls``: what is resident, and what is on its way."""

from __future__ import annotations

import os
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.filters import matches_glob, parse_filter, parse_sort
from shardcache.cli.invocation import Invocation, command
from shardcache.cli.output import Column, counted, short_date
from shardcache.clock import utc
from shardcache.store.entry import DamagedError, Metadata
from shardcache.store.root import is_cache
from shardcache.units import format_age, format_bytes

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.store.store import Entry, Store
    from shardcache.store.sweeping import InFlight

__all__ = ["ls_command"]

_STATE_STYLES = {
    "pinned": "cyan",
    "in_use": "cyan",
    "damaged": "red",
    "live": "green",
    "orphan": "yellow",
}


@command(
    "ls",
    short="List what is resident.",
    examples="""
        shardcache ls
        shardcache ls 'train-04*.tar' --sort size:desc --limit 10
        shardcache ls --filter 'size>1GB' --filter 'used>7d'
        shardcache ls --partial
        shardcache ls --format tsv | cut -f 1
    """,
)
@click.option("-l", "--long", is_flag=True, help="Also show version and path.")
@click.option("--partial", is_flag=True, help="List fetches in flight instead of entries.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show the first N only.")
@click.option(
    "--sort",
    default="url",
    metavar="FIELD[:desc]",
    help="Order by url, size, used, fetched or state.  [default: url]",
)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="EXPR",
    help="Show only what passes, such as 'size>1GB' or 'used<2d'. May be repeated.",
)
@click.argument("glob", required=False)
def ls_command(
    invocation: Invocation,
    glob: str | None,
    filters: tuple[str, ...],
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
    tests = [parse_filter(text) for text in filters]
    ordered = parse_sort(sort)
    cache = invocation.cache(looking=True)
    if not _is_listable(invocation, cache):
        return _nothing(invocation, partial)
    now = time.time()
    with cache:
        rows = list(_partial_rows(cache, now) if partial else _rows(cache, now))
        shown = [
            row
            for row in rows
            if (glob is None or matches_glob(glob, row["url"] or ""))
            and all(test(row) for test in tests)
        ]
        total = len(shown)
        shown = ordered(shown)[:limit]  # type: ignore[assignment]
        if partial:
            _show_partial(invocation, shown, rows, total, long)
        else:
            space = _Totals.of(cache, rows, now)
            _show(invocation, shown, space, total, long, now)
    return 0


def _is_listable(invocation: Invocation, cache: Cache) -> bool:
    """False where nothing was cached yet."""
    if is_cache(cache.dir):
        return True
    invocation.console.hint(f"Nothing was cached in {cache.dir} yet.")
    return False


def _nothing(invocation: Invocation, partial: bool) -> int:
    if partial:
        _show_partial(invocation, [], [], 0, False)
    else:
        _show(invocation, [], _Totals(0, 0, None, 0), 0, False, 0.0)
    return 0


def _rows(cache: Cache, now: float) -> Iterator[dict[str, Any]]:
    from shardcache.ranks import detect
    from shardcache.space.pins import pinned_keys
    from shardcache.store.store import Namespaces

    store = (namespaces := Namespaces(cache.config, detect())).own
    pinned = pinned_keys(namespaces.node, now)
    for entry in cache.entries():
        metadata: Metadata | None = None
        state = "damaged"
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
            "path": _data_path(entry),
            "etag": metadata.info.etag if metadata else None,
            "digest": metadata.digest if metadata else None,
            "checked": metadata.checked if metadata else None,
            "used_age": max(0.0, now - entry.used),
            "fetched_age": max(0.0, now - metadata.fetched_at) if metadata else None,
        }


def _state(store: Store, entry: Entry, metadata: Metadata, pinned: Container[str]) -> str:
    said = (metadata.key, metadata.info.version, metadata.size)
    if said != (entry.key, entry.version, entry.size) or entry.data.lstat().st_size != entry.size:
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


@dataclass(frozen=True, slots=True)
class _Totals:
    """Of the whole cache, whatever is shown of it."""

    shards: int
    bytes: int
    limit: int | None
    evictable: int

    @classmethod
    def of(cls, cache: Cache, rows: list[dict[str, Any]], now: float) -> _Totals:
        from shardcache.ranks import detect
        from shardcache.space.policy import Policy
        from shardcache.space.volume import Volume
        from shardcache.store.store import Namespaces

        policy = Policy.now(cache.config, Namespaces(cache.config, detect()).node, now)
        idle = [
            row["size"]
            for row in rows
            if row["state"] not in ("pinned", "in_use")
            and not policy.protects(row["key"], row["used_at"].timestamp(), now)
        ]
        limit = Volume.of(cache.dir).budget(cache.config)
        return cls(len(rows), sum(row["size"] for row in rows), limit, sum(idle))

    def text(self) -> str:
        """``1,848 shards, 924.3 GB of 1.0 TB (92%); 41.0 GB evictable``."""
        text = f"{counted(self.shards, 'shard')}, {format_bytes(self.bytes)}"
        if self.limit is not None:
            text += f" of {format_bytes(self.limit)} ({self.bytes / self.limit:.0%})"
        return f"{text}; {format_bytes(self.evictable)} evictable" if self.shards else text


def _show(
    invocation: Invocation,
    shown: list[dict[str, Any]],
    totals: _Totals,
    matching: int,
    long: bool,
    now: float,
) -> None:
    columns = [
        Column("url", "SHARD", lambda url: url or "?"),
        Column("size", "SIZE", format_bytes, right=True),
        Column("used_at", "USED", lambda t: format_age(now - t.timestamp()), right=True),
        Column("fetched_at", "FETCHED", lambda t: short_date(t.timestamp(), now) if t else "-"),
        Column("state", "STATE", style=_STATE_STYLES.get),
        Column("tier"),
        Column("key"),
        Column("version", "VERSION" if long else ""),
        Column("path", "PATH" if long else "", lambda path: path or "-"),
    ]
    footer = totals.text()
    if matching != totals.shards:
        size = format_bytes(sum(row["size"] for row in shown))
        footer = f"{len(shown):,} of {footer}; shown {size}"
    summary = {
        "shards": totals.shards,
        "bytes": totals.bytes,
        "max_size": totals.limit,
        "evictable_bytes": totals.evictable,
        "matching": matching,
        "shown": len(shown),
    }
    rows = [_public(row) for row in shown]
    invocation.console.table("ls", "shard", columns, rows, summary=summary, footer=footer)


def _public(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith("_age")}


def _partial_rows(cache: Cache, now: float) -> Iterator[dict[str, Any]]:
    from shardcache.store.sweeping import in_flight

    for store in cache.stores():
        for found in in_flight(store.layout):
            if found.key:  # the others are entries on their way out
                yield _partial_row(cache, store, found, now)


def _partial_row(cache: Cache, store: Store, found: InFlight, now: float) -> dict[str, Any]:
    from shardcache.locks.flock import read_holder
    from shardcache.store.entry import read_sidecar

    try:
        metadata: Metadata | None = Metadata.decode(read_sidecar(found.path))
    except (OSError, DamagedError):
        metadata = None
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
        "used_age": None,
        "fetched_age": max(0.0, now - metadata.fetched_at) if metadata else None,
    }


def _show_partial(
    invocation: Invocation,
    shown: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    matching: int,
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
        Column("holder", "HOLDER" if long else "", lambda holder: holder or "-"),
        Column("pid"),
        Column("rank"),
        Column("tier"),
        Column("key"),
        Column("dir", "DIRECTORY" if long else ""),
    ]
    live = sum(row["state"] == "live" for row in rows)
    written = sum(row["written_bytes"] for row in rows)
    summary = {
        "partials": len(rows),
        "live": live,
        "orphans": len(rows) - live,
        "written_bytes": written,
        "matching": matching,
        "shown": len(shown),
    }
    footer = (
        f"{counted(len(rows), 'partial')}, {format_bytes(written)}: {live:,} live, "
        f"{counted(len(rows) - live, 'orphan')}"
    )
    public = [_public(row) for row in shown]
    invocation.console.table("ls", "partial", columns, public, summary=summary, footer=footer)
