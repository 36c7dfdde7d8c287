"""Train on random samples of WebDataset shards, and resume an epoch exactly where it stopped.

Run it under torchrun. After a crash, run it again, with any number of ranks that divides --batch:

    torchrun --nproc-per-node 2 examples/resume.py 's3://bucket/train-{0000..0003}.tar' \
        --dir /local/nvme/shards --checkpoint run.pt

With `--mix SHARDS WEIGHT`, batches also have samples of other shards, WEIGHT for each one of the
first. On several nodes, write an index file once (`shardcache index SPEC -o train.json`), and pass
it in place of the shards.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardcache

CLASSES = 10


def decoded(samples: Any) -> Any:
    """Turn the bytes of each sample into a name, a histogram and a class."""
    for sample in samples:
        text = torch.frombuffer(bytearray(sample["txt"]), dtype=torch.uint8)
        histogram = torch.bincount(text.long(), minlength=256) / len(text)
        yield sample["__key__"], histogram, int(sample["cls"]) % CLASSES


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shards", help="a specification of shards, or an index file")
    parser.add_argument("--mix", nargs=2, metavar=("SHARDS", "WEIGHT"), action="append", default=[])
    parser.add_argument("--dir", help="the cache; default: SHARDCACHE_DIR")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="workers of each rank's DataLoader")
    parser.add_argument("--batch", type=int, default=16, help="samples per batch, of all ranks")
    parser.add_argument("--checkpoint", type=Path, required=True, help="saved to, and resumed from")
    parser.add_argument("--every", type=int, default=5, help="batches between two checkpoints")
    parser.add_argument("--list", metavar="FILE", help="append epoch, batch and key of samples")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    cache = shardcache.Cache(options.dir)
    data = shardcache.TarDataset(options.shards, cache=cache, stages=[decoded])
    if options.mix:
        parts = {options.shards: (data, 1.0)}
        for shards, weight in options.mix:
            part = shardcache.TarDataset(shards, cache=cache, stages=[decoded])
            parts[shards] = part, float(weight)
        data = shardcache.Mixture(parts, samples=len(data))
    sampler = shardcache.ShardBatchSampler(data, options.batch)
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["data"])
    loader = torch.utils.data.DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=options.workers,
        # A fork does not copy the threads of CUDA and NCCL, so workers are spawned.
        multiprocessing_context="spawn" if options.workers else None,
        persistent_workers=options.workers > 0,
    )
    for epoch in range(sampler.epoch, options.epochs):
        sampler.set_epoch(epoch)  # the first time, it continues where the state says
        for batch, (keys, features, classes) in enumerate(loader, sampler.batch):
            if options.list:  # before the ranks exchange gradients, so before any checkpoint
                with open(options.list, "a") as file:
                    file.write("".join(f"{epoch} {batch} {key}\n" for key in keys))
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (batch + 1) % options.every == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                # The workers read ahead, so say which batch was trained last.
                state["data"] = sampler.state_dict(batch=batch + 1)
                complete = options.checkpoint.with_suffix(".new")
                torch.save(state, complete)
                complete.replace(options.checkpoint)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} is complete, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
