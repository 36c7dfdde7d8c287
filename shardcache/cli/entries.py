"""``shardcache ls``, ``expand``, ``path``, ``rm``, ``pin`` and ``unpin``: for named shards."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import click

from shardcache import units
from shardcache.cache import Cache
from shardcache.cli import main as cli
from shardcache.cli.main import ExitCode, Invocation, command, flag
from shardcache.cli.output import Console, Row, local_time, reason
from shardcache.clock import utc
from shardcache.errors import ConfigError, ShardNotFoundError
from shardcache.locks.keys import read_holder
from shardcache.origins.listing import Selection
from shardcache.prewarm.plan import expand
from shardcache.space.eviction import Limits, group_links
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry
from shardcache.store.partial import in_flight, read_journal
from shardcache.tiers import lock_layout
from shardcache.units import counted, exact_duration, format_age, format_bytes
from shardcache.urls import ShardURL, advise_name, advise_scheme

_SORTED_BY = ("url", "size", "used", "fetched", "state")
#: The fields of a shard, all unknown.
_SHARD: Row = dict.fromkeys(
    ("url", "size", "used_at", "fetched_at", "state", "key", "version", "path", "etag", "digest",
     "checked", "endpoint")
)  # fmt: skip
#: Titles of the columns that are always shown, and of those that ``--long`` adds.
_SHARD_TITLES = ("SHARD", "SIZE", "USED", "FETCHED", "STATE"), ("VERSION", "PATH")
_PREFIX_TITLES = ("PREFIX", "SHARDS", "SIZE", "USED")
_PARTIAL_TITLES = ("SHARD", "SIZE", "WRITTEN", "DONE", "BEGUN", "STATE"), ("HOLDER", "DIR")
#: Title of a column -> its field, and the function that converts a value to text.
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "SHARD": ("url", str),
    "PREFIX": ("url", str),
    "SHARDS": ("shards", "{:,}".format),
    "SIZE": ("size", format_bytes),
    "WRITTEN": ("written_bytes", format_bytes),
    "USED": ("used_at", lambda moment: format_age(time.time() - moment.timestamp())),
    "BEGUN": ("begun_at", lambda moment: format_age(time.time() - moment.timestamp())),
    "FETCHED": ("fetched_at", local_time),
    "RATE": ("bytes_per_second", units.format_rate),
    **{name.upper(): (name, str) for name in ("state", "version", "path", "holder", "dir")},
}

specs_argument = click.argument("specs", nargs=-1, required=True, metavar="SPEC...")


@command("ls")
@flag("-l", "--long", help="Also show version and path.")
@flag("--partial", help="List partial downloads instead of cached shards.")
@click.option(
    "--by", type=click.Choice(["prefix"]), metavar="prefix", help="One row for each prefix."
)
@cli.number_option("--limit", help="Show only the first N shards.", minimum=0)
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
    by: str | None,
    sort: str,
    limit: int | None,
    partial: bool,
    long: bool,
) -> ExitCode:
    """List the shards in the cache.

    A SPEC is a URL with {braces}, * or ?, a prefix ending in /, or, without a slash, the
    last part of a URL. A URL in full stands for the shard at the configured S3 endpoint; a
    pattern also matches those of other endpoints, which `ls` shows. The states are ok, in_use
    (a process reads it), pinned (see `pin`), not_cached (pinned, but not downloaded yet) and
    damaged (its next reader downloads it again). With --partial they are live (a process
    downloads it), resumable (its process is dead; the next reader continues it) and orphan
    (no reader can continue it). `clean` removes the last two after an hour. With --by prefix,
    each row adds up the shards whose URLs differ only after the last slash. Exits with 1 if
    nothing matches.

    \b
    Examples:
      shardcache ls 'train-04*.tar' --sort size:desc --limit 10
      shardcache ls --by prefix --sort size:desc
      shardcache ls --partial
      shardcache ls --json | jq -r '.shards[] | select(.state == "pinned") | .url'
    """
    console = invocation.console
    if by and partial:
        raise click.UsageError("--by prefix adds up shards: omit --partial.")
    with invocation.cache(existing=True) as cache:
        rows, summary, footer = _list_partials(cache) if partial else _list_shards(cache)
        selections = [Selection(spec, cache.parse) for spec in specs]
    matching = [r for r in rows if not specs or any((r["url"] or "") in s for s in selections)]
    printed = _sorted(_by_prefix(matching) if by else matching, sort)[:limit]
    noun, bytes_field = ("partial", "written_bytes") if partial else ("shard", "size")
    if len(matching) != len(rows):
        number = sum(row["state"] != "not_cached" for row in matching)
        size = format_bytes(sum(row[bytes_field] or 0 for row in matching))
        footer = f"matching: {counted(number, noun)}, {size}; in all: {footer}"
    for selection in selections:
        if not any((row["url"] or "") in selection for row in matching):
            show = console.hint if matching else console.error
            advice = advise_name(selection.text)
            show(f"{selection.text}: nothing in {cache.dir} matches.{advice}")
    summary |= {"matching": len(matching), "shown": len(printed)}
    console.object("ls", **{"prefixes" if by else f"{noun}s": printed}, summary=summary)
    always, more = _PARTIAL_TITLES if partial else _SHARD_TITLES
    titles = _PREFIX_TITLES if by else [*always, *more] if long else always
    console.table(titles, ([cell(row, title) for title in titles] for row in printed))
    console.data(footer)
    return ExitCode.DONE if matching or not specs else ExitCode.FAILED


def _by_prefix(rows: list[Row]) -> list[Row]:
    groups = defaultdict[str, list[Row]](list)
    for row in rows:
        groups[(row["url"] or "").rpartition("/")[0] + "/"].append(row)
    return [
        {
            "url": prefix,
            "shards": len(group),
            "size": sum(row["size"] or 0 for row in group),
            "used_at": max((row["used_at"] for row in group if row["used_at"]), default=None),
        }
        for prefix, group in groups.items()
    ]


def _sorted(rows: list[Row], sort: str) -> list[Row]:
    """Sort rows by the field in ``--sort``: latest timestamps first, unknown values last."""
    field, _, direction = sort.partition(":")
    name, _ = _COLUMNS["SHARD" if field == "url" else field.upper()]
    rows = sorted(rows, key=lambda row: str(row["url"]))
    known = [row for row in rows if row.get(name) is not None]
    known.sort(key=lambda row: row[name], reverse=(direction == "desc") != name.endswith("_at"))
    return known + [row for row in rows if row.get(name) is None]


def cell(row: Row, title: str) -> str:
    """Return a field of a shard, a prefix or a partial as text, by the title of its column."""
    if title == "DONE":
        return f"{row['written_bytes'] / row['size']:.0%}" if row["size"] else "-"
    field, text = _COLUMNS[title]
    value = row[field]
    if title == "SHARD" and row.get("endpoint"):
        return f"{value} (from {row['endpoint']})"
    return "-" if value in (None, "") else text(value)


def _list_shards(cache: Cache) -> tuple[list[Row], Row, str]:
    """Return a row for each shard, and the totals as a row and as text."""
    pins = cache.pins()
    endpoints = {**cache.config.servers(), "s3": cache.parse("s3://bucket/key").endpoint}
    shards: dict[Entry, Row] = {}
    for entry in cache.entries():
        # The row of a damaged entry has the values that can be read.
        _, key, version, size, used = entry
        row = dict(_SHARD, state="damaged", key=key, version=version, size=size, used_at=utc(used))
        try:
            metadata = entry.metadata()
            row["url"], row["digest"] = metadata.url, metadata.digest
            row["checked"], row["etag"] = metadata.checked, metadata.info.etag
            row["fetched_at"] = utc(metadata.fetched_at)
            if metadata.endpoint != endpoints.get(metadata.url.partition(":")[0]):
                row["endpoint"] = _other_endpoint(cache, entry.key, metadata.url)
            path = f"{entry.directory}/{metadata.basename}"
            if os.lstat(path).st_size == entry.size:
                is_pinned = entry.key in pins
                store = cache.process.tier_of(entry.directory).store
                in_use = not is_pinned and store.in_use(entry, path)
                row["state"] = "pinned" if is_pinned else "in_use" if in_use else "ok"
            row["path"] = path
        except (DamagedError, OSError, ValueError):  # ValueError: the sidecar has no valid date
            if not entry.path.exists():
                continue  # another process has evicted it
            with contextlib.suppress(DamagedError, OSError):
                row["path"] = str(entry.data)
        shards[entry] = row
    cached = {entry.key for entry in shards}
    not_cached = [
        _SHARD | {"url": url or None, "state": "not_cached", "key": key}
        | {"endpoint": _other_endpoint(cache, key, url)}
        for key, url in pins.items()
        if key not in cached
    ]  # fmt: skip
    files, tiers, used, evictable = group_links(shards), cache.process.present, 0, 0
    busy = {entry for entry, row in shards.items() if row["state"] == "in_use"}.__contains__
    for tier in tiers:
        entries = [entry for entry in shards if tier.owns(entry.directory)]
        plan = tier.space.plan(entries, Limits(everything=True), tier.space.policy, in_use=busy)
        used += plan.kept_bytes + plan.freed
        evictable += sum(removal.entries[0].size for removal in plan.removed)
    size = sum(links[0].size for links in files)
    limits = [tier.space.max_size if shards else None for tier in tiers]
    limit = None if None in limits else sum(filter(None, limits))
    footer = f"{counted(len(files), 'shard')}, {format_bytes(size)}"
    if limit is not None:
        footer += f", {format_bytes(used)} of {format_bytes(limit)} on disk ({used / limit:.0%})"
    if shards:
        footer += f"; {format_bytes(evictable)} evictable"
    if others := len({row["key"] for row in shards.values() if row["endpoint"]}):
        footer += f"; {others:,} from another endpoint"
    if not_cached:
        footer += f"; {len(not_cached):,} pinned, not cached yet"
    summary = {"shards": len(files), "bytes": size, "disk_bytes": used, "max_size": limit}
    summary |= {"evictable_bytes": evictable, "not_cached": len(not_cached)}
    return [*shards.values(), *not_cached], summary, footer


def _other_endpoint(cache: Cache, key: str, url: str) -> str | None:
    with contextlib.suppress(ConfigError):  # a damaged record, or a command
        return cache.other_endpoint(replace(cache.parse(url), key=key))
    return None


def _advice(cache: Cache, absent: Iterable[ShardURL]) -> dict[str, str]:
    """Return advice about shards that are not cached, by URL."""
    advice = {str(s): advise_scheme(s, advise_name(str(s)).lstrip()) for s in absent}
    for url, endpoint in other_copies(cache, advice).items():
        where = f"Its copy came from another endpoint ({endpoint})."
        advice[url] = f"{where} Set it, or name the copy by a pattern, such as '{url}*'."
    return advice


def other_copies(cache: Cache, urls: Collection[str]) -> dict[str, str]:
    """Return the endpoints that copies of ``urls`` came from, if not the configured one, by URL."""
    endpoints = dict[str, str | None]()
    with contextlib.suppress(ShardNotFoundError):  # the cache is empty
        shards = cache.select("*") if urls else ()
        endpoints = {str(s): cache.other_endpoint(s) for s in shards if str(s) in urls}
    return {url: endpoint for url, endpoint in endpoints.items() if endpoint}


def _list_partials(cache: Cache) -> tuple[list[Row], Row, str]:
    rows = list(partials(cache))
    states, written = Counter(row["state"] for row in rows), sum(r["written_bytes"] for r in rows)
    live, resumable, orphans = (states[state] for state in ("live", "resumable", "orphan"))
    summary = {"partials": len(rows), "live": live, "resumable": resumable, "orphans": orphans}
    text = f"{counted(len(rows), 'partial')}, {format_bytes(written)}: {live:,} live, "
    text += f"{resumable:,} resumable, {counted(orphans, 'orphan')}"
    return rows, {**summary, "written_bytes": written}, text


def partials(cache: Cache) -> Iterator[Row]:
    """Yield a row for each partial of live and dead processes."""
    for store in cache.process.stores():
        locks = lock_layout(cache.process.last_tier, store.layout.base)
        for partial in in_flight(store.layout):
            if not partial.key:
                continue  # an entry that is being removed
            journal = read_journal(partial.path)
            metadata = journal.metadata if journal else None
            holder = read_holder(locks.holder(partial.key)) if partial.live else None
            state = "resumable" if metadata and metadata.resumable else "orphan"
            yield {
                "url": metadata.url if metadata else None,
                "size": partial.size,
                "written_bytes": journal.written if journal else partial.occupied,
                "state": "live" if partial.live else state,
                "begun_at": utc(metadata.fetched_at) if metadata else None,
                "holder": str(holder) if holder else None,
                "pid": holder.pid if holder else None,
                "rank": holder.rank if holder else None,
                "key": partial.key,
                "dir": str(partial.path),
            }


@command("expand")
@flag("-0", "--null", help="End each URL with a NUL instead of a newline, as for `xargs -0`.")
@specs_argument
@cli.store_options
def expand_command(invocation: Invocation, specs: tuple[str, ...], null: bool) -> None:
    """Print the URLs that SPECs stand for, one per line, in order.

    A SPEC has the form that `prewarm` accepts. Prefixes and `*` are listed at their origin.

    \b
    Examples:
      shardcache expand 's3://lab/train-{0000..2047}.tar' > shards.txt
      shardcache expand -0 s3://lab/val/ | xargs -0 -n 1 echo
    """
    urls = expand(specs, Cache.from_config(invocation.loaded().config))
    invocation.console.object("expand", urls=urls)
    if not invocation.console.json:
        end = "\0" if null else "\n"
        click.echo("".join(f"{url}{end}" for url in urls), nl=False)


@command("path")
@flag("--fetch", help="Download shards that are not cached.")
@specs_argument
@cli.store_options
def path_command(invocation: Invocation, specs: tuple[str, ...], fetch: bool) -> ExitCode:
    """Print the local paths of cached shards, one per line, and nothing else.

    A SPEC has the form that `ls` accepts, or with --fetch, that of `prewarm`. If a shard is not
    cached, the command names those that are not, and exits with 1. The shards are not pinned:
    another process may evict them later.

    \b
    Examples:
      shardcache path s3://lab/train-0000.tar
      tar tf "$(shardcache path --fetch s3://lab/train-0000.tar)"
    """
    console, rows, absent = invocation.console, list[Row](), list[ShardURL]()
    with invocation.cache() as cache:
        shards = [*map(cache.parse, expand(specs, cache))] if fetch else cache.select(specs)
        for shard in shards:
            try:
                if fetch and cache.entry(shard) is None:  # also of a local file, which is refused
                    cache.fetch(shard)
            except ShardNotFoundError as exn:
                console.error(reason(exn), exn)
                continue
            if (path := cache.path(shard)) is None:
                absent.append(shard)
                continue
            if endpoint := cache.other_endpoint(shard):
                console.hint(f"{shard} came from another endpoint ({endpoint}).")
            rows.append({"url": str(shard), "path": path})
        otherwise = "It was evicted at once." if fetch else "Pass --fetch to download it."
        for url, advice in _advice(cache, absent).items():
            console.error(f"{url} is not cached in {cache.dir}. {advice or otherwise}")
    if len(rows) < len(shards):
        return ExitCode.FAILED
    console.object("path", shards=rows)
    console.data("\n".join(os.fspath(row["path"]) for row in rows))
    return ExitCode.DONE


def _print(
    console: Console, name: str, rows: list[Row], text: str, errors: Mapping[str, str], summary: Row
) -> ExitCode:
    """Print the result of a command, with the message of each state that is an error."""
    console.object(name, shards=rows, summary=summary)
    console.info(text)
    for row in rows:
        if row["state"] in errors:
            console.error(f"{row['url']} {errors[row['state']]}")
    if any(row["state"] in ("in_use", "pinned") for row in rows):
        return ExitCode.BUSY
    return ExitCode.FAILED if any(row["state"] in errors for row in rows) else ExitCode.DONE


@command("rm")
@cli.dry_run_option
@cli.yes_option
@specs_argument
def rm_command(
    invocation: Invocation, specs: tuple[str, ...], yes: bool, dry_run: bool
) -> ExitCode:
    """Remove shards, with all their cached versions.

    A SPEC has the form that `ls` accepts. Exits with 6 if a shard stays because it is pinned or
    in use, and with 1 if a shard was not cached or nothing matches.

    \b
    Examples:
      shardcache rm -y 's3://lab/old-{0000..0127}.tar'
      shardcache rm -n s3://lab/train-0412.tar
    """
    rows, absent = list[Row](), list[ShardURL]()
    with invocation.cache(existing=True) as cache:
        shards, pins = cache.select(specs), cache.pins()
        sizes = [cache.remove(shard, dry_run=True)[0] for shard in shards]
        if any(sizes) and not (dry_run or yes):
            number, total = counted(sum(map(bool, sizes)), "shard"), format_bytes(sum(sizes))
            invocation.confirm(f"Remove {number}, {total}, from {cache.dir}?")
        for shard in shards:
            is_cached = shard in cache  # it may have no bytes
            freed, stays = cache.remove(shard, dry_run=dry_run)
            state = "removed" if freed or is_cached else "not_cached"
            state = ("pinned" if shard.key in pins else "in_use") if stays else state
            rows.append({"url": str(shard), "size": freed, "state": state})
            absent += [shard] if state == "not_cached" else []
        advice = _advice(cache, absent)
    counts, freed = Counter(row["state"] for row in rows), sum(row["size"] for row in rows)
    errors = {
        "pinned": "is pinned. Run `shardcache unpin` first.",
        "in_use": 'is being read: `lsof "$(shardcache path URL)"` names the process.',
        "not_cached": f"is not cached in {cache.dir}",
    }
    summary: Row = {name: counts[name] for name in ("removed", "in_use", "pinned", "not_cached")}
    summary |= {"dry_run": dry_run, "removed_bytes": freed}
    text = f"{'would remove' if dry_run else 'removed'} "
    text += f"{counted(counts['removed'], 'shard')}, {format_bytes(freed)}"
    code = _print(invocation.console, "rm", rows, text, errors, summary)
    for row in rows if dry_run else ():
        if row["state"] == "removed":
            invocation.console.info(f"  {row['url']}  {format_bytes(row['size'])}")
    for url, text in advice.items():
        if text:
            invocation.console.error(f"{url}: {text}")
    return code


@command("pin")
@click.option(
    *("--for", "seconds"),
    type=cli.DURATION,
    help="Pin for this time, such as 3d.  [default: until `unpin`]",
)
@specs_argument
def pin_command(invocation: Invocation, specs: tuple[str, ...], seconds: float | None) -> ExitCode:
    """Protect shards from the limits, from `clean --all` and from `rm`.

    A SPEC has the form that `ls` accepts. A glob or a prefix pins the matching shards
    that are in the cache now. A URL, also with {braces}, need not be cached: this command does
    not download it, but keeps it once it is cached. Pinning a shard again replaces its expiry.

    \b
    Examples:
      shardcache pin 's3://lab/val-{0000..0031}.tar' --for 3d
      shardcache prewarm 's3://lab/val-{0000..0031}.tar'
    """
    with invocation.cache() as cache:
        before = cache.pins()
        shards = cache.pin(specs, seconds)
        states = ["cached" if shard in cache else "not_cached" for shard in shards]
        rows = [{"url": str(s), "state": state} for s, state in zip(shards, states, strict=True)]
        advice = _advice(cache, [s for s in shards if s not in cache])
    absent, again = states.count("not_cached"), sum(shard.key in before for shard in shards)
    text = f"pinned {counted(len(rows), 'shard')} "
    text += "until unpinned" if seconds is None else f"for {exact_duration(seconds)}"
    if absent:
        text += f"; {absent:,} not cached yet, and kept once fetched"
    if again and seconds is not None:
        text += f"; this replaces the pins of {counted(again, 'shard')}"
    for url, hint in advice.items():
        if hint:
            invocation.console.hint(f"{url}: {hint}")
    summary = {"pinned": len(rows), "not_cached": absent, "seconds": seconds}
    return _print(invocation.console, "pin", rows, text, {}, summary)


@command("unpin")
@specs_argument
def unpin_command(invocation: Invocation, specs: tuple[str, ...]) -> ExitCode:
    """Unpin shards, so that the limits apply to them again.

    A SPEC has the form that `ls` accepts; a glob or a prefix matches pinned shards. Exits with 1
    if a shard was not pinned or nothing matches.

    \b
    Examples:
      shardcache unpin 's3://lab/val-{0000..0031}.tar'
    """
    with invocation.cache(existing=True) as cache:
        shards = cache.select(specs, pinned=True)
        ended = cache.unpin(shards)
    counts = {"unpinned": len(ended), "not_pinned": len(shards) - len(ended)}
    rows = [{"url": str(s), "state": "unpinned" if s in ended else "not_pinned"} for s in shards]
    text = f"unpinned {counted(len(ended), 'shard')}"
    errors = {"not_pinned": f"was not pinned in {cache.dir}"}
    return _print(invocation.console, "unpin", rows, text, errors, counts)
