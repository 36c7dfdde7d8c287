"""What a hit costs: ``python -m benchmarks.hits``.

Opens, reads 512 bytes of, and closes shards that are all cached, against a plain
``open`` of the same files and against WebDataset's own FileCache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fsspec

from benchmarks.table import measure, show
from shardcache import Cache


def timed(opener: Callable[[str], object], urls: list[str]) -> float:
    """Microseconds per open, read and close."""
    begun = time.perf_counter()
    for url in urls:
        with opener(url) as stream:  # type: ignore[attr-defined]
            stream.read(512)
    return (time.perf_counter() - begun) / len(urls) * 1e6


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dir", type=Path, help="where; the default is the temporary directory")
    arguments = parser.parse_args()

    from webdataset.cache import FileCache

    with tempfile.TemporaryDirectory(dir=arguments.dir) as home:
        memory = fsspec.filesystem("memory")
        cache = Cache(Path(home, "cache"), min_free=0)
        urls = [f"memory://bench/{n:06d}.tar" for n in range(arguments.shards)]
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
            plain[url] = str(path)
        theirs = FileCache(str(files), validator=None)
        figures = measure(
            {
                "plain open": lambda: timed(lambda url: open(plain[url], "rb"), urls),
                "shardcache": lambda: timed(cache.open, urls),
                "WebDataset FileCache": lambda: timed(
                    lambda url: open(theirs.get_file(f"http://host/{url[15:]}"), "rb"), urls
                ),
            },
            arguments.repeats,
        )
        cache.close()
        show("A hit: open, read 512 bytes, close", "us", figures, "plain open")


if __name__ == "__main__":
    main()
