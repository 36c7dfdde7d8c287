"""The name under which the ranks of one job, and no others, find each other."""

import os

import pytest

from shardcache.ranks import job_name, process_name
from tests.support.storetools import together

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8",
            "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
SLURM = {"SLURM_PROCID": "11", "SLURM_NTASKS": "16", "SLURM_LOCALID": "3", "SLURM_NODEID": "1",
         "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711"}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in [*TORCHRUN, *SLURM]:
        monkeypatch.delenv(name, raising=False)


def launch(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_the_name_of_a_job_states_its_launcher_and_restarts(monkeypatch):
    launch(monkeypatch, SLURM)
    assert job_name() == "4711-0-0-0"
    launch(monkeypatch, {"SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "1"})
    assert job_name() == "4711-0-2-1"
    launch(monkeypatch, {**TORCHRUN, "TORCHELASTIC_RUN_ID": "night"})
    assert job_name() == "night-0-2-1"
    monkeypatch.setenv("SHARDCACHE_JOB", "mine")
    assert job_name().startswith("mine-") and job_name("given") == "given"


@pytest.mark.parametrize("launched", [True, False])
def test_ranks_are_named_after_the_process_that_started_them(monkeypatch, launched):
    """The ranks were started by torchrun without an id, or by no launcher."""
    if launched:
        launch(monkeypatch, TORCHRUN)
    own = job_name()
    assert {*together(2, lambda number: job_name())} == {f"{process_name(os.getpid())}-0-0-0"}
    assert own == f"{process_name(os.getppid() if launched else os.getpid())}-0-0-0"
