"""Warnings that appear once in a process, or once per job and node."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardcache.errors import ConfigError
from shardcache.layout import Layout
from shardcache.locks.sessions import leave_note
from shardcache.ranks import Ranks, safe_name

logger = logging.getLogger(__name__)

#: The variable that names the node and a directory of which a process has logged that it cannot be
#: used. Forked and spawned children inherit it.
_LOGGED = "_SHARDCACHE_UNUSABLE"


@dataclass(eq=False)
class Notices:
    """The warnings of one process that are not repeated."""

    _job: str  # identifies the job among those of this node
    _node: Callable[[], Layout | None]  # returns the node's namespace, if it can be used
    _known: set[str] = field(default_factory=set)

    def warn(
        self, kind: str, text: str, *args: object, extra: Mapping[str, object] | None = None
    ) -> None:
        """Log at WARNING the first time that this process reports ``kind``, then at INFO."""
        level = logging.INFO if kind in self._known else logging.WARNING
        self._known.add(kind)
        logger.log(level, text, *args, extra=extra)

    def mute(self, kind: str) -> None:
        """Log warnings of this kind at INFO from now on: the fault was logged in other words."""
        self._known.add(kind)

    def is_new(self, kind: str) -> bool:
        """Return whether this is the first call with ``kind`` in this job and on this node."""
        is_known = kind in self._known
        self._known.add(kind)
        if is_known or (node := self._node()) is None:
            return not is_known
        return leave_note(node, safe_name(f"{self._job}-{kind}"))


def log_unusable(error: ConfigError, directory: Path, ranks: Ranks) -> None:
    """Log that nothing will be cached: as an error once per job and node, else at INFO."""
    text = "no shard will be cached, and every epoch streams all of them: %s"
    _log_first(logging.ERROR, text, error.message, directory, ranks)


def log_read_only(directory: Path, ranks: Ranks) -> None:
    """Log that no shard will be added: as a warning once per job and node, else at INFO."""
    text = "%s is read-only: shards in it are read, the others are streamed in every epoch, and "
    text += "`shardcache stats` counts nothing of this job"
    _log_first(logging.WARNING, text, directory, directory, ranks)


def is_logged(directory: Path) -> bool:
    """Return whether one of these has logged a directory in this job."""
    return os.environ.get(_LOGGED) == f"{os.uname().nodename}:{directory}"


def _log_first(level: int, text: str, argument: object, directory: Path, ranks: Ranks) -> None:
    is_first = ranks.local_rank in (None, 0) and not is_logged(directory)
    os.environ[_LOGGED] = f"{os.uname().nodename}:{directory}"
    logger.log(level if is_first else logging.INFO, text, argument)
