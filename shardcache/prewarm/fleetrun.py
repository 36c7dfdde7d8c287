"""Running a fleet: an engine's process, what it writes, and its end.

An `Engine` is a program on this machine that brings what the members write (`fleetlines`): srun,
or the driver of Ray. It runs in a process group of its own, so that a terminal's Ctrl-C reaches
only us; it is asked to stop, then told, then killed, and does not outlive the run.

`run_fleet` belongs to the calling thread; two threads read the process, and one feeds it.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from shardcache.errors import ConfigError, ShardCacheError
from shardcache.prewarm.fleet import Fleet
from shardcache.prewarm.fleetlines import Closed, Heard

__all__ = ["Engine", "run_fleet"]

#: Seconds that the nodes have to let go of their fetches, which is what `warmrun` grants them and
#: some for the network; then the engine loses its input, is told to end, and is killed.
_FAREWELL = 75.0
_END_AFTER = 3.0
_KILL_AFTER = 10.0
_TICK = 0.1


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
    engine: Engine,
    on_event: Callable[[Heard | None, Fleet], None],
    stop: threading.Event,
) -> Fleet:
    """Run an order to its end.

    Args:
        engine: what runs it.
        on_event: told each event after the fleet has taken it, and None now and then when there
            is none, in the calling thread.
        stop: set it to end early.

    Raises:
        ConfigError: the engine cannot work as it was asked.
        ShardCacheError: it could not start anything.
        KeyboardInterrupt: it was stopped before there was a node.
    """
    fleet = Fleet()

    def take(event: Heard | None) -> None:
        if event is not None:
            fleet.take(event)
        on_event(event, fleet)

    with _Program(engine) as program:
        # Once it runs: who is told may start a thread, and a fork is better made without.
        for event in engine.before():
            take(event)
        program.run(take, stop, fleet)
    if stop.is_set() and not fleet.nodes:
        raise KeyboardInterrupt
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

    def run(
        self, take: Callable[[Heard | None], None], stop: threading.Event, fleet: Fleet
    ) -> None:
        """Until the engine has ended and all it wrote was read."""
        deadline = None
        while self._open:
            if stop.is_set() and deadline is None:
                fleet.stopping = True
                working = any(node.about is not None for node in fleet.nodes)
                deadline = time.monotonic() + (_FAREWELL if working else 0.0)
                self._engine.stop(self._process)
            if deadline is not None and time.monotonic() > deadline:
                self._end()
                deadline = float("inf")
            try:
                kind, line = self._queue.get(timeout=_TICK)
            except queue.Empty:
                take(None)
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
