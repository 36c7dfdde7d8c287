"""What the filesystem has left, and what it owes.

An evicted file gives its bytes back when nobody has it open. Readers that pin are never
evicted; but somebody may read an entry by its path alone, locks may lie, and some
filesystems free at their next commit only (btrfs, ZFS). Bytes that were evicted and have
not come back are pending: they count as free, or every newcomer would evict more for
want of them, until nothing is left.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from shardcache.clock import Clock
from shardcache.descriptors import is_alone
from shardcache.layout import read_file
from shardcache.metadata import boot_id
from shardcache.modes import Modes, settle

__all__ = ["Pending", "Volume"]

logger = logging.getLogger(__name__)

#: Seconds after which evicted bytes are no longer hoped for, and more may be evicted. Twice
#: the 30 s after which btrfs commits (btrfs(5), commit); and it bounds what a file that is
#: never closed can cost to one shard per minute.
_PATIENCE = 60.0
_MAX_RECORD = 4096


@dataclass(frozen=True, slots=True)
class Volume:
    """A filesystem, as it is now.

    Attributes:
        size: bytes.
        free: bytes that this user may still write.
        inodes: how many there are; 0 where the filesystem makes them as it needs them.
        free_inodes: how many this user may still make.
    """

    size: int
    free: int
    inodes: int
    free_inodes: int

    @classmethod
    def of(cls, path: Path) -> Volume:
        """The filesystem under ``path``.

        Raises:
            OSError: it does not answer.
        """
        found = os.statvfs(path)
        return cls(
            found.f_frsize * found.f_blocks,
            found.f_frsize * found.f_bavail,
            found.f_files,
            found.f_favail,
        )

    def lacks_inodes(self, wanted: int) -> int:
        """How many of ``wanted`` inodes there are too few."""
        return max(0, wanted - self.free_inodes) if self.inodes else 0


class Pending:
    """Bytes that were evicted and have not come back.

    Noted in a file, so that all processes of the node know; each call is made under the
    budget lock. Where the file cannot be written, each process knows its own.

    Args:
        path: of the file.
        modes: its permissions.
        clock: time; the monotonic one, which all processes of a boot share.
    """

    def __init__(self, path: Path, modes: Modes, clock: Clock) -> None:
        self._path = path
        self._modes = modes
        self._clock = clock
        self._boot = boot_id()
        self._noted: tuple[int, int, float] | None = None

    def left(self, free: int) -> int:
        """Bytes still to come, where ``free`` are free now."""
        noted = self._read()
        if noted is None:
            return 0
        pending, before, at = noted
        # What became free since is what came back. What was written since is not: the mark
        # sinks with it.
        pending = max(0, pending - max(0, free - before))
        if free != before:
            self._write(pending, free, at)
        return pending

    def note(self, evicted: int, before: int, after: int) -> None:
        """Compare what an eviction should have given with what it gave.

        Args:
            evicted: bytes of the entries that went.
            before: bytes free at first.
            after: bytes free now.
        """
        owed = evicted - max(0, after - before)
        # Others write meanwhile; half of a shard is more than they can do in that moment.
        if owed > evicted // 2:
            owed += self.left(after)
            logger.info("%d bytes were evicted and are not free yet", owed)
            self._write(owed, after, self._clock.monotonic())

    def _read(self) -> tuple[int, int, float] | None:
        try:
            boot, pending, free, at = json.loads(read_file(self._path, _MAX_RECORD))
            if boot == self._boot:
                self._noted = int(pending), int(free), float(at)
        except FileNotFoundError:
            logger.debug("%s: nothing noted", self._path)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as exn:
            logger.debug("%s: %s", self._path, exn)
        noted = self._noted
        if noted is None or not 0 <= self._clock.monotonic() - noted[2] < _PATIENCE:
            return None
        return noted

    def _write(self, pending: int, free: int, at: float) -> None:
        self._noted = pending, free, at
        record = json.dumps([self._boot, *self._noted]).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            # In its place: on a full disk there is no room for a second one.
            fd = os.open(self._path, flags, self._modes.file)
            try:
                if is_alone(fd):
                    settle(fd, self._modes.file)
                    os.ftruncate(fd, 0)
                    os.write(fd, record)
            finally:
                os.close(fd)
        except OSError as exn:
            logger.debug("%s: %s", self._path, exn)
