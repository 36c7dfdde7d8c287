"""`sync.barrier`: no rank continues before all have arrived, also if a name is used again."""

import os

import pytest

from shardcache import sync
from shardcache.errors import ConfigError
from tests.support.storetools import PATIENCE, crowd, forked


@pytest.fixture
def meet(tmp_path, set_variables):
    """Call the barrier as one rank of a world."""

    def meet(number: int, size: int, name: str = "b", **options) -> None:
        set_variables(RANK=number, WORLD_SIZE=size)
        sync.barrier(name, **{"dir": tmp_path, "job": "j", "timeout": PATIENCE, **options})

    return meet


@pytest.mark.parametrize("names", ["aaaa", "abca"])
def test_no_rank_passes_before_the_last_one_arrives(tmp_path, names, meet):
    def rank(parent, number):
        for step, name in enumerate(names):
            parent.hear()
            (tmp_path / f"{step}-{number}").touch()
            meet(number, 3, name)
            parent.say([len(list(tmp_path.glob(f"{each}-*"))) for each in (step, step + 1)])

    with crowd(3, rank) as children:
        for _ in names:
            for child in children[:2]:
                child.tell()
            assert not any(child.speaks(0.05) for child in children)
            children[2].tell()
            assert [child.hear() for child in children] == [[3, 0]] * 3


def test_missing_and_duplicate_ranks_are_named(tmp_path, meet):
    def rank(parent, number):
        with pytest.raises(sync.BarrierTimeoutError):
            meet(2 * number, 40, "ckpt", timeout=0)
        parent.say()

    with crowd(2, rank) as children:
        for child in children:
            child.hear()
        with pytest.raises(sync.BarrierTimeoutError) as caught:
            meet(1, 40, "ckpt", timeout=0)
        message = f"already reached barrier.*, as rank 0 .process {children[0].pid} .* another job"
        for _ in range(2):
            with pytest.raises(ConfigError, match=message):
                meet(0, 40, "ckpt", timeout=0)
    assert caught.value.missing == list(range(3, 40))
    assert "at barrier('ckpt') as rank 1 for 37 of 40 ranks: 3, 4, 5" in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_retry_joins_the_barrier_that_timed_out(meet):
    def late(parent):
        for _ in range(2):
            parent.hear()
            meet(1, 2)
            parent.say("passed")

    with forked(late) as child:
        for _ in range(2):
            with pytest.raises(sync.BarrierTimeoutError):
                meet(0, 2, timeout=0.1)
        for _ in range(2):
            child.tell()
            meet(0, 2)
            assert child.hear() == "passed"


def test_a_single_rank_does_not_wait_and_two_need_a_job(tmp_path, meet):
    with pytest.raises(ConfigError, match="Pass job="):
        meet(0, 2, job=None)
    meet(0, 1, job=None)
    assert os.listdir(tmp_path) == []
