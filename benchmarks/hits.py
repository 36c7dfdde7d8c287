"""What a hit costs: ``python -m benchmarks.hits``.

Opens, reads 512 bytes of, and closes shards that are all cached: shardcache, a plain ``open``
of the same files, and WebDataset's own FileCache. And what its hook adds for each shard: the
same shards opened as a dataset's stage opens them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import fsspec

from benchmarks.results import Row, arguments_of, machine, measure, median, save, table
from shardcache import Cache

__all__ = ["main", "report"]

_REFERENCE = "plain open"


def timed(opener: Callable[[str], BinaryIO], urls: list[str]) -> float:
    """Microseconds per open, read and close."""
    began = time.perf_counter()
    for url in urls:
        with opener(url) as stream:
            stream.read(512)
    return (time.perf_counter() - began) / len(urls) * 1e6


def staged(stage: Callable[[list[dict[str, str]]], Any], urls: list[str]) -> float:
    """As `timed`, through a stage of a pipeline."""
    began = time.perf_counter()
    for sample in stage([{"url": url} for url in urls]):
        with sample["stream"] as stream:
            stream.read(512)
    return (time.perf_counter() - began) / len(urls) * 1e6


def report(facts: Row) -> str:
    """The table of a result, in Markdown."""
    figures: dict[str, list[float]] = facts["microseconds"]
    rows = []
    for name, values in figures.items():
        ratios = [a / b for a, b in zip(values, figures[_REFERENCE], strict=True)]
        spread = f"{min(values):.1f} - {max(values):.1f}"
        rows.append([name, f"{median(values):.1f}", spread, f"{median(ratios):.2f}"])
    return table(["", "median us", "min - max", f"x {_REFERENCE}"], rows)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, help="default 1000, with --quick 20")
    parser.add_argument("--disk", type=Path, help="where (default: the temporary directory)")
    arguments = arguments_of(parser, repeats=9)
    shards = arguments.shards or (20 if arguments.quick else 1000)

    from webdataset.cache import FileCache

    with tempfile.TemporaryDirectory(dir=arguments.disk) as home:
        memory = fsspec.filesystem("memory")
        cache = Cache(Path(home, "cache"), min_free=0)
        uncounted = Cache(Path(home, "cache"), min_free=0, stats=False)
        urls = [f"memory://bench/{n:06d}.tar" for n in range(shards)]
        block = bytes(10240)
        for url in urls:
            memory.pipe(url, block)
            cache.fetch(url)
        plain = {}
        files = Path(home, "files")
        files.mkdir()
        for number, url in enumerate(urls):
            path = files / f"{number:06d}.tar"
            path.write_bytes(block)
            plain[url] = str(cache.path(url))
        theirs = FileCache(str(files), validator=None)
        figures = measure(
            {
                _REFERENCE: lambda: timed(lambda url: open(plain[url], "rb"), urls),
                "shardcache": lambda: timed(cache.open, urls),
                "shardcache, without statistics": lambda: timed(uncounted.open, urls),
                "shardcache, as a stage of WebDataset": lambda: staged(cache.url_opener, urls),
                "WebDataset FileCache": lambda: timed(
                    lambda url: open(theirs.get_file(f"http://host/{url[15:]}"), "rb"), urls
                ),
            },
            arguments.repeats,
        )
        cache.close()
        uncounted.close()
        facts: Row = {
            "machine": machine(disk=Path(home)),
            "quick": arguments.quick,
            "shards": shards,
            "microseconds": figures,
        }
    save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
