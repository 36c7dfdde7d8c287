"""Options and arguments that several commands have, and how their values are read.

What is wrong is refused while the command line is parsed, in a sentence that names the option.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardcache.errors import ConfigError
from shardcache.fetch.connections import parse_rate
from shardcache.units import Limit, parse_duration, parse_limit

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.urls import ShardURL

__all__ = [
    "Number",
    "dry_run_option",
    "duration",
    "expand_shards",
    "limit",
    "rate",
    "share",
    "since_option",
    "urls_argument",
    "yes_option",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def duration(context: click.Context, parameter: click.Parameter, value: Any) -> float | None:
    """The callback of an option that takes seconds or ``1h30m``."""
    try:
        return None if value is None else parse_duration(value)
    except ConfigError as exn:
        raise click.BadParameter(exn.message, context, parameter) from exn


def limit(context: click.Context, parameter: click.Parameter, value: Any) -> Limit | None:
    """The callback of an option that takes a size or a percentage."""
    try:
        return None if value is None else parse_limit(value)
    except ConfigError as exn:
        raise click.BadParameter(exn.message, context, parameter) from exn


def share(context: click.Context, parameter: click.Parameter, value: str | None) -> float:
    """The callback of an option that takes a percentage: a part of 1, which is the default."""
    if value is None:
        return 1.0
    try:
        found = parse_limit(value)
    except ConfigError:
        found = None
    if found is None or not found.percent:
        raise click.BadParameter(
            f"{value!r} is no share. Write a percentage above 0% and up to 100%, such as 5%.",
            context,
            parameter,
        )
    return found.percent / 100


def rate(context: click.Context, parameter: click.Parameter, value: Any) -> int | None:
    """The callback of an option that takes bytes per second."""
    try:
        return None if value is None else parse_rate(value)
    except ConfigError as exn:
        raise click.BadParameter(exn.message, context, parameter) from exn


class Number(click.FloatRange):
    """A number between two bounds; click lets NaN pass, which is in no range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is no number.", param, ctx)
        return found


def dry_run_option(help: str) -> Callable[[_Function], _Function]:
    """``-n``."""
    return click.option("-n", "--dry-run", is_flag=True, help=help)


def yes_option(help: str) -> Callable[[_Function], _Function]:
    """``-y``."""
    return click.option("-y", "--yes", is_flag=True, help=help)


def since_option() -> Callable[[_Function], _Function]:
    """``--since``, of what was counted."""
    return click.option(
        "--since",
        callback=duration,
        metavar="DURATION",
        help="Only what was counted since then, such as 24h.  [default: 30 days]",
    )


def urls_argument() -> Callable[[_Function], _Function]:
    """Shards by name, at least one."""
    return click.argument("urls", nargs=-1, required=True, metavar="URL...")


def expand_shards(cache: Cache, urls: Iterable[str]) -> dict[str, ShardURL]:
    """Key -> shard, each once; braces are expanded.

    Raises:
        ConfigError: not a URL that the cache reads.
    """
    from shardcache.prewarm import expand

    return {shard.key: shard for shard in map(cache.parse, expand(urls))}
