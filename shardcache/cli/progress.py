"""How far a long command is: a bar on a terminal, a line now and then elsewhere.

A thread of its own asks where the command is, and shows that on stderr. The console decides whether
and how: nothing when quiet or with ``--no-progress``, no bar without a terminal.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardcache.cli.output import Console, printable
from shardcache.results import Event, Outcome, Planned, Started, Stopping
from shardcache.units import format_bytes, format_clock, format_rate

if TYPE_CHECKING:
    from shardcache.fetch.transfer import FetchStatus
    from shardcache.results import PrewarmPlan
    from shardcache.urls import ShardURL

#: Seconds between two lines where nothing can be redrawn: a log of an hour has 360.
LINE_EVERY = 10.0
_REDRAWS_PER_SECOND = 5
#: Rates are of the last seconds: shorter jumps about, longer hides a stall.
_WINDOW = 8.0
#: Running shards shown below the bar, two in a row.
_SHOWN = 8
_LONGEST_NAME = 28


class Rate:
    """How much comes per second, over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, now: float, total: int) -> float:
        """Note that ``total`` had come by ``now``; returns the rate."""
        samples = self._samples
        samples.append((now, total))
        while len(samples) > 2 and now - samples[0][0] > _WINDOW:
            samples.popleft()
        elapsed = now - samples[0][0]
        return max(0.0, (total - samples[0][1]) / elapsed) if elapsed > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a long command is.

    Attributes:
        fraction: done of it, from 0 to 1; None before it is known what there is to do.
        parts: what people read beside the bar.
        details: lines below the bar.
    """

    fraction: float | None
    parts: Sequence[str]
    details: Sequence[str] = ()

    @classmethod
    def of(cls, done: int, total: int, rate: float, parts: Sequence[str]) -> Self:
        """``28%``, the parts, and ``ETA 0:03:50``.

        Args:
            done, total: bytes or shards.
            rate: of them, per second.
            parts: what else there is to say.
        """
        left = (total - done) / rate if rate else math.inf
        return cls(done / total if total else 0.0, [*parts, f"ETA {format_clock(left)}"])

    def line(self) -> str:
        """``28%, 512/1,848 shards, 256.0 GB of 924.3 GB, 2.9 GB/s, ETA 0:03:50``."""
        share = [] if self.fraction is None else [f"{self.fraction:.0%}"]
        return ", ".join([*share, *self.parts])

    def drawing(self) -> RenderableType:
        """The same with a bar, and the details below."""
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=1.0,
            completed=self.fraction or 0.0,
            width=26,
            complete_style="cyan",
            finished_style="green",
        )
        grid.add_row(bar, *(Text(part, no_wrap=True) for part in self.parts))
        details = [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in self.details]
        return Group(grid, *details)


class Display:
    """Shows where a command is while the context lasts; lines printed meanwhile appear above it.

    Args:
        console: decides whether and how.
        look: where the command is at a time of `time.monotonic`; called by a thread of its own.
    """

    def __init__(self, console: Console, look: Callable[[float], Position]) -> None:
        self._console = console
        self._look = look
        self._live: Live | None = None
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print, name="shardcache-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._console.live:
            self._live = Live(
                get_renderable=lambda: self._now().drawing(),
                console=self._console.terminal(sys.stderr),
                refresh_per_second=_REDRAWS_PER_SECOND,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
        elif self._console.progress:
            self._lines.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._ended.set()
        if self._lines.ident is not None:
            self._lines.join()

    def _now(self) -> Position:
        return self._look(time.monotonic())

    def _print(self) -> None:
        self._now()  # a rate is of what comes from now on
        while not self._ended.wait(LINE_EVERY):
            self._console.hint(self._now().line())


# -- prewarm -----------------------------------------------------------------------


@dataclass(slots=True)
class _Active:
    """A shard that a worker has in hand."""

    shard: ShardURL
    status: FetchStatus
    rate: Rate = field(default_factory=Rate)


class Progress:
    """Shows a prewarm while its context lasts; give it to ``on_event``.

    One thread hands in events, the display's thread looks.

    Args:
        console: decides whether and how.
    """

    def __init__(self, console: Console) -> None:
        self._display = Display(console, self.position)
        self._stack = ExitStack()
        self._active: dict[str, _Active] = {}
        self._rate = Rate()
        self._plan: PrewarmPlan | None = None
        self._unknown = self._known_bytes = 0
        self._done = self._bytes = self._received = self._checked = self._failed = 0
        self._stopping = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __call__(self, event: Event) -> None:
        """Take an event; drawing begins with the plan."""
        plan = self._plan
        if isinstance(event, Planned):
            plan = self._plan = event.plan
            self._unknown = plan.unknown
            sizes = plan.sizes.items()
            self._known_bytes = sum(n for key, n in sizes if key not in plan.left_out)
            self._stack.enter_context(self._display)
        elif isinstance(event, Started):
            self._active[event.shard.key] = _Active(event.shard, event.status)
        elif isinstance(event, Stopping):
            self._stopping = True
        elif plan is not None:
            result, key = event.result, event.shard.key
            # Out first: for an instant too little is counted, never too much.
            self._active.pop(key, None)
            self._received += result.received
            if key in plan.cached and result.outcome is Outcome.CACHED:
                self._checked += 1
                return
            self._done += 1
            self._failed += result.outcome is Outcome.FAILED
            # What will not come is done with, too: the estimate is for the rest.
            self._bytes += result.size or 0
            if plan.size_of(event.shard) is None:
                self._unknown -= 1
                self._known_bytes += result.size or 0

    def position(self, now: float) -> Position:
        """Where the run is at ``now``, in monotonic seconds.

        Shards of unknown size are supposed to be like the others.
        """
        plan, active = self._plan, list(self._active.values())
        assert plan is not None
        rate = self._rate.update(now, self._received + sum(a.status.received for a in active))
        shards = max(len(plan.to_fetch) - len(plan.left_out), self._done)
        written = self._bytes + sum(a.status.written for a in active)
        total = 0
        if known := shards - self._unknown:
            total = self._known_bytes * shards // known
        parts = [f"{self._done:,}/{shards:,} shards", _amount(written, total, self._unknown > 0)]
        if self._checked < len(plan.cached):
            parts.append(f"{self._checked:,} of {len(plan.cached):,} cached ones checked")
        if shards:
            done = self._done >= shards
            left = 0.0 if done else (total - written) / rate if total and rate else math.inf
            eta = "stopping" if self._stopping else f"ETA {format_clock(max(0.0, left))}"
            parts += [format_rate(rate), eta]
        if self._failed:
            parts.append(f"{self._failed:,} failed")
        fraction = min(1.0, written / total) if total else self._done / shards if shards else 1.0
        return Position(fraction, parts, _running(active, plan, now))


def _amount(written: int, total: int, estimated: bool) -> str:
    """``256.0 of 369.0 GB``, or what has come so far."""
    if not total:
        return format_bytes(written)
    number, _, unit = format_bytes(written).rpartition(" ")
    whole = format_bytes(total)
    start = number if whole.endswith(f" {unit}") else f"{number} {unit}"
    return f"{start} of {'about ' if estimated else ''}{whole}"


def _running(active: list[_Active], plan: PrewarmPlan, now: float) -> list[str]:
    cells = []
    for one in active[:_SHOWN]:
        name, status = printable(one.shard.basename), one.status
        rate = one.rate.update(now, status.received)
        if len(name) > _LONGEST_NAME:
            name = f"…{name[1 - _LONGEST_NAME :]}"
        if status.size is None:
            # Either it is still connecting, or another process has the shard's lock.
            state = "checking" if one.shard.key in plan.cached else "waiting"
        else:
            share = status.written / status.size if status.size else 1.0
            retries = f"  retry {status.retries}" if status.retries else ""
            state = f"{share:4.0%}  {format_rate(rate)}{retries}"
        cells.append((name, state))
    width = max((len(name) for name, _ in cells), default=0)
    texts = [f"{name:<{width}}  {state:<20}" for name, state in cells]
    lines = ["   " + "   ".join(texts[n : n + 2]).rstrip() for n in range(0, len(texts), 2)]
    if len(active) > _SHOWN:
        lines.append(f"   and {len(active) - _SHOWN} more")
    return lines
