"""Fill a cache before a job starts, on this node or on every node of a Ray cluster.

    from shardcache.prewarm import expand, prewarm

`plan` expands shard specifications and compares the shards with the cache. `run` contains
`prewarm`, which makes a plan and carries it out with the threads and helper processes of a `pool`.
`ray` runs a prewarm on every node of a cluster. `shardcache.results` has the classes of results.
"""

from shardcache.prewarm.plan import expand
from shardcache.prewarm.run import prewarm

__all__ = ["expand", "prewarm"]
