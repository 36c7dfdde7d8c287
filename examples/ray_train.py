"""Fill the cache of every Ray node, then read through the caches with Ray Data.

    python examples/ray_train.py 's3://bucket/train-{0000..2047}.tar' --dir /local/nvme/shards

`--address auto` joins a running cluster; without it, Ray starts one on this machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import fsspec
import ray

from shardcache import expand
from shardcache.prewarm.ray import prewarm_nodes


def batches(directory: str, urls: list[str], size: int) -> Iterator[dict[str, Any]]:
    """Yield batches of samples, which each node reads through its own cache."""
    through = fsspec.filesystem("shardcache", target_protocol="s3", dir=directory)
    dataset = ray.data.read_webdataset(urls, filesystem=through, override_num_blocks=len(urls))
    yield from dataset.iter_batches(batch_size=size)


def main() -> None:
    """Parse the command line, fill the caches and read."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shards", help="a WebDataset specification")
    parser.add_argument("--dir", required=True, help="the cache, the same path on every node")
    parser.add_argument("--address", help="address of a running cluster")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()

    ray.init(address=options.address, log_to_driver=False, include_dashboard=False)
    urls = expand([options.shards])
    for node in prewarm_nodes(options.shards, settings={"dir": options.dir}, best_effort=True):
        report = node.report
        cached = report.cached + report.fetched + report.coalesced + report.linked
        print(f"{node.name}: {cached} shards cached, {len(urls) - cached} not")
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
