"""The metrics as text, for Prometheus and for OpenTelemetry collectors, which read it too.

The sums never fall, except after ``stats --zero``, which Prometheus treats as a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardcache.stats.counters import COUNTERS
from shardcache.stats.summary import OUTCOMES, Stats


def _by_suffix(prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): name for name in COUNTERS if name.startswith(prefix)}


#: Name -> help, name of the label ("" if there is one value), and value of the label -> counter.
#: The names never change, because dashboards depend on them.
METRICS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "opens": ("Shards opened.", "outcome", {name: name for name in OUTCOMES}),
    "opened_bytes": ("Bytes read from the cache.", "", {"": "bytes_opened"}),
    "received_bytes": ("Bytes received over the network.", "source",
                       {"origin": "bytes_origin", "upstream": "bytes_upstream"}),
    "bypassed_bytes": ("Bytes streamed, not stored.", "", {"": "bytes_bypassed"}),
    "stored_bytes": ("Bytes of shards stored.", "", {"": "bytes_stored"}),
    "fetches": ("Shards downloaded.", "", {"": "fetches"}),
    "fetches_failed": ("Downloads that failed.", "", {"": "fetches_failed"}),
    "retries": ("Requests that were repeated.", "", {"": "retries"}),
    "evictions": ("Entries evicted or removed.", "reason", _by_suffix("evicted_")),
    "evicted_bytes": ("Bytes of entries evicted or removed.", "", {"": "bytes_evicted"}),
    "errors": ("Errors.", "kind", _by_suffix("errors_")),
}  # fmt: skip


def exposition(stats: Stats, directory: str) -> str:
    """Return all metrics as text for the textfile collector of Prometheus' node exporter.

    The label ``dir`` is ``directory``. See prometheus.io/docs/instrumenting/exposition_formats.
    """
    lines: list[str] = []
    escaped = directory.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    def family(name: str, kind: str, help: str, values: Iterable[tuple[str, str, float]]) -> None:
        lines.append(f"# HELP shardcache_{name} {help}")
        lines.append(f"# TYPE shardcache_{name} {kind}")
        for suffix, labels, value in values:
            lines.append(f'shardcache_{name}{suffix}{{dir="{escaped}"{labels}}} {value:.17g}')

    for name, (about, label, counters) in METRICS.items():
        values = [
            ("", label and f',{label}="{value}"', getattr(stats, counter))
            for value, counter in counters.items()
        ]
        family(f"{name}_total", "counter", about, values)
    about = "How long readers waited for a shard, and for what."
    waits = [
        (f"_{name}", f',for="{wait}"', value)
        for wait, each in stats.waits.items()
        for name, value in (("sum", each.seconds), ("count", each.count))
    ]
    family("wait_seconds", "summary", about, waits)
    return "\n".join(lines) + "\n"
