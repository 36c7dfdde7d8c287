"""What cleaning a large cache costs: ``python -m benchmarks.cleaning``.

Caches of 10,000 and 100,000 entries, fetched, of 512 bytes each: what
cleaning does depends on how many there are, not on how large they are. Then they are
cleaned: with nothing to remove, as a dry run, and removing a tenth. WebDataset's own clean-up
removes a tenth of as many plain files beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fsspec

from benchmarks.results import Row, arguments_of, machine, median, save, say, table
from shardcache import Cache
from shardcache.space.memory import allocation

__all__ = ["main", "report"]

SIZE = 512
#: Entries were used before any process that is there now: nothing protects them.
_AGE = 30 * 24 * 3600.0


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


def _clean(share: float, *, dry_run: bool = False) -> Callable[[Path, int], tuple[float, int]]:
    """Clean until so large a share of the bytes is left; gives seconds and number removed."""

    def task(home: Path, count: int) -> tuple[float, int]:
        with Cache(home / "cache", min_free=0) as cache:
            limit = int(share * count * allocation(home)(SIZE))
            began = time.perf_counter()
            report = cache.clean(max_size=limit, dry_run=dry_run)
            return time.perf_counter() - began, len(report.removed)

    return task


def _theirs(home: Path, count: int) -> tuple[float, int]:
    from webdataset.cache import LRUCleanup

    files, limit = home / "files", int(count * SIZE * 0.9)
    began = time.perf_counter()
    LRUCleanup(str(files), cache_size=limit, interval=None).cleanup()
    seconds = time.perf_counter() - began
    return seconds, count - sum(1 for _ in files.iterdir())


#: name -> (title, what is done, share of entries that it removes). In this order.
TASKS: dict[str, tuple[str, Callable[[Path, int], tuple[float, int]], float]] = {
    "nothing": ("clean, nothing to remove", _clean(1.0), 0.0),
    "dry-run": ("clean --dry-run, a tenth", _clean(0.9, dry_run=True), 0.1),
    "tenth": ("clean, a tenth removed", _clean(0.9), 0.1),
    "webdataset": ("WebDataset LRUCleanup, a tenth removed", _theirs, 0.1),
}


def _one_size(count: int, repeats: int, parent: Path | None) -> list[Row]:
    rows: list[Row] = [
        {"task": name, "title": title, "entries": count, "seconds": []}
        for name, (title, *_) in TASKS.items()
    ]
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=parent) as name:
            home = Path(name)
            began = time.perf_counter()
            make_entries(home / "cache", count)
            _make_files(home / "files", count)
            say(f"{count:,} entries made in {time.perf_counter() - began:.0f} s")
            for row in rows:
                os.sync()  # entries are old when they are cleaned: nothing of them is unwritten
                _, task, share = TASKS[row["task"]]
                seconds, removed = task(home, count)
                if abs(removed - int(count * share)) > 1:
                    raise RuntimeError(f"{row['title']}: {removed} of {count} removed")
                row["seconds"].append(seconds)
                say(f"  {row['title']}: {seconds:.2f} s")
    return rows


def report(facts: Row) -> str:
    """The table of a result, in Markdown."""
    rows = [
        [row["title"], f"{row['entries']:,}", f"{median(row['seconds']):.2f}"]
        for row in facts["rows"]
    ]
    return table(["", "entries", "seconds"], rows)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--disk", type=Path, help="where (default: the temporary directory)")
    arguments = arguments_of(parser)
    where = arguments.disk or Path(tempfile.gettempdir())
    facts: Row = {"machine": machine(disk=where), "quick": arguments.quick, "rows": []}
    for count in [200] if arguments.quick else arguments.entries:
        facts["rows"] += _one_size(count, arguments.repeats, where)
        save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
