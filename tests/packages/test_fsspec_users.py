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


HUGGING_FACE = """
import torch
from datasets import load_dataset

files = [f"shardcache://bucket/train-{n:04d}.tar::s3://" for n in range(4)]
samples = load_dataset("webdataset", data_files=files, split="train", streaming=True)
loader = torch.utils.data.DataLoader(samples, batch_size=None, num_workers=2)
for epoch in range(2):
    print(*sorted(sample["__key__"] for sample in loader))
"""


def test_hugging_face_streams_in_workers(bench: Bench) -> None:
    printed = bench.run(HUGGING_FACE).splitlines()
    assert printed == [" ".join(bench.data.keys)] * 2
    assert bench.data.once()


FINGERPRINT = """
from datasets import load_dataset_builder

builder = load_dataset_builder("csv", data_files="shardcache://bucket/table.csv::s3://")
print(builder.cache_dir.rpartition("csv/")[2])
builder.download_and_prepare()
"""


def test_hugging_faces_own_cache_knows_a_file_whether_ours_has_it_or_not(bench: Bench) -> None:
    cold, warm = bench.run(FINGERPRINT), bench.run(FINGERPRINT)
    assert cold == warm
    assert bench.fetched() == {"table.csv"}
