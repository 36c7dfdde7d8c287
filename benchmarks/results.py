"""Results of a benchmark: a file of rows, the machine they were taken on, tables of them.

A row is a dictionary; what identifies it depends on the benchmark. Files are written whole
(`save`), so an interrupted run leaves the rows it had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from shardcache.locks.mounts import mount_of

__all__ = ["Row", "arguments_of", "load", "machine", "measure", "median", "picked", "save"]
__all__ += ["say", "table", "touched_pages"]

Row = dict[str, Any]
_BLOCK = 1 << 20


def arguments_of(parser: argparse.ArgumentParser, *, repeats: int = 3) -> argparse.Namespace:
    """Add the options of every benchmark, and parse them; SIGTERM then ends it in order.

    Args:
        parser: with the benchmark's own options.
        repeats: rounds, unless the user says otherwise.
    """
    # Removes files and ends servers, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--repeats", type=int, help=f"rounds (default {repeats}, --quick 1)")
    parser.add_argument("--quick", action="store_true", help="little of it, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (1 if arguments.quick else repeats)
    arguments.only = [name for name in arguments.only.split(",") if name]
    return arguments


def picked(only: Sequence[str], *kinds: Iterable[str]) -> list[list[str]]:
    """The names of each kind that ``only`` has, or all of a kind that it has none of.

    Raises:
        SystemExit: a name of no kind.
    """
    unknown = sorted(set(only) - {name for kind in kinds for name in kind})
    if unknown:
        known = "; ".join(", ".join(kind) for kind in kinds)
        raise SystemExit(f"--only: unknown {', '.join(unknown)}. Known: {known}")
    return [[name for name in kind if name in only] or list(kind) for kind in kinds]


def machine(**directories: Path) -> Row:
    """What a figure means nothing without.

    Args:
        directories: where bytes are written; their filesystems are named.
    """
    cpu = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in cpu if line.startswith("model name")]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    filesystems = {}
    for name, directory in directories.items():
        mount, usage = mount_of(directory), shutil.disk_usage(directory)
        kind = mount.type if mount else "unknown"
        filesystems[name] = f"{kind}, {usage.free / 1e9:.0f} GB free"
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text("ascii").strip()
    return {
        "cores": os.cpu_count(),
        "processor": names[0] if names else platform.machine(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        # BBR paces a sender, which halves the speed of loopback.
        "congestion_control": control,
        "python": platform.python_version(),
        "filesystems": filesystems,
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


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(heads), f"|{'---|' * len(heads)}", *map(line, rows)])


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


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
            say(f"  {name}: {figure:.4g}")
    return figures
