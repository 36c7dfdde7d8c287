"""Charts as inline SVG, which need no script and follow the colours of the page they are in.

Colours are CSS variables of the page (``--s0`` ...). All functions are pure.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

__all__ = ["Series", "bars", "gauge", "line"]

_WIDTH, _HEIGHT = 720, 220
#: To the left there is room for "100.0 GB" in the large letters that a phone gets (`page`).
_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 12, 12, 28
_GRID = 4


@dataclass(frozen=True, slots=True)
class Series:
    """One set of values.

    Attributes:
        name: for the legend.
        color: number of the colour.
        values: one per time.
    """

    name: str
    color: int
    values: Sequence[float]


def bars(
    title: str, times: Sequence[float], series: Sequence[Series], show: Callable[[float], str]
) -> str:
    """Stacked bars over time.

    Args:
        title: what a screen reader says.
        times: beginnings, in seconds since the epoch, equally far apart or with gaps.
        series: from below.
        show: a value as people read it.
    """
    totals = [sum(one.values[i] for one in series) for i in range(len(times))]
    top = max(totals, default=0.0) or 1.0
    span = _step(times)
    width = max(1.0, _across(span, times) * 0.86)
    shapes = []
    for index, start in enumerate(times):
        below = 0.0
        for one in series:
            value = one.values[index]
            if value <= 0:
                continue
            low, high = _y(below, top), _y(below + value, top)
            below += value
            tip = html.escape(f"{_date(start, span)}: {one.name} {show(value)}")
            shapes.append(
                f'<rect x="{_x(start, times):.1f}" y="{high:.1f}" width="{width:.1f}" '
                f'height="{max(0.5, low - high):.1f}" fill="var(--s{one.color})">'
                f"<title>{tip}</title></rect>"
            )
    return _framed(title, times, top, show, "".join(shapes), series)


def line(
    title: str,
    times: Sequence[float],
    values: Sequence[float | None],
    show: Callable[[float], str],
    *,
    top: float = 1.0,
    limit: float | None = None,
) -> str:
    """A value over time, such as a share; where there is none, the line has a gap.

    Args:
        title: what a screen reader says.
        times: beginnings, in seconds since the epoch.
        values: one per time.
        show: a value as people read it.
        top: the largest value that is drawn.
        limit: drawn as a dashed line.
    """
    span = _step(times)
    points: list[list[str]] = [[]]
    dots = []
    half = _across(span, times) / 2
    for start, value in zip(times, values, strict=True):
        if value is None:
            points.append([])
            continue
        x, y = _x(start, times) + half, _y(value, top)
        points[-1].append(f"{x:.1f},{y:.1f}")
        tip = html.escape(f"{_date(start, span)}: {show(value)}")
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--s0)">'
            f"<title>{tip}</title></circle>"
        )
    lines = "".join(
        f'<polyline points="{" ".join(one)}" fill="none" stroke="var(--s0)" stroke-width="2"/>'
        for one in points
        if len(one) > 1
    )
    if limit is not None:
        y = _y(limit, top)
        lines += (
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="var(--s4)" stroke-dasharray="6 4"><title>'
            f"{html.escape(f'at most {show(limit)}')}</title></line>"
        )
    return _framed(title, times, top, show, lines + "".join(dots), ())


def gauge(title: str, share: float) -> str:
    """A bar that is so full; beyond 1 it is full."""
    filled = 100 * min(1.0, max(0.0, share))
    label = html.escape(f"{title}: {share:.0%}")
    return (
        f'<svg viewBox="0 0 100 4" preserveAspectRatio="none" class="gauge" role="img" '
        f'aria-label="{label}"><rect width="100" height="4" fill="var(--line)"/>'
        f'<rect width="{filled:.1f}" height="4" fill="var(--s0)"/></svg>'
    )


def _framed(
    title: str,
    times: Sequence[float],
    top: float,
    show: Callable[[float], str],
    shapes: str,
    series: Sequence[Series],
) -> str:
    grid = []
    for number in range(_GRID + 1):
        value = top * number / _GRID
        y = _y(value, top)
        grid.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="var(--line)"/><text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{html.escape(show(value))}</text>"
        )
    span = _step(times)
    marks = []
    for index in sorted({0, len(times) // 2, len(times) - 1}) if times else ():
        x = _x(times[index], times) + _across(span, times) / 2
        anchor = "start" if index == 0 else "end" if index == len(times) - 1 else "middle"
        if len(times) == 1:
            anchor = "middle"
        marks.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">'
            f"{_date(times[index], span)}</text>"
        )
    legend = "".join(
        f'<span><i style="background:var(--s{one.color})"></i>{html.escape(one.name)}</span>'
        for one in series
    )
    legend = f'<div class="legend">{legend}</div>' if legend else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">'
        f"{''.join(grid)}{shapes}{''.join(marks)}</svg>{legend}"
    )


def _step(times: Sequence[float]) -> float:
    """Seconds between two times; an hour where there are not two."""
    gaps = [b - a for a, b in itertools.pairwise(times) if b > a]
    return min(gaps, default=3600.0)


def _x(start: float, times: Sequence[float]) -> float:
    reach = times[-1] + _step(times) - times[0]
    return _LEFT + (start - times[0]) / reach * (_WIDTH - _LEFT - _RIGHT)


def _across(seconds: float, times: Sequence[float]) -> float:
    if not times:
        return 0.0
    reach = times[-1] + _step(times) - times[0]
    return seconds / reach * (_WIDTH - _LEFT - _RIGHT)


def _y(value: float, top: float) -> float:
    return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)


def _date(seconds: float, span: float) -> str:
    then = datetime.fromtimestamp(seconds).astimezone()
    return then.strftime("%b %d" if span >= 86_400 else "%b %d %H:%M")
