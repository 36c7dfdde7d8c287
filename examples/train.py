"""Train a toy classifier on WebDataset shards, read through a cache on the node.

Run it alone, or as one of several ranks:

    python examples/train.py 's3://bucket/train-{0000..0003}.tar' --dir /local/nvme/shards
    torchrun --nproc-per-node 2 examples/train.py 's3://bucket/train-{0000..0003}.tar' ...

Two lines in `loader` set up shardcache. The rest is an ordinary training loop.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
import webdataset as wds

import shardcache

CLASSES = 10


def decoded(sample: dict[str, Any]) -> tuple[str, torch.Tensor, int]:
    """Return the name of a sample, the histogram of its bytes, and its class."""
    text = torch.frombuffer(bytearray(sample["txt"]), dtype=torch.uint8)
    return sample["__key__"], torch.bincount(text.long(), minlength=256) / len(text), _class(sample)


def _class(sample: dict[str, Any]) -> int:
    return int(sample["cls"]) % CLASSES


def loader(spec: str, directory: str | None, workers: int, batch: int) -> Any:
    """Return a loader of batches from this rank's share of the samples."""
    cache = shardcache.Cache(directory)  # one per process; workers get a pickled copy
    dataset = wds.DataPipeline(
        wds.SimpleShardList(spec),
        wds.split_by_node,
        wds.split_by_worker,
        wds.shuffle(100),  # shards; a new order in every epoch
        wds.tarfile_to_samples(),
        wds.shuffle(1000),  # samples
        wds.map(decoded),
        wds.batched(batch),
    )
    cache.attach(dataset)
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        # A fork does not copy the threads of CUDA and NCCL, so workers are spawned.
        multiprocessing_context="spawn" if workers else None,
        persistent_workers=workers > 0,
    )


def train(batches: Any, model: torch.nn.Module) -> tuple[list[str], float]:
    """Train for one epoch, and return the names of its samples and the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []
    total = 0.0
    # Ranks may have different numbers of samples. With `join`, a rank that ends early waits for
    # the others.
    ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    with model.join() if ddp else contextlib.nullcontext():
        for keys, features, classes in batches:
            loss = torch.nn.functional.cross_entropy(model(features), torch.as_tensor(classes))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += keys
            total += loss.item() * len(keys)
    return seen, total / max(1, len(seen))


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shards", help="a WebDataset specification")
    parser.add_argument("--dir", help="the cache; default: SHARDCACHE_DIR")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="workers of each rank's DataLoader")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--list", metavar="FILE", help="append epoch and name of each sample")
    options = parser.parse_args()

    model: torch.nn.Module = torch.nn.Linear(256, CLASSES)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    rank = os.environ.get("RANK", "0")
    batches = loader(options.shards, options.dir, options.workers, options.batch)
    for epoch in range(1, options.epochs + 1):
        seen, loss = train(batches, model)
        print(f"epoch {epoch}: rank {rank} read {len(seen)} samples, loss {loss:.3f}")
        if options.list:
            with open(options.list, "a") as file:
                file.write("".join(f"{epoch} {key}\n" for key in seen))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
