"""The processes of `benchmarks.epochs`: ``python -m benchmarks.epochwork TASK PLAN``.

A task prepares (imports, clients), prints ``ready``, waits for a line on standard input, works,
and prints what it measured as one line of JSON. So processes that compete for a shard begin
together, and no figure holds an import.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

from benchmarks.buckets import BUCKET, MIB

__all__ = ["WAYS"]

#: Seconds between setting up a pipeline and its first sample, in which a program makes its
#: model: background work is done by then.
_BEFORE_THE_FIRST = 1.0

Plan = Mapping[str, Any]
Found = dict[str, Any]


def _curl(plan: Plan) -> list[str]:
    return [f"pipe:curl -s -f '{url}'" for url in plan["urls"]]


def _s3(plan: Plan) -> list[str]:
    return [f"s3://{BUCKET}/{key}" for key in plan["keys"]]


def _dataset(urls: list[str], **options: Any) -> Any:
    import webdataset as wds

    return wds.WebDataset(urls, shardshuffle=False, **options)


def _cache(plan: Plan) -> Any:
    import botocore.session  # noqa: F401 - what a first miss would import, as s3fs has done

    from shardcache import Cache

    return Cache(plan["cache"], min_free=0)


def _s3fs_open(plan: Plan) -> Any:
    import s3fs
    import webdataset as wds

    filesystem = s3fs.S3FileSystem(endpoint_url=plan["endpoint"])
    wds.gopen_schemes["s3"] = lambda url, mode="rb", bufsize=0, **kw: filesystem.open(url, "rb")
    return _dataset(_s3(plan))


#: Ways to read an epoch, in the order of tables; the first is what the others are compared with.
WAYS: dict[str, tuple[str, Callable[[Plan], Any]]] = {
    "pipe-curl": ("direct streaming, pipe:curl", lambda plan: _dataset(_curl(plan))),
    "s3fs-open": ("direct streaming, s3fs open", _s3fs_open),
    "wds-filecache": (
        "WebDataset FileCache + pipe:curl",
        lambda plan: _dataset(_curl(plan), cache_dir=plan["cache"]),
    ),
    "shardcache": (
        "shardcache, attach",
        lambda plan: _cache(plan).attach(_dataset(_s3(plan))),
    ),
    "shardcache-tarfile": (
        "shardcache, attach(fast_tar=False)",
        lambda plan: _cache(plan).attach(_dataset(_s3(plan)), fast_tar=False),
    ),
}


def epochs(plan: Plan) -> Iterator[Found]:
    """Two epochs of a pipeline: the first is cold if the cache is."""
    dataset = WAYS[plan["way"]][1](plan)
    time.sleep(_BEFORE_THE_FIRST)
    yield {}
    found: Found = {}
    for name in ("cold", "warm"):
        samples, first, began = 0, 0.0, time.perf_counter()
        for _ in dataset:
            samples += 1
            first = first or time.perf_counter() - began
        seconds = time.perf_counter() - began
        found[name] = {"seconds": seconds, "first": first, "samples": samples}
    yield found


def read(plan: Plan) -> Iterator[Found]:
    """One whole shard, by the byte, twice: what every worker does that is given the same shard."""
    opener = _opener(plan)
    time.sleep(_BEFORE_THE_FIRST)
    yield {}
    for _ in range(2):
        began = time.perf_counter()
        with opener() as stream:
            while stream.read(MIB):
                pass
        yield {"began": began, "ended": time.perf_counter()}


def _opener(plan: Plan) -> Callable[[], BinaryIO]:
    """How one shard is opened."""
    if plan["way"] == "shardcache":
        cache, url = _cache(plan), _s3(plan)[0]
        cache.prepare(url)
        return lambda: cache.open(url)
    if plan["way"] == "wds-filecache":
        from webdataset.cache import FileCache

        theirs = FileCache(plan["cache"])
        return lambda: open(theirs.get_file(_curl(plan)[0]), "rb")
    from webdataset import gopen

    streamed: Callable[[], BinaryIO] = lambda: gopen(_curl(plan)[0])  # noqa: E731
    return streamed


def main() -> None:
    """Run one task."""
    with open(sys.argv[2], encoding="utf-8") as plan:
        task = {"epochs": epochs, "read": read}[sys.argv[1]](json.load(plan))
    next(task)
    print("ready", flush=True)
    while sys.stdin.readline():  # each asks for the next step
        print(json.dumps(next(task)), flush=True)


if __name__ == "__main__":
    main()
