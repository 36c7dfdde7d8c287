"""Two nodes train on one S3 server: each shard crosses the network once, or once per epoch."""

import multiprocessing
import time
from collections import Counter

import pytest
from torch.utils.data import DataLoader

from shardcache import Cache, ShardBatchSampler
from tests.support.storetools import room, together
from tests.support.tars import sample_tar
from tests.support.trainingtools import keys

COUNTS = [20, 20, 0, 20, 1, *[20] * 19]  # 441 samples: the last one fills no batch
WINDOW, EPOCHS = 4, 2


@pytest.fixture
def open_data(s3, bucket, s3_environment, indexed):
    for number, count in enumerate(COUNTS):
        s3.put(bucket, f"{number}.tar", sample_tar(number, count))
    return lambda cache: indexed(cache, bucket, COUNTS)


@pytest.mark.parametrize("spare", [len(COUNTS), 4])
def test_two_nodes_download_each_shard_once(
    open_data, bucket, proxy, tmp_path, set_variables, spare
):
    size = (WINDOW + spare) * room(tmp_path, len(sample_tar(0, 20)))
    barrier = multiprocessing.get_context("fork").Barrier(4)

    def rank(number):
        set_variables(RANK=number, WORLD_SIZE=4, LOCAL_RANK=number % 2, LOCAL_WORLD_SIZE=2)
        epochs = []
        with Cache(tmp_path / f"node-{number // 2}", max_size=size) as cache:
            data = open_data(cache)
            sampler = ShardBatchSampler(data, 8, shuffle=WINDOW)
            loader = DataLoader(data, batch_sampler=sampler, num_workers=1, collate_fn=keys)
            for _ in range(EPOCHS):
                epochs.append([])
                for batch in loader:
                    epochs[-1] += batch
                    time.sleep(0.01)
                    barrier.wait()  # as if the gradients were exchanged
        return epochs

    proxy.reset()
    results = together(4, rank)
    for epoch in range(EPOCHS):
        seen = Counter(key for epochs in results for key in epochs[epoch])
        assert len(seen) == seen.total() == 440
    with Cache(tmp_path / "node-0") as cache:
        order = ShardBatchSampler(open_data(cache), 8, lanes=2).order
    lanes = [set(order.lane(number, 0).shards(len(COUNTS))) for number in (0, 1)]
    assert len(lanes[0] & lanes[1]) <= 1
    once = Counter(f"{bucket}/{shard}.tar" for lane in lanes for shard in lane)
    fetches = proxy.fetches()
    if spare > 4:
        assert fetches == once
    else:
        assert all(fetches[path] <= EPOCHS * once[path] for path in once), fetches
