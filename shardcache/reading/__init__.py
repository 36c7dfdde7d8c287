"""Reading a shard: one stream over the entry, a download or the origin.

    opener      opens the entry, or joins a download, or goes past the cache
    stream      what users read, over one reader at a time
    readers     a shard that is being downloaded, and a shard past the cache
    fallback    which reader replaces one that failed, and which warning says so
    lookahead   the next shards of a pipeline

The reader of a cached shard is `store.entry.Opened`. No reader knows the opener or another reader.
"""
