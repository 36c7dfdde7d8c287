"""Count the caches on this node that are downloading.

A cache holds a record lock on one random byte of ``downloads.lock`` while it downloads, and counts
the locks of the other caches. The locks belong to the open file (F_OFD_SETLK), so two caches of one
process count as two, and the kernel frees the locks when the process dies. Where such locks do not
work, each cache counts only itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import struct
from collections.abc import Callable

from shardcache import clock
from shardcache.faults import ignoring
from shardcache.files import open_exclusive, set_mode
from shardcache.layout import Layout

#: Number of bytes to choose from, large enough that no two downloaders choose the same byte.
_BYTES = 1 << 30
#: `struct flock` of 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
#: Seconds between counts. A count took 70 us with 32 downloaders, and 140 us with 64.
_INTERVAL = 1.0


class Downloaders:
    """Registers a cache as a downloader of its node, and counts the node's downloaders.

    Only one thread at a time may call `join` or `leave`; the caller has to ensure that.

    Args:
        node: returns the layout of the node's namespace.
    """

    def __init__(self, node: Callable[[], Layout]) -> None:
        self._node = node
        self._file: io.FileIO | None = None  # open from `join` to `leave`
        self._count = 1
        self._due = 0.0

    def join(self) -> None:
        """Register this cache as a downloader."""
        self._count, self._due, layout = 1, 0.0, self._node()
        with ignoring(OSError):  # a read-only disk, or one without such locks
            path, flags = layout.named_lock("downloads"), os.O_RDWR | os.O_CREAT
            self._file = open_exclusive(path, flags, layout.modes)
            with contextlib.suppress(PermissionError):  # another member of the group owns the file
                set_mode(self._file.fileno(), layout.modes.file)
            # Not from `random`, because forked workers may seed it alike.
            byte = int.from_bytes(os.urandom(4), "big") % _BYTES
            _call(self._file, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte, 1)

    def leave(self) -> None:
        """Stop counting this cache as a downloader."""
        file, self._file = self._file, None
        if file is not None:
            # A forked child has closed the file, and the lock belongs to the parent.
            with ignoring(OSError, ValueError):
                _call(file, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, _BYTES)
            with ignoring(OSError):
                file.close()

    def count(self) -> int:
        """Return the number of downloaders, including this one. It may be a second old."""
        file, now = self._file, clock.monotonic()
        if file is not None and now >= self._due:
            with ignoring(OSError, ValueError):  # `leave` has closed the file
                self._count = 1 + _count_others(file)
            # Set this last: otherwise, another thread would return the previous count.
            self._due = now + _INTERVAL
        return self._count


def _count_others(file: io.FileIO) -> int:
    count, ranges = 0, [(0, _BYTES)]
    while ranges:
        start, stop = ranges.pop()
        if start < stop:
            # The kernel describes one lock in the range, not always the first: search both sides.
            kind, _, at, _, _ = _call(file, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, stop - start)
            if kind != fcntl.F_UNLCK:
                count += 1
                ranges += [(start, at), (at + 1, stop)]
    return count


def _call(file: io.FileIO, command: int, kind: int, start: int, length: int) -> tuple[int, ...]:
    request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    return _FLOCK.unpack(fcntl.fcntl(file.fileno(), command, request))
