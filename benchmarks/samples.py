"""Measure random access to samples, and resuming an epoch: ``python -m benchmarks.samples``.

All shards are cached on a RAM disk, so the figures are those of the code. Peers read the same
files: wids, WebDataset in sequence, and for resuming also Hugging Face datasets. A peer that is not
installed has a row that says so.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import fsspec

from benchmarks.buckets import PREFIX, sample_archive
from benchmarks.results import (
    Figures,
    Row,
    arguments_of,
    begun,
    middle,
    picked,
    ratio,
    resident_memory,
    rounds,
    save,
    say,
    section,
)
from shardcache import Cache, ShardBatchSampler, TarDataset
from shardcache.dataset.index import OpenShard, write_index_file

BATCH = 64
#: Samples in the buffers of WebDataset and of Hugging Face datasets.
_BUFFER = 1000
_FRACTIONS = (0.1, 0.5, 0.9)
_NOT_INSTALLED = "not installed"


def _cached(home: Path, name: str, shards: int, samples: int, size: int, **form: Any) -> Path:
    """Fetch new shards into the cache of ``home``, and return their index file.

    The shards also have names in the folder ``name``, because wids writes lock files there.
    """
    memory, counts = fsspec.filesystem("memory"), {}
    (home / name).mkdir()
    with Cache(home / "cache", min_free=0) as cache:
        for number in range(shards):
            url = f"memory://bench/{name}-{number:05d}.tar"
            memory.pipe(url, sample_archive(number * samples, samples, size, **form))
            (home / name / f"{number:05d}.tar").symlink_to(cache.fetch(url).data)
            memory.rm(url)
            counts[url] = samples
    write_index_file(home / f"{name}.json", counts)
    return home / f"{name}.json"


def _wids(index: Path, samples: int, lru_size: int) -> Any:
    import wids

    shards = [{"url": path, "nsamples": samples} for path in _paths(index)]
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        data = wids.ShardListDataset(
            shards, lru_size=lru_size, localname=lambda url: url, transformations=[]
        )
    data.check_cache_misses = lambda: None  # it prints to stdout
    return data


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _seconds(act: Callable[[], Any]) -> float:
    """Return the processor time of a call. It waits for nothing, and other programs may run."""
    start = time.process_time()
    act()
    return time.process_time() - start


def _read(home: Path, quick: bool, repeats: int) -> Row:
    """Read samples at random, in microseconds per sample."""
    shards, samples, reads = (20, 10, 500) if quick else (1000, 45, 20_000)
    forms = {}
    with Cache(home / "cache", min_free=0) as cache:
        for title, pax in (("plain headers", False), ("headers of ShardWriter", True)):
            index = _cached(home, f"read{pax:d}", shards, samples, 10_000, pax=pax)
            data = TarDataset(index, cache=cache)
            forms[title] = _read_form(data, index, samples, reads, repeats)
    return {"shards": shards, "samples": samples, "microseconds": forms}


def _read_form(
    data: TarDataset, index: Path, samples: int, reads: int, repeats: int
) -> dict[str, list[float]]:
    places = []
    for shard in data.shards:
        fd = os.open(data.cache.path(str(shard)), os.O_RDONLY)
        opened = OpenShard(data.cache, shard)
        places += [(fd, stop - at, at) for at, stop in pairwise(opened.offsets)]
    picks = random.Random(0).choices(range(len(data)), k=reads)
    batches = [picks[n : n + BATCH] for n in range(0, reads, BATCH)]

    def each(read: Callable[[Any], Any], items: Sequence[Any], count: int) -> float:
        return _seconds(lambda: [None for item in items if not read(item)]) / count * 1e6

    contestants: Row = {
        "`os.pread` of the same bytes": lambda: each(lambda n: os.pread(*places[n]), picks, reads),
        "TarDataset, `data[i]`": lambda: each(data.__getitem__, picks, reads),
        f"TarDataset, batches of {BATCH}": lambda: each(data.__getitems__, batches, reads),
    }
    if _has("wids"):
        few = picks[: max(100, reads // 20)]  # most of these reads open a shard again
        for title, size, some in (("10, its default", 10, few), ("all", len(data.shards), picks)):
            peer = _wids(index, samples, size)
            assert peer[picks[0]][".bin"].read() == data[picks[0]]["bin"]
            contestants[f"wids, LRU of {title}"] = partial(each, peer.__getitem__, some, len(some))
    figures = rounds(contestants, repeats)
    for fd in {place[0] for place in places}:
        os.close(fd)
    return figures


def _epoch_index(home: Path, quick: bool) -> Path:
    shards, samples = (4, 160) if quick else (20, 512)
    return _cached(home, "epoch", shards, samples, 100_000)


def _epoch(home: Path, quick: bool, repeats: int) -> Row:
    """Read epochs through a DataLoader with four workers."""
    import webdataset as wds
    from torch.utils.data import DataLoader

    cache = Cache(home / "cache", min_free=0)
    data = TarDataset(_epoch_index(home, quick), cache=cache)
    pipeline = cache.attach(wds.WebDataset(list(map(str, data.shards)), shardshuffle=False))
    costs = Figures()  # microseconds of all processes per sample

    def read(name: str, loader: Callable[..., Any]) -> float:
        """Return samples per second, of processes that are started and ended, too."""
        before, start = sum(os.times()[:4]), time.perf_counter()
        count = sum(len(numbers) for _, numbers in loader(num_workers=4, collate_fn=stacked))
        if count != len(data):
            raise RuntimeError(f"{name}: {count} of {len(data)} samples")
        costs.setdefault(name, []).append((sum(os.times()[:4]) - before) / count * 1e6)
        return count / (time.perf_counter() - start)

    sampler, ordered = ShardBatchSampler(data, BATCH), ShardBatchSampler(data, BATCH, shuffle=0)
    loaders = {
        "WebDataset in sequence, `cache.attach`": partial(DataLoader, pipeline, BATCH),
        "TarDataset, ShardBatchSampler": partial(DataLoader, data, batch_sampler=sampler),
        "the same with `shuffle=0`": partial(DataLoader, data, batch_sampler=ordered),
    }
    figures = rounds({n: partial(read, n, loader) for n, loader in loaders.items()}, repeats)
    cache.close()
    costs = {name: values[1:] for name, values in costs.items()}
    return {"samples": len(data), "per_second": figures, "microseconds": costs}


class Reader(NamedTuple):
    """A way of reading, ready to begin."""

    batches: Callable[[], Iterable[Sequence[Any]]]  #: begins, and returns the samples' numbers
    save: Callable[[int], Any]  #: returns the state after a number of batches
    load: Callable[[Any], Any]


def stacked(samples: Sequence[dict[str, Any]]) -> tuple[Any, list[int]]:
    """Collate samples: a tensor of their bytes, and their numbers."""
    import numpy as np
    import torch

    data = np.stack([np.frombuffer(sample["bin"], np.uint8) for sample in samples])
    return torch.from_numpy(data), [int(sample["cls"]) for sample in samples]


def _tar_dataset(index: Path) -> Reader:
    from torch.utils.data import DataLoader

    data = TarDataset(index, cache=Cache(index.parent / "cache", min_free=0))
    sampler = ShardBatchSampler(data, BATCH, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=stacked)
    return Reader(
        lambda: (numbers for _, numbers in loader),
        lambda count: sampler.state_dict(batch=count),
        sampler.load_state_dict,
    )


def _webdataset(index: Path) -> Reader:
    import webdataset as wds

    pipeline = wds.WebDataset(_paths(index), shardshuffle=False)
    pipeline = pipeline.compose(wds.detshuffle(_BUFFER, seed=1))
    skipped = list[int]()
    return Reader(
        lambda: _numbers(itertools.islice(pipeline, BATCH * sum(skipped), None)),
        lambda count: count,
        skipped.append,
    )


def _pipeline(index: Path) -> Reader:
    dataset = _shuffled(index, _BUFFER, resume=True)
    return Reader(
        lambda: _numbers(dataset), lambda count: dataset.state_dict(), dataset.load_state_dict
    )


def _shuffled(index: Path, buffer: int, *, resume: bool) -> Any:
    """Return a pipeline over cached shards, whose samples go through a buffer."""
    import webdataset as wds

    urls = [shard["url"] for shard in json.loads(index.read_bytes())["shardlist"]]
    dataset = wds.WebDataset(urls, shardshuffle=False, seed=1)
    cache = Cache(index.parent / "cache", min_free=0)
    return cache.attach(dataset, resume=resume).shuffle(buffer)


def _numbers(samples: Iterable[dict[str, Any]]) -> Iterator[list[int]]:
    """Yield the numbers of each batch of samples that are read in this process."""
    left = iter(samples)
    while some := list(itertools.islice(left, BATCH)):
        yield stacked(some)[1]


def _paths(index: Path) -> list[str]:
    return [str(path) for path in sorted(index.with_suffix("").iterdir())]


def _datasets(index: Path, *, shuffle: bool = False) -> Reader:
    from datasets import load_dataset

    files = {"train": _paths(index)}
    data = load_dataset("webdataset", data_files=files, split="train", streaming=True)
    if shuffle:
        data = data.shuffle(seed=1, buffer_size=_BUFFER)
    return Reader(lambda: _numbers(data), lambda count: data.state_dict(), data.load_state_dict)


#: way -> title, the module that it needs, and a function that makes a reader of an index file.
WAYS: dict[str, tuple[str, str, Callable[[Path], Reader]]] = {
    "shardcache": ("TarDataset, ShardBatchSampler", "shardcache", _tar_dataset),
    "pipeline": (f"`attach(resume=True)`, `shuffle({_BUFFER})`", "shardcache", _pipeline),
    "webdataset": (f"WebDataset, `detshuffle({_BUFFER})`, skips", "webdataset", _webdataset),
    "datasets": ("HF datasets, `state_dict`, no shuffle", "datasets", _datasets),
    "datasets-shuffle": (
        f"HF datasets, `state_dict`, `shuffle({_BUFFER})`",
        "datasets",
        partial(_datasets, shuffle=True),
    ),
}


def _ready(way: str, index: Path) -> Reader:
    for module in ("numpy", "torch", "webdataset"):  # so that no figure includes an import
        importlib.import_module(module)
    return WAYS[way][2](index)


def full_epoch(way: str, index: Path, fractions: Sequence[float]) -> Any:
    """Read an epoch; return the numbers of its samples in order, and how many were read before each
    state, with the state.
    """
    reader = _ready(way, index)
    total = sum(shard["nsamples"] for shard in json.loads(index.read_bytes())["shardlist"])
    at = {int(total // BATCH * fraction) for fraction in fractions}
    order, states = [], []
    for number, numbers in enumerate(reader.batches(), 1):
        order += map(int, numbers)
        if number in at:
            states.append((len(order), reader.save(number)))
    return order, states


def rest_of_epoch(way: str, index: Path, state: Any) -> tuple[float, list[int]]:
    """Read on from a state; return the seconds to the first batch, and the samples in order."""
    reader = _ready(way, index)
    start = time.perf_counter()
    reader.load(state)
    batches = iter(reader.batches())
    order = [*next(batches, [])]  # a shuffle that loses its buffer may leave nothing
    seconds = time.perf_counter() - start
    for numbers in batches:
        order += numbers
    return seconds, list(map(int, order))


def _alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _resume(home: Path, quick: bool, repeats: int) -> Row:
    """Resume in fresh processes, in seconds from the state to the first batch."""
    index = _epoch_index(home, quick)
    ways = [way for way, (_, module, _) in WAYS.items() if _has(module)]
    rows: Row = {title: None for title, _, _ in WAYS.values()}
    rows |= {WAYS[way][0]: {str(fraction): [] for fraction in _FRACTIONS} for way in ways}
    saved = {way: _alone(full_epoch, way, index, _FRACTIONS) for way in ways}
    for _, way in product(range(repeats), ways):
        title, (order, states) = WAYS[way][0], saved[way]
        for fraction, (taken, state) in zip(_FRACTIONS, states, strict=True):
            seconds, rest = _alone(rest_of_epoch, way, index, state)
            seen = set(order[:taken])
            run = {
                "seconds": seconds,
                "repeated": len(seen.intersection(rest)) + len(rest) - len(set(rest)),
                "missing": len(set(order) - seen - set(rest)),
                "same": rest == order[taken:],
            }
            say(f"  {title}, {fraction:.0%}: {run}")
            rows[title][str(fraction)].append(run)
    return rows


def _position(home: Path, shards: int, state: Any = None) -> Any:
    """Return a state in the middle of an epoch of 10,000 samples per shard; or, with a state, the
    seconds and the bytes of memory that it takes to load it and to get the first batch.
    """
    index, lanes = home / f"{shards}.json", 64
    write_index_file(index, {f"s3://lab/train-{n:06d}.tar": 10_000 for n in range(shards)})
    with Cache(home / "scale", min_free=0, prefetch=0) as cache:
        data = TarDataset(index, cache=cache)
        sampler = ShardBatchSampler(data, 64 * lanes, lanes=lanes, rank=31, world_size=64)
        if state is None:
            return sampler.state_dict(batch=len(sampler) // 2)
        before, start = resident_memory("VmRSS"), time.perf_counter()
        sampler.load_state_dict(state)
        assert len(next(iter(sampler))) == 64
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "bytes": resident_memory("VmHWM") - before}


def _scale(home: Path, quick: bool, repeats: int) -> Row:
    """Find a position among very many samples, with nothing but their counts."""
    shards = 1000 if quick else 100_000
    state = _alone(_position, home, shards)
    runs = [_alone(_position, home, shards, state) for _ in range(repeats)]
    return {"shards": shards, "samples": shards * 10_000, "runs": runs}


def _buffered(index: Path, buffer: int, resume: bool, total: int) -> Row:
    """Read an epoch through a buffer. The class of a sample is its hundredth of the data set."""
    dataset = _shuffled(index, buffer, resume=resume)
    at, states = {int(total * fraction) for fraction in _FRACTIONS}, []
    batch, classes, count = set[int](), list[int](), 0
    before, start = resident_memory("VmRSS"), time.process_time()
    for count, sample in enumerate(dataset, 1):
        batch.add(int(sample["cls"]) * 100 // total)
        if count % 256 == 0:
            classes.append(len(batch))
            batch.clear()
        if resume and count in at:
            states.append(dataset.state_dict())
    seconds = time.process_time() - start
    if count != total:
        raise RuntimeError(f"{count} of {total} samples")
    facts = {"cost": seconds / count * 1e6, "bytes": resident_memory("VmHWM") - before}
    return {**facts, "classes": mean(classes), "states": states}


def _drawn_again(index: Path, buffer: int, state: Row) -> float:
    """Return the seconds from a state to the first sample."""
    dataset = _shuffled(index, buffer, resume=True)
    start = time.perf_counter()
    dataset.load_state_dict(state)
    next(iter(dataset))
    return time.perf_counter() - start


def _places(home: Path, quick: bool, repeats: int) -> Row:
    """Read epochs through buffers of places and of samples, and resume in the middle of one."""
    shards, samples = (20, 500) if quick else (100, 10_000)
    index, total = _cached(home, "places", shards, samples, 10_000), shards * samples
    # A buffer of all samples would take 10 GB.
    buffers = {True: (1, _BUFFER, total), False: (1, _BUFFER, total // 20)}
    ways = [(buffer, lazy) for lazy, sizes in buffers.items() for buffer in sizes]
    runs: Row = {f"{buffer:,} {'places' if lazy else 'samples'}": [] for buffer, lazy in ways}
    resumed: Row = {str(fraction): [] for fraction in _FRACTIONS}
    for _, (title, (buffer, lazy)) in product(range(repeats), zip(runs, ways, strict=True)):
        run = _alone(_buffered, index, buffer, lazy, total)
        states = run.pop("states")
        say(f"  {title}: {run}")
        runs[title].append(run)
        if buffer == total:
            for found, state in zip(resumed.values(), states, strict=True):
                found.append(_alone(_drawn_again, index, buffer, state))
    return {"samples": total, "runs": runs, "resumed": resumed}


# -- tables ------------------------------------------------------------------------------------


def _read_report(facts: Row) -> str:
    tables = []
    for title, figures in facts["microseconds"].items():
        _, ours, *_ = figures.values()
        rows = []
        for name, values in figures.items():
            rows.append([name, *middle(values), ratio(values, ours)])
        if not any("wids" in name for name in figures):
            rows.append(["wids", _NOT_INSTALLED, "", ""])
        heads = ["", "us per sample, median", "min - max", "x `data[i]`"]
        kind = f"{facts['shards']:,} shards of {facts['samples']} samples, 10 KB in two files"
        tables.append(section(f"One sample of {kind}, {title}", heads, rows))
    return "\n\n".join(tables)


def _epoch_report(facts: Row) -> str:
    figures: Figures = facts["per_second"]
    first, rows = next(iter(figures.values())), []
    for name, values in figures.items():
        cost = median(facts["microseconds"][name])
        rows.append([name, *middle(values, ",.0f"), ratio(values, first), f"{cost:.0f}"])
    heads = ["", "samples per second, median", "min - max", "x WebDataset"]
    heads += ["processor time per sample, us"]
    title = f"An epoch of {facts['samples']:,} samples of 100 KB, DataLoader with 4 workers"
    return section(title, heads, rows)


def _resume_report(rows: Row) -> str:
    lines = []
    for title, row in rows.items():
        if row is None:
            lines.append([title, *[_NOT_INSTALLED] * len(_FRACTIONS), ""])
            continue
        runs = [run for some in row.values() for run in some]
        worst = max(runs, key=lambda run: run["missing"] + run["repeated"])
        rest = f"no: {worst['missing']:,} missing, {worst['repeated']:,} repeated"
        if not worst["missing"] + worst["repeated"]:
            rest = "yes" if all(run["same"] for run in runs) else "yes, in another order"
        cells = [middle([run["seconds"] for run in some], ".3f")[0] for some in row.values()]
        lines.append([title, *cells, rest])
    heads = ["", *(f"at {fraction:.0%}, s" for fraction in _FRACTIONS)]
    heads += ["are the other samples exactly the rest?"]
    return section("From the saved state to the first batch, in one process", heads, lines)


def _scale_report(facts: Row) -> str:
    cells = middle([run["seconds"] for run in facts["runs"]], ".2f")
    cells += [f"{median(run['bytes'] for run in facts['runs']) / 1e6:.0f}"]
    title = f"{facts['samples']:,} samples in {facts['shards']:,} shards, 64 lanes and ranks"
    heads = ["seconds, median", "min - max", "MB of memory"]
    return section(f"From the saved state to the first indices: {title}", heads, [cells])


def _places_report(facts: Row) -> str:
    runs: Row = facts["runs"]
    reference = [run["cost"] for run in runs[f"{_BUFFER:,} places"]]
    rows = []
    for title, some in runs.items():
        cells = [f"{median(run['bytes'] for run in some) / 1e6:.0f}"]
        cells += middle([run["cost"] for run in some])
        speed = ratio(reference, [run["cost"] for run in some])
        rows.append([title, *cells, speed, f"{median(run['classes'] for run in some):.0f}"])
    kind = f"{facts['samples']:,} samples of 10 KB, sorted by 100 classes"
    heads = ["buffer of `shuffle`", "MB of memory", "processor time per sample, us", "min - max"]
    heads += [f"x the speed with {_BUFFER:,} places", "classes in 256 samples"]
    cells = [middle(seconds, ".2f")[0] for seconds in facts["resumed"].values()]
    again = [f"at {fraction:.0%}, s" for fraction in _FRACTIONS]
    drawn = section(f"From the saved state to the first sample of {kind}", again, [cells])
    return section(f"Shuffling {kind}, cached", heads, rows) + "\n\n" + drawn


#: part -> the functions that measure it and make its tables.
_PARTS: dict[str, tuple[Callable[[Path, bool, int], Row], Callable[[Row], str]]] = {
    "read": (_read, _read_report),
    "epoch": (_epoch, _epoch_report),
    "resume": (_resume, _resume_report),
    "scale": (_scale, _scale_report),
    "places": (_places, _places_report),
}


def report(facts: Row) -> str:
    """Return the tables of a result in Markdown."""
    return "\n\n".join(make(facts[name]) for name, (_, make) in _PARTS.items() if name in facts)


def summary(facts: Row) -> list[str]:
    """Return the main ratios as a sentence."""
    read = facts["read"]["microseconds"]["plain headers"]
    ours, peer = read["TarDataset, `data[i]`"], read["wids, LRU of 10, its default"]
    resumed, skipped = (
        max(
            median(run["seconds"] for run in runs)
            for runs in facts["resume"][WAYS[way][0]].values()
        )
        for way in ("shardcache", "webdataset")
    )
    return [
        f"`TarDataset` reads a random sample in {median(ours):.0f} us, wids in "
        f"{median(peer):.0f} us (it keeps 10 shards open); to resume an epoch, `TarDataset` takes "
        f"up to {resumed:.2f} s, and WebDataset, which reads and skips the samples before, "
        f"{skipped:.1f} s."
    ]


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of(__doc__, repeats=5)
    (parts,) = picked(arguments.only, _PARTS)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.ram) as ram:
        facts = begun(arguments, ram=Path(ram))
        for part in parts:
            say(part)
            with tempfile.TemporaryDirectory(dir=ram) as name:
                facts[part] = _PARTS[part][0](Path(name), arguments.quick, arguments.repeats)
            save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
