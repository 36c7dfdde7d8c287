"""Reading a shard while it is fetched, by this process or another one.

    partial: bytes behind the watermark ----> the reader
      | it was given up, or taken over           ^
    the next partial of the same version --------|
      | published                                |
    the entry, pinned ---------------------------|
      | the cache fails                          |
    the origin, from the same byte on -----------'

* The last block is withheld until the entry is there: until its digest, and what the
  origin states of it, were compared. What is read to its end is what would have been
  read from the entry; a shard that turns out bad ends in an error.
* Bytes of two versions never meet in one stream. Another file of the same version is
  read on only if what was given of the old one is the same in it.
* Nobody is relied on to say that it died: the fetch in the background, of this process,
  has the lock as soon as it is free.

A stream is for one thread; the `io.BufferedReader` around it serialises several.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from shardcache.entry import Entry
from shardcache.errors import IntegrityError, ShardCacheError, TransferError
from shardcache.fetching import Fetching, Share
from shardcache.growing import Growing, is_same, same_bytes
from shardcache.metadata import DamagedError
from shardcache.origin import ObjectInfo
from shardcache.store import Opened
from shardcache.urls import ShardURL
from shardcache.validation import check_archive

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["FollowStream", "Host"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at another process's partial: about the time of a block from S3.
_POLL = 0.005
#: Likewise where the fetch is our own, which says when there is more.
_OWN_POLL = 0.25


#: An entry may vanish before it is opened, or be left to another process; not so often.
_LOSSES = 5


class Host(Protocol):
    """Who opened the stream (`reading.Opener`)."""

    def join(self, shard: ShardURL) -> Share:
        """Want the shard fetched.

        Raises:
            RuntimeError: the process must not have more threads.
        """
        ...

    def hit(self, shard: ShardURL) -> Opened | None:
        """The shard's entry, open, pinned and guarded against faults of the disk.

        Raises:
            OSError: the disk fails.
        """
        ...

    def reopen(self, shard: ShardURL, opened: Opened) -> Opened | None:
        """Another `Opened` of an entry, likewise; None if it is gone.

        Raises:
            OSError: the disk fails.
        """
        ...

    def past(
        self, shard: ShardURL, fault: Exception, start: int, pin: ObjectInfo | None
    ) -> io.RawIOBase:
        """The rest of the shard from its origin.

        Raises:
            Exception: ``fault``, where faults are to be seen.
            ShardCacheError: the origin cannot serve it.
        """
        ...


class FollowStream(io.RawIOBase):
    """The bytes of a shard as they come.

    Args:
        shard: which.
        host: who opens what is needed.
        share: of its fetch; it is left when the stream is closed.
    """

    def __init__(self, shard: ShardURL, host: Host, share: Share) -> None:
        super().__init__()
        self.name = str(shard)
        self._shard = shard
        self._host = host
        self._share: Share | None = share
        self._position = 0
        self._given = 0  # the end of what was read
        self._limit = 0
        self._info: ObjectInfo | None = None  # the version that was read
        self._source: Growing | None = None
        self._before: io.FileIO | None = None  # read until now; the new source is unproven
        self._useless: Path | None = None
        self._final: BinaryIO | io.RawIOBase | None = None
        self._path: str | None = None
        self._losses = 0
        self._error: Exception | None = None

    def start(self, *, whole: bool) -> None:
        """Wait until there can be bytes, or all of them; raises as `readinto`.

        Args:
            whole: wait for the entry.
        """
        while self._final is None:
            fetching = self._joined()
            fetching.wait_begun(whole=whole)
            if not fetching.done:
                return
            self._advance()

    def abandon(self) -> None:
        """Close it, and call the fetch off if nobody else wants it."""
        self._leave(abandon=True)
        self.close()

    @property
    def path(self) -> str | None:
        """Where the shard is, if all of it is there."""
        return self._path

    # -- io --------------------------------------------------------------------

    def readable(self) -> bool:
        """See `io.IOBase.readable`."""
        return True

    def seekable(self) -> bool:
        """See `io.IOBase.seekable`."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """See `io.RawIOBase.readinto`; waits for bytes that are on their way.

        Raises:
            TransferError, IntegrityError, ShardNotFoundError, AccessDeniedError: the origin
                cannot serve it.
            CacheFullError, LockTimeoutError, OSError: with ``strict`` only.
        """
        if self.closed:
            raise ValueError("I/O operation on closed file")
        view = memoryview(buffer).cast("B")
        if not view:
            return 0
        while self._final is None:
            if self._position < self._limit:
                count = self._read(view[: self._limit - self._position])
                if count:
                    return self._gave(count)
            else:
                self._advance()
        count = self._final.readinto(view) or 0  # type: ignore[union-attr]  # of both kinds
        return self._gave(count)

    def _read(self, view: memoryview) -> int:
        assert self._source is not None
        try:
            count = os.preadv(self._source.data.fileno(), [view], self._position)
            if count == 0:
                raise OSError(errno.EIO, f"the partial ends at byte {self._position}")
        except OSError as exn:
            self._turn_away(exn)
            return 0
        return count

    def _gave(self, count: int) -> int:
        self._position += count
        self._given = max(self._given, self._position)
        return count

    def tell(self) -> int:
        """See `io.IOBase.tell`."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`; from the end it waits until all is there."""
        while whence == os.SEEK_END and self._final is None:
            size = None if self._source is None else self._source.info.size
            if size is not None:
                position, whence = position + size, os.SEEK_SET
            else:
                self._advance()
        if self._final is not None:
            self._position = self._final.seek(position, whence)
            return self._position
        if whence == os.SEEK_CUR:
            position += self._position
        if position < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = position
        return position

    def fileno(self) -> int:
        """See `io.IOBase.fileno`.

        Raises:
            io.UnsupportedOperation: it is still being fetched.
        """
        if self._final is None:
            raise io.UnsupportedOperation("the shard is still being fetched")
        return self._final.fileno()

    def close(self) -> None:
        """Want no more of the shard, and let go of its files."""
        if not self.closed:
            self._forget()
            if self._final is not None:
                self._final.close()
            self._leave()
        super().close()

    # -- following -------------------------------------------------------------

    def _advance(self) -> None:
        """Wait for something to happen, once, and look what it was; raises what ends it."""
        if self._error is not None:
            raise self._error
        fetching = self._joined()
        seen = fetching.changes
        try:
            if self._look(fetching):
                return
        except (ShardCacheError, OSError) as exn:
            self._turn_away(exn)
            return
        fetching.wait(seen, _OWN_POLL if self._own(fetching) else _POLL)

    def _joined(self) -> Fetching:
        if self._share is None or not self._share.alive:  # after a fork: that is in the parent
            self._share = self._host.join(self._shard)
        assert self._share.fetching is not None
        return self._share.fetching

    def _look(self, fetching: Fetching) -> bool:
        """Whether there is more than there was."""
        if fetching.done:
            if fetching.error is not None:
                raise fetching.error
            opened = None
            if fetching.obtained is not None:
                opened = self._host.reopen(self._shard, fetching.obtained.opened)
        elif self._sealed() and not self._own(fetching):
            opened = self._host.hit(self._shard)
        else:
            opened = None
        if opened is not None:
            self._settle(opened)
            return True
        if fetching.done:  # it was begun by somebody who did not wait
            self._leave()
            self._losses += 1
            if self._losses > _LOSSES:
                raise OSError(errno.EBUSY, "what was fetched vanishes again and again")
            return False
        path = fetching.status.partial
        if path is not None and path not in (self._useless, self._source and self._source.path):
            self._switch(path)
        return self._grown()

    def _own(self, fetching: Fetching) -> bool:
        """Whether this process fetches it, and so says whatever happens."""
        return self._source is not None and fetching.status.written > 0

    def _sealed(self) -> bool:
        return self._source is not None and self._source.sealed

    def _grown(self) -> bool:
        if self._source is None:
            return False
        try:
            limit = self._source.limit()
        except DamagedError:  # being begun
            return False
        if self._before is not None:
            if limit < self._given:
                return False
            self._prove(self._source.data)
        if self._limit == 0 and limit > 0:
            check_archive(self._source.data.fileno(), self._shard.basename, str(self._shard))
        grown = limit > max(self._limit, self._position)
        self._limit = limit
        if grown and self._info is None:
            self._info = self._source.info
        return grown

    def _switch(self, path: Path) -> None:
        try:
            source = Growing(path, self._shard.basename)
        except (DamagedError, FileNotFoundError) as exn:
            logger.debug("%s: %s cannot be followed: %s", self._shard, path.name, exn)
            if isinstance(exn, DamagedError):
                self._useless = path
            return
        if self._given and self._info is not None and source.info.version != self._info.version:
            source.close()
            raise self._replaced()
        old, self._source = self._source, source
        self._limit = 0
        if old is None:
            return
        old.close(data=False)
        given_from = self._before or old.data
        if self._before is not None:
            old.data.close()  # it was never proven
        if self._given and not is_same(given_from, source.data):
            self._before = given_from
        else:  # taken over under another name
            given_from.close()
            self._before = None

    def _settle(self, opened: Opened) -> None:
        """Read on from the entry."""
        file = opened.file
        try:
            if self._given:
                assert self._info is not None and self._source is not None
                if Entry.at(Path(opened.directory)).version != self._info.version:
                    raise self._replaced()
                before = self._before or self._source.data
                if not is_same(before, file):
                    self._before = before
                    self._prove(file)
            file.seek(self._position)
        except BaseException:
            opened.close()
            raise
        self._final = file
        self._path = self.name = opened.path
        self._forget()
        self._leave()

    def _prove(self, file: io.FileIO) -> None:
        """Compare what was given with what another file of the version has in its place."""
        assert self._before is not None
        if not same_bytes(self._before, file, self._given):
            raise IntegrityError(
                f"{self._shard}: bytes that were read of it turned out damaged on their way; "
                "it was fetched again. Read it again.",
                url=str(self._shard),
            )
        self._before.close()
        self._before = None

    def _replaced(self) -> TransferError:
        return TransferError(
            f"{self._shard} was replaced while it was read; the bytes read so far are of the "
            "old version. Read the shard again.",
            url=str(self._shard),
        )

    def _turn_away(self, exn: ShardCacheError | OSError) -> None:
        """Past the cache where that is what failed; else it is the end."""
        pin = self._info if self._given else None
        try:
            self._final = self._host.past(self._shard, exn, self._position, pin)
        except Exception as raised:
            self._error = raised
            raise
        self._forget()
        self._leave()

    def _forget(self) -> None:
        """Close what was followed."""
        source, self._source = self._source, None
        before, self._before = self._before, None
        self._limit = 0
        if source is not None:
            source.close()
        if before is not None:
            before.close()

    def _leave(self, *, abandon: bool = False) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.leave(abandon=abandon)
