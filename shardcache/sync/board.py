"""Which rank of which job this is, and where the ranks leave one another notes.

Ranks are those of torch.distributed where it is initialised, else what the launcher states. torch
is asked only if somebody has imported it already. A note is some bytes under a name, in a directory
or in torch's store; `board_for` says where the ranks of a job meet.
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
#: Below a directory that users name, which holds files of theirs, too.
_NAME = ".shardcache-sync"
#: Launchers count these up when they start the ranks anew (torchrun, Slurm), and for each step.
_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")


def rank() -> int:
    """Return this process's rank in its job; 0 where nobody launched it as one of several.

    Raises:
        ConfigError: the environment states a rank that cannot be.
    """
    torch = _distributed()
    return int(torch.get_rank()) if torch else ranks.detect().rank


def world_size() -> int:
    """Return how many ranks the job has, 1 where nobody launched it."""
    torch = _distributed()
    return int(torch.get_world_size()) if torch else ranks.detect().world_size


def _distributed() -> Any:
    """torch.distributed where it is initialised, else None."""
    found = sys.modules.get("torch.distributed")
    # While another thread imports torch, it has no such function yet.
    return found if getattr(found, "is_initialized", lambda: False)() else None


def torch_store() -> Any:
    """The store over which the ranks of torch.distributed met; None if this process has none.

    A DataLoader worker has none: a forked one must not speak on its parent's connection.
    """
    worker = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", lambda: None)
    if _distributed() is None or worker() is not None:
        return None
    # There is no public name for it; this one has been there since torch 1.8.
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):  # a backend without one: mpi
        return None


def _ask(call: Callable[..., T], *args: Any) -> T:
    """Call a method of torch's store; a `BoardError` says that it does not answer."""
    try:
        return call(*args)
    except RuntimeError as exn:  # DistStoreError, DistNetworkError and older ones
        raise BoardError(
            f"The store of torch.distributed does not answer ({str(exn).splitlines()[0]:.200}). "
            "Rank 0, which serves it, has probably ended: look at its output."
        ) from exn


def process_name(pid: int) -> str:
    """A name that no other process has, on any machine: boot, number, start in ticks (proc(5))."""
    with contextlib.suppress(OSError):  # a parent outside of our pid namespace has no stat
        # The second field may hold anything, so count from its last parenthesis.
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return f"{boot_id()}-{pid}-{stat.rpartition(')')[2].split()[19]}"
    return f"{socket.gethostname()}-{pid}"


#: The name of a process that nobody launched; its forked children know it, too.
_ALONE = process_name(os.getpid())


def describe_process() -> str:
    """This process, for people: ``rank 3 (process 4711 on node-b)``."""
    return f"rank {rank()} (process {os.getpid()} on {socket.gethostname()})"


class FileBoard:
    """Notes as files below a directory that all ranks see; safe between threads and nodes.

    A note gets its name by link(2), which fails if the name is taken, on NFS, Lustre and GPFS,
    too. Names are read through `find`, for another node may have made them a moment ago.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def get(self, name: str) -> bytes | None:
        """Read what is posted under a name."""
        path = self._directory / name
        try:
            return path.read_bytes() if find(path) else None
        except OSError as exn:
            if exn.errno in ABSENT:  # another node replaced it between the two calls
                return None
            raise

    def put(self, name: str, data: bytes) -> None:
        """Post something, whether or not the name is taken."""
        with atomic_write(self._directory / name, sync=False) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Post something if nothing is posted yet; of several at once one succeeds."""
        path = self._directory / name
        temporary = makedirs(path.parent) / f".{secrets.token_hex(12)}"
        try:
            with atomic_write(temporary) as file:  # after a loss of power no note is empty
                file.write(data)
            path.hardlink_to(temporary)
        except FileExistsError:
            # An answer may have been lost and the request repeated: then it is ours.
            found = find(path)
            return found is not None and os.path.samestat(found, temporary.stat())
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def has_all(self, names: Sequence[str]) -> bool:
        """Whether all of several notes of one directory are posted."""
        try:
            posted = os.listdir((self._directory / names[0]).parent)  # noqa: PTH208 - names alone
        except FileNotFoundError:
            return False
        return {name.rpartition("/")[2] for name in names}.issubset(posted)

    def remove(self, name: str) -> None:
        """Take down what is posted, and its directory if that is empty then."""
        path = self._directory / name
        with contextlib.suppress(OSError):  # nobody needs what is left
            path.unlink()
            path.parent.rmdir()


class _StoreBoard:
    """As `FileBoard`, in the store of torch.distributed."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __str__(self) -> str:
        return "the store of torch.distributed"

    def get(self, name: str) -> bytes | None:
        # Of a name that is absent the store would block a reader, with all threads of the process.
        return bytes(_ask(self._store.get, name)) if self.has_all([name]) else None

    def put(self, name: str, data: bytes) -> None:
        _ask(self._store.set, name, data)

    def create(self, name: str, data: bytes) -> bool:
        # Two that post the same bytes would both succeed; notes differ.
        return bytes(_ask(self._store.compare_set, name, "", data.decode())) == data

    def has_all(self, names: Sequence[str]) -> bool:
        return bool(_ask(self._store.check, list(names)))

    def remove(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or has ended
            self._store.delete_key(name)


Board = FileBoard | _StoreBoard


def board_for(per: Scope, directory: str | os.PathLike[str] | None, job: str | None) -> Board:
    """Return the place where the ranks of this job, or of this node of it, meet.

    That is ``directory``, else torch's store, else the directory in ``SHARDCACHE_SYNC_DIR``,
    else, for ranks that are all on one node, a directory of that node.
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
            f"The {world_size()} ranks of this job have no place to meet. Give dir=, or set "
            f"{DIRECTORY_VARIABLE}, to a directory that all of them share, or call "
            "torch.distributed.init_process_group() first.",
            variable=DIRECTORY_VARIABLE,
        )
    return FileBoard(place / where)


def job_name(job: str | None = None) -> str:
    """A name that all ranks of the job know, so that they find one another and nobody else.

    The one that the caller states, else the launcher's id with its counts, so that a job that is
    restarted begins anew.
    """
    if job is not None:
        if not job.strip():
            raise ConfigError("job is empty. Give the name that all its ranks have in common.")
        return safe_name(job)
    found = ranks.detect()
    name = found.job
    if name is None and (store := torch_store()) is not None:  # the first random one counts
        chosen = _ask(store.compare_set, "shardcache/job", "", secrets.token_hex(16))
        name = bytes(chosen).decode()
    if name is None and found.world_size == 1:
        name = _ALONE
    if name is None and found.world_size == found.local_size:
        # torchrun without --rdzv-id: one process has started all ranks, which are on this node.
        parent = multiprocessing.parent_process()
        name = process_name((parent and parent.pid) or os.getppid())
    if name is None:
        raise ConfigError(
            f"The {found.world_size} ranks of this job have no name in common. State job=, start "
            f"torchrun with --rdzv-id, or set {ranks.JOB_VARIABLE} to the same text on all nodes.",
            variable=ranks.JOB_VARIABLE,
        )
    return safe_name("-".join([name, *(os.environ.get(each) or "0" for each in _COUNTS)]))
