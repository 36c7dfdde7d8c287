"""Fill a cache before a job starts, on this node or, with `ray`, on every node of a Ray cluster.

`plan` compares shards with the cache, `run` downloads; `shardcache.results` has the results.
"""

from shardcache.prewarm.plan import expand
from shardcache.prewarm.run import prewarm

__all__ = ["expand", "prewarm"]
