"""Live processes that use the cache, told by flock.

A session is a file in ``sessions`` that its process holds locked; the file's
modification time is when the job began to use the cache. A child (DataLoader
worker, forked or spawned) registers itself with its parent's start, so that an
epoch's workers do not look younger than their job. Dead sessions are removed
by whoever counts next.

A session gets its name only when it is locked and dated: whoever counts sees
all of it or nothing.
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

from shardcache.files import Modes, is_alone, open_exclusive, open_file, random_token
from shardcache.layout import IDLE_GRACE, Layout, is_key, is_wait_name, list_names
from shardcache.locks.flock import Holder, is_free, lock_exclusive, parse_holder

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9a-f]{32}\.session\Z")
#: A session on its way to its name; a process may be killed in between.
_STARTING = re.compile(r"\.starting-[0-9a-f]{32}\Z")
#: A sweeper may remove the file between our open and our flock, not for ever.
_ATTEMPTS = 100
#: What opening a session says that ended meanwhile, or is nothing of ours.
_NONE_OF_OURS = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO)


class Session:
    """This process's registration; freed by `close` or by the process's end.

    Args:
        layout: the node's namespace.
        started: when the job began to use the cache, seconds since the epoch.
    """

    _file: io.FileIO | None = None  # until it is registered

    def __init__(self, layout: Layout, started: float) -> None:
        self.path = layout.sessions / f"{random_token()}.session"
        try:
            self._register(started, layout.modes)
        except OSError as exn:
            # A cache that cannot be written evicts nothing, so nobody needs to know of us.
            logger.debug("no session could be registered: %s", exn)

    def _register(self, started: float, modes: Modes) -> None:
        directory = self.path.parent
        modes.make_directory(directory, levels=0)
        for _ in range(_ATTEMPTS):
            temporary = directory / f".starting-{random_token()}"
            with contextlib.ExitStack() as stack:
                file = open_exclusive(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, modes)
                stack.callback(file.close)
                stack.callback(temporary.unlink, missing_ok=True)
                try:
                    if lock_exclusive(file.fileno()):
                        os.utime(file.fileno(), (started, started))
                        temporary.rename(self.path)
                        self._file = file
                        stack.pop_all()
                        return
                except FileNotFoundError:
                    logger.debug("%s was swept before it was locked", temporary.name)
        raise OSError(errno.EBUSY, "something keeps removing its file", str(self.path))

    def close(self) -> None:
        """End the session. In a forked child, nothing: it is the parent's."""
        if self._file is None or self._file.closed:
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError as exn:  # read-only by now; unlocked, it counts as dead anyway
            logger.debug("cannot remove %s: %s", self.path, exn)
        with contextlib.suppress(OSError):  # closed all the same, and nothing was written
            self._file.close()

    def __del__(self) -> None:
        # Few programs close what they use to their end; its file need not wait for a sweeper.
        self.close()


def live_sessions(layout: Layout) -> list[float]:
    """When each live session began, in seconds since the epoch; dead ones are removed.

    Raises:
        OSError: the filesystem is failing.
    """
    names = (name for name in list_names(layout.sessions) if _NAME.match(name))
    found = (_look(layout.sessions / name) for name in names)
    return [session for session in found if session is not None]


def remove_dead_sessions(layout: Layout) -> None:
    """Remove what processes that are gone left in ``sessions``.

    Raises:
        OSError: the filesystem is failing.
    """
    for name in list_names(layout.sessions):
        if _STARTING.match(name):
            _look(layout.sessions / name)
    live_sessions(layout)


def _look(path: Path) -> float | None:
    """When a session began, or None if it is dead; then it is removed."""
    try:
        file = open_file(path, io.FileIO, os.O_RDWR)
    except OSError as exn:
        if exn.errno in (errno.EROFS, errno.EACCES):  # cannot tell, so it may be alive
            return _modified(path)
        if exn.errno in _NONE_OF_OURS:
            return None  # ended meanwhile, or nothing of ours
        raise
    with file:
        free = is_free(file.fileno())
        found = os.fstat(file.fileno())
        if free is False:
            return found.st_mtime
        # Without flock nobody can tell. It does not count, or dead ones would count for
        # ever, but it stays for a while: its owner may need it when flock is back.
        if free or time.time() - found.st_ctime > IDLE_GRACE:
            path.unlink(missing_ok=True)
        return None


def _modified(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return None


_NOTE_SCHEMA = 1
#: A URL has 4 KiB at most in the records of a cache, a `Holder` less than one.
_MAX_URL = 4096
_MAX_NOTE = 16 << 10


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait.

    Attributes:
        url: of the shard, without credentials.
        key: of the shard.
        waiter: who waits; ``started`` is when that began.
        holder: for whom, as the lock's record said; None if it did not.
    """

    url: str
    key: str
    waiter: Holder
    holder: Holder | None

    def encode(self) -> bytes:
        """As `parse_wait` reads it."""
        waiter, holder = asdict(self.waiter), self.holder and asdict(self.holder)
        found = {"schema": _NOTE_SCHEMA, "url": self.url[:_MAX_URL], "key": self.key}
        return json.dumps({**found, "waiter": waiter, "holder": holder}).encode()


def parse_wait(data: bytes) -> Wait | None:
    """What `WaitNote` writes; None for anything else."""
    try:
        found = json.loads(data)
        url, key = found["url"], found["key"]
        if found["schema"] != _NOTE_SCHEMA or not isinstance(url, str) or not is_key(key):
            return None
        waiter = parse_holder(json.dumps(found["waiter"]).encode())
        holder = found["holder"] and parse_holder(json.dumps(found["holder"]).encode())
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    plain = "".join(c if c.isprintable() else "?" for c in url[:_MAX_URL])
    return None if waiter is None else Wait(plain, key, waiter, holder or None)


class WaitNote:
    """The note of the calling thread's wait; it goes with `close`, or with the process.

    Args:
        layout: the namespace in which is waited.

    Nothing is raised: what cannot be noted is not.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._path = layout.new_wait()
        self._file: io.FileIO | None = None
        self._said: Wait | None = None

    def say(self, wait: Wait) -> None:
        """Write what is waited for, if that is news."""
        if wait == self._said:
            return
        self._said = wait
        text = wait.encode()
        try:
            if self._file is None:
                self._make()
            if self._file is not None:
                os.pwrite(self._file.fileno(), text, 0)
                os.ftruncate(self._file.fileno(), len(text))
        except OSError as exn:
            logger.debug("%s: %s", self._path, exn)

    def _make(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        file = open_exclusive(self._path, flags, self._layout.modes)
        if lock_exclusive(file.fileno()):
            self._file = file
        else:
            file.close()
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """It is over. In a forked child, nothing: it is the parent's."""
        if self._file is None or self._file.closed:
            return
        with contextlib.suppress(OSError):  # read-only by now; unlocked, it counts as dead
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closed all the same, and nothing is to be kept
            self._file.close()


def live_waits(layout: Layout) -> Iterator[Wait]:
    """Who waits at this moment; only looks.

    Raises:
        OSError: the directory cannot be read; a missing one is empty.
    """
    for path in _notes(layout):
        try:
            with open_file(path, io.FileIO) as file:
                # Shared: two who look do not take each other for whoever waits.
                if is_free(file.fileno(), shared=True) is not False:
                    continue
                wait = parse_wait(os.pread(file.fileno(), _MAX_NOTE, 0))
        except OSError as exn:  # it is over, or is another user's
            logger.debug("%s: %s", path, exn)
            continue
        if wait is not None:
            yield wait


def remove_dead_waits(layout: Layout) -> int:
    """Remove the notes of processes that died; returns how many.

    One that is just being made, and not locked yet, may go with them: its wait is not shown.

    Raises:
        OSError: the filesystem is read-only or failing.
    """
    removed = 0
    for path in _notes(layout):
        try:
            file = open_file(path, io.FileIO, os.O_RDWR)
        except OSError as exn:
            logger.debug("%s: %s", path, exn)
            continue
        with file, contextlib.suppress(FileNotFoundError):
            if is_free(file.fileno()) is not False and is_alone(file.fileno()):
                path.unlink()
                removed += 1
    return removed


def _notes(layout: Layout) -> list[Path]:
    names = sorted(name for name in list_names(layout.sessions) if is_wait_name(name))
    return [layout.sessions / name for name in names]
