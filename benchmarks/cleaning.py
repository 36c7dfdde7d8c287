"""What cleaning a large cache costs: ``python -m benchmarks.cleaning``.

Caches of 10,000 and 100,000 entries, fetched, of 512 bytes each: what
cleaning does depends on how many there are, not on how large they are. A fresh process then
cleans: with nothing to remove, as a dry run, and removing a tenth. WebDataset's own clean-up
removes a tenth of as many plain files beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from benchmarks.results import Row, end_in_order, machine, median, save, say, table
from benchmarks.servers.links import ROOT
from shardcache import Cache

__all__ = ["TASKS", "main", "make_entries", "report"]

SIZE = 512
_COSTS = Path(__file__).with_name("costs.py")
#: Entries were used before any process that is there now: nothing protects them.
_AGE = 30 * 24 * 3600.0
_TIMEOUT = 1800.0


def make_entries(root: Path, count: int) -> None:
    """Fetch ``count`` entries, each used a second after the one before it."""
    memory = fsspec.filesystem("memory")
    began = time.time() - _AGE
    with Cache(root, min_free=0, stats=False) as cache:
        for number in range(count):
            url = f"memory://bench/{number:07d}.bin"
            memory.pipe(url, number.to_bytes(8, "big") * (SIZE // 8))
            os.utime(cache.fetch(url).path / "meta.json", (began + number,) * 2)
            memory.rm(url)


def _make_files(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:07d}.tar").write_bytes(bytes(SIZE))


def _clean(share: float, *, dry_run: bool = False) -> Callable[[Path, int], Row]:
    """Clean until so large a share of the bytes is left."""

    def task(home: Path, count: int) -> Row:
        with Cache(home / "cache", min_free=0) as cache:
            begun = time.perf_counter()
            report = cache.clean(max_size=int(count * SIZE * share), dry_run=dry_run)
            seconds = time.perf_counter() - begun
        return {"seconds": seconds, "removed": len(report.removed), "kept": report.kept}

    return task


def _theirs(home: Path, count: int) -> Row:
    from webdataset.cache import LRUCleanup

    files = home / "files"
    limit = int(count * SIZE * 0.9)
    begun = time.perf_counter()
    LRUCleanup(str(files), cache_size=limit, interval=None).cleanup()
    seconds = time.perf_counter() - begun
    kept = sum(1 for _ in files.iterdir())
    return {"seconds": seconds, "removed": count - kept, "kept": kept}


#: name -> (title, what is done, share of entries that it removes). In this order.
TASKS: dict[str, tuple[str, Callable[[Path, int], Row], float]] = {
    "nothing": ("clean, nothing to remove", _clean(1.0), 0.0),
    "dry-run": ("clean --dry-run, a tenth", _clean(0.9, dry_run=True), 0.1),
    "tenth": ("clean, a tenth removed", _clean(0.9), 0.1),
    "webdataset": ("WebDataset LRUCleanup, a tenth removed", _theirs, 0.1),
}


def _run(name: str, home: Path, count: int) -> Row:
    """A task in a fresh process, with its peak memory."""
    result, log = home / "costs.json", home / "log.txt"
    around = [sys.executable, "-I", "-S", str(_COSTS), str(result), f"{_TIMEOUT}", str(log), "--"]
    inside = [sys.executable, "-m", "benchmarks.cleaning", "--task", name, str(home), str(count)]
    subprocess.run([*around, *inside], cwd=ROOT, check=True)
    cost: dict[str, Any] = json.loads(result.read_text("utf-8"))
    said = log.read_text("utf-8").strip().splitlines()
    if cost["exit_code"] or not said:
        raise RuntimeError(f"{name}: exit code {cost['exit_code']}: {said[-3:]}")
    found: Row = json.loads(said[-1])
    return {**found, "peak_rss_bytes": cost["peak_rss_bytes"]}


def _one_size(count: int, repeats: int, parent: Path | None) -> list[Row]:
    rows: list[Row] = [
        {"task": name, "title": title, "entries": count, "runs": []}
        for name, (title, *_) in TASKS.items()
    ]
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=parent) as name:
            home = Path(name)
            begun = time.perf_counter()
            make_entries(home / "cache", count)
            _make_files(home / "files", count)
            say(f"{count:,} entries made in {time.perf_counter() - begun:.0f} s")
            for row in rows:
                os.sync()  # entries are old when they are cleaned: nothing of them is unwritten
                run = _run(row["task"], home, count)
                wanted = int(count * TASKS[row["task"]][2])
                if abs(run["removed"] - wanted) > 1:
                    raise RuntimeError(f"{row['title']}: {run['removed']} of {wanted} removed")
                row["runs"].append(run)
                say(f"  {row['title']}: {run}")
    return rows


def report(facts: Row) -> str:
    """The table of a result, in Markdown."""
    rows = [
        [
            row["title"],
            f"{row['entries']:,}",
            f"{median(run['seconds'] for run in row['runs']):.2f}",
            f"{median(run['peak_rss_bytes'] for run in row['runs']) / 2**20:.0f}",
        ]
        for row in facts["rows"]
    ]
    return table(["", "entries", "seconds", "peak RSS MiB"], rows)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", default="", help="counts (default 10000,100000)")
    parser.add_argument("--repeats", type=int, help="rounds (default 3, with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="200 entries, to see that it runs")
    parser.add_argument("--disk", type=Path, help="where (default: the temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    end_in_order()
    if arguments.task:
        name, home, count = arguments.task
        print(json.dumps(TASKS[name][1](Path(home), int(count))))
        return
    given = [int(count) for count in arguments.entries.split(",") if count]
    counts = given or ([200] if arguments.quick else [10_000, 100_000])
    with contextlib.ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=arguments.disk)
        facts: Row = {
            "machine": machine(Path(stack.enter_context(made))),
            "quick": arguments.quick,
            "rows": [],
        }
    for count in counts:
        repeats = arguments.repeats or (1 if arguments.quick else 3)
        facts["rows"] += _one_size(count, repeats, arguments.disk)
        save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
