"""Who the ranks are, and where they leave one another notes.

Ranks are those of torch.distributed where it is initialised, else what the launcher says. A
board keeps notes, bytes under names, in a directory that all ranks see or in the store of
torch.distributed (`board_for`). What is posted under a name is complete, at most `LIMIT` bytes.

torch is asked only if somebody has imported it already. A forked child, such as a DataLoader
worker, shares its parent's connection to torch's store and must not speak on it: the child uses
torch's ranks, not its store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import re
import secrets
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from shardcache import ranks
from shardcache.errors import BoardError, ConfigError
from shardcache.locks.mounts import mount_of
from shardcache.ranks import Ranks, safe_name
from shardcache.sync.paths import look, makedirs
from shardcache.units import parse_choice

__all__ = ["LIMIT", "Board", "Process", "Scope", "board_for", "is_alone"]
__all__ += ["local_rank", "local_world_size", "node_rank", "rank", "world_size"]

logger = logging.getLogger(__name__)

Scope = Literal["node", "job"]
T = TypeVar("T")

#: Bytes of a note: results are told in it, data goes into files of its own.
LIMIT = 1 << 20
DIRECTORY_VARIABLE = "SHARDCACHE_SYNC_DIR"
#: Below a directory that users name, which holds files of theirs, too.
_NAME = ".shardcache-sync"
#: Seconds without a call after which a job's notes on the node are removed.
_FORGOTTEN = 30 * 86400.0
#: What a launcher counts up when it starts the ranks of a job anew: torchrun, Slurm (requeue).
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_STEP = re.compile(r"[0-9]{1,9}\Z")  # the batch script's and the shell's have ten digits
#: What filesystems say that have no hard links; a file is then made by O_EXCL.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})

# -- ranks ---------------------------------------------------------------------------------


def _distributed() -> Any:
    """torch.distributed if it is initialised in this process or in the one it was forked from."""
    found = sys.modules.get("torch.distributed")
    # While another thread imports torch, it has no such functions yet.
    available, initialised = (getattr(found, f"is_{x}", None) for x in ("available", "initialized"))
    return found if available and initialised and available() and initialised() else None


def rank() -> int:
    """Return this process's rank in its job; 0 where nobody launched it as one of several.

    Raises:
        ConfigError: the environment states a rank that cannot be.
    """
    torch = _distributed()
    return int(torch.get_rank()) if torch else ranks.detect().rank


def world_size() -> int:
    """Return how many ranks the job has; 1 where nobody launched this process as one of several.

    Raises:
        ConfigError: as `rank`.
    """
    torch = _distributed()
    return int(torch.get_world_size()) if torch else ranks.detect().world_size


def local_rank() -> int:
    """Return this process's rank among those of its job on its node.

    Raises:
        ConfigError: the launcher does not say, or as `rank`.
    """
    found = _launched()
    if found.local_rank is not None:
        return found.local_rank
    if found.world_size == 1:
        return 0
    if ranks.local_world_size() == found.world_size:  # all of them are on this node
        return found.rank
    raise _unknown("local rank", "LOCAL_RANK")


def local_world_size() -> int:
    """Return how many ranks of the job are on this node.

    Raises:
        ConfigError: as `local_rank`.
    """
    found = _launched()
    size = ranks.local_world_size()
    if size is None and found.world_size == 1:
        return 1
    if size is None or size > found.world_size:
        raise _unknown("number of ranks on this node", "LOCAL_WORLD_SIZE")
    return size


def node_rank() -> int:
    """Return the number of this node among those of the job.

    Raises:
        ConfigError: as `local_rank`.
    """
    found = _launched()
    if found.node_rank is not None:
        return found.node_rank
    size = 1 if found.world_size == 1 else ranks.local_world_size()
    if size == found.world_size:
        return 0
    # Launchers place ranks in blocks unless they are told otherwise; then the local rank shows it.
    if size and found.local_rank is not None and (found.rank - found.local_rank) % size == 0:
        return (found.rank - found.local_rank) // size
    raise _unknown("rank of this node", "GROUP_RANK")


def _launched() -> Ranks:
    """What the launcher says, if it speaks of the ranks that torch has."""
    found, actual = ranks.detect(), (rank(), world_size())
    return found if actual == (found.rank, found.world_size) else Ranks(*actual)


def _unknown(what: str, variable: str) -> ConfigError:
    return ConfigError(
        f"Neither torchrun, Slurm, MPI nor PMI states the {what} of rank {rank()}. "
        f"Start the ranks with one of them, or set {variable} beside RANK and WORLD_SIZE.",
        variable=variable,
    )


# -- processes -----------------------------------------------------------------------------


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _machine() -> str:
    """Which boot of which machine, and which pid namespace; empty where the kernel does not say."""
    try:
        return f"{_boot_id()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """When a process of this pid namespace started, in the kernel's ticks; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The second field is a name that may hold anything: what follows its last parenthesis is
    # the state and, 19 fields on, the start (proc(5)).
    fields = text.rpartition(")")[2].split()
    return None if len(fields) < 20 or fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told from all others; no clock and no pid of another machine is believed.

    Attributes:
        pid, host, rank: for people.
        began: when it posted this, in seconds since the epoch: for people.
        machine: its boot and pid namespace.
        started: when it started, in the kernel's ticks.
        token: random: two notes are never the same.
    """

    pid: int
    host: str
    rank: int | None
    began: float
    machine: str
    started: int | None
    token: str

    @classmethod
    def this(cls) -> Process:
        """Describe the calling process."""
        number: int | None = None
        with contextlib.suppress(ConfigError):  # raised by whoever needs the rank
            number = rank()
        pid, token = os.getpid(), secrets.token_hex(8)
        return cls(
            pid, socket.gethostname(), number, time.time(), _machine(), _start_of(pid), token
        )

    @classmethod
    def parse(cls, data: bytes | None) -> Process | None:
        """Read what `encode` wrote; None for anything else."""
        try:
            found = cls(**json.loads(data or b""))
            # They are calculated with, and the file may hold anything.
            known = type(found.pid) is int and type(found.began) in (int, float)
        except (ValueError, TypeError, RecursionError):
            return None
        return found if known else None

    def encode(self) -> bytes:
        """Write it as `parse` reads it."""
        return json.dumps(asdict(self)).encode()

    def has_ended(self) -> bool:
        """Whether it is a process of this machine that has ended; False of all others."""
        if not self.machine or self.machine != _machine() or self.started is None:
            return False
        return _start_of(self.pid) != self.started

    def is_this(self) -> bool:
        """Whether it is the calling process."""
        mine = _machine(), os.getpid(), _start_of(os.getpid())
        return (self.machine, self.pid, self.started) == mine

    def __str__(self) -> str:
        who = f"process {self.pid} on {self.host}"
        return who if self.rank is None else f"rank {self.rank} ({who})"


# -- boards --------------------------------------------------------------------------------


class FileBoard:
    """Notes as files in a directory that all ranks see; safe between threads, processes, nodes.

    A note gets its name by link(2), which fails if the name is taken, on NFS, Lustre and GPFS,
    too; what replaces another note, by rename. Names are read through `look`, for another
    node may have made them a moment ago.

    Args:
        directory: where; made here.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = makedirs(directory)

    def __str__(self) -> str:
        return str(self._directory)

    def get(self, name: str) -> bytes | None:
        """Read what is posted under a name."""
        path = self._directory / name
        for _ in range(10):
            if look(path) is None:
                return None
            try:
                with open(path, "rb") as file:
                    return file.read(LIMIT + 1)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as exn:
                if exn.errno != errno.ESTALE:  # another node replaced it between two calls
                    raise
        return None

    def put(self, name: str, data: bytes) -> None:
        """Post something in place of what is there."""
        with self._temporary(name, data) as (temporary, path):
            temporary.replace(path)

    def create(self, name: str, data: bytes) -> bool:
        """Post something if nothing is posted yet; of several at once one succeeds."""
        with self._temporary(name, data) as (temporary, path):
            try:
                path.hardlink_to(temporary)
            except FileExistsError:
                # An answer may have been lost and the request repeated: then it is ours.
                found = look(path)
                return found is not None and os.path.samestat(found, temporary.stat())
            except OSError as exn:
                if exn.errno not in _NO_LINKS:
                    raise
                try:
                    with open(path, "xb") as file:
                        file.write(data)
                except FileExistsError:
                    return False
        return True

    @contextlib.contextmanager
    def _temporary(self, name: str, data: bytes) -> Any:
        path = self._directory / name
        if not path.parent.is_dir():
            makedirs(path.parent)
        temporary = path.with_name(f".{secrets.token_hex(12)}")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
            yield temporary, path
        finally:
            with contextlib.suppress(OSError):  # renamed, or nobody finds it
                temporary.unlink()

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return which of several names of one room (up to the last slash) are not posted."""
        room = (self._directory / names[0]).parent if names else self._directory
        try:
            posted = {path.name for path in room.iterdir()}
        except OSError as exn:
            if exn.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                raise
            posted = set()
        return [name for name in names if name.rpartition("/")[2] not in posted]

    def remove(self, name: str) -> None:
        """Take down what is posted, and its room if that is empty then."""
        path = self._directory / name
        with contextlib.suppress(OSError):  # nobody looks for what is left
            path.unlink()
            path.parent.rmdir()


class StoreBoard:
    """Notes in the store of torch.distributed, which compares before it sets.

    The store blocks a reader of a name that is absent until its own timeout, for all threads of
    the process, so it is first asked whether the name is there.

    Args:
        store: ``torch.distributed.Store``.
        prefix: of all names.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __str__(self) -> str:
        return "the store of torch.distributed"

    def get(self, name: str) -> bytes | None:
        """Read what is posted under a name."""
        key = f"{self._prefix}/{name}"
        return bytes(_ask(self._store.get, key)) if _ask(self._store.check, [key]) else None

    def put(self, name: str, data: bytes) -> None:
        """Post something in place of what is there."""
        _ask(self._store.set, f"{self._prefix}/{name}", data)

    def create(self, name: str, data: bytes) -> bool:
        """Post something if nothing is posted yet; two that post the same bytes both succeed."""
        key, text = f"{self._prefix}/{name}", data.decode("ascii")
        return bytes(_ask(self._store.compare_set, key, "", text)) == data

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the names from the first one on that is not posted; the rest is not asked for."""
        for number, name in enumerate(names):
            if not _ask(self._store.check, [f"{self._prefix}/{name}"]):
                return list(names[number:])
        return []

    def remove(self, name: str) -> None:
        """Take down what is posted."""
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or is gone
            self._store.delete_key(f"{self._prefix}/{name}")


Board = FileBoard | StoreBoard


def _ask(call: Callable[..., T], *args: Any) -> T:
    try:
        return call(*args)
    except RuntimeError as exn:  # DistStoreError, DistNetworkError and older ones
        raise BoardError(
            f"The store of torch.distributed does not answer ({str(exn).splitlines()[0]:.200}). "
            "Rank 0, which serves it, has probably ended: look at its output."
        ) from exn


def board_for(per: Scope, directory: str | os.PathLike[str] | None, job: str | None) -> Board:
    """Return the place where the ranks of this job, or of this node of it, meet.

    That is ``directory``, else torch's store, else the directory in ``SHARDCACHE_SYNC_DIR``,
    else, for ranks that are all on one node, a directory of that node.

    Args:
        per: ``node`` or ``job``.
        directory: stated by the caller.
        job: its name, stated by the caller.

    Raises:
        ConfigError: there is no place that all of them can reach.
    """
    parse_choice(per, ("node", "job"))
    name = _job_name(job)
    if per == "node":
        name = f"{name}/node-{_boot_id()[:13] or os.uname().nodename}"
    if directory is not None:
        return FileBoard(Path(directory).absolute() / _NAME / name)
    if per == "job" and (store := _torch_store()) is not None:
        return StoreBoard(store, f"shardcache/{name}")
    if stated := os.environ.get(DIRECTORY_VARIABLE, "").strip():
        return FileBoard(Path(stated).absolute() / _NAME / name)
    size = world_size()
    if per == "node" or size in (1, ranks.local_world_size()):
        place = _node_directory()
        _sweep(place, keep=name.partition("/")[0])
        return FileBoard(place / name)
    raise ConfigError(
        f"The {size} ranks of this job have no place to meet. Give dir=, or set "
        f"{DIRECTORY_VARIABLE}, to a directory that all nodes share, or call "
        "torch.distributed.init_process_group() first.",
        variable=DIRECTORY_VARIABLE,
    )


def _node_directory() -> Path:
    """A directory of this user on this node, in memory or on a local disk."""
    for base in ("/dev/shm", "/run/lock", "/tmp", "/var/tmp"):  # noqa: S108 - checked below
        path, mount = Path(base, f"shardcache-sync-{os.getuid()}"), mount_of(base)
        if mount is None or not mount.is_local:
            continue
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()
        except OSError as exn:
            logger.debug("%s: not used: %s", path, exn)
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o22:
            return path
    raise ConfigError(
        "No directory on this node can be used: /dev/shm, /run/lock, /tmp and /var/tmp are not "
        f"writable, or not local. Set {DIRECTORY_VARIABLE}.",
        variable=DIRECTORY_VARIABLE,
    )


def _sweep(place: Path, keep: str) -> None:
    """Remove what jobs left on this node that have not called for a month.

    ``place`` is this user's and holds nothing else. Each call of a job touches its directory.
    """
    own = place / keep
    try:
        if own.is_dir():
            os.utime(own)
            return
        for path in place.iterdir():
            if time.time() - path.lstat().st_mtime > _FORGOTTEN and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
    except OSError as exn:  # another rank does the same
        logger.debug("%s: not swept: %s", place, exn)


# -- the job -------------------------------------------------------------------------------

#: The store of the process that this one was forked from.
_inherited: Any = None
#: The name of a process that nobody launched; its forked children know it, too.
_alone: str | None = None


def _after_fork() -> None:
    global _inherited
    _inherited = _default_store() or _inherited


os.register_at_fork(after_in_child=_after_fork)


def _torch_store() -> Any:
    """The store over which the ranks of torch.distributed met; None if this process has none."""
    worker = getattr(sys.modules.get("torch.utils.data"), "get_worker_info", None)
    store = None if worker is not None and worker() is not None else _default_store()
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


def is_alone() -> bool:
    """Whether nobody launched this process, nor gave its job a name."""
    found = ranks.detect()
    return found.job is None and found.world_size == 1 and _torch_store() is None


def _job_name(job: str | None = None) -> str:
    """A name of the job that all its ranks know, so that they find one another and nobody else.

    A job that states a name shares results with all that state the same one, also with earlier
    runs. Otherwise the name is the launcher's id of the job with the number of its restarts, so
    that a job that was started again begins anew.

    Raises:
        ConfigError: ranks of several nodes have nothing in common.
    """
    if job is not None:
        if not job.strip():
            raise ConfigError("job is empty. Give the name that all its ranks have in common.")
        return safe_name(job)
    found = ranks.detect()
    parts = [found.job or _agreed_name() or _local_name(found)]
    for variable in _RESTARTS:
        if (count := os.environ.get(variable, "").strip()) not in ("", "0"):
            parts.append(f"restart{count}")
    if _STEP.match(step := os.environ.get("SLURM_STEP_ID", "").strip()):
        parts.append(f"step{step}")
    if found.source == "torch":  # torchrun with fewer nodes than before counts no restart
        parts.append(f"of{found.world_size}")
    return safe_name("-".join(parts))


def _agreed_name() -> str | None:
    """A random name that all ranks of torch.distributed read from its store."""
    store = _torch_store()
    if store is None:
        return None
    return bytes(_ask(store.compare_set, "shardcache/job", "", secrets.token_hex(16))).decode()


def _local_name(found: Ranks) -> str:
    """A name from the process that started the ranks, if all of them are on this node."""
    global _alone
    if found.world_size == 1:
        if _alone is None:
            _alone = f"process-{os.getpid()}-{_start_of(os.getpid())}-{_boot_id()[:8]}"
        return _alone
    if ranks.local_world_size() == found.world_size:
        # torchrun without --rdzv-id: what starts all ranks of this node is the same process.
        parent = multiprocessing.parent_process()
        launcher = parent.pid if parent is not None and parent.pid else os.getppid()
        return f"launcher-{launcher}-{_start_of(launcher)}-{_boot_id()[:8]}"
    raise ConfigError(
        f"The {found.world_size} ranks of this job have no name in common. Set SHARDCACHE_JOB to "
        "the same text on all nodes, start torchrun with --rdzv-id, or state job=... ",
        variable=ranks.JOB_VARIABLE,
    )
