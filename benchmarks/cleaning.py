"""Measure what cleaning a large cache costs: ``python -m benchmarks.cleaning``.

The caches hold 10,000 and 100,000 entries of 512 bytes, because the cost depends on the number of
entries and not on their size. Each cache is cleaned when there is nothing to remove, as a dry run,
and so that a tenth is removed. For comparison, the clean-up of WebDataset removes a tenth of as
many plain files.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import fsspec

from benchmarks.results import Row, arguments_of, machine, save, say, table
from shardcache import Cache
from shardcache.space.memory import allocation

SIZE = 512
#: Seconds since the entries were used. It is before any process that lives now, so nothing protects
#: the entries.
_AGE = 30 * 24 * 3600.0


def _make_entries(root: Path, count: int) -> None:
    """Store entries, each used a second after the one before it."""
    memory = fsspec.filesystem("memory")
    first_use = time.time() - _AGE
    with Cache(root, min_free=0, stats=False) as cache:
        for number in range(count):
            url = f"memory://bench/{number:07d}.bin"
            memory.pipe(url, number.to_bytes(8, "big") * (SIZE // 8))
            os.utime(cache.fetch(url).path / "meta.json", (first_use + number,) * 2)
            memory.rm(url)


def _make_files(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:07d}.tar").write_bytes(bytes(SIZE))


def _clean(share: float, *, dry_run: bool = False) -> Callable[[Path, int], tuple[float, int]]:
    """Return a task that cleans a cache until this share of its bytes is left.

    The task returns its seconds and the number of entries removed.
    """

    def task(home: Path, count: int) -> tuple[float, int]:
        with Cache(home / "cache", min_free=0) as cache:
            limit = int(share * count * allocation(home)(SIZE))
            start = time.perf_counter()
            report = cache.clean(max_size=limit, dry_run=dry_run)
            return time.perf_counter() - start, len(report.removed)

    return task


def _clean_webdataset(home: Path, count: int) -> tuple[float, int]:
    from webdataset.cache import LRUCleanup

    files, limit = home / "files", int(count * SIZE * 0.9)
    start = time.perf_counter()
    LRUCleanup(str(files), cache_size=limit, interval=None).cleanup()
    seconds = time.perf_counter() - start
    return seconds, count - sum(1 for _ in files.iterdir())


#: name -> (title, task, share of the entries that it removes), in the order of running.
TASKS: dict[str, tuple[str, Callable[[Path, int], tuple[float, int]], float]] = {
    "nothing": ("clean, nothing to remove", _clean(1.0), 0.0),
    "dry-run": ("clean --dry-run, a tenth", _clean(0.9, dry_run=True), 0.1),
    "tenth": ("clean, a tenth removed", _clean(0.9), 0.1),
    "webdataset": ("WebDataset LRUCleanup, a tenth removed", _clean_webdataset, 0.1),
}


def _measure(count: int, repeats: int, parent: Path) -> list[Row]:
    rows: list[Row] = [
        {"task": name, "title": title, "entries": count, "seconds": []}
        for name, (title, *_) in TASKS.items()
    ]
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=parent) as name:
            home = Path(name)
            start = time.perf_counter()
            _make_entries(home / "cache", count)
            _make_files(home / "files", count)
            say(f"{count:,} entries made in {time.perf_counter() - start:.0f} s")
            for row in rows:
                os.sync()  # a cache to clean is old, so nothing of it waits to be written
                _, task, share = TASKS[row["task"]]
                seconds, removed = task(home, count)
                if abs(removed - int(count * share)) > 1:
                    raise RuntimeError(f"{row['title']}: {removed} of {count} removed")
                row["seconds"].append(seconds)
                say(f"  {row['title']}: {seconds:.2f} s")
    return rows


def report(facts: Row) -> str:
    """Return the table of a result in Markdown."""
    rows = [
        [row["title"], f"{row['entries']:,}", f"{median(row['seconds']):.2f}"]
        for row in facts["rows"]
    ]
    return table(["", "entries", "seconds"], rows)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__))
    facts: Row = {"machine": machine(disk=arguments.disk), "quick": arguments.quick, "rows": []}
    for count in [200] if arguments.quick else [10_000, 100_000]:
        facts["rows"] += _measure(count, arguments.repeats, arguments.disk)
        save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
