"""Live processes that use the cache, and who waits for whom: told by flock.

Each is a file in ``sessions`` that its process holds locked: ``<random>.session``, and
``<key>.<random>.wait`` while it waits for the fetch of a key. Of a session the modification time
says when the job began to use the cache, and the content which limits it has: whoever looks after
the cache goes by them. A child (DataLoader worker, forked or spawned) registers itself with its
parent's start, so that an epoch's workers do not look younger than their job. Files of dead
processes are removed by whoever counts next; of the sessions that ended, the one that began last
leaves its file as `Layout.limits`. A command has no limits to leave.

With leases, sessions are on the node. So each session also has a mark in the root,
``<random>.lease``, which no process locks and its own touches while it uses the cache. By sessions
and marks, processes notice those that use the other kind of lock (`other_locks`).
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

from shardcache.files import NOT_DATA, open_exclusive, open_file, random_token, unlock, write_new
from shardcache.layout import IDLE_GRACE, Layout, is_idle, list_names, remove_old
from shardcache.locks.flock import Holder, is_file, read_holder, try_flock
from shardcache.locks.mounts import is_local

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.(session|[0-9a-f]{32}\.wait)")
_is_mark_name = re.compile(r"[0-9a-f]{32}\.lease").fullmatch
#: A sweeper may remove a file between our open and our flock, not for ever.
_ATTEMPTS = 100
_MAX_LIMITS = 4096
#: Ends the name of a note that a job leaves; see `stats.notices`.
NOTE = ".streamed"


class Session:
    """A file in ``sessions`` that this process holds locked until `close`, or its end.

    Args:
        layout: of the namespace.
        started: when the job began to use the cache, in seconds since the epoch.
        waits: for a wait instead: the key, and who waits for it.
        limits: of the job, see `Config.limits`; None for a command, which is no job.
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
            # A cache that cannot be written evicts nothing, so nobody needs to know of us.
            logger.debug("%s was not made: %s", self.path, exn)

    def _register(self, layout: Layout, started: float, data: bytes) -> bool:
        """Make the file, and lock it; False if a process that counts had it first."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.path.unlink, missing_ok=True)
            file = open_exclusive(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, layout.modes)
            stack.enter_context(file)
            with contextlib.suppress(OSError):  # a full disk: that it lives is what counts
                os.pwrite(file.fileno(), data, 0)
            os.utime(file.fileno(), (started, started))  # not locked yet, it counts as dead
            if try_flock(file.fileno()) is False or not is_file(self.path, file.fileno()):
                return False
            stack.pop_all()
            self._file = file
        return True

    def refresh(self) -> None:
        """Give a sign of life to processes that cannot test the lock of the session."""
        if self._file is not None and not self._file.closed:
            with contextlib.suppress(OSError):
                if self._mark is not None:
                    os.utime(self._mark)
                else:  # the modification time stays; the change time becomes now
                    os.utime(self._file.fileno(), (self._started, self._started))

    def close(self) -> None:
        """It is over. In a forked child, nothing: it is the parent's."""
        if self._file is not None and not self._file.closed:
            if self._mark is not None:
                with contextlib.suppress(OSError):
                    self._mark.unlink()
            with contextlib.suppress(OSError):  # unlocked, it counts as dead anyway
                _remove(self.path)
            with contextlib.suppress(OSError):  # closed all the same
                unlock(self._file.fileno())
                self._file.close()

    def __del__(self) -> None:
        # Few programs close what they use to their end; its file need not wait for a sweeper.
        self.close()


def live_sessions(layout: Layout) -> list[float]:
    """When each live session began, in seconds since the epoch; dead ones are removed.

    Raises:
        OSError: the filesystem is failing.
    """
    found = map(_date, _files(layout, ".session"))
    return [date for date in found if date is not None]


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
    is_alive = _is_locked if is_local(layout.base.parent) else _has_changed
    return "flock" if any(is_alive(path) for path in sessions if path.name not in own) else None


def remove_dead(layout: Layout) -> None:
    """Remove what processes that are gone left in ``sessions``; raises as `live_sessions`.

    Of a job that is gone there is no live session as old as its note.
    """
    for path in _files(layout, ""):
        _date(path)
    for mark in filter(_is_mark_name, list_names(_in_root(layout))):
        remove_old(_in_root(layout) / mark)
    oldest = min(live_sessions(layout), default=math.inf)
    for name in list_names(layout.sessions):
        path = layout.sessions / name
        with contextlib.suppress(OSError):  # gone, or a directory
            if name.endswith(NOTE) and path.lstat().st_mtime < oldest:
                path.unlink()


def live_waits(layout: Layout) -> Iterator[tuple[str, Holder]]:
    """Who waits at this moment, and for the fetch of which key; only looks.

    Raises:
        OSError: the directory cannot be read; a missing one is empty.
    """
    for path in _files(layout, ".wait"):
        with contextlib.suppress(OSError), open_file(path) as file:  # over, or another user's
            # Shared: two who look do not take each other for whoever waits.
            if try_flock(file.fileno(), shared=True) is False and (waiter := read_holder(path)):
                yield path.name.partition(".")[0], waiter


def stated_limits(layout: Layout) -> tuple[list[dict[str, str]], bool]:
    """The limits of each live session, and True; without one those of the last, and False.

    Only looks; raises OSError if the directory cannot be read.
    """
    live, ended = [], [(0.0, dict[str, str]())]
    for path in [*_files(layout, ".session"), layout.limits]:
        with contextlib.suppress(OSError, ValueError, RecursionError), open_file(path) as file:
            date, is_free = os.fstat(file.fileno()).st_mtime, try_flock(file.fileno(), shared=True)
            found = json.loads(os.pread(file.fileno(), _MAX_LIMITS, 0))
            if isinstance(found, dict):
                if is_free is False:
                    live.append(found)
                else:
                    ended.append((date, found))
    return (live, True) if live else ([max(ended, key=itemgetter(0))[1]], False)


def _remove(path: Path) -> None:
    """Remove a file that is over; of a session its limits stay known, unless younger ones are."""
    last = path.parent.with_name("limits")
    is_last = path.suffix == ".session" and path.lstat().st_size > 0
    with contextlib.suppress(FileNotFoundError):
        is_last = is_last and last.lstat().st_mtime <= path.lstat().st_mtime
    if is_last:
        with contextlib.suppress(OSError):  # a directory has the name
            path.replace(last)
            return
    path.unlink()


def _in_root(layout: Layout) -> Path:
    """The directory of the sessions that use flock, and of the marks of those that use leases."""
    return layout.base / "sessions"


def _is_locked(path: Path) -> bool:
    return _date(path) is not None


def _has_changed(path: Path) -> bool:
    """Whether a session gave a sign of life within the last hour."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.lstat().st_ctime <= IDLE_GRACE
    return False


def _files(layout: Layout, suffix: str) -> list[Path]:
    names = sorted(filter(_NAME.fullmatch, list_names(layout.sessions)))
    return [layout.sessions / name for name in names if name.endswith(suffix)]


def _date(path: Path) -> float | None:
    """The modification time of a live process's file; None if it is dead, and then removed."""
    try:
        with open_file(path) as file:
            free, found = try_flock(file.fileno()), os.fstat(file.fileno())
            if free is False:
                return found.st_mtime
            # Without flock nobody can tell. It does not count, or dead ones would count for
            # ever, but it stays for a while: its owner may need it when flock is back.
            if free or time.time() - found.st_ctime > IDLE_GRACE:
                with contextlib.suppress(OSError):  # read-only, or somebody else was faster
                    _remove(path)
    except FileNotFoundError:
        pass
    except PermissionError:  # cannot be asked, so it may be alive
        return path.lstat().st_mtime
    except OSError as exn:
        if exn.errno not in NOT_DATA:
            raise
    return None
