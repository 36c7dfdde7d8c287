"""Let one process of a job warn that shards find no room, and one report how many there were.

The first process of a job that streams a shard for lack of room leaves a note in ``sessions``, and
warns. The others find the note. The last process of the job to end removes the note and logs how
many shards the job streamed, unless an older job still runs: its sessions look like those of this
job. If no live session is as old as a note, the job of the note was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from shardcache import clock
from shardcache.files import write_new
from shardcache.layout import Layout, read_file
from shardcache.locks.sessions import NOTE, live_sessions, remove_dead
from shardcache.ranks import safe_name
from shardcache.stats.database import samples
from shardcache.stats.summary import summed

__all__ = ["claim", "withdraw"]

logger = logging.getLogger(__name__)

#: Bytes of a note at most: two numbers.
_MAX_NOTE = 100


def claim(layout: Layout, job: str) -> bool:
    """Leave the note of a job, and return whether this process was the first of it on this node.

    Every process is the first if the note cannot be written. ``layout`` is the node's namespace.
    """
    try:
        remove_dead(layout)
        note, now = _note(layout, job), clock.time()
        write_new(note, json.dumps(_streamed(layout)).encode(), layout.modes.file)
        os.utime(note, (now, now))  # the clock of sessions, which tests may set
    except FileExistsError:
        return False
    except OSError as exn:
        logger.debug("the note of streamed shards could not be written: %s", exn)
    return True


def withdraw(layout: Layout, job: str) -> tuple[int, int] | None:
    """Remove a job's note, and return the shards and bytes that the node has streamed since then.

    Returns None if there is no note, or if another process of the job is alive. The caller has
    ended its own session.
    """
    path = _note(layout, job)
    with contextlib.suppress(OSError, ValueError, TypeError):
        noted = path.lstat().st_mtime
        if all(started > noted for started in live_sessions(layout)):
            shards, size = json.loads(read_file(path, _MAX_NOTE))
            path.unlink()  # succeeds in one process if two end at the same time
            now = _streamed(layout)
            return max(0, now[0] - shards), max(0, now[1] - size)
    return None


def _note(layout: Layout, job: str) -> Path:
    return layout.sessions / f"{safe_name(job)}{NOTE}"


def _streamed(layout: Layout) -> tuple[int, int]:
    """Return how many shards and bytes all processes of the node have streamed."""
    stats = summed(samples(layout, ever=True))
    return stats.bypassed, stats.bytes_bypassed
