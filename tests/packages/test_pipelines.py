"""WebDataset pipelines in torchdata's StatefulDataLoader, also after SIGKILL."""

import os
import random

import pytest

from tests.support.trainingtools import run_ranks

KILLS = 3 if os.environ.get("FUZZ", "1") == "1" else 25
EPOCHS = 3

COMMON = """
import json, os, sys, warnings
from itertools import islice
from pathlib import Path
import webdataset as wds
from torchdata.stateful_dataloader import StatefulDataLoader
import shardcache

warnings.simplefilter("ignore")

def keys(batch):
    return batch

def loader(method, persistent, state=None, epoch=0):
    parts = wds.SimpleShardList("s3://bucket/train-{0000..0003}.tar"), wds.split_by_node
    parts = *parts, wds.split_by_worker, wds.shuffle(9), wds.tarfile_to_samples(), wds.shuffle(20)
    dataset = wds.DataPipeline(*parts, wds.to_tuple("__key__"), wds.batched(2, None))
    dataset = shardcache.Cache().attach(dataset, resume=True)
    dataset.set_epoch(epoch)
    workers = {"num_workers": 2, "multiprocessing_context": method}
    made = StatefulDataLoader(dataset, batch_size=None, collate_fn=keys,
                              **(workers if method else {}), persistent_workers=persistent,
                              snapshot_every_n_steps=4 if persistent else 1)
    if state is not None:
        made.load_state_dict(state)
    return made
"""

EVERYWHERE = """
if __name__ == "__main__":
    form = sys.argv[1], sys.argv[2] == "persistent"
    first = loader(*form, epoch=7)
    whole = [list(first) for _ in range(3)]  # twice in a row, and once more
    assert len({str(epoch) for epoch in whole}) == 3
    assert all(len({key for batch in epoch for key, in batch}) == 24 for epoch in whole)
    for count in (0, 1, 4, 11, len(whole[0])) if form[0] in ("", "fork") else (4,):
        first = loader(*form, epoch=7)
        batches = iter(first)
        found = list(islice(batches, count))
        state = json.loads(json.dumps(first.state_dict()))
        del first, batches
        second = loader(*form, state)
        found += islice(batches := iter(second), 3 if count < 9 else 0)  # and a second resume
        state = second.state_dict()
        del second, batches
        third = loader(*form, state)
        assert [found + list(third), list(third), list(third)] == whole, count
    first = loader(*form, epoch=7)
    assert list(first) == whole[0]
    found = list(islice(batches := iter(first), 3))
    state = first.state_dict()
    del first, batches
    second = loader(*form, state)
    assert [found + list(second), list(second)] == whole[1:]
    print("passed")
"""


@pytest.mark.parametrize(
    "form",
    [("", ""), ("fork", ""), ("fork", "persistent"), ("spawn", ""), ("forkserver", "persistent")],
)
def test_a_stateful_loader_continues_a_pipeline(bench, form):
    assert bench.run(COMMON + EVERYWHERE, *form).endswith("passed\n")


TRAIN = """
def train(name, state=None):
    made, trained = loader("fork", False, state and state["data"]), Path(name)
    count = state["count"] if state else 0
    lines = trained.read_text().splitlines(keepends=True)[:count] if state else []
    trained.write_text("".join(lines))
    for epoch in range(state["epoch"] if state else 0, EPOCHS):
        for batch in made:
            with trained.open("a") as file:
                file.write(f"{epoch} {batch}\\n")
            count += 1
            if count % 5 == 0:
                saved = {"data": made.state_dict(), "count": count, "epoch": epoch}
                Path(name + ".new").write_text(json.dumps(saved))
                Path(name + ".new").replace(name + ".json")

if __name__ == "__main__":
    name = sys.argv[1] + os.environ["RANK"]
    saved = Path(name + ".json")
    train(name, json.loads(saved.read_text()) if saved.exists() else None)
"""


def test_the_order_survives_kills(bench):
    program = bench.directory / "program.py"
    program.write_text(COMMON + f"EPOCHS = {EPOCHS}\n" + TRAIN)
    whole, broken = [[bench.directory / f"{name}{rank}" for rank in "01"] for name in ("a", "b")]
    run_ranks(2, [str(program), str(whole[0])[:-1]])
    lines = len(whole[0].read_text().splitlines())

    def reached(count):
        return broken[0].exists() and len(broken[0].read_text().splitlines()) >= count

    for number in range(KILLS):
        for path in broken:
            path.unlink(missing_ok=True)
            path.with_suffix(".json").unlink(missing_ok=True)
        moment = random.Random(number).randrange(1, lines - 2)
        command = [str(program), str(broken[0])[:-1]]
        run_ranks(2, command, kill_when=lambda: reached(moment))  # noqa: B023
        run_ranks(2, command)
        assert [path.read_text() for path in broken] == [path.read_text() for path in whole]
