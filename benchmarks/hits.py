"""Measure what a hit costs: ``python -m benchmarks.hits``.

Each row opens cached shards, reads 512 bytes of each and closes them: with shardcache, with a plain
``open`` of the same files, and with WebDataset's FileCache. One row opens them as a stage of a
WebDataset pipeline, which shows what that hook adds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import fsspec

from benchmarks.results import Row, arguments_of, begun, middle, ratio, rounds, save, table
from shardcache import Cache

_REFERENCE = "plain open"


def _timed(open_all: Callable[[], Iterable[BinaryIO]], count: int) -> float:
    """Return the microseconds that it takes to open, read and close a shard."""
    start = time.perf_counter()
    for stream in open_all():
        with stream:
            stream.read(512)
    return (time.perf_counter() - start) / count * 1e6


def report(facts: Row) -> str:
    """Return the table of a result in Markdown."""
    figures = facts["microseconds"]
    plain = figures[_REFERENCE]
    rows = [[name, *middle(values), ratio(values, plain)] for name, values in figures.items()]
    return table(["", "median us", "min - max", f"x {_REFERENCE}"], rows)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of(__doc__, repeats=9)
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
        facts = begun(arguments, disk=home)
        facts["microseconds"] = rounds(
            {name: partial(_timed, each, shards) for name, each in contestants.items()},
            arguments.repeats,
        )
        cache.close()
    save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
