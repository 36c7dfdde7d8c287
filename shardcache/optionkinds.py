"""The kinds of value an option can have: how each is read from text, and shown.

Every parser takes what code, the environment or TOML may hold and returns the
option's own type, or raises a `ConfigError` that says what is accepted. All are
pure, apart from the home directory and variables in a path. No error shows a
secret.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardcache import units
from shardcache.errors import ConfigError
from shardcache.modes import group_name
from shardcache.optionvalues import (
    USERINFO,
    StorageOptions,
    TierOption,
    Upstream,
    names_only,
    redact,
)
from shardcache.units import Limit

MIB = 1 << 20
NONE = "none"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)
_ENDPOINT = re.compile(
    r"https?://(\[[0-9a-f:.]+\]|[^/?#@:\s\[\]]+)(:[0-9]{1,5})?(/[^?#@\s]*)?",
    re.IGNORECASE,
)


_NO_GROUP = (1 << 32) - 1
_CREDENTIALS_BELONG = (
    "http:// or https://, a host, a port if need be; credentials belong into the environment "
    "(AWS_ACCESS_KEY_ID), a profile or storage_options"
)


def refuse(value: object, reason: str, accepted: str) -> ConfigError:
    """The error for a value that cannot be used; the caller raises it."""
    # Of other types only the name: they may hold anything, secrets included.
    shown = f"a {type(value).__name__}"
    if isinstance(value, str | int | float | Path):
        shown = repr(redact(str(value))[:80])
    return ConfigError(f"{shown} {reason}. Accepted: {accepted}.")


def _directory(value: object, environ: Mapping[str, str] = os.environ, base: str = "") -> Path:
    accepted = "a local directory; ~ and $VARIABLES in it are expanded"
    text = str(value) if isinstance(value, str | Path) else ""
    if not text.strip() or "\0" in text:
        raise refuse(value, "is not a path", accepted)
    if "://" in text:
        raise refuse(value, "is a URL", accepted)
    for found in _VARIABLE.finditer(text):
        if not environ.get(name := found[1] or found[2]):
            # os.path.expandvars keeps it: a directory called "$SCRATCH" would be the result.
            raise refuse(value, f"names ${name}, which is not set", accepted)
    text = _VARIABLE.sub(lambda found: environ[found[1] or found[2]], text)
    if (text == "~" or text.startswith("~/")) and environ.get("HOME"):
        text = environ["HOME"] + text[1:]
    text = os.path.expanduser(text)  # noqa: PTH111  Path.expanduser raises RuntimeError
    if text.startswith("~"):
        raise refuse(value, "names a home directory that is not known", accepted)
    return Path(base, text).absolute()


def _limit(value: Any) -> Limit:
    limit = units.parse_limit(value)
    if limit is None:
        raise refuse(value, "is no limit", "a size or a percentage, 0 for none")
    return limit


def _room(value: object) -> Limit:
    limit = _limit(value)
    if not (limit.bytes or limit.percent):
        raise refuse(value, "leaves no room", f'more than 0, or "{NONE}" for no limit')
    return limit


def _part_size(value: Any) -> int:
    size = units.parse_bytes(value)
    if size % MIB or not MIB <= size <= 1024 * MIB:
        raise refuse(value, "cannot be used", "a multiple of 1MiB from 1MiB to 1GiB")
    return size


def _size(value: Any) -> int:
    size = units.parse_bytes(value)
    if size == 0:
        raise refuse(value, "leaves no room", "a size of more than 0")
    return size


def _some_time(value: Any) -> float:
    seconds = units.parse_duration(value)
    if seconds <= 0:
        raise refuse(value, "is no time at all", "a duration of more than 0")
    return seconds


def _function(value: object) -> Callable[[Path], None]:
    if not callable(value):
        raise refuse(value, "cannot be called", "a function of the path of a fetched file")
    return value


def _schemes(value: object) -> tuple[str, ...]:
    accepted = 'URL schemes such as "pipe", separated by commas or as a list'
    if isinstance(value, str):
        value = [] if value.strip().lower() == NONE else value.split(",")
    if not isinstance(value, list | tuple | set | frozenset):
        raise refuse(value, "is no list of schemes", accepted)
    schemes = {item: item.strip().lower() if isinstance(item, str) else "" for item in value}
    for item, scheme in schemes.items():
        if not _SCHEME.fullmatch(scheme):
            raise refuse(item, "is no scheme", accepted)
    return tuple(sorted(set(schemes.values())))


def _tiers(value: object) -> tuple[TierOption, ...]:
    accepted = (
        "directories, each with =SIZE if it is to hold no more (/dev/shm/shards=50GB), as a list "
        "or separated by commas; as tables with dir, max_size and min_free in code and TOML"
    )
    if isinstance(value, str):
        value = [] if value.strip().lower() == NONE else value.split(",")
    if not isinstance(value, list | tuple):
        raise refuse(value, "is no list of tiers", accepted)
    return tuple(_tier(item, accepted) for item in value)


def _tier(item: object, accepted: str) -> TierOption:
    if isinstance(item, TierOption):
        return item
    table: Mapping[str, object]
    if isinstance(item, Mapping):
        table = item
    else:
        text = str(item) if isinstance(item, str | Path) else ""
        path, _, size = text.strip().partition("=")
        table = {"dir": path, **({"max_size": size} if size else {})}
    if set(table) - {"dir", "max_size", "min_free"} or not table.get("dir"):
        raise refuse(item, "is no tier", accepted)
    max_size, min_free = table.get("max_size"), table.get("min_free")
    return TierOption(
        _directory(table["dir"]),
        None if max_size is None else _room(max_size),
        *(() if min_free is None else (_limit(min_free),)),
    )


def _upstreams(value: object) -> tuple[Upstream, ...]:
    accepted = (
        "directories or URLs, as a list or separated by commas; as tables with url, write_back, "
        "endpoint_url and storage_options in code and TOML"
    )
    if isinstance(value, str):
        value = [] if value.strip().lower() == NONE else value.split(",")
    if not isinstance(value, list | tuple):
        raise refuse(value, "is no list of upstreams", accepted)
    return tuple(_upstream(item, accepted) for item in value)


def _upstream(item: object, accepted: str) -> Upstream:
    if isinstance(item, Upstream):
        return item
    table = item if isinstance(item, Mapping) else {"url": item}
    unknown = set(table) - {"url", "write_back", "endpoint_url", "storage_options"}
    url = table.get("url")
    if unknown or not isinstance(url, str | Path) or not str(url).strip():
        raise refuse(item, "is no upstream", accepted)
    text = str(url).strip()
    if "://" not in text:
        text = os.fspath(_directory(text))
    elif not _SCHEME.fullmatch(text.partition("://")[0].lower()) or "?" in text:
        raise refuse(text, "is no upstream", accepted)
    elif USERINFO.match(text) and not text.startswith(("abfs", "az", "oci")):
        raise refuse(text, "has a part before an @", "credentials belong into storage_options")
    endpoint, write_back = table.get("endpoint_url"), table.get("write_back", False)
    if not isinstance(write_back, bool | str):
        raise refuse(write_back, "is neither true nor false", accepted)
    return Upstream(
        text,
        units.parse_bool(write_back),
        None if endpoint is None else _endpoint(endpoint),
        _storage_options(table.get("storage_options", {})),
    )


def _storage_options(value: object) -> StorageOptions:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value if isinstance(value, StorageOptions) else StorageOptions(value)
    # Not even a string is shown: it may be a secret in the wrong place.
    accepted = "a dict in code, a [storage_options] table in TOML"
    raise ConfigError(f"a {type(value).__name__} is no table of names. Accepted: {accepted}.")


def _group(value: object) -> int:
    accepted = "the name of a group that this machine knows, or its number"
    if isinstance(value, str) and not value.strip().isdecimal():
        import grp

        try:
            return grp.getgrnam(value.strip()).gr_gid
        except (KeyError, ValueError) as exn:
            raise refuse(value, "is no group", accepted) from exn
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise refuse(value, "is no group", accepted)
    # The highest number says "leave it as it is", chown(2).
    if not 0 <= int(value) < _NO_GROUP:
        raise refuse(value, "is no group", accepted)
    return int(value)


def _endpoint(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if USERINFO.match(text):
        raise refuse(value, "has a part before an @, which S3 does not use", _CREDENTIALS_BELONG)
    if not _ENDPOINT.fullmatch(text):
        raise refuse(value, "is no endpoint", "http:// or https://, a host, a port if need be")
    return text


class Kind(NamedTuple):
    """How one kind of value is called, read and shown."""

    text: str
    parse: Callable[..., Any]
    show: Callable[[Any], str] = str


def count(most: int, least: int = 1) -> Kind:
    """Whole numbers from ``least`` to ``most``."""
    return Kind(f"{least} to {most}", lambda value: units.parse_count(value, least, most))


def _choice(*names: str) -> Kind:
    return Kind(" or ".join(names), lambda value: units.parse_choice(value, names))


PATH = Kind("path", _directory)
BOOL = Kind("bool", units.parse_bool, lambda value: str(value).lower())
TIME = Kind("duration", units.parse_duration, units.exact_duration)
SOME_TIME = Kind("duration", _some_time, units.exact_duration)
# Not the repr: a functools.partial would print its arguments.
CALL = Kind("function", _function, lambda value: getattr(value, "__name__", "function"))
LIST = Kind("list", _schemes, ", ".join)
TABLE = Kind("table", _storage_options, names_only)
ISOLATION = _choice("node", "rank", "job")
LOCKS = _choice("auto", "flock", "node", "lease")
FILL = _choice("follow", "complete")
TIERS = Kind("list", _tiers, lambda value: ", ".join(map(str, value)))
UPSTREAMS = Kind("list", _upstreams, lambda value: ", ".join(map(str, value)))
POLICY = _choice("working-set", "lru", "fifo")
FSYNC = _choice("verify-after-boot", "fsync", "none")
ROOM = Kind("size or %", _room)
LIMIT = Kind("size or %", _limit)
SIZE = Kind("size", _size, units.exact_bytes)
PART_SIZE = Kind("size", _part_size, units.exact_bytes)
ENDPOINT = Kind("URL", _endpoint, redact)
GROUP = Kind("name or number", _group, group_name)
