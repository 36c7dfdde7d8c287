"""Which rank of which job this process is, for `shardcache.sync`.

Ranks are those of torch.distributed where it is initialised, else what the launcher says. torch is
asked only if somebody has imported it already.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from shardcache import ranks
from shardcache.clock import boot_id
from shardcache.errors import BoardError, ConfigError
from shardcache.ranks import Ranks, safe_name

T = TypeVar("T")

#: What a launcher counts up: when it starts the ranks anew (torchrun, Slurm), for each step.
_COUNTS = {
    "TORCHELASTIC_RESTART_COUNT": "restart",
    "SLURM_RESTART_COUNT": "restart",
    "SLURM_STEP_ID": "step",
}


def rank() -> int:
    """Return this process's rank in its job; 0 where nobody launched it as one of several.

    Raises:
        ConfigError: the environment states a rank that cannot be.
    """
    torch = _distributed()
    return int(torch.get_rank()) if torch else ranks.detect().rank


def world_size() -> int:
    """Return how many ranks the job has, 1 where nobody launched it. Raises as `rank`."""
    torch = _distributed()
    return int(torch.get_world_size()) if torch else ranks.detect().world_size


# -- torch.distributed ---------------------------------------------------------------------

#: The store of the process that this one was forked from, which must not be spoken to here.
_inherited: Any = None


def _distributed() -> Any:
    """torch.distributed if it is initialised in this process or in the one it was forked from."""
    found = sys.modules.get("torch.distributed")
    # While another thread imports torch, it has no such functions yet.
    available, initialised = (getattr(found, f"is_{x}", None) for x in ("available", "initialized"))
    return found if available and initialised and available() and initialised() else None


def torch_store() -> Any:
    """The store over which the ranks of torch.distributed met; None if this process has none."""
    worker = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    if _distributed() is None or (worker is not None and worker() is not None):
        return None
    # There is no public name for it; this one has been there since torch 1.8.
    from torch.distributed import distributed_c10d

    try:
        store = distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):  # a backend without one: mpi
        return None
    return None if store is _inherited else store


def _after_fork() -> None:
    global _inherited
    _inherited = torch_store() or _inherited


os.register_at_fork(after_in_child=_after_fork)


def ask_store(call: Callable[..., T], *args: Any) -> T:
    """Call a method of torch's store.

    Raises:
        BoardError: it does not answer.
    """
    try:
        return call(*args)
    except RuntimeError as exn:  # DistStoreError, DistNetworkError and older ones
        raise BoardError(
            f"The store of torch.distributed does not answer ({str(exn).splitlines()[0]:.200}). "
            "Rank 0, which serves it, has probably ended: look at its output."
        ) from exn


# -- the job's name ------------------------------------------------------------------------


def identity(pid: int) -> str:
    """A process, told from all others: machine, boot, pid namespace, number, start in ticks.

    No clock and no pid of another machine is believed. The last part is 0 if it has ended.
    """
    namespace, began = "", "0"
    with contextlib.suppress(OSError):  # no Linux; or it has ended
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no Path needed
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        # The second field is a name that may hold anything: what follows its last parenthesis
        # is the state and, 19 fields on, the start (proc(5)).
        fields = text.rpartition(")")[2].split()
        began = "0" if fields[0] in "ZX" else fields[19]
    return f"{boot_id()} {namespace} {pid} {began}"


def has_ended(other: str) -> bool:
    """Whether a process of this machine has ended, by its `identity`; False of all others."""
    place, pid, began = other.rsplit(" ", 2)
    here = identity(int(pid))
    return began != "0" and here.startswith(f"{place} ") and here != other


#: The name of a process that nobody launched; its forked children know it, too.
_ALONE = identity(os.getpid())


def job_name(job: str | None = None, size: int = 1) -> str:
    """A name of the job that all its ranks know, so that they find one another and nobody else.

    The one that the caller states, else the launcher's id with its counts, so that a job that is
    restarted begins anew. ``size`` ranks are to meet.

    Raises:
        ConfigError: the ranks have nothing in common.
    """
    if job is not None:
        if not job.strip():
            raise ConfigError("job is empty. Give the name that all its ranks have in common.")
        return safe_name(job)
    found = ranks.detect()
    name = found.job
    if name is None and (store := torch_store()) is not None:  # the first random one counts
        chosen = ask_store(store.compare_set, "shardcache/job", "", secrets.token_hex(16))
        name = bytes(chosen).decode()
    parts = [name or _local_name(found, size)]
    for variable, label in _COUNTS.items():
        count = os.environ.get(variable, "").strip()
        # Below mpirun each node has another step, mpirun's own.
        if count not in ("", "0") and not (label == "step" and found.source in ("openmpi", "pmi")):
            parts.append(f"{label}{count}")
    if found.source == "torch":  # torchrun with fewer nodes than before counts no restart
        parts.append(f"of{found.world_size}")
    return safe_name("-".join(parts))


def _local_name(found: Ranks, size: int) -> str:
    """A name from the process that started the ranks, if all of them are on this node."""
    if found.world_size == 1 and size == 1:
        return _ALONE
    if found.world_size > 1 and ranks.local_world_size() == found.world_size:
        # torchrun without --rdzv-id: what starts all ranks of this node is the same process.
        parent = multiprocessing.parent_process()
        return identity((parent and parent.pid) or os.getppid())
    raise ConfigError(
        f"The {max(size, found.world_size)} ranks of this job have no name in common. State job=, "
        f"set {ranks.JOB_VARIABLE} to the same text on all nodes, or start torchrun with "
        "--rdzv-id.",
        variable=ranks.JOB_VARIABLE,
    )
