"""The process that workers are forked from: ``python -m tests.stress.storm.nursery``.

It has imported everything and has one thread, so a worker is born in milliseconds and a
storm can kill hundreds. It adopts what killed workers leave, and when its standard input
ends, however the boss went, it ends everybody and, if need be, unmounts the disk.

Spoken over pipes, a JSON object per line: ``{"spawn": slot, "life": n}`` is answered by
``{"born": pid, ...}``, the end of any descendant is told as ``{"died": pid, "status": s}``,
and ``{"count": 1}`` is answered by ``{"children": [pid, ...]}``.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.stress.storm.settings import Settings

__all__ = ["Nursery", "main"]

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_REAP_SECONDS = 0.02


class Nursery:
    """The boss's end of the pipes.

    Args:
        settings: the storm.
        environment: of the workers.
    """

    def __init__(self, settings: Settings, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.stress.storm.nursery", settings.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # an interrupt is for the boss, who then ends in order
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._rest = b""

    def tell(self, **command: Any) -> None:
        """Send a command."""
        self._stdin.write(json.dumps(command).encode() + b"\n")
        self._stdin.flush()

    def hear(self, seconds: float) -> Iterator[dict[str, Any]]:
        """What was said, within so many seconds.

        Raises:
            RuntimeError: the nursery is gone.
        """
        if not select.select([self._stdout], [], [], seconds)[0]:
            return
        said = os.read(self._stdout.fileno(), 1 << 16)
        if not said:
            raise RuntimeError(f"the nursery ended with status {self._process.wait()}")
        *lines, self._rest = (self._rest + said).split(b"\n")
        yield from (json.loads(line) for line in lines)

    def close(self) -> None:
        """End every worker, and the nursery."""
        self._stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()
            self._stdout.close()


def _children() -> list[int]:
    path = f"/proc/self/task/{os.getpid()}/children"
    return [int(pid) for pid in Path(path).read_text().split()]


def _say(**facts: Any) -> None:
    os.write(1, json.dumps(facts).encode() + b"\n")


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say(died=pid, status=os.waitstatus_to_exitcode(status))


def _spawn(settings: Settings, slot: int, life: int) -> None:
    pid = os.fork()
    if pid:
        _say(born=pid, slot=slot, life=life)
        return
    status = 70
    try:
        from tests.stress.storm.worker import run

        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)  # the pipe to the boss is the nursery's alone
        status = run(settings, slot, life)
    finally:
        os._exit(status)


def _end_everybody() -> None:
    while pids := _children():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _lie(fd: Any, operation: int) -> None:
    """flock of a filesystem that grants every lock to everybody."""


def main(settings: Settings) -> None:
    """Serve the boss until it goes."""
    if settings.lying:
        fcntl.flock = _lie  # before anything has taken it by name
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # All that a worker will need, and no thread.
    for module in ("worker", "operations"):
        __import__(f"tests.stress.storm.{module}")
    rest, boss = b"", os.getppid()
    try:
        while True:
            ready = select.select([0], [], [], _REAP_SECONDS)[0]
            _reap()
            if not ready:
                continue
            said = os.read(0, 1 << 16)
            if not said:
                return
            *lines, rest = (rest + said).split(b"\n")
            for line in lines:
                command = json.loads(line)
                if "spawn" in command:
                    _spawn(settings, command["spawn"], command["life"])
                else:
                    _say(children=_children())
    finally:
        _end_everybody()
        if os.getppid() != boss:  # killed: nobody else will unmount it
            subprocess.run(["umount", "-l", str(settings.cache.parent)], check=False)


if __name__ == "__main__":
    main(Settings.from_json(sys.argv[1]))
