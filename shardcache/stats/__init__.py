"""Statistics of all processes of a node: opens, bytes, waits, evictions.

`counters` counts in memory, `database` stores the counts in ``stats.db``, `summary` adds them up,
and `metrics` names them for Prometheus and OpenTelemetry. `notices` lets one process of a job warn
for all of them. The room uses `locks` and the rooms below it.
"""
