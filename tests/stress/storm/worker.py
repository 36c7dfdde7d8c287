"""What the processes of a storm do, and what they write down of it.

One JSON object a line, one ``write`` each, so that a kill tears at most the last line. Times are
CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import pickle
import random
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardcache import Cache
from tests.stress.storm.plan import Storm

#: Seconds that somebody holds a shard open, at most.
_HOLD = 0.8
_PR_SET_PDEATHSIG = 1


class TerminatedError(BaseException):
    """SIGTERM or SIGINT."""


class Log:
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, event: str, **facts: Any) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), **facts})
        os.write(self._fd, line.encode() + b"\n")


class Worker:
    """One life of one worker."""

    def __init__(self, storm: Storm, slot: int, life: int) -> None:
        self.storm, self.slot, self.who = storm, slot, f"{slot}.{life}"
        self.draw = random.Random(f"{storm.seed}/{self.who}")
        self.log = Log(storm.directory / f"worker-{self.who}.jsonl")
        self._number = 0
        self.cache = self._cache()

    def _cache(self) -> Cache:
        isolation = "rank" if self.slot % 8 == 7 else "node"
        if isolation == "rank":
            os.environ["SHARDCACHE_RANK"] = str(self.slot)
        return Cache(**self.storm.options(), isolation=isolation, prefetch=self.slot % 3)

    def choose(self) -> str:
        """A shard: mostly of those that are popular now."""
        names = self.storm.names
        window = int(time.monotonic() / 2) * 3
        at = int(self.draw.paretovariate(0.8)) % (len(names) // 4)
        return names[(window + at) % len(names)]

    @contextmanager
    def call(self, op: str, name: str | None = None) -> Iterator[dict[str, Any]]:
        """One call, written down: when it began, when it ended, and how."""
        self._number += 1
        facts = {"who": self.who, "n": self._number, "op": op, "name": name}
        self.log.write("begin", **facts)
        began, told = time.monotonic(), {"outcome": "ok"}
        try:
            yield told
        except Exception as exn:
            told |= {"outcome": "error", "error": type(exn).__name__, "text": str(exn)[:400]}
            told |= {"errno": getattr(exn, "errno", None), "trace": traceback.format_exc(-4)[-900:]}
        finally:
            self.log.write("end", **facts, began=began, **told)

    def examine(self, name: str, data: bytes, told: dict[str, Any]) -> None:
        version, wrong = self.storm.examine(name, data)
        told |= {"version": version, "size": len(data)}
        if wrong is not None:
            told |= {"outcome": "wrong", "text": wrong}

    def live(self) -> None:
        """Make calls until told to stop."""
        operations = [getattr(self, f"_{name}") for name in OPERATIONS]
        while not self.storm.stop_file.exists():
            self.draw.choices(operations, list(OPERATIONS.values()))[0]()
            time.sleep(self.draw.expovariate(250))

    # -- what they do --------------------------------------------------------------

    def _read(self, name: str | None = None, cache: Cache | None = None) -> None:
        name = name or self.choose()
        with self.call("read", name) as told, (cache or self.cache).open(self.storm.url(name)) as s:
            data = s.read()
            told["streamed"] = "://" in str(s.name)
            self.examine(name, data, told)

    def _hold(self) -> None:
        """Read a bit, wait while others evict, and read the rest or close."""
        name = self.choose()
        with self.call("hold", name) as told, self.cache.open(self.storm.url(name)) as stream:
            head = stream.read(self.draw.randrange(200_000))
            if self.draw.random() < 0.5:
                time.sleep(self.draw.random() * _HOLD)
                self.examine(name, head + stream.read(), told)

    def _pinned(self) -> None:
        name = self.choose()
        with self.call("pinned", name) as told, self.cache.pinned(self.storm.url(name)) as path:
            before = path.stat().st_ino
            time.sleep(self.draw.random() * _HOLD)
            told["stayed"] = path.exists() and path.stat().st_ino == before
            self.examine(name, path.read_bytes(), told)

    def _fetch(self) -> None:
        name = self.choose()
        with self.call("fetch", name):
            self.cache.fetch(self.storm.url(name))

    def _path(self) -> None:
        """Read by path without a pin, as other programs do: it may be gone, never changing."""
        name = self.choose()
        with self.call("path", name) as told:
            path = self.cache.path(self.storm.url(name))
            told["outcome"] = "absent"
            with suppress(FileNotFoundError):
                if path is not None:
                    data = path.read_bytes()
                    told["outcome"] = "ok"
                    self.examine(name, data, told)

    def _opener(self) -> None:
        """Read the way a WebDataset does, with shards fetched ahead."""
        names = [self.choose() for _ in range(self.draw.randint(2, 5))]
        samples = self.cache.url_opener(iter([{"url": self.storm.url(name)} for name in names]))
        for name in names:
            with self.call("opener", name) as told, next(samples)["stream"] as stream:
                self.examine(name, stream.read(), told)
            if told["outcome"] == "error":
                return  # a generator that raised has ended

    def _pickled(self) -> None:
        with pickle.loads(pickle.dumps(self.cache)) as copy:
            self._read(cache=copy)

    def _threads(self) -> None:
        name = self.choose()
        crew = [threading.Thread(target=self._read, args=(name,), daemon=True) for _ in range(3)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()

    def _forked(self) -> None:
        """A child reads through the cache that it came with."""
        with self.call("fork") as told:
            if (pid := os.fork()) == 0:
                die_with_parent()
                self.who += f"/{os.getpid()}"
                status = 1
                try:
                    self._read()
                    self.cache.close()
                    status = 0
                finally:
                    os._exit(status)
            while not (found := os.waitpid(pid, os.WNOHANG))[0]:
                time.sleep(0.005)
            if found[1]:
                told |= {"outcome": "error", "error": "ChildError", "text": str(found[1])}

    def _remove(self) -> None:
        name = self.choose()
        with self.call("remove", name):
            self.cache.remove(self.storm.url(name))

    def _clean(self) -> None:
        """To a limit, of what dead processes left, or, seldom, of everything."""
        limit = {"max_size": int(self.storm.max_size * self.draw.uniform(0.5, 1))}
        ways = [limit, {"orphans": True, "limits": False}, {"everything": True}]
        with self.call("clean"):
            self.cache.clean(**self.draw.choices(ways, (18, 35, 1))[0])

    def _restart(self) -> None:
        with self.call("restart"):
            self.cache.close()
            self.cache = self._cache()


#: How often each is done, of 1000 calls or so.
OPERATIONS = {
    "read": 700, "hold": 45, "pinned": 20, "fetch": 30, "path": 50, "opener": 25, "pickled": 10,
    "threads": 6, "forked": 10, "remove": 25, "clean": 54, "restart": 8,
}  # fmt: skip


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(storm: Storm, slot: int, life: int) -> None:
    """Live one life, in a forked process; does not return."""
    die_with_parent()
    logging.getLogger("shardcache").addHandler(logging.NullHandler())
    logging.getLogger("shardcache").propagate = False
    stuck = open(storm.directory / f"stuck-{slot}.{life}.txt", "w")
    faulthandler.register(signal.SIGUSR1, stuck)
    log, status = Log(storm.directory / f"crash-{slot}.{life}.jsonl"), 0

    def end(number: int, frame: object) -> None:
        raise TerminatedError

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        worker = Worker(storm, slot, life)
        try:
            worker.live()
        finally:
            worker.cache.close()
    except TerminatedError:
        status = 143
    except BaseException:
        log.write("crash", who=f"{slot}.{life}", text=traceback.format_exc()[-2000:])
        status = 70
    os._exit(status)
