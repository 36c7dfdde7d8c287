"""What a warm epoch costs: ``python -m benchmarks.warm``.

Iterates over a WebDataset, without decoding, whose shards are all on the disk and in the
page cache: WebDataset's own pipeline on plain files, the same pipeline attached to a
cache that has all the shards, and attached with the stage that takes archives apart left
as it is. Every sample has a field of the size named and a small one. Shards are those
of WebDataset's writer, which puts an extended header before each file, and plain ones.
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import webdataset as wds

from benchmarks.results import measure, show
from shardcache import Cache

#: Bytes of a whole set: long enough to measure, and at home in any page cache.
_SET = 64_000_000
_MOST_SAMPLES = 8000
_SHARDS = 4


def write_by_webdataset(path: Path, samples: int, size: int) -> None:
    """A shard as `webdataset.TarWriter` makes it."""
    with wds.TarWriter(str(path)) as writer:
        for number in range(samples):
            writer.write({"__key__": f"{number:08d}", "bin": os.urandom(size), "cls": b"7"})


def write_plain(path: Path, samples: int, size: int) -> None:
    """A shard with one header per file, such as the tar command makes."""
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for number in range(samples):
            for suffix, data in (("bin", os.urandom(size)), ("cls", b"7")):
                info = tarfile.TarInfo(f"{number:08d}.{suffix}")
                info.size, info.mtime = len(data), 1_700_000_000
                archive.addfile(info, io.BytesIO(data))


def epoch(dataset: wds.WebDataset, samples: int) -> float:
    """Microseconds per sample of one pass."""
    begun = time.perf_counter()
    seen = sum(1 for _ in dataset)
    spent = time.perf_counter() - begun
    assert seen == samples, f"{seen} samples, not {samples}"
    return spent / samples * 1e6


def compare(home: Path, size: int, write: Callable[[Path, int, int], None], repeats: int) -> None:
    """Write the shards, run all pipelines in turn and print the table."""
    each = min(_MOST_SAMPLES, _SET // size) // _SHARDS
    paths = [home / f"train-{number:04d}.tar" for number in range(_SHARDS)]
    for path in paths:
        write(path, each, size)

    def dataset() -> wds.WebDataset:
        return wds.WebDataset([str(path) for path in paths], shardshuffle=False)

    with tempfile.TemporaryDirectory(dir=home) as directory:
        cache = Cache(directory, min_free=0, cache_local=True)
        contestants = {
            "WebDataset, plain files": dataset(),
            "attached, fast_tar=False": cache.attach(dataset(), fast_tar=False),
            "attached": cache.attach(dataset()),
        }
        figures = measure(
            {
                name: lambda pipeline=pipeline: epoch(pipeline, each * _SHARDS)
                for name, pipeline in contestants.items()
            },
            repeats,
        )
        cache.close()
    about = write.__name__.removeprefix("write_").replace("_", " ")
    title = f"A warm epoch, samples of {size / 1000:g} KB, shards {about}"
    show(title, "us per sample", figures, "WebDataset, plain files")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000, 100_000], help="bytes")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dir", type=Path, help="where; the default is the temporary directory")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="webdataset")
    for size in arguments.sizes:
        for write in (write_by_webdataset, write_plain):
            with tempfile.TemporaryDirectory(dir=arguments.dir) as home:
                compare(Path(home), size, write, arguments.repeats)


if __name__ == "__main__":
    main()
