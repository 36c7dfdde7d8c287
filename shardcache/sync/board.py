"""Where ranks leave one another notes: bytes under names, in a directory or in torch's store.

`board_for` says where the ranks of a job meet. A note is posted once (`create`) or again and again
(`put`), and stays until it is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardcache import ranks
from shardcache.clock import boot_id
from shardcache.errors import ConfigError
from shardcache.locks.mounts import node_directory
from shardcache.sync.job import ask_store, identity, job_name, rank, torch_store, world_size
from shardcache.sync.paths import ABSENT, atomic_write, look, makedirs
from shardcache.units import parse_choice

Scope = Literal["node", "job"]

DIRECTORY_VARIABLE = "SHARDCACHE_SYNC_DIR"
#: Below a directory that users name, which holds files of theirs, too.
_NAME = ".shardcache-sync"
#: Seconds without a call after which a job's notes on the node are removed.
_FORGOTTEN = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Process:
    """What a process posts of itself.

    Attributes:
        name, began: who it is and when it posted this, in seconds since the epoch: for people.
        identity: tells it from all others, see `job.identity`.
        token: random: two notes are never the same.
    """

    name: str
    began: float
    identity: str
    token: str

    @classmethod
    def this(cls) -> Process:
        """Describe the calling process."""
        name = f"process {os.getpid()} on {socket.gethostname()}"
        with contextlib.suppress(ConfigError):  # raised by whoever needs the rank
            name = f"rank {rank()} ({name})"
        return cls(name, time.time(), identity(os.getpid()), secrets.token_hex(8))

    @classmethod
    def parse(cls, data: bytes | None) -> Process | None:
        """Read what `encode` wrote; None for anything else."""
        try:
            return cls(**json.loads(data or b""))
        except (ValueError, TypeError):
            return None

    def encode(self) -> bytes:
        """Write it as `parse` reads it."""
        return json.dumps(asdict(self)).encode()


class FileBoard:
    """Notes as files below a directory that all ranks see; safe between threads and nodes.

    A note gets its name by link(2), which fails if the name is taken, on NFS, Lustre and GPFS,
    too. Names are read through `look`, for another node may have made them a moment ago.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    def get(self, name: str) -> bytes | None:
        """Read what is posted under a name."""
        path = self._directory / name
        try:
            return path.read_bytes() if look(path) else None
        except OSError as exn:
            if exn.errno in ABSENT:  # another node replaced it between the two calls
                return None
            raise

    def put(self, name: str, data: bytes) -> None:
        """Post something in place of what is there."""
        with atomic_write(self._directory / name, sync=False) as file:
            file.write(data)

    def create(self, name: str, data: bytes) -> bool:
        """Post something if nothing is posted yet; of several at once one succeeds."""
        path = self._directory / name
        temporary = makedirs(path.parent) / f".{secrets.token_hex(12)}"
        try:
            temporary.write_bytes(data)
            path.hardlink_to(temporary)
        except FileExistsError:
            # An answer may have been lost and the request repeated: then it is ours.
            found = look(path)
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
        return {os.path.basename(name) for name in names}.issubset(posted)  # noqa: PTH119

    def remove(self, name: str) -> None:
        """Take down what is posted, and its directory if that is empty then."""
        path = self._directory / name
        with contextlib.suppress(OSError):  # nobody looks for what is left
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
        return bytes(ask_store(self._store.get, name)) if self.has_all([name]) else None

    def put(self, name: str, data: bytes) -> None:
        ask_store(self._store.set, name, data)

    def create(self, name: str, data: bytes) -> bool:
        # Two that post the same bytes would both succeed; notes differ.
        return bytes(ask_store(self._store.compare_set, name, "", data.decode())) == data

    def has_all(self, names: Sequence[str]) -> bool:
        return bool(ask_store(self._store.check, list(names)))

    def remove(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or is gone
            self._store.delete_key(name)


Board = FileBoard | _StoreBoard


def board_for(
    per: Scope, directory: str | os.PathLike[str] | None, job: str | None, size: int = 1
) -> Board:
    """Return the place where the ranks of this job, or of this node of it, meet.

    That is ``directory``, else torch's store, else the directory in ``SHARDCACHE_SYNC_DIR``,
    else, for ranks that are all on one node, a directory of that node. ``size`` is how many meet,
    where the caller knows.

    Raises:
        ConfigError: there is no place that all of them can reach, or no name that they share.
    """
    parse_choice(per, ("node", "job"))
    name = job_name(job, size)
    if directory is None and per == "job" and (store := torch_store()) is not None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return _StoreBoard(PrefixStore(f"shardcache/{name}", store))
    where = Path(name)
    if per == "node":
        where /= f"node-{boot_id()[:13] or os.uname().nodename}"
    if directory := directory or os.environ.get(DIRECTORY_VARIABLE, "").strip():
        return FileBoard(Path(directory).absolute() / _NAME / where)
    size = world_size()
    if per == "job" and size not in (1, ranks.local_world_size()):
        raise ConfigError(
            f"The {size} ranks of this job have no place to meet. Give dir=, or set "
            f"{DIRECTORY_VARIABLE}, to a directory that all nodes share, or call "
            "torch.distributed.init_process_group() first.",
            variable=DIRECTORY_VARIABLE,
        )
    if (place := node_directory("sync")) is None:
        raise ConfigError(
            "No directory on this node can be used: /dev/shm, /run/lock, /tmp and /var/tmp are "
            f"not writable, or not local. Set {DIRECTORY_VARIABLE}.",
            variable=DIRECTORY_VARIABLE,
        )
    _sweep(place, keep=name)
    return FileBoard(place / where)


def _sweep(place: Path, keep: str) -> None:
    """Remove what jobs left on this node that have not called for a month.

    ``place`` is this user's and holds nothing else. Each call of a job touches its directory.
    """
    with contextlib.suppress(OSError):  # another rank does the same
        if (own := place / keep).is_dir():
            os.utime(own)
            return
        for path in place.iterdir():
            if time.time() - path.lstat().st_mtime > _FORGOTTEN and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
