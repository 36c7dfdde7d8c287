"""A worker: calls the cache at random, checks every byte, and tells the history."""

from __future__ import annotations

import faulthandler
import itertools
import logging
import mmap
import os
import random
import resource
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import shardcache.fetch.coordinator
import shardcache.origins.s3
import shardcache.wds.attach  # noqa: F401 - like the two above: what every worker will need
from shardcache import Cache
from tests.stress.storm import shards
from tests.stress.storm.history import Log
from tests.stress.storm.settings import Settings

__all__ = ["TERMINATED", "Terminated", "Worker", "run"]

#: Exit status of a worker that a signal asked to end, as a shell says it.
TERMINATED = 143
_SLOT = 64
#: Seconds for which one set of shards is popular; then the window moves on, so that
#: there are entries which no running job has used.
_WINDOW_SECONDS = 6.0


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGINT arrived: what a training script's handler raises."""


class _Teller(logging.Handler):
    """Puts what the library logs into the history: evictions, retries, passed-by holders."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        arguments = record.args if isinstance(record.args, tuple) else ()
        self._log.write(
            "log", logger=record.name, template=record.msg, args=[str(a) for a in arguments]
        )


class Worker:
    """One life of one worker.

    Args:
        settings: the storm.
        slot: its number, which its successors have too.
        life: which of them it is.
    """

    def __init__(self, settings: Settings, slot: int, life: int) -> None:
        self.settings = settings
        self.slot = slot
        self.rng = random.Random(f"{settings.seed}/{slot}/{life}")
        self.log = Log(settings.history / f"worker-{slot}.{life}.jsonl", f"{slot}.{life}")
        self.terminated = False
        self._numbers = itertools.count()
        with open(settings.counters, "r+b") as file:
            self._counters = mmap.mmap(file.fileno(), 0)
        self.cache = self.make_cache()

    @property
    def isolated(self) -> bool:
        """Whether this slot has a namespace of its own."""
        return self.slot % 8 == 7

    def make_cache(self) -> Cache:
        """A cache as a training script makes it."""
        # With one connection the parts of a shard come one after the other, and an object
        # that is replaced meanwhile can be noticed only by asking for one version.
        options = self.settings.options() | {"connections": (1, 2, 4)[self.slot % 3]}
        # Those who follow and those who wait read the same partials and entries.
        if self.slot % 2 == 0:
            options |= {"fill": "follow", "prefetch": self.slot // 2 % 2 * 2}
        else:
            options |= {"fill": "complete", "prefetch": 0}
        if self.isolated:
            os.environ["SHARDCACHE_RANK"] = str(self.slot)
            options["isolation"] = "rank"
        return Cache(**options)

    def choose(self) -> str:
        """A shard: mostly of the ones that are popular now, the first of them most."""
        names = self.settings.names
        if self.rng.random() < 0.004:
            return self.rng.choice(names)
        window = int(time.monotonic() / _WINDOW_SECONDS) * 3
        index = int(self.rng.paretovariate(0.8)) % max(1, len(names) // 5)
        return names[(window + index) % len(names)]

    @contextmanager
    def call(
        self, op: str, name: str | None, calls: int = 1, ahead: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """One call in the history: begun, ended, and how.

        Args:
            op: which.
            name: the shard, if it is about one.
            calls: how many calls of the cache in a row it makes.
            ahead: shards that are fetched ahead meanwhile.

        Yields:
            What is told of its end.
        """
        number = next(self._numbers)
        self.log.write("begin", n=number, op=op, name=name, calls=calls, ahead=ahead)
        told: dict[str, Any] = {"outcome": "ok"}
        began = time.monotonic()
        try:
            yield told
        except Terminated:
            told["outcome"] = "interrupted"
            raise
        except Exception as exn:
            told |= {
                "outcome": "error",
                "error": type(exn).__name__,
                "family": [base.__name__ for base in type(exn).__mro__],
                "errno": getattr(exn, "errno", None),
                "text": str(exn)[:400],
                "trace": traceback.format_exc(limit=-4)[-900:],
            }
        finally:
            told["background"] = self.background()
            self.log.write("end", n=number, op=op, name=name, calls=calls, began=began, **told)

    def background(self) -> list[str]:
        """Shards that are still being fetched although the calls for them ended."""
        process = self.cache._here()
        if process.ready is None:
            return []
        urls = {self.settings.url(name): name for name in self.settings.names}
        return [urls[str(shard)] for shard in process.fetchings.unfinished()]

    def examine(self, name: str, data: bytes, told: dict[str, Any]) -> None:
        """Check the bytes of a whole shard."""
        version, wrong = shards.examine(name, data, self.settings.size)
        told |= {"version": version, "size": len(data), "digest": shards.digest(data)}
        if wrong is not None:
            told |= {"outcome": "wrong", "text": wrong}

    def count(self, reads: int) -> None:
        """For the progress line."""
        at = self.slot * _SLOT
        value = int.from_bytes(self._counters[at : at + 8], "little") + reads
        self._counters[at : at + 8] = value.to_bytes(8, "little")

    def live(self) -> None:
        """Make calls until told to stop."""
        from tests.stress.storm.operations import OPERATIONS, read

        kinds = list(OPERATIONS)
        weights = [OPERATIONS[kind] for kind in kinds]
        read(self)  # it makes the cache, which all others want to be there
        while not (self.terminated or self.settings.stop_file.exists()):
            operation = self.rng.choices(kinds, weights)[0]
            operation(self)
            self.count(1)
            time.sleep(self.rng.expovariate(1.0 / self.settings.pause))


def run(settings: Settings, slot: int, life: int) -> int:
    """Live one life; returns the exit status."""
    signal.set_wakeup_fd(-1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stuck = open(settings.history / f"stuck-{slot}.{life}.txt", "w")
    faulthandler.register(signal.SIGUSR1, stuck)
    worker = Worker(settings, slot, life)
    teller = logging.getLogger("shardcache")
    teller.setLevel(logging.INFO)
    teller.propagate = False
    teller.addHandler(_Teller(worker.log))

    def end(number: int, frame: object) -> None:
        worker.terminated = True
        raise Terminated

    status = 0
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        worker.live()
    except Terminated:
        status = TERMINATED
    except BaseException:
        worker.log.write("crash", text=traceback.format_exc()[-2000:])
        status = 70
    if worker.terminated:
        status = status or TERMINATED
    background = worker.background()
    try:
        worker.cache.close()
    except Terminated:  # it came this late
        status = TERMINATED
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # it has ended, whatever comes now
    worker.log.write("exit", status=status, background=background)
    return status
