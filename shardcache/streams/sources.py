"""The sources of a `stream.ShardStream`, beside the file of an entry (`store.entry.Opened`).

Each source gives the bytes of one version. Its ``readinto(buffer, position)`` returns a count, 0 at
the end of the shard, or None while there are no bytes yet. An error ends a source, and
`opener.Opener.next_source` chooses the next one.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from shardcache import clock
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    TransferError,
)
from shardcache.origins.base import (
    Body,
    ObjectInfo,
    Origin,
    TransientError,
    VersionChangedError,
    skip,
)
from shardcache.store.digest import BLOCK, check_archive
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Opened
from shardcache.store.partial import PartialSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import WriteableBuffer

    from shardcache.fetch.background import Fetching
    from shardcache.origins.resolve import UpstreamOrigin
    from shardcache.runtime import Process
    from shardcache.streams.opener import Opener
    from shardcache.urls import ShardURL

    Source: TypeAlias = "Opened | FetchSource | OriginSource"

__all__ = ["FetchSource", "OriginSource"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between two looks at another process's partial: about the time of a block from S3.
_POLL = 0.005
#: Likewise where the fetch is our own, which says when there is more.
_OWN_POLL = 0.25


class FetchSource:
    """A shard while it is fetched, by this process or another one.

    The last block is withheld until there is an entry: until digest and checksums were compared.
    So a shard that turns out bad ends in an error. Nobody is relied on to say that it died:
    the fetch in the background has the lock as soon as it is free.

    Args:
        opener: runs the fetch and finds the entry.
        shard: which.
        finish: whether the fetch goes on to its end when this is closed before.
        ahead: nobody reads the shard yet; `begin` says when somebody does.

    Raises:
        OSError: the disk or the process is at a limit.
    """

    path = None

    def __init__(
        self, opener: Opener, shard: ShardURL, *, finish: bool = False, ahead: bool = False
    ) -> None:
        self.counted = ahead  # what the open came to: to be counted once
        self._opener = opener
        self._shard = shard
        self._finish = finish
        self._waited = 0.0
        self._seen: Path | None = None  # the partial that was looked at last
        self._partial: PartialSource | None = None
        self._given = 0  # the end of what was read
        self._limit = 0  # the end of what may be
        # A forked child goes on with a copy of these, which is not written.
        self._counters = opener.here().counters
        self._fetching: Fetching | None
        self._fetching, self._began = opener.join(shard, finish=finish, ahead=ahead)

    def begin(self) -> bool:
        """Begin to read the shard that was fetched ahead; False if it has to be opened anew.

        That is so if another process was fetching the shard, or if the cache failed. An error of
        the origin is kept, because another fetch would repeat the request.
        """
        fetching = self._fetching
        assert fetching is not None
        going = not (fetching.alive and fetching.done)  # a forked child joins another one
        if going or fetching.obtained is not None or _is_final(fetching):
            self.counted = False
            return True
        self._leave()
        return False

    @property
    def info(self) -> ObjectInfo | None:
        """The version, once there is a partial."""
        return None if self._partial is None else self._partial.info

    @property
    def size(self) -> int | None:
        """Bytes of the shard, once known."""
        return None if self._partial is None else self._partial.info.size

    def take_answer(self) -> Body | None:
        """The origin's answer for a shard that could not be stored; the caller closes it.

        None in a forked child, because the answer is read over the parent's connection.
        """
        fetching = self._fetching
        return None if fetching is None or not fetching.alive else fetching.status.take_answer()

    def wait(self, *, whole: bool) -> bool:
        """Wait until there is a partial, or with ``whole`` the end; whether the fetch ended."""
        fetching = self._joined()
        status = fetching.status
        self._wait(fetching, lambda: fetching.done or not (whole or status.partial is None))
        return fetching.done

    def _wait(
        self, fetching: Fetching, over: Callable[[], bool], seconds: float | None = None
    ) -> None:
        begun = clock.monotonic()
        fetching.wait(over, seconds)
        self._waited += clock.monotonic() - begun

    def readinto(self, buffer: WriteableBuffer, position: int) -> int | None:
        """Read what is behind the watermark; None if nothing is: then `advance`."""
        view = memoryview(buffer).cast("B")[: max(0, self._limit - position)]
        if not view or self._partial is None:
            return None if memoryview(buffer).nbytes else 0
        count = os.preadv(self._partial.data.fileno(), (view,), position)
        if count == 0:
            raise OSError(errno.EIO, f"the partial ends at byte {position}")
        self._given = max(self._given, position + count)
        return count

    def advance(self, position: int) -> Opened | None:
        """Wait until there is more than at ``position``, for a moment; the entry, once it is there.

        Raises:
            TransferError: it is another version than what was given.
            IntegrityError: what was given is damaged, or it is no archive.
            Whatever the fetch raised.
        """
        fetching = self._joined()
        seen, done = fetching.changes, fetching.done  # now: what comes later is seen next time
        own = fetching.status.own
        opened, outcome = None, "coalesced"
        if done:
            if fetching.error is not None:
                raise fetching.error
            if fetching.obtained is None:  # whoever began it did not wait: join another one
                self._leave()
                return None
            outcome = fetching.obtained.outcome
            opened = fetching.obtained.opened.duplicate()
        elif self._partial is not None and self._partial.sealed and not own:
            opened = self._opener.find(self._shard)
        if opened is not None:
            self._check(opened)
            self._count(outcome)
        elif not self._grown(fetching.status.partial, position):
            # Another process says nothing when there is more.
            seconds = _OWN_POLL if own and self._partial is not None else _POLL
            self._wait(fetching, lambda: fetching.changes != seen, seconds)
        return opened

    def _joined(self) -> Fetching:
        """Its fetch; another one after a fork, for that is in the parent, and where it has none."""
        if self._fetching is None or not self._fetching.alive:
            self._fetching, began = self._opener.join(self._shard, finish=self._finish)
            self._began |= began
        return self._fetching

    def _grown(self, path: Path | None, position: int) -> bool:
        """Whether there is more to read at ``position`` than there was."""
        # Where something was given of one that is no longer, the rest is read of the entry.
        if path not in (None, self._seen) and not self._given:
            self._open(path)
        if self._partial is None:
            return False
        try:
            limit = self._partial.limit()
        except DamagedError:  # it is being begun
            return False
        if self._limit == 0 and limit > 0:
            check_archive(self._partial.data.fileno(), self._shard.basename, str(self._shard))
        grown = limit > max(self._limit, position)
        self._limit = limit
        return grown

    def _open(self, path: Path) -> None:
        try:
            found = PartialSource(path, self._shard.basename)
        except FileNotFoundError:
            return  # it is being begun, or published
        except DamagedError as exn:
            logger.debug("%s: %s cannot be followed: %s", self._shard, path.name, exn)
        else:
            if self._partial is not None:
                self._partial.close()
            self._partial, self._limit = found, 0
        self._seen = path

    def _check(self, opened: Opened) -> None:
        """See that what was given goes on in the entry; close it where it does not.

        A partial that was taken over or published is still the same file. Another one is there
        because the first was lost, or because it was damaged, which is seen only in the end.
        """
        if not self._given or self._partial is None:
            return
        old, new = self._partial.data.fileno(), opened.file.fileno()
        if os.path.sameopenfile(old, new):
            return
        try:
            if opened.entry.version != self._partial.info.version:
                raise TransferError(
                    f"{self._shard} was replaced while it was read; the bytes read so far are of "
                    "the old version. Read the shard again.",
                    url=str(self._shard),
                )
            for start in range(0, self._given, BLOCK):
                length = min(BLOCK, self._given - start)
                if os.pread(old, length, start) != os.pread(new, length, start):
                    raise IntegrityError(
                        f"{self._shard}: bytes that were read of it turned out damaged on their "
                        "way; it was fetched again. Read it again.",
                        url=str(self._shard),
                    )
        except Exception:
            opened.close()
            raise

    def _count(self, outcome: str) -> None:
        """Count what the open came to, once: it is this reader's fetch only if it began it."""
        if not self.counted:
            self.counted = True
            self._counters.opened(outcome if self._began else "coalesced", self._waited)

    def _leave(self) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None and fetching.alive:
            fetching.leave()

    def close(self) -> None:
        """Leave the fetch, and close the partial."""
        fetching, outcome = self._fetching, "coalesced"
        if fetching is not None and fetching.obtained is not None:
            outcome = fetching.obtained.outcome
        elif fetching is not None and fetching.status.own:
            outcome = "fetched"
        self._count(outcome)
        if self._partial is not None:
            self._partial.close()
        self._leave()


def _is_final(fetching: Fetching) -> bool:
    """Whether a fetch has kept the origin's answer, or ended in what only the origin can mend."""
    passing = isinstance(fetching.error, (CacheFullError, LockTimeoutError, FetchCancelledError))
    return bool(fetching.status.answers) or (
        isinstance(fetching.error, ShardCacheError) and not passing
    )


class OriginSource:
    """One version of a shard as its origin sends it, past the cache.

    It retries as a fetch does, so an error means that the origin is really gone. A forked child
    goes on at the same byte, of the same version, over a connection of its own.

    Args:
        here: returns the calling process's `Process`, with its connections and counters.
        shard: the shard to read.
        nearer: a copy in an upstream that is read instead, and trusted as an entry is.
        start: offset of the first byte.
        pin: the version to insist on; ``version`` is its name, if no more of it is known.
        answer: an answer of the origin that begins with the first byte.
        size: bytes of the shard, if they are known; the origin may not state them.

    Raises:
        As `origins.base.Origin.open`, and TransferError after all retries, or if the object is no
        longer the version asked for.
    """

    path = None

    def __init__(
        self,
        here: Callable[[], Process],
        shard: ShardURL,
        *,
        nearer: UpstreamOrigin | None = None,
        start: int = 0,
        pin: ObjectInfo | None = None,
        version: str | None = None,
        answer: Body | None = None,
        size: int | None = None,
    ) -> None:
        self.info = pin
        self.size = size
        self._shard = shard
        self._here = here
        self._enter_process()
        self._read_from(nearer)
        self._position = start
        self._version = pin.version if pin is not None else version
        self._body = answer
        if answer is None:
            self._body = self._call(self._open)
        else:
            self.info, self.size = answer.info, answer.info.size
        self._read_at = clock.monotonic()

    def _enter_process(self) -> None:
        """Use the clients and the counters of the calling process."""
        self._pid = os.getpid()
        self._process = self._here()
        self._process.coordinator()  # makes them
        self._attempts = self._process.fetcher.policy.started(str(self._shard))

    def _read_from(self, nearer: UpstreamOrigin | None) -> None:
        self.nearer = nearer
        self._origin: Origin = nearer or self._process.origins.of(self._shard)
        self._counter = "bytes_origin" if nearer is None else "bytes_upstream"

    def _leave_parent(self) -> None:
        """Go on in a forked child.

        The answer is not closed: that would end a connection or a command of the parent.
        """
        self._body = None
        if self.info is not None and self.info.identifiable:
            self._version = self.info.version
        elif self._position:
            raise TransferError(
                f"{self._shard} can only be read on by the process that opened it, because its "
                "origin names no version. Open it in the forked process.",
                url=str(self._shard),
            )
        self._enter_process()
        name = None if self.nearer is None else self.nearer.name
        copies = () if name is None else self._process.origins.upstreams(self._shard)
        self._read_from(next((copy for copy in copies if copy.name == name), None))

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return self._attempts.call(function, sleep=clock.sleep)
        except VersionChangedError as exn:
            raise TransferError(
                f"{self._shard} was replaced while it was streamed; the bytes read so far are of "
                f"the old version ({self._version}). Read the shard again.",
                url=str(self._shard),
                version=self._version,
            ) from exn

    def readinto(self, buffer: WriteableBuffer, position: int) -> int:
        """Read bytes from ``position`` on; 0 at the end. Elsewhere it sends a new request."""
        if self._pid != os.getpid():
            self._leave_parent()
        view = memoryview(buffer).cast("B")
        if position != self._position:
            self.close()
            self._position = position
        if not view or self._ended():
            return 0
        # The deadline does not run while the reader does something else.
        self._attempts.extend(clock.monotonic() - self._read_at)
        count = self._call(lambda: self._attempt(view))
        if not self._origin.pins and (count == 0 or self._position + count == self.size):
            self._call(self._compare)  # before the last bytes are believed
        self._position += count
        if count == 0:
            self.size = self._position
        if self._version is None:
            assert self.info is not None
            self._version = self.info.version
        self._process.counters.read(count, self._counter)
        self._ended()
        self._read_at = clock.monotonic()
        return count

    def _ended(self) -> bool:
        """Whether all was read; then the connection is given back, however late `close` comes."""
        ended = self.size is not None and self._position >= self.size
        if ended:
            self.close()
        return ended

    def _attempt(self, view: memoryview) -> int:
        try:
            if self._body is not None and self._position == self._body.stop:
                self.close()  # it was a part
            if self._body is None:
                self._body = self._open()
            count = self._body.readinto(view)
            if count == 0 and self.size is not None:
                raise TransientError("the origin ended early")
            self._attempts.check()
        except TransientError:
            self.close()
            raise
        return count

    def _open(self) -> Body:
        """An answer from the position on: of the version that is read, once that is fixed."""
        if self._version is None:
            self.info = None
        elif self.info is not None and not self._origin.pins:
            self._compare()
        pin = self.info if self.info is not None and self.info.size is not None else None
        body = self._origin.open(self._shard, self._position, None, pin)
        try:
            # Two answers that cannot be told apart may be of two versions.
            fixed, told = self._version, body.info
            if fixed is not None and (fixed != told.version or not told.identifiable):
                raise VersionChangedError(str(self._shard))
            if passed := skip(body, self._position):
                self._process.counters.read(passed, self._counter)
        except Exception:
            body.close()
            raise
        self.info = self.info or body.info
        self.size = self.size if self.info.size is None else self.info.size
        return body

    def _compare(self) -> None:
        assert self.info is not None
        if self._origin.stat(self._shard).version != self.info.version:
            raise VersionChangedError(str(self._shard))

    def close(self) -> None:
        """Give the connection back."""
        body, self._body = self._body, None
        if body is not None and self._pid == os.getpid():
            body.close()
