"""The rank and the job of this process, from its launcher's variables or from torch.distributed.

A launcher is recognised only if it sets both a rank and a world size. An impossible number raises a
`ConfigError`, because two processes that both believe they are rank 0 would do more harm.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardcache.clock import boot_id
from shardcache.errors import ConfigError

Launcher = Literal["torch", "openmpi", "pmi", "slurm", "explicit", "none"]

#: Users may set these two variables. They take precedence over every launcher.
RANK_VARIABLE = "SHARDCACHE_RANK"
JOB_VARIABLE = "SHARDCACHE_JOB"
#: `shardcache run` sets this variable. It holds the start of the run in seconds since the epoch, a
#: colon, and the path of a file to which its processes add lines, next to a database of its own.
RUN_VARIABLE = "SHARDCACHE_RUN"

#: The variables of each launcher for rank, world size, local rank, local world size and job:
#: torchrun (torch/distributed/run.py), mpirun of Open MPI ("Environment variables set for MPI
#: applications"), Hydra of MPICH and Intel MPI, srun(1).
LAUNCHERS: dict[Launcher, tuple[str, ...]] = {
    "torch": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    "openmpi": (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"),
    ),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID"),
    "slurm": (
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        *("SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"),  # the former is set by --ntasks-per-node only
    ),
}
#: The default of torchrun's --rdzv-id, which does not identify a job.
_NO_RUN_ID = "none"
#: SLURM_MAX_NORMAL_STEP_ID in slurm.h. Larger step ids denote pseudo-steps (batch script,
#: interactive shell), which run a single process regardless of SLURM_NTASKS.
_MAX_NORMAL_STEP = 0xFFFFFFF0

#: Launchers increase these when they restart the ranks (torchrun, Slurm) or start a job step.
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")


class Ranks(NamedTuple):
    """The position of a process in its job. Without a launcher, it is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1  #: number of processes in the job
    local_rank: int | None = None  #: number of this process on its node, if known
    job: str | None = None  #: id of the job; None outside any job
    launcher: Launcher = "none"  #: the launcher that set the rank
    local_size: int | None = None  #: number of processes of the job on this node, if known


def detect() -> Ranks:
    """Return the `Ranks` of this process, read from its environment.

    The order of precedence is ``SHARDCACHE_RANK`` and ``SHARDCACHE_JOB``, torchrun, MPI, Slurm. MPI
    comes before Slurm: if mpirun starts daemons with srun, ranks inherit their ``SLURM_PROCID``.
    """
    launched = (_from_launcher(name) for name in LAUNCHERS if name != "slurm")
    ranks = next(filter(None, launched), None) or _from_slurm() or Ranks()
    if (rank := whole_number(RANK_VARIABLE)) is not None:
        # The launcher's local rank is valid only for the rank that the launcher set. If the user's
        # rank is not below the launcher's world size, the world must be larger.
        local = ranks.local_rank if rank == ranks.rank else None
        world = max(ranks.world_size, rank + 1)
        ranks = Ranks(rank, world, local, ranks.job, "explicit", ranks.local_size)
    return ranks._replace(job=_text(JOB_VARIABLE) or ranks.job or _text("SLURM_JOB_ID"))


@functools.cache
def run_of_this_process() -> tuple[float | None, str]:
    """Return the start and the file of the current `shardcache run`; (None, "") without one."""
    started, _, file = os.environ.get(RUN_VARIABLE, "").partition(":")
    with contextlib.suppress(ValueError):
        return float(started), file
    return None, ""


def _from_slurm() -> Ranks | None:
    if (number := whole_number("SLURM_PROCID")) is None:
        return None  # a shell of salloc, or ssh into an allocation: there is a job id, but no task
    step = whole_number("SLURM_STEP_ID")
    # A wrapper of the task may have dropped the step; in the batch script, the number is 0.
    if number or (step is not None and step <= _MAX_NORMAL_STEP):
        ranks, nodes = _from_launcher("slurm"), whole_number("SLURM_STEP_NUM_NODES")
        if ranks and not ranks.local_size and nodes and ranks.world_size % nodes == 0:
            # By default, Slurm spreads the tasks evenly over the nodes.
            ranks = ranks._replace(local_size=ranks.world_size // nodes)
        return ranks
    # In the batch script, SLURM_PROCID is 0, and SLURM_NTASKS is the number of tasks that srun
    # would start. As a world size, it would make rank 0 wait for ranks that do not exist.
    size = whole_number("SLURM_NTASKS_PER_NODE") or None
    return Ranks(local_rank=0, launcher="slurm", local_size=size)


def _from_launcher(launcher: Launcher) -> Ranks | None:
    """Return the `Ranks` that a launcher set, or None if it did not set rank and world size."""
    *numbers, job_name = LAUNCHERS[launcher]
    # Other programs may export RANK or WORLD_SIZE, so one alone is ignored, even if malformed.
    if not (_text(numbers[0]) and _text(numbers[1])):
        return None
    rank, world_size, local_rank, local_size = map(whole_number, numbers)
    assert rank is not None and world_size is not None
    if rank >= world_size:
        raise ConfigError(
            f"{numbers[0]}={rank} does not fit {numbers[1]}={world_size}: ranks run from 0 to "
            f"{numbers[1]} - 1. Correct or unset them, or set {RANK_VARIABLE}."
        )
    job = _text(job_name)
    job = None if job == _NO_RUN_ID else job
    return Ranks(rank, world_size, local_rank, job, launcher, local_size or None)


def _text(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def whole_number(name: str) -> int | None:
    """Return a variable as an int, or None if it is empty. Raise ConfigError for other text."""
    text = _text(name)
    # int() would also accept "1_0", "+1" and digits of other scripts, so check first.
    if text is not None and not re.fullmatch("[0-9]{1,10}", text):
        advice = "Set it to 0 or more, or unset it."
        raise ConfigError(f"{name}={text[:40]!r} is not a whole number. {advice}")
    return None if text is None else int(text)


def is_half_stated() -> bool:
    """Return whether only one of torch's variables for the rank and the world size is set."""
    return (_text("RANK") is None) != (_text("WORLD_SIZE") is None)


#: The warning if it is.
HALF_STATED = "only one of RANK and WORLD_SIZE is set, so each rank reads all samples: set both"


def safe_name(job: str) -> str:
    """Convert a job id to a name for a directory: ``[A-Za-z0-9._-]{1,64}``, not ``.`` or ``..``.

    Other ids, and those that seem to end with a hash, get a hash of 48 bits, so that names differ.
    """
    if re.fullmatch(r"(?!.*--[0-9a-f]{12}\Z)(?![.-])[A-Za-z0-9._-]{1,64}", job):
        return job
    # A leading dot would hide the directory, a leading dash would look like an option.
    kept = re.sub(r"^[.-]|[^A-Za-z0-9._-]", "_", job)[:50] or "_"  # 50 + "--" + 12 digits = 64
    # surrogatepass, because environment variables may contain bytes that are not text.
    digest = hashlib.blake2b(job.encode("utf-8", "surrogatepass"), digest_size=6)
    return f"{kept}--{digest.hexdigest()}"


def rank() -> int:
    """Return this process's rank in its job, or 0 without a launcher.

    Raises:
        ConfigError: the environment states an impossible rank.
    """
    torch = _distributed()
    return int(torch.get_rank()) if torch else detect().rank


def world_size() -> int:
    """Return the number of ranks in this job, or 1 without a launcher."""
    torch = _distributed()
    return int(torch.get_world_size()) if torch else detect().world_size


def _distributed() -> Any:
    """Return the module torch.distributed if it is initialised, otherwise None."""
    module = sys.modules.get("torch.distributed")
    # `is_initialized` is missing while another thread imports torch.
    return module if getattr(module, "is_initialized", lambda: False)() else None


def torch_store() -> Any:
    """Return the store that connects the ranks of torch.distributed; None if it cannot be used."""
    worker = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)
    # A DataLoader worker must not use its parent's connection.
    if _distributed() is None or worker() is not None:
        return None
    # torch has no public function for the store. This private function exists since torch 1.8.
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):  # a backend without a store, such as mpi
        return None


def process_name(pid: int) -> str:
    """Return a name that no other process on any machine has: boot, pid, start time (proc(5))."""
    with contextlib.suppress(OSError):  # /proc does not show a parent outside our pid namespace
        # The second field may contain any character, so split after its last parenthesis.
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return f"{boot_id()}-{pid}-{stat.rpartition(')')[2].split()[19]}"
    return f"{socket.gethostname()}-{pid}"


#: Job name of a process without a launcher. Its forked children inherit the name.
_OWN_JOB = process_name(os.getpid())


def job_name(job: str | None = None) -> str:
    """Return a name that all ranks of this job have in common, and no other job has.

    The name is ``job`` if it is given. Otherwise it consists of the launcher's id and restart
    counts, so that a restarted job does not find the notes of its former run.
    """
    if job is not None:
        if not job.strip():
            raise ConfigError("job is empty. Pass a name that all its ranks have in common.")
        return safe_name(job)
    ranks = detect()
    name = ranks.job
    if name is None and (store := torch_store()) is not None:  # the first rank chooses a name
        name = store.compare_set("shardcache/job", "", os.urandom(16).hex()).decode()
    if name is None and ranks.world_size == 1:
        name = _OWN_JOB
    if name is None and ranks.world_size == ranks.local_size:
        # torchrun without --rdzv-id: one process of this node started all ranks, and names the job.
        import multiprocessing  # here, because few processes need it

        parent = multiprocessing.parent_process()
        name = process_name((parent and parent.pid) or os.getppid())
    if name is None:
        raise ConfigError(
            f"The {ranks.world_size} ranks of this job have no name in common. Pass job=, start "
            f"torchrun with --rdzv-id, or set {JOB_VARIABLE} to the same text on all nodes."
        )
    counts = [os.environ.get(variable) or "0" for variable in _RESTART_COUNTS]
    return safe_name("-".join([name, *counts]))
