"""The processes that use a cache.

Each process keeps the file of its session locked by flock. The file's modification time is the time
when the job began to use the cache. A child (a DataLoader worker, forked or spawned) creates a
session with its parent's start, so that the workers of a later epoch do not look like a new job.
The processes of a job share its notes, ``<job>-<kind>.streamed``. A process that lists sessions
removes those of dead processes.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from pathlib import Path

from shardcache import clock, files
from shardcache.faults import ignoring, system_error
from shardcache.layout import Layout
from shardcache.locks.keys import Flock, Holder

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.session")
_NOTE = ".streamed"
#: Attempts to lock a new file, which a filesystem without locks may refuse each time.
_ATTEMPTS = 1000


class Session:
    """A file in ``sessions`` that this process keeps locked until `close`, or until it exits.

    ``started`` is in seconds since the epoch.
    """

    def __init__(self, layout: Layout, started: float) -> None:
        holder = Holder.this_process()
        self.path = layout.sessions / f"{files.random_token()}.session"
        self._lock = Flock(self.path, layout.modes)
        try:
            layout.modes.make_directory(layout.sessions, levels=0)
            for _ in range(_ATTEMPTS):  # another process may test whether this one is alive
                if self._lock.try_acquire(holder):
                    break
            os.utime(self.path, (started, started))
        except system_error() as exn:
            # Nothing can be evicted from a cache that is not writable, so no session is needed.
            logger.debug("%s was not made: %s", self.path, exn)

    def close(self) -> None:
        """End the session. Do nothing in a forked child, because the session is the parent's."""
        self._lock.release()

    def __del__(self) -> None:
        # Few programs close their caches, so the session also ends with its object.
        if hasattr(self, "_lock"):  # otherwise, a signal handler has raised in `__init__`
            self.close()


def live_sessions(layout: Layout) -> list[float]:
    """Return the start of each live session, in seconds since the epoch; remove dead sessions."""
    names = sorted(filter(_NAME.fullmatch, files.list_names(layout.sessions)))
    dates = (_live_since(layout.sessions / name) for name in names)
    return [date for date in dates if date is not None]


def leave_note(layout: Layout, name: str) -> bool:
    """Leave a note of a job; return False if a process of the job has left it already."""
    note, now = layout.sessions / f"{name}{_NOTE}", clock.time()
    try:
        remove_dead(layout)
        files.write_new(note, b"", layout.modes.file)
        os.utime(note, (now, now))
    except FileExistsError:
        return False
    except system_error() as exn:
        logger.debug("%s was not made: %s", note, exn)
    return True


def remove_dead(layout: Layout) -> None:
    """Remove the files of dead processes, and the notes older than every live session."""
    oldest = min(live_sessions(layout), default=math.inf)
    for note in files.list_names(layout.sessions):
        with ignoring(OSError):  # it is gone, or it is a directory
            if note.endswith(_NOTE) and (layout.sessions / note).lstat().st_mtime < oldest:
                (layout.sessions / note).unlink()


def _live_since(path: Path) -> float | None:
    """Return the file's mtime, or remove the file and return None if its process is dead."""
    try:
        with files.locked_if_free(path) as free:
            if not free:
                return path.lstat().st_mtime
            path.unlink()
    except system_error() as exn:
        if exn.errno not in files.ABSENT | {errno.EROFS, errno.EACCES, errno.EPERM}:
            raise
    return None
