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
* Bytes of two versions never meet in one stream: see `trail`.
* Nobody is relied on to say that it died: the fetch in the background, of this process,
  has the lock as soon as it is free.

A stream is for one thread; the `io.BufferedReader` around it serialises several.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from shardcache.errors import IntegrityError, ShardCacheError, TransferError
from shardcache.fetch.background import Fetching, Share
from shardcache.fetch.blocks import FetchStatus
from shardcache.origins.base import ObjectInfo
from shardcache.store.digest import check_archive
from shardcache.store.entry import DamagedError, Entry
from shardcache.store.partial import Growing, is_same, same_bytes
from shardcache.store.store import Opened
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["FollowStream", "Host", "Trail"]

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
        self,
        shard: ShardURL,
        fault: Exception,
        start: int,
        pin: ObjectInfo | None,
        status: FetchStatus,
    ) -> io.RawIOBase:
        """The rest of the shard from its origin; the reader needs no more of the cache.

        ``status`` is of the fetch that failed: it may have kept the origin's answer.

        Raises:
            Exception: ``fault``, where faults are to be seen.
            ShardCacheError: the origin cannot serve it.
        """
        ...

    def followed(self, shard: ShardURL, outcome: str, size: int, waited: float) -> None:
        """Note what an open came to.

        Args:
            shard: which.
            outcome: of `coordination.Outcome`.
            size: bytes of the shard.
            waited: seconds that its reader waited.
        """
        ...


class FollowStream(io.RawIOBase):
    """The bytes of a shard as they come.

    Args:
        shard: which.
        host: who opens what is needed.
        share: of its fetch; it is left when the stream is closed.
        began: whether the fetch was begun for this reader.
        waited: seconds that it has waited so far.
    """

    def __init__(
        self, shard: ShardURL, host: Host, share: Share, *, began: bool, waited: float = 0.0
    ) -> None:
        super().__init__()
        self.name = str(shard)
        self._shard = shard
        self._host = host
        self._pid = os.getpid()
        self._share: Share | None = share
        #: What the open came to, as far as it is known; None once it was told.
        self._outcome: str | None = "fetched" if began else "coalesced"
        self._waited = waited
        self._position = 0
        self._trail = Trail(shard)
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
            begun = time.monotonic()
            fetching.wait_begun(whole=whole)
            self._waited += time.monotonic() - begun
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
        if self._error is not None:  # final; see `OriginStream.readinto`
            raise self._error
        while self._final is None:
            if self._position < self._trail.limit:
                count = self._read(view[: self._trail.limit - self._position])
                if count:
                    return self._gave(count)
            else:
                self._advance()
        count = self._final.readinto(view) or 0  # type: ignore[union-attr]  # of both kinds
        return self._gave(count)

    def _read(self, view: memoryview) -> int:
        try:
            return self._trail.read(view, self._position)
        except OSError as exn:
            self._turn_away(exn)
            return 0

    def _gave(self, count: int) -> int:
        self._position += count
        self._trail.given = max(self._trail.given, self._position)
        return count

    def tell(self) -> int:
        """See `io.IOBase.tell`."""
        return self._position

    def seek(self, position: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase.seek`; from the end it waits until all is there."""
        while whence == os.SEEK_END and self._final is None:
            size = self._trail.size
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
            fetching = self._share.fetching if self._share is not None else None
            if fetching is not None and self._trail.begun and not self._own(fetching):
                self._by_others()
            self._told()
            self._trail.close()
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
        begun = time.monotonic()
        fetching.wait(seen, _OWN_POLL if self._own(fetching) else _POLL)
        self._waited += time.monotonic() - begun

    def _joined(self) -> Fetching:
        if self._share is None or not self._share.alive:  # after a fork: that is in the parent
            self._share = self._host.join(self._shard)
        assert self._share.fetching is not None
        return self._share.fetching

    def _look(self, fetching: Fetching) -> bool:
        """Whether there is more than there was."""
        done = fetching.done  # asked once: if it fails in between, that is to be seen next time
        if done:
            if fetching.error is not None:
                raise fetching.error
            opened = None
            if fetching.obtained is not None:
                if self._outcome == "fetched":  # for us; but perhaps another process did it
                    self._outcome = str(fetching.obtained.outcome)
                opened = self._host.reopen(self._shard, fetching.obtained.opened)
        elif self._trail.sealed and not self._own(fetching):
            self._by_others()
            opened = self._host.hit(self._shard)
        else:
            opened = None
        if opened is not None:
            self._settle(opened)
            return True
        if done:  # it was begun by somebody who did not wait
            self._leave()
            self._losses += 1
            if self._losses > _LOSSES:
                raise OSError(errno.EBUSY, "what was fetched vanishes again and again")
            return False
        path = fetching.status.partial
        if path is not None:
            self._trail.follow(path)
        return self._trail.grown(self._position)

    def _own(self, fetching: Fetching) -> bool:
        """Whether this process fetches it, and so says whatever happens."""
        return self._trail.begun and fetching.status.written > 0

    def _settle(self, opened: Opened) -> None:
        """Read on from the entry."""
        file = opened.file
        try:
            self._trail.prove_entry(file, Entry.at(Path(opened.directory)).version)
            file.seek(self._position)
            self._told(opened.size)
        except Exception:
            opened.close()
            raise
        self._final = file
        self._path = self.name = opened.path
        self._trail.close()
        self._leave()

    def _turn_away(self, exn: ShardCacheError | OSError) -> None:
        """Past the cache where that is what failed; else it is the end."""
        pin = self._trail.info if self._trail.given else None
        self._outcome = None  # who gives the rest notes it
        fetching = self._share.fetching if self._share is not None else None
        status = FetchStatus() if fetching is None else fetching.status
        try:
            self._final = self._host.past(self._shard, exn, self._position, pin, status)
        except Exception as raised:
            self._error = raised
            raise
        self._trail.close()
        self._leave()

    def _by_others(self) -> None:
        """Note that another process fetches the shard."""
        if self._outcome == "fetched":
            self._outcome = "coalesced"

    def _told(self, size: int | None = None) -> None:
        """Tell what the open came to, once; in a child nothing, since its parent tells."""
        outcome, self._outcome = self._outcome, None
        if outcome is not None and self._pid == os.getpid():
            size = self._trail.size if size is None else size
            self._host.followed(self._shard, outcome, size or 0, self._waited)

    def _leave(self, *, abandon: bool = False) -> None:
        share, self._share = self._share, None
        if share is not None:
            share.leave(abandon=abandon)


class Trail:
    """See the module.

    Args:
        shard: which.

    Attributes:
        given: the end of what was read; kept by the stream.
        limit: the end of what may be read.
        info: the version that was read, or None.
    """

    def __init__(self, shard: ShardURL) -> None:
        self.given = 0
        self.limit = 0
        self.info: ObjectInfo | None = None
        self._shard = shard
        self._source: Growing | None = None
        self._before: io.FileIO | None = None  # read until now; the new source is unproven
        self._useless: Path | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a partial."""
        return self._source is not None

    @property
    def sealed(self) -> bool:
        """Whether the partial is being published, or was removed."""
        return self._source is not None and self._source.sealed

    @property
    def size(self) -> int | None:
        """Bytes of the shard, if known."""
        return None if self._source is None else self._source.info.size

    def follow(self, path: Path) -> None:
        """From now on the shard grows there.

        Raises:
            TransferError: it is another version than what was given.
            OSError: the disk fails.
        """
        if path == self._useless or (self._source is not None and path == self._source.path):
            return
        try:
            source = Growing(path, self._shard.basename)
        except (DamagedError, FileNotFoundError) as exn:
            logger.debug("%s: %s cannot be followed: %s", self._shard, path.name, exn)
            if isinstance(exn, DamagedError):
                self._useless = path
            return
        if self.given and self.info is not None and source.info.version != self.info.version:
            source.close()
            raise self._replaced()
        old, self._source = self._source, source
        self.limit = 0
        if old is None:
            return
        old.close(data=False)
        given_from = self._before or old.data
        if self._before is not None:
            old.data.close()  # it was never proven
        if self.given and not is_same(given_from, source.data):
            self._before = given_from
        else:  # taken over under another name
            given_from.close()
            self._before = None

    def grown(self, position: int) -> bool:
        """Whether there is more to read at ``position`` than there was.

        Raises:
            IntegrityError: what was given is not what is there now, or it is no archive.
            OSError: the disk fails.
        """
        if self._source is None:
            return False
        try:
            limit = self._source.limit()
        except DamagedError:  # being begun
            return False
        if self._before is not None:
            if limit < self.given:
                return False
            self._prove(self._source.data)
        if self.limit == 0 and limit > 0:
            check_archive(self._source.data.fileno(), self._shard.basename, str(self._shard))
        grown = limit > max(self.limit, position)
        self.limit = limit
        if grown and self.info is None:
            self.info = self._source.info
        return grown

    def read(self, view: memoryview, position: int) -> int:
        """Read what is there, a byte at least.

        Raises:
            OSError: the disk fails.
        """
        assert self._source is not None
        count = os.preadv(self._source.data.fileno(), [view], position)
        if count == 0:
            raise OSError(errno.EIO, f"the partial ends at byte {position}")
        return count

    def prove_entry(self, file: io.FileIO, version: str) -> None:
        """Make sure that reading can go on in an entry.

        Args:
            file: its data.
            version: of the entry.

        Raises:
            TransferError: it is another version than what was given.
            IntegrityError: it has other bytes than what was given.
            OSError: the disk fails.
        """
        if not self.given:
            return
        assert self.info is not None and self._source is not None
        if version != self.info.version:
            raise self._replaced()
        before = self._before or self._source.data
        if not is_same(before, file):
            self._before = before
            self._prove(file)

    def _prove(self, file: io.FileIO) -> None:
        """Compare what was given with what another file of the version has in its place."""
        assert self._before is not None
        if not same_bytes(self._before, file, self.given):
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

    def close(self) -> None:
        """Let go of the files."""
        source, self._source = self._source, None
        before, self._before = self._before, None
        self.limit = 0
        if source is not None:
            source.close()
        if before is not None:
            before.close()
