"""Samplers in torch's and torchdata's loaders, and in spawned ranks of Lightning."""

import json

import pytest

#: The data set of the bucket, whose samples are their numbers, and the batches of two epochs.
COMMON = """
import copy, json, sys
import torch, webdataset as wds
from torch.utils.data import DataLoader
import shardcache

SPEC = "s3://bucket/train-{0000..0003}.tar"

def number(sample):
    return sample["__index__"], sample["__epoch__"]

def made(batch=4, **options):
    data = shardcache.TarDataset(SPEC, cache=shardcache.Cache(), stages=[wds.map(number)])
    return data, shardcache.ShardBatchSampler(data, batch, shuffle=2, seed=5, **options)

def numbers(batches):
    return [[[int(n) for n in ns], *map(int, set(es.tolist()))] for ns, es in batches]

def expected(sampler, *epochs):
    found = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        found.append([[[int(n) for n in batch], epoch] for batch in sampler])
    return found
"""

LOADERS = """
from torch.utils.data import default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

def loader(sampler, form, method, state=None):
    forms = {"batches": {"batch_sampler": sampler},
             "bulk": {"sampler": sampler, "batch_size": None, "collate_fn": default_collate}}
    workers = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    made = StatefulDataLoader(sampler.data, **forms[form], **(workers if method else {}))
    if state is not None:
        made.load_state_dict(state)
    return made

if __name__ == "__main__":
    form, method = sys.argv[1], sys.argv[2]
    sampler = made()[1]
    whole = expected(copy.deepcopy(sampler), 7, 8)
    sampler.set_epoch(7)
    first = loader(sampler, form, method)
    assert [numbers(first), numbers(first)] == whole  # twice in a row
    sampler.set_epoch(7)
    batches = iter(first)
    found = numbers([next(batches), next(batches)])
    state = json.loads(json.dumps(first.state_dict()))
    del batches, first
    second = loader(made()[1], form, method, state)
    assert [found + numbers(second), numbers(second)] == whole
    print("passed")
"""


@pytest.mark.parametrize("form", ["batches", "bulk"])
@pytest.mark.parametrize("method", ["", "fork", "spawn", "forkserver"])
def test_a_stateful_loader_continues_in_the_seventh_epoch(bench, form, method):
    assert bench.run(COMMON + LOADERS, form, method).endswith("passed\n")


LIGHTNING = """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch):
        step = self.trainer.world_size, self.current_epoch, batch[0].tolist()
        sys.stdout.write(json.dumps(step) + "\\n")  # at once: other ranks write as well
        sys.stdout.flush()
        return self.layer(batch[0].float().unsqueeze(1)).mean()

    def predict_step(self, batch):
        return batch[0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    data, sampler = made()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False,
        use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), DataLoader(data, batch_sampler=sampler))
    trainer = lightning.Trainer(accelerator="cpu", devices=1, logger=False,
                                enable_progress_bar=False)
    try:
        trainer.predict(Model(), DataLoader(data, batch_sampler=sampler))
    except shardcache.ConfigError as exn:
        print(json.dumps([0, 0, str(exn)]))
    ordered = shardcache.ShardBatchSampler(data, 4, shuffle=0)
    loader = DataLoader(data, sampler=ordered, batch_size=None,
                        collate_fn=torch.utils.data.default_collate)
    print(json.dumps([1, 0, sum(trainer.predict(Model(), loader), [])]))
"""


def test_lightning_spawns_ranks_and_predicts(bench):
    lines = bench.run(COMMON + LIGHTNING).splitlines()
    steps = [json.loads(line) for line in lines if line.startswith("[")]
    for epoch in 0, 1:
        seen = [n for world, each, part in steps for n in part if (world, each) == (2, epoch)]
        assert sorted(seen) == [*range(24)]
    assert [part for world, _, part in steps if world == 1] == [[*range(24)]]
    assert ["batch_size=None" in text for world, _, text in steps if world == 0] == [True]
