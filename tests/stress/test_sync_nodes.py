"""sync on two nodes: two mounts of a filesystem on which names of the other node appear late."""

import errno
import os

import pytest

from shardcache import sync
from tests.stress.fuse import Shim
from tests.support.storetools import PATIENCE, crowd, together

Nodes = tuple[Shim, Shim]


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


def test_a_cached_absence_is_bypassed(nodes):
    one, two = nodes
    two.set(negative=3600.0)
    path = two.root / "d" / "x"
    assert not path.exists()
    (one.root / "d").mkdir()
    (one.root / "d" / "x").write_text("there")
    assert not path.exists() and not path.parent.exists()
    sync.wait_for(path, timeout=PATIENCE)
    assert path.read_text() == "there"  # the wait has refreshed the kernel's cache


def meet(number, root):
    for _ in range(5):
        sync.barrier(dir=root, job="j", timeout=PATIENCE)


def trace(number, root):
    path = root / "traces" / "step-100"
    path.exists()  # as scripts do: the kernel caches the absence
    sync.makedirs(path)
    (path / f"rank-{number}.json").write_text("{}")


def save(number, root):
    places = [root / name for name in ("weights", "optimizer", "rng")]
    if number:
        sync.wait_for(places, by="rank 0", timeout=PATIENCE)
    for place in places:
        if number == 0:
            place.mkdir()
        (place / f"rank-{number}.pt").write_bytes(b"0")


@pytest.mark.parametrize(("act", "count", "files"), [(meet, 4, 1), (trace, 24, 1), (save, 8, 3)])
def test_ranks_on_two_nodes(nodes, act, count, files):
    """They meet, make one directory, or wait for the directories that rank 0 makes late."""
    for node in nodes:
        node.set(delay=0.3, negative=0.3)

    def work(number):
        os.environ |= {"RANK": str(number), "WORLD_SIZE": str(count)}
        act(number, nodes[number % 2].root)

    together(count, work)
    left = [path.stem for path in nodes[0].backing.rglob("rank-*")]
    assert sorted(left) == sorted([f"rank-{n}" for n in range(count)] * files)


def test_a_deleted_claim_shows_no_rank_half_a_file(nodes):
    def fetch(parent, number):
        root = nodes[number].root

        def work():
            parent.say("fetches")
            parent.hear()
            with sync.atomic_write(root / "shard.tar") as file:
                file.write(b"shard" * 2000)

        parent.hear()
        sync.once("shard.tar", work, dir=root, job="cache", timeout=PATIENCE)
        sync.wait_for(root / "shard.tar", timeout=PATIENCE)
        parent.say((root / "shard.tar").read_bytes() == b"shard" * 2000)

    with crowd(2, fetch) as (first, second):
        assert first.ask() == "fetches"
        (claim,) = nodes[0].root.rglob("claim.0")
        claim.unlink()
        second.tell()
        first.tell()
        assert first.hear() is True
        if (result := second.hear()) == "fetches":  # at worst, both ranks run the function
            result = second.ask()
        assert result is True
