"""Bringing a shard into the cache.

    download    the state of one shard on its way, and the downloads of a process
    acquire     from a download to an open entry: lock, wait, link, resume, transfer, publish
    waiting     one wait for another process
    transfer    one version of one object into one partial
    pool        the connections of a process, and its limit of bytes per second

Calls go down. Results come back as return values, and as events that the worker of a download
reports to it.
"""
