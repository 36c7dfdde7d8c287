"""Opening a shard: from the cache where that can be, past it where not.

    look for the entry --- the disk was not readable lately -----> past the cache
      | miss
    is the root what it was? --- no: begin anew there
      |
    wait, link or fetch --- the disk was not writable lately ----> past the cache
      | it fails ------------------------------------------------> past the cache
    an `EntryStream`; or, with ``fill="follow"``, which does all but the first
    step in the background, a `stream.FollowStream`

With ``strict`` there is no way past: faults are raised, as they are where a path is asked for
(`Opener.obtain`). Safe between threads and across forks.
"""

from __future__ import annotations

import errno
import io
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeGuard

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import (
    CacheFullError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.fetch.blocks import FetchStatus
from shardcache.files import Breaker, fault_kind
from shardcache.locks.flock import is_file
from shardcache.origins.base import Body, ObjectInfo
from shardcache.runtime import Process
from shardcache.store.entry import DamagedError, Entry
from shardcache.store.store import Opened, Store
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.background import Run, Share
    from shardcache.fetch.coordinator import Obtained
    from shardcache.streams.sources import OriginStream

__all__ = [
    "TOO_MANY_FILES",
    "Healer",
    "Opener",
    "PausedError",
    "can_open",
    "exhausted",
    "gate",
    "is_final",
    "kind_of",
]

logger = logging.getLogger(__name__)


#: WebDataset reads 10 KiB at a time; with the default buffer each is a system call.
_BUFFER = 1 << 18


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
        status = None
        begun = self._clock.monotonic()
        began = ahead is not None and ahead.began
        try:
            opened = self._hit(process, shard)
            if opened is None:
                status = FetchStatus()
                share = self._begin(process, shard, finish, ahead, status)
                if share is None:
                    obtained = self._get(process, shard, status, self._gated)
                    assert obtained is not None  # it waits for others
                    opened = self._used(process, shard, obtained, begun)
            else:
                self._count_found(process, opened, begun, began=began)
        except (ShardCacheError, OSError) as exn:
            past = self.past(shard, exn, 0, None, status or FetchStatus())
            return io.BufferedReader(past, _BUFFER), None
        if opened is None:
            assert share is not None
            waited = self._clock.monotonic() - begun
            return self._follow(shard, share, began=began or share.began, waited=waited)
        return io.BufferedReader(opened.file, _BUFFER), opened.path

    def _count_found(self, process: Process, opened: Opened, begun: float, *, began: bool) -> None:
        if began:  # it would not be there if it had not been fetched for this reader
            self._count(process, "fetched", opened.size, begun)
        else:
            process.count_hit(opened, begun)

    def _begin(
        self,
        process: Process,
        shard: ShardURL,
        finish: bool,
        ahead: Share | None,
        status: FetchStatus,
    ) -> Share | None:
        """The fetch to follow or to wait for; None where the calling thread is to do it."""
        before = None if ahead is None else ahead.fetching
        if before is not None and before.error is not None:
            if (answer := before.status.take_answer()) is not None:
                status.offer(answer)
            if answer is not None or is_final(before.error):
                raise before.error  # asking again would cost another request
        if self._config.fill == "complete" and ahead is None:
            return None
        try:
            return process.fetchings.join(shard, self._run(process, shard), finish=finish)
        except RuntimeError as exn:  # a limit of processes
            logger.info("%s: fetched without a thread of its own: %s", shard, exn)
            return None

    def _follow(
        self, shard: ShardURL, share: Share, *, began: bool, waited: float
    ) -> tuple[BinaryIO, str | None]:
        from shardcache.streams.stream import FollowStream  # here: it brings the engine along

        stream = FollowStream(shard, self, share, began=began, waited=waited)
        try:
            stream.start(whole=self._config.fill == "complete")
        except Exception:
            stream.abandon()
            raise
        return io.BufferedReader(stream, _BUFFER), stream.path

    def _run(self, process: Process, shard: ShardURL, *, ahead: bool = False) -> Run:
        """What a background fetch does."""

        def run(status: FetchStatus, patient: Callable[[], bool]) -> Obtained | None:
            if not ahead:
                return read(status, patient)
            process.fetchings.give_way(status, self._clock)
            with process.coordinator().ahead_slot() as free:
                if not free and not patient():
                    return None
                return read(status, patient)

        def read(status: FetchStatus, patient: Callable[[], bool]) -> Obtained | None:
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

    # -- for `stream.FollowStream` --------------------------------------------

    def join(self, shard: ShardURL) -> Share:
        """See `stream.Host.join`."""
        process = self._here()
        process.coordinator()  # of a child that has just been forked
        return process.fetchings.join(shard, self._run(process, shard))

    def hit(self, shard: ShardURL) -> Opened | None:
        """See `stream.Host.hit`."""
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
            process.touch(opened)
            if logger.isEnabledFor(logging.DEBUG):  # what it says is not made for nobody
                say = {"event": "hit", "shard": str(shard), "bytes": opened.size}
                logger.debug("%s: hit", shard, extra=say)
            opened.file.guard(self._healer, shard, opened.path, opened.size, process.reading)
        return opened

    def reopen(self, shard: ShardURL, opened: Opened) -> Opened | None:
        """See `stream.Host.reopen`."""
        process = self._here()
        store = process.store_of(Store.entry_at(opened))
        again = store.open_again(opened.path)
        if again is not None:
            self._guard(process, shard, again)
        return again

    def followed(self, shard: ShardURL, outcome: str, size: int, waited: float) -> None:
        """See `stream.Host.followed`."""
        self._here().counters.opened(outcome, size, waited)

    def past(
        self,
        shard: ShardURL,
        fault: Exception,
        start: int,
        pin: ObjectInfo | None,
        status: FetchStatus,
    ) -> OriginStream:
        """See `stream.Host.past`."""
        process = self._here()
        counts = {kind: 1} if (kind := kind_of(fault)) else {}
        try:
            stream = self._past(process, shard, fault, start, pin, status)
        except Exception:
            status.drop_answer()
            process.counters.add({"failed": 1, **counts})
            raise
        process.counters.add({"bypassed": 1, **counts})
        return stream

    def _past(
        self,
        process: Process,
        shard: ShardURL,
        fault: Exception,
        start: int,
        pin: ObjectInfo | None,
        status: FetchStatus,
    ) -> OriginStream:
        cause = None
        if self._config.strict:
            raise fault
        if isinstance(fault, (CacheFullError, LockTimeoutError)):
            kind = type(fault).__name__
            text, say = "%s is streamed, not cached: %s", _streamed(shard, kind)
            process.warn(kind, text, shard, fault.message, extra=say)
        elif isinstance(fault, OSError) and not isinstance(fault, ShardCacheError):
            self._say(process, shard, fault)
            cause = fault
        else:
            raise fault
        try:
            fresh = start == 0 and pin is None
            answer = status.take_answer() if fresh else None
            return self._healer.stream(shard, start=start, pin=pin, answer=answer)
        except ShardNotFoundError:
            raise
        except (ShardCacheError, OSError) as exn:
            if cause is not None and cause.errno in TOO_MANY_FILES and not can_open():
                raise exhausted(shard, cause) from exn
            raise

    def _used(self, process: Process, shard: ShardURL, obtained: Obtained, begun: float) -> Opened:
        self._note(process, shard, obtained, begun)
        self._guard(process, shard, obtained.opened)
        return obtained.opened

    # -- entries ---------------------------------------------------------------

    def obtain(
        self, shard: ShardURL, status: FetchStatus | None = None, *, use: bool = True
    ) -> Obtained:
        """The shard's entry, open and pinned, fetched if need be.

        Args:
            shard: which.
            status: is kept up to date.
            use: whether this job uses it, and has not only seen to it that it is there.

        Raises:
            As `Cache.open` with ``strict``.
        """
        status = FetchStatus() if status is None else status
        try:
            return self._obtain(self._here(), shard, status, gated=False, use=use)
        finally:
            status.drop_answer()

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
        self,
        process: Process,
        shard: ShardURL,
        status: FetchStatus,
        *,
        gated: bool,
        use: bool,
    ) -> Obtained:
        from shardcache.fetch.coordinator import Obtained, Outcome

        begun = self._clock.monotonic()
        opened = self._find(process, shard, gated, status.outdated)
        if opened is not None:
            obtained: Obtained | None = Obtained(opened, Outcome.HIT)
        else:
            obtained = self._get(process, shard, status, gated)
        assert obtained is not None  # it waits for others
        self._note(process, shard, obtained, begun, use=use)
        return obtained

    def _note(
        self,
        process: Process,
        shard: ShardURL,
        obtained: Obtained,
        begun: float,
        *,
        use: bool = True,
    ) -> None:
        process.touch(obtained.opened)
        if use:
            self._count(process, obtained.outcome, obtained.opened.size, begun)
        if logger.isEnabledFor(logging.DEBUG):
            say = {"event": str(obtained.outcome), "shard": str(shard)}
            logger.debug("%s: %s", shard, obtained.outcome, extra=say)

    def _count(self, process: Process, outcome: str, size: int, begun: float) -> None:
        process.counters.opened(outcome, size, self._clock.monotonic() - begun)

    def _find(
        self, process: Process, shard: ShardURL, gated: bool, outdated: Collection[str] = ()
    ) -> Opened | None:
        coordinator = process.coordinator()
        try:
            if not process.reading.closed:
                gate(process.reading, gated)
                process.check_root()  # nothing is read that may be somebody else's by now
                coordinator = process.coordinator()
            return coordinator.look(shard, outdated)
        except OSError as exn:
            if not isinstance(exn, PausedError):
                process.disk_failed(process.reading, exn)
            raise

    def _get(
        self,
        process: Process,
        shard: ShardURL,
        status: FetchStatus,
        gated: bool,
        patient: Callable[[], bool] = lambda: True,
    ) -> Obtained | None:
        obtained = None
        begun = self._clock.monotonic()
        try:
            obtained = self._acquire(process, shard, status, gated, patient)
        finally:
            fetched = obtained is not None and obtained.outcome == "fetched"
            if fetched or status.received:
                seconds = self._clock.monotonic() - begun
                process.counters.fetched(
                    shard,
                    size=status.size or (status.written if fetched else 0),
                    received=status.received,
                    seconds=seconds,
                    retries=status.retries,
                    upstream=status.near,
                    done=fetched,
                )
        return obtained

    def _acquire(
        self,
        process: Process,
        shard: ShardURL,
        status: FetchStatus,
        gated: bool,
        patient: Callable[[], bool],
    ) -> Obtained | None:
        process.reading.undecided()  # there was nothing to read
        process.keep_house()
        gate(process.writing, gated)
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
            process.copier.add(shard, obtained.opened.path)
        else:
            process.writing.undecided()
        return obtained

    def _guard(self, process: Process, shard: ShardURL, opened: Opened) -> None:
        opened.file.guard(self._healer, shard, opened.path, opened.size, process.reading)

    def _say(self, process: Process, shard: ShardURL, exn: OSError) -> None:
        reason = str(exn.strerror or exn)
        if str(self._config.dir) not in reason:
            reason = f"{self._config.dir}: {reason}"
        text, say = "%s is streamed, not cached: %s", _streamed(shard, fault_kind(exn))
        if isinstance(exn, PausedError):
            logger.info(text, shard, reason, extra=say)
        else:
            process.warn(fault_kind(exn), text, shard, reason, extra=say)


def _streamed(shard: ShardURL, reason: str) -> dict[str, object]:
    """What a log record says beside its text; see docs/observing.md."""
    return {"event": "streamed", "shard": str(shard), "reason": reason}


#: Seconds between looks at an entry that somebody stopped while evicting.
_STUCK_POLL = 0.25


class Healer:
    """Keeps the streams of one cache readable (`entrystream.Keeper`).

    Args:
        config: whether faults are raised.
        here: the parts of the process that asks: a stream may have come over a fork.
        clock: time.
    """

    def __init__(self, config: Config, here: Callable[[], Process], clock: Clock) -> None:
        self._config = config
        self._here = here
        self._clock = clock

    def open_again(self, shard: ShardURL, path: str) -> io.FileIO | None:
        """See `entrystream.Keeper.open_again`."""
        opened = self._store(Path(path)).open_again(path)
        return None if opened is None else opened.file

    def give_up(
        self, shard: ShardURL, path: str, fd: int, fault: OSError, position: int
    ) -> tuple[str, ObjectInfo | None]:
        """See `entrystream.Keeper.give_up`."""
        process = self._here()
        entry = Entry.at(Path(path).parent)
        pin = _version_of(entry)
        process.disk_failed(process.reading, fault)
        self._set_aside(shard, entry, path, fd, f"{shard}: {fault.strerror}")
        if self._config.strict:
            raise fault
        process.warn(
            fault_kind(fault),
            "%s cannot be read at byte %d of %s (%s); the rest is streamed",
            shard,
            position,
            path,
            fault.strerror,
        )
        return entry.version, pin

    def rest(
        self, shard: ShardURL, start: int, pin: ObjectInfo | None, version: str | None
    ) -> OriginStream:
        """See `entrystream.Keeper.rest`."""
        return self.stream(shard, start=start, pin=pin, version=version)

    def stream(
        self,
        shard: ShardURL,
        *,
        start: int = 0,
        pin: ObjectInfo | None = None,
        version: str | None = None,
        answer: Body | None = None,
    ) -> OriginStream:
        """A shard from its origin; raises as `sources.OriginStream`.

        From its first byte, and where any version will do, from a nearer copy if there is one.
        """
        from shardcache.streams.sources import (  # here: they bring the engine along
            NearStream,
            OriginStream,
        )

        process = self._here()
        process.coordinator()
        fetcher = process.fetcher
        how = shard, fetcher.policy, self._clock, fetcher.timeout
        if start == 0 and pin is None and version is None and answer is None:
            for near in process.origins.nearer(shard):
                try:
                    stream = NearStream(near, process.origins.of(shard), *how)
                    stream.gave = lambda count: _count(process, "bytes_upstream", count)
                    return stream
                except (ShardCacheError, OSError) as exn:
                    logger.info("%s: not from %s: %s", shard, near.name, exn)
        rest = OriginStream(
            process.origins.of(shard), *how, start=start, pin=pin, version=version, answer=answer
        )
        rest.gave = lambda count: _count(process, "bytes_origin", count)
        return rest

    def reassured(self) -> None:
        """See `entrystream.Keeper.reassured`."""
        process = self._here()
        process.disk_works(process.reading)

    def _store(self, path: Path) -> Store:
        return self._here().store_of(Entry.at(path.parent))

    def _set_aside(self, shard: ShardURL, entry: Entry, path: str, fd: int, reason: str) -> None:
        store = self._store(Path(path))
        try:
            with self._here().coordinator().sole(store, shard.key) as alone:
                # Whoever publishes has this lock, so what has the name now, keeps it. Is it
                # another file by now, then it did not fail.
                if alone and is_file(path, fd):
                    store.condemn(entry.path, reason)
        except OSError as exn:
            logger.info("%s: %s cannot be set aside: %s", shard, path, exn)


def _count(process: Process, source: str, count: int) -> None:
    process.counters.add({"bytes_bypassed": count, source: count})


def _version_of(entry: Entry) -> ObjectInfo | None:
    """All that is known of an entry's version, if its sidecar can be read."""
    try:
        info = entry.metadata().info
    except (DamagedError, OSError) as exn:
        logger.debug("%s: no sidecar: %s", entry.path, exn)
        return None
    return info if info.version == entry.version else None


TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
#: A socket, and what is open for a moment beside it: a name server, a file of certificates,
#: the machine's own configuration.
_CONNECTION_FILES = 4


class PausedError(OSError):
    """The disk failed lately and is left alone."""


def kind_of(fault: Exception) -> str | None:
    """The counter of an error."""
    if isinstance(fault, CacheFullError):
        return "bypassed_full"
    if isinstance(fault, LockTimeoutError):
        return "errors_lock"
    if isinstance(fault, IntegrityError):
        return "errors_integrity"
    if isinstance(fault, (PausedError, FetchCancelledError)):
        return None
    return "errors_origin" if isinstance(fault, ShardCacheError) else "errors_disk"


def is_final(error: BaseException | None) -> TypeGuard[ShardCacheError]:
    """Whether the origin, and not the cache, said no."""
    passing = (CacheFullError, LockTimeoutError, FetchCancelledError)
    return isinstance(error, ShardCacheError) and not isinstance(error, passing)


def gate(breaker: Breaker, gated: bool) -> None:
    """Go on, unless the disk is to be left alone and there is a way past it."""
    if gated and not breaker.allows():
        raise PausedError(errno.EIO, f"the disk failed; tried again in {breaker.left:.0f} s")


def can_open() -> bool:
    """Whether there are as many descriptors left as a connection may take."""
    fds = []
    try:
        for _ in range(_CONNECTION_FILES):
            fds.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exn:
        return exn.errno not in TOO_MANY_FILES
    finally:
        for fd in fds:
            os.close(fd)
    return True


def exhausted(shard: ShardURL, cause: OSError) -> TransferError:
    """Neither the cache nor the origin can be opened, for a reason that is our own."""
    whose = "this process has" if cause.errno == errno.EMFILE else "the machine has"
    return TransferError(
        f"{shard} cannot be opened: {whose} too many open files. Close streams that were read "
        "to their end, or raise the limit (ulimit -n).",
        url=str(shard),
        errno=cause.errno,
    )


def _changed(process: Process) -> bool:
    try:
        return process.root_changed()
    except OSError:
        return False
