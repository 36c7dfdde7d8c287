"""An interrupt at every moment of a hit, a fetch, ...: ``python -m benchmarks.interrupts``.

Raises KeyboardInterrupt at each point in turn at which Python may run a signal handler, in
the library and in filelock, and judges what it leaves: it must be passed on, nothing may stay
locked, the next call must be right and the next sweep must leave nothing. Ends with an
error at the first point that is not so. ``tests/test_interrupts.py`` takes every n-th point.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from pathlib import Path

from tests.streams.interrupting import ACTS, sweep


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "acts", nargs="*", default=ACTS, metavar="ACT", help=f"of {', '.join(ACTS)}"
    )
    parser.add_argument("--stride", type=int, default=1, help="take every n-th moment")
    arguments = parser.parse_args()
    # What is lost is closed by its destructor: that is what is tested.
    warnings.simplefilter("ignore", ResourceWarning)
    sys.unraisablehook = lambda *_: None  # counted as lost by Python
    logging.disable(logging.CRITICAL)
    rows = []
    for act in arguments.acts:
        with tempfile.TemporaryDirectory() as home:
            rows.append((act, *sweep(Path(home), act, arguments.stride).values()))
    print("| act | moments | interrupted at | lost by Python | left by filelock |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
