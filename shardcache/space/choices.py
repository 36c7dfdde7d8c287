"""Which version of a shard each job reads: what it began to read, it goes on reading.

An object may be replaced while a job runs, and both versions be on disk. Beside its map of uses
(`uses`) each job has a log of choices: a line for each shard that one of its processes began to
read, with the version. Workers that come later, in another epoch, read the same one.

    <key> <version> <the version before it, or zeros>

A line counts if the version before it is the one in force when it is met; of two processes that
choose at the same moment the first one's line counts, for both. No lock is needed for that:
lines are appended whole, and everybody reads them in the same order.

A job's processes hold the log with a shared flock. Who finds it free is the first process of a
job that begins, and empties it: a job that is started again under the name that its launcher gave
it before chooses anew. The last one removes it, or else a sweeper. Where a log cannot be written
a process keeps its own choices to itself.

`Choices` is for the threads of one process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from shardcache.files import disown, is_alone, open_file, open_owned
from shardcache.layout import Layout, list_names
from shardcache.locks.flock import is_file, is_free, lock_exclusive, lock_shared
from shardcache.locks.sessions import LiveSession
from shardcache.modes import settle
from shardcache.names import is_choices_name
from shardcache.space.uses import used_by
from shardcache.store.entry import Entry

__all__ = ["Choices", "follow", "remove_ended_choices", "unneeded"]

logger = logging.getLogger(__name__)

_NONE = "0" * 24
#: A line begins with an end of line, too: what was cut short by a full disk spoils no other.
_LINE = re.compile(rb"\n([0-9a-f]{32}) ([0-9a-f]{24}) ([0-9a-f]{24})\.")
_CHUNK = 1 << 20
#: Another process of the job that begins has the log to itself for a moment; a sweeper may
#: remove it between our open and our flock.
_ATTEMPTS = 100
_MOMENT = 0.001

_Found = list[tuple[Path, int]]


class _Log:
    """The choices of one job, as far as they were read; without a file, those of one process."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}
        self._fd = -1
        self._pid = os.getpid()
        self._path: Path | None = None
        self._read = 0

    def open(self, path: Path, layout: Layout) -> None:
        """Keep the choices in a file from now on.

        Raises:
            OSError: that cannot be.
        """
        for _ in range(_ATTEMPTS):
            fd = open_owned(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, layout.modes)
            try:
                if not is_alone(fd):
                    return
                settle(fd, layout.modes.file)
                if is_free(fd):
                    os.ftruncate(fd, 0)
                if lock_shared(fd) and is_file(path, fd):
                    self._fd, self._path = fd, path
                    return
            finally:
                if self._fd != fd:
                    disown(fd)
            time.sleep(_MOMENT)
        logger.debug("%s is held by somebody", path.name)

    def close(self) -> None:
        """Let go of the file; who is the last one of the job removes it."""
        fd, self._fd = self._fd, -1
        if fd < 0 or self._pid != os.getpid():
            return
        try:
            if lock_exclusive(fd) and self._path is not None and is_file(self._path, fd):
                self._path.unlink()
        except OSError as exn:  # read-only by now; a sweeper removes it
            logger.debug("cannot remove a log of choices: %s", exn)
        with contextlib.suppress(OSError):  # closed all the same
            disown(fd)

    def __del__(self) -> None:
        # Few programs close what they use to their end.
        self.close()

    def catch_up(self) -> None:
        """Read what others of the job chose meanwhile."""
        if self._fd < 0:
            return
        try:
            # Shorter than it was: emptied by one who could not see us. What we know, we keep.
            if os.fstat(self._fd).st_size < self._read:
                self._read = 0
            while data := os.pread(self._fd, _CHUNK, self._read):
                end = follow(data, self.state)
                if not end:
                    return
                self._read += end
        except OSError as exn:
            logger.debug("a log of choices cannot be read: %s", exn)

    def propose(self, key: str, version: str) -> str:
        """Choose a version in place of the one in force; which one is in force then."""
        line = f"\n{key} {version} {self.state.get(key, _NONE)}."
        try:
            if self._fd >= 0 and os.write(self._fd, line.encode()) == len(line):
                self.catch_up()
                return self.state.setdefault(key, version)
        except OSError as exn:
            logger.debug("a choice cannot be written: %s", exn)
        self.state[key] = version
        return version


def follow(data: bytes, state: dict[str, str]) -> int:
    """Follow the lines of a log; how many bytes of it are done with."""
    end = 0
    for found in _LINE.finditer(data):
        key, version, before = (group.decode() for group in found.groups())
        if state.get(key, _NONE) == before:
            state[key] = version
        end = found.end()
    return end


class Choices:
    """What one process knows of its job's choices, and of versions that are not wanted.

    Args:
        strict: whether only the chosen version is given, where there is one; otherwise it is
            given before any other.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._guard = threading.Lock()
        self._log = _Log()
        self._copies: dict[Path, _Log] = {}
        self._lost: dict[str, str] = {}
        self._passed_over: dict[str, frozenset[str]] = {}

    def keep(self, layout: Layout, job: str, *, primary: bool) -> None:
        """Keep them on disk; where that cannot be, in this process.

        Args:
            layout: the node's namespace of a tier.
            job: the name of the job's log there.
            primary: whether that one is asked; the others are for who evicts there.
        """
        log = _Log()
        try:
            log.open(layout.choices(job), layout)
        except OSError as exn:
            logger.debug("no log of choices in %s: %s", layout.base, exn)
        with self._guard:
            if primary:
                old, self._log = self._log, log
            else:
                old = self._copies.pop(layout.base, _Log())
                self._copies[layout.base] = log
            old.close()

    def close(self) -> None:
        """Let go of the files: the job may have ended."""
        with self._guard:
            for log in (self._log, *self._copies.values()):
                log.close()

    def knows(self, key: str) -> bool:
        """Whether a choice is known without a look at the disk."""
        return key in self._log.state and key not in self._lost

    def version(self, key: str) -> str | None:
        """The version that this job reads, or None if it has not begun to or lost it."""
        if not self.knows(key):
            with self._guard:
                self._log.catch_up()
        found = self._log.state.get(key)
        return None if found == self._lost.get(key) else found

    def note(self, key: str, version: str) -> str | None:
        """Note that this job reads a version.

        Returns:
            The one that it read before, which is no longer there, if it was another one.
        """
        if version in self._passed_over.get(key, ()):
            self.allow(key)
        if key not in self._lost and self._log.state.get(key) == version:
            return None
        with self._guard:
            self._log.catch_up()
            before, lost = self._log.state.get(key), self._lost.pop(key, None)
            if before == version:
                return None
            if before is not None and before != lost and self._strict:
                return None  # another process of the job was quicker; the next epoch reads that
            chosen = self._log.propose(key, version)
            for copy in self._copies.values():
                copy.catch_up()
                copy.propose(key, chosen)
        return before if chosen != before else None

    def lose(self, key: str) -> None:
        """The chosen version is not there any more: another one may be chosen."""
        found = self._log.state.get(key)
        if found is not None:
            self._lost[key] = found

    def pass_over(self, key: str, versions: Collection[str]) -> None:
        """Take no notice of entries of these versions until there is a fetch of the shard."""
        self._passed_over[key] = frozenset(versions)

    def passes_over(self, key: str) -> bool:
        """Whether some of its entries are taken no notice of."""
        return key in self._passed_over

    def allow(self, key: str) -> None:
        """Take notice of all entries again."""
        self._passed_over.pop(key, None)

    def among(self, key: str, found: _Found, *, only: str | None = None) -> _Found:
        """Entries of a shard that may be opened, in the order in which to try them.

        Args:
            key: the shard's.
            found: (directory, size) of each, the newest first.
            only: this version alone.
        """
        passed = self._passed_over.get(key)
        if passed:
            found = [one for one in found if _version(one[0]) not in passed]
        if not self._strict and only is None and len(found) < 2:
            return found
        wanted = only or self.version(key)
        if wanted is None or (passed and wanted in passed):
            return found
        chosen = [one for one in found if _version(one[0]) == wanted]
        if self._strict or only is not None:
            return chosen
        return chosen + [one for one in found if one not in chosen]


def _version(directory: Path) -> str:
    return directory.name.partition("-")[0]


def unneeded(layout: Layout, sessions: Sequence[LiveSession]) -> Callable[[Entry], bool]:
    """Tells of an entry beside which there is a newer version whether no live job reads it.

    What the jobs chose is read when it is first asked for: few caches have two versions of a shard.

    Args:
        layout: the node's namespace.
        sessions: the live ones.
    """
    jobs = {session.job for session in sessions}
    if None in jobs:  # one that keeps no log may read anything
        return lambda entry: False

    @functools.cache
    def chosen() -> list[tuple[dict[str, str], Callable[[str], bool]]]:
        return [(_read(layout.choices(job)), used_by(layout, job)) for job in jobs if job]

    def is_unneeded(entry: Entry) -> bool:
        for choices, used in chosen():
            version = choices.get(entry.key)
            if version == entry.version or (version is None and used(entry.key)):
                return False
        return True

    return is_unneeded


def _read(path: Path) -> dict[str, str]:
    state: dict[str, str] = {}
    try:
        with open_file(path, io.FileIO) as file:
            follow(file.readall(), state)
    except OSError as exn:
        logger.debug("%s cannot be read: %s", path.name, exn)
    return state


def remove_ended_choices(layout: Layout, sessions: Iterable[LiveSession]) -> int:
    """Remove the logs of jobs that have ended; returns how many.

    Raises:
        OSError: the filesystem is failing.
    """
    live = {session.job for session in sessions}
    removed = 0
    for name in list_names(layout.sessions):
        if not is_choices_name(name) or name.partition(".")[0] in live:
            continue
        path = layout.sessions / name
        try:
            with open_file(path, io.FileIO, os.O_RDWR) as file:
                # Under its own lock: a process that begins opens another one.
                if lock_exclusive(file.fileno()) and is_file(path, file.fileno()):
                    path.unlink()
                    removed += 1
        except OSError as exn:
            logger.debug("%s stays: %s", name, exn)
    return removed
