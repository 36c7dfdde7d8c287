"""The history of a storm: one JSON object per line, written by everybody at once.

Every process appends to a file of its own, one ``write`` per line, so that a kill tears
at most the last line. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["READS", "Call", "Event", "History", "Log", "read", "read_all"]

Event = dict[str, Any]

#: Operations that check the bytes of a whole shard.
READS = frozenset({"read", "hold", "pinned", "plain", "opener"})


class Log:
    """Appends events; may be used by threads and across a fork.

    Args:
        path: the file.
        who: of whom the events tell.
    """

    def __init__(self, path: Path, who: str) -> None:
        self.who = who
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, event: str, **facts: Any) -> None:
        """Append one event. ``at`` is now, unless it is among the facts."""
        line = {"at": time.monotonic(), "who": self.who, "event": event, **facts}
        os.write(self._fd, json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n")


def read(path: Path) -> Iterator[Event]:
    """The events of a file; a line that a kill tore is told as event ``torn``."""
    with open(path, "rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                yield {"event": "torn", "who": path.stem, "at": 0.0}


@dataclass(slots=True)
class Call:
    """One operation of one process, from its beginning to its end.

    Attributes:
        who: the process: ``slot.life``, or ``slot.life/pid`` for a child it forked.
        op: which operation.
        name: the shard it is about, or None.
        began: seconds.
        ended: seconds; None if its process ended first.
        calls: how many calls of the cache in a row it stands for.
        ahead: shards that were fetched ahead meanwhile.
        told: what the worker told of its end.
    """

    who: str
    op: str
    name: str | None
    began: float
    ended: float | None = None
    calls: int = 1
    ahead: Sequence[str] = ()
    told: Event = field(default_factory=dict)

    @property
    def outcome(self) -> str:
        """``ok``, ``wrong``, ``absent``, ``error``, ``interrupted``, or ``unfinished``."""
        return "unfinished" if self.ended is None else str(self.told["outcome"])

    @property
    def worker(self) -> str:
        """The worker that the process is, or was forked from."""
        return self.who.partition("/")[0]


@dataclass(slots=True)
class History:
    """Everything that happened.

    Attributes:
        boss: the boss's events, in order.
        calls: of all workers.
        logs: what the library logged in the workers.
        background: who -> shards whose fetch in the background had not ended when last told of.
        crashes: events of workers that an exception ended.
        torn: lines that could not be read.
    """

    boss: list[Event]
    calls: list[Call]
    logs: list[Event]
    background: dict[str, list[str]]
    crashes: list[Event]
    torn: int

    @classmethod
    def of(cls, boss: Iterable[Event], workers: Iterable[Event]) -> History:
        """Put the events of the workers together into calls."""
        history = cls(list(boss), [], [], {}, [], 0)
        begun: dict[tuple[str, int], Call] = {}
        for event in workers:
            kind, who = event["event"], event["who"]
            if "background" in event:
                history.background[who] = event["background"]
            if kind == "begin":
                call = Call(who, event["op"], event["name"], event["at"], calls=event["calls"])
                call.ahead = event.get("ahead", ())
                begun[who, event["n"]] = call
                history.calls.append(call)
            elif kind == "end":
                call = begun.pop((who, event["n"]))
                call.ended = event["at"]
                call.told = event
            elif kind == "log":
                history.logs.append(event)
            elif kind == "crash":
                history.crashes.append(event)
            elif kind == "torn":
                history.torn += 1
        return history


def read_all(directory: Path) -> History:
    """The history in a directory."""
    paths = sorted(directory.glob("worker-*.jsonl"))
    return History.of(
        read(directory / "boss.jsonl"), (event for path in paths for event in read(path))
    )
