"""What ``shardcache ls`` lets through, and in which order. Pure.

A filter is ``FIELD OP VALUE``: ``size>1GB``, ``used<2d``, ``state=pinned``. Times
are ages: ``used<2d`` is used within the last two days.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardcache.errors import ConfigError
from shardcache.units import parse_bytes, parse_duration
from shardcache.urls import redact

__all__ = ["FIELDS", "matches_glob", "parse_filter", "parse_sort"]

Row = Mapping[str, Any]

#: Field of a filter -> (field of a row, how its value is read).
FIELDS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "size": ("size", parse_bytes),
    "used": ("used_age", parse_duration),
    "fetched": ("fetched_age", parse_duration),
    "state": ("state", str),
    "url": ("url", str),
}
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_FILTER = re.compile(r"\s*([a-z]+)\s*(<=|>=|!=|<|>|==?)\s*(.*?)\s*\Z", re.DOTALL)
_EXACT_ONLY = frozenset({"state", "url"})


def parse_filter(text: str) -> Callable[[Row], bool]:
    """A test of rows. A row whose value is not known never passes.

    Raises:
        ConfigError: not a filter.
    """
    found = _FILTER.match(text)
    known = ", ".join(FIELDS)
    if found is None or found[1] not in FIELDS:
        raise ConfigError(
            f"--filter {text!r} is not a filter. Write FIELD OP VALUE, such as 'size>1GB' or "
            f"'used<2d'; the fields are {known}."
        )
    name, sign, value = found[1], found[2].replace("==", "="), found[3]
    field, read = FIELDS[name]
    if name in _EXACT_ONLY and sign not in ("=", "!="):
        raise ConfigError(f"--filter {text!r}: {name} can only be compared with = and !=")
    try:
        wanted = read(value)
    except ConfigError as exn:
        raise ConfigError(f"--filter {text!r}: {exn.message}") from exn
    compare = _OPERATORS[sign]

    def passes(row: Row) -> bool:
        found = row.get(field)
        return found is not None and compare(found, wanted)

    return passes


def parse_sort(text: str) -> Callable[[Sequence[Row]], list[Row]]:
    """An ordering: ``FIELD`` or ``FIELD:asc`` or ``FIELD:desc``; unknown values come last.

    Raises:
        ConfigError: not an ordering.
    """
    name, _, direction = text.strip().partition(":")
    if name not in FIELDS or direction not in ("", "asc", "desc"):
        known = ", ".join(FIELDS)
        raise ConfigError(
            f"--sort {text!r} is not an order. Write one of {known}, and :desc to turn it round."
        )
    field = FIELDS[name][0]

    def ordered(rows: Sequence[Row]) -> list[Row]:
        known = [row for row in rows if row.get(field) is not None]
        unknown = [row for row in rows if row.get(field) is None]
        by_url = sorted(known, key=lambda row: str(row.get("url")))
        return sorted(by_url, key=lambda row: row[field], reverse=direction == "desc") + unknown

    return ordered


def matches_glob(glob: str, url: str) -> bool:
    """Whether ``url`` is meant: all of it, or its last part if ``glob`` has no slash.

    ``*`` matches across slashes. Credentials in ``glob`` do not count.
    """
    subject = url if "/" in glob else url.rpartition("/")[2]
    return fnmatch.fnmatchcase(subject, redact(glob))
