"""Bringing a shard into the cache.

download    the state of one download, and the table of the downloads of a process
worker      the attempts: lock, wait, link, first part, room, receive, publish
transfer    receiving one version of an object into a partial
connections the connections of a process, and its limit of bytes per second
"""
