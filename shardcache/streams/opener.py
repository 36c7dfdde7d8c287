"""Opening a shard: from the cache where that can be, past it where not.

    look for the entry --- the disk was not readable lately -----> past the cache
      | miss
    a `stream.ShardStream` of the fetch, which goes on in the background:
      is the root what it was? --- no: begin anew there
        |
      wait, link or fetch --- the disk was not writable lately --> past the cache
        | it fails ----------------------------------------------> past the cache

With ``strict`` there is no way past: faults are raised, as they are where a path is asked for
(`Opener.obtain`). A `Lookahead` has the next shards of a pipeline fetched before it asks.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

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
    UnprovenError,
)
from shardcache.fetch.status import FetchStatus
from shardcache.files import Breaker, fault_kind, is_disk_fault
from shardcache.locks.flock import is_file
from shardcache.runtime import Process
from shardcache.store.directory import DamagedError
from shardcache.store.entry import Entry, Opened, open_data, set_aside
from shardcache.streams.sources import FetchSource, OriginSource
from shardcache.streams.stream import ShardStream
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.background import Fetching
    from shardcache.fetch.coordinator import Obtained
    from shardcache.streams.sources import Source

__all__ = ["Lookahead", "Opener"]

logger = logging.getLogger(__name__)

#: Seconds between attempts to pin an entry while somebody who evicts it is stopped.
_STUCK_POLL = 0.25
#: WebDataset reads 10 KiB at a time; with the default buffer each is a system call.
_BUFFER = 1 << 18


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
        self.here = here

    # -- streams -----------------------------------------------------------------

    def open(
        self, shard: ShardURL, *, finish: bool = True, ahead: Opened | FetchSource | None = None
    ) -> BinaryIO:
        """A stream of the shard.

        Args:
            shard: which.
            finish: whether a fetch goes on to its end when the stream is closed before.
            ahead: what a `Lookahead` has of the shard; it is the stream's now.

        Raises:
            As `Cache.open`.
        """
        if shard.scheme == "file" and self.is_in_place(shard):
            return _open_in_place(shard)
        process, begun = self.here(), clock.monotonic()
        if isinstance(ahead, FetchSource) and not ahead.begin():
            ahead = None
        opened = ahead if isinstance(ahead, Opened) else None
        source: Source
        try:
            if ahead is None:
                ready = process.ready
                if ready is None or process.reading.faults:
                    opened = self.find(shard)
                else:  # the path that is taken a million times, and is not to call many others
                    try:
                        opened = ready.open(shard.key, shard.basename)
                    except (DamagedError, OSError):
                        opened = self.find(shard)  # it deals with that
            source = opened or ahead or FetchSource(self, shard, finish=finish)
        except (ShardCacheError, OSError) as exn:
            source = self._stream_past(shard, exn)
        stream = ShardStream(self, shard, source, process.counters)
        if opened is None:
            stream.wait(whole=self.config.fill == "complete")
            return io.BufferedReader(stream, _BUFFER)
        process.touch(opened)
        tiers = process.tiers
        tier = tiers.index(process.tier_of(opened.directory)) if len(tiers) > 1 else None
        process.counters.opened("hit", clock.monotonic() - begun, tier)
        if logger.isEnabledFor(logging.DEBUG):  # what it says is not made for nobody
            say = {"event": "hit", "shard": str(shard), "bytes": opened.size}
            logger.debug("%s: hit", shard, extra=say)
        return io.BufferedReader(stream, _BUFFER)

    def join(
        self, shard: ShardURL, *, finish: bool = False, ahead: bool = False
    ) -> tuple[Fetching, bool]:
        """Want a shard fetched in the background, once for all who want it; see `Fetchings.join`.

        With ``ahead`` nobody waits for it yet.
        """
        process = self.here()
        process.coordinator()  # of a child that has just been forked
        return process.fetchings.join(
            shard, lambda status: self._get(shard, status, ahead=ahead), finish=finish
        )

    def stream(self, shard: ShardURL) -> BinaryIO:
        """A stream of the file, of which nothing is stored; raises as `open`."""
        stream = ShardStream(self, shard, self._nearest(shard, 0), self.here().counters)
        return io.BufferedReader(stream, _BUFFER)

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
            return self._stream_past(shard, fault, position, failed, begun)
        if isinstance(failed, OriginSource) and failed.nearer is not None:
            logger.info("%s: the rest does not come from an upstream: %s", shard, fault)
            pin = failed.info if begun else None
            return OriginSource(self.here, shard, start=position, pin=pin)
        raise fault  # the origin was the last

    def _mend(
        self, shard: ShardURL, opened: Opened, fault: OSError, position: int, begun: bool
    ) -> Source:
        """Open an entry again whose handle is stale; set any other that fails aside."""
        process, entry = self.here(), opened.entry
        store = process.tier_of(entry.directory).store
        info = None
        with contextlib.suppress(DamagedError, OSError):
            if fault.errno == errno.ESTALE and not opened.reopened:
                where = opened.directory, opened.path, opened.size
                if (again := open_data(*where, store.layout.grace)) is not None:
                    again.reopened = True
                    return again
            info = entry.metadata().info
        process.disk_failed(process.reading, fault)
        try:
            with process.coordinator().sole(store, shard.key) as alone:
                # Whoever publishes has this lock, so what has the name now, keeps it. Is it
                # another file by now, then it did not fail.
                if alone and is_file(opened.path, opened.fd):
                    set_aside(entry.path, f"{shard}: {fault.strerror}")
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
            return self._nearest(shard, position)
        return OriginSource(
            self.here, shard, start=position, pin=info, version=entry.version, size=entry.size
        )

    def _stream_past(
        self,
        shard: ShardURL,
        fault: Exception,
        start: int = 0,
        failed: FetchSource | None = None,
        begun: bool = False,
    ) -> OriginSource:
        """A shard from ``start`` on, from its origin, because the cache failed; counted and said.

        Raises:
            ``fault``, with ``strict`` or where it is the origin's; as `OriginSource`.
        """
        process = self.here()
        counter = next(_COUNTERS[kind] for kind in type(fault).__mro__ if kind in _COUNTERS)
        counts = {} if counter is None else {counter: 1}
        try:
            self._warn_streamed(process, shard, fault)
            if failed is not None and begun:
                source = OriginSource(self.here, shard, start=start, pin=failed.info)
            else:
                source = self._nearest(shard, start, failed)
        except Exception as exn:
            process.counters.add({"failed": 1, **counts})
            number = getattr(fault, "errno", None)
            said = exn is fault or isinstance(exn, (ShardNotFoundError, AccessDeniedError))
            if said or number not in (errno.EMFILE, errno.ENFILE):
                raise
            raise TransferError(
                f"{shard} cannot be opened: there are too many open files ({exn}). "
                "Close streams that were read to their end, or raise the limit (ulimit -n).",
                url=str(shard),
                errno=number,
            ) from exn
        process.counters.add({"bypassed": 1, **counts})
        return source

    def _warn_streamed(self, process: Process, shard: ShardURL, fault: Exception) -> None:
        """Warn that a shard is streamed; raises what there is no way past."""
        if isinstance(fault, (CacheFullError, LockTimeoutError, UnprovenError)):
            kind, reason = type(fault).__name__, fault.message
        elif isinstance(fault, OSError) and not isinstance(fault, ShardCacheError):
            kind, reason = fault_kind(fault), str(fault.strerror or fault)
            place = str(fault.filename or self.config.dir)
            if place not in reason:
                reason = f"{place}: {reason}"
        else:  # the origin's own
            raise fault
        if self.config.strict:
            raise fault
        text = "%s is streamed, not cached: %s"
        say = {"event": "streamed", "shard": str(shard), "reason": kind}
        if isinstance(fault, PausedError):
            logger.info(text, shard, reason, extra=say)
        elif isinstance(fault, CacheFullError):
            process.warn_streamed(shard, reason, say)
        else:
            process.warn(kind, text, shard, reason, extra=say)

    def _nearest(
        self, shard: ShardURL, start: int, failed: FetchSource | None = None
    ) -> OriginSource:
        """A shard past the cache: an answer that a fetch has kept, a nearer copy or the origin."""
        process = self.here()
        process.coordinator()  # of a child that has just been forked
        answer = failed.take_answer() if failed is not None and start == 0 else None
        if start == 0 and answer is None:
            for copy in process.origins.upstreams(shard):
                try:
                    return OriginSource(self.here, shard, nearer=copy)
                except (ShardCacheError, OSError) as exn:
                    logger.info("%s: not from %s: %s", shard, copy.name, exn)
        return OriginSource(self.here, shard, start=start, answer=answer)

    # -- entries ---------------------------------------------------------------

    def fetch(self, shard: ShardURL, status: FetchStatus | None = None) -> tuple[Entry, str]:
        """The shard's entry, fetched if need be, and how it was had; raises as `obtain`.

        It is no use of the shard, only seen to. ``status`` is kept up to date.
        """
        opened, outcome = self.obtain(shard, status)
        opened.close()
        return opened.entry, outcome

    def pin(self, shard: ShardURL) -> Opened:
        """An entry that is under its path and cannot leave it; raises as `obtain`."""
        begun = clock.monotonic()
        while True:
            opened, outcome = self.obtain(shard)
            waited = clock.monotonic() - begun
            if not opened.stuck and is_file(opened.path, opened.fd):
                counters = self.here().counters
                counters.opened(outcome, waited)
                counters.read(opened.size)  # by whoever gets the path, as far as anybody knows
                return opened
            opened.close()  # it was evicted meanwhile, or is stuck
            if opened.stuck:
                if waited >= self.config.lock_timeout:
                    raise LockTimeoutError(
                        f"{shard} is being evicted by a process that does not go on. Look for "
                        "one that is stopped, or read the shard with open().",
                        url=str(shard),
                    )
                clock.sleep(_STUCK_POLL)

    def obtain(self, shard: ShardURL, status: FetchStatus | None = None) -> tuple[Opened, str]:
        """The shard's entry, open and pinned, fetched if need be; raises as `open` with ``strict``.

        Where only a path will do, a disk that failed lately is asked all the same.
        """
        self.refuse_in_place(shard)
        status = FetchStatus() if status is None else status
        try:
            opened = self.find(shard, status.outdated, asked=True)
            obtained = self._get(shard, status, asked=True) if opened is None else (opened, "hit")
        finally:
            status.drop_answer()
        assert obtained is not None  # it waits for others
        opened, outcome = obtained
        self.here().touch(opened)
        say = {"event": outcome, "shard": str(shard)}
        logger.debug("%s: %s", shard, outcome, extra=say)
        return opened, outcome

    def find(
        self, shard: ShardURL, outdated: Collection[str] = (), *, asked: bool = False
    ) -> Opened | None:
        """The entry, of no ``outdated`` version. Who ``asked`` for it can do with nothing else."""
        process = self.here()
        coordinator = process.coordinator()
        self._gate(process.reading, asked)
        try:
            if not process.reading.closed:
                process.check_root()  # nothing is read that may be somebody else's by now
                coordinator = process.coordinator()
            opened = coordinator.lookup(shard, outdated)
        except OSError as exn:
            process.disk_failed(process.reading, exn)
            raise
        if opened is not None and process.reading.faults:  # can it be read, too?
            with contextlib.suppress(OSError):  # the stream meets that as well, and mends it
                os.pread(opened.fd, 1, 0)
                process.reading.succeeded()
        return opened

    def _get(
        self, shard: ShardURL, status: FetchStatus, *, ahead: bool = False, asked: bool = False
    ) -> Obtained | None:
        """Wait for it, link it or fetch it; see `Coordinator.get`. What is fetched is counted."""
        process = self.here()
        obtained = None
        begun = clock.monotonic()
        if begun >= process.clean_due:
            process.clean_if_due()
        self._gate(process.writing, asked)
        try:
            process.check_root()
            try:
                obtained = process.coordinator().get(shard, status, ahead=ahead)
            except OSError as exn:
                if isinstance(exn, ShardCacheError) or not process.changed_tiers():
                    raise
                process.check_root()  # the disk went away in the midst of it
                obtained = process.coordinator().get(shard, status, ahead=ahead)
        except OSError as exn:
            process.disk_failed(process.writing, exn)
            raise
        finally:
            fetched = obtained is not None and obtained.outcome == "fetched"
            if fetched or status.received:
                process.counters.fetched(
                    shard,
                    size=status.size or (status.written if fetched else 0),
                    seconds=clock.monotonic() - begun,
                    retries=status.retries,
                    upstream=status.upstream,
                    done=fetched,
                )
        if obtained is not None and fetched:
            if process.writing.faults:
                process.writing.succeeded()
            process.write_back(shard, obtained.opened.path, wait=asked)
        return obtained

    def _gate(self, breaker: Breaker, asked: bool) -> None:
        """Go on, unless the disk is to be left alone and there is a way past it."""
        if breaker.left and not (asked or self.config.strict):
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


def _open_in_place(shard: ShardURL) -> BinaryIO:
    path = str(shard.local_path)
    try:
        return open(path, "rb")
    except FileNotFoundError as exn:
        raise ShardNotFoundError(
            f"{path} does not exist. Check the pattern.", url=str(shard)
        ) from exn


class Lookahead:
    """The items of a list in their order, with the next ``prefetch`` shards on their way.

    Nothing waits for a shard ahead: one that another process has in hand is left to it, and one
    that is cached is opened, so that it stays. The list may be endless. When the consumer stops,
    so does all of this. What the list raises is raised in its place, after the items before it.
    For one thread.

    Args:
        opener: opens shards, and begins to fetch them.
        data: the list; it is asked for items earlier than without a look ahead.
        shard_of: tells the shard of an item.
    """

    def __init__(
        self, opener: Opener, data: Iterable[Any], shard_of: Callable[[Any], ShardURL]
    ) -> None:
        self._opener = opener
        self._data = iter(data)
        self._shard_of = shard_of
        self._coming: deque[tuple[Any, Opened | FetchSource | None]] = deque()
        self._error: Exception | None = None  # of the list
        #: Shards that the origin refused for good, which are not requested again.
        self._refused: dict[str, ShardNotFoundError | AccessDeniedError] = {}

    def __iter__(self) -> Iterator[Any]:
        """The items; `open` is to be called once for each."""
        try:
            while self._coming or self._take(begin=False):
                yield self._coming[0][0]
        finally:
            for _, source in self._coming:
                if source is not None:
                    source.close()
        if self._error is not None:
            raise self._error

    def open(self) -> BinaryIO:
        """Open the shard of the item, then begin to fetch the next: what is read now goes first.

        As `Opener.open`, whose fetch ends when the stream is dropped.
        """
        item, source = self._coming.popleft()  # whoever has it decides how long its stream lives
        shard = self._shard_of(item)
        del item
        if (refused := self._refused.get(shard.key)) is not None and source is None:
            raise type(refused)(refused.message, url=str(shard))
        try:
            opened = self._opener.open(shard, finish=False, ahead=source)
        except (ShardNotFoundError, AccessDeniedError) as exn:
            self._refused[shard.key] = type(exn)(exn.message)  # without its traceback
            raise
        while len(self._coming) < self._opener.config.prefetch and self._take(begin=True):
            pass
        return opened

    def _take(self, *, begin: bool) -> bool:
        """Take the next item off the list, and perhaps begin with it; False at the end."""
        try:
            item = next(self._data)
        except Exception as exn:  # noqa: BLE001 - raised when its turn comes
            if not isinstance(exn, StopIteration):
                self._error = exn
            self._data = iter(())
            return False
        source = None
        if begin:
            with contextlib.suppress(ShardCacheError, OSError):  # whoever opens it is told
                shard = self._shard_of(item)
                if not (self._opener.is_in_place(shard) or shard.key in self._refused):
                    found = self._opener.find(shard)
                    source = found or FetchSource(self._opener, shard, ahead=True)
        self._coming.append((item, source))
        return True
