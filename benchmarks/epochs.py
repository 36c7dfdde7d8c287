"""Measure epochs through WebDataset, and processes that share one cold shard.

``python -m benchmarks.epochs`` compares a cold and a warm epoch, and the time to the first sample,
with streaming and with other caches. It also measures how long eight processes take to read the
same cold shard. The server counts the downloads. Over TLS, it measures fresh processes up to their
first sample. A cold epoch with work on each sample, as training has it, runs on one core. Each run
uses fresh processes and an empty cache. The shards are in memory, the caches on ``--disk``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.buckets import BUCKET, PREFIX, sample_archive
from benchmarks.epochwork import WAYS, WORK, amount, work
from benchmarks.peers import clean_environment, versions
from benchmarks.results import (
    ROOT,
    Row,
    arguments_of,
    begun,
    drawing,
    in_turn,
    picked,
    save,
    say,
    section,
    touched_pages,
)
from benchmarks.servers.links import LINKS, Target, link
from tests.support.storetools import Child, crowd

#: Bytes of a sample: those of an average JPEG of ImageNet.
SAMPLE_BYTES = 100_000
#: The ways that are measured with several processes.
_SHARING = ("shardcache", "wds-filecache", "pipe-curl")
_PARTS = ("epochs", "sharing", "starts", "work")
#: The link that is measured with TLS, and the ways of its fresh processes.
_TLS, _STARTS = "s3-like", ("pipe-curl", "shardcache")
#: Ways in the chart of the README, and the cells of its longest bar.
_CHARTED = {
    "pipe-curl": "streaming (pipe:curl)",
    "wds-filecache": "WebDataset cache_dir + curl",
    "shardcache": "shardcache",
}
_WIDTH = 45
#: Seconds after which a step has failed.
_TIMEOUT = 900.0
#: Shards of an epoch, samples of a shard (640 of 100 KB are 64 MB), and processes that read the
#: same shard; then the same for ``--quick``.
_SIZES, _QUICK = (32, 640, 8), (3, 20, 3)


def _write_shards(home: Path, count: int, samples: int) -> list[str]:
    """Write shards below ``home/BUCKET``, and return their keys."""
    (home / BUCKET).mkdir(parents=True)
    keys = [f"{number:05d}.tar" for number in range(count)]
    for number, key in enumerate(keys):
        shard = sample_archive(number * samples, samples, SAMPLE_BYTES, files=1)
        (home / BUCKET / key).write_bytes(shard)
    return keys


class _Bench:
    """Runs worker processes on one target with caches in one directory."""

    def __init__(self, target: Target, disk: Path, needed: int) -> None:
        self._target, self._disk = target, disk
        self._needed = needed  # bytes that a run writes

    def run(
        self,
        task: str,
        way: str,
        keys: Sequence[str],
        *,
        processes: int = 1,
        steps: int = 1,
        **more: object,
    ) -> tuple[list[list[Row]], int]:
        """Run a task in several processes, on a cache that is empty at first.

        Returns the figures of each process in each step, and the downloads of the first step.
        """
        plan = self._plan(task, way, keys) | more
        self._target.fetches.value = 0
        with contextlib.ExitStack() as stack:
            with touched_pages(self._disk, self._needed):
                workers = stack.enter_context(crowd(processes, work, plan))
                for worker in workers:
                    worker.hear(_TIMEOUT)
            figures = [_step(workers)]
            fetches = self._target.fetches.value
            figures += [_step(workers) for _ in range(steps - 1)]
        return figures, fetches

    def _plan(self, task: str, way: str, keys: Sequence[str]) -> Row:
        """Return the plan of a run, with an empty cache."""
        cache = self._disk / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        return {
            "task": task,
            "way": way,
            "cache": str(cache),
            "endpoint": self._target.endpoint,
            "environment": clean_environment(self._target),
            "keys": list(keys),
            "urls": [self._target.http_url(key) for key in keys],
        }

    def start(self, way: str, key: str) -> float:
        """Return the seconds of a fresh process that reads the first sample of a shard."""
        plan = self._plan("", way, [key])
        file = self._disk / "plan.json"
        file.write_text(json.dumps(plan), "utf-8")
        command = [sys.executable, "-m", "benchmarks.epochwork", str(file)]
        start = time.perf_counter()
        subprocess.run(command, env=plan["environment"], cwd=ROOT, check=True)
        return time.perf_counter() - start


def _step(workers: Sequence[Child]) -> list[Row]:
    """Let all workers do their next step, and return their figures."""
    for worker in workers:
        worker.tell()
    return [worker.hear(_TIMEOUT) for worker in workers]


def _epochs(bench: _Bench, keys: Sequence[str], samples: int, repeats: int) -> list[Row]:
    rows: list[Row] = [{"way": way, "title": WAYS[way][0], "runs": []} for way in WAYS]
    for number in range(repeats):
        for row in in_turn(rows, number):
            ((figures,),), fetches = bench.run("epochs", row["way"], keys)
            cold, warm = figures["cold"], figures["warm"]
            if {cold["samples"], warm["samples"]} != {samples}:
                raise RuntimeError(f"{row['title']}: not {samples} samples: {figures}")
            row["runs"].append({**figures, "object_fetches": fetches})
            say(
                f"  {row['title']}: cold {cold['seconds']:.2f} s, first sample "
                f"{cold['first'] * 1000:.0f} ms, warm {warm['seconds']:.2f} s"
            )
    return rows


def _sharing(bench: _Bench, keys: Sequence[str], most: int, repeats: int) -> list[Row]:
    rows: list[Row] = []
    for processes in (1, most):
        for way in _SHARING:
            runs = []
            for _ in range(repeats):
                figures, fetches = bench.run("read", way, keys[:1], processes=processes, steps=2)
                cold, again = (
                    max(each["end"] for each in step) - min(each["start"] for each in step)
                    for step in figures
                )
                runs.append({"seconds": cold, "again": again, "object_fetches": fetches})
            title = WAYS[way][0]
            rows.append({"way": way, "title": title, "processes": processes, "runs": runs})
            say(f"  {title}, {processes} processes: {cold:.2f} s, {fetches} downloads")
    return rows


def _starts(bench: _Bench, key: str, repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in _STARTS}
    for _ in range(repeats):
        for way in _STARTS:
            seconds[way].append(bench.start(way, key))
    return seconds


def _worked(bench: _Bench, keys: Sequence[str], repeats: int) -> Row:
    """Return the runs of `_STARTS` for each kind of work per sample."""
    rows: Row = {title: {way: [] for way in _STARTS} for title in WORK}
    for title, runs in rows.items():
        count = amount(title)
        for number in range(repeats):
            for way in in_turn(_STARTS, number):
                ((figures,),), _ = bench.run("work", way, keys, work=(title, count))
                runs[way].append(figures)
                say(f"  {title}, {WAYS[way][0]}: {figures['seconds']:.2f} s")
    return rows


def _work_report(name: str, kinds: Row) -> str:
    rows = []
    for title, runs in kinds.items():
        middles = {
            way: [median(run[name] for run in each) for name in ("seconds", "cpu_seconds")]
            for way, each in runs.items()
        }
        (curl, curl_cpu), (ours, cpu) = middles.values()
        speeds = [f"{curl:.2f}", f"{ours:.2f}", f"{curl / ours:.2f}", f"{cpu / curl_cpu:.2f}"]
        rows.append([title, *speeds])
    heads = ["work per sample", "pipe:curl s", "shardcache s", "times as fast", "x processor time"]
    return section(f"A cold epoch with work, one core, {name}", heads, rows)


def report(facts: Row) -> str:
    """Return the tables of a result in Markdown."""
    parts = [_link_report(group) for group in facts["groups"]]
    if "starts" in facts:
        middles = {WAYS[way][0]: median(each) for way, each in facts["starts"].items()}
        first = next(iter(middles.values()))
        rows = [[title, f"{each:.2f}", f"{each / first:.2f}"] for title, each in middles.items()]
        heads = ["", "whole process s", f"x {WAYS[_STARTS[0]][0]}"]
        title = f"The first sample of a fresh process, {LINKS[_TLS][0]}, TLS"
        parts.append(section(title, heads, rows))
    parts += [_work_report(name, kinds) for name, kinds in facts.get("work", {}).items()]
    return "\n\n".join(parts)


def summary(facts: Row) -> list[str]:
    """Return the main ratios as sentences."""
    link = s3_like(facts)
    cold, warm = (
        {row["way"]: middle_of(row, epoch, "seconds") for row in link["epochs"]}
        for epoch in ("cold", "warm")
    )
    downloads = {row["way"]: middle_of(row, "object_fetches") for row in link["sharing"]}
    processes = link["sharing"][-1]["processes"]  # the last rows are of the most processes
    curl, web, ours = (cold[way] for way in ("pipe-curl", "wds-filecache", "shardcache"))
    return [
        "Over a link like that of S3 (30 ms to the first byte, 80 MB/s per connection), the first "
        f"epoch through shardcache is {curl / ours:.0f} times as fast as streaming with curl, and "
        f"later epochs are {curl / warm['shardcache']:.0f} times as fast.",
        f"With WebDataset's own cache, the first epoch takes {web / curl:.2f} times as long as "
        f"streaming, and {processes} processes that read a new shard cost "
        f"{downloads['wds-filecache']:.0f} downloads; with shardcache, "
        f"{downloads['shardcache']:.0f}.",
    ]


def chart(facts: Row) -> str:
    """Return the chart of the README: the seconds of the epochs over the S3-like link."""
    bars = _bars(facts)
    longest = max(seconds for _, _, seconds in bars)
    lines = [
        f"{title:33}{epoch:13}{'█' * max(1, round(_WIDTH * seconds / longest))}  {seconds:.1f} s"
        for title, epoch, seconds in bars
    ]
    cores = f"{facts['machine']['cores']} cores"
    link = "S3-like link (30 ms to the first byte, 80 MB/s per connection)"
    return "\n".join([f"Time per epoch, {_shards(s3_like(facts))}, {cores}, {link}", "", *lines])


def draw(facts: Row, path: Path) -> None:
    """Draw the same chart as an SVG file."""
    bars = _bars(facts)
    labels = [f"{title}\n{epoch}" if title else epoch for title, epoch, _ in bars]
    colors = ["#d97706" if "epoch" in epoch else "#3b82c4" for _, epoch, _ in bars]
    with drawing(path, 4.8, 3) as figure:  # as wide as a phone shows it
        axes = figure.subplots()
        shown = axes.barh(range(len(bars)), [seconds for _, _, seconds in bars], color=colors)
        axes.set_yticks(range(len(bars)), labels)
        axes.bar_label(shown, fmt="%.1f s", padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title("Time per epoch, S3-like link", loc="left", fontsize=10)
        axes.tick_params(left=False)
        axes.xaxis.set_visible(False)
        axes.spines[:].set_visible(False)


def s3_like(facts: Row) -> Row:
    """Return the figures of the S3-like link."""
    groups: dict[str, Row] = {group["link"]: group for group in facts["groups"]}
    return groups["s3-like"]


def _shards(group: Row) -> str:
    return f"{group['shards']} shards of {group['shard_bytes'] / 1e6:.0f} MB"


def _bars(facts: Row) -> list[tuple[str, str, float]]:
    """Return the title, the epoch and the seconds of each bar of the chart."""
    bars: list[tuple[str, str, float]] = []
    for way, title in _CHARTED.items():
        row = next(each for each in s3_like(facts)["epochs"] if each["way"] == way)
        if way == "pipe-curl":
            bars.append((title, "every epoch", middle_of(row, "cold", "seconds")))
        else:
            bars.append((title, "first epoch", middle_of(row, "cold", "seconds")))
            bars.append(("", "later", middle_of(row, "warm", "seconds")))
    return bars


def middle_of(row: Row, *path: str) -> float:
    """Return the median of a figure of a row's runs."""
    values = []
    for run in row["runs"]:
        for name in path:
            run = run[name]
        values.append(float(run))
    return median(values)


def _link_report(group: Row) -> str:
    streaming = middle_of(group["epochs"][0], "cold", "seconds") if group["epochs"] else 1.0
    epochs = []
    for row in group["epochs"]:
        cells = [row["title"]]
        for name in ("cold", "warm"):
            seconds, first = middle_of(row, name, "seconds"), middle_of(row, name, "first")
            cells += [f"{seconds:.2f}", f"{seconds / streaming:.2f}", f"{first * 1000:.0f}"]
        epochs.append([*cells, f"{middle_of(row, 'object_fetches'):.0f}"])
    sharing = [
        [
            row["title"],
            str(row["processes"]),
            f"{middle_of(row, 'seconds'):.2f}",
            f"{middle_of(row, 'again'):.2f}",
            f"{middle_of(row, 'object_fetches'):.0f}",
        ]
        for row in group["sharing"]
    ]
    heads = ["", "cold epoch s", "x streaming", "first sample ms"]
    heads += ["warm epoch s", "x streaming", "first sample ms", "downloads, both epochs"]
    titles = ["", "processes", "until the last has read it s", "once more s", "downloads"]
    one = section(f"{_shards(group)}, {group['title']}", heads, epochs)
    if group["link"] != _TLS:  # without limits, all of them wait for the processors
        return one
    return one + "\n\n" + section(f"One cold shard, {group['title']}", titles, sharing)


def main() -> None:
    """Run the benchmark."""
    arguments = arguments_of(__doc__)
    names, parts = picked(arguments.only, LINKS, _PARTS)
    shards, samples, processes = _QUICK if arguments.quick else _SIZES
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.ram) as ram,
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.disk) as disk,
    ):
        facts = begun(arguments, caches=Path(disk))
        facts |= {"versions": versions(), "groups": [], "work": {}}
        memory = Path(ram)
        keys = _write_shards(memory, shards, samples)
        for name in names if {"epochs", "sharing"} & set(parts) else []:
            say(title := LINKS[name][0])
            group: Row = {"link": name, "title": title, "shards": shards}
            group["shard_bytes"] = (memory / BUCKET / keys[0]).stat().st_size
            group |= {part: [] for part in _PARTS}
            with link(memory, memory, name, processes=2) as target:
                bench = _Bench(target, Path(disk), shards * samples * SAMPLE_BYTES)
                if "epochs" in parts:
                    group["epochs"] = _epochs(bench, keys, shards * samples, arguments.repeats)
                if "sharing" in parts:
                    group["sharing"] = _sharing(bench, keys, processes, arguments.repeats)
            facts["groups"].append(group)
            save(arguments.json, facts)
        for tls in (False, True) if {"starts", "work"} & set(parts) else ():
            with link(memory, memory, _TLS, processes=2, tls=tls) as target:
                bench = _Bench(target, Path(disk), shards * samples * SAMPLE_BYTES)
                if tls and "starts" in parts:
                    facts["starts"] = _starts(bench, keys[0], arguments.repeats)
                if "work" in parts:
                    title = LINKS[_TLS][0] + ", TLS" * tls
                    third = keys[: -(-len(keys) // 3)]  # all of them take an hour
                    facts["work"][title] = _worked(bench, third, arguments.repeats)
            save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
