"""``shardcache expand``: the URLs that shard specifications stand for."""

from __future__ import annotations

import click

from shardcache.cli.entries import specs_argument
from shardcache.cli.main import Invocation, command, flag, store_options
from shardcache.prewarm.plan import expand


@command("expand")
@flag("-0", "--null", help="End each URL with a NUL instead of a newline, as for `xargs -0`.")
@specs_argument
@store_options
def expand_command(invocation: Invocation, specs: tuple[str, ...], null: bool) -> None:
    """Print the URLs that SPECs stand for, one per line, in order.

    A SPEC has the form that `prewarm` accepts. Prefixes and `*` are listed at their origin.

    \b
    Examples:
      shardcache expand 's3://lab/train-{0000..2047}.tar' > shards.txt
      shardcache expand -0 s3://lab/val/ | xargs -0 -n 1 echo
    """
    with invocation.cache() as cache:
        urls = expand(specs, cache)
    invocation.console.object("expand", urls=urls)
    if null and not invocation.console.json:
        click.echo("".join(f"{url}\0" for url in urls), nl=False)
    else:
        for url in urls:
            invocation.console.data(url)
