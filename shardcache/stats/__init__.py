"""What a cache has done: opens, bytes, waits, evictions, by all processes of a node.

`counters` counts in memory, `database` keeps it in ``stats.db``, `summary` adds it up, and
`prometheus` prints it. This room uses the layout of the cache and nothing of the rooms above.
"""
