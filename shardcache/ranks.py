"""Which process of which job this is, read from the environment that a launcher left.

Nothing is cached, so a fork or a changed variable is seen by the next call. A launcher counts only
if it states a rank and a world size. A number that cannot be right is a `ConfigError`: two ranks
that silently take themselves for rank 0 would be far worse.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from shardcache.errors import ConfigError

Source = Literal["torch", "openmpi", "pmi", "slurm", "explicit", "none"]

#: Set by hand, these win over every launcher.
RANK_VARIABLE = "SHARDCACHE_RANK"
JOB_VARIABLE = "SHARDCACHE_JOB"

#: Where each launcher states rank, world size, local rank, local world size and job: torchrun
#: (torch/distributed/run.py), mpirun of Open MPI ("Environment variables set for MPI
#: applications"), Hydra of MPICH and Intel MPI, srun(1).
_LAUNCHERS: dict[Source, tuple[str, ...]] = {
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    "openmpi": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    ),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
    "slurm": (
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        *("SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"),  # the first with --ntasks-per-node
    ),
}
#: torchrun's --rdzv-id when nobody gave one: the same for every job, so not an id.
_NO_RUN_ID = "none"
#: SLURM_MAX_NORMAL_STEP_ID in slurm.h. Above it are the pseudo-steps (batch script,
#: interactive shell), where one process runs whatever SLURM_NTASKS says.
_MAX_NORMAL_STEP = 0xFFFFFFF0

_PLAIN = r"(?![.-])[A-Za-z0-9._-]{1,64}"
_HASHED = r".*--[0-9a-f]{12}"


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's place in its job; a process that nobody launched is rank 0 of 1.

    ``local_rank`` and ``local_size`` (among and of the processes on this node) are None where no
    launcher tells, ``job`` outside any job. ``source`` says what gave the rank.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    job: str | None = None
    source: Source = "none"
    local_size: int | None = None


def detect(environ: Mapping[str, str] | None = None) -> Ranks:
    """This process's `Ranks` according to ``environ`` (default: ``os.environ``).

    Order: ``SHARDCACHE_RANK``/``SHARDCACHE_JOB``, torchrun, MPI, Slurm: mpirun starts its daemons
    with srun, and the ranks below inherit the daemon's ``SLURM_PROCID``. The job id is the
    launcher's, else ``SLURM_JOB_ID``. Empty variables count as not set.

    Raises:
        ConfigError: a variable that is not a whole number, or a rank outside its world.
    """
    env = os.environ if environ is None else environ
    launched = _launched(env, "torch") or _launched(env, "openmpi") or _launched(env, "pmi")
    ranks = launched or _slurm(env) or Ranks()
    if (rank := whole_number(env, RANK_VARIABLE)) is not None:
        # The local rank of another rank is not known. A rank that the launcher has not counted
        # means a larger world than it knows of.
        local = ranks.local_rank if rank == ranks.rank else None
        world = max(ranks.world_size, rank + 1)
        ranks = Ranks(rank, world, local, ranks.job, "explicit", ranks.local_size)
    return replace(ranks, job=_text(env, JOB_VARIABLE) or ranks.job or _text(env, "SLURM_JOB_ID"))


def _slurm(env: Mapping[str, str]) -> Ranks | None:
    if whole_number(env, "SLURM_PROCID") is None:
        return None  # a shell from salloc, or ssh into an allocation: a job id, but no task
    step = whole_number(env, "SLURM_STEP_ID")
    if step is not None and step <= _MAX_NORMAL_STEP:
        return _launched(env, "slurm")
    # The batch script itself: SLURM_PROCID is 0 and SLURM_NTASKS is what srun *would*
    # start. Taking that for the world would have rank 0 wait for ranks that never come.
    size = whole_number(env, "SLURM_NTASKS_PER_NODE") or None
    return Ranks(local_rank=0, source="slurm", local_size=size)


def _launched(env: Mapping[str, str], source: Source) -> Ranks | None:
    """What a launcher states; None if it states no rank, or no world."""
    *numbers, job_name = _LAUNCHERS[source]
    # RANK and WORLD_SIZE are words anybody may export: one without the other says nothing,
    # not even that it is malformed.
    if not (_text(env, numbers[0]) and _text(env, numbers[1])):
        return None
    rank, world_size, local_rank, local_size = (whole_number(env, name) for name in numbers)
    assert rank is not None
    assert world_size is not None
    if rank >= world_size:
        raise ConfigError(
            f"{numbers[0]}={rank} does not fit {numbers[1]}={world_size}: ranks run from 0 to "
            f"{numbers[1]} - 1. Correct or unset them, or state {RANK_VARIABLE}."
        )
    job = _text(env, job_name)
    job = None if job == _NO_RUN_ID else job
    return Ranks(rank, world_size, local_rank, job, source, local_size or None)


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def whole_number(env: Mapping[str, str], name: str) -> int | None:
    """The number that a variable states; None where it is not set.

    Raises:
        ConfigError: it is no whole number.
    """
    text = _text(env, name)
    # Not int() alone: it would take "1_0", "+1" and digits of other scripts.
    if text is not None and not re.fullmatch("[0-9]{1,10}", text):
        raise ConfigError(
            f"{name}={text[:40]!r} is not a rank or a count. Accepted: a whole number from 0 on; "
            "correct it or unset it."
        )
    return None if text is None else int(text)


def safe_name(job: str) -> str:
    """``job`` as part of a directory name: ``[A-Za-z0-9._-]{1,64}``, never ``.`` or ``..``.

    An id that already is such a name stays as it is. Another one, and one that looks as if it had
    a hash, gets a hash of 48 bits appended, so that two ids do not share a name.
    """
    if re.fullmatch(_PLAIN, job) and not re.fullmatch(_HASHED, job):
        return job
    # A leading dot hides the directory, a leading dash reads as an option.
    kept = re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", job)[:50] or "_"
    # surrogatepass: the environment may hold bytes that are not text.
    digest = hashlib.blake2b(job.encode("utf-8", "surrogatepass"), digest_size=6)
    return f"{kept}--{digest.hexdigest()}"
