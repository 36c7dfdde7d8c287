"""The data file of a partial: made or opened with the exclusive lock that says who writes it.

Whoever has the lock may write the partial; it is free when its writer dies. Both calls end
with a file that is still the one of that name, or with None: a sweeper may win at any moment.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from shardcache.files import disown, is_alone, open_owned
from shardcache.layout import IDLE_GRACE, Layout, is_idle
from shardcache.locks.flock import is_file, is_free

__all__ = ["create_locked", "is_ours_alone", "open_locked"]

_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL
#: Seconds between looks at a lock that is taken: whoever only looks whether a
#: writer is alive holds it for microseconds, a writer for as long as it lives.
_PATIENCE = (0.001, 0.01)


def create_locked(path: Path, layout: Layout) -> int | None:
    """Make a data file with its exclusive lock, or None if a sweeper has that."""
    fd = open_owned(path, _MAKE, layout.modes)
    ours = False
    try:
        locked = layout.grace is not None or is_free(fd) is not False
        ours = locked and is_file(path, fd)
        return fd if ours else None
    finally:
        if not ours:
            disown(fd)


def open_locked(path: Path, grace: float | None) -> int | None:
    """Open a data file for writing with its exclusive lock, or None if it is somebody's.

    Args:
        path: the file.
        grace: as `Layout.grace`; then nothing is locked.
    """
    fd = open_owned(path, os.O_RDWR)
    ours = False
    try:
        answer = is_free(fd) if grace is None else None
        for seconds in _PATIENCE:
            if answer is not False:
                break
            time.sleep(seconds)
            answer = is_free(fd)
        if answer is None:
            answer = is_idle(path.parent, grace or IDLE_GRACE)
        # Between open and flock a sweeper may have won: then the name is gone,
        # or is another file.
        ours = answer and is_file(path, fd) and is_ours_alone(fd)
        return fd if ours else None
    finally:
        if not ours:
            disown(fd)


def is_ours_alone(fd: int) -> bool:
    """Whether an open file may be written, and sealed, which its owner alone can do."""
    return is_alone(fd) and os.fstat(fd).st_uid == os.geteuid()
