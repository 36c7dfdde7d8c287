"""Measure what the processes of a prewarm cost: ``python -m benchmarks.processes``.

A prewarm with one to four processes, all on one core, downloads shards from nginx with TLS on the
other core. If the processor time per GB stays the same, processes on cores of their own add up. So
the report reckons what a machine with many cores would reach.
"""

from __future__ import annotations

import os
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.buckets import BUCKET, PREFIX, WORKLOADS, Workload, write_bucket
from benchmarks.peers import clean_environment, measure
from benchmarks.results import Row, arguments_of, begun, save, say, table, touched_pages
from benchmarks.servers.links import Target, target

#: Numbers of processes that are measured, and cores of the machine that is reckoned.
_MEASURED, _CORES = (1, 2, 3, 4), 64
#: Bytes per second of a connection to S3, and connections that keep one process busy.
_CONNECTION, _CONNECTIONS = 80e6, 8


def _run(source: Target, workload: Workload, count: int, directory: Path) -> Row:
    """Run one prewarm with ``count`` processes on the first core, and return its figures."""
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os, sys; os.sched_setaffinity(0, [{core}]); from shardcache import Cache; "
        "from shardcache.prewarm.run import prewarm; "
        f"report = prewarm(Cache(sys.argv[1]), sys.argv[2:], jobs={32 * count}, processes={count});"
        "sys.exit(report.fetched != len(report.results))"
    )
    urls = [f"s3://{BUCKET}/{key}" for key in workload.keys]
    with touched_pages(directory, workload.total):
        pass
    with tempfile.TemporaryDirectory(dir=directory) as cache:
        command = [sys.executable, "-c", code, cache, *urls]
        costs = measure(command, clean_environment(source), directory)
    return {"seconds": costs["wall_seconds"], "cpu_seconds": costs["cpu_seconds"]}


def report(facts: Row) -> str:
    """Return the table of a result in Markdown, and the reckoning."""
    total, rows, costs = facts["bytes"], [], []
    for count, runs in facts["runs"].items():
        seconds, cpu = (median(run[name] for run in runs) for name in ("seconds", "cpu_seconds"))
        costs.append(cpu / total * 1e9)
        rows.append([count, f"{total / seconds / 1e6:.0f}", f"{costs[-1]:.2f}"])
    one = 1e9 / max(costs)  # bytes per second of one core
    reckoned = []
    for connections in (64, 256, 512):
        processes = min(_CORES, connections // _CONNECTIONS)
        cells = [processes * one, connections * _CONNECTION]
        reckoned.append([str(connections), str(processes), *(f"{c / 1e9:.1f}" for c in cells)])
    heads = ["`connections`", "processes", "the processes receive GB/s", "S3 sends GB/s"]
    return (
        f"{table(['processes', 'MB/s', 'CPU s per GB'], rows)}\n\n"
        f"Reckoned from the largest cost, not measured: a node with {_CORES} cores, at S3's "
        f"{_CONNECTION / 1e6:.0f} MB/s per connection. The lower of the two figures is what a "
        f"prewarm reaches, if the node's link carries it.\n\n{table(heads, reckoned)}"
    )


def main() -> None:
    """Run the benchmark."""
    options = arguments_of(__doc__, repeats=5)
    workload = WORKLOADS["shards"][options.quick]
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=options.ram) as ram:
        directory = Path(ram)
        runs: dict[str, list[Row]] = {str(count): [] for count in _MEASURED}
        facts = begun(options) | {"bytes": workload.total, "runs": runs}
        write_bucket(directory / "objects", [workload])
        with target("nginx-tls", directory / "objects", directory) as source:
            for _, (count, each) in product(range(options.repeats), runs.items()):
                each.append(_run(source, workload, int(count), directory))
                say(f"  {count} processes: {workload.total / each[-1]['seconds'] / 1e6:.0f} MB/s")
        save(options.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
