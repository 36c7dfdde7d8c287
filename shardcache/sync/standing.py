"""Which rank this is, and of which job, as torch.distributed or the launcher tells.

torch is asked only if somebody has imported it already. A forked child, such as a worker of a
DataLoader, shares its parent's connection to torch's store and must not speak on it: to it
torch's ranks are good, its store is not.

The job has a name that all its ranks know, so that they find one another and nobody else:
see `job_name`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

from shardcache import ranks
from shardcache.errors import BoardError, ConfigError
from shardcache.modes import random_token
from shardcache.ranks import Ranks, safe_name
from shardcache.store.metadata import boot_id

__all__ = [
    "is_alone",
    "job_name",
    "local_rank",
    "local_world_size",
    "node_name",
    "node_rank",
    "rank",
    "start_of",
    "torch_store",
    "world_size",
]

#: What a launcher counts up when it starts the ranks of a job anew: torchrun, Slurm (requeue).
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_STEP = re.compile(r"[0-9]{1,9}\Z")  # the batch script's and the shell's have ten digits
_AGREED = "shardcache/job"

#: The store of the process that this one was forked from.
_inherited: Any = None
#: The name of a process that nobody launched; its forked children know it, too.
_alone: str | None = None


def _distributed() -> Any:
    """torch.distributed if it is initialised in this process or in the one it was forked from."""
    found = sys.modules.get("torch.distributed")
    # While torch is being imported, by another thread, it has no such functions yet.
    available, initialised = (getattr(found, f"is_{x}", None) for x in ("available", "initialized"))
    return found if available and initialised and available() and initialised() else None


def _after_fork() -> None:
    global _inherited
    _inherited = _default_store() or _inherited


os.register_at_fork(after_in_child=_after_fork)


def torch_store() -> Any:
    """The store over which the ranks of torch.distributed met; None if this process has none."""
    store = None if _is_loader_worker() else _default_store()
    return None if store is _inherited else store


def _default_store() -> Any:
    if _distributed() is None:
        return None
    # There is no public name for it; this one has been there since torch 1.8.
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):  # a backend without one: mpi
        return None


def _is_loader_worker() -> bool:
    info = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    return info is not None and info() is not None


def rank() -> int:
    """This process's rank in its job; 0 where nobody launched it as one of several.

    Raises:
        ConfigError: the environment states a rank that cannot be.
    """
    torch = _distributed()
    return int(torch.get_rank()) if torch else ranks.detect().rank


def world_size() -> int:
    """How many ranks the job has; 1 where nobody launched this process as one of several.

    Raises:
        ConfigError: as `rank`.
    """
    torch = _distributed()
    return int(torch.get_world_size()) if torch else ranks.detect().world_size


def local_rank() -> int:
    """This process's rank among those of its job on its node.

    Raises:
        ConfigError: nobody tells, or as `rank`.
    """
    found = _launched()
    if found.local_rank is not None:
        return found.local_rank
    if found.world_size == 1:
        return 0
    if ranks.local_world_size() == found.world_size:  # all of them are on this node
        return found.rank
    raise _untold("local rank", "LOCAL_RANK")


def local_world_size() -> int:
    """How many ranks of the job are on this node.

    Raises:
        ConfigError: as `local_rank`.
    """
    found = _launched()
    size = ranks.local_world_size()
    if size is None and found.world_size == 1:
        return 1
    if size is None or size > found.world_size:
        raise _untold("number of ranks on this node", "LOCAL_WORLD_SIZE")
    return size


def node_rank() -> int:
    """The number of this node among those of the job.

    Raises:
        ConfigError: as `local_rank`.
    """
    found = _launched()
    if found.node_rank is not None:
        return found.node_rank
    size = 1 if found.world_size == 1 else ranks.local_world_size()
    if size == found.world_size:
        return 0
    # Nodes in blocks, as launchers place ranks unless they are told otherwise; where they
    # were, the local rank tells.
    if size and found.local_rank is not None and (found.rank - found.local_rank) % size == 0:
        return (found.rank - found.local_rank) // size
    raise _untold("rank of this node", "GROUP_RANK")


def _launched() -> Ranks:
    """What the launcher said, if it spoke of the ranks that torch has."""
    found = ranks.detect()
    told = rank(), world_size()
    return found if told == (found.rank, found.world_size) else Ranks(*told)


def _untold(what: str, variable: str) -> ConfigError:
    return ConfigError(
        f"Nobody tells the {what} of rank {rank()}: neither torchrun, Slurm, MPI nor PMI did. "
        f"Start the ranks with one of them, or set {variable} beside RANK and WORLD_SIZE.",
        variable=variable,
    )


def job_name(job: str | None = None) -> str:
    """What the ranks of this job have in common and no other job has, as a directory's name.

    Of a stated ``job`` that is the name itself: jobs that state the same one see each
    other's results, also those of an earlier run. Otherwise it is the launcher's id of the
    job (``SHARDCACHE_JOB``, ``TORCHELASTIC_RUN_ID``, ``SLURM_JOB_ID``, ...) with the number
    of its restarts, so that a job that was started again begins anew.

    Raises:
        ConfigError: ranks of several nodes have nothing in common.
    """
    if job is not None:
        if not job.strip():
            raise ConfigError("job is empty. Give the name that all its ranks have in common.")
        return safe_name(job)
    found = ranks.detect()
    parts = [found.job or _agreed() or _unnamed(found)]
    for variable in _RESTARTS:
        if (count := os.environ.get(variable, "").strip()) not in ("", "0"):
            parts.append(f"restart{count}")
    if _STEP.match(step := os.environ.get("SLURM_STEP_ID", "").strip()):
        parts.append(f"step{step}")
    if found.source == "torch":  # torchrun with fewer nodes than before counts no restart
        parts.append(f"of{found.world_size}")
    return safe_name("-".join(parts))


def _agreed() -> str | None:
    """A random name that all ranks of torch.distributed read from its store."""
    store = torch_store()
    if store is None:
        return None
    try:
        return bytes(store.compare_set(_AGREED, "", random_token())).decode("ascii")
    except RuntimeError as exn:
        raise unreachable(exn) from exn


def unreachable(exn: Exception) -> BoardError:
    """What to say when torch's store does not answer."""
    return BoardError(
        f"The store of torch.distributed does not answer ({str(exn).splitlines()[0]:.200}). "
        "Rank 0, which serves it, has probably ended: look at its output."
    )


def is_alone() -> bool:
    """Whether nobody launched this process, nor gave its job a name."""
    found = ranks.detect()
    return found.job is None and found.world_size == 1 and torch_store() is None


def _unnamed(found: Ranks) -> str:
    global _alone
    if found.world_size == 1:
        if _alone is None:
            _alone = f"process-{os.getpid()}-{start_of(os.getpid())}-{boot_id()[:8]}"
        return _alone
    if ranks.local_world_size() == found.world_size:
        # torchrun without --rdzv-id: what starts all ranks of this node is the same process.
        parent = multiprocessing.parent_process()
        launcher = parent.pid if parent is not None and parent.pid else os.getppid()
        return f"launcher-{launcher}-{start_of(launcher)}-{boot_id()[:8]}"
    raise ConfigError(
        f"The {found.world_size} ranks of this job have no name in common. Set SHARDCACHE_JOB to "
        "the same text on all nodes, start torchrun with --rdzv-id, or state job=... ",
        variable=ranks.JOB_VARIABLE,
    )


def node_name() -> str:
    """What the processes of this node have in common, in all its containers."""
    return f"node-{boot_id()[:13] or os.uname().nodename}"


def start_of(pid: int) -> int | None:
    """When a process of this pid namespace started, in the kernel's ticks; None if it has ended.

    A process that has ended and was not waited for has ended.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The second field is a name that may hold anything: what follows its last parenthesis is
    # the state and, 19 fields on, the start (proc(5)).
    fields = text.rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in "ZX" else int(fields[19])
