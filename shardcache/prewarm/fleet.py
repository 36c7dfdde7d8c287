"""What is known of a prewarm on many nodes: a row for each, and how each ended.

    order -> engine: one member on each node -> lines -> `Fleet`: a row per node -> report

A node that fails or dies is a row that says so; the others go on. Whatever was fetched is in the
caches of the nodes, so the same order again does what is missing.

One thread (`fleetrun`) tells a `Fleet` what is heard; another one may read it to draw.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shardcache.prewarm.fleetlines import Closed, Complained, Ended, Fault, Heard, Members, Said

__all__ = ["Ending", "Fleet", "Node", "Order"]

#: A node's last words, of which one tells why it failed.
_LAST_WORDS = 20


class Ending(StrEnum):
    """How a node's prewarm ended."""

    DONE = "done"
    SOME_FAILED = "some_failed"
    INCOMPLETE = "incomplete"
    FULL = "full"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    NOT_STARTED = "not_started"


_BY_CODE = {
    0: Ending.DONE,
    3: Ending.SOME_FAILED,
    4: Ending.INCOMPLETE,
    5: Ending.FULL,
    130: Ending.INTERRUPTED,
    143: Ending.INTERRUPTED,
}


@dataclass(frozen=True, slots=True)
class Order:
    """What every node is to do.

    Attributes:
        specs: shard specifications.
        options: global options of the command line.
        arguments: options of ``prewarm``.
        ranks: the training run's processes per node, where the shards are split by node; else 0.
    """

    specs: Sequence[str]
    options: Sequence[str] = ()
    arguments: Sequence[str] = ()
    ranks: int = 0


@dataclass(slots=True)
class Node:
    """What is known of one node."""

    number: int
    name: str
    about: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    progress: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] | None = None
    shards: list[Mapping[str, Any]] = field(default_factory=list)
    words: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))
    code: int | None = None
    reason: str = ""
    ended: bool = False
    heard: float = 0.0

    @property
    def ending(self) -> Ending:
        """How it ended; only once it has."""
        if self.code is None:
            return Ending.LOST if self.about is not None else Ending.NOT_STARTED
        return _BY_CODE.get(self.code, Ending.FAILED)

    @property
    def error(self) -> str | None:
        """Why it is not done, as far as that is not a matter of single shards."""
        if self.ending in (Ending.DONE, Ending.SOME_FAILED, Ending.INCOMPLETE):
            return None
        if self.ending is Ending.INTERRUPTED:
            return "it was interrupted"
        if self.code is None:
            return self.reason or "it ended without a word"
        for word in reversed(self.words):
            if word.startswith("error: "):
                return word.removeprefix("error: ")
        return self.words[-1] if self.words else f"exit code {self.code}"

    @property
    def done(self) -> int:
        """Shards that are in its cache, as far as it has said."""
        if self.summary is not None:
            new = ("fetched", "coalesced", "linked")
            return sum(int(self.summary[name]) for name in ("cached", *new))
        cached = 0 if self.plan is None else int(self.plan["cached"])
        here = self.progress
        return cached + (0 if here is None else int(here["done"]) - int(here["failed"]))

    @property
    def wanted(self) -> int | None:
        """Shards that it needs, once it has said so."""
        if self.plan is not None:
            return int(self.plan["shards"])
        return None if self.summary is None else len(self.shards)


class Fleet:
    """All nodes, and what was heard of them."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.place = ""
        self.began = time.monotonic()
        self.stopping = False
        self.said: deque[str] = deque(maxlen=_LAST_WORDS)
        self.fault: Fault | None = None
        self.code: int | None = None

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    def take(self, event: Heard) -> None:
        """Note what was heard; what no node can have said is passed over."""
        if isinstance(event, Members):
            self.nodes = [Node(number, name) for number, name in enumerate(event.names)]
            self.place = event.place
        elif isinstance(event, Fault):
            self.fault = event
        elif isinstance(event, Closed):
            self._close(event.code)
        elif event.member is None:
            self.said.append(event.text)
        elif 0 <= event.member < len(self.nodes):
            self._take_of(self.nodes[event.member], event)

    def _take_of(self, node: Node, event: Said | Complained | Ended) -> None:
        node.heard = time.monotonic()
        if isinstance(event, Complained):
            node.words.append(event.text)
        elif isinstance(event, Ended):
            node.ended = True
            node.reason = node.reason or event.reason
            if node.code is None:
                node.code = event.code
        else:
            kind, record = event.record["type"], event.record
            if kind == "node":
                node.about = record
            elif kind == "plan":
                node.plan = record
            elif kind == "progress":
                node.progress = record
            elif kind == "shard":
                node.shards.append(record)
            elif kind == "summary":
                node.summary = record
            else:
                node.code, node.ended = int(record["exit_code"]), True

    def _close(self, code: int) -> None:
        self.code = code
        for node in self.nodes:
            if not node.ended:
                node.ended = True
                node.reason = node.reason or self._last_word(code)

    def _last_word(self, code: int) -> str:
        """Why the engine ended before its nodes."""
        if self.stopping:
            return "it did not end in time and was left to itself"
        told = [text for text in self.said if "error: " in text]
        return told[-1] if told else f"the engine ended with exit code {code}"
