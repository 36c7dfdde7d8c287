"""sync on two nodes: two mounts of a filesystem on which names of the other node appear late."""

import errno
import os

import pytest

from shardcache import sync
from tests.support.storetools import PATIENCE, together


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOENT])
def test_makedirs_checks_a_wrong_reply_to_mkdir(nodes, number, done):
    rule = nodes[0].fail("mkdir", "*", error=number, done=done, times=3)
    assert sync.makedirs(nodes[0].root / "a" / "b").is_dir()
    assert nodes[0].struck(rule) >= 2


def test_a_directory_that_never_appears_is_an_error(nodes):
    one, two = nodes
    two.set(delay=3600.0)
    (one.root / "a").mkdir()
    with pytest.raises(sync.WaitTimeoutError, match="to see .*, which was created") as caught:
        sync.makedirs(two.root / "a", timeout=0.3)
    assert caught.value.waited >= 0.3


def meet(number, root):
    for _ in range(5):
        sync.barrier(dir=root, job="j", timeout=PATIENCE)


def trace(number, root):
    path = root / "traces" / "step-100"
    path.exists()  # as scripts do: the kernel caches the absence
    sync.makedirs(path)
    (path / f"rank-{number}.json").write_text("{}")


def save(number, root):
    places = [root / "step" / name for name in ("weights", "optimizer", "rng")]
    if number:
        sync.wait_for(places, by="rank 0", timeout=PATIENCE)
    for place in places:
        if number == 0:
            place.mkdir(parents=True)
        (place / f"rank-{number}.pt").write_bytes(b"0")


def fetch(number, root):
    def work():
        for lock in root.rglob("claim.0"):  # a user or an epilog cleans up
            lock.unlink()
        with sync.atomic_write(root / "shard.tar") as file:
            file.write(b"shard" * 2000)

    sync.once("shard.tar", work, dir=root, job="cache", timeout=PATIENCE)
    sync.wait_for(root / "shard.tar", timeout=PATIENCE)
    assert (root / "shard.tar").read_bytes() == b"shard" * 2000
    (root / f"rank-{number}").touch()


@pytest.mark.parametrize(
    ("act", "count", "files"), [(meet, 4, 1), (trace, 24, 1), (save, 8, 3), (fetch, 8, 1)]
)
def test_ranks_on_two_nodes(nodes, act, count, files):
    """They meet, make one directory, wait for those that rank 0 makes late, or fetch one file.

    The kernel caches the absence of a name for longer than any rank waits.
    """
    for node in nodes:
        node.set(delay=0.3, negative=3600.0)

    def work(number):
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(count)}
        act(number, nodes[number % 2].root)

    together(count, work)
    left = [path.stem for path in nodes[0].backing.rglob("rank-*")]
    assert sorted(left) == sorted([f"rank-{n}" for n in range(count)] * files)
