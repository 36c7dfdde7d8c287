"""Ranks as each launcher states them, alone and inside one another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardcache import ranks
from shardcache.config import OTHER_VARIABLES
from shardcache.errors import ConfigError
from shardcache.ranks import Ranks, detect, local_world_size, safe_name

Env = Mapping[str, str]


def env(text: str) -> Env:
    return dict(word.split("=") for word in text.split())


TORCH = env("RANK=11 WORLD_SIZE=16 LOCAL_RANK=3 TORCHELASTIC_RUN_ID=run-7")
SLURM = env(
    "SLURM_JOB_ID=901593 SLURM_STEP_ID=0 SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 "
    "SLURM_LOCALID=1"
)
#: What a batch script sees before any srun: rank 0 of the tasks it asked for.
BATCH = env("SLURM_JOB_ID=901593 SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0")
OPENMPI = env(
    "OMPI_COMM_WORLD_RANK=6 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=2 "
    "OMPI_MCA_ess_base_jobid=3735879681"
)
PMI = env("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 PMI_JOBID=kvs_1")


MIXED: dict[str, tuple[Env, Ranks]] = {
    "nobody": ({}, Ranks(0, 1, None, None, "none")),
    "torchrun": (TORCH, Ranks(11, 16, 3, "run-7", "torch")),
    "Slurm": (SLURM, Ranks(5, 8, 1, "901593", "slurm")),
    "Open MPI": (OPENMPI, Ranks(6, 8, 2, "3735879681", "openmpi")),
    "Open MPI 5": (
        {**OPENMPI, "OMPI_MCA_ess_base_jobid": "", "PMIX_NAMESPACE": "prterun@1"},
        Ranks(6, 8, 2, "prterun@1", "openmpi"),
    ),
    "PMI": (PMI, Ranks(1, 4, 1, "kvs_1", "pmi")),
    "Cray's PALS": (
        {**PMI, "MPI_LOCALRANKID": "", "PMI_LOCAL_RANK": "3"},
        Ranks(1, 4, 3, "kvs_1", "pmi"),
    ),
    "torchrun under srun": ({**SLURM, **TORCH}, Ranks(11, 16, 3, "run-7", "torch")),
    # Every torchrun without --rdzv-id says "none": two jobs would share one namespace.
    "torchrun without an id": (
        {**TORCH, "TORCHELASTIC_RUN_ID": "none"},
        Ranks(11, 16, 3, None, "torch"),
    ),
    "the same inside Slurm": (
        {**TORCH, "TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "901593"},
        Ranks(11, 16, 3, "901593", "torch"),
    ),
    "a rank without a world": ({"RANK": "3"}, Ranks()),
    "a world without a rank": ({"WORLD_SIZE": "3"}, Ranks()),
    "a rank that is a word": ({"RANK": "general", **SLURM}, Ranks(5, 8, 1, "901593", "slurm")),
    "exported by hand for another process": (
        {**SLURM, "RANK": "40", "WORLD_SIZE": "64"},
        Ranks(40, 64, None, "901593", "torch"),
    ),
    "a batch script": (BATCH, Ranks(0, 1, 0, "901593", "slurm")),
    "an interactive step": (
        {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA)},
        Ranks(0, 1, 0, "901593", "slurm"),
    ),
    "a shell in an allocation": (
        {"SLURM_JOB_ID": "901593", "SLURM_NTASKS": "8"},
        Ranks(job="901593"),
    ),
    "a heterogeneous step": (
        {**SLURM, "SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_STEP_NUM_TASKS": "4"},
        Ranks(9, 12, 1, "901593", "slurm"),
    ),
    # On other nodes mpirun's daemons are Slurm tasks, and the ranks inherit SLURM_PROCID.
    "mpirun in a task": ({**SLURM, **OPENMPI}, Ranks(6, 8, 2, "3735879681", "openmpi")),
    "mpirun in a batch script": ({**BATCH, **PMI}, Ranks(1, 4, 1, "kvs_1", "pmi")),
    "srun that speaks MPI": (
        {**SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_JOBID": "901593.0"},
        Ranks(5, 8, 1, "901593", "slurm"),
    ),
    "set by hand, as the launcher has it": (
        {**TORCH, ranks.RANK_VARIABLE: "11"},
        Ranks(11, 16, 3, "run-7", "explicit"),
    ),
    "set by hand against it, beyond its world": (
        {**SLURM, ranks.RANK_VARIABLE: "9", ranks.JOB_VARIABLE: "mine"},
        Ranks(9, 10, None, "mine", "explicit"),
    ),
    "a job set by hand": (
        {**OPENMPI, ranks.JOB_VARIABLE: "mine"},
        Ranks(6, 8, 2, "mine", "openmpi"),
    ),
    "set by hand outside any world": (
        {ranks.RANK_VARIABLE: "3"},
        Ranks(3, 4, None, None, "explicit"),
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_launchers_are_understood_alone_and_inside_one_another(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ, expected = MIXED[case]
    assert detect(environ) == expected
    monkeypatch.setattr(os, "environ", dict(environ))
    assert detect() == expected


def test_torchrun_itself_is_understood(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.run")
    script = tmp_path / "report.py"
    script.write_text(
        "import pathlib, sys\n"
        "from shardcache.ranks import detect\n"
        "found = detect()\n"
        "pathlib.Path(sys.argv[1], str(found.rank)).write_text(repr(found))\n"
    )
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "OMPI_", "PMI", "SHARDCACHE_"))
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, str(script), str(tmp_path)], env=kept, check=True, timeout=120)
    texts = [(tmp_path / str(rank)).read_text() for rank in (0, 1)]
    for rank, text in enumerate(texts):
        assert f"Ranks(rank={rank}, world_size=2, local_rank={rank}, job='" in text
        assert "source='torch'" in text
    jobs = {re.search(r"job='([^']+)'", text)[1] for text in texts}  # type: ignore[index]
    assert len(jobs) == 1


def test_empty_variables_count_as_not_set() -> None:
    empty = dict.fromkeys([*TORCH, *SLURM, *OPENMPI, *PMI, *OTHER_VARIABLES], " ")
    assert detect(empty) == Ranks()


NUMBERS = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK"), TORCH),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), SLURM),
    "SLURM_STEP_ID": SLURM,
    "SLURM_STEP_NUM_TASKS": {**SLURM, "SLURM_NTASKS": ""},
    **dict.fromkeys(list(OPENMPI)[:3], OPENMPI),
    **dict.fromkeys(("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"), PMI),
    ranks.RANK_VARIABLE: {},
}


@pytest.mark.parametrize("variable", NUMBERS)
def test_a_malformed_number_is_refused_by_name(variable: str) -> None:
    for value in ("-1", "3.0", "zero", "1_0", "+1", "9" * 5000):
        with pytest.raises(ConfigError, match=rf"^{variable}=.*whole number") as caught:
            detect({**NUMBERS[variable], variable: value})
        assert caught.value.variable == variable  # type: ignore[attr-defined]
        assert len(str(caught.value)) < 300


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SLURM_PROCID=8 does not fit SLURM_NTASKS=8"):
        detect({**SLURM, "SLURM_PROCID": "8"})


def test_a_job_id_becomes_a_name_and_stays_one() -> None:
    for job in ("901593", "run-7", "a.b_c-D", "x" * 64, "_", "0-1"):
        assert safe_name(job) == job
    bad = ("", ".", "..", ".hidden", "-rf", "a/b", "../etc", "a b", "x" * 65, "9\n", "jöb")
    for job in (*bad, "\udcff"):
        name = safe_name(job)
        assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,49}--[0-9a-f]{12}", name)
        assert safe_name(job) == name


def test_every_launcher_counts_the_processes_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"]
    for name in (*names, "MPI_LOCALNRANKS"):
        for text, count in ((" ", None), (" 8 ", 8), ("0", None)):
            monkeypatch.setenv(name, text)
            assert local_world_size() == count
        monkeypatch.setenv(name, "eight")
        with pytest.raises(ConfigError, match=name):
            local_world_size()
        monkeypatch.delenv(name)
