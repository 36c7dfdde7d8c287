"""Measure what a hit costs: ``python -m benchmarks.hits``.

Each row opens cached shards, reads 512 bytes of each and closes them: with shardcache, with a plain
``open`` of the same files, and with WebDataset's FileCache. One row opens them as a stage of a
WebDataset pipeline, which shows what that hook adds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import BinaryIO

import fsspec

from benchmarks.results import Row, arguments_of, machine, save, say, table
from shardcache import Cache

_REFERENCE = "plain open"


def _timed(streams: Iterable[BinaryIO]) -> float:
    """Return the microseconds that it takes to open, read and close a shard."""
    count, start = 0, time.perf_counter()
    for stream in streams:
        with stream:
            stream.read(512)
        count += 1
    return (time.perf_counter() - start) / count * 1e6


def report(facts: Row) -> str:
    """Return the table of a result in Markdown."""
    figures: dict[str, list[float]] = facts["microseconds"]
    rows = []
    for name, values in figures.items():
        ratios = [a / b for a, b in zip(values, figures[_REFERENCE], strict=True)]
        spread = f"{min(values):.1f} - {max(values):.1f}"
        rows.append([name, f"{median(values):.1f}", spread, f"{median(ratios):.2f}"])
    return table(["", "median us", "min - max", f"x {_REFERENCE}"], rows)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of(argparse.ArgumentParser(description=__doc__), repeats=9)
    shards = 20 if arguments.quick else 1000

    from webdataset.cache import FileCache

    with tempfile.TemporaryDirectory(dir=arguments.disk) as directory:
        home = Path(directory)
        memory = fsspec.filesystem("memory")
        cache = Cache(home / "cache", min_free=0)
        urls = [f"memory://bench/{n:06d}.tar" for n in range(shards)]
        block = bytes(10240)
        plain, web = {}, {}
        files = home / "files"
        files.mkdir()
        for number, url in enumerate(urls):
            memory.pipe(url, block)
            plain[url] = str(cache.fetch(url).data)
            web[url] = f"http://host/{number:06d}.tar"
            (files / f"{number:06d}.tar").write_bytes(block)
        filecache = FileCache(str(files), validator=None)
        contestants: dict[str, Callable[[], Iterable[BinaryIO]]] = {
            _REFERENCE: lambda: (open(plain[url], "rb") for url in urls),
            "shardcache": lambda: map(cache.open, urls),
            "shardcache, as a stage of WebDataset": lambda: (
                sample["stream"] for sample in cache.url_opener([{"url": url} for url in urls])
            ),
            "WebDataset FileCache": lambda: (
                open(filecache.get_file(web[url]), "rb") for url in urls
            ),
        }
        figures: dict[str, list[float]] = {name: [] for name in contestants}
        for round_number in range(arguments.repeats + 1):  # the first round only warms up
            for name, streams in contestants.items():  # in turn: a slow moment hits them alike
                figure = _timed(streams())
                say(f"  {name}: {figure:.4g}")
                if round_number:
                    figures[name].append(figure)
        cache.close()
        facts: Row = {
            "machine": machine(disk=home),
            "quick": arguments.quick,
            "shards": shards,
            "microseconds": figures,
        }
    save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
