"""The programs of docs/integrations.md that resume an epoch."""

import itertools

import pytest

from tests.support.tars import tar_of
from tests.support.trainingtools import blocks

SHARDS, SAMPLES = 4, 24
EVERY = 2  # batches between two checkpoints

#: Writes the labels of each trained batch to a file of its rank, and ends the process at a batch,
#: without any cleaning up. The label of a sample is its number.
RECORDER = """
import os, torch
entropy, trained = torch.nn.functional.cross_entropy, 0

def recorded(outputs, labels):
    global trained
    if trained == {stop}:
        os._exit(0)
    trained += 1
    with open(f"trained-{{os.environ['RANK']}}", "a") as file:
        print(*labels.tolist(), file=file)
    return entropy(outputs, labels % 10)

torch.nn.functional.cross_entropy = recorded
"""
PROGRAMS = {block.section: block for block in blocks() if block.resumes}


@pytest.fixture
def train(bench, s3):
    """Run programs one after the other, each with a number of ranks, up to a batch.

    Returns the samples of each batch that was trained before the checkpoint at which the next
    program resumed, which are those of three epochs, and what the last program printed.
    """
    size = SAMPLES // SHARDS
    for shard in range(SHARDS):
        numbers = range(shard * size, (shard + 1) * size)
        members = [(f"{n:05d}.{name}", b"%d" % n) for n in numbers for name in ("txt", "cls")]
        s3.put("bucket", f"train-{shard:04d}.tar", tar_of(members))

    def train(*runs):
        kept = []
        for code, ranks, stop in runs:
            printed = bench.run(RECORDER.format(stop=stop) + code, ranks=ranks)
            parts = []
            for rank in range(ranks):
                path = bench.directory / f"trained-{rank}"
                parts.append([line.split() for line in path.read_text().splitlines()])
                path.unlink()
            kept = kept[: len(kept) // EVERY * EVERY]  # what the last checkpoint knows
            kept += [[int(n) for part in batch for n in part] for batch in zip(*parts, strict=True)]
        for epoch in kept[:6], kept[6:12], kept[12:]:
            assert sorted(itertools.chain(*epoch)) == list(range(SAMPLES))
        return kept, printed

    yield train
    assert bench.data.once()


@pytest.mark.parametrize("block", PROGRAMS.values(), ids=str)
def test_epochs_are_exact_with_other_ranks_and_workers(block, train, bench):
    code = block.here(bench.directory)
    # torchdata requires the same number of workers.
    other = code if block.section == "torchdata" else code.replace("num_workers=2", "num_workers=0")
    # Stops in the middle of the second and of the third epoch.
    batches, printed = train((other, 2, 9), (code, 1, 7), (code, 2, None))
    block.check(printed)
    assert len({tuple(batch) for batch in batches}) == 18  # the order differs in each epoch


def test_accelerate_may_split_batches_of_all_ranks(train, bench):
    code = PROGRAMS["accelerate"].here(bench.directory)
    for old, new in (
        ("model, optimizer = acc", "model, optimizer, loader = acc"),
        ("prepare(model, optimizer)", "prepare(model, optimizer, loader)"),
        ("global_batch=4)", "global_batch=4, rank=0, world_size=1)"),
        ("sampler.set_epoch", "loader.set_epoch"),
        ("Accelerator(cpu=True)", "Accelerator(cpu=True, dataloader_config=splitting)"),
        (
            "from accelerate import Accelerator\n",
            "from accelerate import Accelerator, DataLoaderConfiguration\n"
            "splitting = DataLoaderConfiguration(split_batches=True)\n",
        ),
    ):
        assert old in code
        code = code.replace(old, new)
    train((code, 2, 9), (code, 1, 7), (code, 2, None))
