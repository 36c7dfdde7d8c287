"""Where ranks tell one another things, and which of those places is used.

* files in a directory that all of them see (`fileboard`): ``dir=``, or the directory in
  ``SHARDCACHE_SYNC_DIR``, or for the ranks of one node a directory on that node;
* the store of torch.distributed, where it is initialised (`storeboard`).

What is posted under a name is whole: bytes, at most `LIMIT` of them.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal, Protocol

from shardcache import ranks
from shardcache.errors import ConfigError
from shardcache.locks.mode import node_directory
from shardcache.sync.fileboard import FileBoard
from shardcache.sync.standing import job_name, node_name, torch_store, world_size
from shardcache.sync.storeboard import StoreBoard
from shardcache.units import parse_choice

__all__ = ["DIRECTORY_VARIABLE", "Board", "Grip", "Scope", "board_for"]

logger = logging.getLogger(__name__)

Scope = Literal["node", "job"]

DIRECTORY_VARIABLE = "SHARDCACHE_SYNC_DIR"
#: Below a directory that users name, where there are files of theirs, too.
_NAME = ".shardcache-sync"
#: Seconds without a call after which a job is over. Longer than jobs may be queued or held.
_FORGOTTEN = 30 * 86400.0
_IDENTITY = blake2b(b"shardcache.sync", digest_size=8).hexdigest()


class Grip(Protocol):
    """A claim in this process's hand; see `Board.hold`."""

    def release(self) -> None:
        """Let go; the claim stays posted."""
        ...


class Board(Protocol):
    """One place; safe between threads, processes and nodes.

    Attributes:
        exact: whether `held` knows at once that whoever made a claim has died.
        listed: whether `covers` costs one request, however many names it is about.
    """

    exact: bool
    listed: bool

    def get(self, name: str) -> bytes | None:
        """What is posted under a name."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Post something in place of what is there."""
        ...

    def first(self, name: str, data: bytes) -> bool:
        """Post something if nobody has posted anything; of several at once one succeeds."""
        ...

    def hold(self, name: str, data: bytes) -> Grip | None:
        """As `first`, with a grip that ends with this process; None if somebody was first."""
        ...

    def held(self, name: str) -> bool | None:
        """Whether the grip on a claim has not ended; None if the board does not know."""
        ...

    def posted(self, names: Sequence[str]) -> set[str]:
        """Which of several names in one room (the part before the last slash) are posted."""
        ...

    def covers(self, names: Sequence[str]) -> bool:
        """Whether all of them are."""
        ...

    def remove(self, name: str) -> None:
        """Take down what is posted, and its room if that is empty then."""
        ...

    def __str__(self) -> str:
        """Where it is, for people."""
        ...


def board_for(per: Scope, directory: str | os.PathLike[str] | None, job: str | None) -> Board:
    """The place where the ranks of this job, or of this node of it, meet.

    Args:
        per: ``node`` or ``job``.
        directory: stated by the caller.
        job: its name, stated by the caller.

    Raises:
        ConfigError: there is none that all of them can reach.
    """
    parse_choice(per, ("node", "job"))
    name = job_name(job)
    if per == "node":
        name = f"{name}/{node_name()}"
    if directory is not None:
        return FileBoard(Path(directory).absolute() / _NAME / name)
    if per == "job" and (store := torch_store()) is not None:
        return StoreBoard(store, f"shardcache/{name}")
    if stated := os.environ.get(DIRECTORY_VARIABLE, "").strip():
        return FileBoard(Path(stated).absolute() / _NAME / name)
    size = world_size()
    if per == "node" or size in (1, ranks.local_world_size()):
        place = _on_this_node()
        _sweep(place, keep=name.partition("/")[0])
        return FileBoard(place / name)
    raise ConfigError(
        f"The {size} ranks of this job have no place to meet. Give dir=, or set "
        f"{DIRECTORY_VARIABLE}, to a directory that all nodes share, or call "
        "torch.distributed.init_process_group() first.",
        variable=DIRECTORY_VARIABLE,
    )


def _sweep(place: Path, keep: str) -> None:
    """Remove what jobs left on this node that have told one another nothing for a month.

    ``place`` is this user's, and nothing in it is anything else. A job's directory is as old as
    its last call, which dates it anew.
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


def _on_this_node() -> Path:
    found = node_directory(_IDENTITY)
    if found is None:
        raise ConfigError(
            "No directory on this node can be used: /dev/shm, /run/lock, /tmp and /var/tmp are not "
            f"writable, or not local. Set {DIRECTORY_VARIABLE}.",
            variable=DIRECTORY_VARIABLE,
        )
    return found
