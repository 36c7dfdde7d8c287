"""What is said once per job and node: that shards find no room, and in the end how many.

The first process of a job that streams a shard for want of room leaves a note in ``sessions``, and
says so; the others find the note. The last one of the job to end removes it, and says how much was
streamed, unless an older job is still running, whose sessions look like its own. A note without a
live session as old as it is of a job that was killed.
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

#: Bytes of a note: two numbers.
_MOST = 100


def claim(layout: Layout, job: str) -> bool:
    """Leave the note of a job; whether that was the first of its processes on this node.

    ``layout`` is the node's namespace. Where nothing can be written, each process is the first.
    """
    try:
        remove_dead(layout)
        note, now = _note(layout, job), clock.time()
        write_new(note, json.dumps(_streamed(layout)).encode(), layout.modes.file)
        os.utime(note, (now, now))  # by the clock that sessions have
    except FileExistsError:
        return False
    except OSError as exn:
        logger.debug("no note of streamed shards: %s", exn)
    return True


def withdraw(layout: Layout, job: str) -> tuple[int, int] | None:
    """Shards and bytes that the node has streamed since a job's note was left, which is removed.

    None without a note, and while another process of the job is alive. The caller's session has
    ended.
    """
    path = _note(layout, job)
    with contextlib.suppress(OSError, ValueError, TypeError):
        left = path.lstat().st_mtime
        if all(started > left for started in live_sessions(layout)):
            shards, size = json.loads(read_file(path, _MOST))
            path.unlink()  # of two who are the last, one
            now = _streamed(layout)
            return max(0, now[0] - shards), max(0, now[1] - size)
    return None


def _note(layout: Layout, job: str) -> Path:
    return layout.sessions / f"{safe_name(job)}{NOTE}"


def _streamed(layout: Layout) -> tuple[int, int]:
    """Shards and bytes that all processes of the node have streamed."""
    found = summed(samples(layout, ever=True))
    return found.bypassed, found.bytes_bypassed
