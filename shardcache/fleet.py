"""Prewarming many nodes through an engine that can start processes on them.

    order -> engine: one member on each node -> lines -> `Fleet`: a row per node -> report

An `Engine` is a program on this machine that brings what the members write (`fleetlines`): srun,
or the driver of Ray. It runs in a process group of its own, so that a terminal's Ctrl-C reaches
only us; it is asked to stop, then told, then killed, and does not outlive the run.

A node that fails or dies is a row that says so; the others go on. Whatever was fetched is in the
caches of the nodes, so the same order again does what is missing.

`run_fleet` belongs to the calling thread, which alone changes a `Fleet`; another one may read it
to draw.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shardcache.errors import ConfigError, ShardCacheError
from shardcache.fleetlines import Closed, Complained, Ended, Fault, Heard, Members, Said

__all__ = ["Ending", "Engine", "Fleet", "Node", "Order", "run_fleet"]

#: Seconds that the nodes have to let go of their fetches, which is what `warmrun` grants them and
#: some for the network; then the engine loses its input, is told to end, and is killed.
_FAREWELL = 75.0
_END_AFTER = 3.0
_KILL_AFTER = 10.0
_TICK = 0.1
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
            return sum(int(self.summary.get(name, 0)) for name in ("cached", *new))
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


class Engine(ABC):
    """A program that runs members; see the module."""

    #: As people and ``--nodes`` call it.
    name: str

    @abstractmethod
    def command(self) -> Sequence[str]:
        """What to run."""

    @abstractmethod
    def environment(self) -> Mapping[str, str]:
        """With which environment."""

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Called in the new process before it becomes the program."""

    @abstractmethod
    def before(self) -> Iterator[Heard]:
        """What is known before it runs."""

    @abstractmethod
    def heard(self, line: str) -> Iterator[Heard]:
        """What a line of its standard output tells."""

    @abstractmethod
    def complained(self, line: str) -> Iterator[Heard]:
        """What a line of its standard error tells."""

    @abstractmethod
    def feed(self) -> tuple[str, bool]:
        """What it is to read, and whether its standard input stays open then."""

    @abstractmethod
    def stop(self, process: subprocess.Popen[str]) -> None:
        """Ask all nodes to end in order."""


def run_fleet(
    engine: Engine, on_event: Callable[[Heard, Fleet], None], stop: threading.Event
) -> Fleet:
    """Run an order to its end.

    Args:
        engine: what runs it.
        on_event: told each event after the fleet has taken it, in the calling thread.
        stop: set it to end early.

    Raises:
        ConfigError: the engine cannot work as it was asked.
        ShardCacheError: it could not start anything.
    """  # fmt: skip
    fleet = Fleet()

    def take(event: Heard) -> None:
        fleet.take(event)
        on_event(event, fleet)

    with _Program(engine) as program:
        # Once it runs: who is told may start a thread, and a fork is better made without.
        for event in engine.before():
            take(event)
        program.run(take, stop, fleet)
    if fleet.fault is not None:
        kind = ConfigError if fleet.fault.usage else ShardCacheError
        raise kind(fleet.fault.message)
    if fleet.code and not stop.is_set() and all(node.about is None for node in fleet.nodes):
        # Not a single member: there is one reason, and it is the engine's.
        words = [*fleet.said, *(word for node in fleet.nodes for word in node.words)]
        why = words[-1] if words else f"exit code {fleet.code}"
        raise ShardCacheError(f"{engine.name} could not start anything: {why}")
    return fleet


class _Program:
    """The engine's process, and threads that read it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._open = 2

    def __enter__(self) -> _Program:
        self._process = subprocess.Popen(
            list(self._engine.command()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(self._engine.environment()),
            text=True,
            encoding="utf-8",
            errors="backslashreplace",
            process_group=0,
            preexec_fn=self._engine.prepare,
        )
        streams = (("out", self._process.stdout), ("err", self._process.stderr))
        self._threads = [
            threading.Thread(target=self._read, args=args, name="shardcache-fleet", daemon=True)
            for args in streams
        ]
        self._threads.append(
            threading.Thread(target=self._feed, name="shardcache-fleet", daemon=True)
        )
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            self._end()
        self._close_input()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def run(self, take: Callable[[Heard], None], stop: threading.Event, fleet: Fleet) -> None:
        """Until the engine has ended and all it wrote was read."""
        deadline = None
        while self._open:
            if stop.is_set() and deadline is None:
                fleet.stopping = True
                deadline = time.monotonic() + _FAREWELL
                self._engine.stop(self._process)
            if deadline is not None and time.monotonic() > deadline:
                self._end()
                deadline = float("inf")
            try:
                kind, line = self._queue.get(timeout=_TICK)
            except queue.Empty:
                continue
            if kind == "end":
                self._open -= 1
            else:
                engine = self._engine
                for event in engine.heard(line) if kind == "out" else engine.complained(line):
                    take(event)
        self._close_input()
        take(Closed(self._process.wait()))

    def _end(self) -> None:
        """Its input ends, it is told to go, and it is killed."""
        self._close_input()
        for act, seconds in (
            (self._process.terminate, _END_AFTER),
            (self._process.kill, _KILL_AFTER),
        ):
            try:
                self._process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                act()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _feed(self) -> None:
        text, stays = self._engine.feed()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it may be gone before it has read all
            self._process.stdin.write(text)
            self._process.stdin.flush()
            if not stays:
                self._process.stdin.close()

    def _read(self, kind: str, stream: Any) -> None:
        for line in stream:
            self._queue.put((kind, line.rstrip("\n")))
        self._queue.put(("end", ""))
