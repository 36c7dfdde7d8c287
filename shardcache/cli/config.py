"""``shardcache config`` and ``shardcache dir``: what is set, and where."""

from __future__ import annotations

import os

from shardcache.cli.main import ExitCode, Invocation, command
from shardcache.cli.output import Column
from shardcache.config import describe, options


@command(
    "config",
    short="Show every option, its value and who set it.",
    examples="""
        shardcache config
        shardcache config --json
        shardcache --config job.toml config
    """,
)
def config_command(invocation: Invocation) -> int:
    """Show every option with the value in force and where it comes from.

    First wins: arguments (--dir), SHARDCACHE_* variables, configuration files,
    WDS_CACHE and WDS_CACHE_SIZE, defaults. Secrets are not shown.
    """
    loaded = invocation.loaded()
    known = {option.name: option for option in options()}
    rows = [
        {
            "option": setting.name,
            "value": setting.value,
            "source": setting.source,
            "default": known[setting.name].default,
            "help": known[setting.name].help,
        }
        for setting in describe(loaded)
    ]
    changed = sum(row["source"] != "default" for row in rows)
    invocation.console.table(
        "config",
        "option",
        [
            Column("option", "OPTION"),
            Column("value", "VALUE"),
            Column("source", "SOURCE", style=lambda s: "dim" if s == "default" else None),
        ],
        rows,
        summary={"options": len(rows), "set": changed},
        footer=f"{len(rows)} options, {changed} set",
    )
    return ExitCode.DONE


@command(
    "dir",
    short="Print the directory of the cache.",
    examples="""
        shardcache dir
        du -sh "$(shardcache dir)"
    """,
)
def dir_command(invocation: Invocation) -> int:
    """Print the directory of the cache, and nothing else; it need not exist yet."""
    directory = os.fspath(invocation.find_directory())
    invocation.console.record("dir", {"dir": directory}, directory)
    return ExitCode.DONE
