"""Reading an entry, also when its disk fails under the reader.

An `EntryStream` is the data file itself until a read fails or ends before the entry
does. Then, in this order:

* a stale handle (ESTALE): the entry is opened once more, and reading goes on;
* the entry is set aside, and the rest comes from the origin, at the same byte and of
  the same version. If the origin has another version by now, reading ends in an error:
  two versions are never spliced.

`seek` and `tell` work before and after. For one thread; the `io.BufferedReader` around
it serialises several.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from typing import TYPE_CHECKING, Protocol

from shardcache.errors import TransferError
from shardcache.files import Breaker, is_disk_fault
from shardcache.origins.base import ObjectInfo
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger(__name__)

# Looked up once: `super()` costs as much as all the rest that is added to a read.
_readinto = io.FileIO.readinto
_readall = io.FileIO.readall
_tell = io.FileIO.tell
_seek = io.FileIO.seek
_close = io.FileIO.close


class Rest(Protocol):
    """What is left of a shard, from its origin (`bypass.OriginStream`)."""

    @property
    def info(self) -> ObjectInfo:
        """The version that comes."""
        ...

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See `io.RawIOBase.readinto`."""
        ...

    def close(self) -> None:
        """Give the connection back."""
        ...


class Keeper(Protocol):
    """Whom a stream asks when its file fails."""

    def open_again(self, shard: ShardURL, path: str) -> io.FileIO | None:
        """Open the same entry once more; None if it is gone.

        Raises:
            OSError: the disk fails.
        """
        ...

    def give_up(
        self, shard: ShardURL, path: str, fd: int, fault: OSError, position: int
    ) -> tuple[str, ObjectInfo | None]:
        """Set aside the entry whose file ``fd`` failed.

        Returns:
            The name of its version, and what else is known of that.

        Raises:
            OSError: ``fault``, where faults are to be seen.
        """
        ...

    def rest(
        self, shard: ShardURL, start: int, pin: ObjectInfo | None, version: str | None
    ) -> Rest:
        """The shard from byte ``start`` on; see `bypass.OriginStream`."""
        ...

    def reassured(self) -> None:
        """A file was read, and did not fail."""
        ...


class EntryStream(io.FileIO):
    """The data file of an entry; until `guard` is called an ordinary file."""

    # Here and not in __init__: files are made by the thousand, and read by the few.
    _keeper: Keeper | None = None
    _shard: ShardURL
    _path: str
    _breaker: Breaker
    _size: int | None = None
    _moved = False
    _reopened = False
    # After a fault:
    _fault: OSError | None = None
    _at = 0
    _pin: ObjectInfo | None = None
    _version: str | None = None
    _rest: Rest | None = None

    def guard(
        self, keeper: Keeper, shard: ShardURL, path: str, size: int, breaker: Breaker
    ) -> None:
        """From now on faults of the disk are mended.

        Args:
            keeper: how.
            shard: which shard it is.
            path: of the file, which becomes the stream's name.
            size: bytes of the entry.
            breaker: knows whether the disk failed lately.
        """
        self._keeper = keeper
        self._shard = shard
        self._path = self.name = path
        self._size = size
        self._breaker = breaker

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See `io.RawIOBase.readinto`.

        Raises:
            TransferError: the disk failed, and the origin has not got this version.
            OSError: the disk failed, and faults are to be seen.
        """
        while self._fault is None:
            try:
                count = _readinto(self, buffer)
            except OSError as exn:
                self._recover(exn)
            else:
                if count or not memoryview(buffer).nbytes or self._complete():
                    return count
                self._recover(self._short())
        return self._read_rest(memoryview(buffer).cast("B"))

    def readall(self) -> bytes:
        """See `io.RawIOBase.readall`; raises as `readinto`."""
        if self._fault is None:
            start = _tell(self)
            try:
                data = _readall(self)
            except OSError as exn:
                if self._keeper is None or not is_disk_fault(exn):
                    raise
                _seek(self, start)  # it may have read some before it failed
            else:
                if self._complete():
                    return data
                _seek(self, start)
        # In pieces: then the fault strikes in its place, and is mended there.
        return super(io.FileIO, self).readall()

    def read(self, size: int | None = -1, /) -> bytes:
        """See `io.RawIOBase.read`; raises as `readinto`."""
        return super(io.FileIO, self).read(-1 if size is None else size)

    def _complete(self) -> bool:
        return self._size is None or _tell(self) >= self._size

    def _short(self) -> OSError:
        return OSError(errno.EIO, f"the file ends at byte {_tell(self)} of {self._size}")

    def _recover(self, fault: OSError) -> None:
        """Make the file readable again, or turn to the origin; raises what cannot be mended."""
        keeper = self._keeper
        if keeper is None or not is_disk_fault(fault):
            raise fault
        position = _tell(self)
        if fault.errno == errno.ESTALE and not self._reopened:
            self._reopened = True
            if self._open_again(keeper, position):
                return
        self._version, self._pin = keeper.give_up(
            self._shard, self._path, super().fileno(), fault, position
        )
        if position == 0 and not self._moved:
            # No byte was given yet, so whatever version comes now is all of one version.
            self._version = self._pin = self._size = None
        self._at = position
        self._fault = fault
        self.__class__ = _FailedStream

    def _open_again(self, keeper: Keeper, position: int) -> bool:
        try:
            file = keeper.open_again(self._shard, self._path)
            if file is None:
                return False
            with file:
                # The number stays; what it stands for, with the pin, is the new file.
                os.dup2(file.fileno(), super().fileno(), inheritable=False)
            _seek(self, position)
        except OSError as exn:
            logger.debug("%s: cannot be opened again: %s", self._shard, exn)
            return False
        return True

    def _read_rest(self, view: memoryview) -> int:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if not view or (self._size is not None and self._at >= self._size):
            return 0
        if self._rest is None:
            assert self._keeper is not None
            self._rest = self._keeper.rest(self._shard, self._at, self._pin, self._version)
            self._pin = self._rest.info
            self._version = self._pin.version
            self._size = self._pin.size if self._size is None else self._size
        count = self._rest.readinto(view)
        self._at += count
        if count == 0 and self._size is not None and self._at < self._size:
            raise TransferError(
                f"{self._shard} ends at byte {self._at} at its origin, and the cached copy of "
                f"{self._size} bytes cannot be read ({self._fault}). Read the shard again.",
                url=str(self._shard),
            )
        return count

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`."""
        self._moved = True
        if whence == os.SEEK_END and self._size is not None:
            position, whence = position + self._size, os.SEEK_SET  # the file may be cut short
        if self._fault is None:
            return _seek(self, position, whence)
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the origin does not say how long the shard is")
        if whence == os.SEEK_CUR:
            position += self._at
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if position != self._at:
            self._drop()
            self._at = position
        return position

    def fileno(self) -> int:
        """See `io.IOBase.fileno`.

        Raises:
            io.UnsupportedOperation: the file failed, and is not what is read.
        """
        if self._fault is not None:
            raise io.UnsupportedOperation(f"the file failed ({self._fault.strerror})")
        return super().fileno()

    def _drop(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.close()

    def close(self) -> None:
        """Let go of the file, the pin and the origin."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            if self._fault is not None:
                self._drop()
            elif self._breaker.faults and _tell(self) > 0:
                keeper.reassured()
        try:
            _close(self)
        except OSError as exn:  # closed all the same; nothing was written that could be lost
            logger.debug("%s: closing it: %s", self.name, exn)


class _FailedStream(EntryStream):
    """An entry's stream once its file has failed."""

    # Not in `EntryStream`: `io.BufferedReader` asks a new file for its position and drops
    # whatever is raised then, an interrupt too. FileIO's own `tell` cannot be interrupted.
    def tell(self) -> int:
        """See `io.IOBase.tell`."""
        return self._at
