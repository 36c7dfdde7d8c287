"""Ranks as each launcher states them, alone and inside one another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache import ranks
from shardcache.config import OTHER_VARIABLES
from shardcache.errors import ConfigError
from shardcache.ranks import Ranks, detect, local_world_size, safe_name

Env = Mapping[str, str]

TORCH: Env = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "run-7",
}
SLURM: Env = {
    "SLURM_JOB_ID": "901593",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
#: What a batch script sees before any srun: rank 0 of the tasks it asked for.
BATCH: Env = {
    "SLURM_JOB_ID": "901593",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
OPENMPI: Env = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "OMPI_MCA_ess_base_jobid": "3735879681",
}
PMI: Env = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "PMI_JOBID": "kvs_1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Ranks(0, 1, None, None, None, "none")),
        (TORCH, Ranks(11, 16, 3, 1, "run-7", "torch")),
        (SLURM, Ranks(5, 8, 1, 2, "901593", "slurm")),
        (OPENMPI, Ranks(6, 8, 2, None, "3735879681", "openmpi")),
        (PMI, Ranks(1, 4, 1, None, "kvs_1", "pmi")),
    ],
)
def test_each_launcher_alone_is_understood(environ: Env, expected: Ranks) -> None:
    assert detect(environ) == expected


def test_open_mpi_5_names_its_job_by_pmix() -> None:
    environ = {**OPENMPI, "PMIX_NAMESPACE": "prterun-node1-4711@1"}
    del environ["OMPI_MCA_ess_base_jobid"]
    assert detect(environ).job == "prterun-node1-4711@1"


def test_pals_names_the_local_rank_in_its_own_way() -> None:
    environ = {**PMI, "PMI_LOCAL_RANK": "3"}
    del environ["MPI_LOCALRANKID"]
    assert detect(environ).local_rank == 3


def test_without_an_argument_the_process_environment_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*SLURM, *TORCH, *OPENMPI, *PMI, ranks.RANK_VARIABLE, ranks.JOB_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in TORCH.items():
        monkeypatch.setenv(name, value)
    assert detect() == detect(TORCH)


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
        assert f"Ranks(rank={rank}, world_size=2, local_rank={rank}, node_rank=0, job='" in text
        assert "source='torch'" in text
    jobs = {re.search(r"job='([^']+)'", text)[1] for text in texts}  # type: ignore[index]
    assert len(jobs) == 1


def test_torchrun_under_srun_is_the_inner_launcher() -> None:
    assert detect({**SLURM, **TORCH}) == detect(TORCH)


def test_torchruns_default_run_id_is_no_job_and_slurms_takes_its_place() -> None:
    # Every torchrun without --rdzv-id says "none": two jobs would share one namespace.
    environ = {**TORCH, "TORCHELASTIC_RUN_ID": "none"}
    assert detect(environ).job is None
    assert detect({**environ, "SLURM_JOB_ID": "901593"}).job == "901593"


def test_rank_without_world_size_says_nothing() -> None:
    assert detect({"RANK": "3"}) == Ranks()
    assert detect({"WORLD_SIZE": "3"}) == Ranks()
    assert detect({"RANK": "general", **SLURM}).source == "slurm"


def test_ranks_exported_by_hand_in_a_slurm_task_keep_its_place_on_the_node() -> None:
    environ = {**SLURM, "RANK": "5", "WORLD_SIZE": "8"}
    assert detect(environ) == Ranks(5, 8, 1, 2, "901593", "torch")


def test_another_processs_place_on_the_node_is_not_borrowed() -> None:
    environ = {**SLURM, "RANK": "40", "WORLD_SIZE": "64"}
    assert detect(environ) == Ranks(40, 64, None, None, "901593", "torch")


def test_a_batch_script_is_one_process_whatever_it_asked_for() -> None:
    assert detect(BATCH) == Ranks(0, 1, 0, 0, "901593", "slurm")


def test_an_interactive_step_is_one_process_whatever_it_asked_for() -> None:
    environ = {**BATCH, "SLURM_STEP_ID": str(0xFFFFFFFA)}
    assert detect(environ) == Ranks(0, 1, 0, 0, "901593", "slurm")


def test_a_shell_inside_an_allocation_has_a_job_but_no_rank() -> None:
    assert detect({"SLURM_JOB_ID": "901593", "SLURM_NTASKS": "8"}) == Ranks(job="901593")


def test_a_heterogeneous_step_counts_all_its_parts() -> None:
    environ = {**SLURM, "SLURM_PROCID": "9", "SLURM_NTASKS": "12", "SLURM_STEP_NUM_TASKS": "4"}
    assert (detect(environ).rank, detect(environ).world_size) == (9, 12)


@pytest.mark.parametrize("inner", [OPENMPI, PMI])
@pytest.mark.parametrize("outer", [SLURM, BATCH])
def test_mpirun_inside_a_slurm_job_is_the_inner_launcher(outer: Env, inner: Env) -> None:
    # On other nodes mpirun's daemons are Slurm tasks, and the ranks inherit SLURM_PROCID.
    found, alone = detect({**outer, **inner}), detect(inner)
    assert found == alone


@pytest.mark.parametrize(
    "names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")]
)
def test_srun_that_also_speaks_mpi_is_still_slurm(names: tuple[str, str]) -> None:
    environ = {**SLURM, names[0]: "5", names[1]: "8", "PMI_JOBID": "901593.0"}
    assert detect(environ) == detect(SLURM)


def test_a_rank_set_by_hand_wins_over_every_launcher() -> None:
    for launcher in (TORCH, SLURM, OPENMPI, PMI):
        found = detect({**launcher, ranks.RANK_VARIABLE: "2"})
        assert (found.rank, found.source) == (2, "explicit")
        assert found.world_size == detect(launcher).world_size
        assert found.local_rank is None
        assert found.node_rank == detect(launcher).node_rank


def test_a_rank_set_by_hand_that_agrees_keeps_the_place_on_the_node() -> None:
    assert detect({**TORCH, ranks.RANK_VARIABLE: "11"}) == Ranks(11, 16, 3, 1, "run-7", "explicit")


def test_a_rank_set_by_hand_outside_any_world_widens_it() -> None:
    assert detect({ranks.RANK_VARIABLE: "3"}) == Ranks(3, 4, None, None, None, "explicit")


def test_a_job_set_by_hand_wins_and_leaves_the_rank_alone() -> None:
    for launcher in (TORCH, SLURM, OPENMPI, PMI, {}):
        found, alone = detect({**launcher, ranks.JOB_VARIABLE: "mine"}), detect(launcher)
        assert found.job == "mine"
        assert (found.rank, found.source) == (alone.rank, alone.source)


def test_empty_variables_count_as_not_set() -> None:
    empty = dict.fromkeys([*TORCH, *SLURM, *OPENMPI, *PMI, *OTHER_VARIABLES], " ")
    assert detect(empty) == Ranks()


NUMBERS = [
    (TORCH, "RANK"),
    (TORCH, "WORLD_SIZE"),
    (TORCH, "LOCAL_RANK"),
    (TORCH, "GROUP_RANK"),
    (SLURM, "SLURM_PROCID"),
    (SLURM, "SLURM_NTASKS"),
    (SLURM, "SLURM_LOCALID"),
    (SLURM, "SLURM_NODEID"),
    (SLURM, "SLURM_STEP_ID"),
    (OPENMPI, "OMPI_COMM_WORLD_RANK"),
    (OPENMPI, "OMPI_COMM_WORLD_SIZE"),
    (OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
    (PMI, "PMI_RANK"),
    (PMI, "PMI_SIZE"),
    (PMI, "MPI_LOCALRANKID"),
    ({}, ranks.RANK_VARIABLE),
]


@pytest.mark.parametrize("value", ["-1", "3.0", "zero", "1_0", "+1", "9" * 5000])
@pytest.mark.parametrize(("launcher", "variable"), NUMBERS)
def test_a_malformed_number_is_refused_by_name(launcher: Env, variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{variable}=") as caught:
        detect({**launcher, variable: value})
    assert caught.value.variable == variable  # type: ignore[attr-defined]
    assert "whole number" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("launcher", "rank", "size"),
    [
        (TORCH, "RANK", "WORLD_SIZE"),
        (SLURM, "SLURM_PROCID", "SLURM_NTASKS"),
        (OPENMPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        (PMI, "PMI_RANK", "PMI_SIZE"),
    ],
)
def test_a_rank_outside_its_world_is_refused(launcher: Env, rank: str, size: str) -> None:
    for number in (launcher[size], "4096"):
        with pytest.raises(ConfigError, match=rf"{rank}={number} does not fit {size}="):
            detect({**launcher, rank: number})
    with pytest.raises(ConfigError, match=f"{size}=0"):
        detect({**launcher, size: "0"})


@pytest.mark.parametrize("job", ["901593", "run-7", "a.b_c-D", "x" * 64, "_", "0-1"])
def test_a_job_id_that_is_a_name_stays_as_it_is(job: str) -> None:
    assert safe_name(job) == job


@pytest.mark.parametrize(
    "job",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-rf",
        "a/b",
        "../etc",
        "a b",
        "x" * 65,
        "901593\n",
        "jöb",
        "\udcff",
    ],
)
def test_a_job_id_that_is_no_name_becomes_one(job: str) -> None:
    name = safe_name(job)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", name)
    assert re.search(r"--[0-9a-f]{12}\Z", name)
    assert safe_name(job) == name


def test_an_id_made_to_look_hashed_does_not_meet_the_one_it_imitates() -> None:
    victim = safe_name("a/b")
    assert safe_name(victim) != victim
    assert safe_name("a_b") == "a_b"
    assert len({safe_name(job) for job in ("a/b", "a b", "a_b", victim)}) == 4


def test_long_ids_that_differ_at_the_end_only_stay_apart() -> None:
    assert safe_name("x" * 70 + "1") != safe_name("x" * 70 + "2")


@given(st.lists(st.text(st.characters(), max_size=80), unique=True, max_size=6))
def test_any_ids_get_distinct_safe_names(jobs: list[str]) -> None:
    names = [safe_name(job) for job in jobs]
    assert len(set(names)) == len(jobs)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name)
        assert name not in (".", "..")


@pytest.mark.parametrize(
    "name",
    ["LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"],
)
def test_every_launcher_counts_the_processes_of_a_node(name: str) -> None:
    assert local_world_size({}) is None
    assert local_world_size({name: " 8 "}) == 8
    assert local_world_size({name: "0"}) is None
    with pytest.raises(ConfigError, match=name):
        local_world_size({name: "eight"})
