"""Live processes that use the cache, and who waits for whom: told by flock.

Each is a file in ``sessions`` that its process holds locked. Of a session the modification time
says when the job began to use the cache. A child (DataLoader worker, forked or spawned) registers
itself with its parent's start, so that an epoch's workers do not look younger than their job. Files
of dead processes are removed by whoever counts next.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from shardcache.files import open_exclusive, open_file, random_token
from shardcache.layout import IDLE_GRACE, Layout, is_key, list_names
from shardcache.locks.flock import Holder, parse_holder, try_flock

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.(session|wait)")
#: A sweeper may remove a file between our open and our flock, not for ever.
_ATTEMPTS = 100
_MAX_NOTE = 16 << 10


class _Registration:
    """A file in ``sessions`` that this process holds locked until `close`, or its end."""

    _file: io.FileIO | None = None  # until it is made
    path: Path

    def _register(self, layout: Layout, suffix: str, date: float | None = None) -> io.FileIO:
        for _ in range(_ATTEMPTS):
            self.path = layout.sessions / f"{random_token()}{suffix}"
            with contextlib.ExitStack() as stack:
                stack.callback(self.path.unlink, missing_ok=True)
                file = open_exclusive(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, layout.modes)
                stack.enter_context(file)
                if date is not None:  # before it is locked: without, it counts as dead
                    os.utime(file.fileno(), (date, date))
                # Another process that counts may have had it first, and removed it.
                if try_flock(file.fileno()) is not False and os.fstat(file.fileno()).st_nlink:
                    stack.pop_all()
                    self._file = file
                    return file
        raise OSError(errno.EBUSY, "something keeps removing its file", str(self.path))

    def close(self) -> None:
        """It is over. In a forked child, nothing: it is the parent's."""
        if self._file is not None and not self._file.closed:
            with contextlib.suppress(OSError):  # unlocked, it counts as dead anyway
                self.path.unlink()
            with contextlib.suppress(OSError):  # closed all the same
                self._file.close()


class Session(_Registration):
    """This process's registration; ``started``, in seconds since the epoch, is its job's."""

    def __init__(self, layout: Layout, started: float) -> None:
        try:
            layout.modes.make_directory(layout.sessions, levels=0)
            self._register(layout, ".session", started)
        except OSError as exn:
            # A cache that cannot be written evicts nothing, so nobody needs to know of us.
            logger.debug("no session could be registered: %s", exn)

    def __del__(self) -> None:
        # Few programs close what they use to their end; its file need not wait for a sweeper.
        self.close()


def live_sessions(layout: Layout) -> list[float]:
    """When each live session began, in seconds since the epoch; dead ones are removed.

    Raises:
        OSError: the filesystem is failing.
    """
    found = (_date(path) for path in _files(layout, ".session"))
    return [date for date in found if date is not None]


def remove_dead(layout: Layout) -> None:
    """Remove what processes that are gone left in ``sessions``; raises as `live_sessions`."""
    for path in _files(layout, ""):
        _date(path)


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
                    path.unlink()
    except FileNotFoundError:
        pass
    except PermissionError:  # cannot be asked, so it may be alive
        return path.lstat().st_mtime
    return None


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait for somebody's fetch."""

    url: str  #: of the shard, without credentials
    key: str
    waiter: Holder  #: ``started`` is when the wait began


class WaitNote(_Registration):
    """The note of the calling thread's wait, in the namespace in which it waits."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._written = False

    def say(self, wait: Wait) -> None:
        """Write what is waited for, the first time. What cannot be noted is not."""
        if self._written:
            return
        self._written = True
        try:
            file = self._register(self._layout, ".wait")
            os.pwrite(file.fileno(), json.dumps(asdict(wait)).encode(), 0)
        except OSError as exn:
            logger.debug("%s: a wait is not noted: %s", self._layout.sessions, exn)


def live_waits(layout: Layout) -> Iterator[Wait]:
    """Who waits at this moment; only looks.

    Raises:
        OSError: the directory cannot be read; a missing one is empty.
    """
    for path in _files(layout, ".wait"):
        try:
            with open_file(path) as file:
                # Shared: two who look do not take each other for whoever waits.
                if try_flock(file.fileno(), shared=True) is not False:
                    continue
                found = json.loads(os.pread(file.fileno(), _MAX_NOTE, 0))
            waiter = parse_holder(found["waiter"])
            if waiter is not None and is_key(found["key"]):
                yield Wait(str(found["url"]), found["key"], waiter)
        except (OSError, ValueError, TypeError, KeyError) as exn:  # over, or another user's
            logger.debug("%s: %s", path, exn)
