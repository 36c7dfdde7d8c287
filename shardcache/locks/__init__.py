"""Locks between processes, and records of the processes that are alive.

keys      locks of keys and of the node, by flock or by lease
mounts    the type of a path's filesystem, which determines the kind of lock
sessions  the processes that use the cache, and what a job has logged
"""
