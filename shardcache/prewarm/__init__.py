"""Filling a cache before a job: the plan, the run, and all nodes of a Ray cluster.

    from shardcache.prewarm import expand, prewarm

`plan` expands shard specifications and compares them with what is cached, `run` is a whole prewarm,
`pool` its threads, `helpers` its further processes; `ray` runs one on every node of a cluster.
Uses `cache` and the rooms below it; what a prewarm gives back is in `shardcache.results`.
"""

from shardcache.prewarm.plan import expand
from shardcache.prewarm.run import prewarm

__all__ = ["expand", "prewarm"]
