"""What a process tells the statistics: opens, fetches, evictions.

A thing that happened is counted once, under one name of `statfile`, by the process in which
it happened. Hits alone are counted by `process.Process.count_hit`, which has nothing to look up.
Safe between threads, as `counters` is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardcache.clock import Clock
from shardcache.layout import Layout
from shardcache.ranks import Ranks
from shardcache.stats.counters import Counters
from shardcache.stats.fetchlog import Fetch, note_fetch
from shardcache.units import format_bytes, format_duration
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.fetch.blocks import FetchStatus
    from shardcache.space.eviction import Victim

__all__ = ["Tally"]

logger = logging.getLogger(__name__)

#: `coordination.Outcome` -> its counter, and what was waited for.
_OUTCOMES = {
    "hit": ("hits", "disk"),
    "linked": ("linked", "disk"),
    "coalesced": ("coalesced", "lock"),
    "fetched": ("misses", "network"),
}


class Tally:
    """The counters of one process, and what is added to them when.

    Args:
        where: the namespace whose files are to hold it; None where no statistics are wanted.
        clock: time.
        ranks: who we are.
        well: whether the disk is not left alone at the moment.
    """

    def __init__(
        self,
        where: Callable[[], Layout] | None,
        clock: Clock,
        ranks: Ranks,
        well: Callable[[], bool],
    ) -> None:
        self._where = where
        self._clock = clock
        self._rank = None if ranks.source == "none" else ranks.rank
        self._well = well
        self.counters = Counters(where, clock, {"rank": self._rank, "job": ranks.job}, well)

    def opened(self, outcome: str, size: int, seconds: float) -> None:
        """Count what an open came to that was no hit; see `stats`.

        Args:
            outcome: of `coordination.Outcome`.
            size: bytes of the shard.
            seconds: how long its reader waited.
        """
        name, wait = _OUTCOMES[outcome]
        self.counters.add({name: 1, "bytes_opened": size}, wait, seconds)

    def fetched(self, shard: ShardURL, status: FetchStatus, seconds: float, *, done: bool) -> None:
        """Count a fetch of this process.

        Args:
            shard: which.
            status: what is known of it.
            seconds: how long it took.
            done: whether all of it is there now.
        """
        self.counters.add(
            {
                "fetches" if done else "fetches_failed": 1,
                "fetches_upstream": int(done and status.near),
                "bytes_upstream" if status.near else "bytes_origin": status.received,
                "retries": status.retries,
                "bytes_stored": (status.size or status.written) if done else 0,
            }
        )
        if done:
            size, source = status.size or 0, "an upstream" if status.near else "its origin"
            logger.info(
                "%s: fetched %s from %s in %s",
                shard,
                format_bytes(size),
                source,
                format_duration(seconds),
                extra={
                    "event": "fetched",
                    "shard": str(shard),
                    "bytes": size,
                    "seconds": seconds,
                    "retries": status.retries,
                    "source": "upstream" if status.near else "origin",
                },
            )
        if done and self._where is not None and self._well():
            fetch = Fetch(self._clock.time(), status.size or 0, seconds, self._rank, str(shard))
            note_fetch(self._where(), fetch)

    def evicted(self, victim: Victim) -> None:
        """Count an entry that was evicted."""
        self.counters.add({f"evicted_{victim.reason.value}": 1, "bytes_evicted": victim.entry.size})
