"""The budget: which shards may be stored, and which are evicted first.

budget     reserves room for new shards: one file under the budget lock
eviction   plans which shards to evict; the shards that users pinned
memory     measures the space that filesystems and cgroups leave, and that a shard takes
"""
