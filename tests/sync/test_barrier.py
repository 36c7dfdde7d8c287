"""barrier: nobody goes on before all have come, again and again under one name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("names", ["aaaa", "abab", "abca"])
def test_ranks_are_in_the_same_barrier_or_in_two_that_follow_each_other(
    tmp_path: Path, names: str
) -> None:
    def rank(parent: Parent, number: int) -> None:
        for step, name in enumerate(names):
            (tmp_path / f"{step}-{number}").touch()  # before the barrier: all see all of it after
            sync.barrier(name, rank=number, world_size=3, dir=tmp_path, job="j", timeout=PATIENCE)
            there = len(list(tmp_path.glob(f"{step}-*")))
            parent.say([there, len(list(tmp_path.glob(f"{step + 2}-*")))])

    with crowd(3, rank) as children:
        for _ in names:
            assert [child.hear() for child in children] == [[3, 0]] * 3


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


def test_ranks_that_nobody_launched_need_a_name_for_their_run_unless_there_is_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="State job="):
        sync.barrier(rank=0, world_size=2, dir=tmp_path, timeout=0)
    sync.barrier(dir=tmp_path, timeout=0)
    assert os.listdir(tmp_path) == []
