"""Measure what grows with the cache and with the processes: ``python -m benchmarks.growth``.

The caches hold 1,000, 10,000 and 100,000 entries of 10 KB, because costs depend on the number of
entries and not on their size. One process opens entries, fetches shards into a cache that has room
and into a full one, and runs commands. The clean-up of WebDataset removes a tenth of as many plain
files. Then 1, 8 and 64 processes read the same cold shards, in an empty cache and in a full one.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import fsspec

from benchmarks.peers import measure
from benchmarks.results import Row, arguments_of, begun, drawing, resident_memory, save, say, table
from shardcache import Cache
from shardcache.config import Config
from shardcache.space.memory import allocation
from shardcache.store.entry import Store
from shardcache.store.root import make_root
from tests.support.storetools import Parent, crowd, publish, together

SIZE = 10_000
#: Seconds since the entries were used. It is before any process that lives now, so nothing protects
#: the entries.
_AGE = 30 * 24 * 3600.0
#: Seconds after which a process that measures is killed.
_TIMEOUT = 3600.0
#: The figures of a cache: title, unit.
FIGURES = {
    "hit": ("a hit, median", "us"),
    "cold": ("fetch, mean", "ms"),
    "uncounted": ("first fetch into a full cache that was never counted", "ms"),
    "first": ("first fetch into a full cache since the boot", "ms"),
    "full-mean": ("fetch into a full cache, mean", "ms"),
    "full-longest": ("fetch into a full cache, longest", "ms"),
    "prewarm": ("prewarm of what is cached", "s"),
    "prewarm-rss": ("prewarm of what is cached, peak memory", "MB"),
    "ls": ("ls", "s"),
    "ls-rss": ("ls, peak memory", "MB"),
    "clean": ("clean, a tenth removed", "s"),
    "webdataset": ("WebDataset LRUCleanup, a tenth removed", "s"),
}


#: The figures of the chart, and the seconds of their units.
_CHARTED = ("clean", "prewarm", "ls", "first", "full-mean", "cold", "hit")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _url(number: int, kind: str = "old") -> str:
    return f"memory://bench/{kind}-{number:07d}.bin"


def _make_entries(root: Path, count: int) -> None:
    """Publish entries, each used a second after the one before it, without the cost of fetches."""
    store, first_use = Store(make_root(Config(root))), time.time() - _AGE
    for number in range(count):
        publish(store, _url(number), bytes(SIZE), used=first_use + number)


def _timed(act: Callable[[int], Any], numbers: Sequence[int]) -> list[float]:
    """Return the seconds of each call of ``act``."""
    seconds = []
    for number in numbers:
        start = time.perf_counter()
        act(number)
        seconds.append(time.perf_counter() - start)
    return seconds


def _in_child(act: Callable[[], Row]) -> Row:
    """Return the result of ``act`` in a forked process, with its peak memory in MB as ``rss``."""

    def work(_: int) -> Row:
        return {**act(), "rss": resident_memory("VmHWM") / 1e6}

    result: Row
    (result,) = together(1, work, seconds=_TIMEOUT)
    return result


def _read(cache: Cache, url: str) -> None:
    with cache.open(url) as stream:
        stream.read()


def _fetches(root: Path, count: int, fetches: int) -> Row:
    """Open cached shards, then fetch new ones into a cache with room and into a full one."""
    memory = fsspec.filesystem("memory")
    for kind, number in (("cold", fetches // 5), ("full", fetches + 1)):
        for n in range(number):
            memory.pipe(_url(n, kind), bytes(SIZE))
    with Cache(root, min_free=0) as cache:
        known = [random.randrange(count) for _ in range(1000)]
        for number in known:  # learns where they are
            _read(cache, _url(number))
        hits = _timed(lambda n: _read(cache, _url(n)), known)
        cold = _timed(lambda n: cache.fetch(_url(n, "cold")), range(fetches // 5))
    room = allocation(root)(SIZE)
    full_cache = partial(Cache, root, min_free=0, policy="lru")
    with full_cache(max_size=(count + fetches // 5) * room) as cache:
        uncounted, *full = _timed(lambda n: cache.fetch(_url(n, "full")), range(fetches))
    usage = root / "v1/usage"
    _, held, *rest = json.loads(usage.read_text("utf-8"))
    usage.write_text(json.dumps(["the last boot", held, *rest]), "utf-8")
    with full_cache(max_size=sum(held)) as cache:
        (first,) = _timed(lambda n: cache.fetch(_url(n, "full")), [fetches])
    figures = {"full-mean": mean(full), "full-longest": max(full)}
    figures |= {"cold": mean(cold), "uncounted": uncounted, "first": first}
    return {name: value * 1e3 for name, value in figures.items()} | {"hit": median(hits) * 1e6}


def _command(root: Path, *arguments: str) -> tuple[float, float]:
    """Run ``shardcache``; return its seconds and its peak memory in MB."""
    command = [sys.executable, "-m", "shardcache", *arguments]
    environment = {**os.environ, "SHARDCACHE_DIR": str(root), "SHARDCACHE_MIN_FREE": "0"}
    costs = measure(command, environment, root.parent)
    return costs["wall_seconds"], costs["peak_rss_bytes"] / 1e6


def _clean_webdataset(files: Path, count: int) -> Row:
    from webdataset.cache import LRUCleanup

    files.mkdir()
    for number in range(count):
        (files / f"{number:07d}.tar").write_bytes(bytes(SIZE))
    cleanup = LRUCleanup(str(files), cache_size=int(count * SIZE * 0.9), interval=None)
    start = time.perf_counter()
    cleanup.cleanup()
    return {"seconds": time.perf_counter() - start}


def _measure(root: Path, count: int, fetches: int) -> Row:
    """Make a cache of ``count`` entries, and return the figures of fetches and commands."""
    _make_entries(root, count)
    os.sync()  # a cache is old, so nothing of it waits to be written
    row = _in_child(lambda: _fetches(root, count, fetches))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
        names.write("\n".join(entry.name() for entry in Cache(root, min_free=0).entries()))
        names.flush()
        row["prewarm"], row["prewarm-rss"] = _command(root, "prewarm", "-f", names.name)
    row["ls"], row["ls-rss"] = _command(root, "ls")
    return {"entries": count, **row}


def _clean(root: Path, count: int) -> Row:
    """Return the seconds that it takes to clean a cache and as many plain files."""
    limit = f"{int(0.9 * count) * allocation(root)(SIZE) // 1024}KiB"
    dry_run, _ = _command(root, "clean", "-n", "--max-size", limit)
    seconds, _ = _command(root, "clean", "--max-size", limit)
    files = _in_child(lambda: _clean_webdataset(root.with_name("files"), count))
    return {"dry-run": dry_run, "clean": seconds, "webdataset": files["seconds"]}


def _crowd(root: Path, processes: int, shards: int, **options: Any) -> tuple[float, float]:
    """Let processes read the same cold shards at once.

    Returns the seconds until all have read all shards, and the longest wait for one shard.
    """
    memory = fsspec.filesystem("memory")
    urls = [_url(n, f"crowd-{random.randrange(1 << 40)}") for n in range(shards)]
    for url in urls:
        memory.pipe(url, bytes(SIZE))

    def work(parent: Parent, number: int) -> None:
        with Cache(root, min_free=0, **options) as cache:
            parent.say("ready")
            parent.hear()
            order = [(number + n) % shards for n in range(shards)]
            parent.say(max(_timed(lambda n: _read(cache, urls[n]), order)))

    with crowd(processes, work) as children:
        for child in children:
            child.hear()
        start = time.perf_counter()
        for child in children:
            child.tell()
        longest = max(child.hear(_TIMEOUT) for child in children)
        return time.perf_counter() - start, longest


def _crowds(root: Path, entries: int) -> Iterator[Row]:
    """Yield a row for each number of processes and shards, on a cache of ``entries`` entries."""
    full = {"policy": "lru", "max_size": entries * allocation(root.parent)(SIZE)} if entries else {}
    for processes, shards in product((1, 8, 64), (1, 64)):
        seconds, longest = _crowd(root, processes, shards, **full)
        counts: Row = {"entries": entries, "processes": processes, "shards": shards}
        yield {**counts, "seconds": seconds, "longest": longest}


def report(facts: Row) -> str:
    """Return the tables of a result in Markdown."""
    rows = facts["rows"]
    counts = sorted({row["entries"] for row in rows})
    lines = []
    for name, (title, unit) in FIGURES.items():
        values = [median(row[name] for row in rows if row["entries"] == n) for n in counts]
        cells = [f"{value:.3g}" if value < 100 else f"{value:,.0f}" for value in values]
        lines.append([f"{title}, {unit}", *cells, f"x {values[-1] / values[0]:.1f}"])
    heads = ["", *(f"{count:,} entries" for count in counts)]
    one = table([*heads, f"grows, with x {counts[-1] // counts[0]:,} entries"], lines)
    lines = []
    for row in (row for row in facts["crowds"] if row["shards"] > 1):
        state = f"full, {row['entries']:,} entries" if row["entries"] else "empty"
        who = [state, f"{row['processes']}", f"{row['shards']}"]
        lines.append([*who, f"{row['seconds']:.2f}", f"{row['longest']:.2f}"])
    heads = ["cache", "processes", "shards", "seconds until all have read all", "longest wait, s"]
    return f"{one}\n\n### Processes on the same cold shards\n\n{table(heads, lines)}"


def draw(facts: Row, path: Path) -> None:
    """Draw what the costs of `_CHARTED` grow with, as an SVG file."""
    rows = facts["rows"]
    counts = sorted({row["entries"] for row in rows})
    with drawing(path, 4.8, 4.8) as figure:  # as wide as a phone shows it
        axes = figure.subplots()
        for name in _CHARTED:
            title, unit = FIGURES[name]
            values = [median(row[name] for row in rows if row["entries"] == n) for n in counts]
            axes.loglog(counts, [value * _UNITS[unit] for value in values], "o-", label=title)
        axes.set_xticks(counts, [f"{count:,}" for count in counts])
        axes.set(xlabel="entries in the cache", ylabel="seconds")
        figure.legend(loc="outside upper left", frameon=False)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of(__doc__, repeats=1)
    facts = begun(arguments, disk=arguments.disk) | {"rows": [], "crowds": []}
    fetches = 50 if arguments.quick else 1000
    counts = [200, 400] if arguments.quick else [1000, 10_000, 100_000]
    for count in counts:
        for number in range(arguments.repeats):
            with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.disk) as name:
                start, root = time.perf_counter(), Path(name, "cache")
                row = _measure(root, count, fetches)
                if number == 0 and count == counts[0]:
                    facts["crowds"] += _crowds(root.with_name("empty"), 0)
                if number == 0 and count == counts[-1]:
                    facts["crowds"] += _crowds(root, count)
                facts["rows"].append(row | _clean(root, count))
                say(f"  {count:,} entries: {time.perf_counter() - start:.0f} s")
                save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
