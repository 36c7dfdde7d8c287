"""Locks between processes, and records of the processes that are alive.

keys      locks of keys and of the node, by flock or by lease
mounts    the type of a path's filesystem, which determines the kind of lock
sessions  live processes that use the cache, that wait for a download, and that download
"""
