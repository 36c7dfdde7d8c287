"""barrier: nobody goes on before all have come, again and again under one name."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardcache import sync
from shardcache.errors import ConfigError
from tests.support.storetools import PATIENCE, Parent, crowd, forked


def test_nobody_goes_on_before_the_last_has_come(tmp_path: Path) -> None:
    def rank(parent: Parent, number: int) -> None:
        parent.hear()
        sync.barrier("b", rank=number, world_size=4, dir=tmp_path, job="j", timeout=PATIENCE)
        parent.say("passed")

    with crowd(4, rank) as children:
        for child in children[:3]:
            child.tell()
        assert not any(child.speaks(0.15) for child in children)
        children[3].tell()
        assert [child.hear() for child in children] == ["passed"] * 4


@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(2, 4),
    names=st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
)
def test_at_any_moment_ranks_are_in_the_same_barrier_or_beside_each_other(
    tmp_path_factory: pytest.TempPathFactory, size: int, names: list[str], seed: int
) -> None:
    directory = tmp_path_factory.mktemp("barrier")

    def rank(parent: Parent, number: int) -> None:
        chance = random.Random(seed + number)
        for step, name in enumerate(names):
            if chance.random() < 0.3:
                os.sched_yield()
            # Written before the barrier: all must see all of it after.
            (directory / f"{step}-{number}").touch()
            sync.barrier(
                name, rank=number, world_size=size, dir=directory, job="j", timeout=PATIENCE
            )
            there = sum((directory / f"{step}-{other}").exists() for other in range(size))
            ahead = sum((directory / f"{step + 2}-{other}").exists() for other in range(size))
            parent.say([there, ahead])

    with crowd(size, rank) as children:
        for _ in names:
            for child in children:
                assert child.hear() == [size, 0]


def test_the_ranks_that_did_not_come_are_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"world_size": 40, "dir": tmp_path, "job": "j", "timeout": 0}

    def rank(parent: Parent, number: int) -> None:
        try:
            sync.barrier("ckpt", rank=2 * number, **options)
        except sync.BarrierTimeoutError:
            parent.say(None)

    with crowd(2, rank) as children:
        for child in children:
            child.hear()
        with pytest.raises(sync.BarrierTimeoutError) as caught:
            sync.barrier("ckpt", rank=1, **options)
    text = str(caught.value)
    assert caught.value.missing == list(range(3, 40))
    assert "at barrier('ckpt') as rank 1 of 40: 37 ranks (3, 4, 5" in text
    assert "18 and 21 more) did not come" in text and str(tmp_path) in text


def test_a_barrier_that_failed_is_the_same_one_at_the_next_try(tmp_path: Path) -> None:
    options: dict[str, Any] = {"world_size": 2, "dir": tmp_path, "job": "j"}

    def late(parent: Parent) -> None:
        for _ in range(2):
            parent.hear()
            sync.barrier(rank=1, timeout=PATIENCE, **options)
            parent.say("passed")

    with forked(late) as child:
        for _ in range(2):
            with pytest.raises(sync.BarrierTimeoutError, match=": rank 1 did not come") as caught:
                sync.barrier(rank=0, timeout=0.1, **options)
            assert caught.value.missing == [1]
        child.tell()
        sync.barrier(rank=0, timeout=PATIENCE, **options)
        assert child.hear() == "passed"
        child.tell()
        sync.barrier(rank=0, timeout=PATIENCE, **options)
        assert child.hear() == "passed"


def test_two_processes_of_one_rank_are_noticed(tmp_path: Path) -> None:
    def first(parent: Parent) -> None:
        try:
            sync.barrier(rank=0, world_size=2, dir=tmp_path, job="j", timeout=0)
        except sync.BarrierTimeoutError:
            parent.say(None)

    with forked(first) as child:
        child.hear()
        told = f"has come to barrier.* already, as rank 0 .process {child.pid} .* another job"
        for _ in range(2):
            with pytest.raises(ConfigError, match=told):
                sync.barrier(rank=0, world_size=2, dir=tmp_path, job="j", timeout=0)


def test_ranks_that_nobody_launched_need_a_name_for_their_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="State job="):
        sync.barrier(rank=0, world_size=2, dir=tmp_path, timeout=0)
    assert os.listdir(tmp_path) == []


def test_a_job_of_one_meets_nobody(tmp_path: Path) -> None:
    sync.barrier(dir=tmp_path, timeout=0)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
        {"world_size": 0},
    ],
)
def test_what_cannot_meet_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        sync.barrier(dir=tmp_path, **options)
    assert os.listdir(tmp_path) == []
