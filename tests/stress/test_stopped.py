"""SIGKILL for a worker of a DataLoader during a download; see also tests/test_processes.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import shardcache
from tests.stress.conftest import FAST, SLOW, under_way
from tests.support.storetools import wait_until

#: Reads an epoch through a DataLoader, and starts again when a worker has died, as a launcher does.
RANK = """
import json, sys, torch, shardcache, webdataset as wds

directory, *urls = sys.argv[1:]
cache = shardcache.Cache(directory, min_free=0, stale_after=600)
died = 0
while True:
    try:
        dataset = cache.attach(wds.WebDataset(urls, shardshuffle=False))
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
        seen = sorted(sample["__url__"] for sample in loader)
        break
    except RuntimeError as exn:
        assert "exited unexpectedly" in str(exn) or "killed by signal" in str(exn), exn
        died += 1
print(json.dumps([seen, died]))
"""


def test_the_peers_of_a_killed_worker_continue(far, tmp_path):
    root, urls = tmp_path / "cache", [far.url(number) for number in range(4)]
    far.rate.value = SLOW
    command = [sys.executable, "-W", "ignore", "-c", RANK, root, *urls]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        wait_until(lambda: under_way(root))
        workers = Path(f"/proc/{ranks[0].pid}/task/{ranks[0].pid}/children")
        os.kill(int(wait_until(workers.read_text).split()[0]), signal.SIGKILL)
        far.rate.value = FAST
        found = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [seen for seen, _ in found] == [sorted(urls)] * 2
    assert [died for _, died in found] == [1, 0]
    with shardcache.Cache(root) as cache:
        cache.clean(orphans=True)  # a shard of one block is not resumed
    assert not list(root.glob("v1/partial/*"))
