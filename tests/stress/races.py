"""Races of training scripts, before and after: ``python -m tests.stress.races --runs 100``.

Replays the stories of ``tests/stress/racestories.py`` by real processes on several mounts of the
FUSE shim, each so many times with what scripts do and with `shardcache.sync`, and prints a
Markdown table of how often something went wrong. Needs ``/dev/fuse`` and the right to mount.
A hundred runs take about thirteen minutes on two cores; ``--slow 15`` has rank 0 late by as
much as in the story.
Exits with 1 if anything went wrong after, or nothing before.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.stress import machine
from tests.stress.fuse.shim import why_not
from tests.stress.racestories import STORIES, stage

#: Nodes in each story; ranks are dealt out to them.
_NODES = 4


def count(story: str, after: bool, runs: int, settings: dict[str, float]) -> Counter[str]:
    """How often a story went wrong, and the first complaint of each time."""
    complaints: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory() as directory,
        stage(Path(directory), _NODES, **settings) as place,
    ):
        for _ in range(runs):
            troubles = STORIES[story](place, after)
            if troubles:
                complaints[troubles[0].split(":")[0]] += 1
    return complaints


def main(arguments_given: Sequence[str] | None = None) -> None:
    """Run it.

    Args:
        arguments_given: in place of those of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="times that each story is told")
    parser.add_argument("--slow", type=float, default=0.6, help="seconds that rank 0 is late")
    parser.add_argument("--delay", type=float, default=0.3, help="seconds until nodes see")
    parser.add_argument("stories", nargs="*", metavar="STORY", help="words of its name")
    arguments = parser.parse_args(arguments_given)
    if reason := why_not():
        parser.exit(2, f"{reason}\n")
    if arguments.runs < 1:
        parser.error("--runs must be 1 or more")
    chosen = [name for name in STORIES if all(word in name for word in arguments.stories)]
    if not chosen:
        parser.error(f"no story has these words; there are: {'; '.join(STORIES)}")
    settings = {"slow": arguments.slow, "delay": arguments.delay}
    begun = time.monotonic()
    rows, good = [], True
    for story in chosen:
        started = time.monotonic()
        before = count(story, False, arguments.runs, settings)
        after = count(story, True, arguments.runs, settings)
        good = good and before.total() > 0 and not after
        why = ", ".join(f"{text} ({n})" for text, n in before.most_common(2))
        rows.append((story, before.total(), why, after.total()))
        sys.stderr.write(
            f"  {story}: {before.total()} before, {dict(after) or 0} after "
            f"({time.monotonic() - started:.0f} s)\n"
        )
    print(f"{machine()}; {arguments.runs} runs, {_NODES} nodes, seen after {arguments.delay:g} s, ")
    print(f"rank 0 late by {arguments.slow:g} s; {time.monotonic() - begun:.0f} s in all\n")
    print("| story | failed before | how | failed after |\n|---|---|---|---|")
    for story, failed, why, mended in rows:
        runs = arguments.runs
        print(f"| {story} | {failed}/{runs} | {why} | {mended}/{runs} |")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
