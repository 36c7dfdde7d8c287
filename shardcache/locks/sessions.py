"""Live processes that use the cache, and those that wait for a download.

Each has a file in ``sessions`` and holds its flock: ``<random>.session``, and, while it waits for
the download of a key, ``<key>.<random>.wait``. The modification time of a session is when its job
began to use the cache; its content is the job's limits, which commands and other jobs use for
cleaning. A child (a DataLoader worker, forked or spawned) makes a session with its parent's start,
because the workers of an epoch are no younger than their job. The next process that lists the
sessions removes the files of dead ones. Of the ended sessions, the one that began last stays as
`Layout.limits`, unless it has no limits, as that of a command.

With leases, sessions are on the node. So each session also has a mark in the root,
``<random>.lease``, which its process touches while it uses the cache and which no process locks.
Sessions and marks show each process which kind of lock the others use (`other_locks`).
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
from operator import itemgetter
from pathlib import Path

from shardcache import clock
from shardcache.files import NOT_DATA, open_exclusive, open_file, random_token, unlock, write_new
from shardcache.layout import IDLE_GRACE, Layout, is_idle, list_names, remove_old
from shardcache.locks.flock import Holder, is_file, read_holder, try_flock
from shardcache.locks.mounts import is_local
from shardcache.ranks import safe_name

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.(session|[0-9a-f]{32}\.wait)")
_is_mark_name = re.compile(r"[0-9a-f]{32}\.lease").fullmatch
#: Attempts to lock a new file, which a sweep may remove between open and flock.
_ATTEMPTS = 100
#: Most bytes to read of a session, whose six limits have some hundred.
_MAX_LIMITS = 4096
#: Suffix of the notes of jobs; see `leave_note`.
_NOTE = ".streamed"


class Session:
    """A file in ``sessions`` that this process holds locked until `close`, or its end.

    Args:
        layout: the namespace.
        started: when the job began to use the cache, in seconds since the epoch.
        waits: the key and the waiting process, to make a ``.wait`` file instead.
        limits: the limits of the job, see `Config.limits`; None for a command.
    """

    _file: io.FileIO | None = None  # until it is made
    _mark: Path | None = None  # with leases

    def __init__(
        self,
        layout: Layout,
        started: float,
        waits: tuple[str, Holder] | None = None,
        *,
        limits: Mapping[str, str] | None = None,
    ) -> None:
        name = f"{random_token()}.session" if waits is None else f"{waits[0]}.{random_token()}.wait"
        self.path = layout.sessions / name
        self._started = started
        data = b"" if limits is None else json.dumps(limits).encode()
        data = data if waits is None else waits[1].encode()
        try:
            layout.modes.make_directory(layout.sessions, levels=0)
            for _ in range(_ATTEMPTS):
                if self._register(layout, started, data):
                    break
            if layout.grace is not None and waits is None:
                self._mark = _in_root(layout) / self.path.with_suffix(".lease").name
                write_new(self._mark, b"", layout.modes.file)
        except OSError as exn:
            # Nothing is evicted from a cache that cannot be written, so no session is needed.
            logger.debug("%s was not made: %s", self.path, exn)

    def _register(self, layout: Layout, started: float, data: bytes) -> bool:
        """Make the file and lock it; return False if another process removed it in between."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.path.unlink, missing_ok=True)
            file = open_exclusive(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, layout.modes)
            stack.enter_context(file)
            with contextlib.suppress(OSError):  # on a full disk, a session without limits
                os.pwrite(file.fileno(), data, 0)
            os.utime(file.fileno(), (started, started))
            if try_flock(file.fileno()) is False or not is_file(self.path, file.fileno()):
                return False
            stack.pop_all()
            self._file = file
        return True

    def refresh(self) -> None:
        """Touch the session, for processes on other machines that cannot test its lock."""
        if self._file is not None and not self._file.closed:
            with contextlib.suppress(OSError):
                if self._mark is not None:
                    os.utime(self._mark)
                else:  # the modification time stays; the change time becomes now
                    os.utime(self._file.fileno(), (self._started, self._started))

    def close(self) -> None:
        """End the session. In a forked child, do nothing: it is the parent's."""
        if self._file is not None and not self._file.closed:
            if self._mark is not None:
                with contextlib.suppress(OSError):
                    self._mark.unlink()
            with contextlib.suppress(OSError):  # without a lock, the file counts as dead anyway
                _remove(self.path)
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


def other_locks(layout: Layout) -> str | None:
    """Return the kind of lock, ``flock`` or ``lease``, of live processes if ``layout`` has another.

    A process on another machine counts as alive for an hour after its last sign of life.

    Raises:
        OSError: the directory cannot be read. A missing one is empty.
    """
    directory = _in_root(layout)
    names = list_names(directory)
    marks = list(filter(_is_mark_name, names))
    if layout.grace is None:
        return "lease" if not all(is_idle(directory / mark) for mark in marks) else None
    # If the node has no directory for them, sessions that use leases are here, too.
    own = {mark.replace(".lease", ".session") for mark in marks}
    sessions = [directory / n for n in names if _NAME.fullmatch(n) and n.endswith(".session")]
    since = _live_since if is_local(layout.base.parent) else _changed_since
    others = (path for path in sessions if path.name not in own)
    return "flock" if any(since(path) is not None for path in others) else None


def remove_dead(layout: Layout) -> None:
    """Remove the files of dead processes and the notes of jobs that ended from ``sessions``.

    A note is older than every live session if its job has ended.
    """
    for path in _files(layout, ""):
        _live_since(path)
    for mark in filter(_is_mark_name, list_names(_in_root(layout))):
        remove_old(_in_root(layout) / mark)
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


def stated_limits(layout: Layout) -> tuple[list[dict[str, str]], bool]:
    """Return the limits of each live session and True, or those of the last one and False.

    Changes nothing.

    Raises:
        OSError: the directory cannot be read.
    """
    live, ended = [], [(0.0, dict[str, str]())]
    for path in [*_files(layout, ".session"), layout.limits]:
        with contextlib.suppress(OSError, ValueError, RecursionError), open_file(path) as file:
            date, is_free = os.fstat(file.fileno()).st_mtime, try_flock(file.fileno(), shared=True)
            limits = json.loads(os.pread(file.fileno(), _MAX_LIMITS, 0))
            if isinstance(limits, dict):
                if is_free is False:
                    live.append(limits)
                else:
                    ended.append((date, limits))
    return (live, True) if live else ([max(ended, key=itemgetter(0))[1]], False)


def _remove(path: Path) -> None:
    """Remove the file of a dead process, or make it `Layout.limits` if its job began last."""
    last = path.parent.with_name("limits")
    is_last = path.suffix == ".session" and path.lstat().st_size > 0
    with contextlib.suppress(FileNotFoundError):
        is_last = is_last and last.lstat().st_mtime <= path.lstat().st_mtime
    if is_last:
        with contextlib.suppress(OSError):  # there is a directory of this name
            path.replace(last)
            return
    path.unlink()


def _in_root(layout: Layout) -> Path:
    """Return the directory of sessions that use flock, and of marks of those that use leases."""
    return layout.base / "sessions"


def _changed_since(path: Path) -> float | None:
    """Return when a session was last touched, in seconds since the epoch; None after an hour."""
    with contextlib.suppress(FileNotFoundError):
        changed = path.lstat().st_ctime
        return changed if time.time() - changed <= IDLE_GRACE else None
    return None


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
                    _remove(path)
    except FileNotFoundError:
        pass
    except PermissionError:  # another user's, which may be alive
        return path.lstat().st_mtime
    except OSError as exn:
        if exn.errno not in NOT_DATA:
            raise
    return None
