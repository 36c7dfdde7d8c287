"""Run one command and record its costs: ``python -I -S costs.py RESULT SECONDS LOG -- COMMAND``.

This is a process between the benchmark and the command, because the kernel counts the peak memory
of a parent for the program that it starts: a small client that the benchmark itself started would
seem as large as the benchmark. This process takes some 10 MiB, the least that it can measure. It
imports only the standard library.

The costs are those of the command and all its descendants that were waited for: wall and processor
seconds of all, and the peak memory of the largest one. A command that runs for more than SECONDS
is killed with its whole session.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time


def main() -> None:
    """Run the command after ``--``, and write its costs and exit code to RESULT."""
    result, seconds, log, _, *command = sys.argv[1:]
    with open(log, "wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # The command has a session of its own, so signals to ours do not reach it.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
    costs = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "timed_out": wall >= float(seconds),
        "wall_seconds": wall,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }
    with open(result, "w", encoding="utf-8") as file:
        json.dump(costs, file)


if __name__ == "__main__":
    main()
