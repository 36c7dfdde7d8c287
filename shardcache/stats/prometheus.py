"""What a cache has done, as Prometheus reads it.

The text format of the textfile collector: prometheus.io/docs/instrumenting/exposition_formats. Sums
only grow, apart from ``stats --zero``, which Prometheus takes for a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardcache.stats.counters import BUCKETS, COUNTERS, bucket_range
from shardcache.stats.summary import OUTCOMES, Stats

__all__ = ["exposition"]

#: Bounds of the histogram: every other octave is enough to see what readers wait for.
_STEP = 4
#: Name, counter, what it is.
_PLAIN = (
    ("opened_bytes", "bytes_opened", "Bytes of shards opened."),
    ("bypassed_bytes", "bytes_bypassed", "Bytes streamed, not stored."),
    ("fetches", "fetches", "Shards fetched."),
    ("fetches_failed", "fetches_failed", "Fetches that failed."),
    ("stored_bytes", "bytes_stored", "Bytes of shards stored."),
    ("retries", "retries", "Requests that were repeated."),
    ("evicted_bytes", "bytes_evicted", "Bytes of entries evicted or removed."),
)
#: Name, label, what the counters of its values begin with, what it is.
_LABELLED = (
    ("received_bytes", "source", "bytes_", ("bytes_origin", "bytes_upstream"),
     "Bytes that came over the network."),
    ("evicted", "reason", "evicted_", COUNTERS, "Entries evicted or removed, by reason."),
    ("errors", "kind", "errors_", COUNTERS, "Errors, by kind."),
    ("opens", "outcome", "", OUTCOMES, "Shards that were asked for, by what that came to."),
)  # fmt: skip


def exposition(found: Stats, directory: str) -> str:
    """All metrics, with the cache's directory as a label."""
    lines: list[str] = []
    escaped = directory.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    def family(name: str, kind: str, help: str, values: Iterable[tuple[str, str, float]]) -> None:
        lines.append(f"# HELP shardcache_{name} {help}")
        lines.append(f"# TYPE shardcache_{name} {kind}")
        for suffix, labels, value in values:
            lines.append(f'shardcache_{name}{suffix}{{dir="{escaped}"{labels}}} {value:.17g}')

    counts = found.counters
    for name, label, prefix, counters, about in _LABELLED:
        chosen = [each for each in counters if each.startswith(prefix)]
        values = [(f',{label}="{each.removeprefix(prefix)}"', counts[each]) for each in chosen]
        family(f"{name}_total", "counter", about, [("", *value) for value in values])
    for name, key, about in _PLAIN:
        family(f"{name}_total", "counter", about, [("", "", counts[key])])
    about = "How long readers waited for a shard, and for what."
    family("wait_seconds", "histogram", about, _histograms(found))
    return "\n".join(lines) + "\n"


def _histograms(found: Stats) -> Iterator[tuple[str, str, float]]:
    for wait, waits in found.waits.items():
        total = 0
        for bucket in range(BUCKETS):
            total += waits.buckets.get(bucket, 0)
            if bucket % _STEP == _STEP - 1:
                yield "_bucket", f',for="{wait}",le="{bucket_range(bucket)[1]:g}"', total
        yield "_bucket", f',for="{wait}",le="+Inf"', total
        yield "_sum", f',for="{wait}"', found.counters[f"wait_us_{wait}"] / 1e6
        yield "_count", f',for="{wait}"', total
