"""``shardcache config`` and ``dir``: the configuration of the cache."""

from __future__ import annotations

import os

from shardcache.cli.main import Invocation, command
from shardcache.cli.output import fields_of
from shardcache.config import describe
from shardcache.origins.aws import s3_access


@command("config")
def config_command(invocation: Invocation) -> None:
    """Show all options, their values and the sources of the values.

    The first source that sets an option wins: arguments (--dir), SHARDCACHE_* variables,
    configuration files, WDS_CACHE and WDS_CACHE_SIZE, defaults. Below the options are the S3
    endpoint and the source of the credentials in use. Secrets are not shown.

    \b
    Examples:
      shardcache config
      shardcache --config job.toml config
    """
    console, loaded = invocation.console, invocation.loaded()
    options, access = describe(loaded), s3_access(loaded.config)
    given = sum(option.source != "default" for option in options)
    summary = {"options": len(options), "set": given}
    records = [*map(fields_of, options)]  # dicts, because json writes a named tuple as a list
    console.object("config", options=records, s3=fields_of(access), summary=summary)
    rows = [(option.name, option.value, option.source) for option in options]
    console.table(("OPTION", "VALUE", "SOURCE"), rows)
    console.data(f"S3: {access}\n{len(options)} options, {given} set")


@command("dir")
def dir_command(invocation: Invocation) -> None:
    """Print the directory of the cache, and nothing else.

    The directory may not exist yet.

    \b
    Examples:
      shardcache dir
      du -sh "$(shardcache dir)"
    """
    directory = invocation.loaded().config.dir
    invocation.console.object("dir", dir=directory)
    invocation.console.data(os.fspath(directory))
