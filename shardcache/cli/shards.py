"""``shardcache path``, ``rm``, ``pin`` and ``unpin``: commands for named shards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from shardcache.cli import main as cli
from shardcache.cli.contents import Row
from shardcache.cli.main import ExitCode, Invocation, command, flag
from shardcache.cli.output import Console, counted
from shardcache.errors import ShardNotFoundError
from shardcache.prewarm.plan import expand
from shardcache.units import exact_duration, format_bytes


@command("path")
@flag("--fetch", help="Download shards that are not cached.")
@cli.specs_argument
def path_command(invocation: Invocation, specs: tuple[str, ...], fetch: bool) -> None:
    """Print the local paths of cached shards, one per line, and nothing else.

    A SPEC is as for `ls`, with --fetch as for `prewarm`. If a shard is not cached, prints
    nothing and exits with 1. The shards are not pinned: another process may evict them later.

    \b
    Examples:
      shardcache path s3://lab/train-0000.tar
      tar tf "$(shardcache path --fetch s3://lab/train-0000.tar)"
    """
    rows = list[Row]()
    with invocation.cache() as cache:
        shards = map(cache.parse, expand(specs, cache)) if fetch else cache.select(specs)
        for shard in shards:
            path = cache.path(shard.raw)
            if path is None and fetch:
                cache.fetch(shard.raw)
                path = cache.path(shard.raw)
            if path is None:
                advice = "It was evicted at once." if fetch else "Pass --fetch to download it."
                text = f"{shard} is not cached in {cache.dir}. {advice}"
                raise ShardNotFoundError(text, url=str(shard))
            rows.append({"url": str(shard), "path": path})
    invocation.console.object("path", shards=rows)
    for row in rows:
        invocation.console.data(os.fspath(row["path"]))


def _print(
    console: Console,
    name: str,
    rows: list[Row],
    text: str,
    errors: Mapping[str, str],
    **summary: Any,
) -> ExitCode:
    """Print the result of a command, and return its exit code.

    ``errors`` has the states of rows that are errors, and the message that follows the URL.
    """
    console.object(name, shards=rows, summary=summary)
    console.info(text)
    for row in rows:
        if row["state"] in errors:
            console.error(f"{row['url']} {errors[row['state']]}")
    if any(row["state"] == "in_use" for row in rows):
        return ExitCode.BUSY
    return ExitCode.FAILED if any(row["state"] in errors for row in rows) else ExitCode.DONE


@command("rm")
@cli.dry_run_option
@cli.yes_option
@cli.specs_argument
def rm_command(
    invocation: Invocation, specs: tuple[str, ...], yes: bool, dry_run: bool
) -> ExitCode:
    """Remove shards, with all their cached versions.

    A SPEC is as for `ls`. Exit code 6 if a shard stays because it is pinned or in use, 1 if
    one was not cached or nothing matches.

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
    return _print(
        invocation.console,
        "rm",
        rows,
        f"{'would remove' if dry_run else 'removed'} {removed}",
        {
            "in_use": "is pinned or being read. Run `shardcache unpin`, or wait for its readers.",
            "not_cached": f"is not cached in {cache.dir}",
        },
        **{name: counts[name] for name in ("removed", "in_use", "not_cached")},
        dry_run=dry_run,
        removed_bytes=freed,
    )


@command("pin")
@click.option(
    "--for",
    "seconds",
    type=cli.DURATION,
    help="Pin for this time, such as 3d.  [default: until `unpin`]",
)
@cli.specs_argument
def pin_command(invocation: Invocation, specs: tuple[str, ...], seconds: float | None) -> ExitCode:
    """Protect shards from limits, from `clean --all` and from `rm`.

    A SPEC is as for `ls`. A glob or a prefix pins the matching shards that are in the cache
    now. A URL, also with {braces}, need not be cached: this command does not download it, but
    keeps it once it is cached. Pinning a shard again replaces its time.

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
@cli.specs_argument
def unpin_command(invocation: Invocation, specs: tuple[str, ...]) -> ExitCode:
    """Unpin shards, so that the limits apply to them again.

    A SPEC is as for `ls`; a glob or a prefix matches pinned shards. Exit code 1 if one was
    not pinned or nothing matches.

    \b
    Examples:
      shardcache unpin 's3://lab/val-{0000..0031}.tar'
    """
    with invocation.cache() as cache:
        shards = cache.select(specs, pinned=True)
        ended = cache.unpin(shards)
    states = ["unpinned" if shard in ended else "not_pinned" for shard in shards]
    counts = {state: states.count(state) for state in ("unpinned", "not_pinned")}
    return _print(
        invocation.console,
        "unpin",
        [{"url": str(shard), "state": state} for shard, state in zip(shards, states, strict=True)],
        f"unpinned {counted(counts['unpinned'], 'shard')}",
        {"not_pinned": f"was not pinned in {cache.dir}"},
        **counts,
    )
