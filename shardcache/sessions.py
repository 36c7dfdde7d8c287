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

import errno
import logging
import os
import re
from pathlib import Path

from shardcache.layout import DIRECTORY_MODE, Layout, list_names, random_token
from shardcache.locks import disown, lock_exclusive, open_owned

__all__ = ["Session", "oldest_live_session", "remove_dead_sessions"]

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[0-9a-f]{32}\.session\Z")
#: A session on its way to its name; a process may be killed in between.
_STARTING = re.compile(r"\.starting-[0-9a-f]{32}\Z")
#: A sweeper may remove the file between our open and our flock, not for ever.
_ATTEMPTS = 100


class Session:
    """This process's registration; freed by `close` or by the process's end.

    Args:
        layout: the node's namespace.
        started: when the job began to use the cache, seconds since the epoch.
    """

    def __init__(self, layout: Layout, started: float) -> None:
        self.path = layout.sessions / f"{random_token()}.session"
        self._fd = -1
        self._pid = os.getpid()
        try:
            self._register(started)
        except OSError as exn:
            # A cache that cannot be written evicts nothing, so nobody needs to know of us.
            logger.debug("no session could be registered: %s", exn)

    def _register(self, started: float) -> None:
        directory = self.path.parent
        directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for _ in range(_ATTEMPTS):
            temporary = directory / f".starting-{random_token()}"
            fd = open_owned(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                if lock_exclusive(fd):
                    os.utime(fd, (started, started))
                    temporary.rename(self.path)
                    self._fd = fd
                    return
            except FileNotFoundError:
                logger.debug("%s was swept before it was locked", temporary.name)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                if self._fd != fd:
                    disown(fd)
        raise OSError(errno.EBUSY, "something keeps removing its file", str(self.path))

    def close(self) -> None:
        """End the session. In a forked child, nothing: it is the parent's."""
        fd, self._fd = self._fd, -1
        if fd < 0 or self._pid != os.getpid():
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError as exn:  # read-only by now; unlocked, it counts as dead anyway
            logger.debug("cannot remove %s: %s", self.path, exn)
        disown(fd)


def oldest_live_session(layout: Layout) -> float | None:
    """When the oldest live session began, in seconds since the epoch; None if there is none.

    Raises:
        OSError: the filesystem is failing.
    """
    names = (name for name in list_names(layout.sessions) if _NAME.match(name))
    started = (_started(layout.sessions / name) for name in names)
    return min((time for time in started if time is not None), default=None)


def remove_dead_sessions(layout: Layout) -> None:
    """Remove what processes that are gone left in ``sessions``.

    Raises:
        OSError: the filesystem is failing.
    """
    for name in list_names(layout.sessions):
        if _NAME.match(name) or _STARTING.match(name):
            _started(layout.sessions / name)


def _started(path: Path) -> float | None:
    """When a session began, or None if it is dead; then it is removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exn:
        if exn.errno in (errno.EROFS, errno.EACCES):  # cannot tell, so it may be alive
            return _modified(path)
        if exn.errno in (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return None  # ended meanwhile, or nothing of ours
        raise
    try:
        if not lock_exclusive(fd):
            return os.fstat(fd).st_mtime
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(fd)


def _modified(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return None
