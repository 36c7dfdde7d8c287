"""The data file of an entry: opened and pinned by who reads it, held by who evicts it.

A pin is a shared flock, freed by close or death; an evictor needs the exclusive
one, for a moment. Neither waits for the other for long, and neither needs the
other to go on: a reader that finds an entry in the hand of an evictor which was
stopped reads it all the same.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from shardcache.files import open_file
from shardcache.layout import IDLE_GRACE, is_idle
from shardcache.locks.flock import is_file, pin, seize
from shardcache.store.entry import Entry
from shardcache.store.entrystream import EntryStream
from shardcache.store.metadata import DamagedError

__all__ = ["Opened", "hold", "open_data", "readable"]

#: What opening a planted link, directory or socket says.
_NOT_DATA = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})
#: What a disk says of one file that it cannot read. What it says of itself is no damage.
UNREADABLE = frozenset(
    {errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.EILSEQ, errno.ENODATA}
)
_fileno = io.FileIO.fileno  # what `EntryStream` adds is for later
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


@dataclass(slots=True, eq=False)  # not frozen: that would double what making one costs
class Opened:
    """A hit: an open, pinned data file, which the caller must close.

    Attributes:
        file: unbuffered; it owns the descriptor.
        path: where the data is.
        directory: the entry's.
        size: bytes of it.
        stuck: somebody began to evict it and does not go on. It can be read to its end
            all the same, but may leave its path at any time.
    """

    file: EntryStream
    path: str
    directory: str
    size: int
    stuck: bool = False

    @property
    def fd(self) -> int:
        """The descriptor, for as long as `file` is open."""
        return self.file.fileno()

    def close(self) -> None:
        """Let go of the entry."""
        self.file.close()


def open_data(directory: str, path: str, size: int, grace: float | None) -> Opened | None:
    """Open and pin a data file of ``size`` bytes; None if it is gone.

    Args:
        directory: the entry's.
        path: of the data file in it.
        size: bytes that it must have.
        grace: as `Layout.grace`; where flock does not tell, nothing is pinned.

    Raises:
        DamagedError: what is there is no such file.
        OSError: the disk fails.
    """
    try:
        file = open_file(path, EntryStream)
    except OSError as exn:
        if exn.errno in _GONE:
            return None
        if exn.errno in _NOT_DATA:
            raise DamagedError("its data file is a link, a directory or a socket") from exn
        if exn.errno in UNREADABLE:
            raise DamagedError(f"its data file cannot be opened ({exn.strerror})") from exn
        raise
    good = False
    try:
        fd = _fileno(file)
        # A miss would be fetched in vain as long as the name is taken.
        stuck = grace is None and not pin(fd, path)
        if stuck and not is_file(path, fd):
            return None
        found = os.fstat(fd)
        if found.st_nlink == 0:  # evicted between open and flock
            return None
        if found.st_size != size or not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"its data file has {found.st_size} bytes, not {size}")
        good = True
        return Opened(file, path, directory, size, stuck)
    finally:
        if not good:
            file.close()


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """What is done in the body reads an entry; where the disk cannot, that is damaged.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        yield
    except OSError as exn:
        if exn.errno not in UNREADABLE:
            raise
        raise DamagedError(f"it cannot be read ({exn.strerror})") from exn


@contextlib.contextmanager
def hold(entry: Entry, grace: float | None) -> Iterator[bool]:
    """Hold the exclusive lock of an entry's data; False if it is pinned.

    Where flock does not tell, what was used within the grace counts as pinned.

    Raises:
        OSError: the entry is gone, or cannot be opened.
    """
    try:
        data = entry.data
        file = open_file(data, io.FileIO)
    except DamagedError:
        yield True
        return
    except OSError as exn:
        if exn.errno not in _NOT_DATA:
            raise
        yield True  # planted; nobody reads it
        return
    with file:
        free = seize(file.fileno(), data) if grace is None else None
        yield is_idle(entry.path, grace or IDLE_GRACE) if free is None else free
