"""How a prewarm is getting on: redrawn on a terminal, a line now and then elsewhere.

Fed by `prewarm`'s events from one thread; a thread of its own polls the running
fetches and draws. Everything goes to stderr.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shardcache.cli.output import Console, printable
from shardcache.cli.statusline import Rate, StatusLine
from shardcache.prewarm.report import Event, Finished, Outcome, Planned, Started, Stopping
from shardcache.units import format_bytes, format_clock, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardcache.fetch.transfer import FetchStatus
    from shardcache.prewarm.plan import PrewarmPlan
    from shardcache.urls import ShardURL

__all__ = ["Progress", "Snapshot", "Tally", "live_display", "progress_line"]

_REDRAWS_PER_SECOND = 5
#: Running shards shown below the bar, two in a row.
_SHOWN = 8
_LONGEST_NAME = 28


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


class Progress:
    """Shows a prewarm while its context lasts; give it to ``on_event``.

    Args:
        console: decides whether and how.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tally: Tally | None = None
        self._live: Any = None
        self._lines: StatusLine | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exn: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        if self._lines is not None:
            self._lines.__exit__(kind, exn, trace)

    def __call__(self, event: Event) -> None:
        """Take an event; drawing begins with the plan."""
        if isinstance(event, Planned):
            self._tally = Tally(event.plan)
            self._begin()
        elif self._tally is not None:
            self._tally.note(event)

    def _begin(self) -> None:
        if not self._console.progress:
            return
        if self._console.live:
            self._live = live_display(self._console, self._render)
            self._live.start()
        else:
            tally = self._tally
            assert tally is not None
            tally.snapshot(time.monotonic())  # a rate is of what comes from now on
            self._lines = StatusLine(self._console, lambda now: progress_line(tally.snapshot(now)))
            self._lines.__enter__()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        tally = self._tally
        if tally is None:
            return Text()
        now = time.monotonic()
        snapshot = tally.snapshot(now)
        rows = [_bar(snapshot, stopping=tally.stopping)]
        rows += _running(tally.active(), now)
        return Group(*rows)


def progress_line(snapshot: Snapshot) -> str:
    """``512/738 shards, 256.0 of 369.0 GB, 2.9 GB/s, ETA 0:00:39``."""
    parts = [f"{snapshot.done:,}/{snapshot.total:,} shards", snapshot.amount()]
    if snapshot.checked < snapshot.cached:
        parts.append(f"{snapshot.checked:,} of {snapshot.cached:,} cached ones checked")
    if snapshot.total:
        parts += [format_rate(snapshot.rate), f"ETA {format_clock(snapshot.eta)}"]
    if snapshot.failed:
        parts.append(f"{snapshot.failed:,} failed")
    return ", ".join(parts)


def live_display(console: Console, render: Any) -> Any:
    """What ``render`` returns, redrawn on standard error until it is stopped."""
    from rich.console import Console as Terminal
    from rich.live import Live

    terminal = Terminal(
        file=sys.stderr,
        no_color=not console.colored(sys.stderr),
        highlight=False,
        emoji=False,
        markup=False,
    )
    return Live(
        get_renderable=render,
        console=terminal,
        refresh_per_second=_REDRAWS_PER_SECOND,
        transient=True,
        redirect_stdout=False,
    )


def _bar(snapshot: Snapshot, *, stopping: bool) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    texts = [
        f"{snapshot.done:,}/{snapshot.total:,}",
        snapshot.amount(),
        format_rate(snapshot.rate),
        "stopping" if stopping else f"ETA {format_clock(snapshot.eta)}",
    ]
    if snapshot.checked < snapshot.cached:
        texts.append(f"checked {snapshot.checked:,}/{snapshot.cached:,} cached")
    if snapshot.failed:
        texts.append(f"{snapshot.failed:,} failed")
    grid = Table.grid(padding=(0, 2))
    bar = ProgressBar(
        total=1.0,
        completed=snapshot.fraction,
        width=26,
        complete_style="cyan",
        finished_style="green",
    )
    grid.add_row(bar, *(Text(text, no_wrap=True) for text in texts))
    return grid


def _running(active: list[_Active], now: float) -> list[RenderableType]:
    from rich.text import Text

    shown = active[:_SHOWN]
    names = [_name(one) for one in shown]
    width = max(map(len, names), default=0)
    cells = [
        f"{name:<{width}}  {_state(one, now):<20}" for name, one in zip(names, shown, strict=True)
    ]
    lines = ["   " + "   ".join(cells[index : index + 2]) for index in range(0, len(cells), 2)]
    if len(active) > _SHOWN:
        lines.append(f"   and {len(active) - _SHOWN} more")
    return [Text(text.rstrip(), style="dim", no_wrap=True, overflow="ellipsis") for text in lines]


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
