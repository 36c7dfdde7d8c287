"""The lines that a node's prewarm writes, and what a fleet hears of them.

A member is one ``shardcache prewarm --member`` on one node. On its standard output it writes JSON
lines: those of ``--format jsonl``, and three more::

    node      first: name of the host, directory of the cache, version of the library
    progress  every second, from the plan on: shards and bytes done, of how many
    end       last: the exit code. A member without it was killed

On its standard error it complains in sentences. An engine carries both to us in its own way and
makes `Heard` events of them; nothing else knows how.

What comes from a node is believed for its own row only: a line that is none of ours, or not of
the form it should have, is a complaint of that node and nothing worse. Fields that we do not know,
as of a later version, are dropped: what is printed has the fields of docs/schemas and no others.

Values and pure functions, apart from `Joiner`, which belongs to one thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "AMOUNTS",
    "OUTCOMES",
    "Closed",
    "Complained",
    "Ended",
    "Fault",
    "Heard",
    "Joiner",
    "Members",
    "Said",
    "decode",
    "encode",
    "record_of",
]

_SCHEMA = 1
#: What becomes of shards, and all that a summary counts. The words of `warmreport.Outcome`: who
#: reads lines need not load what fetches.
OUTCOMES = (
    *("cached", "fetched", "coalesced", "linked", "failed", "cancelled", "not_started"),
    *("left_out", "missing"),
)
AMOUNTS = (*OUTCOMES, "refreshed", "retried", "bytes", "received_bytes")
_PLANNED = (
    *("shards", "cached", "cached_bytes", "to_fetch", "to_fetch_bytes", "unknown_sizes"),
    *("free_bytes", "evict_bytes", "missing_bytes", "left_out", "outdated"),
)
_DONE = ("done", "total", "done_bytes", "checked", "cached", "failed")
#: Types of the records, and what of each must be there, and be what.
_FORMS: Mapping[str, Mapping[str, Any]] = {
    "node": {"host": str, "pid": int, "dir": str, "library_version": str},
    "plan": dict.fromkeys(_PLANNED, int),
    "progress": {
        **dict.fromkeys(_DONE, int),
        "total_bytes": int | None,
        "estimated": bool,
        "bytes_per_second": int | float,
    },
    "shard": {
        "url": str,
        "outcome": OUTCOMES,
        "size": int | None,
        "seconds": int | float,
        "received_bytes": int,
        "retries": int,
        "error": str | None,
        "error_type": str | None,
    },
    "summary": {**dict.fromkeys(AMOUNTS, int), "seconds": int | float},
    "end": {"exit_code": int},
}
#: Slurm cuts lines at 1 KiB; a record that is longer than this is none of ours.
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Members:
    """The nodes are known: their names, by number. Comes first."""

    names: tuple[str, ...]
    place: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A node wrote a record."""

    member: int
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Complained:
    """Somebody wrote a line for people; ``member`` is None for the engine itself."""

    member: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A node's process is gone: with a code, or for a reason when nobody knows the code."""

    member: int
    code: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """The engine cannot work at all; ``usage``: because of how it was asked."""

    message: str
    usage: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """The engine's own process has ended and nothing more will come."""

    code: int


Heard = Members | Said | Complained | Ended | Fault | Closed
_BY_NAME = {kind.__name__: kind for kind in (Members, Said, Complained, Ended, Fault)}


def record_of(text: str) -> Mapping[str, Any] | None:
    """The record that a line of a member is, or None."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        return None
    form = _FORMS.get(str(found.get("type")))
    if form is None or not all(
        name in found and _fits(found[name], kind) for name, kind in form.items()
    ):
        return None
    return {name: found[name] for name in ("schema", "type", *form)}


def _fits(value: object, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int | float) and not 0 <= value < math.inf:  # NaN is neither
        return False
    return isinstance(value, kind)


class Joiner:
    """Puts a record together again that was cut into several lines.

    Slurm does that to lines longer than 1 KiB, each part under its label.
    """

    def __init__(self, member: int) -> None:
        self._member = member
        self._parts = ""

    def take(self, text: str) -> Said | Complained | None:
        """What a line is; None while it is a part."""
        joined = self._parts + text
        record = record_of(joined)
        if record is None and self._parts:
            # A new record begins although the last one had no end.
            record = record_of(text)
        if record is not None:
            self._parts = ""
            return Said(self._member, record)
        if joined.startswith("{") and len(joined) < _LONGEST and not _is_whole(joined):
            self._parts = joined
            return None
        self._parts = ""
        return Complained(self._member, text)


def _is_whole(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def encode(event: Members | Said | Complained | Ended | Fault) -> str:
    """An event as one line, for a process between us and the nodes."""
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    return json.dumps({"event": type(event).__name__, **fields})


def decode(text: str) -> Heard | None:
    """The event of a line, or None."""
    try:
        found = json.loads(text)
        event = _BY_NAME[found.pop("event")](**found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return Members(tuple(event.names), event.place) if isinstance(event, Members) else event
