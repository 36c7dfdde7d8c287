"""The lines that a node's prewarm writes, and what a fleet hears of them.

A member is one ``shardcache prewarm --member`` on one node. On its standard output it writes JSON
lines: those of ``--format jsonl``, and three more::

    node      first: name of the host, directory of the cache, version of the library
    progress  every second, from the plan on: shards and bytes done, of how many
    end       last: the exit code. A member without it was killed

On its standard error it complains in sentences. An engine carries both to us in its own way and
makes `Heard` events of them; nothing else knows how.

What comes from a node is believed for its own row only: a line that is none of ours, or not of
the form it should have, is a complaint of that node and nothing worse.

Values and pure functions, apart from `Joiner`, which belongs to one thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
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
#: Types of the records, and the numbers that each must have.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "node": (),
    "plan": ("shards", "cached", "cached_bytes", "to_fetch", "to_fetch_bytes", "free_bytes"),
    "progress": ("done", "total", "bytes_done", "rate", "checked", "cached", "failed"),
    "shard": (),
    "summary": ("cached", "fetched", "failed", "bytes", "received", "seconds"),
    "end": ("exit_code",),
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
    numbers = _NUMBERS.get(str(found.get("type")))
    if numbers is None or not all(_is_number(found.get(name)) for name in numbers):
        return None
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
