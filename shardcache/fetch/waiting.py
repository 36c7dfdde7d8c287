"""Waiting for another process's fetch: announced, watched, bounded.

A waiter never takes a lock away. It watches whether the holder's partial grows, notes for `top`
whom it waits for, says so every ten seconds, and in the end either sees the entry, gets the lock,
is told that the holder is stale, or gives up with an error that names holder, age and progress.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from shardcache import clock
from shardcache.config import Config
from shardcache.errors import LockTimeoutError
from shardcache.fetch.status import FetchStatus
from shardcache.layout import Layout, is_directory, parse_partial_name
from shardcache.locks.flock import Holder, read_holder
from shardcache.locks.sessions import Session
from shardcache.store.partial import Progress, read_progress
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

__all__ = ["Waiter"]

logger = logging.getLogger(__name__)


#: Seconds between two looks: the first when a fetch may be about to end, the
#: last when many processes wait long. A look costs two opens.
_FIRST_POLL = 0.02
_LAST_POLL = 0.25
_ANNOUNCE_EVERY = 10.0
#: Seconds of waiting that are worth a note: what people can see, and longer than most.
_NOTE_AFTER = 0.5


class Waiter:
    """One caller's wait for one key.

    Args:
        url: the shard.
        status: is told where the holder's partial is; ends the wait when it is called off.
        layouts: where fetches grow; the last one has the lock.
        config: the bounds of the wait.
        waiter: who waits.
    """

    def __init__(
        self,
        url: ShardURL,
        status: FetchStatus,
        layouts: Sequence[Layout],
        config: Config,
        waiter: Holder,
    ) -> None:
        self._url = url
        self._status = status
        self._layouts = layouts
        self._config = config
        self._poll = _FIRST_POLL
        self._begun = self._changed = self._announced = clock.monotonic()
        self._waits = url.key, replace(waiter, url=str(url))
        self._note: Session | None = None
        self._holder, self._progress = self._look()

    @property
    def stale(self) -> bool:
        """Whether the holder's partial has not grown for ``stale_after`` seconds."""
        return clock.monotonic() - self._changed >= self._config.stale_after

    def pause(self) -> None:
        """Sleep a little and look again.

        Raises:
            LockTimeoutError: the wait is over its bound.
            FetchCancelledError: it was called off.
        """
        pause = self._poll * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        self._status.sleep(pause, str(self._url))
        self._poll = min(self._poll * 1.5, _LAST_POLL)
        now = clock.monotonic()
        seen = self._look()
        if seen != (self._holder, self._progress):
            self._changed = now
        self._holder, self._progress = seen
        waited = now - self._begun
        if waited >= self._config.lock_timeout:
            raise LockTimeoutError(
                f"{self._url} was not there after {format_duration(waited)}: "
                f"{self.describe()}. Look at that process, or raise lock_timeout.",
                url=str(self._url),
                holder=self._holder,
                waited=waited,
            )
        if now - self._announced >= _ANNOUNCE_EVERY:
            self._announced = now
            self._announce(waited)
        if waited >= _NOTE_AFTER and self._note is None:
            self._note = Session(self._layouts[-1], self._waits[1].started, self._waits)

    def close(self) -> None:
        """Wait no longer."""
        if self._note is not None:
            self._note.close()

    def _look(self) -> tuple[Holder | None, Progress | None]:
        holder = read_holder(self._layouts[-1].holder(self._url.key))
        name = holder.partial if holder else None
        # The name comes out of a file anybody may have damaged: a name, no path.
        if name is None or parse_partial_name(name) is None:
            return holder, None
        places = [layout.partial / name for layout in self._layouts]
        partial = next((path for path in places[:-1] if is_directory(path)), places[-1])
        self._status.grows_in(partial)
        return holder, read_progress(partial)

    def _announce(self, waited: float) -> None:
        """Say whom it waits for; the fields are in docs/observing.md."""
        holder, progress = self._holder, self._progress
        facts = {
            "event": "waiting",
            "shard": str(self._url),
            "seconds": waited,
            "holder_pid": holder.pid if holder else None,
            "holder_host": holder.host if holder else None,
            "holder_rank": holder.rank if holder else None,
            "written": progress.written if progress else None,
            "size": progress.total if progress else None,
        }
        text = "%s: waiting for %s, %s"
        logger.warning(text, self._url, format_duration(waited), self.describe(), extra=facts)

    def describe(self) -> str:
        """Who holds the shard, since when, and how far they are."""
        holder, progress = self._holder, self._progress
        if holder is None:
            return "its lock is held by a process that did not say who it is"
        age = format_duration(max(0.0, clock.time() - holder.started))
        text = f"{holder} has been fetching it for {age}"
        if progress is not None and progress.total:
            share = min(1.0, progress.written / progress.total)
            text += f", {share:.0%} of {format_bytes(progress.total)} done"
        still = clock.monotonic() - self._changed
        if still >= _ANNOUNCE_EVERY:
            text += f", nothing new for {format_duration(still)}"
        return text
