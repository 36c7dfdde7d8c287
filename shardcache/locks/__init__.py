"""Locks between processes, and records of the processes that are alive.

    flock        locks of keys and of the node, which the kernel frees when their holder dies
    lease        locks of keys for all nodes that share a network filesystem
    mounts       the type of a path's filesystem, which determines the kind of lock
    downloaders  the number of caches on this node that are downloading
    sessions     live processes that use the cache, and those that wait for a download
    notices      warnings that appear once in a process, or once per job and node

Locks only save bandwidth: readers get the right bytes even if the locks do not work.
"""
