"""The budget: which shards may be stored, and which are evicted first.

    budget     reserves room for new shards: one number under the budget lock
    eviction   plans which shards to evict
    pins       shards that users keep
    memory     the room that a filesystem and the cgroups leave
    tiers      one directory of a cache: its namespaces, session and budget
    clean      makes room on request, and in the background of a job

It uses `shardcache.stats` for the counters of a node.
"""
