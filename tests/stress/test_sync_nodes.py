"""sync on two nodes: two mounts of a filesystem that shows late what the other one made."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardcache import sync
from shardcache.sync.paths import find
from tests.stress.fuse.shim import Shim
from tests.support.storetools import PATIENCE, Parent, crowd, forked, wait_until
from tests.sync.test_once import at_work


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOENT])
def test_a_lie_about_a_mkdir_is_not_believed(
    nodes: tuple[Shim, Shim], number: int, done: bool
) -> None:
    rule = nodes[0].fail("mkdir", "*", error=number, done=done, times=3)
    assert sync.makedirs(nodes[0].root / "a" / "b").is_dir()
    assert nodes[0].struck(rule) >= 2


def test_one_that_never_comes_into_sight_ends_in_an_error_that_says_so(
    nodes: tuple[Shim, Shim],
) -> None:
    one, two = nodes
    two.set(delay=3600.0)
    (one.root / "a").mkdir()
    with pytest.raises(sync.WaitTimeoutError, match="to see .*, which was made") as caught:
        sync.makedirs(two.root / "a", timeout=0.3)
    assert caught.value.waited >= 0.3


def test_a_remembered_absence_does_not_count(nodes: tuple[Shim, Shim]) -> None:
    one, two = nodes
    two.set(negative=3600.0)
    path = two.root / "d" / "x"
    assert not path.exists()
    (one.root / "d").mkdir()
    (one.root / "d" / "x").write_text("there")
    assert not path.exists() and not path.parent.exists()  # for as long as an hour
    assert find(path) is not None
    assert path.read_text() == "there"  # and from now on for everybody on this node


# -- once and barrier ------------------------------------------------------------------------


def test_a_runner_is_dead_when_its_lease_is_over(nodes: tuple[Shim, Shim]) -> None:
    root = nodes[0].root
    with forked(at_work, root, 1.5, "first") as first:
        assert first.hear() == "at work"
        with forked(at_work, root, 1.5, "second") as second:
            beat = wait_until(lambda: next(root.rglob("claim.0.beat"), None))
            beats: set[str] = set()
            wait_until(lambda: beats.add(beat.read_text()) or len(beats) >= 3)
            first.kill()
            assert second.hear() == "at work"
            second.tell()
            assert second.hear() == "second"


def test_a_runner_that_was_taken_for_dead_gets_the_result_that_counts(
    nodes: tuple[Shim, Shim],
) -> None:
    root = nodes[0].root
    with forked(at_work, root, 1.0, "first") as first:
        assert first.hear() == "at work"
        first.kill(19)  # SIGSTOP: no heartbeat any more
        with forked(at_work, root, 1.0, "second") as second:
            assert second.hear() == "at work"
            second.tell()
            assert second.hear() == "second"
        first.kill(18)
        first.tell()
        assert first.hear() == "second"


def test_ranks_on_two_nodes_meet_again_and_again(tmp_path: Path, nodes: tuple[Shim, Shim]) -> None:
    for shim in nodes:
        shim.set(delay=0.1, negative=0.1)
    roots = [shim.root for shim in nodes]

    def rank(parent: Parent, number: int) -> None:
        os.environ |= {"RANK": str(number), "WORLD_SIZE": "4"}
        for _ in range(5):
            sync.barrier(dir=roots[number % 2], job="j", timeout=PATIENCE)
            parent.say(None)

    with crowd(4, rank) as children:
        for _ in range(5):
            for child in children:
                child.hear()
    left = [p.name for p in tmp_path.joinpath("backing").rglob("rank-*")]
    assert sorted(left) == [f"rank-{n}" for n in range(4)]  # of the last one only
