"""What a cache has done, as Prometheus reads it.

The text format of the textfile collector: prometheus.io/docs/instrumenting/exposition_formats. Sums
only grow, apart from `Cache.zero_stats`, which Prometheus takes for a restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardcache.stats.counters import BUCKETS, bucket_range
from shardcache.stats.summary import OUTCOMES, Stats

__all__ = ["exposition"]

#: Bounds of the histogram: every other octave is enough to see what readers wait for.
_STEP = 4
_SOURCES = {"origin": "bytes_origin", "upstream": "bytes_upstream"}


def exposition(found: Stats, directory: str) -> str:
    """All metrics, with the cache's directory as a label."""
    lines: list[str] = []
    label = f'dir="{_escaped(directory)}"'

    def family(name: str, kind: str, help: str, values: Iterable[tuple[str, str, float]]) -> None:
        lines.append(f"# HELP shardcache_{name} {help}")
        lines.append(f"# TYPE shardcache_{name} {kind}")
        for suffix, labels, value in values:
            inside = f"{label},{labels}" if labels else label
            lines.append(f"shardcache_{name}{suffix}{{{inside}}} {value:.17g}")

    def counter(name: str, help: str, values: Iterable[tuple[str, float]]) -> None:
        family(name, "counter", help, (("", labels, value) for labels, value in values))

    counts = found.counters
    counter(
        "opens_total",
        "Shards that were asked for, by what that came to.",
        ((f'outcome="{name}"', counts[name]) for name in OUTCOMES),
    )
    counter("opened_bytes_total", "Bytes of shards opened.", [("", counts["bytes_opened"])])
    counter(
        "received_bytes_total",
        "Bytes that came over the network.",
        ((f'source="{name}"', counts[key]) for name, key in _SOURCES.items()),
    )
    counter("bypassed_bytes_total", "Bytes streamed, not stored.", [("", counts["bytes_bypassed"])])
    counter("fetches_total", "Shards fetched.", [("", counts["fetches"])])
    counter("fetches_failed_total", "Fetches that failed.", [("", counts["fetches_failed"])])
    counter("stored_bytes_total", "Bytes of shards stored.", [("", counts["bytes_stored"])])
    counter("retries_total", "Requests that were repeated.", [("", counts["retries"])])
    counter("evicted_total", "Entries evicted or removed, by reason.", _labelled(found, "evicted_"))
    counter("evicted_bytes_total", "Bytes of those.", [("", counts["bytes_evicted"])])
    counter("errors_total", "Errors, by kind.", _labelled(found, "errors_"))
    family(
        "wait_seconds",
        "histogram",
        "How long readers waited for a shard, and for what.",
        _histograms(found),
    )
    return "\n".join(lines) + "\n"


def _labelled(found: Stats, prefix: str) -> Iterator[tuple[str, float]]:
    key = "reason" if prefix == "evicted_" else "kind"
    for name, count in found.counters.items():
        if name.startswith(prefix):
            yield f'{key}="{name.removeprefix(prefix)}"', count


def _histograms(found: Stats) -> Iterator[tuple[str, str, float]]:
    for wait, waits in found.waits.items():
        total = 0
        for bucket in range(BUCKETS):
            total += waits.buckets.get(bucket, 0)
            if bucket % _STEP == _STEP - 1:
                yield "_bucket", f'for="{wait}",le="{bucket_range(bucket)[1]:g}"', total
        yield "_bucket", f'for="{wait}",le="+Inf"', total
        yield "_sum", f'for="{wait}"', found.counters[f"wait_us_{wait}"] / 1e6
        yield "_count", f'for="{wait}"', total


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
