"""Readers on fsspec in workers: forked ones too, which must not touch their parent's clients."""

from __future__ import annotations

import pytest

from tests.packages.conftest import Bench

ARROW = """
import sys
import fsspec, pyarrow.dataset, torch

filesystem, path = fsspec.url_to_fs("shardcache::s3://bucket/table")

class Tables(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        one = pyarrow.dataset.dataset(f"{path}/part-{worker}.parquet", filesystem=filesystem)
        yield from one.to_table(columns=["a"])["a"].to_pylist()

if __name__ == "__main__":
    filesystem.ls(path)  # the parent's client has a thread now, which no child has
    loader = torch.utils.data.DataLoader(
        Tables(), batch_size=None, num_workers=2, multiprocessing_context=sys.argv[1]
    )
    for epoch in range(2):
        print(sum(1 for row in loader))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_arrow_reads_in_workers(method: str, bench: Bench) -> None:
    assert bench.run(ARROW, method) == "2000\n2000\n"
    assert bench.fetched() == {"table/part-0.parquet", "table/part-1.parquet"}
