"""Train with a WebDataset pipeline, and resume an epoch exactly where it stopped.

Run it under torchrun. After a crash, run the same command again:

    torchrun --nproc-per-node 2 examples/resume_pipeline.py 's3://bucket/train-{0000..0003}.tar' \
        --dir /local/nvme/shards --checkpoint run.pt

The checkpoint has the position of each rank, so a job needs the same ranks and workers again. With
`with_epoch`, all ranks have the same number of batches, which DistributedDataParallel requires.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import webdataset as wds

import shardcache

CLASSES = 10


def decoded(sample: dict[str, Any]) -> Any:
    """Turn the bytes of a sample into a name, a histogram and a class."""
    text = torch.frombuffer(bytearray(sample["txt"]), dtype=torch.uint8)
    histogram = torch.bincount(text.long(), minlength=256) / len(text)
    return sample["__key__"], histogram, int(sample["cls"]) % CLASSES


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shards", help="a specification of shards")
    parser.add_argument("--dir", help="the cache; default: SHARDCACHE_DIR")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="workers of each rank's DataLoader")
    parser.add_argument("--samples", type=int, default=48, help="samples of a worker's epoch")
    parser.add_argument("--checkpoint", type=Path, required=True, help="saved to, and resumed from")
    parser.add_argument("--every", type=int, default=5, help="batches between two checkpoints")
    parser.add_argument("--list", metavar="FILE", help="append rank, epoch and keys of each batch")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    urls = wds.SimpleShardList(options.shards)
    stages = wds.split_by_node, wds.split_by_worker, wds.shuffle(100), wds.tarfile_to_samples()
    pipeline = wds.DataPipeline(urls, *stages, wds.shuffle(5000), wds.map(decoded))
    pipeline = shardcache.Cache(options.dir).attach(pipeline, resume=True)
    pipeline = pipeline.with_epoch(options.samples)
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        pipeline.load_state_dict(saved["data"][rank])
    loader = torch.utils.data.DataLoader(pipeline, batch_size=8, num_workers=options.workers)
    step, loss = 0, torch.tensor(torch.nan)  # if this epoch has no batches left
    for epoch in range(pipeline.epoch, options.epochs):
        pipeline.set_epoch(epoch)  # the first time, it continues where the state says
        for keys, features, classes in pipeline.track(loader):
            if options.list:  # before the ranks exchange gradients, so before any checkpoint
                with open(options.list, "a") as file:
                    file.write(f"{rank} {epoch} {' '.join(keys)}\n")
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % options.every == 0:
                data: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(data, pipeline.state_dict())
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                if rank == 0:
                    complete = options.checkpoint.with_suffix(".new")
                    torch.save({**state, "data": data}, complete)
                    complete.replace(options.checkpoint)
        if rank == 0:
            print(f"epoch {epoch} is complete, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
