"""A process killed at every system call, and every call failing: the crash-point sweep.

    python -m tests.stress.crash

For each scenario (``--list``) one run under strace tells which system calls touch the
cache directory. Then the scenario is run anew for each of them, on a fresh copy of the
directory, and its process is

* killed (SIGKILL) before the call, and, where the call changes something, behind it;
* given each error that the call may answer: once, and for calls that nothing but the
  cache makes, from that call on.

After a kill a new process must read every shard at once, from the cache, with the right
bytes; no entry may look complete that is not; and a sweep must leave nothing but entries
and lock files. After an error the struck process itself must have read the right bytes,
with each warning once, and the same must hold for those after it.

Exit status 1 if anything is wrong, with scenario, call and what it was. ``--every N``
tries a sample, and always the calls around the rename that publishes.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tests.stress import machine
from tests.stress.crash.place import SHARDS
from tests.stress.crash.plan import Point, errors, kills, sampled
from tests.stress.crash.scenarios import SCENARIOS, Scenario
from tests.stress.crash.stage import Result, Stage
from tests.stress.crash.strace import unavailable

#: Exit status where nothing can be traced; as Automake's tests use it.
_SKIPPED = 77
_REPORT_EVERY = 500
#: Of launchers and of the library: nothing of the machine may reach a scenario.
_FOREIGN = (
    "AWS_", "GROUP_RANK", "LOCAL_RANK", "OMPI_", "PMI_", "RANK", "SHARDCACHE_", "SLURM_",
    "TORCHELASTIC_", "WDS_", "WORLD_SIZE",
)  # fmt: skip
_KINDS = {"before": "killed before", "after": "killed behind", "error": "failed", "on": "failed on"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    given = _parser().parse_args(arguments)
    if given.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:12} {scenario.about}")
        return 0
    reason = unavailable()
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return _SKIPPED
    chosen = [SCENARIOS[name] for name in given.scenario or SCENARIOS]
    begun = time.monotonic()
    results = _sweep(chosen, given)
    seconds = time.monotonic() - begun
    print(_table(results))
    rate = len(results) / seconds
    print(f"\n{len(results)} runs in {seconds:.0f} s, {rate:.0f} per second; {machine()}")
    bad = [result for result in results if result.wrong]
    for result in bad:
        print(f"\n{result.scenario}: {result.strike}: {result.call}", *result.wrong, sep="\n    ")
    if given.json:
        record = {"seconds": round(seconds, 1), "machine": machine(), "every": given.every}
        record["results"] = [asdict(result) for result in results]
        given.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 1 if bad else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, metavar="NAME")
    parser.add_argument("--part", choices=("kills", "errors"), help="only these; default: both")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="a sample of the points")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dir", type=Path, help="where caches are made; default: as tempfile's")
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    return parser


def _sweep(chosen: Sequence[Scenario], given: argparse.Namespace) -> list[Result]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and clean up
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    logging.getLogger().addHandler(logging.NullHandler())  # warnings are part of the play
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.dir)))
        endpoint = _serve(stack) if any(scenario.s3 for scenario in chosen) else None
        stage = Stage(home.resolve(), endpoint)
        points = _plan(stage, chosen, given)
        gc.freeze()  # or every child copies what the collector touches
        # Workers by fork: a stage needs no setting up, and no thread runs yet.
        context = multiprocessing.get_context("fork")
        pool = stack.enter_context(context.Pool(given.jobs, _start, (stage,)))
        return [
            result for done in _progress(pool.imap(_attempt, points), points) for result in done
        ]


def _serve(stack: ExitStack) -> str:
    from shardcache.cli.demo import S3Server

    server = stack.enter_context(S3Server())
    os.environ.update(server.environment())
    server.create_bucket("crash")
    for name, data in SHARDS.items():
        server.put("crash", name, data)
    return server.endpoint_url


def _plan(stage: Stage, chosen: Iterable[Scenario], given: argparse.Namespace) -> list[Point]:
    points = []
    for scenario in chosen:
        run = stage.prepare(scenario)
        every = given.every * scenario.stride
        for part, find in (("kills", kills), ("errors", errors)):
            if given.part in (None, part):
                points += sampled(list(find(scenario, run)), every)
    return points


_stage: Stage


def _start(stage: Stage) -> None:
    global _stage
    _stage = stage
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _attempt(point: Point) -> list[Result]:
    return list(_stage.attempt(point))


def _progress(done: Iterable[list[Result]], points: Sequence[Point]) -> Iterable[list[Result]]:
    """The same, and on standard error how far it is: often on a terminal, else now and then."""
    terminal = sys.stderr.isatty()
    for number, results in enumerate(done, 1):
        if terminal or number % _REPORT_EVERY == 0:
            line = f"{number:,} of {len(points):,}  {points[number - 1].scenario:12}"
            print(line, end="\r" if terminal else "\n", file=sys.stderr, flush=True)
        yield results


def _table(results: Sequence[Result]) -> str:
    """One line per scenario: how many of each kind were struck, missed, bad."""
    lines = [
        f"| scenario | {' | '.join(_KINDS.values())} | not reached | bad |",
        f"|---|{'---|' * (len(_KINDS) + 2)}",
    ]
    names = list(dict.fromkeys(result.scenario for result in results))
    for name in [*names, None]:
        rows = [result for result in results if name in (None, result.scenario)]
        struck = [result for result in rows if result.call is not None]
        counts = [sum(result.kind == kind for result in struck) for kind in _KINDS]
        missed = sum(result.call is None and result.kind != "end" for result in rows)
        figures = [*counts, missed, sum(bool(result.wrong) for result in rows)]
        lines.append(f"| {name or 'all'} | {' | '.join(f'{count:,}' for count in figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
