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
#: Name, label, what the counters of its values begin with, the counters, what it is.
_SUMS = (
    ("opens", "outcome", "", OUTCOMES, "Shards that were asked for, by what that came to."),
    ("opened_bytes", "", "", ("bytes_opened",), "Bytes of shards opened."),
    ("received_bytes", "source", "bytes_", ("bytes_origin", "bytes_upstream"),
     "Bytes that came over the network."),
    ("bypassed_bytes", "", "", ("bytes_bypassed",), "Bytes streamed, not stored."),
    ("fetches", "", "", ("fetches",), "Shards fetched."),
    ("fetches_failed", "", "", ("fetches_failed",), "Fetches that failed."),
    ("stored_bytes", "", "", ("bytes_stored",), "Bytes of shards stored."),
    ("retries", "", "", ("retries",), "Requests that were repeated."),
    ("evicted", "reason", "evicted_", COUNTERS, "Entries evicted or removed, by reason."),
    ("evicted_bytes", "", "", ("bytes_evicted",), "Bytes of entries evicted or removed."),
    ("errors", "kind", "errors_", COUNTERS, "Errors, by kind."),
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

    for name, label, prefix, counters, about in _SUMS:
        values = [
            ("", label and f',{label}="{each.removeprefix(prefix)}"', getattr(found, each))
            for each in counters
            if each.startswith(prefix)
        ]
        family(f"{name}_total", "counter", about, values)
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
