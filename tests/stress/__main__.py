"""Run all long tests: ``python -m tests.stress`` in a quarter of an hour, ``--full`` in hours.

Prints a table of results; the exit code is 1 after a failure.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

#: Tests to run with broken locks; see `brokenflock`.
LOCK_TESTS = [
    "tests/test_cache.py",
    "tests/download/test_coordination.py",
    "tests/store/test_partials.py",
    "tests/space/test_budget.py",
]


def steps(full: bool) -> dict[str, list[str]]:
    """Return the arguments of Python for each step, by its name."""
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    locks = [*pytest, "-p", "tests.stress.brokenflock", *LOCK_TESTS, "--flock"]
    parallel = ["--numprocesses", str(os.cpu_count()), "--dist", "loadfile"]
    storm = ["-m", "tests.stress.storm", "--minutes", "30" if full else "1.5"]
    return {
        "a storm": storm,
        "a soak with forks": ["-m", "tests.stress.soak", "--minutes", "15" if full else "1"],
        "a storm in which flock lies": [*storm, "--flock", "lying"],
        "tests where flock is refused": [*locks, "refused"],
        "tests where flock lies": [*locks, "lying"],
        "tests/stress": [*pytest, *parallel, "tests/stress"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all of it: hours")
    full = parser.parse_args().full
    os.environ["FUZZ"] = "100" if full else os.environ.get("FUZZ", "1")
    rows = []
    for name, arguments in steps(full).items():
        begun = time.monotonic()
        print(f"== {name}: python {' '.join(arguments)}", flush=True)
        with tempfile.TemporaryFile("w+") as log:
            status = subprocess.run([sys.executable, *arguments], stdout=log, stderr=log).returncode
            log.seek(0)
            lines = log.read().strip().splitlines()
        if status:
            print("\n".join(lines[-80:]), flush=True)
        found = f"FAILED ({status})" if status else "nothing"
        rows.append((name, time.monotonic() - begun, found, lines[-1] if lines else ""))
    print(f"\n{os.cpu_count()} cores\n\n| tried | s | found | last line |\n|---|--:|---|---|")
    for name, seconds, found, last in rows:
        print(f"| {name} | {seconds:.0f} | {found} | {last} |")
    return int(any(found.startswith("FAILED") for _, _, found, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
