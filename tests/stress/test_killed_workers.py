"""A DataLoader worker is killed in the middle of a fetch: its peers go on, and lose nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardcache.cli.demo import S3Server
from shardcache.layout import Layout
from shardcache.locks.flock import Holder, read_holder
from shardcache.store.digest import BLOCK
from shardcache.store.partial import read_progress
from tests.support.proxy import Proxy
from tests.support.storetools import PATIENCE, wait_until
from tests.support.tars import make_tar

SHARDS, MEMBERS = 4, 16
STALE_AFTER = 600

#: One rank: an epoch through a DataLoader, begun anew when a worker has died, as a launcher
#: would. Tells the samples of the epoch that ended, and how many did not.
RANK = """
import json, sys, warnings
import torch, webdataset as wds
import shardcache

warnings.simplefilter("ignore")
directory, spec = sys.argv[1:3]

def epoch(cache):
    dataset = cache.attach(wds.WebDataset(spec, shardshuffle=False))
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True,
        multiprocessing_context=sys.argv[4],
    )
    return sorted(sample["__key__"] for sample in loader)

if __name__ == "__main__":
    cache = shardcache.Cache(directory, min_free=0, stale_after=int(sys.argv[3]), connections=1)
    print("ready", flush=True)
    sys.stdin.readline()
    died = 0
    while True:
        try:
            seen = epoch(cache)
            break
        except RuntimeError as exn:
            # The latter where the signal of its death strikes outside of the wait for data.
            assert "exited unexpectedly" in str(exn) or "killed by signal" in str(exn), exn
            died += 1
    print(json.dumps([seen, died]))
"""


# Spawned workers, whose start takes ten times as long: tests/integrations/test_workers.py.
@pytest.mark.parametrize("method", ["fork"])
def test_the_peers_of_a_killed_worker_go_on_at_once(
    method: str,
    s3: S3Server,
    bucket: str,
    proxy: Proxy,
    s3_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    shards = [make_tar(seed, MEMBERS, BLOCK // 2) for seed in range(SHARDS)]
    for seed, data in enumerate(shards):
        s3.put(bucket, f"{seed}.tar", data)
    layout = Layout.of_root(tmp_path / "cache")
    command = [sys.executable, "-c", RANK, str(tmp_path / "cache")]
    ranks = [
        subprocess.Popen(
            [*command, f"s3://{bucket}/{{0..{SHARDS - 1}}}.tar", str(STALE_AFTER), method],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdin is not None
            assert rank.stdout.readline() == "ready\n"
        proxy.reset()
        # All of them may be on their way at once: then one has a block, and none is complete.
        proxy.pause(after=SHARDS * (BLOCK + 64_000))
        for rank in ranks:
            rank.stdin.write("\n")  # type: ignore[union-attr]
            rank.stdin.flush()  # type: ignore[union-attr]
        victim = wait_until(lambda: fetching(layout))
        assert victim.pid not in [rank.pid for rank in ranks]
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.monotonic()
        proxy.resume()
        found = [json.loads(rank.communicate(timeout=2 * PATIENCE)[0]) for rank in ranks]
        # Nobody waited for it: neither as long as a holder must be silent to be passed by,
        # nor as long as the locks of the dead would have to expire.
        assert time.monotonic() - killed < 2 * PATIENCE < STALE_AFTER
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    expected = sorted(f"{seed:04d}-{n:05d}" for seed in range(SHARDS) for n in range(MEMBERS))
    assert [seen for seen, _ in found] == [expected] * 2
    assert sorted(died for _, died in found) == [0, 1]  # one rank had it, the other never knew
    received = sum(t.body_bytes for t in proxy.summary().values())
    assert received < 1.5 * sum(map(len, shards))  # what it had fetched was taken over
    assert os.listdir(layout.partial) == []


def fetching(layout: Layout) -> Holder | None:
    """A process that is in the middle of a fetch."""
    for path in layout.locks.glob("*/*.lock"):
        holder = read_holder(path)
        if holder is not None and holder.partial is not None:
            progress = read_progress(layout.partial / holder.partial)
            if progress is not None and progress.written >= BLOCK:
                return holder
    return None
