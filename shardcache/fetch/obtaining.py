"""The entry of a shard: found, or had by waiting, linking or fetching.

    find: is the disk readable, the root what it was? --- no: begin anew there
      | no entry
    get: is the disk writable? wait, link or fetch; the root went away in the midst: once more

Whatever keeps the shard from being in the cache is raised, and told to the breakers and the
statistics of the process; `reading` makes streams of entries and finds the way past a fault. What
is returned is open and pinned, and the caller's to close. Safe between threads and across forks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import LockTimeoutError, ShardCacheError
from shardcache.locks.flock import is_file
from shardcache.runtime import Process
from shardcache.store.store import Opened
from shardcache.streams.faults import PausedError, gate
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.coordinator import Obtained
    from shardcache.fetch.transfer import FetchStatus

__all__ = ["Obtainer"]

logger = logging.getLogger(__name__)

#: Seconds between looks at an entry that somebody stopped while evicting.
_STUCK_POLL = 0.25


class Obtainer:
    """Obtains entries of one cache, for those who need a path.

    Args:
        config: options.
        here: the parts of the process that asks.
        clock: time.
    """

    def __init__(self, config: Config, here: Callable[[], Process], clock: Clock) -> None:
        self._config = config
        self._here = here
        self._clock = clock

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
        return self._obtain(self._here(), shard, status, gated=False, use=use)

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
        status: FetchStatus | None,
        *,
        gated: bool,
        use: bool,
    ) -> Obtained:
        from shardcache.fetch.coordinator import Obtained, Outcome

        begun = self._clock.monotonic()
        opened = self._find(process, shard, gated, status.outdated if status else ())
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
        try:
            process.touch(obtained.opened, use=use)
            if use:
                self._count(process, obtained.outcome, obtained.opened.size, begun)
            if logger.isEnabledFor(logging.DEBUG):
                say = {"event": str(obtained.outcome), "shard": str(shard)}
                logger.debug("%s: %s", shard, obtained.outcome, extra=say)
        except BaseException:  # an interrupt: a pin that nobody holds would stay
            obtained.opened.close()
            raise

    def _count(self, process: Process, outcome: str, size: int, begun: float) -> None:
        process.tally.opened(outcome, size, self._clock.monotonic() - begun)

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
        status: FetchStatus | None,
        gated: bool,
        patient: Callable[[], bool] = lambda: True,
    ) -> Obtained | None:
        from shardcache.fetch.blocks import FetchStatus

        status = status or FetchStatus()
        obtained = None
        begun = self._clock.monotonic()
        try:
            obtained = self._acquire(process, shard, status, gated, patient)
        finally:
            fetched = obtained is not None and obtained.outcome == "fetched"
            if fetched or status.received:
                seconds = self._clock.monotonic() - begun
                try:
                    process.tally.fetched(shard, status, seconds, done=fetched)
                except BaseException:  # an interrupt: a pin that nobody holds would stay
                    if obtained is not None:
                        obtained.opened.close()
                    raise
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


def _changed(process: Process) -> bool:
    try:
        return process.root_changed()
    except OSError:
        return False
