"""Ray: every node fills its cache, then Ray Data reads through the caches.

    python examples/ray_train.py 's3://bucket/train-{0000..2047}.tar' --dir /local/nvme/shards

`--address auto` joins a running cluster; without it, Ray starts one on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import fsspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import shardcache
from shardcache.prewarm import expand


@ray.remote(num_cpus=0)
def prewarm(directory: str, urls: list[str]) -> tuple[int, int]:
    """On the node where this runs: shards that are there now, and shards that are not."""
    with shardcache.Cache(directory) as cache:
        report = cache.prewarm(urls, best_effort=True)
    there = report.cached + report.fetched + report.coalesced + report.linked
    return there, len(urls) - there


def prewarm_nodes(directory: str, urls: list[str]) -> None:
    """One task pinned to each node."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    tasks = [
        prewarm.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(directory, urls)
        for node in nodes
    ]
    for node, (there, absent) in zip(nodes, ray.get(tasks), strict=True):
        print(f"{node['NodeManagerHostname']}: {there} shards cached, {absent} not")


def batches(directory: str, urls: list[str], size: int) -> Iterator[dict[str, Any]]:
    """Samples, in batches, read through the cache of whichever node reads them."""
    through = fsspec.filesystem("shardcache", target_protocol="s3", dir=directory)
    dataset = ray.data.read_webdataset(urls, filesystem=through, override_num_blocks=len(urls))
    yield from dataset.iter_batches(batch_size=size)


def main() -> None:
    """Parse the command line and read."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shards", help="a WebDataset specification")
    parser.add_argument("--dir", required=True, help="the cache, the same path on every node")
    parser.add_argument("--address", help="of a running cluster")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    ray.init(address=options.address, log_to_driver=False, include_dashboard=False)
    urls = expand([options.shards])
    prewarm_nodes(options.dir, urls)
    for epoch in range(1, options.epochs + 1):
        keys = [
            key
            for batch in batches(options.dir, urls, options.batch)
            for key in batch["__key__"].tolist()
        ]
        print(f"epoch {epoch}: {len(keys)} samples, {len(set(keys))} different")
    ray.shutdown()


if __name__ == "__main__":
    main()
