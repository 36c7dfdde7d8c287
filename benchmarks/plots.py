"""Bars and lines as SVG, written by hand: no library, and colours that follow the reader's theme.

A chart of bars is a stack of panels; a panel is a title, a unit and horizontal bars. A chart of
lines is panels side by side, each from 0 to 1 both ways. What is drawn is in the file itself as
text, so a chart can be read, compared and searched like a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from benchmarks.results import Row, median

__all__ = ["Bar", "Panel", "chart", "cleaning_chart", "epoch_chart", "hit_chart", "write_charts"]
__all__ += ["Line", "line_charts", "transfer_charts"]

_WIDTH = 860
_LABELS = 330
_VALUES = 90
_BAR = 16
_STEP = 22
_PANEL = 46
_MARGIN = 16
#: Of a panel of lines: its square, and what stands around it.
_SQUARE = 220
_LEGEND = 20
_COLOURS = ("#1a7f37", "#cf222e", "#9a6700", "#8c959f", "#0969da", "#8250df")

_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-size: 16px; font-weight: 600; }
  .panel { font-weight: 600; }
  .back { fill: #ffffff; }
  .ours { fill: #1a7f37; }
  .peer { fill: #8c959f; }
  .bound { fill: none; stroke: #8c959f; stroke-dasharray: 4 3; }
  .none { fill: #cf222e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .back { fill: #0d1117; }
    .ours { fill: #3fb950; }
    .peer { fill: #6e7681; }
    .bound { stroke: #8b949e; }
    .none { fill: #f85149; }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure.

    Attributes:
        label: whose.
        value: how much; None where there is no figure.
        kind: ``ours``, ``peer`` or ``bound``.
    """

    label: str
    value: float | None
    kind: str = "peer"


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars on one scale.

    Attributes:
        title: what is compared.
        unit: of the values.
        bars: from top to bottom.
        digits: behind the point.
    """

    title: str
    unit: str
    bars: Sequence[Bar]
    digits: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a panel, from the left to the right.

    Attributes:
        label: whose.
        points: (x, y), each from 0 to 1.
        marks: other points of the same thing, drawn as dots.
    """

    label: str
    points: Sequence[tuple[float, float]]
    marks: Sequence[tuple[float, float]] = ()


def line_charts(title: str, below: str, panels: Mapping[str, Sequence[Line]]) -> str:
    """Panels of lines side by side, with one legend, as an SVG document.

    Args:
        title: of all.
        below: what goes from the left to the right.
        panels: lines by the panel's title; the lines of each in the same order.
    """
    parts = [f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 12}">{escape(title)}</text>']
    top = _MARGIN + 54
    for number, (name, lines) in enumerate(panels.items()):
        parts += _square(name, below, lines, _MARGIN + 34 + number * (_SQUARE + 60), top)
    y = top + _SQUARE + 62
    for number, line in enumerate(next(iter(panels.values()))):
        x = _MARGIN + 34 + number * 150
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<path d="M{x} {y - 4} h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="{y}">{escape(line.label)}</text>')
    height = y + _LEGEND
    wide = max(_WIDTH, _MARGIN * 2 + 34 + len(panels) * (_SQUARE + 60))
    return _document(title, wide, height, parts)


def _square(name: str, below: str, lines: Sequence[Line], left: int, top: int) -> list[str]:
    parts = [f'<text class="panel" x="{left}" y="{top - 12}">{escape(name)}</text>']
    for tenth in range(0, 11, 5):
        x, y = left + _SQUARE * tenth / 10, top + _SQUARE * (1 - tenth / 10)
        parts.append(
            f'<path class="bound" d="M{left} {y:.0f} h{_SQUARE} M{x:.0f} {top} v{_SQUARE}"/>'
        )
        parts.append(f'<text x="{left - 30}" y="{y + 4:.0f}">{tenth / 10:.1f}</text>')
        parts.append(f'<text x="{x - 12:.0f}" y="{top + _SQUARE + 18}">{tenth * 10} %</text>')
    parts.append(f'<text x="{left}" y="{top + _SQUARE + 36}">{escape(below)}</text>')
    for number, line in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [(left + _SQUARE * x, top + _SQUARE * (1 - y)) for x, y in sorted(line.points)]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        label = escape(line.label)
        parts.append(
            f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2">'
            f"<title>{label}</title></path>"
        )
        for x, y in line.marks:
            parts.append(
                f'<circle cx="{left + _SQUARE * x:.1f}" cy="{top + _SQUARE * (1 - y):.1f}" r="4" '
                f'fill="{colour}"><title>{label}, the program</title></circle>'
            )
    return parts


def _document(title: str, wide: int, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" '
        f'width="{wide}" height="{height}" role="img" aria-label={quoteattr(title)}>'
    )
    back = f'<rect class="back" width="{wide}" height="{height}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", back, *parts, "</svg>", ""])


def chart(title: str, panels: Iterable[Panel]) -> str:
    """The panels under each other, as an SVG document."""
    parts = [f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 12}">{escape(title)}</text>']
    top = _MARGIN + 24
    for panel in panels:
        parts += _panel(panel, top)
        top += _PANEL + _STEP * len(panel.bars)
    return _document(title, _WIDTH, top + _MARGIN, parts)


def _panel(panel: Panel, top: int) -> list[str]:
    most = max((bar.value for bar in panel.bars if bar.value is not None), default=0.0)
    room = _WIDTH - _LABELS - _VALUES - 2 * _MARGIN
    heading = escape(f"{panel.title} ({panel.unit})")
    parts = [f'<text class="panel" x="{_MARGIN}" y="{top + 20}">{heading}</text>']
    y = top + 32
    for bar in panel.bars:
        label = escape(bar.label)
        parts.append(f'<text x="{_MARGIN}" y="{y + 13}">{label}</text>')
        left = _MARGIN + _LABELS
        if bar.value is None:
            parts.append(f'<text class="none" x="{left}" y="{y + 13}">no figure</text>')
        else:
            wide = room * bar.value / most if most else 0.0
            parts.append(
                f'<rect class="{bar.kind}" x="{left}" y="{y}" width="{wide:.1f}" height="{_BAR}"/>'
            )
            value = f"{bar.value:,.{panel.digits}f}"
            parts.append(f'<text x="{left + wide + 6:.1f}" y="{y + 13}">{value}</text>')
        y += _STEP
    return parts


def _kind(name: str, *, bound: bool = False) -> str:
    if bound:
        return "bound"
    return "ours" if name.startswith("shardcache") else "peer"


def transfer_charts(facts: Row) -> dict[str, str]:
    """A chart for each target and destination, a panel for each workload: name to SVG."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for group in facts["groups"]:
        if not group.get("unavailable"):
            groups.setdefault((group["target"], group["destination"]), []).append(group)
    charts = {}
    for (target, destination), several in groups.items():
        panels = [
            Panel(group["workload_title"], "MB/s", [_rate(row, group) for row in group["rows"]])
            for group in several
        ]
        place = "RAM disk" if destination == "ram" else "disk"
        title = f"{several[0]['target_title']}, to {place}"
        charts[f"transfers-{target}-{destination}"] = chart(title, panels)
    return charts


def _rate(row: Row, group: Row) -> Bar:
    kind = _kind(row["peer"], bound=row["bound"])
    if not row["runs"]:
        return Bar(row["title"], None, kind)
    seconds = median(run["seconds"] for run in row["runs"])
    return Bar(row["title"], group["bytes"] / seconds / 1e6, kind)


def epoch_chart(facts: Row) -> str:
    """Cold epoch, first sample and warm epoch on each link."""
    panels = []
    for group in facts["groups"]:
        for epoch, figure, title, unit, scale, digits in (
            ("cold", "seconds", "cold epoch", "s", 1.0, 2),
            ("cold", "first", "first sample of it", "ms", 1000.0, 0),
            ("warm", "seconds", "second epoch", "s", 1.0, 2),
        ):
            bars = [
                Bar(
                    row["title"],
                    scale * median(run[epoch][figure] for run in row["runs"]),
                    _kind(row["way"]),
                )
                for row in group["epochs"]
            ]
            panels.append(Panel(f"{group['title']}: {title}", unit, bars, digits))
    return chart("Epochs through WebDataset, shorter is better", panels)


def hit_chart(facts: Row) -> str:
    """What a hit costs."""
    bars = [
        Bar(name, median(values), _kind(name)) for name, values in facts["microseconds"].items()
    ]
    title = "A hit: open, read 512 bytes, close; shorter is better"
    return chart(title, [Panel("median", "us", bars, 1)])


def cleaning_chart(facts: Row) -> str:
    """What cleaning costs, by the number of entries."""
    panels = []
    for count in sorted({row["entries"] for row in facts["rows"]}):
        rows = [row for row in facts["rows"] if row["entries"] == count]
        bars = [
            Bar(
                row["title"],
                median(run["seconds"] for run in row["runs"]),
                "peer" if row["task"] == "webdataset" else "ours",
            )
            for row in rows
        ]
        panels.append(Panel(f"{count:,} entries", "s", bars, 2))
    return chart("Cleaning, shorter is better", panels)


def write_charts(results: dict[str, Row], folder: Path) -> list[str]:
    """Write every chart that there are results for; returns their names, in order.

    Args:
        results: ``transfers``, ``epochs``, ``hits``, ``cleaning``, as far as there are any.
        folder: where to; charts of other names in it stay.
    """
    charts: dict[str, str] = {}
    if "transfers" in results:
        charts |= transfer_charts(results["transfers"])
    for name, draw in (("epochs", epoch_chart), ("hits", hit_chart), ("cleaning", cleaning_chart)):
        if name in results:
            charts[name] = draw(results[name])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in charts.items():
        (folder / f"{name}.svg").write_text(text, "utf-8")
    return list(charts)
