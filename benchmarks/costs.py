"""Run one command and write down what it cost: ``python -I -S costs.py RESULT SECONDS LOG -- ...``.

A process of its own between the benchmark and what is measured, since the kernel hands the
peak memory of whoever starts a program on to that program: started by the benchmark itself,
a small client would seem as large as the benchmark. This one has some 10 MiB, the floor of
what it can measure. It needs nothing but the standard library.

What is measured covers the command and all its descendants that were waited for: wall and
processor seconds of all, and the peak memory of the largest one. A command that takes longer
than SECONDS is ended with its whole session.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    """Run the command behind ``--``; its exit code goes into RESULT, not into ours."""
    result, seconds, log, dashes, *command = sys.argv[1:]
    if dashes != "--":
        raise SystemExit("usage: costs.py RESULT SECONDS LOG -- COMMAND...")
    late = threading.Event()
    with open(log, "wb") as said:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        def give_up(number: int, frame: object) -> None:
            end()  # its session is not ours: nobody else would end it

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, give_up)
        timer = threading.Timer(float(seconds), end)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        wall = time.perf_counter() - begun
    found = {
        "exit_code": os.waitstatus_to_exitcode(status),
        "timed_out": late.is_set(),
        "wall_seconds": wall,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }
    with open(result, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
