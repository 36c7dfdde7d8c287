"""Interleaved repeats, medians and a Markdown table: what every benchmark here shares."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping

__all__ = ["machine", "measure", "show"]


def machine() -> str:
    """The machine in one line; a figure without it means nothing."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}"
    )


def measure(contestants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run every contestant in turn, ``repeats`` times, after one uncounted round.

    Interleaved, so that a drift of the machine hits all of them alike.

    Args:
        contestants: name to a function that runs once and returns its figure.
        repeats: counted rounds.
    """
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(repeats + 1):
        for name, function in contestants.items():
            figure = function()
            if round_number:
                figures[name].append(figure)
            sys.stderr.write(f"  {name}: {figure:.4g}\n")
    return figures


def show(title: str, unit: str, figures: Mapping[str, list[float]], reference: str) -> None:
    """Print a table: median, spread, and the median of the pairwise ratios to ``reference``."""
    print(f"\n### {title}\n\n{machine()}\n")
    print(f"| | median ({unit}) | min - max | x {reference} |\n|---|---|---|---|")
    for name, values in figures.items():
        ratios = [a / b for a, b in zip(values, figures[reference], strict=True)]
        print(
            f"| {name} | {statistics.median(values):.4g} | {min(values):.4g} - {max(values):.4g} "
            f"| {statistics.median(ratios):.2f} |"
        )
