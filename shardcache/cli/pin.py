"""``shardcache pin`` and ``shardcache unpin``: what is to stay, whatever a policy says."""

from __future__ import annotations

from typing import Any

import click

from shardcache.cli.arguments import duration, expand_shards, urls_argument
from shardcache.cli.invocation import Invocation, command
from shardcache.cli.output import Column, counted
from shardcache.units import exact_duration

__all__ = ["pin_command", "unpin_command"]

_COLUMNS = [Column("url"), Column("state")]


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
    callback=duration,
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
    shards = expand_shards(cache, urls)
    rows: list[dict[str, Any]] = []
    with cache:
        for shard in shards.values():
            cache.pin(shard.raw, seconds)
            state = "cached" if shard.raw in cache else "not_cached"
            rows.append({"url": str(shard), "state": state})
    absent = sum(row["state"] == "not_cached" for row in rows)
    console = invocation.console
    if console.human:
        for row in rows if console.verbosity else ():
            console.said(f"{row['url']}  {row['state'].replace('_', ' ')}")
        until = "until they are unpinned" if seconds is None else f"for {exact_duration(seconds)}"
        console.said(f"pinned {counted(len(rows), 'shard')} {until}")
    else:
        summary = {"pinned": len(rows), "not_cached": absent, "seconds": seconds}
        console.table("pin", "shard", _COLUMNS, rows, summary=summary)
    if absent:
        are = "is" if absent == 1 else "are"
        console.hint(f"{absent:,} of them {are} not cached yet, and kept once fetched.")
    return 0


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
    shards = expand_shards(cache, urls)
    with cache:
        rows: list[dict[str, Any]] = [
            {
                "url": str(shard),
                "state": "unpinned" if cache.unpin(shard.raw) else "not_pinned",
            }
            for shard in shards.values()
        ]
    unpinned = sum(row["state"] == "unpinned" for row in rows)
    console = invocation.console
    if console.human:
        console.said(f"unpinned {counted(unpinned, 'shard')}")
    else:
        summary = {"unpinned": unpinned, "not_pinned": len(rows) - unpinned}
        console.table("unpin", "shard", _COLUMNS, rows, summary=summary)
    for row in rows:
        if row["state"] == "not_pinned":
            console.error(f"{row['url']} was not pinned in {cache.dir}")
    return 0 if unpinned == len(rows) else 1
