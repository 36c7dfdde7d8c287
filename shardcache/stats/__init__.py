"""Statistics of all processes of a node: opens, bytes, waits, evictions.

`counters` counts in memory, `database` stores the counts in ``stats.db``, and `summary` adds them
up, also as the metrics that Prometheus receives.
"""
