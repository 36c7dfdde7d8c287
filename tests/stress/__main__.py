"""Everything that is long: ``python -m tests.stress`` in minutes, with ``--full`` in hours.

Ends with a table of what was tried and what was found; exit 1 if anything was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

#: Tests that must hold whatever locks do; see `brokenflock`.
LOCK_TESTS = [
    "tests/test_cache.py",
    "tests/fetch/test_coordination.py",
    "tests/store/test_partials.py",
    "tests/space/test_budget.py",
]
FAULTS = ["refused", "lying", "deleted"]


def steps(full: bool) -> dict[str, list[str]]:
    """What is run, by what it is called: arguments of Python."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    locks = [*pytest, "-p", "tests.stress.brokenflock"]
    minutes = "30" if full else "2"
    found = {
        "crash points": ["-m", "tests.stress.crash", *([] if full else ["--every", "40"])],
        "storm": ["-m", "tests.stress.storm", "--minutes", minutes],
        "storm, flock lies": ["-m", "tests.stress.storm", "--minutes", minutes, "--flock", "lying"],
        "tests of tests/stress": [*pytest, "tests/stress"],
    }
    for fault in FAULTS:
        found[f"tests with locks {fault}"] = [*locks, "--flock", fault, *LOCK_TESTS]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all of it: hours")
    full = parser.parse_args().full
    rows = []
    for name, arguments in steps(full).items():
        begun = time.monotonic()
        print(f"== {name}: python {' '.join(arguments)}", flush=True)
        with tempfile.TemporaryFile("w+") as log:
            status = subprocess.run([sys.executable, *arguments], stdout=log, stderr=log).returncode
            log.seek(0)
            lines = log.read().strip().splitlines()
        if status not in (0, 77):
            print("\n".join(lines[-80:]))
        said = "skipped" if status == 77 else "nothing" if status == 0 else f"FAILED ({status})"
        rows.append((name, time.monotonic() - begun, said, lines[-1] if lines else ""))
    print(f"\n{os.cpu_count()} cores\n\n| tried | s | found | last line |\n|---|--:|---|---|")
    for name, seconds, said, last in rows:
        print(f"| {name} | {seconds:.0f} | {said} | {last} |")
    return int(any(said.startswith("FAILED") for _, _, said, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
