"""SIGKILL at random moments of one training run, which goes on with other numbers of ranks."""

import itertools
import os
import random
import time
from collections import defaultdict

import pytest
import torch

from tests.support.trainingtools import EXAMPLES, DataSet, run_ranks

KILLS = 4 if os.environ.get("FUZZ", "1") == "1" else 25
SHARDS, SAMPLES, BATCH = 32, 640, 16
#: Seconds in which a run begins to train.
START = 8


@pytest.mark.timeout(3600)
def test_an_epoch_with_many_kills_is_exact(s3, bucket, s3_environment, proxy, tmp_path):
    seed = int(os.environ.get("SEED", time.time()))
    print(f"SEED={seed}")
    chance = random.Random(seed)
    data = DataSet(s3, bucket, proxy, SHARDS, SAMPLES)
    batches = len(data.keys) // BATCH
    saved, listed = tmp_path / "run.pt", tmp_path / "listed"
    command = [str(EXAMPLES / "resume.py"), data.spec, "--epochs", "1", "--every", "5"]
    command += ["--batch", f"{BATCH}", "--list", str(listed), "--checkpoint", str(saved)]
    command += ["--dir", str(tmp_path / "cache"), "--workers"]

    def position():
        """Return how many batches are trained, says the checkpoint."""
        state = torch.load(saved)["data"] if saved.exists() else {"epoch": 0, "taken": 0}
        return state["epoch"] * batches + state["taken"] // BATCH

    def train(most):
        """Train ``most`` batches or a few more, or the rest; returns the keys of each batch."""
        listed.write_text("")
        # One run in five is killed at its start.
        end = time.monotonic() + (chance.uniform(0, START) if chance.random() < 0.2 else 3600)
        size = most * BATCH * len("0 1000 0000-00000\n")

        def over():
            return listed.stat().st_size > size or time.monotonic() > end

        ranks, workers = chance.choice([1, 2, 4]), chance.choice([0, 2])
        run_ranks(ranks, [*command, f"{workers}"], over if most else None, SHARDCACHE_MIN_FREE="0")
        found = defaultdict(list)
        for line in listed.read_text().splitlines():
            _, number, key = line.split()
            found[int(number)].append(key)
        print(f"{ranks} ranks, {workers} workers: {[*found][:1]} to {[*found][-1:]}")
        return found

    kept = []
    for left in range(KILLS, -1, -1):
        assert position() == len(kept)
        trained = train(
            chance.randint(1, (batches - len(kept)) * 3 // (2 * left + 2)) if left else 0
        )
        assert min(trained, default=len(kept)) == len(kept)
        kept += [trained.pop(number) for number in range(len(kept), position())]
        # The last batches are not in the checkpoint, but no sample may be in them twice.
        seen = [*itertools.chain(*kept, *trained.values())]
        assert len(seen) == len(set(seen))
        assert all(len(keys) == BATCH for keys in kept)
    assert data.complete(itertools.chain(*kept))
    print(f"{sum(data.fetches.values())} downloads of {SHARDS} shards")
