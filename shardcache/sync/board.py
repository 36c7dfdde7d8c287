"""Find the rank and job of this process, and the board where the ranks leave each other notes.

Ranks come from torch.distributed if the program has initialised it, else from the launcher. A note
is a few bytes under a name, in a directory or in torch's store.
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
#: Notes go below this name in a directory of the user, which may hold other files.
_NAME = ".shardcache-sync"
#: Launchers increase these when they restart the ranks (torchrun, Slurm), and for each job step.
_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")


def rank() -> int:
    """Return this process's rank in its job, or 0 without a launcher.

    Raises:
        ConfigError: the environment states an impossible rank.
    """
    torch = _distributed()
    return int(torch.get_rank()) if torch else ranks.detect().rank


def world_size() -> int:
    """Return how many ranks the job has, or 1 without a launcher."""
    torch = _distributed()
    return int(torch.get_world_size()) if torch else ranks.detect().world_size


def _distributed() -> Any:
    """Return torch.distributed if it is initialised, else None."""
    module = sys.modules.get("torch.distributed")
    # The function is missing while another thread imports torch.
    return module if getattr(module, "is_initialized", lambda: False)() else None


def torch_store() -> Any:
    """Return the store that connects the ranks of torch.distributed, or None."""
    worker = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)
    # A DataLoader worker must not use its parent's connection.
    if _distributed() is None or worker() is not None:
        return None
    # The store has no public name. This one exists since torch 1.8.
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):  # a backend without one: mpi
        return None


def _call(method: Callable[..., T], *args: Any) -> T:
    """Call a method of torch's store, and raise `BoardError` if the store does not answer."""
    try:
        return method(*args)
    except RuntimeError as exn:  # DistStoreError, DistNetworkError and older ones
        raise BoardError(
            f"The store of torch.distributed does not answer ({str(exn).splitlines()[0]:.200}). "
            "Rank 0, which serves it, has probably ended. Check its output."
        ) from exn


def process_name(pid: int) -> str:
    """Return a name that no other process on any machine has: boot, pid, start time (proc(5))."""
    with contextlib.suppress(OSError):  # a parent outside our pid namespace has no stat
        # The second field may contain any character, so split after its last parenthesis.
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return f"{boot_id()}-{pid}-{stat.rpartition(')')[2].split()[19]}"
    return f"{socket.gethostname()}-{pid}"


#: Job name of a process without a launcher. Its forked children inherit the value.
_OWN_JOB = process_name(os.getpid())


def describe_process() -> str:
    """Return this process's description for messages: ``rank 3 (process 4711 on node-b)``."""
    return f"rank {rank()} (process {os.getpid()} on {socket.gethostname()})"


class FileBoard:
    """Keeps notes as files below a directory that all ranks share. Safe between threads and nodes.

    A note gets its name by link(2), which fails if the name is taken, also on NFS, Lustre and GPFS.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def get(self, name: str) -> bytes | None:
        """Return the note of this name, or None."""
        path = self._directory / name
        try:
            return path.read_bytes() if find(path) else None
        except OSError as exn:
            if exn.errno in ABSENT:  # another node replaced it between the two calls
                return None
            raise

    def put(self, name: str, data: bytes) -> None:
        """Post a note, and replace one of the same name."""
        with atomic_write(self._directory / name, sync=False) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Post a note and return True, unless one of that name exists."""
        path = self._directory / name
        temporary = makedirs(path.parent) / f".{secrets.token_hex(12)}"
        try:
            with atomic_write(temporary) as file:  # synced: a power failure leaves no empty note
                file.write(data)
            path.hardlink_to(temporary)
        except FileExistsError:
            # If the first reply was lost and NFS repeated the request, the name is ours.
            found = find(path)
            return found is not None and os.path.samestat(found, temporary.stat())
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def has_all(self, names: Sequence[str]) -> bool:
        """Return whether all notes of these names, in one directory, exist."""
        try:
            posted = os.listdir((self._directory / names[0]).parent)  # noqa: PTH208 - names alone
        except FileNotFoundError:
            return False
        return {name.rpartition("/")[2] for name in names}.issubset(posted)

    def remove(self, name: str) -> None:
        """Remove a note, and its directory if it is empty."""
        path = self._directory / name
        with contextlib.suppress(OSError):  # a note that stays does no harm
            path.unlink()
            path.parent.rmdir()


class _StoreBoard:
    """Keeps notes in the store of torch.distributed; see `FileBoard` for the methods."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __str__(self) -> str:
        return "the store of torch.distributed"

    def get(self, name: str) -> bytes | None:
        # For an absent name, `get` of the store would block all threads of the process.
        return bytes(_call(self._store.get, name)) if self.has_all([name]) else None

    def put(self, name: str, data: bytes) -> None:
        _call(self._store.set, name, data)

    def create(self, name: str, data: bytes) -> bool:
        # Equal notes of two ranks would both succeed, but each note names its process.
        return bytes(_call(self._store.compare_set, name, "", data.decode())) == data

    def has_all(self, names: Sequence[str]) -> bool:
        return bool(_call(self._store.check, list(names)))

    def remove(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store cannot delete, or its server has ended
            self._store.delete_key(name)


Board = FileBoard | _StoreBoard


def board_for(per: Scope, directory: str | os.PathLike[str] | None, job: str | None) -> Board:
    """Return the board for all ranks of a job, or for those of them on this node.

    It is in ``directory``, else in torch's store, else in the directory ``SHARDCACHE_SYNC_DIR``,
    else, if all these ranks are on one node, in a directory of that node.

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
            f"The {world_size()} ranks of this job have no place to meet. Pass dir=, or set "
            f"{DIRECTORY_VARIABLE}, to a directory that all of them share, or call "
            "torch.distributed.init_process_group() first.",
            variable=DIRECTORY_VARIABLE,
        )
    return FileBoard(place / where)


def job_name(job: str | None = None) -> str:
    """Return a name that all ranks of this job have in common, and no other job has.

    This is ``job``, else the launcher's id and its restart counts, so that a restarted job does not
    find the notes of its former run.

    Raises:
        ConfigError: the launcher states no id, or ``job`` is empty.
    """
    if job is not None:
        if not job.strip():
            raise ConfigError("job is empty. Pass a name that all its ranks have in common.")
        return safe_name(job)
    found = ranks.detect()
    name = found.job
    if name is None and (store := torch_store()) is not None:  # the first rank chooses
        chosen = _call(store.compare_set, "shardcache/job", "", secrets.token_hex(16))
        name = bytes(chosen).decode()
    if name is None and found.world_size == 1:
        name = _OWN_JOB
    if name is None and found.world_size == found.local_size:
        # torchrun without --rdzv-id: one process on this node has started all ranks.
        parent = multiprocessing.parent_process()
        name = process_name((parent and parent.pid) or os.getppid())
    if name is None:
        raise ConfigError(
            f"The {found.world_size} ranks of this job have no name in common. Pass job=, start "
            f"torchrun with --rdzv-id, or set {ranks.JOB_VARIABLE} to the same text on all nodes.",
            variable=ranks.JOB_VARIABLE,
        )
    return safe_name("-".join([name, *(os.environ.get(each) or "0" for each in _COUNTS)]))
