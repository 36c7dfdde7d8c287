"""What a cache has done: opens, bytes, waits, evictions, by all processes of a node.

`counters` counts in memory, `database` keeps it in ``stats.db``, `summary` adds it up, and
`metrics` names it for Prometheus and OpenTelemetry. The room uses `layout` and what is below it.
"""
