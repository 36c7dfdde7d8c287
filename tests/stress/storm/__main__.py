"""``python -m tests.stress.storm --minutes 30``: many processes, one cache, every fault at once.

Exits with 1 if an invariant broke, with the first ten violations explained.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from tests.stress.storm.report import show
from tests.stress.storm.run import storm


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.storm", description=__doc__)
    span = parser.add_mutually_exclusive_group()
    span.add_argument("--minutes", type=float, help="how long")
    span.add_argument("--seconds", type=float, help="how long (default 60)")
    parser.add_argument("--seed", type=int, help="repeat a storm's plan of faults")
    parser.add_argument("--workers", type=int, default=8, help="processes (default 8)")
    parser.add_argument("--flock", choices=("real", "lying"), default="real")
    parser.add_argument("--no-sabotage", action="store_true", help="leave lock files alone")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and violations")
    parser.add_argument("--keep", action="store_true", help="keep the working directory")
    arguments = parser.parse_args()
    seconds = arguments.minutes * 60 if arguments.minutes else arguments.seconds or 60.0
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    outcome = storm(
        seconds=seconds,
        seed=seed,
        workers=arguments.workers,
        lying=arguments.flock == "lying",
        sabotage=not arguments.no_sabotage,
        parent=arguments.dir,
        keep=arguments.keep,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(outcome.facts(), indent=1) + "\n", "utf-8")
    show(outcome)
    return 1 if outcome.verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())
