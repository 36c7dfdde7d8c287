"""Which entries each job of a node has used, so that what an ended one leaves can go.

The last use of an entry is a date and does not say whose it was. While two jobs run, the dates
of both lie after the start of either; when one of them ends, its entries would be kept for the
other. So beside the sessions each job has a map: one byte for every 1 / `SLOTS` of all keys, set
when a process of the job uses an entry there. An entry that an ended job was the last to use, and
no running one has used, is nobody's.

Maps only release what dates protect. Two keys may share a byte (one in a hundred of 10,000
entries), a map may be lost, or cannot be written: then an entry stays that might have gone. A map
is a sparse file of at most 1 MiB. It is removed when it says no more than the dates: when every
running job began after its last change.

Any number of processes may write to one map: each writes single bytes, all the same.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from shardcache.files import is_alone, open_exclusive, open_file, settle
from shardcache.layout import Layout, is_uses_name, list_names
from shardcache.locks.sessions import LiveSession

__all__ = ["SLOTS", "job_name", "note_use", "released", "remove_stale_maps", "used_by"]

logger = logging.getLogger(__name__)

#: Bytes of a map: the first `_DIGITS` hexadecimal digits of a key choose one.
SLOTS = 1 << 20
_DIGITS = 5
_USED = b"\1"
#: Seconds by which the times of files may be behind the clock.
_TICK = 1.0


def job_name(job: str | None, started: float) -> str:
    """By which name a job's map is known: the launcher's, or else when its cache was made.

    What was made at the same microsecond in two processes is one job with copies of its cache:
    DataLoader workers, which come and go with every epoch.
    """
    told = f"job {job}" if job is not None else f"started {started!r}"
    return hashlib.blake2b(f"{os.geteuid()} {told}".encode(), digest_size=16).hexdigest()


def note_use(layout: Layout, job: str, key: str) -> None:
    """Note that a job uses an entry. Where that cannot be written, nothing is said of it."""
    try:
        with open_exclusive(layout.uses(job), os.O_RDWR | os.O_CREAT, layout.modes) as file:
            if is_alone(file.fileno()):
                settle(file.fileno(), layout.modes.file)
                os.pwrite(file.fileno(), _USED, _slot(key))
    except OSError as exn:
        logger.debug("cannot note a use of %s: %s", key, exn)


def released(layout: Layout, sessions: Sequence[LiveSession]) -> Callable[[str, float], bool]:
    """Tells of a key, and of when it was last used, whether that was by a job that has ended.

    What was fetched or asked for after the ended job's own last use was so for somebody else,
    who has not begun yet. And what a running job has used, too, is that job's.

    Args:
        layout: the node's namespace.
        sessions: the live ones.

    Raises:
        OSError: the filesystem is failing.
    """
    live = {session.job for session in sessions}
    ended = [name for name in _names(layout) if name not in live]
    if not ended or None in live:  # one that keeps no map may use anything
        return lambda key, used: False
    theirs = [_read(layout.uses(name)) for name in ended]
    ours = [_read(layout.uses(name))[0] for name in live if name is not None]

    def is_released(key: str, used: float) -> bool:
        slot = _slot(key)
        before = (one for one, last in theirs if used <= last + _TICK)
        return _has(before, slot) and not _has(ours, slot)

    return is_released


def used_by(layout: Layout, job: str) -> Callable[[str], bool]:
    """Tells of a key whether a job may have used its entry."""
    used, _last = _read(layout.uses(job))
    return lambda key: _has([used], _slot(key))


def remove_stale_maps(layout: Layout, sessions: Sequence[LiveSession]) -> int:
    """Remove the maps that release nothing any more; returns how many.

    Raises:
        OSError: the filesystem is failing.
    """
    live = {session.job for session in sessions}
    oldest = min((session.started for session in sessions), default=float("inf"))
    removed = 0
    for name in _names(layout):
        path = layout.uses(name)
        try:
            if name not in live and path.lstat().st_mtime < oldest:
                path.unlink()
                removed += 1
        except FileNotFoundError:
            logger.debug("%s went meanwhile", path.name)
    return removed


def _names(layout: Layout) -> list[str]:
    return [name.partition(".")[0] for name in list_names(layout.sessions) if is_uses_name(name)]


def _slot(key: str) -> int:
    return int(key[:_DIGITS], 16)


def _has(maps: Iterable[bytes], slot: int) -> bool:
    return any(one[slot : slot + 1] == _USED for one in maps)


def _read(path: Path) -> tuple[bytes, float]:
    """A map, and when it was last written."""
    try:
        with open_file(path, io.FileIO) as file:
            return os.read(file.fileno(), SLOTS), os.fstat(file.fileno()).st_mtime
    except OSError as exn:
        logger.debug("%s cannot be read: %s", path.name, exn)
        return b"", 0.0
