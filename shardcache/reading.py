"""Opening a shard: from the cache where that can be, past it where not.

    look for the entry --- the disk was not readable lately -----> past the cache
      | miss
    is the root what it was? --- no: begin anew there
      |
    wait, link or fetch --- the disk was not writable lately ----> past the cache
      | it fails ------------------------------------------------> past the cache
    an `entrystream.EntryStream`; or, with ``fill="follow"``, which does all but the first
    step in the background, a `following.FollowStream`

With ``strict``, and where a path is asked for, there is no way past: faults are raised.
Safe between threads and across forks.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, TypeGuard

from shardcache.breaker import Breaker, fault_kind
from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.healing import Healer
from shardcache.locks import is_file
from shardcache.metadata import DamagedError
from shardcache.process import Process
from shardcache.store import Opened, Store
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.bypass import OriginStream
    from shardcache.coordination import Obtained
    from shardcache.fetching import Run, Share
    from shardcache.origin import ObjectInfo
    from shardcache.transfer import FetchStatus

__all__ = ["Opener"]

logger = logging.getLogger(__name__)

#: WebDataset reads 10 KiB at a time; with the default buffer each is a system call.
_BUFFER = 1 << 18
#: Seconds between looks at an entry that somebody stopped while evicting.
_STUCK_POLL = 0.25
#: A socket, and what is open for a moment beside it: a name server, a file of certificates,
#: the machine's own configuration.
_CONNECTION_FILES = 4
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class _PausedError(OSError):
    """The disk failed lately and is left alone."""


class Opener:
    """Opens the shards of one cache.

    Args:
        config: options.
        here: the parts of the process that asks.
        clock: time.
    """

    def __init__(self, config: Config, here: Callable[[], Process], clock: Clock) -> None:
        self._config = config
        self._here = here
        self._clock = clock
        self._healer = Healer(config, here, clock)
        self._gated = not config.strict  # whether a disk that failed is left alone

    def open(
        self, shard: ShardURL, *, finish: bool = True, ahead: Share | None = None
    ) -> tuple[BinaryIO, str | None]:
        """A stream of the shard, and its local path or None while it has none.

        Args:
            shard: which.
            finish: whether a fetch goes on to its end when the stream is closed before.
            ahead: what was begun before anybody asked for the shard.

        Raises:
            As `Cache.open`.
        """
        process = self._here()
        share = None
        try:
            opened = self._hit(process, shard)
            if opened is None:
                share = self._begin(process, shard, finish, ahead)
                if share is None:
                    obtained = self._get(process, shard, None, self._gated)
                    assert obtained is not None  # it waits for others
                    opened = self._used(process, shard, obtained)
        except (ShardCacheError, OSError) as exn:
            return io.BufferedReader(self.past(shard, exn, 0, None), _BUFFER), None
        if opened is None:
            assert share is not None
            return self._follow(shard, share)
        return io.BufferedReader(opened.file, _BUFFER), opened.path

    def _begin(
        self, process: Process, shard: ShardURL, finish: bool, ahead: Share | None
    ) -> Share | None:
        """The fetch to follow or to wait for; None where the calling thread is to do it."""
        if ahead is not None and ahead.fetching is not None and _is_final(ahead.fetching.error):
            raise ahead.fetching.error  # asking again would cost another request
        if self._config.fill == "complete" and ahead is None:
            return None
        try:
            return process.fetchings.join(shard, self._run(process, shard), finish=finish)
        except RuntimeError as exn:  # a limit of processes
            logger.info("%s: fetched without a thread of its own: %s", shard, exn)
            return None

    def _follow(self, shard: ShardURL, share: Share) -> tuple[BinaryIO, str | None]:
        from shardcache.following import FollowStream  # here: it brings the engine along

        stream = FollowStream(shard, self, share)
        begun = False
        try:
            stream.start(whole=self._config.fill == "complete")
            begun = True
        finally:
            if not begun:
                stream.abandon()
        return io.BufferedReader(stream, _BUFFER), stream.path

    def _run(self, process: Process, shard: ShardURL, *, ahead: bool = False) -> Run:
        """What a background fetch does."""

        def run(status: FetchStatus, patient: Callable[[], bool]) -> Obtained | None:
            if not ahead:
                return self._get(process, shard, status, self._gated, patient)
            process.fetchings.give_way(status, self._clock)
            with process.coordinator().ahead_slot() as free:
                if not free and not patient():
                    return None
                return self._get(process, shard, status, self._gated, patient)

        return run

    def ahead(self, shard: ShardURL) -> Opened | Share | None:
        """Begin to fetch a shard that will be asked for, unless it is there: then pin it.

        Raises:
            ConfigError: the directory must not be used.
        """
        try:
            opened = self.hit(shard)
            if opened is not None:
                return opened
            process = self._here()
            run = self._run(process, shard, ahead=True)
            return process.fetchings.join(shard, run, ahead=True)
        except (OSError, RuntimeError) as exn:  # whoever asks for it is told
            logger.debug("%s: not fetched ahead: %s", shard, exn)
            return None

    # -- for `following.FollowStream` --------------------------------------------

    def join(self, shard: ShardURL) -> Share:
        """See `following.Host.join`."""
        process = self._here()
        process.coordinator()  # of a child that has just been forked
        return process.fetchings.join(shard, self._run(process, shard))

    def hit(self, shard: ShardURL) -> Opened | None:
        """See `following.Host.hit`."""
        return self._hit(self._here(), shard)

    def _hit(self, process: Process, shard: ShardURL) -> Opened | None:
        """A hit: the path that is taken a million times, and is not to call many others."""
        coordinator = process.ready
        if coordinator is None or not process.reading.closed:
            opened = self._find(process, shard, self._gated)
        else:
            try:
                opened = coordinator.store.open(shard.key, shard.basename)
            except (DamagedError, OSError):
                opened = self._find(process, shard, self._gated)  # sees it too, and deals with it
        if opened is not None:
            try:
                process.touch(opened)
                logger.debug("%s: hit", shard)
            except BaseException:  # an interrupt: a pin that nobody holds would stay
                opened.close()
                raise
            opened.file.guard(self._healer, shard, opened.path, opened.size, process.reading)
        return opened

    def reopen(self, shard: ShardURL, opened: Opened) -> Opened | None:
        """See `following.Host.reopen`."""
        process = self._here()
        store = process.namespaces.own.owning(Store.entry_at(opened))
        again = store.open_again(opened.path)
        if again is not None:
            self._guard(process, shard, again)
        return again

    def past(
        self, shard: ShardURL, fault: Exception, start: int, pin: ObjectInfo | None
    ) -> OriginStream:
        """See `following.Host.past`."""
        cause = None
        process = self._here()
        if self._config.strict:
            raise fault
        if isinstance(fault, (CacheFullError, LockTimeoutError)):
            kind = type(fault).__name__
            process.warn(kind, "%s is streamed, not cached: %s", shard, fault.message)
        elif isinstance(fault, OSError) and not isinstance(fault, ShardCacheError):
            self._say(process, shard, fault)
            cause = fault
        else:
            raise fault
        try:
            return self._healer.stream(shard, start=start, pin=pin)
        except ShardNotFoundError:
            raise
        except (ShardCacheError, OSError) as exn:
            if cause is not None and cause.errno in _TOO_MANY_FILES and not _can_open():
                raise _exhausted(shard, cause) from exn
            raise

    # -- for those who need a path -----------------------------------------------

    def obtain(self, shard: ShardURL, status: FetchStatus | None = None) -> Obtained:
        """The shard's entry, open and pinned, fetched if need be.

        Raises:
            As `Cache.open` with ``strict``.
        """
        return self._obtain(self._here(), shard, status, gated=False)

    def pin(self, shard: ShardURL) -> Opened:
        """An entry that is under its path and cannot leave it; raises as `obtain`."""
        end = self._clock.monotonic() + self._config.lock_timeout
        while True:
            opened = self.obtain(shard).opened
            there = False
            try:
                there = not opened.stuck and is_file(opened.path, opened.fd)
                if there:
                    return opened
            finally:
                if not there:  # renamed away by an evictor that died; look again
                    opened.close()
            if opened.stuck:
                if self._clock.monotonic() >= end:
                    raise LockTimeoutError(
                        f"{shard} is being evicted by a process that does not go on. Look for "
                        "one that is stopped, or read the shard with open().",
                        url=str(shard),
                    )
                self._clock.sleep(_STUCK_POLL)

    def _obtain(
        self, process: Process, shard: ShardURL, status: FetchStatus | None, *, gated: bool
    ) -> Obtained:
        from shardcache.coordination import Obtained, Outcome

        opened = self._find(process, shard, gated)
        if opened is not None:
            obtained: Obtained | None = Obtained(opened, Outcome.HIT)
        else:
            obtained = self._get(process, shard, status, gated)
        assert obtained is not None  # it waits for others
        self._note(process, shard, obtained)
        return obtained

    def _note(self, process: Process, shard: ShardURL, obtained: Obtained) -> None:
        try:
            process.touch(obtained.opened)
            logger.debug("%s: %s", shard, obtained.outcome)
        except BaseException:  # an interrupt: a pin that nobody holds would stay
            obtained.opened.close()
            raise

    def _used(self, process: Process, shard: ShardURL, obtained: Obtained) -> Opened:
        self._note(process, shard, obtained)
        self._guard(process, shard, obtained.opened)
        return obtained.opened

    def _guard(self, process: Process, shard: ShardURL, opened: Opened) -> None:
        opened.file.guard(self._healer, shard, opened.path, opened.size, process.reading)

    def _find(self, process: Process, shard: ShardURL, gated: bool) -> Opened | None:
        coordinator = process.coordinator()
        try:
            if not process.reading.closed:
                _gate(process.reading, gated)
                process.check_root()  # nothing is read that may be somebody else's by now
                coordinator = process.coordinator()
            return coordinator.look(shard)
        except OSError as exn:
            if not isinstance(exn, _PausedError):
                process.disk_failed(process.reading, exn)
            raise

    def _get(
        self,
        process: Process,
        shard: ShardURL,
        status: FetchStatus | None,
        gated: bool,
        patient: Callable[[], bool] = lambda: True,
    ) -> Obtained | None:
        process.reading.undecided()  # there was nothing to read
        _gate(process.writing, gated)
        for last in (False, True):
            try:
                process.check_root()
                obtained = process.coordinator().get(shard, status, patient)
            except ShardCacheError:
                process.writing.undecided()
                raise
            except OSError as exn:
                if not last and _changed(process):
                    continue  # the disk went away in the midst of it
                process.disk_failed(process.writing, exn)
                raise
            else:
                break
        if obtained is not None and obtained.outcome == "fetched":
            process.disk_works(process.writing)
        else:
            process.writing.undecided()
        return obtained

    def _say(self, process: Process, shard: ShardURL, exn: OSError) -> None:
        reason = str(exn.strerror or exn)
        if str(self._config.dir) not in reason:
            reason = f"{self._config.dir}: {reason}"
        if isinstance(exn, _PausedError):
            logger.info("%s is streamed, not cached: %s", shard, reason)
        else:
            process.warn(fault_kind(exn), "%s is streamed, not cached: %s", shard, reason)


def _is_final(error: BaseException | None) -> TypeGuard[ShardCacheError]:
    """Whether the origin, and not the cache, said no."""
    passing = (CacheFullError, LockTimeoutError, FetchCancelledError)
    return isinstance(error, ShardCacheError) and not isinstance(error, passing)


def _gate(breaker: Breaker, gated: bool) -> None:
    """Go on, unless the disk is to be left alone and there is a way past it."""
    if gated and not breaker.allows():
        raise _PausedError(errno.EIO, f"the disk failed; tried again in {breaker.left:.0f} s")


def _changed(process: Process) -> bool:
    try:
        return process.root_changed()
    except OSError:
        return False


def _can_open() -> bool:
    """Whether there are as many descriptors left as a connection may take."""
    fds = []
    try:
        for _ in range(_CONNECTION_FILES):
            fds.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exn:
        return exn.errno not in _TOO_MANY_FILES
    finally:
        for fd in fds:
            os.close(fd)
    return True


def _exhausted(shard: ShardURL, cause: OSError) -> TransferError:
    """Neither the cache nor the origin can be opened, for a reason that is our own."""
    whose = "this process has" if cause.errno == errno.EMFILE else "the machine has"
    return TransferError(
        f"{shard} cannot be opened: {whose} too many open files. Close streams that were read "
        "to their end, or raise the limit (ulimit -n).",
        url=str(shard),
        errno=cause.errno,
    )
