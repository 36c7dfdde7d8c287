"""Find the rank and job of this process, and the board where ranks leave notes for each other.

Ranks come from torch.distributed if the program has initialised it, otherwise from the launcher. A
board is a directory or torch's store, and a note is a few bytes under a name.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardcache import ranks
from shardcache.clock import boot_id
from shardcache.errors import BoardError, ConfigError
from shardcache.locks.mounts import node_directory
from shardcache.ranks import safe_name
from shardcache.sync.paths import ABSENT, atomic_write, find, makedirs
from shardcache.units import parse_choice

T = TypeVar("T")
Scope = Literal["node", "job"]

DIRECTORY_VARIABLE = "SHARDCACHE_SYNC_DIR"
#: Notes are below this name in the user's directory, because the directory may hold other files.
_NAME = ".shardcache-sync"
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


def _call(method: Callable[..., T], *args: Any) -> T:
    """Call a method of torch's store, and raise `BoardError` if the store does not answer."""
    try:
        return method(*args)
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


class FileBoard:
    """Keeps notes as files below a directory, which several threads and nodes may use at once.

    `create` names a note by link(2), which fails if the name exists, even on NFS, Lustre or GPFS.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def get(self, name: str) -> bytes | None:
        """Return the note with this name, or None if there is none."""
        path = self._directory / name
        try:
            return path.read_bytes() if find(path) else None
        except OSError as exn:
            if exn.errno in ABSENT:  # another node replaced the file between the two calls
                return None
            raise

    def put(self, name: str, data: bytes) -> None:
        """Post a note, replacing an existing note with the same name."""
        with atomic_write(self._directory / name, sync=False) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Post a note and return True, or return False if a note with that name exists."""
        path = self._directory / name
        temporary = makedirs(path.parent) / f".{secrets.token_hex(12)}"
        try:
            with atomic_write(temporary) as file:  # synced: a power failure leaves no empty note
                file.write(data)
            path.hardlink_to(temporary)
        except FileExistsError:
            # If NFS lost the first reply and repeated the request, the existing name is our own.
            found = find(path)
            return found is not None and os.path.samestat(found, temporary.stat())
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def has_all(self, names: Sequence[str]) -> bool:
        """Return whether notes with all these names, which are in one directory, exist."""
        try:
            posted = os.listdir((self._directory / names[0]).parent)  # noqa: PTH208 - names alone
        except FileNotFoundError:
            return False
        return {name.rpartition("/")[2] for name in names}.issubset(posted)

    def remove(self, name: str) -> None:
        """Remove a note, and its directory if it is empty."""
        path = self._directory / name
        with contextlib.suppress(OSError):  # a note that remains does no harm
            path.unlink()
            path.parent.rmdir()


class _StoreBoard:
    """Keeps notes in the store of torch.distributed. Its methods do the same as `FileBoard`'s."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __str__(self) -> str:
        return "the store of torch.distributed"

    def get(self, name: str) -> bytes | None:
        # Check the name first: for an absent one, the store's `get` would block all threads.
        return bytes(_call(self._store.get, name)) if self.has_all([name]) else None

    def put(self, name: str, data: bytes) -> None:
        _call(self._store.set, name, data)

    def create(self, name: str, data: bytes) -> bool:
        # Two ranks that post equal notes would both succeed, but no notes are equal: each names
        # its process.
        return bytes(_call(self._store.compare_set, name, "", data.decode())) == data

    def has_all(self, names: Sequence[str]) -> bool:
        return bool(_call(self._store.check, list(names)))

    def remove(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store cannot delete, or its server has ended
            self._store.delete_key(name)


Board = FileBoard | _StoreBoard


def board_for(per: Scope, directory: str | os.PathLike[str] | None, job: str | None) -> Board:
    """Return the board for all ranks of a job, or with ``per="node"`` for its ranks on this node.

    The board is in the first of these that is available: ``directory``; torch's store (only for all
    ranks of a job); the directory in ``SHARDCACHE_SYNC_DIR``; a directory of the node (only if all
    these ranks are on one node).

    Raises:
        ConfigError: the ranks share none of these.
    """
    parse_choice(per, ("node", "job"))
    name = job_name(job)
    if directory is None and per == "job" and (store := torch_store()) is not None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return _StoreBoard(PrefixStore(f"shardcache/{name}", store))
    where = Path(name)
    if per == "node":
        where /= f"node-{boot_id()[:13] or os.uname().nodename}"
    if directory := directory or os.environ.get(DIRECTORY_VARIABLE, "").strip():
        return FileBoard(Path(directory).absolute() / _NAME / where)
    is_local = per == "node" or world_size() in (1, ranks.detect().local_size)
    if not is_local or (place := node_directory("sync")) is None:
        raise ConfigError(
            f"The {world_size()} ranks of this job share no directory or store. Pass dir=, or set "
            f"{DIRECTORY_VARIABLE}, to a directory that all of them share, or call "
            "torch.distributed.init_process_group() first."
        )
    return FileBoard(place / where)


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
        chosen = _call(store.compare_set, "shardcache/job", "", secrets.token_hex(16))
        name = bytes(chosen).decode()
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
