"""Results of a benchmark: a file of rows, the machine they were taken on, tables of them.

A row is a dictionary; what identifies it depends on the benchmark. Files are written whole
(`save`), so an interrupted run leaves the rows it had.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardcache.locks.mounts import mount_of

__all__ = [
    *("Row", "cpu_model", "end_in_order", "load", "machine", "measure", "median", "save", "say"),
    *("show", "table", "touched_pages"),
]

Row = dict[str, Any]
_BLOCK = 1 << 20


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def machine(*directories: Path) -> Row:
    """What a figure means nothing without.

    Args:
        directories: where bytes are written; their filesystems are named.
    """
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    places = {}
    for directory in directories:
        usage = shutil.disk_usage(directory)
        mount = mount_of(directory)
        kind = mount.type if mount else "unknown"
        places[str(directory)] = f"{kind}, {usage.free / 1e9:.0f} GB free"
    return {
        "cores": os.cpu_count(),
        "processor": cpu_model(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "filesystems": places,
        "date": datetime.now(UTC).date().isoformat(),
        "load": os.getloadavg()[0],
    }


def save(path: Path | None, facts: Row) -> None:
    """Write a result; without a path, nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    beside.replace(path)


def load(path: Path) -> Row:
    """What `save` wrote."""
    found: Row = json.loads(path.read_text("utf-8"))
    return found


def median(values: Iterable[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(heads), f"|{'---|' * len(heads)}", *map(line, rows)])


def end_in_order() -> None:
    """Let a request to end (SIGTERM) remove files and end servers, as an interrupt does."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def say(text: str) -> None:
    """Progress, apart from the results."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def touched_pages(directory: Path, count: int) -> Iterator[None]:
    """Write ``count`` bytes and remove them when the body ends: the memory behind them is there.

    The first touch of memory by a virtual machine costs several times what copying does, and
    its host takes back what was free for two seconds (free page reporting): what is to be
    measured must follow at once.
    """
    path = directory / "touched"
    with path.open("wb") as file:
        for _ in range(-(-count // _BLOCK)):
            file.write(bytes(_BLOCK))
    if path.stat().st_dev != Path("/dev/shm").stat().st_dev:
        os.sync()  # nor are unwritten pages to be written by what is measured
    try:
        yield
    finally:
        path.unlink()


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
    print(f"\n### {title}\n\n{os.cpu_count()} cores, {cpu_model()}\n")
    print(f"| | median ({unit}) | min - max | x {reference} |\n|---|---|---|---|")
    for name, values in figures.items():
        ratios = [a / b for a, b in zip(values, figures[reference], strict=True)]
        print(
            f"| {name} | {statistics.median(values):.4g} | {min(values):.4g} - {max(values):.4g} "
            f"| {statistics.median(ratios):.2f} |"
        )
