"""How far a long command is: rich's bars on a terminal, a line now and then elsewhere.

A thread asks the command for its positions and shows them on stderr. The console decides whether
and how: nothing when quiet or with ``--no-progress``, no bar without a terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardcache.cli.output import Console, Shortened, printable
from shardcache.results import Event, Finished, Outcome, Planned, PrewarmPlan, Started
from shardcache.units import format_bytes

#: Seconds between two lines where nothing can be redrawn: a log of an hour has 360.
LINE_EVERY = 10.0
_REDRAW_EVERY = 0.2
#: Rates are of the last seconds: fewer jump about, more hide a stall.
_WINDOW = 8.0
#: Columns of a bar at most, and of what stands beside it before there is one.
_BAR, _BESIDE = 26, 60
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
    ended = threading.Event()
    thread = threading.Thread(target=_show, args=(console, positions, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def bars(on_event: Callable[[Event], None] | None) -> Iterator[Callable[[Event], None]]:
    """Show a prewarm that a program runs; yields what takes its events, and calls ``on_event``."""
    progress = PrewarmProgress()

    def take(event: Event) -> None:
        progress(event)
        if on_event is not None:
            on_event(event)

    with display(Console(), progress.positions):
        yield take


def _show(console: Console, positions: Callable[[], Positions], ended: threading.Event) -> None:
    if not console.live and ended.wait(LINE_EVERY):
        return  # before rich was imported, which takes longer than many a command

    from rich import progress
    from rich.table import Column
    from rich.text import Text

    class Description(progress.ProgressColumn):
        """A narrow terminal shortens it, and the bar; figures stay whole."""

        def render(self, task: progress.Task) -> Text | Shortened:
            if task.fields["key"]:
                return Shortened(task.description)
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    every, terminal = _REDRAW_EVERY if console.live else LINE_EVERY, console.terminal(sys.stderr)
    bar = min(_BAR, (terminal.width - _BESIDE) // 2)
    bars = progress.Progress(
        *([progress.BarColumn(bar)] if console.live and bar > 2 else []),
        Description(),
        progress.TaskProgressColumn("{task.percentage:.0f}%", table_column=Column(no_wrap=True)),
        progress.TransferSpeedColumn(Column(no_wrap=True)),
        "ETA",
        progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
        console=terminal,
        auto_refresh=False,
        speed_estimate_period=max(_WINDOW, 3 * every),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )
    rows: dict[str, progress.TaskID] = {}
    with bars if console.live else contextlib.nullcontext():
        while True:
            found = positions() if console.live else {"": positions()[""]}
            for key in rows.keys() - found.keys():
                bars.remove_task(rows.pop(key))
            for key, at in found.items():
                if key not in rows:
                    rows[key] = bars.add_task(at.text, total=at.total, key=key)
                bars.update(rows[key], description=at.text, completed=at.done, total=at.total)
            if console.live:
                bars.refresh()
            else:
                bars.console.print(bars)
            if ended.wait(every):
                return


class PrewarmProgress:
    """Where a prewarm is; one thread hands in its events, another asks for `positions`."""

    def __init__(self) -> None:
        self._plan = PrewarmPlan((), {}, {}, 0, 0, 0)
        self._common = 0  # characters with which all names begin: whole folders
        self._active: dict[str, Started] = {}
        self._sizes: dict[str, int] = {}  # of the shards to fetch, as far as they are known
        self._done = self._bytes = self._failed = 0

    def __call__(self, event: Event) -> None:
        """Take an event."""
        match event:
            case Planned(plan):
                self._plan = plan
                same = os.path.commonprefix([*map(str, plan.to_fetch)])  # noqa: RUF071 - URLs
                self._common = same.rfind("/") + 1
                self._sizes = {k: size for k, size in plan.sizes.items() if k not in plan.left_out}
            case Started(shard, _):
                self._active[shard.key] = event
            case Finished(shard, result):
                # First, so that for an instant too little is counted, never too much.
                self._active.pop(shard.key, None)
                if shard.key not in self._plan.cached or result.outcome is not Outcome.CACHED:
                    self._done += 1
                    self._failed += result.outcome is Outcome.FAILED
                    # A shard that failed is done with, too: the estimate is for the rest.
                    self._bytes += result.size or 0
                    self._sizes.setdefault(shard.key, result.size or 0)

    def positions(self) -> Positions:
        """The whole run, and the shards that are being fetched."""
        active = list(self._active.values())
        shards = max(len(self._plan.to_fetch) - len(self._plan.left_out), self._done)
        written = self._bytes + sum(started.progress().written for started in active)
        total = (sum(self._sizes.values()) or None) if len(self._sizes) >= shards else None
        text = f"{self._done:,}/{shards:,} shards, "
        text += f"{self._failed:,} failed, " if self._failed else ""
        text += format_bytes(written)
        text += f" of {format_bytes(total)}" if total is not None else ""
        found = {"": Position(text, written, total)}
        for shard, read_progress in active[:_SHOWN]:
            progress = read_progress()
            name = printable(str(shard)[self._common :])
            if progress.size is None:  # still connecting, or another process has the shard's lock
                found[shard.key] = Position(f"{name}  waiting")
            else:
                retries = f"  retry {progress.retries}" if progress.retries else ""
                found[shard.key] = Position(f"{name}{retries}", progress.written, progress.size)
        return found
