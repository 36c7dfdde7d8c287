"""The tasks of the worker processes of `benchmarks.epochs`.

``python -m benchmarks.epochwork PLAN`` reads the first sample and ends: a whole fresh process.

The other tasks run in forked processes. A task prepares imports and clients, and then
works in steps. The processes of a benchmark begin each step together, after all of them have
prepared, so no figure includes an import.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.buckets import BUCKET, MIB
from tests.support.storetools import Parent

#: Seconds between making a pipeline and its first sample. A real program makes its model in that
#: time, and background work of the pipeline ends.
_BEFORE_THE_FIRST = 1.0
#: The input of hashlib, which releases the interpreter lock while it hashes.
_NOISE = memoryview(bytes(64 * MIB))

#: ``task``, ``way``, ``cache``, ``endpoint``, ``environment``, the ``keys`` and ``urls`` of the
#: shards, and maybe the ``work`` per sample: a key of `WORK` and the argument of its function.
Plan = Mapping[str, Any]
Figures = dict[str, Any]


def _curl(plan: Plan) -> list[str]:
    return [f"pipe:curl -s -f '{url}'" for url in plan["urls"]]


def _s3(plan: Plan) -> list[str]:
    return [f"s3://{BUCKET}/{key}" for key in plan["keys"]]


def _dataset(urls: list[str], **options: Any) -> Any:
    import webdataset as wds

    return wds.WebDataset(urls, shardshuffle=False, **options)


def _cache(plan: Plan) -> Any:
    from shardcache import Cache

    return Cache(plan["cache"])


def _s3fs_open(plan: Plan) -> Any:
    import s3fs
    import webdataset as wds

    filesystem = s3fs.S3FileSystem(endpoint_url=plan["endpoint"])
    wds.gopen_schemes["s3"] = lambda url, mode="rb", bufsize=0, **kw: filesystem.open(url, "rb")
    return _dataset(_s3(plan))


#: Ways to read an epoch, in the order of tables: name -> title, and a function that makes the
#: pipeline. The others are compared with the first.
WAYS: dict[str, tuple[str, Callable[[Plan], Any]]] = {
    "pipe-curl": ("direct streaming, pipe:curl", lambda plan: _dataset(_curl(plan))),
    "s3fs-open": ("direct streaming, s3fs open", _s3fs_open),
    "wds-filecache": (
        "WebDataset FileCache + pipe:curl",
        lambda plan: _dataset(_curl(plan), cache_dir=plan["cache"]),
    ),
    "shardcache": ("shardcache, attach", lambda plan: _cache(plan).attach(_dataset(_s3(plan)))),
    "shardcache-shuffle": (
        "shardcache, attach, `shuffle(1000)`",
        lambda plan: _cache(plan).attach(_dataset(_s3(plan))).shuffle(1000),
    ),
    "shardcache-places": (
        "shardcache, `attach(resume=True)`, `shuffle(1000)`",
        lambda plan: _cache(plan).attach(_dataset(_s3(plan)), resume=True).shuffle(1000),
    ),
}


def _spin(count: int) -> None:
    for _ in range(count):
        pass


def _hash(count: int) -> None:
    hashlib.sha256(_NOISE[:count])


#: Work per sample, by its title: seconds, and a function that works in proportion to its argument.
WORK = {
    "0.5 ms of Python": (0.0005, _spin),
    "2 ms of Python": (0.002, _spin),
    "2 ms of C without the GIL": (0.002, _hash),
}


def amount(title: str) -> int:
    """Return the argument with which a function of `WORK` takes its seconds on this machine."""
    seconds, act = WORK[title]
    start = time.process_time()
    act(32 * MIB)
    return int(32 * MIB * seconds / (time.process_time() - start))


def _worked(plan: Plan) -> Iterator[Figures]:
    """Read an epoch on one core, with an empty cache at first, and work on each sample."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    title, count = plan["work"]
    dataset, act = WAYS[plan["way"]][1](plan), WORK[title][1]
    yield {}
    start, samples = time.perf_counter(), 0
    for _ in dataset:
        act(count)
        samples += 1
    seconds = time.perf_counter() - start
    costs = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu = sum(each.ru_utime + each.ru_stime for each in costs)
    yield {"seconds": seconds, "cpu_seconds": cpu, "samples": samples}


def _epochs(plan: Plan) -> Iterator[Figures]:
    """Read two epochs of a pipeline in one step, with an empty cache at first."""
    dataset = WAYS[plan["way"]][1](plan)
    time.sleep(_BEFORE_THE_FIRST)
    yield {}
    figures: Figures = {}
    for name in ("cold", "warm"):
        samples, first, start = 0, 0.0, time.perf_counter()
        for _ in dataset:
            samples += 1
            first = first or time.perf_counter() - start
        seconds = time.perf_counter() - start
        figures[name] = {"seconds": seconds, "first": first, "samples": samples}
    yield figures


def _read(plan: Plan) -> Iterator[Figures]:
    """Read one shard to its end, in each of two steps."""
    opener = _opener(plan)
    time.sleep(_BEFORE_THE_FIRST)
    yield {}
    for _ in range(2):
        start = time.perf_counter()
        with opener() as stream:
            while stream.read(MIB):
                pass
        yield {"start": start, "end": time.perf_counter()}


def _opener(plan: Plan) -> Callable[[], BinaryIO]:
    """Return a function that opens the first shard in the way of the plan."""
    if plan["way"] == "shardcache":
        cache, url = _cache(plan), _s3(plan)[0]
        cache.prepare(url)
        return lambda: cache.open(url)
    if plan["way"] == "wds-filecache":
        from webdataset.cache import FileCache

        filecache = FileCache(plan["cache"])
        return lambda: open(filecache.get_file(_curl(plan)[0]), "rb")
    from webdataset import gopen

    return lambda: gopen(_curl(plan)[0])


def work(benchmark: Parent, _: int, plan: Plan) -> None:
    """Run the task of a plan: send once when it is prepared, and after each requested step."""
    os.environ.clear()
    os.environ.update(plan["environment"])
    tasks = {"epochs": _epochs, "read": _read, "work": _worked}
    for figures in tasks[plan["task"]](plan):
        benchmark.say(figures)
        benchmark.hear()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    next(iter(WAYS[given["way"]][1](given)))
    os._exit(0)  # without waiting for curl or for the rest of the shard
