"""The callback in a trainer of several processes; docs/integrations.md has one in one process."""

from __future__ import annotations

import csv

from tests.packages.conftest import Bench
from tests.support.tars import sample_tar as shard

PROGRAM = """
import importlib, sys, time
import torch, webdataset as wds
import shardcache

package = importlib.import_module(sys.argv[1])
SHARDS = "s3://bucket/train-{0000..0003}.tar"

class Model(package.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 10)
        self.seen = []

    def training_step(self, batch):
        keys, length, label = batch
        self.seen += keys
        return torch.nn.functional.cross_entropy(self.layer(length), label)

    def on_train_epoch_end(self):
        everybodys = [None] * self.trainer.world_size
        if self.trainer.world_size > 1:
            torch.distributed.all_gather_object(everybodys, self.seen)
        else:
            everybodys = [self.seen]
        if self.trainer.is_global_zero:
            print("seen", *sorted(key for keys in everybodys for key in keys), flush=True)
        self.seen = []
        time.sleep(1.5)  # so that the next epoch's first hit is written down at once

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def decoded(sample):
    return sample["__key__"], torch.tensor([len(sample["txt"]) / 1000]), int(sample["cls"])

if __name__ == "__main__":
    cache = shardcache.Cache()
    dataset = wds.WebDataset(SHARDS, shardshuffle=100, nodesplitter=wds.split_by_node)
    loader = torch.utils.data.DataLoader(
        cache.attach(dataset).map(decoded), batch_size=6, num_workers=2, persistent_workers=True,
        multiprocessing_context=sys.argv[4],
    )
    Callback = shardcache.lightning.ShardCacheCallback
    logger = importlib.import_module(sys.argv[1] + ".loggers").CSVLogger("logs", version=0)
    trainer = package.Trainer(
        max_epochs=2, accelerator="cpu", logger=logger, devices=int(sys.argv[2]),
        strategy=sys.argv[3], log_every_n_steps=1,
        callbacks=[Callback(cache, SHARDS, prewarm=2, makedirs=["traces/epoch"])],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )
    trainer.fit(Model(), loader)
"""


def test_ranks_prewarm_train_and_log(bench: Bench) -> None:
    # Forked: spawned workers know no process group, by which WebDataset splits.
    printed = bench.run(PROGRAM, "pytorch_lightning", "2", "ddp_spawn", "fork")
    seen = [line.split()[1:] for line in printed.splitlines() if line.startswith("seen ")]
    assert seen == [bench.data.keys] * 2
    assert bench.data.once()
    assert (bench.directory / "traces" / "epoch").is_dir()
    (log,) = bench.directory.glob("logs/**/metrics.csv")
    with log.open() as file:
        rows = [row for row in csv.DictReader(file) if row["shardcache/opens"]]
    first, second = ({k: float(v) for k, v in row.items() if v} for row in rows)
    # Two of four were there before. What a worker has to tell of its last second, it tells when
    # it opens its next shard: an open may be logged with the next epoch, a fetch is not.
    assert first["shardcache/bytes_fetched"] == len(shard(2)) + len(shard(3))
    assert second["shardcache/bytes_fetched"] == 0
    opens = [row["shardcache/opens"] for row in (first, second)]
    misses = [row["shardcache/opens"] * (1 - row["shardcache/hit_rate"]) for row in (first, second)]
    assert 1 <= opens[0] <= 4 and 1 <= opens[1] <= 8 - opens[0]
    assert round(sum(misses)) <= 2
    assert second["shardcache/bytes_read"] == opens[1] * len(shard(0))
