"""Which entries go first, and which do not go at all.

    working-set   what running jobs use stays; of the rest, what was used longest ago goes first
    lru           what was used longest ago goes first
    fifo          what was fetched longest ago goes first

An epoch is one scan over the dataset, and evicting what this epoch has read to make room for what
it reads next gives a cache that never hits: with half of the data in it, LRU and FIFO hit not once
where shards come in order. So what was used since the oldest live session began stays, unless
nobody used it for ``protect_for``; a newcomer that finds no room is streamed. The first of two jobs
keeps its working set, the second one gets what is free.

Dates come from wall clocks, which can be wrong. A date in the future counts as long ago. A wrong
one costs an unlucky eviction, never what is being read or pinned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardcache.config import Config
from shardcache.layout import Layout
from shardcache.locks.sessions import live_sessions
from shardcache.space.pins import pinned_keys
from shardcache.store.entry import Entry

__all__ = ["Policy"]

#: Seconds by which clocks may differ. S3 refuses clocks that are off by more than 15 minutes.
SKEW = 3600.0


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy at one moment."""

    now: float  #: seconds since the epoch
    kind: Literal["working-set", "lru", "fifo"] = "working-set"
    since: float | None = None  #: what was used since then stays; None if nothing does for that
    pinned: frozenset[str] = frozenset()  #: keys that a user pinned

    @classmethod
    def of(cls, config: Config, node: Layout, now: float, *, jobs: bool = True) -> Policy:
        """The configured policy, for the jobs that run now; with ``jobs`` False, for none."""
        since = None
        if jobs and config.policy == "working-set" and (begun := live_sessions(node)):
            oldest = min(_past(date, now) for date in begun)
            since = max(oldest, now - config.protect_for)
        return cls(now, config.policy, since, pinned_keys(node, now))

    def last_used(self, entry: Entry) -> float:
        """When an entry was last used; 0 if its date cannot be."""
        return _past(entry.used, self.now)

    def protects(self, entry: Entry) -> bool:
        """Whether an entry stays because a running job uses it."""
        return self.since is not None and self.last_used(entry) >= self.since

    def keeps(self, entry: Entry) -> bool:
        """Whether an entry stays, whatever it costs."""
        return entry.key in self.pinned or self.protects(entry)


def _past(date: float, now: float) -> float:
    return date if date <= now + SKEW else 0.0
