"""How far a long command is: rich's bars on a terminal, a line now and then elsewhere.

A thread asks the command for its positions and shows them on stderr. The console decides whether
and how: nothing when quiet or with ``--no-progress``, no bar without a terminal.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardcache.cli.output import Console, printable
from shardcache.results import Event, Finished, Outcome, Planned, PrewarmPlan, Started
from shardcache.units import format_bytes, format_rate

#: Seconds between two lines where nothing can be redrawn: a log of an hour has 360.
LINE_EVERY = 10.0
_REDRAW_EVERY = 0.2
#: Rates are of the last seconds: fewer jump about, more hide a stall.
_WINDOW = 8.0
_BAR = 26
#: Running shards shown below the bar.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Position:
    """How far a long command is, or one shard of it."""

    text: str
    done: int = 0  #: bytes
    total: int | None = None  #: bytes; None while unknown


#: The position of the whole, whose key is empty, and of its parts.
Positions = Mapping[str, Position]


@contextlib.contextmanager
def display(console: Console, positions: Callable[[], Positions]) -> Iterator[None]:
    """Show how far a command is while the context lasts; printed lines appear above the bars.

    Args:
        console: decides whether bars, lines or nothing is shown.
        positions: called by another thread.
    """
    if not console.progress:
        yield
        return
    show, ended = _draw_bars if console.live else _print_lines, threading.Event()
    thread = threading.Thread(target=show, args=(console, positions, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _draw_bars(
    console: Console, positions: Callable[[], Positions], ended: threading.Event
) -> None:
    from rich import progress
    from rich.table import Column
    from rich.text import Text

    class Description(progress.ProgressColumn):
        """A narrow terminal shortens it, and the bar; figures stay whole."""

        def render(self, task: progress.Task) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    whole = [Column(no_wrap=True) for _ in range(3)]
    rows: dict[str, progress.TaskID] = {}
    with progress.Progress(
        progress.BarColumn(_BAR),
        Description(),
        progress.TaskProgressColumn("{task.percentage:.0f}%", table_column=whole[0]),
        progress.TransferSpeedColumn(whole[1]),
        "ETA",
        progress.TimeRemainingColumn(table_column=whole[2]),
        console=console.terminal(sys.stderr),
        auto_refresh=False,
        speed_estimate_period=_WINDOW,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as bars:
        while True:
            found = positions()
            for key in rows.keys() - found.keys():
                bars.remove_task(rows.pop(key))
            for key, at in found.items():
                if key not in rows:
                    rows[key] = bars.add_task(at.text, total=at.total)
                bars.update(rows[key], description=at.text, completed=at.done, total=at.total)
            bars.refresh()
            if ended.wait(_REDRAW_EVERY):
                return


def _print_lines(
    console: Console, positions: Callable[[], Positions], ended: threading.Event
) -> None:
    """Print ``28%, 512/1,848 shards, 256.0 GB of 924.3 GB, 2.9 GB/s, ETA 0:03:50``."""
    before, then = positions()[""].done, time.monotonic()
    while not ended.wait(LINE_EVERY):
        at, now = positions()[""], time.monotonic()
        speed = max(0, at.done - before) / (now - then)
        before, then = at.done, now
        line = f"{at.text}, {format_rate(speed)}"
        if at.total:
            line = f"{at.done / at.total:.0%}, {line}"
            if speed:
                minutes, seconds = divmod(round((at.total - at.done) / speed), 60)
                line += f", ETA {minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        console.hint(line)


class PrewarmProgress:
    """Where a prewarm is; one thread hands in its events, another asks for `positions`."""

    def __init__(self) -> None:
        self._active: dict[str, Started] = {}
        self._plan: PrewarmPlan | None = None
        self._sizes: dict[str, int] = {}  # of the shards to fetch, as far as they are known
        self._done = self._bytes = self._failed = 0
        self._is_stopping = False

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Planned):
            plan = self._plan = event.plan
            self._sizes = {k: size for k, size in plan.sizes.items() if k not in plan.left_out}
        elif isinstance(event, Started):
            self._active[event.shard.key] = event
        elif isinstance(event, Finished):
            key, result = event.shard.key, event.result
            # First, so that for an instant too little is counted, never too much.
            self._active.pop(key, None)
            assert self._plan is not None
            if key not in self._plan.cached or result.outcome is not Outcome.CACHED:
                self._done += 1
                self._failed += result.outcome is Outcome.FAILED
                # A shard that failed is done with, too: the estimate is for the rest.
                self._bytes += result.size or 0
                self._sizes.setdefault(key, result.size or 0)
        else:
            self._is_stopping = True

    def positions(self) -> Positions:
        """The whole run, and the shards that are being fetched."""
        plan, active = self._plan, list(self._active.values())
        assert plan is not None
        shards = max(len(plan.to_fetch) - len(plan.left_out), self._done)
        written = self._bytes + sum(started.status.written for started in active)
        total = sum(self._sizes.values()) if len(self._sizes) >= shards else None
        text = f"{self._done:,}/{shards:,} shards, {format_bytes(written)}"
        text += f" of {format_bytes(total)}" if total is not None else ""
        text += f", {self._failed:,} failed" if self._failed else ""
        text += ", stopping" if self._is_stopping else ""
        parts = {started.shard.key: _of_shard(started) for started in active[:_SHOWN]}
        return {"": Position(text, written, total), **parts}


def _of_shard(started: Started) -> Position:
    name, status = printable(started.shard.basename), started.status
    if status.size is None:  # it is still connecting, or another process has the shard's lock
        return Position(f"{name}  waiting")
    retries = f"  retry {status.retries}" if status.retries else ""
    return Position(f"{name}{retries}", status.written, status.size)
