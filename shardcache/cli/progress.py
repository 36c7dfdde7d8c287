"""Show the progress of a long command: bars on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardcache.cli.output import Console, Shortened, printable
from shardcache.results import Event, Finished, Outcome, Planned, PrewarmPlan, Started
from shardcache.units import format_bytes, format_duration, format_rate

#: Seconds between two lines without a terminal: a log has at most 360 of them per hour.
LINE_EVERY = 10.0
_REDRAW_EVERY = 0.2
#: Seconds over which rates are averaged. With fewer, rates jump; with more, a stall is hidden.
_WINDOW = 8.0
#: Maximum width of a bar, and the width of the text next to it, in columns.
_BAR, _TEXT = 26, 60
#: Maximum number of running downloads that are shown below the bar of the command.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Position:
    """The progress of a command or of one shard."""

    text: str
    done: int = 0  #: bytes
    total: int | None = None  #: bytes to reach; None if unknown


#: The progress of the command under the key "", and of each shard under the shard's key.
Positions = Mapping[str, Position]


@contextlib.contextmanager
def display(console: Console, positions: Callable[[], Positions]) -> Iterator[None]:
    """Show the progress of a command on stderr during a ``with`` block, below any printed lines.

    A background thread calls ``positions`` to get the progress.
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
    """Show the progress of a prewarm. Yields a handler for its events that calls ``on_event``."""
    progress = PrewarmProgress()

    def handle(event: Event) -> None:
        progress(event)
        if on_event is not None:
            on_event(event)

    with display(Console(), progress.positions):
        yield handle


def _show(console: Console, positions: Callable[[], Positions], ended: threading.Event) -> None:
    if not console.live and ended.wait(LINE_EVERY):
        return  # the command was quicker than the import of rich

    from rich import progress
    from rich.table import Column
    from rich.text import Text

    class Description(progress.ProgressColumn):
        """Description of a row. A narrow terminal shortens it and the bar, but not the figures."""

        def render(self, task: progress.Task) -> Text | Shortened:
            if task.fields["key"]:
                return Shortened(task.description)
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    class Figures(progress.ProgressColumn):
        """Percentage, rate in the units of all commands, and remaining time, if they are known."""

        def render(self, task: progress.Task) -> Text:
            rate, left = task.finished_speed or task.speed, task.time_remaining
            text = "" if task.total is None else f"{task.percentage:.0f}%"
            text += "" if rate is None else f" {format_rate(rate)}"
            return Text(text if left is None else f"{text} ETA {format_duration(left)}")

    every, terminal = _REDRAW_EVERY if console.live else LINE_EVERY, console.terminal(sys.stderr)
    bar = min(_BAR, (terminal.width - _TEXT) // 2)
    bars = progress.Progress(
        *([progress.BarColumn(bar)] if console.live and bar > 2 else []),
        Description(),
        Figures(Column(no_wrap=True)),
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
    """The progress of a prewarm. One thread passes events, another thread calls `positions`."""

    def __init__(self) -> None:
        self._plan = PrewarmPlan((), {}, {}, 0, 0, 0)
        self._prefix = 0  # length of the directory that the URLs of all shards to download share
        self._active: dict[str, Started] = {}
        self._sizes: dict[str, int] = {}  # known sizes of the shards to download
        self._done = self._bytes = self._failed = 0

    def __call__(self, event: Event) -> None:
        """Update the progress with an event."""
        match event:
            case Planned(plan):
                self._plan = plan
                prefix = os.path.commonprefix([*map(str, plan.to_fetch)])  # noqa: RUF071 - URLs
                self._prefix = prefix.rfind("/") + 1
                self._sizes = {k: size for k, size in plan.sizes.items() if k not in plan.left_out}
            case Started(shard, _):
                self._active[shard.key] = event
            case Finished(shard, result):
                # Remove the shard first, so that `positions` never counts its bytes twice.
                self._active.pop(shard.key, None)
                was_cached = shard.key in self._plan.cached and result.outcome is Outcome.CACHED
                if not (was_cached or result.outcome is Outcome.NOT_STARTED):
                    self._done += 1
                    self._failed += result.outcome is Outcome.FAILED
                    # Count failed shards, too: the estimated time is for the remaining shards.
                    self._bytes += result.size or 0
                    self._sizes.setdefault(shard.key, result.size or 0)

    def positions(self) -> Positions:
        """Return the progress of the prewarm and of its running downloads."""
        active = list(self._active.values())
        shards = max(len(self._plan.to_fetch) - len(self._plan.left_out), self._done)
        written = self._bytes + sum(started.progress().written for started in active)
        total = (sum(self._sizes.values()) or None) if len(self._sizes) >= shards else None
        text = f"{self._done:,}/{shards:,} shards, "
        text += f"{self._failed:,} failed, " if self._failed else ""
        text += format_bytes(written)
        text += f" of {format_bytes(total)}" if total is not None else ""
        positions = {"": Position(text, written, total)}
        for shard, read_progress in active[:_SHOWN]:
            progress = read_progress()
            text = printable(str(shard)[self._prefix :])
            if progress.size is None:  # still connecting, or another process has the shard's lock
                text += "  waiting"
            elif progress.retries:
                text += f"  retry {progress.retries}"
            positions[shard.key] = Position(text, progress.written, progress.size)
        return positions
