"""Live processes that use the cache, and those that wait for a download.

Each has a file in ``sessions`` and holds its flock: ``<random>.session``, and, while it waits for
the download of a key, ``<key>.<random>.wait``. The modification time of a session is when its job
began to use the cache. A child (a DataLoader worker, forked or spawned) makes a session with its
parent's start, because the workers of an epoch are no younger than their job. The next process that
lists the sessions removes the files of dead ones.
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

from shardcache import clock
from shardcache.files import NOT_DATA, open_exclusive, open_file, random_token, unlock, write_new
from shardcache.layout import IDLE_GRACE, Layout, list_names, read_file, replace_file
from shardcache.locks.flock import Holder, is_file, read_holder, try_flock
from shardcache.ranks import safe_name

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.(session|[0-9a-f]{32}\.wait)")
#: Attempts to lock a new file, which a sweep may remove between open and flock.
_ATTEMPTS = 100
#: Most bytes to read of the limits, which have some hundred and the paths of the tiers.
_MAX_LIMITS = 65_536
#: Suffix of the notes of jobs; see `leave_note`.
_NOTE = ".streamed"


class Session:
    """A file in ``sessions`` that this process holds locked until `close`, or its end.

    Args:
        layout: the namespace.
        started: when the job began to use the cache, in seconds since the epoch.
        waits: the key and the waiting process, to make a ``.wait`` file instead.
    """

    _file: io.FileIO | None = None  # until it is made

    def __init__(
        self, layout: Layout, started: float, waits: tuple[str, Holder] | None = None
    ) -> None:
        name = f"{random_token()}.session" if waits is None else f"{waits[0]}.{random_token()}.wait"
        self.path = layout.sessions / name
        data = b"" if waits is None else waits[1].encode()
        try:
            layout.modes.make_directory(layout.sessions, levels=0)
            for _ in range(_ATTEMPTS):
                if self._register(layout, started, data):
                    break
        except OSError as exn:
            # Nothing is evicted from a cache that cannot be written, so no session is needed.
            logger.debug("%s was not made: %s", self.path, exn)

    def _register(self, layout: Layout, started: float, data: bytes) -> bool:
        """Make the file and lock it; return False if another process removed it in between."""
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
        """End the session. In a forked child, do nothing: it is the parent's."""
        if self._file is not None and not self._file.closed:
            with contextlib.suppress(OSError):  # without a lock, the file counts as dead anyway
                self.path.unlink()
            with contextlib.suppress(OSError):  # it is closed nevertheless
                unlock(self._file.fileno())
                self._file.close()

    def __del__(self) -> None:
        # Few programs close their caches.
        self.close()


def live_sessions(layout: Layout) -> list[float]:
    """Return when each live session began, in seconds since the epoch; remove the dead ones."""
    dates = map(_live_since, _files(layout, ".session"))
    return [date for date in dates if date is not None]


def remove_dead(layout: Layout) -> None:
    """Remove the files of dead processes and the notes of jobs that ended from ``sessions``.

    A note is older than every live session if its job has ended.
    """
    for path in _files(layout, ""):
        _live_since(path)
    oldest = min(live_sessions(layout), default=math.inf)
    for name in list_names(layout.sessions):
        path = layout.sessions / name
        with contextlib.suppress(OSError):  # gone, or a directory
            if name.endswith(_NOTE) and path.lstat().st_mtime < oldest:
                path.unlink()


def leave_note(layout: Layout, job: str) -> bool:
    """Leave the note of a job on this node, and return whether there was none.

    Returns True if the note cannot be written. `remove_dead` removes it after the job.
    """
    note, now = layout.sessions / f"{safe_name(job)}{_NOTE}", clock.time()
    try:
        remove_dead(layout)
        write_new(note, b"", layout.modes.file)
        os.utime(note, (now, now))
    except FileExistsError:
        return False
    except OSError as exn:
        logger.debug("%s was not made: %s", note, exn)
    return True


def live_waits(layout: Layout) -> Iterator[tuple[str, Holder]]:
    """Yield the key and the process of each wait for a download. Changes nothing.

    Raises:
        OSError: the directory cannot be read. A missing one is empty.
    """
    for path in _files(layout, ".wait"):
        with contextlib.suppress(OSError), open_file(path) as file:  # ended, or another user's
            # A shared lock, so that two processes that list the waits do not disturb each other.
            if try_flock(file.fileno(), shared=True) is False and (waiter := read_holder(path)):
                yield path.name.partition(".")[0], waiter


def state_limits(layout: Layout, started: float, limits: Mapping[str, Any]) -> None:
    """Leave the limits of a job for commands, unless a job that began later has left its own.

    A job without tiers leaves those of the jobs before, which may still hold shards.
    """
    with contextlib.suppress(OSError):  # full, read-only, or there is a directory of this name
        with contextlib.suppress(FileNotFoundError):
            if layout.limits.lstat().st_mtime > started:
                return
        tiers = limits["tiers"] or stated_limits(layout).get("tiers")
        data, mode = json.dumps({**limits, "tiers": tiers}).encode(), layout.modes.file
        replace_file(layout.limits, data, mode, via=layout.partial)
        os.utime(layout.limits, (started, started))


def stated_limits(layout: Layout) -> dict[str, Any]:
    """Return the limits that `state_limits` left, which may be invalid; none if it left none."""
    try:
        limits = json.loads(read_file(layout.limits, _MAX_LIMITS))
    except (OSError, ValueError, RecursionError):
        return {}
    return limits if isinstance(limits, dict) else {}


def _files(layout: Layout, suffix: str) -> list[Path]:
    names = sorted(filter(_NAME.fullmatch, list_names(layout.sessions)))
    return [layout.sessions / name for name in names if name.endswith(suffix)]


def _live_since(path: Path) -> float | None:
    """Return the modification time of a live process's file; if it is dead, remove it."""
    try:
        with open_file(path) as file:
            free, status = try_flock(file.fileno()), os.fstat(file.fileno())
            if free is False:
                return status.st_mtime
            # If flock fails, the process counts as dead, or dead ones would count forever. Its file
            # stays for an hour, because flock may work again by then.
            if free or time.time() - status.st_ctime > IDLE_GRACE:
                with contextlib.suppress(OSError):  # read-only, or another process was faster
                    path.unlink()
    except FileNotFoundError:
        pass
    except PermissionError:  # another user's, which may be alive
        return path.lstat().st_mtime
    except OSError as exn:
        if exn.errno not in NOT_DATA:
            raise
    return None
