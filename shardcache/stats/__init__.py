"""Statistics of all processes of a node: opens, bytes, waits, evictions.

`counters` counts in memory, `database` stores the counts in ``stats.db``, `summary` adds them up,
and `metrics` defines the metrics that Prometheus receives.
"""
