"""What the filesystem has left, and what it owes.

An evicted file gives its bytes back when nobody has it open. Readers that pin are never
evicted; but somebody may read an entry by its path alone, locks may lie, and some
filesystems free at their next commit only (btrfs, ZFS). Bytes that were evicted and have
not come back are pending: they count as free, or every newcomer would evict more for
want of them, until nothing is left.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.files import Modes
from shardcache.locks.mounts import MEMORY_TYPES, mount_of
from shardcache.space.memory import memory_headroom
from shardcache.space.notes import Note

__all__ = ["Pending", "Volume", "is_memory"]

logger = logging.getLogger(__name__)

#: Seconds after which evicted bytes are no longer hoped for, and more may be evicted. Twice
#: the 30 s after which btrfs commits (btrfs(5), commit); and it bounds what a file that is
#: never closed can cost to one shard per minute.
_PATIENCE = 60.0
#: What a pod may write locally includes its logs and all else that its containers write.
_EPHEMERAL_SHARE = 0.9
#: (path, device) -> whether it is a RAM disk. Other mounts under one path are other devices.
_memory: dict[tuple[str, int], bool] = {}


@dataclass(frozen=True, slots=True)
class Volume:
    """A filesystem, as it is now.

    Attributes:
        size: bytes; of a RAM disk no more than the cgroup of this process may have.
        free: bytes that this user may still write; of a RAM disk no more than what that
            cgroup leaves.
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
        size, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
        if is_memory(path) and (memory := memory_headroom()) is not None:
            if size == 0:  # ramfs, which states nothing
                size, free = memory.limit, memory.free
            size, free = min(size, memory.limit), min(free, memory.free)
        return cls(size, free, found.f_files, found.f_favail)

    def budget(self, config: Config) -> int | None:
        """Most bytes that a cache on it may hold; None where only free space limits it."""
        limits = []
        if config.max_size is not None:
            limits.append(config.max_size.of(self.size))
        if config.ephemeral_limit is not None:
            limits.append(int(config.ephemeral_limit * _EPHEMERAL_SHARE))
        return min(limits, default=None)

    def lacks_inodes(self, wanted: int) -> int:
        """How many of ``wanted`` inodes there are too few."""
        return max(0, wanted - self.free_inodes) if self.inodes else 0


def is_memory(path: Path) -> bool:
    """Whether what is written there is memory.

    Raises:
        OSError: it cannot be looked at.
    """
    # Asked with every admission, and seldom new.
    key = str(path), path.stat().st_dev
    found = _memory.get(key)
    if found is None:
        mount = mount_of(path)
        found = _memory[key] = mount is not None and mount.type in MEMORY_TYPES
    return found


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
        self._note = Note(path, modes)
        self._clock = clock
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
            pending, free, at = self._note.read()
            self._noted = int(pending), int(free), float(at)
        except (ValueError, TypeError, OverflowError) as exn:
            logger.debug("nothing noted: %s", exn)
        noted = self._noted
        if noted is None or not 0 <= self._clock.monotonic() - noted[2] < _PATIENCE:
            return None
        return noted

    def _write(self, pending: int, free: int, at: float) -> None:
        self._noted = pending, free, at
        self._note.write(*self._noted)
