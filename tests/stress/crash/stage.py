"""One attempt of the crash-point sweep: a fresh copy of a directory, a strike, a judgement."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcache.errors import ShardCacheError
from shardcache.locks import mode as locking
from tests.stress.crash.judge import Judge, inspect
from tests.stress.crash.place import SHARDS, Place
from tests.stress.crash.plan import Point
from tests.stress.crash.scenarios import SCENARIOS, Scenario
from tests.stress.crash.strace import Run, Strike, Tracer

__all__ = ["Result", "Stage"]

#: A cache directory of one attempt, in what strace shows.
_RUN = re.compile(r"/[^\s\"<>]*/run-[^/]+/cache")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one attempt.

    Attributes:
        scenario: its name.
        kind: ``before``, ``after``, ``error``, ``on``, or ``end`` of a run that was to
            be struck at a call beyond its last.
        strike: what was to happen, in words.
        call: the call that was struck; None if the run did not come to it.
        wrong: everything that was wrong.
    """

    scenario: str
    kind: str
    strike: str
    call: str | None
    wrong: list[str]


class Stage:
    """Where scenarios run; used by one process at a time, copied by fork.

    Args:
        home: a directory for everything.
        endpoint: URL of the S3 server with the bucket ``crash``, if one is needed.
    """

    def __init__(self, home: Path, endpoint: str | None) -> None:
        self._home = home
        self._endpoint = endpoint
        (home / "origin").mkdir()
        for name, data in SHARDS.items():
            (home / "origin" / name).write_bytes(data)

    def place(self, scenario: Scenario, root: Path) -> Place:
        """The scenario's cache and origin, with the cache at ``root``."""
        if not scenario.s3:
            return Place(root, f"file://{self._home}/origin", scenario.options)
        options = {**scenario.options, "endpoint_url": self._endpoint}
        return Place(root, "s3://crash", options)

    def prepare(self, scenario: Scenario) -> Run:
        """Make what the scenario finds, and watch it without striking.

        What it imports is imported here, so that later runs make the same calls.

        Raises:
            RuntimeError: it does not work even so.
        """
        prepare = scenario.prepare
        if prepare is not None:
            place = self.place(scenario, self._home / "prepared" / scenario.name)
            _in_a_child(lambda: prepare(place))
        while True:
            run, wrong = self.strike(scenario, None, sweep_first=False)
            if wrong or not run.ended:
                raise RuntimeError(f"{scenario.name} fails by itself: {wrong}")
            new = [name for name in run.answer["imported"] if name not in sys.modules]
            if not new:
                return run
            for name in new:
                importlib.import_module(name)

    def strike(
        self, scenario: Scenario, strike: Strike | None, *, sweep_first: bool
    ) -> tuple[Run, list[str]]:
        """One attempt on a fresh copy: what happened, and what was wrong."""
        with (
            tempfile.TemporaryDirectory(dir=self._home, prefix="run-") as directory,
            _lock_files_in(directory),
        ):
            place = self.place(scenario, Path(directory, "cache"))
            prepared = self._home / "prepared" / scenario.name
            if prepared.exists():
                shutil.copytree(prepared, place.root, symlinks=True)
            planted = frozenset(inspect(place))
            run = Tracer(place.root).run(lambda: _act(scenario, place), strike)
            wrong = [] if run.killed else _behaviour(run)
            by_command = strike is not None and strike.number % 8 == 0
            judge = Judge(place, scenario, by_command, planted)
            return run, wrong + judge.verdict(sweep_first=sweep_first)

    def attempt(self, point: Point) -> Iterator[Result]:
        """Carry out a point; one that goes on yields several results."""
        scenario = SCENARIOS[point.scenario]
        strike = point.strike
        while True:
            # Every state comes twice, behind one call and before the next: once the next
            # process reads first, once it sweeps first.
            run, wrong = self.strike(scenario, strike, sweep_first=strike.kind == "after")
            struck = run.struck
            if struck is None and run.killed:
                wrong.append("it was killed, but not by us")
            if strike.fails and run.astray:
                # This time, or in another thread, a call of that number was the origin's.
                struck, wrong = None, []
            call = None if struck is None else _RUN.sub("ROOT", struck.text)
            kind = ("on" if strike.on else "error") if strike.fails else strike.kind
            if point.onward and struck is None:
                kind = "end"
            yield Result(scenario.name, kind, str(strike), call, wrong)
            if not point.onward or struck is None:
                return
            strike = strike.next


@contextlib.contextmanager
def _lock_files_in(directory: str) -> Iterator[None]:
    """Have the node's lock files, for a cache whose flock seems broken, in ``directory``.

    They go by the manifest's id, which all copies of a cache share.
    """
    usual = locking._NODE_DIRECTORIES
    locking._NODE_DIRECTORIES = (directory,)
    try:
        yield
    finally:
        locking._NODE_DIRECTORIES = usual


def _in_a_child(function: Callable[[], None]) -> None:
    """Run it in a process of its own.

    Raises:
        RuntimeError: it fails.
    """
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"a preparation ended with {process.exitcode}")


def _act(scenario: Scenario, place: Place) -> dict[str, Any]:
    """What the struck process does; returns what it warned of, raised, and imported."""
    os.environ.update(scenario.environment)
    known = set(sys.modules)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(_kind(record))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    raised = None
    try:
        scenario.act(place)
    except (OSError, ShardCacheError) as exn:
        if not scenario.maintains:
            raise
        raised = f"{type(exn).__name__}: {exn}"
    return {"said": said, "raised": raised, "imported": sorted(set(sys.modules) - known)}


def _kind(record: logging.LogRecord) -> str:
    """The kind of a warning: its words and its reason; the shard's name does not count."""
    reason = record.args[-1] if isinstance(record.args, tuple) and record.args else ""
    return f"{record.msg} | {reason}"


def _behaviour(run: Run) -> list[str]:
    """What was wrong with a process that was not killed."""
    if run.hung:
        return ["it hangs"]
    if run.error is not None:
        return [f"it raised: {run.error}"]
    if run.answer is None:
        return ["it died"]
    said = run.answer["said"]
    many = [text for text in sorted(set(said)) if said.count(text) > 1]
    return [f"it warned {said.count(text)} times: {text}" for text in many]
