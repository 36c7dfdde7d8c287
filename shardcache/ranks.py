"""Which process of which job this is, read from the environment a launcher left.

Purpose: rank, world size, place on the node and job id for isolation, log lines
and lock records, without importing torch or MPI and without asking any daemon.

Invariants:

* The environment is only read. Nothing is cached: a fork or a changed variable is
  seen by the next call.
* A launcher counts only if it states both a rank and a world size. A gap (say, no
  ``LOCAL_RANK``) is filled from another launcher only where the two agree on both,
  because otherwise they speak of different processes.
* A number that cannot be right raises `ConfigError` naming its variable: two ranks
  that silently both take themselves for rank 0 would be far worse.

Where the names come from: torchrun, "Environment Variables" of
``torch/distributed/run.py``; Slurm, "OUTPUT ENVIRONMENT VARIABLES" of srun(1) and
``setup_env`` in ``src/common/env.c``; Open MPI, "Environment variables set for MPI
applications" and ``orte/mca/schizo/ompi``; PMI-1 as set by MPICH's Hydra, Intel MPI,
Slurm's mpi/pmi2 plugin and HPE Cray PALS.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardcache.errors import ConfigError

Source = Literal["torch", "slurm", "openmpi", "pmi", "explicit", "none"]

#: Set by hand, these win over every launcher.
RANK_VARIABLE = "SHARDCACHE_RANK"
JOB_VARIABLE = "SHARDCACHE_JOB"

#: torchrun's --rdzv-id when nobody gave one: the same for every job, so not an id.
_NO_RUN_ID = "none"
#: SLURM_MAX_NORMAL_STEP_ID in slurm.h. Above it are the pseudo-steps (batch script,
#: interactive shell), where one process runs whatever SLURM_NTASKS says.
_MAX_NORMAL_STEP = 0xFFFFFFF0

#: How many processes of the job are on this node: torchrun, Slurm (with --ntasks-per-node),
#: Open MPI, Hydra and Intel MPI.
_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 64
_HASH_DIGITS = 12
_HASHED = re.compile(rf"--[0-9a-f]{{{_HASH_DIGITS}}}\Z")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place in its job.

    ``rank`` and ``world_size`` are always known: a process nobody launched is rank 0
    of 1. ``local_rank`` (among the processes on this node) and ``node_rank`` (of this
    node in the job) are None where no launcher tells. ``source`` says who gave the
    rank; ``job`` may come from elsewhere and is None outside any job.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    node_rank: int | None = None
    job: str | None = None
    source: Source = "none"


def detect(environ: Mapping[str, str] | None = None) -> Ranks:
    """This process's `Ranks` according to ``environ`` (default: ``os.environ``).

    Order: ``SHARDCACHE_RANK``/``SHARDCACHE_JOB``, torchrun, Slurm, Open MPI, PMI. MPI
    goes before Slurm where the two disagree: mpirun starts its daemons with srun, and
    the ranks below inherit the daemon's ``SLURM_PROCID``. The job id is the launcher's,
    else ``SLURM_JOB_ID``. Empty variables count as not set.

    Raises:
        ConfigError: a variable that is not a whole number, or a rank outside its world.
    """
    env = os.environ if environ is None else environ
    torch, slurm, mpi = _torch(env), _slurm(env), _openmpi(env) or _pmi(env)
    if slurm and mpi and not _same_process(slurm, mpi):
        slurm, mpi = mpi, slurm
    known = [found for found in (torch, slurm, mpi) if found]
    ranks = known[0] if known else Ranks()
    for other in known[1:]:
        ranks = _fill(ranks, other)
    ranks = _override(ranks, _number(env, RANK_VARIABLE))
    return replace(ranks, job=_text(env, JOB_VARIABLE) or ranks.job or _text(env, "SLURM_JOB_ID"))


def local_world_size(environ: Mapping[str, str] | None = None) -> int | None:
    """How many processes of this job are on this node; None where no launcher tells.

    Raises:
        ConfigError: a variable that is not a whole number.
    """
    env = os.environ if environ is None else environ
    return next((size for name in _LOCAL_SIZES if (size := _number(env, name))), None)


def _torch(env: Mapping[str, str]) -> Ranks | None:
    run_id = _text(env, "TORCHELASTIC_RUN_ID")
    return _ranks(
        env,
        "torch",
        ("RANK", "WORLD_SIZE"),
        local="LOCAL_RANK",
        # The rank of the worker group: the node's, with one group per node as torchrun has it.
        node="GROUP_RANK",
        job=None if run_id == _NO_RUN_ID else run_id,
    )


def _slurm(env: Mapping[str, str]) -> Ranks | None:
    if _number(env, "SLURM_PROCID") is None:
        # A shell from salloc, or ssh into an allocation: a job id, but no task.
        return None
    job = _text(env, "SLURM_JOB_ID")
    step = _number(env, "SLURM_STEP_ID")
    if step is None or step > _MAX_NORMAL_STEP:
        # The batch script itself: SLURM_PROCID is 0 and SLURM_NTASKS is what srun *would*
        # start. Taking that for the world would have rank 0 wait for ranks that never come.
        return Ranks(local_rank=0, node_rank=_number(env, "SLURM_NODEID"), job=job, source="slurm")
    # srun sets both; SLURM_NTASKS alone counts all parts of a heterogeneous step.
    total = "SLURM_NTASKS" if _text(env, "SLURM_NTASKS") else "SLURM_STEP_NUM_TASKS"
    names = ("SLURM_PROCID", total)
    return _ranks(env, "slurm", names, local="SLURM_LOCALID", node="SLURM_NODEID", job=job)


def _openmpi(env: Mapping[str, str]) -> Ranks | None:
    # No node rank: OMPI_COMM_WORLD_NODE_RANK is "the relative rank of this process on this
    # node looking across all jobs", a second local rank in spite of its name.
    return _ranks(
        env,
        "openmpi",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        local="OMPI_COMM_WORLD_LOCAL_RANK",
        # The first is Open MPI up to 4, the second 5 and later.
        job=_text(env, "OMPI_MCA_ess_base_jobid") or _text(env, "PMIX_NAMESPACE"),
    )


def _pmi(env: Mapping[str, str]) -> Ranks | None:
    # Hydra and Intel MPI write MPI_LOCALRANKID, Cray's PALS PMI_LOCAL_RANK.
    local = "MPI_LOCALRANKID" if _text(env, "MPI_LOCALRANKID") else "PMI_LOCAL_RANK"
    names = ("PMI_RANK", "PMI_SIZE")
    return _ranks(env, "pmi", names, local=local, job=_text(env, "PMI_JOBID"))


def _ranks(
    env: Mapping[str, str],
    source: Source,
    names: tuple[str, str],
    *,
    local: str,
    node: str | None = None,
    job: str | None,
) -> Ranks | None:
    # RANK and WORLD_SIZE are words anybody may export: one without the other says nothing,
    # not even that it is malformed.
    if not all(_text(env, name) for name in names):
        return None
    rank, world_size = (_number(env, name) for name in names)
    assert rank is not None
    assert world_size is not None
    if rank >= world_size:
        raise ConfigError(
            f"{names[0]}={rank} does not fit {names[1]}={world_size}: ranks run from 0 to "
            f"{names[1]} - 1. Correct or unset them, or state {RANK_VARIABLE}.",
            variable=names[0],
        )
    local_rank = _number(env, local)
    node_rank = _number(env, node) if node else None
    return Ranks(rank, world_size, local_rank, node_rank, job, source)


def _same_process(one: Ranks, other: Ranks) -> bool:
    return (one.rank, one.world_size) == (other.rank, other.world_size)


def _fill(ranks: Ranks, other: Ranks) -> Ranks:
    if not _same_process(ranks, other):
        return ranks
    return replace(
        ranks,
        local_rank=other.local_rank if ranks.local_rank is None else ranks.local_rank,
        node_rank=other.node_rank if ranks.node_rank is None else ranks.node_rank,
    )


def _override(ranks: Ranks, rank: int | None) -> Ranks:
    if rank is None:
        return ranks
    return replace(
        ranks,
        rank=rank,
        # A rank the launcher has not counted means a larger world than it knows of.
        world_size=max(ranks.world_size, rank + 1),
        # The node stays where it is; who is beside us on it is no longer known.
        local_rank=ranks.local_rank if rank == ranks.rank else None,
        source="explicit",
    )


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = _text(env, name)
    if text is None:
        return None
    # Not int() alone: it would take "1_0", "+1" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ConfigError(
            f"{name}={text[:40]!r} is not a rank or a count. Accepted: a whole number from 0 on; "
            f"correct it or unset it.",
            variable=name,
        )
    return int(text)


def safe_name(job: str) -> str:
    """``job`` as part of a directory name: ``[A-Za-z0-9._-]{1,64}``, never ``.`` or ``..``.

    An id that already is such a name stays as it is. Where anything had to be replaced
    or cut, a hash of the whole id is appended, and an id that merely looks as if it had
    one gets one too: two ids never share a name (up to a collision of 48 bits).
    """
    name = _UNSAFE.sub("_", job)
    # A leading dot hides the directory, a leading dash reads as an option.
    if name[:1] in (".", "-"):
        name = f"_{name[1:]}"
    if name and name == job and len(name) <= _MAX_NAME and not _HASHED.search(name):
        return name
    # surrogatepass: the environment may hold bytes that are not text.
    digest = hashlib.blake2b(job.encode("utf-8", "surrogatepass"), digest_size=_HASH_DIGITS // 2)
    kept = name[: _MAX_NAME - _HASH_DIGITS - 2] or "_"
    return f"{kept}--{digest.hexdigest()}"
