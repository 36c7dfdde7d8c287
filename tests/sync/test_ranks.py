"""Who a process is: the launcher's word, the arithmetic of blocks, and what nobody tells."""

from __future__ import annotations

import os

import pytest

from shardcache import sync
from shardcache.errors import ConfigError
from shardcache.sync.board import _job_name as job_name
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
MPI = {
    "OMPI_COMM_WORLD_RANK": "11",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}


@pytest.fixture(autouse=True)
def _nobody_launched_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*TORCHRUN, *SLURM, *MPI]:
        monkeypatch.delenv(name, raising=False)


def launch(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_a_process_that_nobody_launched_is_a_job_of_one() -> None:
    found = [sync.rank(), sync.local_rank(), sync.node_rank()]
    assert (found, sync.world_size(), sync.local_world_size()) == ([0, 0, 0], 1, 1)


@pytest.mark.parametrize("launcher", [TORCHRUN, MPI], ids=["torchrun", "openmpi"])
def test_a_launcher_is_believed(monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]) -> None:
    launch(monkeypatch, launcher)
    assert [sync.rank(), sync.world_size(), sync.local_rank()] == [11, 16, 3]
    assert [sync.node_rank(), sync.local_world_size()] == [1, 8]


def test_what_slurm_does_not_tell_is_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch(monkeypatch, SLURM)
    assert [sync.rank(), sync.world_size(), sync.local_rank(), sync.node_rank()] == [11, 16, 3, 1]
    with pytest.raises(ConfigError, match="set LOCAL_WORLD_SIZE"):
        sync.local_world_size()


def test_nodes_are_not_counted_where_ranks_are_not_placed_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch(monkeypatch, {**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "5"})
    with pytest.raises(ConfigError, match="rank of this node"):
        sync.node_rank()


def test_a_job_on_one_node_needs_no_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, {"RANK": "3", "WORLD_SIZE": "8"})
    with pytest.raises(ConfigError, match="local rank of rank 3"):
        sync.local_rank()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert [sync.local_rank(), sync.node_rank(), sync.local_world_size()] == [3, 0, 8]


def test_a_job_is_named_by_its_launcher_and_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, SLURM)
    assert job_name() == "4711-step0"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert job_name() == "4711-restart2-step0"
    launch(monkeypatch, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "night"})
    assert job_name() == "night-restart2-step0-of16"
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
    assert len(names) == 1 and f"launcher-{os.getpid()}-" in names.pop()
    assert f"launcher-{os.getppid()}-" in job_name()


def test_children_of_a_lone_process_belong_to_it() -> None:
    own = job_name()

    def child(parent: Parent, number: int) -> None:
        parent.say(job_name())

    with crowd(2, child) as children:
        assert {each.hear() for each in children} == {own}
    assert f"process-{os.getpid()}-" in own


def test_a_rank_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, {"RANK": "8", "WORLD_SIZE": "8"})
    for function in (sync.rank, sync.world_size, sync.local_rank, sync.node_rank, job_name):
        with pytest.raises(ConfigError, match="RANK=8 does not fit"):
            function()
