"""Wait while another process, the holder of the key's lock, downloads a shard.

A waiter never takes the lock away. It watches whether the holder's partial grows, leaves a note for
`shardcache top`, and logs the holder's progress every ten seconds. The wait ends when the entry
appears or the lock is free. A holder that makes no progress is stale, and the waiting process then
downloads the shard, too. A wait longer than ``lock_timeout`` is an error.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace

from shardcache import clock
from shardcache.config import Config
from shardcache.download.download import Download
from shardcache.errors import LockTimeoutError
from shardcache.files import is_directory
from shardcache.layout import Layout, parse_partial_name
from shardcache.locks.keys import Holder, read_holder
from shardcache.locks.sessions import Session
from shardcache.store.partial import Progress, read_progress
from shardcache.units import format_bytes, format_duration

__all__ = ["Waiter"]

logger = logging.getLogger(__name__)

#: Seconds between two polls. They begin short, because the download may be about to end, and grow,
#: because many processes may wait for a long time, and each poll opens two files.
_FIRST_POLL = 0.02
_LAST_POLL = 0.25
#: Seconds between two log records about a wait.
_ANNOUNCE_EVERY = 10.0
#: Seconds after which `shardcache top` shows a wait. Most waits are too short for people to see.
_NOTE_AFTER = 0.5


class Waiter:
    """One wait for the holder of one key's lock.

    Args:
        download: the download that waits.
        layouts: the namespaces that may contain the partial; the last one holds the lock.
        config: the options; ``stale_after`` and ``lock_timeout`` limit the wait.
        waiter: the record of this process.
    """

    def __init__(
        self, download: Download, layouts: list[Layout], config: Config, waiter: Holder
    ) -> None:
        self._download = download
        self._shard = download.shard
        self._layouts = layouts
        self._config = config
        self._poll = _FIRST_POLL
        self._started = self._grew = self._announced = clock.monotonic()
        self._waiter = replace(waiter, url=str(self._shard))
        self._note: Session | None = None
        self._holder, self._progress = self._read_holder()

    @property
    def is_stale(self) -> bool:
        """Whether the holder's partial has not grown for ``stale_after`` seconds."""
        return clock.monotonic() - self._grew >= self._config.stale_after

    def pause(self) -> None:
        """Sleep until the next poll.

        Raises:
            LockTimeoutError: the wait has lasted ``lock_timeout`` seconds.
            FetchCancelledError: the download was cancelled.
        """
        self._download.sleep(self._poll * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
        self._poll = min(self._poll * 1.5, _LAST_POLL)
        now, found = clock.monotonic(), self._read_holder()
        if found != (self._holder, self._progress):
            self._grew = now
        self._holder, self._progress = found
        waited = now - self._started
        if waited >= self._config.lock_timeout:
            raise LockTimeoutError(
                f"{self._shard} was not in the cache after {format_duration(waited)}: "
                f"{self.describe()}. Look at that process, or raise lock_timeout.",
                url=str(self._shard),
                holder=self._holder,
                waited=waited,
            )
        if now - self._announced >= _ANNOUNCE_EVERY:
            self._announced = now
            self._announce(waited)
        if waited >= _NOTE_AFTER and self._note is None:
            waits = self._shard.key, self._waiter
            self._note = Session(self._layouts[-1], self._waiter.started, waits)

    def close(self) -> None:
        """Remove the note about the wait."""
        if self._note is not None:
            self._note.close()

    def _read_holder(self) -> tuple[Holder | None, Progress | None]:
        holder = read_holder(self._layouts[-1].holder(self._shard.key))
        name = holder.partial if holder else None
        # Another program may have damaged the file, so only a valid name is used, never a path.
        if name is None or parse_partial_name(name) is None:
            return holder, None
        paths = [layout.partial / name for layout in self._layouts]
        partial = next((path for path in paths[:-1] if is_directory(path)), paths[-1])
        self._download.waiting(partial)
        return holder, read_progress(partial)

    def _announce(self, waited: float) -> None:
        """Log the wait. docs/observing.md describes the fields."""
        holder, progress = self._holder, self._progress
        facts = {
            "event": "waiting",
            "shard": str(self._shard),
            "seconds": waited,
            "holder_pid": holder.pid if holder else None,
            "holder_host": holder.host if holder else None,
            "holder_rank": holder.rank if holder else None,
            "written": progress.written if progress else None,
            "size": progress.total if progress else None,
        }
        text = "%s: waiting for %s, %s"
        logger.warning(text, self._shard, format_duration(waited), self.describe(), extra=facts)

    def describe(self) -> str:
        """Describe the holder of the lock, how long it has held it, and its progress."""
        holder, progress = self._holder, self._progress
        if holder is None:
            return "its lock is held by a process that left no record"
        age = format_duration(max(0.0, clock.time() - holder.started))
        text = f"{holder} has been downloading it for {age}"
        if progress is not None and progress.total:
            share = min(1.0, progress.written / progress.total)
            text += f", {share:.0%} of {format_bytes(progress.total)} done"
        still = clock.monotonic() - self._grew
        if still >= _ANNOUNCE_EVERY:
            text += f", no progress for {format_duration(still)}"
        return text
