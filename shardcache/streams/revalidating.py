"""Which version of a shard a job reads, where ``revalidate`` has origins asked.

    the job reads a version already (`choices`), and it is there -----> that one
      | it has not begun to, or what it read was evicted
    the newest entry: fetched or found current lately enough ---------> that one
      | no                     one process asks, the others wait
    the origin: it has an entry's version ----------------------------> that one
                it has another -------------------> fetched, beside the older one
                it cannot be asked, or has none --> the newest entry, one warning

So a shard costs a request when a job first opens it, and none afterwards: what a job began to
read it reads to its end. With ``strict`` what cannot be asked for is raised instead. Prewarming
asks for nothing unless told to (`outdated`).

Safe between threads and across forks, as `reading.Opener` is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import ConfigError, ShardCacheError, TransferError
from shardcache.fetch.currency import UnnamedError
from shardcache.runtime import Process
from shardcache.store.entry import Entry
from shardcache.store.metadata import DamagedError
from shardcache.store.store import Opened
from shardcache.streams.opener import Opener
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.coordinator import Obtained
    from shardcache.fetch.transfer import FetchStatus

__all__ = ["RevalidatingOpener", "outdated"]

logger = logging.getLogger(__name__)

#: Seconds that a process waits for another one's question about the same shard, and between
#: two looks. Longer than an answer takes; an origin that gives none is asked by each.
_PATIENCE = 10.0
_POLL = 0.01


class RevalidatingOpener(Opener):
    """See the module; arguments as those of `reading.Opener`."""

    def __init__(self, config: Config, here: Callable[[], Process], clock: Clock) -> None:
        super().__init__(config, here, clock)
        self._most = config.revalidate if isinstance(config.revalidate, float) else None
        #: When a shard was first wanted; what was found out since need not be asked again.
        self._wanted: dict[str, float] = {}

    def _hit(self, process: Process, shard: ShardURL) -> Opened | None:
        if process.choices.knows(shard.key):
            opened = super()._hit(process, shard)
            if opened is not None:
                return opened
        self._decide(process, shard)
        return super()._hit(process, shard)

    def obtain(
        self, shard: ShardURL, status: FetchStatus | None = None, *, use: bool = True
    ) -> Obtained:
        """See `reading.Opener.obtain`; what is not used is not asked for."""
        if use:
            self._decide(self._here(), shard)
        return super().obtain(shard, status, use=use)

    def _decide(self, process: Process, shard: ShardURL) -> None:
        """Choose one of the entries, or see to it that none is used."""
        if not process.reading.closed:
            return  # the disk is left alone, or tried by who opens the shard
        since = self._wanted.setdefault(shard.key, self._clock.time())
        try:
            process.coordinator()
            if not self._decided(process, shard, since):
                with self._turn(process, shard, since) as late:
                    if not late:
                        self._ask(process, shard)
        except OSError as exn:
            if isinstance(exn, ShardCacheError):
                raise
            logger.debug("%s: %s", shard, exn)  # who opens it sees it, too, and deals with it

    def _decided(self, process: Process, shard: ShardURL, since: float) -> bool:
        """Choose without a request, if that can be."""
        choices, found = process.choices, _entries(process, shard.key)
        chosen = choices.version(shard.key)
        if chosen is not None:
            if any(entry.version == chosen for entry in found):
                choices.note(shard.key, chosen)
                return True
            choices.lose(shard.key)
        # An object that is named by its version is not replaced.
        fixed = shard.scheme == "pipe" or shard.version_id
        if not found:
            return True
        if fixed or self._is_fresh(process, found[0], since):
            choices.note(shard.key, found[0].version)
            return True
        if len(found) == 1 and process.currency.known(found[0], self._oldest(since)) is False:
            _pass_over(process, shard.key, found)
            return True
        return False

    def _oldest(self, since: float) -> float:
        """From when on an answer counts."""
        return since if self._most is None else min(since, self._clock.time() - self._most)

    def _is_fresh(self, process: Process, entry: Entry, since: float) -> bool:
        oldest = self._oldest(since)
        known = process.currency.known(entry, oldest)
        if known is not None:
            return known
        try:
            return oldest <= entry.metadata().fetched_at <= self._clock.time()
        except (DamagedError, OSError):
            return True  # nothing to compare; who opens it sets it aside, and it is fetched

    @contextlib.contextmanager
    def _turn(self, process: Process, shard: ShardURL, since: float) -> Iterator[bool]:
        """Be the one process of the node that asks; True if another one just did."""
        end = self._clock.monotonic() + _PATIENCE
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    sole = process.coordinator().sole(process.home.store, shard.key)
                    alone = stack.enter_context(sole)
                except OSError as exn:  # a cache that cannot be written; some may ask twice
                    logger.debug("%s: asking without a lock: %s", shard, exn)
                    alone = True
                if alone:
                    yield self._decided(process, shard, since)
                    return
                stack.pop_all().close()
                self._clock.sleep(_POLL)
                if self._decided(process, shard, since):
                    yield True
                    return
                if self._clock.monotonic() >= end:  # it fetches, or is stopped
                    yield False
                    return

    def _ask(self, process: Process, shard: ShardURL) -> None:
        found = _entries(process, shard.key)
        if not found:
            return
        try:
            current = process.currency.current(shard, found)
        except UnnamedError:
            process.warn(
                "unnamed versions",
                "%s: its origin states nothing that tells versions apart; what is cached is read",
                shard,
            )
            current = found[0]
        except (ShardCacheError, ConfigError) as exn:
            if self._config.strict:
                raise
            kind = "revalidate" if isinstance(exn, TransferError) else type(exn).__name__
            process.warn(
                kind,
                "%s cannot be confirmed by its origin, and is read as it is cached: %s",
                shard,
                exn.message,
            )
            current = found[0]
        if current is not None:
            process.choices.note(shard.key, current.version)
            return
        logger.info("%s: its origin has another version, which is fetched", shard)
        _pass_over(process, shard.key, found)


def outdated(process: Process, shard: ShardURL) -> frozenset[str]:
    """Versions of a shard on disk, if its origin has none of them any more; else nothing.

    Raises:
        ShardNotFoundError, AccessDeniedError, ConfigError, TransferError: it cannot be asked.
        OSError: the disk fails.
    """
    process.coordinator()
    found = _entries(process, shard.key)
    if not found or shard.scheme == "pipe" or shard.version_id:
        return frozenset()
    try:
        if process.currency.current(shard, found) is not None:
            return frozenset()
    except UnnamedError:
        return frozenset()
    return frozenset(entry.version for entry in found)


def _entries(process: Process, key: str) -> Sequence[Entry]:
    """The entries of a shard, of all tiers and namespaces, the newest first."""
    found = [
        (entry.published, entry) for store in process.stores() for entry in store.entries_of(key)
    ]
    return [entry for _, entry in sorted(found, key=lambda one: one[0], reverse=True)]


def _pass_over(process: Process, key: str, found: Sequence[Entry]) -> None:
    process.pass_over(key, frozenset(entry.version for entry in found))
