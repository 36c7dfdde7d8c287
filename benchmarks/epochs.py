"""Training's side of it: epochs through WebDataset, and one cold shard for many processes.

``python -m benchmarks.epochs``: the cold epoch against streaming and against other caches, time
to its first sample, the warm epoch; and what eight processes that want one cold shard cost.
Fetches are counted in the server's own log, by who was sent the first byte of an object. Every
figure is of a fresh process and a fresh cache; shards lie in memory, the caches on ``--disk``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.buckets import BUCKET, PREFIX
from benchmarks.epochwork import WAYS
from benchmarks.peers import clean_environment, versions
from benchmarks.results import (
    Row,
    arguments_of,
    machine,
    median,
    picked,
    save,
    say,
    table,
    touched_pages,
)
from benchmarks.servers.links import ROOT, S3_DELAY, S3_RATE, TARGETS, Target, link

__all__ = ["main", "report"]

#: Of a sample: the size of a JPEG of ImageNet.
SAMPLE_BYTES = 100_000
LINKS = {"fast": (0.0, 0.0), "s3-like": (S3_DELAY, S3_RATE)}
#: Those that share a shard; streaming has nothing to share.
_SHARING = ("shardcache", "wds-filecache", "pipe-curl")
_PARTS = ("epochs", "sharing")
_PATIENCE = 900.0
#: Shards of an epoch, samples of a shard (640 of 100 KB make 64 MB), processes that want the same
#: shard; and the same with ``--quick``.
_SIZES, _QUICK = (32, 640, 8), (3, 20, 3)


def write_shards(home: Path, count: int, samples: int) -> list[str]:
    """Shards below ``home/BUCKET``; returns their keys."""
    (home / BUCKET).mkdir(parents=True)
    keys = [f"{number:05d}.tar" for number in range(count)]
    for number, key in enumerate(keys):
        noise = random.Random(number).randbytes(SAMPLE_BYTES + samples)
        with tarfile.open(home / BUCKET / key, "w", format=tarfile.USTAR_FORMAT) as out:
            for sample in range(samples):
                info = tarfile.TarInfo(f"{number:05d}-{sample:05d}.bin")
                info.size = SAMPLE_BYTES
                out.addfile(info, io.BytesIO(noise[sample : sample + SAMPLE_BYTES]))
    return keys


class _Bench:
    """One link, a directory for caches, and processes that work on them."""

    def __init__(self, target: Target, disk: Path, needed: int) -> None:
        self._target = target
        self._disk = disk
        self._needed = needed  # bytes that a run writes

    def work(
        self, task: str, way: str, keys: Sequence[str], *, processes: int = 1, steps: int = 1
    ) -> tuple[list[list[Row]], int]:
        """Run a task in so many processes on one fresh cache.

        Returns:
            What each of them found, by step, and how many object fetches the first one cost.
        """
        cache = self._disk / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        plan = self._disk / "plan.json"
        contents = {
            "way": way,
            "cache": str(cache),
            "endpoint": self._target.endpoint,
            "keys": list(keys),
            "urls": [self._target.http_url(key) for key in keys],
        }
        plan.write_text(json.dumps(contents), "utf-8")
        before = self._target.object_fetches()
        with contextlib.ExitStack() as stack:
            with touched_pages(self._disk, self._needed):
                crew = [stack.enter_context(self._process(task, plan)) for _ in range(processes)]
                for process in crew:
                    _line(process)
            found = [_step(crew)]
            fetches = self._target.object_fetches() - before
            found += [_step(crew) for _ in range(steps - 1)]
        shutil.rmtree(cache)
        return found, fetches

    @contextlib.contextmanager
    def _process(self, task: str, plan: Path) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.epochwork", task, str(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environment(self._target),
        ) as process:
            try:
                yield process
                assert process.stdin is not None
                process.stdin.close()  # there is no further step
                process.wait(_PATIENCE)
            finally:
                process.kill()


def _step(crew: Sequence[subprocess.Popen[str]]) -> list[Row]:
    """Let all of them go, and wait for what each of them found."""
    for process in crew:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [json.loads(_line(process)) for process in crew]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process of the benchmark failed")
    return line


def _epochs(
    bench: _Bench, keys: Sequence[str], samples: int, repeats: int, ways: Sequence[str]
) -> list[Row]:
    rows: list[Row] = [{"way": way, "title": WAYS[way][0], "runs": []} for way in ways]
    for number in range(repeats):
        turn = number % len(rows)
        for row in [*rows[turn:], *rows[:turn]]:
            ((found,),), fetches = bench.work("epochs", row["way"], keys)
            if {found[name]["samples"] for name in ("cold", "warm")} != {samples}:
                raise RuntimeError(f"{row['title']}: not {samples} samples: {found}")
            row["runs"].append({**found, "object_fetches": fetches})
            cold, warm = found["cold"], found["warm"]
            say(
                f"  {row['title']}: cold {cold['seconds']:.2f} s, first sample "
                f"{cold['first'] * 1000:.0f} ms, warm {warm['seconds']:.2f} s"
            )
    return rows


def _sharing(
    bench: _Bench, keys: Sequence[str], most: int, repeats: int, ways: Sequence[str]
) -> list[Row]:
    rows: list[Row] = []
    for processes in (1, most):
        for way in (way for way in _SHARING if way in ways):
            runs = []
            for _ in range(repeats):
                found, fetches = bench.work("read", way, keys[:1], processes=processes, steps=2)
                cold, again = (
                    max(each["ended"] for each in step) - min(each["began"] for each in step)
                    for step in found
                )
                runs.append({"seconds": cold, "again": again, "object_fetches": fetches})
            title = WAYS[way][0]
            rows.append({"way": way, "title": title, "processes": processes, "runs": runs})
            say(f"  {title}, {processes} processes: {runs[-1]}")
    return rows


def report(facts: Row) -> str:
    """The tables of a result, in Markdown."""
    return "\n\n".join(_link_report(group) for group in facts["groups"])


def _link_report(group: Row) -> str:
    def middle(row: Row, *path: str) -> float:
        values = []
        for run in row["runs"]:
            for name in path:
                run = run[name]
            values.append(float(run))
        return median(values)

    streaming = middle(group["epochs"][0], "cold", "seconds") if group["epochs"] else 1.0
    epochs = []
    for row in group["epochs"]:
        cells = [row["title"]]
        for name in ("cold", "warm"):
            seconds, first = middle(row, name, "seconds"), middle(row, name, "first")
            cells += [f"{seconds:.2f}", f"{seconds / streaming:.2f}", f"{first * 1000:.0f}"]
        epochs.append([*cells, f"{middle(row, 'object_fetches'):.0f}"])
    sharing = [
        [
            row["title"],
            str(row["processes"]),
            f"{middle(row, 'seconds'):.2f}",
            f"{middle(row, 'again'):.2f}",
            f"{middle(row, 'object_fetches'):.0f}",
        ]
        for row in group["sharing"]
    ]
    heads = ["", "cold epoch s", "x streaming", "first sample ms"]
    heads += ["warm epoch s", "x streaming", "first sample ms", "object fetches, both"]
    shards = f"{group['shards']} shards of {group['shard_bytes'] / 1e6:.0f} MB"
    titles = ["", "processes", "until the last has read it s", "once more s", "object fetches"]
    return (
        f"#### {shards}, {group['title']}\n\n{table(heads, epochs)}\n\n"
        f"#### One cold shard, {group['title']}\n\n{table(titles, sharing)}"
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a RAM disk")
    parser.add_argument("--disk", type=Path, help="for the caches (default: temporary directory)")
    arguments = arguments_of(parser)
    names, ways, parts = picked(arguments.only, LINKS, WAYS, _PARTS)
    shards, samples, processes = _QUICK if arguments.quick else _SIZES
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.ram) as ram,
        tempfile.TemporaryDirectory(prefix=PREFIX, dir=arguments.disk) as disk,
    ):
        facts: Row = {
            "machine": machine(caches=Path(disk)),
            "versions": versions(),
            "repeats": arguments.repeats,
            "quick": arguments.quick,
            "groups": [],
        }
        memory = Path(ram)
        keys = write_shards(memory, shards, samples)
        for name in names:
            say(title := TARGETS[name][0])
            delay, rate = LINKS[name]
            group: Row = {"link": name, "title": title, "shards": shards}
            group["shard_bytes"] = (memory / BUCKET / keys[0]).stat().st_size
            group |= {part: [] for part in _PARTS}
            with link(
                memory, memory, name=name, delay=delay, rate=rate, processes=2, log=True
            ) as target:
                bench = _Bench(target, Path(disk), shards * samples * SAMPLE_BYTES)
                repeats = arguments.repeats
                if "epochs" in parts:
                    group["epochs"] = _epochs(bench, keys, shards * samples, repeats, ways)
                if "sharing" in parts:
                    group["sharing"] = _sharing(bench, keys, processes, repeats, ways)
            facts["groups"].append(group)
            save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
