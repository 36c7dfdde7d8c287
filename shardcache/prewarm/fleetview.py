"""A fleet as it works: a row for each node on a terminal, a line now and then elsewhere.

`FleetView` is told every event by the thread that runs the fleet; where a terminal can be redrawn,
a thread of rich's reads the fleet and draws. Rows go to stderr, what is done to stdout.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from shardcache.cli.output import Console, counted, printable
from shardcache.cli.progress import live_display
from shardcache.prewarm.fleet import Ending, Fleet, Node
from shardcache.prewarm.fleetlines import Closed, Complained, Ended, Heard, Members, Said
from shardcache.prewarm.fleettext import end_text, node_record, plan_line, progress_line, rate_of
from shardcache.units import format_bytes, format_clock, format_rate

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["FleetView"]

#: Seconds between two lines where nothing can be redrawn.
_LINE_EVERY = 10.0
#: A node that has said nothing for so long may have died; members speak every second.
_SILENT = 10.0
#: Rows on a terminal; the furthest behind are shown first where there are more.
_ROWS = 20
_LONGEST_NAME = 28
_WARNING = "warning: "


class FleetView:
    """Shows a fleet while its context lasts; give it to `run_fleet`.

    Args:
        console: decides whether and how.
        engine: what the nodes are nodes of.
        doing: a word for what is done there.
    """

    def __init__(self, console: Console, engine: str, doing: str = "Prewarming") -> None:
        self._console = console
        self._doing = doing
        self._engine = engine
        self._fleet: Fleet | None = None
        self._live: Any = None
        self._line_at = time.monotonic() + _LINE_EVERY
        self._told: set[int] = set()
        self._warned: set[str] = set()

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

    def __call__(self, event: Heard | None, fleet: Fleet) -> None:
        """Take an event that the fleet has taken; None only lets time pass."""
        self._fleet = fleet
        if isinstance(event, Members):
            self._begin(fleet)
        elif isinstance(event, Said | Ended):
            node = fleet.nodes[event.member]
            if isinstance(event, Said):
                self._said(node, event)
            # Why another one failed may still come, on the other of two pipes.
            if node.ending in (Ending.DONE, Ending.SOME_FAILED):
                self._ended(node)
        elif isinstance(event, Complained) and event.member is not None:
            self._complained(fleet.nodes[event.member], event.text)
        if isinstance(event, Closed):
            for node in fleet.nodes:
                self._ended(node)
        self._line()

    def _ended(self, node: Node) -> None:
        if node.ended and node.number not in self._told:
            self._told.add(node.number)
            with self._above():
                self._console.said(f"{self._padded(node)}  {end_text(node)}")
                self._console.line("end", {"node": node.name, **node_record(node)})

    @contextlib.contextmanager
    def _above(self) -> Iterator[None]:
        """Where something is printed: a display on the same screen makes room and comes back."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            # A new one: the old one would first remove as many lines as it had drawn.
            self._draw()

    def _draw(self) -> None:
        self._live = live_display(self._console, self._render)
        self._live.start()

    def _begin(self, fleet: Fleet) -> None:
        console = self._console
        names = ", ".join(printable(node.name) for node in fleet.nodes[:_ROWS])
        more = len(fleet.nodes) - _ROWS
        where = f"{self._engine} {fleet.place}".rstrip()
        console.said(
            f"{self._doing} {counted(len(fleet.nodes), 'node')} of {where}: {names}"
            + (f" and {more:,} more" if more > 0 else "")
        )
        console.line(
            "nodes",
            {"engine": self._engine.lower(), "place": fleet.place,
             "nodes": [node.name for node in fleet.nodes]},
        )  # fmt: skip
        if console.live:
            self._draw()

    def _said(self, node: Node, event: Said) -> None:
        record = {name: event.record[name] for name in event.record if name != "schema"}
        kind = record.pop("type")
        if kind == "plan" and self._live is None:  # whose rows tell it, too
            self._console.said(f"{self._padded(node)}  {plan_line(record)}")
        if kind not in ("summary", "end"):  # they are part of the node's end
            self._console.line(kind, {"node": node.name, **record})

    def _complained(self, node: Node, text: str) -> None:
        """A warning is told once, whichever nodes have it; a failure at the end."""
        if text.startswith(_WARNING) and text not in self._warned:
            self._warned.add(text)
            with self._above():
                self._console.warning(f"{node.name}: {text.removeprefix(_WARNING)}")
        elif self._console.verbosity and not text.startswith(("error: ", "  failed", _WARNING)):
            with self._above():
                self._console.log("info", f"{node.name}: {text}")

    def _line(self) -> None:
        now = time.monotonic()
        if self._live is None and self._console.progress and now >= self._line_at:
            self._line_at = now + _LINE_EVERY
            assert self._fleet is not None
            if not self._fleet.nodes:
                self._console.hint(f"Waiting for {self._engine} to name its nodes")
            elif any(not node.ended for node in self._fleet.nodes):
                self._console.hint(progress_line(self._fleet))

    def _padded(self, node: Node) -> str:
        assert self._fleet is not None
        width = max(len(_name(other)) for other in self._fleet.nodes)
        return f"{_name(node):<{width}}"

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        fleet = self._fleet
        assert fleet is not None
        grid = Table.grid(padding=(0, 2))
        nodes = fleet.nodes
        shown = nodes if len(nodes) <= _ROWS else sorted(nodes, key=_share)[:_ROWS]
        for node in shown:
            bar = ProgressBar(
                total=1.0,
                completed=_share(node),
                width=20,
                complete_style="red" if _is_bad(node) else "cyan",
                finished_style="green",
            )
            grid.add_row(_name(node), bar, *map(_cell, _cells(node)))
        ended = sum(node.ended for node in nodes)
        total = f"{ended:,}/{len(nodes):,} nodes   {format_rate(rate_of(fleet))}"
        total += f"   ETA {format_clock(_eta(fleet))}" if not fleet.stopping else "   stopping"
        if len(shown) < len(nodes):
            total += f"   and {len(nodes) - len(shown):,} more"
        return Group(grid, Text(total, style="dim", no_wrap=True))


def _cell(text: str) -> Any:
    from rich.text import Text

    return Text(text, no_wrap=True)


def _name(node: Node) -> str:
    name = printable(node.name)
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _is_bad(node: Node) -> bool:
    return node.ended and node.ending is not Ending.DONE


def _share(node: Node) -> float:
    """From 0 to 1; by bytes where they are known."""
    here = node.progress
    if node.ended or here is None:
        return 1.0 if node.ended and not _is_bad(node) else 0.0
    if here["total_bytes"]:
        return min(1.0, float(here["done_bytes"]) / float(here["total_bytes"]))
    return float(here["done"]) / float(here["total"]) if here["total"] else 1.0


def _cells(node: Node) -> tuple[str, str, str, str]:
    """Shards, bytes, rate, and what there is to say."""
    shards = "" if node.wanted is None else f"{node.done:,}/{node.wanted:,}"
    here = node.progress
    amount = "" if here is None else format_bytes(int(here["done_bytes"]))
    if here is not None and here["total_bytes"]:
        amount += f" of {format_bytes(int(here['total_bytes']))}"
    if node.ended:
        return shards, amount, "", node.ending.value.replace("_", " ")
    rate = "" if here is None else format_rate(float(here["bytes_per_second"]))
    return shards, amount, rate, _remark(node)


def _remark(node: Node) -> str:
    if node.about is None:
        return "starting"
    silent = time.monotonic() - node.heard
    if silent > _SILENT:
        return f"silent for {silent:.0f} s"
    failed = 0 if node.progress is None else int(node.progress["failed"])
    return f"{failed:,} failed" if failed else ("planning" if node.plan is None else "")


def _eta(fleet: Fleet) -> float:
    """Seconds until the last node is done; infinite while one does not know."""
    longest = 0.0
    for node in fleet.nodes:
        if node.ended:
            continue
        here = node.progress
        if here is None or not here["total_bytes"] or not here["bytes_per_second"]:
            return float("inf")
        left = float(here["total_bytes"]) - float(here["done_bytes"])
        longest = max(longest, left / float(here["bytes_per_second"]))
    return longest
