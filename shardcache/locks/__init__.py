"""Locks, and the processes that are alive.

    flock      locks of keys and of the node, which the kernel frees when their holder dies
    lease      one download of a key for all nodes that share a network filesystem
    mounts     the type of the filesystem that a path is on, and so the kind of lock
    sessions   live processes that use the cache, and those that wait for a download

Locks only save bandwidth: the bytes are right without them.
"""
