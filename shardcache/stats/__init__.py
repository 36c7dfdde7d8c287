"""What a cache has done: opens, bytes, waits, evictions, by all processes of a node.

`counters` counts in memory, `database` keeps it in ``stats.db``, `summary` adds it up, `metrics`
names it for Prometheus and OpenTelemetry, `notices` has one process of a job speak for all. The
room uses `locks` and what is below it.
"""
