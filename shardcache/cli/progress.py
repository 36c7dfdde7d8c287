"""How far a long command is: rich's bars on a terminal, a line now and then elsewhere.

A thread asks where the command is, and shows that on stderr. The console decides whether and how:
nothing when quiet or with ``--no-progress``, no bar without a terminal.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from shardcache.cli.output import Console, printable
from shardcache.results import Event, Finished, Outcome, Planned, PrewarmPlan, Started
from shardcache.units import format_bytes, format_clock, format_rate

if TYPE_CHECKING:
    from rich.table import Table

#: Seconds between two lines where nothing can be redrawn: a log of an hour has 360.
LINE_EVERY = 10.0
_REDRAWS_PER_SECOND = 5
#: Rates are of the last seconds: shorter jumps about, longer hides a stall.
_WINDOW = 8.0
_BAR = 26
#: Running shards shown below the bar.
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Position:
    """Where a long command is, or one shard of it."""

    text: str
    done: int = 0  #: bytes, or things
    total: int | None = None  #: of them; None while that is unknown
    in_bytes: bool = False  #: whether to show the rate


def of_shards(done: int, shards: int | None, done_bytes: int, all_bytes: int) -> Position:
    """``512/1,848 shards, 256.0 GB of 924.3 GB``."""
    if not shards:
        return Position("looking for shards")
    size = f"{format_bytes(done_bytes)} of {format_bytes(all_bytes)}"
    return Position(f"{done:,}/{shards:,} shards, {size}", done_bytes, all_bytes, in_bytes=True)


class Display:
    """Shows where a command is while the context lasts; lines printed meanwhile appear above it.

    ``look`` is called by another thread: it says where the command is, or the whole and its parts
    by any key. ``now`` gives monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        look: Callable[[], Mapping[str, Position] | Position],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._look = look
        self._now = now
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self._console.live:
            from rich.live import Live

            live = Live(
                console=self._console.terminal(sys.stderr),
                get_renderable=self._drawn,
                refresh_per_second=_REDRAWS_PER_SECOND,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._stack.enter_context(live)
        elif self._console.progress:
            ended = threading.Event()
            thread = threading.Thread(target=self._print, args=(ended,), daemon=True)
            thread.start()
            self._stack.callback(thread.join)
            self._stack.callback(ended.set)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def lines(self) -> list[str]:
        """Look; ``28%, 512/1,848 shards, 256.0 GB of 924.3 GB, 2.9 GB/s, ETA 0:03:50``, parts."""
        return [", ".join([*share, row.text, *rest]) for row, share, rest in self._rows()]

    def _rows(self) -> list[tuple[Position, list[str], list[str]]]:
        """Each position with its share, rate and estimate."""
        found = self._look()
        positions = {"": found} if isinstance(found, Position) else found
        self._seen = {key: self._seen.get(key, deque()) for key in positions}
        rows = []
        for key, row in positions.items():
            speed = self._speed(self._seen[key], row.done)
            rest = [format_rate(speed)] if row.in_bytes else []
            share = []
            if row.total is not None:
                share.append(f"{row.done / row.total if row.total else 0.0:.0%}")
                left = (row.total - row.done) / speed if row.total and speed else float("inf")
                rest.append(f"ETA {format_clock(max(0.0, left))}")
            rows.append((row, share, rest))
        return rows

    def _speed(self, seen: deque[tuple[float, int]], done: int) -> float:
        now = self._now()
        seen.append((now, done))
        while len(seen) > 2 and now - seen[1][0] >= _WINDOW:
            seen.popleft()
        began, before = seen[0]
        return max(0.0, (done - before) / (now - began)) if now > began else 0.0

    def _drawn(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        # A narrow terminal shortens the bar first, then the text, never rate and estimate.
        width = max(6, min(_BAR, shutil.get_terminal_size().columns - 70))
        grid = Table.grid("", "", Column(no_wrap=True), padding=(0, 1))
        for row, share, rest in self._rows():
            bar = ProgressBar(row.total or 1, row.done, width, complete_style="cyan")
            text = Text(row.text, no_wrap=True, overflow="ellipsis")
            grid.add_row(bar, text, Text("  ".join(share + rest)))
        return grid

    def _print(self, ended: threading.Event) -> None:
        self.lines()  # a rate is of what comes from now on
        while not ended.wait(LINE_EVERY):
            self._console.hint(self.lines()[0])


# -- prewarm -----------------------------------------------------------------------


class Progress:
    """Shows a prewarm: give it each event, and enter its ``display`` after the first one.

    One thread hands in events, the display's thread looks.
    """

    def __init__(self, console: Console, now: Callable[[], float] = time.monotonic) -> None:
        self.display = Display(console, self._look, now)
        self._active: dict[str, Started] = {}
        self._plan: PrewarmPlan | None = None
        self._sizes: dict[str, int] = {}
        self._done = self._bytes = self._checked = self._failed = 0
        self._stopping = False

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if isinstance(event, Planned):
            self._plan = plan = event.plan
            self._sizes = {k: size for k, size in plan.sizes.items() if k not in plan.left_out}
        elif isinstance(event, Started):
            self._active[event.shard.key] = event
        elif isinstance(event, Finished):
            self._finish(event)
        else:
            self._stopping = True

    def _finish(self, event: Finished) -> None:
        result, key = event.result, event.shard.key
        assert self._plan is not None
        # Out first: for an instant too little is counted, never too much.
        self._active.pop(key, None)
        if key in self._plan.cached and result.outcome is Outcome.CACHED:
            self._checked += 1
            return
        # What will not come is done with, too: the estimate is for the rest.
        self._done += 1
        self._failed += result.outcome is Outcome.FAILED
        self._bytes += result.size or 0
        self._sizes.setdefault(key, result.size or 0)

    def _look(self) -> dict[str, Position]:
        """Where the run is. Shards of unknown size are supposed to be like the others."""
        plan, active, known = self._plan, list(self._active.values()), len(self._sizes)
        assert plan is not None
        shards = max(len(plan.to_fetch) - len(plan.left_out), self._done)
        total = sum(self._sizes.values()) * shards // known if known else 0
        written = self._bytes + sum(started.status.written for started in active)
        of = f" of {'about ' if known < shards else ''}{format_bytes(total)}" if total else ""
        text = f"{self._done:,}/{shards:,} shards, {format_bytes(written)}{of}"
        if self._failed:
            text += f", {self._failed:,} failed"
        if self._checked < len(plan.cached):
            text += f", {self._checked:,} of {len(plan.cached):,} cached ones checked"
        if self._stopping:
            text += ", stopping"
        whole = Position(text, written, total if shards else None, shards > 0)
        return {"": whole, **{started.shard.key: _shard(started) for started in active[:_SHOWN]}}


def _shard(started: Started) -> Position:
    name, status = printable(started.shard.basename), started.status
    if status.size is None:  # it is still connecting, or another process has the shard's lock
        return Position(f"{name}  waiting")
    retries = f"  retry {status.retries}" if status.retries else ""
    return Position(f"{name}{retries}", status.written, status.size, in_bytes=True)
