"""Processes that use a cache as they are told, line by line over stdin; they answer in JSON."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.support.storetools import PATIENCE

_WORKER = """
import hashlib, json, logging, os, sys

logging.basicConfig(format="%(message)s", level=logging.WARNING)
from shardcache import Cache

cache = Cache(**json.loads(sys.argv[1]))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    command, *arguments = json.loads(line)
    if command == "read":
        with cache.open(arguments[0]) as stream:
            digest = hashlib.sha256(stream.read()).hexdigest()
            answer = [digest, os.path.exists(stream.name)]
    elif command == "who":
        answer = [os.getpid(), os.uname().nodename]
    print(json.dumps(answer), flush=True)
"""


class Worker:
    """One such process, with these options of its cache; use as a context manager."""

    def __init__(self, *, prefix: Sequence[str] = (), **options: Any) -> None:
        """``prefix`` is a command that starts it."""
        given = json.dumps({"min_free": 0, **options}, default=str)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", _WORKER, given],
            bufsize=0,  # `hear` asks whether there is more
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Worker:
        assert self.hear() == "ready"
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    def tell(self, *command: Any) -> None:
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        readable, _, _ = select.select([self.process.stdout], [], [], PATIENCE)
        assert readable, "it says nothing"
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read().decode()
        return json.loads(line)

    def ask(self, *command: Any) -> Any:
        """What it answers."""
        self.tell(*command)
        return self.hear()
