"""Which entries go first, and which do not go at all.

    working-set   what running jobs use stays; of the rest, what was used longest ago goes first
    lru           what was used longest ago goes first
    fifo          what was fetched longest ago goes first

An epoch is one scan over the dataset, and evicting what this epoch has read to make room for
what it reads next gives a cache that never hits: with half of the data in it, LRU and FIFO hit
not once where shards come in order. So a running job keeps what it has: every entry used since
the oldest live session began (`sessions`), unless nobody used it for ``protect_for``. If nothing
may go, the newcomer is streamed. The first of two jobs therefore keeps its working set, and the
second one gets what is free. Last uses are dates and do not say whose use it was: what a job used
beside another one stays until that one ends, too, or nobody used it for ``protect_for``.

Where an object was replaced and both versions are there, the older one goes before anything else:
nobody is given it any more.

What a user pinned (`pins`), and what is being read, goes by no policy.

Last uses and starts of sessions are dates, and clocks can be wrong and be set. What can be read,
and whether it is right, never depends on them; what goes first does. A date in the future says
nothing: such an entry goes first and is not kept for a session, unless the session began in that
future too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardcache.config import Config
from shardcache.layout import Layout
from shardcache.locks.sessions import live_sessions
from shardcache.space.pins import pinned_keys
from shardcache.store.entry import Entry

__all__ = ["Policy", "is_dated", "tells_time"]

#: Seconds by which clocks may differ, and be set, without a date counting as wrong. S3
#: itself refuses clocks that are off by more than 15 minutes (RequestTimeTooSkewed).
SKEW = 3600.0
#: 2025-01-01. Nothing of ours is older than the library: a session that says so began
#: before the machine knew the time.
_LIBRARY = 1_735_689_600.0
#: Seconds that count as "since the session began" where its date is wrong.
_SESSION = 86_400.0


def tells_time(now: float) -> bool:
    """Whether the machine knows the time."""
    return now >= _LIBRARY


def is_dated(date: float, now: float) -> bool:
    """Whether a date can be: it does not lie in the future."""
    return date <= now + SKEW


@dataclass(frozen=True, slots=True)
class Policy:
    """See the module.

    Attributes:
        kind: which one.
        since: when the oldest live session began; None if there is none.
        recent: an entry that was last used before that may go; seconds since the epoch.
        pinned: keys that a user pinned.
    """

    kind: Literal["working-set", "lru", "fifo"] = "working-set"
    since: float | None = None
    recent: float = -math.inf
    pinned: frozenset[str] = frozenset()

    @classmethod
    def now(
        cls,
        config: Config,
        node: Layout,
        now: float,
        *,
        steady: float | None = None,
        jobs: bool = True,
    ) -> Policy:
        """The configured policy, for the jobs that run at this moment.

        Args:
            config: its options.
            node: the node's namespace of the root.
            now: seconds since the epoch.
            steady: likewise by a clock that was not set meanwhile, where there is one: what
                was used an hour ago is not taken for forgotten if the clock leaps by a year.
            jobs: whether what running jobs use is to stay; what is pinned stays.

        Raises:
            OSError: the filesystem is failing.
        """
        pinned = pinned_keys(node, now)
        if config.policy != "working-set" or not jobs:
            return cls(config.policy, pinned=pinned)
        return cls(
            config.policy,
            min(live_sessions(node), default=None),
            min(now, now if steady is None else steady) - config.protect_for,
            pinned,
        )

    def superseded(self, entries: Sequence[Entry]) -> frozenset[Entry]:
        """Those that have a newer version beside them."""
        if len({entry.key for entry in entries}) == len(entries):
            return frozenset()
        versions: dict[str, list[Entry]] = {}
        for entry in entries:
            versions.setdefault(entry.key, []).append(entry)
        found: set[Entry] = set()
        for several in versions.values():
            if len({entry.version for entry in several}) > 1:
                newest = max(several, key=lambda one: one.published).version
                found |= {one for one in several if one.version != newest}
        return frozenset(one for one in found if one.key not in self.pinned)

    def keeps(self, entry: Entry, now: float) -> bool:
        """Whether an entry stays, whatever it costs."""
        return entry.key in self.pinned or self.protects(entry.used, now)

    def protects(self, used: float, now: float) -> bool:
        """Whether an entry that was last used then stays because a running job uses it."""
        if self.kind != "working-set" or not _falls_into(used, self.since, now):
            return False
        return used > self.recent


def _falls_into(used: float, since: float | None, now: float) -> bool:
    """Whether a use falls into the time of the sessions, as far as dates can tell."""
    if since is None:
        return False
    if not is_dated(used, now):
        return not is_dated(since, now) and used >= since  # the clock was set back meanwhile
    if not is_dated(since, now) or since < _LIBRARY <= now:
        since = now - _SESSION
    return used >= since
