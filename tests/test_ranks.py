"""Ranks as each launcher states them, alone and nested."""

import os
import re

import pytest

from shardcache.errors import ConfigError
from shardcache.ranks import Ranks, detect, job_name, process_name, safe_name
from tests.support.storetools import together

TORCH = "RANK=11 WORLD_SIZE=16 LOCAL_RANK=3 TORCHELASTIC_RUN_ID=run-7"
SLURM = "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1"
MPIRUN = "OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 PMIX_NAMESPACE=ns-1"
MPIRUN += " OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_LOCAL_SIZE=4"
HYDRA = "PMI_RANK=6 PMI_SIZE=8 MPI_LOCALRANKID=2 MPI_LOCALNRANKS=4"
#: The variables of a batch script before any srun: rank 0 of the tasks that it requested.
BATCH = "SLURM_JOB_ID=9 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0"
BY_HAND = "SHARDCACHE_RANK=9 SHARDCACHE_JOB=mine"


def env(text):
    return dict(word.split("=") for word in text.split())


#: Variables, of which the last one of a name counts, and the ranks that they state.
MIXED = {
    "no launcher": ("", Ranks(0, 1, None, None, "none")),
    "torchrun": (f"{TORCH} LOCAL_WORLD_SIZE=8", Ranks(11, 16, 3, "run-7", "torch", 8)),
    "Slurm": (f"{SLURM} SLURM_NTASKS_PER_NODE=4", Ranks(5, 8, 1, "9", "slurm", 4)),
    "Slurm on two nodes": (f"{SLURM} SLURM_STEP_NUM_NODES=2", Ranks(5, 8, 1, "9", "slurm", 4)),
    "Slurm on uneven nodes": (f"{SLURM} SLURM_STEP_NUM_NODES=3", Ranks(5, 8, 1, "9", "slurm")),
    "torchrun under srun": (f"{SLURM} {TORCH}", Ranks(11, 16, 3, "run-7", "torch")),
    "mpirun in Slurm, by a daemon": (f"{SLURM} {MPIRUN}", Ranks(6, 8, 2, "ns-1", "openmpi", 4)),
    "Hydra in Slurm": (f"{SLURM} {HYDRA}", Ranks(6, 8, 2, "9", "pmi", 4)),
    "torchrun under mpirun": (f"{MPIRUN} {TORCH}", Ranks(11, 16, 3, "run-7", "torch")),
    # Without --rdzv-id, every torchrun sets "none": two jobs would share a namespace.
    "no id": (f"{TORCH} TORCHELASTIC_RUN_ID=none", Ranks(11, 16, 3, None, "torch")),
    "a world without a rank": ("WORLD_SIZE=3", Ranks()),
    "a rank that is a word": (f"RANK=general {SLURM}", Ranks(5, 8, 1, "9", "slurm")),
    "for another process": (f"{SLURM} RANK=40 WORLD_SIZE=64", Ranks(40, 64, None, "9", "torch")),
    "a batch script": (f"{BATCH} SLURM_NTASKS_PER_NODE=4", Ranks(0, 1, 0, "9", "slurm", 4)),
    "an interactive step": (f"{BATCH} SLURM_STEP_ID={0xFFFFFFFA}", Ranks(0, 1, 0, "9", "slurm")),
    "a task without its step": (
        SLURM.replace("SLURM_STEP_ID=0 ", ""),
        Ranks(5, 8, 1, "9", "slurm"),
    ),
    "a shell in an allocation": ("SLURM_JOB_ID=9 SLURM_NTASKS=8", Ranks(job="9")),
    "by hand the same": (f"{TORCH} SHARDCACHE_RANK=11", Ranks(11, 16, 3, "run-7", "explicit")),
    "by hand beyond it": (f"{SLURM} {BY_HAND}", Ranks(9, 10, None, "mine", "explicit")),
    "by hand outside any world": (BY_HAND, Ranks(9, 10, None, "mine", "explicit")),
}


@pytest.mark.parametrize("case", MIXED)
def test_launchers_alone_and_nested(case, monkeypatch):
    text, expected = MIXED[case]
    monkeypatch.setattr(os, "environ", env(text))
    assert detect() == expected


def test_empty_variables_are_ignored(monkeypatch):
    monkeypatch.setattr(os, "environ", dict.fromkeys(env(f"{TORCH} {SLURM} {BY_HAND}"), " "))
    assert detect() == Ranks()


NUMBERS = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), TORCH),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_ID"), SLURM),
    "SHARDCACHE_RANK": "",
}


@pytest.mark.parametrize("variable", NUMBERS)
def test_a_malformed_number_is_refused(variable, monkeypatch):
    for value in ("-1", "3.0", "zero", "1_0", "+1", "9" * 5000):
        monkeypatch.setattr(os, "environ", {**env(NUMBERS[variable]), variable: value})
        with pytest.raises(ConfigError, match=rf"^{variable}=.*whole number") as caught:
            detect()
        assert len(str(caught.value)) < 300


def test_a_rank_outside_its_world_is_refused(monkeypatch):
    monkeypatch.setattr(os, "environ", env(f"{SLURM} SLURM_PROCID=8"))
    with pytest.raises(ConfigError, match=r"SLURM_PROCID=8 does not fit SLURM_NTASKS=8"):
        detect()


def test_a_job_id_becomes_a_name_and_stays_one():
    for job in ("901593", "run-7", "a.b_c-D", "x" * 64, "_", "0-1"):
        assert safe_name(job) == job
    bad = ("", ".", "..", ".hidden", "-rf", "a/b", "../etc", "a b", "x" * 65, "9\n", "jöb")
    for job in (*bad, "\udcff"):
        name = safe_name(job)
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,49}--[0-9a-f]{12}", name)
        assert safe_name(job) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (SLURM, "9-0-0-0"),
        (f"{SLURM} SLURM_RESTART_COUNT=2 SLURM_STEP_ID=1", "9-0-2-1"),
        (f"{TORCH} TORCHELASTIC_RESTART_COUNT=3", "run-7-3-0-0"),
        (f"{SLURM} SHARDCACHE_JOB=mine", "mine-0-0-0"),
    ],
)
def test_a_job_is_named_after_its_launcher_and_restarts(text, name, monkeypatch):
    monkeypatch.setattr(os, "environ", env(text))
    assert (job_name(), job_name("given")) == (name, "given")


@pytest.mark.parametrize("launched", [True, False])
def test_a_job_without_an_id_is_named_after_the_process_that_started_it(monkeypatch, launched):
    """torchrun without an id started the ranks, or the program has no launcher."""
    torchrun = env(f"{TORCH} TORCHELASTIC_RUN_ID=none LOCAL_WORLD_SIZE=16")
    monkeypatch.setattr(os, "environ", torchrun if launched else {})
    own = job_name()
    assert {*together(2, lambda number: job_name())} == {f"{process_name(os.getpid())}-0-0-0"}
    assert own == f"{process_name(os.getppid() if launched else os.getpid())}-0-0-0"
