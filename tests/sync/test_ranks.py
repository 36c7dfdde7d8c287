"""Who a process is: the launcher's word, the arithmetic of blocks, and what nobody tells."""

from __future__ import annotations

import os

import pytest

from shardcache.sync.board import job_name, process_name
from tests.support.storetools import Parent, crowd

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "11",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
}


@pytest.fixture(autouse=True)
def _nobody_launched_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *SLURM, "SHARDCACHE_JOB"]:
        monkeypatch.delenv(name, raising=False)


def launch(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_job_is_named_by_its_launcher_and_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, SLURM)
    assert job_name() == "4711-0-0-0"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert job_name() == "4711-0-2-1"
    launch(monkeypatch, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "night"})
    assert job_name() == "night-0-2-1"
    monkeypatch.setenv("SHARDCACHE_JOB", "mine")
    assert job_name().startswith("mine-") and job_name("given") == "given"


def test_ranks_of_one_launcher_have_its_name_and_those_of_another_have_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch(monkeypatch, {**TORCHRUN, "RANK": "3", "WORLD_SIZE": "8", "GROUP_RANK": "0"})

    def rank(parent: Parent, number: int) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        parent.say(job_name())

    with crowd(2, rank) as children:
        names = {child.hear() for child in children}
    assert names == {f"{process_name(os.getpid())}-0-0-0"}
    assert job_name() == f"{process_name(os.getppid())}-0-0-0"


def test_children_of_a_lone_process_belong_to_it() -> None:
    own = job_name()

    def child(parent: Parent, number: int) -> None:
        parent.say(job_name())

    with crowd(2, child) as children:
        assert {each.hear() for each in children} == {own}
    assert own == f"{process_name(os.getpid())}-0-0-0"
