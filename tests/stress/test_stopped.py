"""SIGSTOP and SIGKILL in the middle of a fetch: others go on; who wakes late does no harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress.conftest import FAST, SLOW, Far
from tests.support.storetools import Child, Parent, forked, wait_until

STALE = 1.0


def fetches(parent: Parent, far: Far, root: Path) -> None:
    with far.cache(root) as cache, cache.pinned(far.url()) as path:
        parent.say([far.right(path.read_bytes(), version=version) for version in (0, 1)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def stopped(far: Far, root: Path) -> Iterator[Child]:
    """A process that was stopped in the middle of its fetch."""
    far.rate(SLOW)
    with forked(fetches, far, root) as child:
        wait_until(lambda: [p for p in root.glob("v1/partial/*/*.tar") if p.stat().st_size])
        os.kill(child.pid, signal.SIGSTOP)
        far.rate(FAST)
        yield child


def published(root: Path) -> list[int]:
    return sorted(path.stat().st_ino for path in root.glob("v1/objects/*/*/*/*.tar"))


def wake(child: Child) -> list[bool]:
    os.kill(child.pid, signal.SIGCONT)
    found: list[bool] = child.hear()
    return found


def test_a_stopped_fetch_is_passed_by_and_does_no_harm_when_it_goes_on(
    far: Far, root: Path, stopped: Child
) -> None:
    with far.cache(root, stale_after=STALE) as cache:
        assert far.read(cache)
        before = published(root)
        assert len(before) == 1
        assert wake(stopped) == [True, False]
        assert published(root) == before  # the same inode: nothing was overwritten
        assert far.read(cache) and far.fetches() == 2
        stopped.wait()
        cache.clean(orphans=True, limits=False)
    assert not list(root.glob("v1/partial/*"))


def test_who_wakes_with_an_older_version_does_not_bring_it_back(
    far: Far, root: Path, stopped: Child
) -> None:
    far.replace()
    with far.cache(root, stale_after=STALE) as cache, cache.pinned(far.url()) as path:
        assert far.right(path.read_bytes(), version=1)
    assert wake(stopped) == [False, True]
    with far.cache(root) as cache, cache.open(far.url()) as stream:
        assert far.right(stream.read(), version=1)


def test_a_reader_that_may_not_wait_so_long_streams(far: Far, root: Path, stopped: Child) -> None:
    with far.cache(root, stale_after=600, lock_timeout=1) as cache:
        assert far.read(cache)
        assert cache.path(far.url()) is None
    assert wake(stopped) == [True, False]


#: One rank: an epoch through a DataLoader, begun anew when a worker has died, as a launcher would.
RANK = """
import json, sys, warnings
import torch, webdataset as wds
import shardcache

warnings.simplefilter("ignore")
directory, urls = sys.argv[1], json.loads(sys.argv[2])
cache = shardcache.Cache(directory, min_free=0, stale_after=600)

def epoch():
    dataset = cache.attach(wds.WebDataset(urls, shardshuffle=False))
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
    return sorted(sample["__url__"] for sample in loader)

died = 0
while True:
    try:
        seen = epoch()
        break
    except RuntimeError as exn:
        assert "exited unexpectedly" in str(exn) or "killed by signal" in str(exn), exn
        died += 1
print(json.dumps([seen, died]))
"""


def test_the_peers_of_a_killed_worker_go_on_and_lose_nothing(far: Far, root: Path) -> None:
    urls = [far.url(number) for number in range(4)]
    far.rate(SLOW)
    command = [sys.executable, "-c", RANK, str(root), json.dumps(urls)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        wait_until(lambda: [p for p in root.glob("v1/partial/*/*.tar") if p.stat().st_size])
        workers = Path(f"/proc/{ranks[0].pid}/task/{ranks[0].pid}/children")
        os.kill(int(wait_until(lambda: workers.read_text().split())[0]), signal.SIGKILL)
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
