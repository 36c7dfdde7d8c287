"""Options, results and tables that all benchmarks share.

A result is a JSON object with a list of rows, and the machine that it was measured on. It is
written after each part of a benchmark, so an interrupted run keeps the rows it had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from shardcache.locks.mounts import mount_of

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
Figures = dict[str, list[float]]
T = TypeVar("T")
_BLOCK = 1 << 20


def arguments_of(
    about: str | None, *, repeats: int = 3, **more: dict[str, Any]
) -> argparse.Namespace:
    """Parse the command line with the options of every benchmark, and ``more`` of its own.

    Also makes SIGTERM raise SystemExit, so that a benchmark removes its files and ends its servers.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=raw)
    for name, option in more.items():
        parser.add_argument(f"--{name}", **option)
    disk, ram = Path(tempfile.gettempdir()), Path("/dev/shm")
    parser.add_argument("--disk", type=Path, default=disk, help="directory on a disk")
    parser.add_argument("--ram", type=Path, default=ram, help="directory on a RAM disk")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--repeats", type=int, help=f"rounds (default {repeats}, --quick 1)")
    parser.add_argument("--quick", action="store_true", help="measure little, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    arguments.repeats = arguments.repeats or (1 if arguments.quick else repeats)
    arguments.only = [name for name in arguments.only.split(",") if name]
    return arguments


def picked(only: Sequence[str], *kinds: Iterable[str]) -> list[list[str]]:
    """Return the names of each kind that are in ``only``, or the whole kind if none of them is.

    Raises:
        SystemExit: a name belongs to no kind.
    """
    unknown = sorted(set(only) - {name for kind in kinds for name in kind})
    if unknown:
        known = "; ".join(", ".join(kind) for kind in kinds)
        raise SystemExit(f"--only: unknown {', '.join(unknown)}. Known: {known}")
    return [[name for name in kind if name in only] or list(kind) for kind in kinds]


def begun(arguments: argparse.Namespace, **directories: Path) -> Row:
    """Return a result without figures: the run, this machine, and filesystems of directories."""
    cpu = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in cpu if line.startswith("model name")]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    filesystems = {}
    for name, directory in directories.items():
        mount, usage = mount_of(directory), shutil.disk_usage(directory)
        kind = mount.type if mount else "unknown"
        filesystems[name] = f"{kind}, {usage.free / 1e9:.0f} GB free"
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text("ascii").strip()
    machine = {
        "cores": os.cpu_count(),
        "processor": names[0] if names else platform.machine(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "congestion_control": control,  # BBR paces a sender, which halves the speed of loopback
        "python": platform.python_version(),
        "filesystems": filesystems,
        "date": datetime.now(UTC).date().isoformat(),
        "load": os.getloadavg()[0],
        "commit": commit.stdout.strip() or "unknown",
    }
    return {"machine": machine, "repeats": arguments.repeats, "quick": arguments.quick}


def save(path: Path | None, facts: Row) -> None:
    """Write a result to a file, if there is a path."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    temporary.replace(path)


def in_turn(items: Sequence[T], number: int) -> list[T]:
    """Return the items, from another one on in each round, so that no place favours one of them."""
    turn = number % len(items)
    return [*items[turn:], *items[:turn]]


def rounds(contestants: dict[str, Callable[[], float]], repeats: int) -> Figures:
    """Return the figures of all contestants, which take turns after a round of warming up."""
    figures: Figures = {name: [] for name in contestants}
    for number in range(repeats + 1):
        for name in in_turn(list(contestants), number):
            figure = contestants[name]()
            say(f"  {name}: {figure:.4g}")
            if number:
                figures[name].append(figure)
    return figures


def middle(values: Sequence[float], form: str = ".1f") -> list[str]:
    """Return the cells of a table for the median and the range of some figures."""
    return [f"{median(values):{form}}", f"{min(values):{form}} - {max(values):{form}}"]


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratios to the figures of the same rounds."""
    return f"{median(a / b for a, b in zip(values, others, strict=True)):.2f}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(heads), f"|{'---|' * len(heads)}", *map(line, rows)])


def section(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown under its title."""
    return f"#### {title}\n\n{table(heads, rows)}"


@contextlib.contextmanager
def drawing(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield a matplotlib figure of that size in inches, and write it as an SVG file at the end."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text. Grey and the default colours are legible on a light and on a dark page.
    style = {"svg.hashsalt": path.name, "svg.fonttype": "none", "savefig.transparent": True}
    grey = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    with rc_context({**style, **dict.fromkeys(grey, "#80868e")}):
        figure = Figure((width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None})


def say(text: str) -> None:
    """Print progress to stderr; the results go to stdout."""
    print(text, file=sys.stderr, flush=True)


def resident_memory(field: str) -> int:
    """Return the resident memory of this process in bytes, now (VmRSS) or at most (VmHWM)."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


@contextlib.contextmanager
def touched_pages(directory: Path, count: int) -> Iterator[None]:
    """Write ``count`` bytes, and remove them at the end of the block, to have memory ready.

    The first touch of memory by a virtual machine costs several times as much as a copy does. Its
    host takes back memory that was free for two seconds (free page reporting), so the measurement
    must follow at once.
    """
    path = directory / "touched"
    with path.open("wb") as file:
        for _ in range(-(-count // _BLOCK)):
            file.write(bytes(_BLOCK))
    if path.stat().st_dev != Path("/dev/shm").stat().st_dev:
        os.sync()  # so that no unwritten pages are left for the measured process
    try:
        yield
    finally:
        path.unlink()
