"""Fill a cache before a job starts, on this node or, with `ray`, on every node of a Ray cluster.

`plan` compares shards with the cache, `run` downloads, and `results` has what they report.
"""

from shardcache.prewarm.plan import Share, expand
from shardcache.prewarm.results import (
    Event,
    Finished,
    Outcome,
    Planned,
    PrewarmPlan,
    PrewarmReport,
    ShardResult,
    Started,
    Stopped,
)
from shardcache.prewarm.run import prewarm

__all__ = [
    "Event",
    "Finished",
    "Outcome",
    "Planned",
    "PrewarmPlan",
    "PrewarmReport",
    "ShardResult",
    "Share",
    "Started",
    "Stopped",
    "expand",
    "prewarm",
]
