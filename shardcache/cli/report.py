"""``shardcache report``: what the cache has done, as a page to send around."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from shardcache.cli.main import Invocation, command, since_option
from shardcache.cli.page import Report, page
from shardcache.cli.top import tier_uses
from shardcache.config import describe
from shardcache.stats.database import fetches
from shardcache.units import format_bytes

__all__ = ["report_command"]


@command(
    "report",
    short="Write a page of charts.",
    examples="""
        shardcache report
        shardcache report --since 24h -o /var/www/html/shardcache.html
        shardcache report --json
    """,
)
@since_option()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("shardcache-report.html"),
    metavar="FILE",
    help="Where to.  [default: shardcache-report.html]",
)
def report_command(invocation: Invocation, since: float | None, output: Path) -> int:
    """Write one HTML file: hit rate over time, bytes from cache and origin, waits, evictions.

    It needs no scripts and nothing from elsewhere, and can be sent around. With --json
    the same figures are printed and no file is written.
    """
    loaded = invocation.loaded()
    cache = invocation.cache(looking=True)
    with cache:
        settings = [
            (setting.name, setting.value, setting.source)
            for setting in describe(loaded)
            if setting.source != "default"
        ]
        then = 0.0 if since is None else time.time() - since
        report = Report(
            node=os.uname().nodename,
            made=time.time(),
            samples=cache.samples(since),
            fetches=list(fetches(cache.node_layout, then)),
            tiers=tier_uses(cache),
            settings=settings,
        )
    console = invocation.console
    if not console.human:
        console.record("report", report.as_dict(), "")
        return 0
    text = page(report).encode()
    output.write_bytes(text)
    console.said(f"wrote {output}, {format_bytes(len(text))}")
    return 0
