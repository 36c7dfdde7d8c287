"""Opening a shard: from the cache where that can be, past it where not.

    look for the entry --- the disk was not readable lately -----> past the cache
      | miss
    a `stream.ShardStream` of the fetch, which goes on in the background:
      is the root what it was? --- no: begin anew there
        |
      wait, link or fetch --- the disk was not writable lately --> past the cache
        | it fails ----------------------------------------------> past the cache

With ``strict`` there is no way past: faults are raised, as they are where a path is asked for
(`Opener.obtain`).
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, BinaryIO

from shardcache import clock
from shardcache.config import Config
from shardcache.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    FetchCancelledError,
    IntegrityError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
    TransferError,
)
from shardcache.fetch.status import FetchStatus
from shardcache.files import Breaker, fault_kind, is_disk_fault
from shardcache.locks.flock import is_file
from shardcache.origins.base import ObjectInfo
from shardcache.runtime import Process
from shardcache.store.entry import DamagedError, Entry, Opened, open_data
from shardcache.streams.sources import FetchSource, OriginSource
from shardcache.streams.stream import ShardStream
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.background import Fetching, Share
    from shardcache.fetch.coordinator import Obtained
    from shardcache.streams.sources import Source

__all__ = ["Opener"]

logger = logging.getLogger(__name__)

#: Seconds between attempts to pin an entry while somebody who evicts it is stopped.
_STUCK_POLL = 0.25
#: WebDataset reads 10 KiB at a time; with the default buffer each is a system call.
_BUFFER = 1 << 18
#: What the cache says of itself, in the guise of our own errors; the others are the origin's.
_OF_THE_CACHE = (CacheFullError, LockTimeoutError)
_TOO_MANY_FILES = {errno.EMFILE: "this process has", errno.ENFILE: "the machine has"}


class PausedError(OSError):
    """The disk failed lately and is left alone."""


#: The counter of an error, by its first class that is in here.
_COUNTERS = {
    CacheFullError: "bypassed_full",
    LockTimeoutError: "errors_lock",
    IntegrityError: "errors_integrity",
    FetchCancelledError: None,
    ShardCacheError: "errors_origin",
    PausedError: None,
    OSError: "errors_disk",
}


class Opener:
    """Opens the shards of one cache; safe between threads and across forks.

    ``here`` tells the parts of the process that asks.
    """

    def __init__(self, config: Config, here: Callable[[], Process]) -> None:
        self.config = config
        self._here = here

    # -- streams -----------------------------------------------------------------

    def open(
        self, shard: ShardURL, *, finish: bool = True, ahead: Opened | Share | None = None
    ) -> tuple[BinaryIO, str | None]:
        """A stream of the shard, and its local path or None while it has none.

        Args:
            shard: which.
            finish: whether a fetch goes on to its end when the stream is closed before.
            ahead: what `fetch_ahead` returned for the shard; it is the stream's now.

        Raises:
            As `Cache.open`.
        """
        if shard.scheme == "file" and self.is_in_place(shard):
            return _open_in_place(shard)
        process, begun = self._here(), clock.monotonic()
        opened, share = (ahead, None) if isinstance(ahead, Opened) else (None, ahead)
        source: Source
        try:
            # The path that is taken a million times, and is not to call many others.
            ready = process.ready
            if opened is None and ready is not None and not process.reading.faults:
                try:
                    opened = ready.store.open(shard.key, shard.basename)
                except (DamagedError, OSError):
                    opened = self._find(process, shard)  # it deals with that
            elif opened is None:
                opened = self._find(process, shard)
            source = opened or self._fetch_source(process, shard, finish, share, begun)
        except (ShardCacheError, OSError) as exn:
            source = self.stream_past(shard, exn, 0, None, FetchStatus())
        stream = ShardStream(self, shard, source)
        if opened is None:
            stream.wait(whole=self.config.fill == "complete")
            return io.BufferedReader(stream, _BUFFER), stream.path
        process.touch(opened)
        now = clock.monotonic()
        if share is not None and share.began:  # it would not be there but for this reader
            process.counters.opened("fetched", opened.size, now - begun)
        else:
            tiers = process.tiers
            tier = tiers.index(process.tier_of(opened.directory)) if len(tiers) > 1 else None
            process.counters.opened("hit", opened.size, now - begun, tier)
        if logger.isEnabledFor(logging.DEBUG):  # what it says is not made for nobody
            say = {"event": "hit", "shard": str(shard), "bytes": opened.size}
            logger.debug("%s: hit", shard, extra=say)
        return io.BufferedReader(stream, _BUFFER), opened.path

    def _fetch_source(
        self, process: Process, shard: ShardURL, finish: bool, ahead: Share | None, begun: float
    ) -> FetchSource:
        share = ahead
        if share is None or share.fetching is None or not _is_final(share.fetching):
            share = self.join(shard, finish=finish)
        began = share.began or (ahead is not None and ahead.began)
        if ahead is not None and share is not ahead:
            ahead.leave()
        return FetchSource(self, process, shard, share, began, clock.monotonic() - begun)

    def fetch_ahead(self, shard: ShardURL) -> Opened | Share | None:
        """Begin to fetch a shard that will be asked for, unless it is there: then pin it."""
        if self.is_in_place(shard):
            return None
        try:
            return self.find(shard) or self.join(shard, ahead=True)
        except OSError as exn:  # whoever asks for it is told
            logger.debug("%s: not fetched ahead: %s", shard, exn)
            return None

    def join(self, shard: ShardURL, *, ahead: bool = False, finish: bool = False) -> Share:
        """Want a shard fetched in the background, once for all who want it.

        With ``ahead`` nobody waits for it yet; with ``finish`` it is fetched even if all leave.
        """
        process = self._here()
        coordinator = process.coordinator()  # of a child that has just been forked

        def fetch(status: FetchStatus, patient: Callable[[], bool]) -> Obtained | None:
            if not ahead:
                return self._get(process, shard, status, patient)
            with coordinator.ahead_slot() as free:
                return self._get(process, shard, status, patient) if free or patient() else None

        try:
            return process.fetchings.join(shard, fetch, ahead=ahead, finish=finish)
        except RuntimeError as exn:  # a limit of processes
            raise OSError(errno.EAGAIN, str(exn)) from exn

    # -- past a fault ------------------------------------------------------------

    def next_source(
        self, shard: ShardURL, failed: Source, fault: Exception, position: int, begun: bool
    ) -> Source:
        """What a stream reads instead of a source that failed; raises ``fault`` if nothing can be.

        If it has ``begun``, bytes were given, and the rest has to be of the same version.
        """
        if isinstance(failed, Opened) and isinstance(fault, OSError) and is_disk_fault(fault):
            return self._mend(shard, failed, fault, position, begun)
        if isinstance(failed, FetchSource):
            failed.counted = True  # here
            return self.stream_past(
                shard, fault, position, failed.info if begun else None, failed.status
            )
        if isinstance(failed, OriginSource) and failed.nearer is not None:
            logger.info("%s: the rest does not come from an upstream: %s", shard, fault)
            pin = failed.info if begun else None
            return OriginSource(self._here(), shard, start=position, pin=pin)
        raise fault  # the origin was the last

    def _mend(
        self, shard: ShardURL, opened: Opened, fault: OSError, position: int, begun: bool
    ) -> Source:
        """Open an entry again whose handle is stale; set any other that fails aside."""
        process = self._here()
        entry = opened.entry
        store = process.store_of(entry)
        if fault.errno == errno.ESTALE and not opened.reopened:
            with contextlib.suppress(DamagedError, OSError):
                where = opened.directory, opened.path, opened.size
                if (again := open_data(*where, store.layout.grace)) is not None:
                    again.reopened = True
                    return again
        info = None
        with contextlib.suppress(DamagedError, OSError):
            info = entry.metadata().info
        process.disk_failed(process.reading, fault)
        try:
            with process.coordinator().sole(store, shard.key) as alone:
                # Whoever publishes has this lock, so what has the name now, keeps it. Is it
                # another file by now, then it did not fail.
                if alone and is_file(opened.path, opened.fd):
                    store.condemn(entry.path, f"{shard}: {fault.strerror}")
        except OSError as exn:
            logger.info("%s: %s cannot be set aside: %s", shard, opened.path, exn)
        if self.config.strict:
            raise fault
        process.warn(
            fault_kind(fault),
            "%s cannot be read at byte %d of %s (%s); the rest is streamed",
            shard,
            position,
            opened.path,
            fault.strerror,
        )
        if not begun:
            return self._origin_source(process, shard, position, FetchStatus())
        return OriginSource(
            process, shard, start=position, pin=info, version=entry.version, size=entry.size
        )

    def stream_past(
        self,
        shard: ShardURL,
        fault: Exception,
        start: int,
        pin: ObjectInfo | None,
        status: FetchStatus,
    ) -> OriginSource:
        """A shard from ``start`` on, from its origin, because the cache failed; counted and said.

        It has to be the version ``pin``, if there is one. ``status`` is that of the fetch that
        failed: it may have kept the origin's answer.

        Raises:
            ``fault``, with ``strict`` or where it is the origin's; as `OriginSource`.
        """
        process = self._here()
        counter = next(_COUNTERS[kind] for kind in type(fault).__mro__ if kind in _COUNTERS)
        counts = {} if counter is None else {counter: 1}
        try:
            self._warn_streamed(process, shard, fault)
            if pin is not None:
                source = OriginSource(process, shard, start=start, pin=pin)
            else:
                source = self._origin_source(process, shard, start, status)
        except Exception as exn:
            status.drop_answer()
            process.counters.add({"failed": 1, **counts})
            number = fault.errno if isinstance(fault, OSError) else None
            said = exn is fault or isinstance(exn, (ShardNotFoundError, AccessDeniedError))
            if said or number not in _TOO_MANY_FILES:
                raise
            raise TransferError(
                f"{shard} cannot be opened: {_TOO_MANY_FILES[number]} too many open files ({exn}). "
                "Close streams that were read to their end, or raise the limit (ulimit -n).",
                url=str(shard),
                errno=number,
            ) from exn
        process.counters.add({"bypassed": 1, **counts})
        return source

    def _origin_source(
        self, process: Process, shard: ShardURL, start: int, status: FetchStatus
    ) -> OriginSource:
        """A shard past the cache: the answer that a fetch has kept, a nearer copy or the origin."""
        process.coordinator()  # of a child that has just been forked
        answer = None if start else status.take_answer()
        if start == 0 and answer is None:
            for copy in process.origins.upstreams(shard):
                try:
                    return OriginSource(process, shard, nearer=copy)
                except (ShardCacheError, OSError) as exn:
                    logger.info("%s: not from %s: %s", shard, copy.name, exn)
        return OriginSource(process, shard, start=start, answer=answer)

    def _warn_streamed(self, process: Process, shard: ShardURL, fault: Exception) -> None:
        """Warn that a shard is streamed; raises what there is no way past."""
        if isinstance(fault, _OF_THE_CACHE):
            kind, reason = type(fault).__name__, fault.message
        elif isinstance(fault, OSError) and not isinstance(fault, ShardCacheError):
            kind, reason = fault_kind(fault), str(fault.strerror or fault)
            if str(self.config.dir) not in reason:
                reason = f"{self.config.dir}: {reason}"
        else:
            raise fault
        if self.config.strict:
            raise fault
        text = "%s is streamed, not cached: %s"
        say = {"event": "streamed", "shard": str(shard), "reason": kind}
        if isinstance(fault, PausedError):
            logger.info(text, shard, reason, extra=say)
        else:
            process.warn(kind, text, shard, reason, extra=say)

    # -- entries ---------------------------------------------------------------

    def find(self, shard: ShardURL) -> Opened | None:
        """The shard's entry, open and pinned, and marked as used; None is a miss."""
        process = self._here()
        opened = self._find(process, shard)
        if opened is not None:
            process.touch(opened)
        return opened

    def fetch(self, shard: ShardURL, status: FetchStatus | None = None) -> tuple[Entry, str]:
        """The shard's entry, fetched if need be, and how it was had; raises as `obtain`."""
        obtained = self.obtain(shard, status, use=False)
        obtained.opened.close()
        return obtained.opened.entry, obtained.outcome

    def obtain(
        self, shard: ShardURL, status: FetchStatus | None = None, *, use: bool = True
    ) -> Obtained:
        """The shard's entry, open and pinned, fetched if need be; raises as `open` with ``strict``.

        ``status`` is kept up to date. With ``use`` False it is no use of the shard, only seen to.
        """
        from shardcache.fetch.coordinator import Obtained, Outcome  # here: they bring the engine

        self.refuse_in_place(shard)
        process = self._here()
        status = FetchStatus() if status is None else status
        begun = clock.monotonic()
        try:
            opened = self._find(process, shard, status.outdated, asked=True)
            obtained = None if opened is None else Obtained(opened, Outcome.HIT)
            obtained = obtained or self._get(process, shard, status, asked=True)
        finally:
            status.drop_answer()
        assert obtained is not None  # it waits for others
        process.touch(obtained.opened)
        if use:
            waited = clock.monotonic() - begun
            process.counters.opened(obtained.outcome, obtained.opened.size, waited)
        say = {"event": str(obtained.outcome), "shard": str(shard)}
        logger.debug("%s: %s", shard, obtained.outcome, extra=say)
        return obtained

    def pin(self, shard: ShardURL) -> Opened:
        """An entry that is under its path and cannot leave it; raises as `obtain`."""
        end = clock.monotonic() + self.config.lock_timeout
        while True:
            opened = self.obtain(shard).opened
            if not opened.stuck and is_file(opened.path, opened.fd):
                return opened
            opened.close()  # it was evicted meanwhile, or is stuck
            if opened.stuck:
                if clock.monotonic() >= end:
                    raise LockTimeoutError(
                        f"{shard} is being evicted by a process that does not go on. Look for "
                        "one that is stopped, or read the shard with open().",
                        url=str(shard),
                    )
                clock.sleep(_STUCK_POLL)

    def _find(
        self,
        process: Process,
        shard: ShardURL,
        outdated: Collection[str] = (),
        *,
        asked: bool = False,
    ) -> Opened | None:
        """The entry, of no ``outdated`` version. Who ``asked`` for it can do with nothing else."""
        process.coordinator()
        self._gate(process.reading, asked)
        try:
            if not process.reading.closed:
                process.check_root()  # nothing is read that may be somebody else's by now
            opened = process.coordinator().lookup(shard, outdated)
        except OSError as exn:
            process.disk_failed(process.reading, exn)
            raise
        if opened is not None and process.reading.faults:  # can it be read, too?
            with contextlib.suppress(OSError):  # the stream meets that as well, and mends it
                os.pread(opened.fd, 1, 0)
                process.disk_works(process.reading)
        return opened

    def _get(
        self,
        process: Process,
        shard: ShardURL,
        status: FetchStatus,
        patient: Callable[[], bool] = lambda: True,
        *,
        asked: bool = False,
    ) -> Obtained | None:
        """Wait for it, link it or fetch it; see `Coordinator.get`. What is fetched is counted."""
        obtained = None
        begun = clock.monotonic()
        if begun >= process.look_at:
            process.keep_house()
        self._gate(process.writing, asked)
        try:
            process.check_root()
            try:
                obtained = process.coordinator().get(shard, status, patient)
            except OSError as exn:
                if isinstance(exn, ShardCacheError) or not process.changed_tiers():
                    raise
                process.check_root()  # the disk went away in the midst of it
                obtained = process.coordinator().get(shard, status, patient)
        except OSError as exn:
            process.disk_failed(process.writing, exn)
            raise
        finally:
            fetched = obtained is not None and obtained.outcome == "fetched"
            if fetched or status.received:
                process.counters.fetched(
                    shard,
                    size=status.size or (status.written if fetched else 0),
                    received=status.received,
                    seconds=clock.monotonic() - begun,
                    retries=status.retries,
                    upstream=status.upstream,
                    done=fetched,
                )
        if obtained is not None and fetched:
            if process.writing.faults:
                process.disk_works(process.writing)
            process.write_back(shard, obtained.opened.path, wait=asked)
        return obtained

    def _gate(self, breaker: Breaker, asked: bool) -> None:
        """Go on, unless the disk is to be left alone and there is a way past it."""
        if breaker.faults and not (asked or self.config.strict or breaker.allows()):
            raise PausedError(errno.EIO, f"the disk failed; tried again in {breaker.left:.0f} s")

    # -- files that are not cached -------------------------------------------------

    def is_in_place(self, shard: ShardURL) -> bool:
        """Whether a shard is read where it lies."""
        return shard.is_local and not self.config.cache_local

    def refuse_in_place(self, shard: ShardURL) -> None:
        """Raise ConfigError for a shard that is read where it lies."""
        if self.is_in_place(shard):
            raise ConfigError(
                f"{shard.local_path} is opened where it is and not cached; set cache_local if it "
                "lies on a slow mount.",
                url=str(shard),
            )


def _is_final(fetching: Fetching) -> bool:
    """Whether a fetch has ended in what its reader is to be told, or has kept the answer for it.

    Asking again would cost another request.
    """
    error = fetching.error
    passing = isinstance(error, (*_OF_THE_CACHE, FetchCancelledError))
    return bool(fetching.status.answers) or (isinstance(error, ShardCacheError) and not passing)


def _open_in_place(shard: ShardURL) -> tuple[BinaryIO, str]:
    path = str(shard.local_path)
    try:
        return open(path, "rb"), path
    except FileNotFoundError as exn:
        raise ShardNotFoundError(
            f"{path} does not exist. Check the pattern.", url=str(shard)
        ) from exn
