"""Opening a shard: from the cache where that can be, past it where not.

    look for the entry --- the disk was not readable lately -----> past the cache
      | miss
    is the root what it was? --- no: begin anew there
      |
    wait, link or fetch --- the disk was not writable lately ----> past the cache
      | it fails ------------------------------------------------> past the cache
    an `entrystream.EntryStream`; or, with ``fill="follow"``, which does all but the first
    step in the background, a `following.FollowStream`

With ``strict`` there is no way past: faults are raised, as they are where a path is asked for
(`obtaining`). Safe between threads and across forks.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from shardcache.breaker import fault_kind
from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import (
    CacheFullError,
    LockTimeoutError,
    ShardCacheError,
    ShardNotFoundError,
)
from shardcache.fetch.obtaining import Obtainer
from shardcache.runtime import Process
from shardcache.store.entry import DamagedError
from shardcache.store.store import Opened, Store
from shardcache.streams.faults import (
    TOO_MANY_FILES,
    PausedError,
    can_open,
    exhausted,
    is_final,
    kind_of,
)
from shardcache.streams.healing import Healer
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.background import Run, Share
    from shardcache.fetch.coordinator import Obtained
    from shardcache.fetch.transfer import FetchStatus
    from shardcache.origins.base import ObjectInfo
    from shardcache.streams.bypass import OriginStream

__all__ = ["Opener"]

logger = logging.getLogger(__name__)

#: WebDataset reads 10 KiB at a time; with the default buffer each is a system call.
_BUFFER = 1 << 18


class Opener(Obtainer):
    """Opens the shards of one cache.

    Args:
        config: options.
        here: the parts of the process that asks.
        clock: time.
    """

    def __init__(self, config: Config, here: Callable[[], Process], clock: Clock) -> None:
        super().__init__(config, here, clock)
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
        begun = self._clock.monotonic()
        began = ahead is not None and ahead.began
        try:
            opened = self._hit(process, shard)
            if opened is None:
                share = self._begin(process, shard, finish, ahead)
                if share is None:
                    obtained = self._get(process, shard, None, self._gated)
                    assert obtained is not None  # it waits for others
                    opened = self._used(process, shard, obtained, begun)
            else:
                self._count_found(process, opened, begun, began=began)
        except (ShardCacheError, OSError) as exn:
            return io.BufferedReader(self.past(shard, exn, 0, None), _BUFFER), None
        if opened is None:
            assert share is not None
            waited = self._clock.monotonic() - begun
            return self._follow(shard, share, began=began or share.began, waited=waited)
        return io.BufferedReader(opened.file, _BUFFER), opened.path

    def _count_found(self, process: Process, opened: Opened, begun: float, *, began: bool) -> None:
        try:
            if began:  # it would not be there if it had not been fetched for this reader
                self._count(process, "fetched", opened.size, begun)
            else:
                process.count_hit(opened, begun)
        except BaseException:  # an interrupt: a pin that nobody holds would stay
            opened.close()
            raise

    def _begin(
        self, process: Process, shard: ShardURL, finish: bool, ahead: Share | None
    ) -> Share | None:
        """The fetch to follow or to wait for; None where the calling thread is to do it."""
        if ahead is not None and ahead.fetching is not None and is_final(ahead.fetching.error):
            raise ahead.fetching.error  # asking again would cost another request
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
        from shardcache.streams.following import FollowStream  # here: it brings the engine along

        stream = FollowStream(shard, self, share, began=began, waited=waited)
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
                if logger.isEnabledFor(logging.DEBUG):  # what it says is not made for nobody
                    say = {"event": "hit", "shard": str(shard), "bytes": opened.size}
                    logger.debug("%s: hit", shard, extra=say)
            except BaseException:  # an interrupt: a pin that nobody holds would stay
                opened.close()
                raise
            opened.file.guard(self._healer, shard, opened.path, opened.size, process.reading)
        return opened

    def reopen(self, shard: ShardURL, opened: Opened) -> Opened | None:
        """See `following.Host.reopen`."""
        process = self._here()
        store = process.store_of(Store.entry_at(opened))
        again = store.open_again(opened.path)
        if again is not None:
            self._guard(process, shard, again)
        return again

    def followed(self, shard: ShardURL, outcome: str, size: int, waited: float) -> None:
        """See `following.Host.followed`."""
        self._here().tally.opened(outcome, size, waited)

    def past(
        self, shard: ShardURL, fault: Exception, start: int, pin: ObjectInfo | None
    ) -> OriginStream:
        """See `following.Host.past`."""
        process = self._here()
        counts = {kind: 1} if (kind := kind_of(fault)) else {}
        try:
            stream = self._past(process, shard, fault, start, pin)
        except Exception:
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
            return self._healer.stream(shard, start=start, pin=pin)
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
