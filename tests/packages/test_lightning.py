"""The callback of docs/integrations.md in a trainer of several processes; the page uses one."""

import csv
import re

from tests.support.tars import sample_tar
from tests.support.trainingtools import PAGE

SIZE = len(sample_tar(0))

CALLBACK = re.search(r"class CacheCallback.*?\n\n\n", PAGE.read_text(), re.DOTALL)[0]
PROGRAM = (
    f"""
import sys, time
import torch, webdataset as wds, pytorch_lightning, pytorch_lightning as lightning
import shardcache

{CALLBACK}"""
    + """

SHARDS = "s3://bucket/train-{0000..0003}.tar"

class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 10)
        self.seen = []

    def training_step(self, batch):
        keys, length, label = batch
        self.seen += keys
        return torch.nn.functional.cross_entropy(self.layer(length), label)

    def on_train_epoch_end(self):
        seen = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(seen, self.seen)
        if self.trainer.is_global_zero:
            print("seen", *sorted(sum(seen, [])), flush=True)
        self.seen = []
        # Workers write their counts with a delay of up to a second.
        size = 4 * int(sys.argv[1]) * (self.trainer.current_epoch + 1)
        for _ in range(600):
            if shardcache.Cache().stats().bytes_opened >= size:
                break
            time.sleep(0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

def decoded(sample):
    return sample["__key__"], torch.tensor([len(sample["txt"]) / 1000]), int(sample["cls"])

if __name__ == "__main__":
    cache = shardcache.Cache()
    dataset = wds.WebDataset(SHARDS, shardshuffle=100, nodesplitter=wds.split_by_node)
    loader = torch.utils.data.DataLoader(
        cache.attach(dataset).map(decoded), batch_size=6, num_workers=2, persistent_workers=True,
        multiprocessing_context="fork",  # spawned workers have no process group to split by
    )
    trainer = pytorch_lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp_spawn", log_every_n_steps=1,
        logger=pytorch_lightning.loggers.CSVLogger("logs", version=0),
        callbacks=[CacheCallback(cache, "s3://bucket/train-{0000..0001}.tar")],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )
    trainer.fit(Model(), loader)
"""
)


def test_ranks_prewarm_train_and_log(bench):
    printed = bench.run(PROGRAM, str(SIZE))
    seen = [line.split()[1:] for line in printed.splitlines() if line.startswith("seen ")]
    assert seen == [bench.data.keys] * 2
    assert bench.data.once()
    (log,) = bench.directory.glob("logs/**/metrics.csv")
    with log.open() as file:
        rows = [row for row in csv.DictReader(file) if row["shardcache/opens"]]
    assert len(rows) == 2
    names = ("opens", "bytes_opened", "bytes_origin")
    opens, read, fetched = (sum(float(row[f"shardcache/{name}"]) for row in rows) for name in names)
    # Two of four were prewarmed. The last second of the second epoch is not logged.
    assert fetched == 2 * SIZE
    assert 4 <= opens <= 8 and 4 * SIZE <= read <= 8 * SIZE
