"""Who waits for whom: a note beside the sessions while a process waits for another one's fetch.

    sessions/<random>.wait   JSON: the shard, who waits and since when, for whom

It is for people, who see it in `top`; nothing rests on it. A wait that is long enough to be looked
at writes one, so a short one costs nothing. Its process holds it locked and removes it; of a
process that died the lock is free, so that it is not shown, and the next sweep removes it. Where
flock does not tell, nobody is shown.

A note belongs to one thread; those who look and those who sweep may do so at any time.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from shardcache.files import disown, is_alone, open_file, open_owned
from shardcache.layout import Layout, list_names
from shardcache.locks.flock import Holder, is_free, lock_exclusive, parse_holder
from shardcache.names import is_key, is_wait_name

__all__ = ["Wait", "WaitNote", "live_waits", "parse_wait", "remove_dead_waits"]

logger = logging.getLogger(__name__)

_SCHEMA = 1
#: A URL has 4 KiB at most in the records of a cache, a `Holder` less than one.
_MAX_URL = 4096
_MAX_RECORD = 16 << 10


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
        found = {"schema": _SCHEMA, "url": self.url[:_MAX_URL], "key": self.key}
        return json.dumps({**found, "waiter": waiter, "holder": holder}).encode()


def parse_wait(data: bytes) -> Wait | None:
    """What `WaitNote` writes; None for anything else."""
    try:
        found = json.loads(data)
        url, key = found["url"], found["key"]
        if found["schema"] != _SCHEMA or not isinstance(url, str) or not is_key(key):
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

    _fd = -1  # until it is made; an interrupt may strike before

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._path = layout.new_wait()
        self._pid = os.getpid()
        self._said: Wait | None = None

    def say(self, wait: Wait) -> None:
        """Write what is waited for, if that is news."""
        if wait == self._said:
            return
        self._said = wait
        text = wait.encode()
        try:
            if self._fd < 0:
                self._make()
            if self._fd >= 0:
                os.pwrite(self._fd, text, 0)
                os.ftruncate(self._fd, len(text))
        except OSError as exn:
            logger.debug("%s: %s", self._path, exn)

    def _make(self) -> None:
        fd = open_owned(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._layout.modes)
        try:
            if lock_exclusive(fd):
                self._fd = fd
        finally:
            if self._fd != fd:
                disown(fd)
                self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """It is over. In a forked child, nothing: it is the parent's."""
        fd, self._fd = self._fd, -1
        if fd < 0 or self._pid != os.getpid():
            return
        with contextlib.suppress(OSError):  # read-only by now; unlocked, it counts as dead
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # closed all the same, and nothing is to be kept
            disown(fd)


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
                wait = parse_wait(os.pread(file.fileno(), _MAX_RECORD, 0))
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
