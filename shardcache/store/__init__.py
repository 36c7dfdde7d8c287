"""Entries and partials on disk. No other package knows the content of their files.

    root       makes a directory a cache, and refuses one that other users could tamper with
    entry      complete, published shards: opens, publishes, sets aside and evicts them
    partial    shards in flight, their journals, and the partials of dead processes
    directory  the directory of one shard: sidecar, data file, lock, removal
    digest     digests and checksums
    verify     compares entries with their digests

All functions here raise OSError if the disk fails.
"""
