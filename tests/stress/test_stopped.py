"""SIGSTOP and SIGKILL in the middle of a fetch: others go on; who wakes late does no harm.

More of it is in tests/test_processes.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.stress.conftest import FAST, SLOW, Far, under_way
from tests.support.storetools import Parent, children, forked, wait_until


def fetches(parent: Parent, far: Far, root: Path) -> None:
    with far.cache(root) as cache, cache.pinned(far.url()) as path:
        parent.say([far.right(path.read_bytes(), version=version) for version in (0, 1)])


def test_who_wakes_with_an_older_version_does_not_bring_it_back(far: Far, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    far.rate(SLOW)
    with forked(fetches, far, root) as stopped:
        wait_until(lambda: under_way(root))
        stopped.kill(signal.SIGSTOP)
        far.rate(FAST)
        far.replace()
        with far.cache(root, stale_after=1.0) as cache, cache.pinned(far.url()) as path:
            assert far.right(path.read_bytes(), version=1)
        stopped.kill(signal.SIGCONT)
        assert stopped.hear() == [False, True]
    with far.cache(root) as cache, cache.open(far.url()) as stream:
        assert far.right(stream.read(), version=1)


#: One rank: an epoch through a DataLoader, begun anew when a worker has died, as a launcher would.
RANK = """
import json, sys, warnings
import torch, webdataset as wds
import shardcache

warnings.simplefilter("ignore")
directory, urls = sys.argv[1], json.loads(sys.argv[2])
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


def test_the_peers_of_a_killed_worker_go_on_and_lose_nothing(far: Far, tmp_path: Path) -> None:
    root, urls = tmp_path / "cache", [far.url(number) for number in range(4)]
    far.rate(SLOW)
    command = [sys.executable, "-c", RANK, str(root), json.dumps(urls)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        wait_until(lambda: under_way(root))
        os.kill(min(wait_until(lambda: children(ranks[0].pid))), signal.SIGKILL)
        far.rate(FAST)
        # Nobody waits for the dead as long as a live holder may be silent.
        found = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [seen for seen, _ in found] == [sorted(urls)] * 2
    assert [died for _, died in found] == [1, 0]
    assert not list(root.glob("v1/partial/*"))
