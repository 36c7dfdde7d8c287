"""How far a long command is: a bar on a terminal, a line now and then elsewhere.

A thread of its own asks where the command is, and shows that on stderr. The console decides whether
and how: nothing when quiet or with ``--no-progress``, no bar without a terminal.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from shardcache.cli.output import Console, printable
from shardcache.prewarm.report import Event, Finished, Outcome, Planned, Started, Stopping
from shardcache.units import format_bytes, format_clock, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardcache.fetch.transfer import FetchStatus
    from shardcache.prewarm.plan import PrewarmPlan
    from shardcache.urls import ShardURL

__all__ = ["Display", "Position", "Progress", "Rate", "Snapshot", "Tally", "live_display"]

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
        left = (total - done) / rate if rate else float("inf")
        return cls(done / total if total else 0.0, [*parts, f"ETA {format_clock(left)}"])

    def line(self) -> str:
        """``28%, 512/1,848 shards, 256.0 GB of 924.3 GB, 2.9 GB/s, ETA 0:03:50``."""
        share = [] if self.fraction is None else [f"{self.fraction:.0%}"]
        return ", ".join([*share, *self.parts])

    def drawing(self) -> RenderableType:
        """The same with a bar, and the details below."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

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
    """Shows where a command is while the context lasts.

    Args:
        console: decides whether and how.
        look: where the command is at a time of `time.monotonic`; called by a thread of its own.
    """

    def __init__(self, console: Console, look: Callable[[float], Position]) -> None:
        self._console = console
        self._look = look
        self._live: Any = None
        self._ended = threading.Event()
        self._lines = threading.Thread(target=self._print, name="shardcache-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._console.live:
            self._live = live_display(self._console, lambda: self._now().drawing())
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


def live_display(console: Console, render: Callable[[], RenderableType]) -> Any:
    """What ``render`` returns, redrawn on standard error until it is stopped.

    Lines printed meanwhile appear above it.
    """
    from rich.live import Live

    return Live(
        get_renderable=render,
        console=console.terminal(sys.stderr),
        refresh_per_second=_REDRAWS_PER_SECOND,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )


# -- prewarm -----------------------------------------------------------------------


@dataclass(slots=True)
class _Active:
    """A shard that a worker has in hand."""

    shard: ShardURL
    status: FetchStatus
    cached: bool
    rate: Rate = field(default_factory=Rate)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where the whole run is.

    Attributes:
        done: shards that are finished, of those to fetch.
        total: shards to fetch.
        bytes_done: bytes of them on disk.
        bytes_total: bytes of them altogether, or None while nothing is known of them.
        estimated: whether that supposes that unknown sizes are like the known ones.
        rate: bytes per second from the network.
        checked: shards of those already cached that were looked at.
        cached: how many those are.
        failed: shards that failed.
    """

    done: int
    total: int
    bytes_done: int
    bytes_total: int | None
    estimated: bool
    rate: float
    checked: int
    cached: int
    failed: int

    @property
    def eta(self) -> float:
        """Seconds to go; infinite while nobody knows."""
        if self.done >= self.total:
            return 0.0
        if self.bytes_total is None or self.rate <= 0:
            return float("inf")
        return max(0, self.bytes_total - self.bytes_done) / self.rate

    @property
    def fraction(self) -> float:
        """From 0 to 1; by bytes where they are known."""
        if self.bytes_total:
            return min(1.0, self.bytes_done / self.bytes_total)
        return self.done / self.total if self.total else 1.0

    def amount(self) -> str:
        """``256.0 of 369.0 GB``, or what has come so far."""
        done = format_bytes(self.bytes_done)
        if self.bytes_total is None:
            return done
        total = format_bytes(self.bytes_total)
        if done.rpartition(" ")[2] == total.rpartition(" ")[2]:
            done = done.rpartition(" ")[0]
        return f"{done} of {'about ' if self.estimated else ''}{total}"


class Tally:
    """Adds up what events and running fetches say; safe between one writer and one reader."""

    def __init__(self, plan: PrewarmPlan) -> None:
        self._plan = plan
        self._total = len(plan.to_fetch) - len(plan.left_out)
        self._active: dict[str, _Active] = {}
        self._rate = Rate()
        self._unknown = plan.unknown
        self._known_bytes = sum(n for key, n in plan.sizes.items() if key not in plan.left_out)
        self._done = self._bytes = self._received = self._checked = self._failed = 0
        self.stopping = False

    def note(self, event: Event) -> None:
        """Take an event in."""
        if isinstance(event, Started):
            cached = event.shard.key in self._plan.cached
            self._active[event.shard.key] = _Active(event.shard, event.status, cached)
        elif isinstance(event, Stopping):
            self.stopping = True
        elif isinstance(event, Finished):
            result = event.result
            # Out first: for an instant too little is counted, never too much.
            self._active.pop(event.shard.key, None)
            self._received += result.received
            if event.shard.key in self._plan.cached and result.outcome is Outcome.CACHED:
                self._checked += 1
            else:
                self._done += 1
                self._failed += result.outcome is Outcome.FAILED
                # What will not come is done with, too: the estimate is for the rest.
                self._bytes += result.size or 0
                if self._plan.size_of(event.shard) is None:
                    self._unknown -= 1
                    self._known_bytes += result.size or 0

    def active(self) -> list[_Active]:
        """The shards that workers have in hand."""
        return list(self._active.values())

    def snapshot(self, now: float) -> Snapshot:
        """The sums at ``now``, in monotonic seconds."""
        active = self.active()
        received = self._received + sum(a.status.received for a in active)
        total = max(self._total, self._done)
        known = total - self._unknown
        bytes_total = None
        if self._known_bytes or not self._unknown:
            bytes_total = self._known_bytes * total // max(1, known)
        return Snapshot(
            done=self._done,
            total=total,
            bytes_done=self._bytes + sum(a.status.written for a in active),
            bytes_total=bytes_total,
            estimated=self._unknown > 0,
            rate=self._rate.update(now, received),
            checked=self._checked,
            cached=len(self._plan.cached),
            failed=self._failed,
        )

    def position(self, now: float) -> Position:
        """The same for people."""
        found, active = self.snapshot(now), self.active()
        parts = [f"{found.done:,}/{found.total:,} shards", found.amount()]
        if found.checked < found.cached:
            parts.append(f"{found.checked:,} of {found.cached:,} cached ones checked")
        if found.total:
            eta = "stopping" if self.stopping else f"ETA {format_clock(found.eta)}"
            parts += [format_rate(found.rate), eta]
        if found.failed:
            parts.append(f"{found.failed:,} failed")
        return Position(found.fraction, parts, _running(active, now))


class Progress:
    """Shows a prewarm while its context lasts; give it to ``on_event``.

    Args:
        console: decides whether and how.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tally: Tally | None = None
        self._display: Display | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._display is not None:
            self._display.__exit__(*exc)

    def __call__(self, event: Event) -> None:
        """Take an event; drawing begins with the plan."""
        if isinstance(event, Planned):
            self._tally = Tally(event.plan)
            self._display = Display(self._console, self._tally.position)
            self._display.__enter__()
        elif self._tally is not None:
            self._tally.note(event)


def _running(active: list[_Active], now: float) -> list[str]:
    shown = active[:_SHOWN]
    names = [_name(one) for one in shown]
    width = max(map(len, names), default=0)
    cells = [
        f"{name:<{width}}  {_state(one, now):<20}" for name, one in zip(names, shown, strict=True)
    ]
    lines = ["   " + "   ".join(cells[index : index + 2]) for index in range(0, len(cells), 2)]
    if len(active) > _SHOWN:
        lines.append(f"   and {len(active) - _SHOWN} more")
    return [line.rstrip() for line in lines]


def _name(one: _Active) -> str:
    name = printable(one.shard.basename)
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _state(one: _Active, now: float) -> str:
    status = one.status
    rate = one.rate.update(now, status.received)
    if status.size is None:
        # Either it is still connecting, or another process has the shard's lock.
        return "checking" if one.cached else "waiting"
    share = status.written / status.size if status.size else 1.0
    retries = f"  retry {status.retries}" if status.retries else ""
    return f"{share:4.0%}  {format_rate(rate)}{retries}"
