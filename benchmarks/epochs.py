"""Training's side of it: epochs through WebDataset, one cold shard for many processes, prewarming.

``python -m benchmarks.epochs``: the cold epoch against streaming and against other caches, time
to its first sample, the warm epoch; what eight processes that want one cold shard cost; and
1,000 shards prewarmed. Fetches are counted in the server's own log, by who was sent the first
byte of an object. Every figure is of a fresh process and a fresh cache; shards lie in memory,
the caches on ``--disk``.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.buckets import BUCKET, PREFIX
from benchmarks.epochwork import WAYS
from benchmarks.peers import clean_environment, versions
from benchmarks.results import Row, end_in_order, machine, median, save, say, table, touched_pages
from benchmarks.servers import network
from benchmarks.servers.links import ROOT, S3_DELAY, S3_RATE, TARGETS, Target, link

__all__ = ["LINKS", "Sizes", "main", "report"]

#: Of a sample: the size of a JPEG of ImageNet.
SAMPLE_BYTES = 100_000
LINKS = {"fast": (0.0, 0.0), "s3-like": (S3_DELAY, S3_RATE)}
#: Who is asked to share a shard; streaming has nothing to share.
_SHARING = ("shardcache", "wds-filecache", "pipe-curl")
_PARTS = ("epochs", "sharing", "prewarm")
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything.

    Attributes:
        shards: of an epoch.
        samples: of a shard; 640 of 100 KB make 64 MB.
        processes: that want the same shard.
        prewarmed: shards that are prewarmed.
        samples_each: of those.
    """

    shards: int = 32
    samples: int = 640
    processes: int = 8
    prewarmed: int = 1000
    samples_each: int = 10


QUICK = Sizes(shards=3, samples=20, processes=3, prewarmed=10, samples_each=2)


def write_shards(home: Path, name: str, count: int, samples: int) -> list[str]:
    """Shards below ``home/BUCKET/name``; returns their keys."""
    folder = home / BUCKET / name
    folder.mkdir(parents=True)
    for number in range(count):
        noise = random.Random(number).randbytes(SAMPLE_BYTES + samples)
        with tarfile.open(folder / f"{number:05d}.tar", "w", format=tarfile.USTAR_FORMAT) as out:
            for sample in range(samples):
                info = tarfile.TarInfo(f"{number:05d}-{sample:05d}.bin")
                info.size = SAMPLE_BYTES
                out.addfile(info, io.BytesIO(noise[sample : sample + SAMPLE_BYTES]))
    return [f"{name}/{number:05d}.tar" for number in range(count)]


class _Bench:
    """One link, a directory for caches, and processes that work on them."""

    def __init__(
        self, target: Target, disk: Path, options: dict[str, Any], needed: int = 0
    ) -> None:
        self._target = target
        self._needed = needed  # bytes that a run writes
        self._disk = disk
        self._options = options

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
        told = {
            "way": way,
            "cache": str(cache),
            "endpoint": self._target.endpoint,
            "keys": list(keys),
            "urls": [self._target.http_url(key) for key in keys],
            "options": self._options,
        }
        plan.write_text(json.dumps(told), "utf-8")
        before = self._fetches()
        with contextlib.ExitStack() as stack:
            with touched_pages(self._disk, self._needed):
                crew = [stack.enter_context(self._process(task, plan)) for _ in range(processes)]
                for process in crew:
                    _line(process, "ready")
            found = [_step(crew)]
            fetches = self._fetches() - before
            found += [_step(crew) for _ in range(steps - 1)]
        shutil.rmtree(cache)
        return found, fetches

    def _fetches(self) -> int:
        return sum(self._target.object_fetches().values())

    @contextlib.contextmanager
    def _process(self, task: str, plan: Path) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.epochwork", task, str(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=clean_environment(self._target),
        )
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()  # there is no further step
            process.wait(_PATIENCE)
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _step(crew: Sequence[subprocess.Popen[str]]) -> list[Row]:
    """Let all of them go, and wait for what each of them found."""
    for process in crew:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [json.loads(_line(process)) for process in crew]


def _line(process: subprocess.Popen[str], wanted: str = "") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line or (wanted and line.strip() != wanted):
        raise RuntimeError(f"a process of the benchmark failed; it said {line!r}")
    return line


def choose(only: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The links, the ways and the parts that ``--only`` asks for, each all if none is named.

    Raises:
        SystemExit: a name that is none of ours.
    """
    kinds = (tuple(LINKS), tuple(WAYS), _PARTS)
    unknown = sorted(set(only) - {name for kind in kinds for name in kind})
    if unknown:
        raise SystemExit(f"--only: unknown {', '.join(unknown)}. Known: {kinds}")
    links, ways, parts = ([name for name in kind if name in only] or list(kind) for kind in kinds)
    return links, ways, parts


def _epochs(
    bench: _Bench, keys: Sequence[str], sizes: Sizes, repeats: int, ways: Sequence[str]
) -> list[Row]:
    rows: list[Row] = [{"way": way, "title": WAYS[way][0], "runs": []} for way in ways]
    for number in range(repeats):
        turn = number % len(rows)
        for row in [*rows[turn:], *rows[:turn]]:
            ((found,),), fetches = bench.work("epochs", row["way"], keys)
            for name in ("cold", "warm"):
                samples = found[name]["samples"]
                if samples != sizes.shards * sizes.samples:
                    raise RuntimeError(f"{row['title']}: {samples} samples in a {name} epoch")
            row["runs"].append({**found, "object_fetches": fetches})
            cold, warm = found["cold"], found["warm"]
            say(
                f"  {row['title']}: cold {cold['seconds']:.2f} s, first sample "
                f"{cold['first'] * 1000:.0f} ms, warm {warm['seconds']:.2f} s"
            )
    return rows


def _sharing(
    bench: _Bench, keys: Sequence[str], sizes: Sizes, repeats: int, ways: Sequence[str]
) -> list[Row]:
    rows: list[Row] = []
    for processes in (1, sizes.processes):
        for way in (way for way in _SHARING if way in ways):
            runs = []
            for _ in range(repeats):
                found, fetches = bench.work("read", way, keys[:1], processes=processes, steps=2)
                cold, again = (
                    max(each["ended"] for each in step) - min(each["begun"] for each in step)
                    for step in found
                )
                runs.append({"seconds": cold, "again": again, "object_fetches": fetches})
            title = WAYS[way][0]
            rows.append({"way": way, "title": title, "processes": processes, "runs": runs})
            say(f"  {title}, {processes} processes: {runs[-1]}")
    return rows


def _prewarm(bench: _Bench, keys: Sequence[str], repeats: int) -> list[Row]:
    runs = []
    for _ in range(repeats):
        ((found,),), fetches = bench.work("prewarm", "shardcache", keys)
        if (found["cold"]["fetched"], found["warm"]["cached"]) != (len(keys), len(keys)):
            raise RuntimeError(f"prewarm: {found}")
        runs.append({**found, "object_fetches": fetches})
        say(f"  prewarm: {runs[-1]}")
    return [{"title": f"prewarm of {len(keys):,} shards", "shards": len(keys), "runs": runs}]


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
    epochs = [
        [
            row["title"],
            f"{middle(row, 'cold', 'seconds'):.2f}",
            f"{middle(row, 'cold', 'seconds') / streaming:.2f}",
            f"{middle(row, 'cold', 'first') * 1000:.0f}",
            f"{middle(row, 'warm', 'seconds'):.2f}",
            f"{middle(row, 'warm', 'seconds') / streaming:.2f}",
            f"{middle(row, 'warm', 'first') * 1000:.0f}",
            f"{middle(row, 'object_fetches'):.0f}",
        ]
        for row in group["epochs"]
    ]
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
    prewarmed = [
        [
            row["title"],
            f"{middle(row, 'cold', 'seconds'):.2f}",
            f"{middle(row, 'warm', 'seconds'):.2f}",
            f"{middle(row, 'object_fetches'):.0f}",
        ]
        for row in group["prewarm"]
    ]
    heads = ["", "cold epoch s", "x streaming", "first sample ms"]
    heads += ["warm epoch s", "x streaming", "first sample ms", "object fetches, both"]
    return "\n\n".join(
        [
            f"#### {group['shards']} shards of {group['shard_bytes'] / 1e6:.0f} MB, "
            f"{group['title']}",
            table(heads, epochs),
            f"#### One cold shard, {group['title']}",
            table(
                ["", "processes", "until the last has read it s", "once more s", "object fetches"],
                sharing,
            ),
            f"#### Prewarming, {group['title']}",
            table(["", "cold s", "again s", "object fetches"], prewarmed),
        ]
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, help="rounds (default 3, with --quick 1)")
    parser.add_argument("--quick", action="store_true", help="small shards, to see that it runs")
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a RAM disk")
    parser.add_argument("--disk", type=Path, help="for the caches (default: temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    end_in_order()
    names, ways, parts = choose([name for name in arguments.only.split(",") if name])
    sizes = QUICK if arguments.quick else Sizes()
    repeats = arguments.repeats or (1 if arguments.quick else 3)
    network_state = network.enter()
    with contextlib.ExitStack() as stack:

        def own(parent: Path | None) -> Path:
            made = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
            return Path(stack.enter_context(made))

        memory, disk = own(arguments.ram), own(arguments.disk)
        facts: Row = {
            "machine": machine(disk),
            "network": network_state,
            "versions": versions(),
            "repeats": repeats,
            "quick": arguments.quick,
            "groups": [],
        }
        facts["machine"]["filesystems"] = {
            "caches": facts["machine"]["filesystems"][str(disk)],
        }
        keys = write_shards(memory, "epoch", sizes.shards, sizes.samples)
        many = write_shards(memory, "many", sizes.prewarmed, sizes.samples_each)
        for name in names:
            title = TARGETS[name][0]
            say(title)
            delay, rate = LINKS[name]
            with link(
                memory, memory, name=name, delay=delay, rate=rate, processes=2, log=True
            ) as target:
                bench = _Bench(target, disk, {}, sizes.shards * sizes.samples * SAMPLE_BYTES)
                group: Row = {
                    "link": name,
                    "title": title,
                    "shards": len(keys),
                    "shard_bytes": (memory / BUCKET / keys[0]).stat().st_size,
                    "epochs": [],
                    "sharing": [],
                    "prewarm": [],
                }
                if "epochs" in parts:
                    group["epochs"] = _epochs(bench, keys, sizes, repeats, ways)
                if "sharing" in parts:
                    group["sharing"] = _sharing(bench, keys, sizes, repeats, ways)
                if "prewarm" in parts:
                    group["prewarm"] = _prewarm(bench, many, repeats)
            facts["groups"].append(group)
            save(arguments.json, facts)
    print(report(facts))


if __name__ == "__main__":
    main()
