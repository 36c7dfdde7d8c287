"""Live processes that use the cache, and those that wait for a download.

Each process keeps a file in ``sessions`` locked by flock: ``<random>.session``. While it waits for
the download of a key, it locks another file, ``<key>.<random>.wait``. The modification time of a
session's file is the time when the job began to use the cache. A child (a DataLoader worker, forked
or spawned) creates a session with its parent's start, so that the workers of a later
epoch do not look like a new job. The next process that lists the sessions removes the files of dead
processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardcache.faults import ignoring, os_error
from shardcache.files import NOT_DATA, open_exclusive, open_file, random_token, unlock
from shardcache.layout import IDLE_GRACE, Layout, list_names, read_file, replace_file
from shardcache.locks.flock import Holder, is_file, read_holder, try_flock

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.(session|[0-9a-f]{32}\.wait)")
#: Attempts to create and lock a file, because a sweep may remove the file between open and flock.
_ATTEMPTS = 100
#: Maximum number of bytes to read from the file of limits: a few hundred for the limits, and the
#: paths of the tiers.
_MAX_LIMITS = 65_536
#: Suffix of the notes of `locks.notices`.
NOTE = ".streamed"


class Session:
    """A file in ``sessions`` that this process keeps locked until `close`, or until it exits.

    Args:
        layout: the namespace.
        started: when the job began to use the cache, in seconds since the epoch.
        waits: if given, a key and the record of this process; a ``.wait`` file is then created
            instead of a session.
    """

    _file: io.FileIO | None = None  # None if no file could be created

    def __init__(
        self, layout: Layout, started: float, waits: tuple[str, Holder] | None = None
    ) -> None:
        name = f"{random_token()}.session" if waits is None else f"{waits[0]}.{random_token()}.wait"
        self.path = layout.sessions / name
        self.started = started
        data = b"" if waits is None else waits[1].encode()
        try:
            layout.modes.make_directory(layout.sessions, levels=0)
            for _ in range(_ATTEMPTS):
                if self._register(layout, started, data):
                    break
        except os_error() as exn:
            # Nothing can be evicted from a cache that is not writable, so no session is needed.
            logger.debug("%s was not made: %s", self.path, exn)

    def _register(self, layout: Layout, started: float, data: bytes) -> bool:
        """Create the file and lock it; return False if another process removed it in between."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.path.unlink, missing_ok=True)
            file = open_exclusive(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, layout.modes)
            stack.enter_context(file)
            os.pwrite(file.fileno(), data, 0)
            os.utime(file.fileno(), (started, started))
            if try_flock(file.fileno()) is False or not is_file(self.path, file.fileno()):
                return False
            stack.pop_all()
            self._file = file
        return True

    def close(self) -> None:
        """End the session. Do nothing in a forked child, because the session is the parent's."""
        if self._file is not None and not self._file.closed:
            with ignoring(OSError):  # a file without a lock counts as dead anyway
                self.path.unlink()
            with ignoring(OSError):  # the descriptor is closed nevertheless
                unlock(self._file.fileno())
                self._file.close()

    def __del__(self) -> None:
        # Few programs close their caches, so the session also ends with its object.
        self.close()


def live_sessions(layout: Layout) -> list[float]:
    """Return the start of each live session, in seconds since the epoch; remove dead sessions."""
    dates = map(_live_since, _files(layout, ".session"))
    return [date for date in dates if date is not None]


def remove_dead(layout: Layout) -> None:
    """Remove the files of dead processes, and the notes of jobs that have ended.

    The job of a note has ended if the note is older than every live session.
    """
    for path in _files(layout, ""):
        _live_since(path)
    oldest = min(live_sessions(layout), default=math.inf)
    for name in list_names(layout.sessions):
        path = layout.sessions / name
        with ignoring(OSError):  # the note is gone, or a directory has its name
            if name.endswith(NOTE) and path.lstat().st_mtime < oldest:
                path.unlink()


def live_waits(layout: Layout) -> Iterator[tuple[str, Holder]]:
    """Yield the key and the `Holder` of each process that waits for a download. Remove nothing.

    Raises:
        OSError: the directory exists and cannot be read.
    """
    for path in _files(layout, ".wait"):
        with ignoring(OSError), open_file(path) as file:  # gone, or another user's
            # An exclusive lock would look like a wait to other processes that list the waits.
            if try_flock(file.fileno(), shared=True) is False and (waiter := read_holder(path)):
                yield path.name.partition(".")[0], waiter


def state_limits(layout: Layout, started: float, limits: Mapping[str, Any]) -> None:
    """Store the limits of a job for commands, unless a job that began later has stored its own.

    A job without tiers keeps the stored tiers of earlier jobs, which may still hold shards.
    """
    with ignoring(OSError):  # the disk is full or read-only, or a directory has the name
        with contextlib.suppress(FileNotFoundError):
            if layout.limits.lstat().st_mtime > started:
                return
        tiers = limits["tiers"] or stated_limits(layout).get("tiers")
        data, mode = json.dumps({**limits, "tiers": tiers}).encode(), layout.modes.file
        replace_file(layout.limits, data, mode, via=layout.partial)
        os.utime(layout.limits, (started, started))


def stated_limits(layout: Layout) -> dict[str, Any]:
    """Return the limits that `state_limits` stored, unchecked; an empty dict if there are none."""
    try:
        limits = json.loads(read_file(layout.limits, _MAX_LIMITS))
    except (os_error(), ValueError, RecursionError):
        return {}
    return limits if isinstance(limits, dict) else {}


def _files(layout: Layout, suffix: str) -> list[Path]:
    names = sorted(filter(_NAME.fullmatch, list_names(layout.sessions)))
    return [layout.sessions / name for name in names if name.endswith(suffix)]


def _live_since(path: Path) -> float | None:
    """Return the file's mtime, or remove the file and return None if its process is dead."""
    try:
        with open_file(path) as file:
            free, status = try_flock(file.fileno()), os.fstat(file.fileno())
            if free is False:
                return status.st_mtime
            # If flock fails, the process counts as dead, because dead processes would otherwise
            # count forever. The file stays for an hour, because flock may work again by then.
            if free or time.time() - status.st_ctime > IDLE_GRACE:
                with ignoring(OSError):  # read-only, or another process was faster
                    path.unlink()
    except FileNotFoundError:
        pass
    except PermissionError:  # the file is another user's, whose process may be alive
        return path.lstat().st_mtime
    except os_error() as exn:
        if exn.errno not in NOT_DATA:
            raise
    return None
