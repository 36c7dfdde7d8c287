"""Who may act, and who is alive.

    flock      locks of keys, pins of entries: freed by the kernel when their holder dies
    lease      one fetch of a key for all nodes that share a network filesystem
    mounts     which filesystem a path is on, as the kernel tells it
    sessions   live processes that use the cache, and who waits for whom

It may use `shardcache.layout`, `shardcache.files` and what is below them.
"""
