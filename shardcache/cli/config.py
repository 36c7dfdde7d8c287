"""``shardcache config`` and ``shardcache dir``: what is set, and where."""

from __future__ import annotations

import os

from shardcache.cli.main import Invocation, command
from shardcache.config import describe


@command("config")
def config_command(invocation: Invocation) -> None:
    """Show every option, its value and who set it.

    First wins: arguments (--dir), SHARDCACHE_* variables, configuration files,
    WDS_CACHE and WDS_CACHE_SIZE, defaults. Secrets are not shown.

    \b
    Examples:
      shardcache config
      shardcache --config job.toml config
    """
    options = describe(invocation.loaded())
    changed = sum(option.source != "default" for option in options)
    console = invocation.console
    console.object("config", options=options, summary={"options": len(options), "set": changed})
    rows = [(option.name, option.value, option.source) for option in options]
    console.table(("OPTION", "VALUE", "SOURCE"), rows)
    console.data(f"{len(rows)} options, {changed} set")


@command("dir")
def dir_command(invocation: Invocation) -> None:
    """Print the directory of the cache, and nothing else.

    It need not exist yet.

    \b
    Examples:
      shardcache dir
      du -sh "$(shardcache dir)"
    """
    directory = invocation.loaded(directory_only=True).config.dir
    invocation.console.object("dir", dir=directory)
    invocation.console.data(os.fspath(directory))
