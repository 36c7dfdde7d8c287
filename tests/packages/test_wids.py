"""wids' random access through the cache: its workers share one copy, and it downloads nothing."""

from __future__ import annotations

import pytest

from tests.packages.conftest import Bench

PROGRAM = """
import sys
import torch, wids
import shardcache

def key(sample):
    return sample["__key__"]

if __name__ == "__main__":
    cache = shardcache.Cache()
    names = shardcache.wids.LocalNames(cache, "links")
    shards = [{"url": f"s3://bucket/train-{n:04d}.tar", "nsamples": 6} for n in range(4)]
    dataset = wids.ShardListDataset(shards, localname=names, transformations=[key], lru_size=2)
    sampler = wids.ShardedSampler(dataset, shufflefirst=True)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context=sys.argv[1],
        persistent_workers=True,
    )
    for epoch in range(2):
        print(*sorted(key for batch in loader for key in batch))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_every_sample_and_share_one_fetch_per_shard(method: str, bench: Bench) -> None:
    # Without a shell's PATH, its own `aws s3 cp` cannot run.
    environment = {"PATH": "/nonexistent"}
    printed = bench.run(PROGRAM, method, **environment).splitlines()
    assert printed == [" ".join(bench.data.keys)] * 2
    assert bench.data.once()
    links = [p for p in (bench.directory / "links").iterdir() if p.suffix != ".lock"]
    assert len(links) == 4
    for link in links:
        assert bench.cache in link.readlink().parents
    assert bench.stored() == {f"train-{n:04d}.tar": 1 for n in range(4)}
