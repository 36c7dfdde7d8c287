"""The ways to resume an epoch that `benchmarks.samples` compares.

Each way reads the samples of one index file in batches, saves its state in the middle of an epoch,
and reads on from a state in another process.
"""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BATCH = 64
#: Samples in the buffers of WebDataset and of Hugging Face datasets.
_BUFFER = 1000


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

    from shardcache import Cache, ShardBatchSampler, TarDataset

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

    paths = [str(path) for path in sorted((index.parent / index.stem).iterdir())]
    pipeline = wds.WebDataset(paths, shardshuffle=False).compose(wds.detshuffle(_BUFFER, seed=1))
    skipped = []

    def batches() -> Iterator[list[int]]:
        samples = itertools.islice(pipeline, BATCH * sum(skipped), None)
        return (numbers for _, numbers in _Batches(samples))

    return Reader(batches, lambda count: count, skipped.append)


class _Batches:
    """The batches of samples that are read in this process."""

    def __init__(self, samples: Iterable[dict[str, Any]]) -> None:
        self._samples = iter(samples)

    def __iter__(self) -> Iterator[Any]:
        while some := list(itertools.islice(self._samples, BATCH)):
            yield stacked(some)


def _datasets(index: Path, *, shuffle: bool) -> Reader:
    from datasets import load_dataset

    paths = [str(path) for path in sorted((index.parent / index.stem).iterdir())]
    data = load_dataset("webdataset", data_files={"train": paths}, split="train", streaming=True)
    if shuffle:
        data = data.shuffle(seed=1, buffer_size=_BUFFER)
    return Reader(
        lambda: (numbers for _, numbers in _Batches(data)),
        lambda count: data.state_dict(),
        data.load_state_dict,
    )


#: way -> title, the module that it needs, and a function that makes a reader of an index file.
WAYS: dict[str, tuple[str, str, Callable[[Path], Reader]]] = {
    "shardcache": ("TarDataset, ShardBatchSampler", "shardcache", _tar_dataset),
    "webdataset": (f"WebDataset, `detshuffle({_BUFFER})`, skips", "webdataset", _webdataset),
    "datasets": (
        "HF datasets, `state_dict`, no shuffle",
        "datasets",
        lambda index: _datasets(index, shuffle=False),
    ),
    "datasets-shuffle": (
        f"HF datasets, `state_dict`, `shuffle({_BUFFER})`",
        "datasets",
        lambda index: _datasets(index, shuffle=True),
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
