"""What the processes of `benchmarks.epochs` do: ``python -m benchmarks.epochwork TASK PLAN``.

A task prepares (imports, clients), says ``ready`` on standard output, waits for a line on
standard input, works, and prints what it measured as one line of JSON. So processes that are
to compete for a shard begin together, and no figure holds an import.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.buckets import BUCKET, MIB

__all__ = ["TASKS", "WAYS"]

#: Seconds between setting up a pipeline and its first sample, in which a program makes its
#: model: what is made ready in the background is ready.
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


def _shardcache(plan: Plan) -> Any:
    import botocore.session  # noqa: F401 - what a first miss would import, as s3fs has done

    from shardcache import Cache

    cache = Cache(plan["cache"], min_free=0, **plan["options"])
    return cache.attach(_dataset(_s3(plan)))


def _pipe_curl(plan: Plan) -> Any:
    return _dataset(_curl(plan))


def _wds_filecache(plan: Plan) -> Any:
    return _dataset(_curl(plan), cache_dir=plan["cache"])


def _through(opener: Callable[[str], BinaryIO]) -> None:
    """Make WebDataset open ``s3://`` by a function."""
    import webdataset as wds

    def gopen(url: str, mode: str = "rb", bufsize: int = 8192, **kw: Any) -> BinaryIO:
        return opener(url)

    wds.gopen_schemes["s3"] = gopen


def _s3fs_open(plan: Plan) -> Any:
    import s3fs

    filesystem = s3fs.S3FileSystem(endpoint_url=plan["endpoint"])
    _through(lambda url: filesystem.open(url, "rb"))
    return _dataset(_s3(plan))


def _s3fs_get(plan: Plan) -> Any:
    import s3fs

    filesystem = s3fs.S3FileSystem(endpoint_url=plan["endpoint"])

    def fetched(url: str) -> BinaryIO:
        path = Path(plan["cache"], url.rpartition("/")[2])
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            filesystem.get_file(url, str(path))
        return path.open("rb")

    _through(fetched)
    return _dataset(_s3(plan))


#: Ways to read an epoch, in the order of tables; the first is what the others are compared with.
WAYS: dict[str, tuple[str, Callable[[Plan], Any]]] = {
    "pipe-curl": ("direct streaming, pipe:curl", _pipe_curl),
    "s3fs-open": ("direct streaming, s3fs open", _s3fs_open),
    "s3fs-get": ("s3fs get_file, then read", _s3fs_get),
    "wds-filecache": ("WebDataset FileCache + pipe:curl", _wds_filecache),
    "shardcache": ("shardcache, attach", _shardcache),
}


def epochs(plan: Plan) -> Iterator[Found]:
    """Two epochs of a pipeline: the first is cold if the cache is."""
    dataset = WAYS[plan["way"]][1](plan)
    time.sleep(_BEFORE_THE_FIRST)
    yield {}
    found: Found = {}
    for name in ("cold", "warm"):
        samples, count = 0, 0
        first = 0.0
        begun = time.perf_counter()
        for sample in dataset:
            if not samples:
                first = time.perf_counter() - begun
            samples += 1
            count += len(sample["bin"])
        seconds = time.perf_counter() - begun
        found[name] = {"seconds": seconds, "first": first, "samples": samples, "bytes": count}
    yield found


def read(plan: Plan) -> Iterator[Found]:
    """One whole shard, by the byte, twice: what every worker does that is given the same shard."""
    opener = _opener(plan)
    time.sleep(_BEFORE_THE_FIRST)
    yield {}
    for _ in range(2):
        begun = time.perf_counter()
        count = 0
        with opener() as stream:
            while data := stream.read(MIB):
                count += len(data)
        yield {"begun": begun, "ended": time.perf_counter(), "bytes": count}


def _opener(plan: Plan) -> Callable[[], BinaryIO]:
    """How one shard is opened."""
    if plan["way"] == "shardcache":
        import botocore.session  # noqa: F401 - as above

        from shardcache import Cache

        cache = Cache(plan["cache"], min_free=0, **plan["options"])
        cache.prepare(_s3(plan)[0])
        return lambda: cache.open(_s3(plan)[0])
    if plan["way"] == "wds-filecache":
        from webdataset.cache import FileCache

        theirs = FileCache(plan["cache"])
        return lambda: open(theirs.get_file(_curl(plan)[0]), "rb")
    from webdataset import gopen

    streamed: Callable[[], BinaryIO] = lambda: gopen(_curl(plan)[0])  # noqa: E731
    return streamed


def prewarm(plan: Plan) -> Iterator[Found]:
    """Many shards before a job, then once more when they are all there."""
    import botocore.session  # noqa: F401 - as above

    from shardcache import Cache

    cache = Cache(plan["cache"], min_free=0, **plan["options"])
    yield {}
    found: Found = {}
    for name in ("cold", "warm"):
        begun = time.perf_counter()
        report = cache.prewarm(_s3(plan))
        found[name] = {
            "seconds": time.perf_counter() - begun,
            "fetched": report.fetched,
            "cached": report.cached,
        }
    yield found


TASKS: dict[str, Callable[[Plan], Iterator[Found]]] = {
    "epochs": epochs,
    "read": read,
    "prewarm": prewarm,
}


def main() -> None:
    """Run one task."""
    task = TASKS[sys.argv[1]](json.loads(Path(sys.argv[2]).read_text("utf-8")))
    next(task)
    print("ready", flush=True)
    while sys.stdin.readline():  # each asks for the next step
        print(json.dumps(next(task)), flush=True)


if __name__ == "__main__":
    main()
