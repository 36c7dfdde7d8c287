"""Processes that use a cache as they are told, and are misled about the time.

A process is told what to do over its standard input, line by line, and answers in JSON.

Its clock, `time.time` and its relatives, is bent by a file that is read on every call, so that it
can be set at any moment.

Timestamps of files stay the kernel's, as they do on a machine where one process, or one
container, is wrong about the time. The monotonic clock stays right.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.storetools import PATIENCE

YEAR = 365 * 86400

_WORKER = """
import hashlib, json, os, sys, time

if os.environ.get("CLOCK_FILE"):
    real, real_ns = time.time, time.time_ns
    def offset():
        with open(os.environ["CLOCK_FILE"]) as file:
            return int(file.read() or 0)
    time.time = lambda: real() + offset()
    time.time_ns = lambda: real_ns() + offset() * 10**9

import logging
logging.basicConfig(format="%(message)s", level=logging.WARNING)
from shardcache import Cache

cache = Cache(**json.loads(sys.argv[1]))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    command, *arguments = json.loads(line)
    begun = time.monotonic()
    try:
        if command == "read":
            with cache.open(arguments[0]) as stream:
                digest = hashlib.sha256(stream.read()).hexdigest()
                answer = [digest, os.path.exists(stream.name)]
        elif command == "hold":
            held = cache.open(arguments[0])
            held.read()  # until all of it is there
            held.seek(0)
            answer = held.name
        elif command == "fetch":
            answer = str(cache.fetch(arguments[0]).path)
        elif command == "clean":
            report = cache.clean(**arguments[0])
            answer = [[r.name, str(r.reason)] for r in report.removed]
        elif command == "who":
            answer = [os.getpid(), os.uname().nodename]
    except Exception as exn:
        answer = {"error": type(exn).__name__, "message": str(exn)}
    print(json.dumps([answer, time.monotonic() - begun]), flush=True)
"""


class Clock:
    """The wall clock of some processes, in seconds away from the truth."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {"CLOCK_FILE": str(path)}
        self.set(0)

    def set(self, seconds: int) -> None:
        """From now on."""
        new = self.path.with_suffix(".new")
        new.write_text(str(seconds))
        new.replace(self.path)


class Worker:
    """One such process, with these options of its cache; use as a context manager."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        prefix: Sequence[str] = (),  # a command that starts it
        **options: Any,
    ) -> None:
        given = json.dumps({"min_free": 0, **options}, default=str)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _WORKER, given],
            bufsize=0,  # `hear` asks whether there is more
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(clock.environment if clock else {})},
        )

    def __enter__(self) -> Worker:
        assert self.hear() == "ready"
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert readable, "it says nothing"
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read().decode() if self.process.stderr else ""
        return json.loads(line)

    def ask(self, *command: Any) -> Any:
        """What it answers."""
        self.tell(*command)
        return self.hear()[0]
