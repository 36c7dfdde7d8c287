"""What is on disk, and the only code that knows what is in its files.

    root       makes a directory a cache, and refuses one that others could tamper with
    entry      published shards: opened, pinned, published, set aside, evicted; their sidecars
    partial    a shard in flight, the record of which of its blocks are there, what the dead left
    digest     digests and checksums
    verify     whether what is stored is still what was fetched

It may use `shardcache.locks`, `shardcache.origins` and what is below them.
"""
