"""Which rank of which job this process is.

Ranks come from torch.distributed if the program has initialised it, otherwise from the launcher.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardcache import ranks
from shardcache.clock import boot_id
from shardcache.errors import BoardError, ConfigError
from shardcache.ranks import safe_name

#: Launchers increase these when they restart the ranks (torchrun, Slurm) or start a job step.
_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")


def rank() -> int:
    """Return this process's rank in its job, or 0 without a launcher.

    Raises:
        ConfigError: the environment states an impossible rank.
    """
    torch = _distributed()
    return int(torch.get_rank()) if torch else ranks.detect().rank


def world_size() -> int:
    """Return the number of ranks in this job, or 1 without a launcher."""
    torch = _distributed()
    return int(torch.get_world_size()) if torch else ranks.detect().world_size


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
    # torch has no public function for the store. This private one exists since torch 1.8.
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):  # a backend without a store, such as mpi
        return None


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Raise `BoardError` if torch's store does not answer in the body of a ``with`` block."""
    try:
        yield
    except RuntimeError as exn:  # the base of DistStoreError, DistNetworkError and older errors
        raise BoardError(
            f"The store of torch.distributed does not answer ({str(exn).splitlines()[0]:.200}). "
            "Rank 0, which serves it, has probably ended. Check its output."
        ) from exn


def process_name(pid: int) -> str:
    """Return a name that no other process on any machine has: boot, pid, start time (proc(5))."""
    with contextlib.suppress(OSError):  # /proc does not show a parent outside our pid namespace
        # The second field may contain any character, so split after its last parenthesis.
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return f"{boot_id()}-{pid}-{stat.rpartition(')')[2].split()[19]}"
    return f"{socket.gethostname()}-{pid}"


#: Job name of a process without a launcher. Its forked children inherit the name.
_OWN_JOB = process_name(os.getpid())


def describe_process() -> str:
    """Return this process's description for messages: ``rank 3 (process 4711 on node-b)``."""
    return f"rank {rank()} (process {os.getpid()} on {socket.gethostname()})"


def job_name(job: str | None = None) -> str:
    """Return a name that all ranks of this job have in common, and no other job has.

    The name is ``job`` if it is given. Otherwise it consists of the launcher's id and restart
    counts, so that a restarted job does not find the notes of its former run.

    Raises:
        ConfigError: the ranks have no id in common, or ``job`` is empty.
    """
    if job is not None:
        if not job.strip():
            raise ConfigError("job is empty. Pass a name that all its ranks have in common.")
        return safe_name(job)
    found = ranks.detect()
    name = found.job
    if name is None and (store := torch_store()) is not None:  # the first rank chooses a name
        with answering():
            name = store.compare_set("shardcache/job", "", secrets.token_hex(16)).decode()
    if name is None and found.world_size == 1:
        name = _OWN_JOB
    if name is None and found.world_size == found.local_size:
        # torchrun without --rdzv-id: one process on this node has started all ranks, so its name
        # identifies the job.
        parent = multiprocessing.parent_process()
        name = process_name((parent and parent.pid) or os.getppid())
    if name is None:
        raise ConfigError(
            f"The {found.world_size} ranks of this job have no name in common. Pass job=, start "
            f"torchrun with --rdzv-id, or set {ranks.JOB_VARIABLE} to the same text on all nodes."
        )
    return safe_name("-".join([name, *(os.environ.get(each) or "0" for each in _COUNTS)]))
