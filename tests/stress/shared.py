"""An origin and a file of violations, which the processes of a storm or a soak share."""

import contextlib
import logging
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardcache import Cache
from tests.stress.origin import MIB, Origin, die_with_parent
from tests.support.storetools import Parent, age, forked

#: The duration of a run.
MINUTES = float(os.environ.get("MINUTES", "1.5" if os.environ.get("FUZZ", "1") == "1" else "30"))

#: Figures of a run, and its violations.
Result = tuple[dict[str, int], list[str]]


class Shared(Origin):
    """An origin, a cache, and a file of violations, which many processes share."""

    root: Path
    max_size: int

    def __init__(self, directory: Path, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.seed, self.wrongs, self.begun = seed, directory / "wrong", time.monotonic()
        self.wrongs.touch()

    def cache(self, **options: Any) -> Cache:
        """Open the cache; a shard may be replaced, and a stream stop, between two of its parts."""
        return Cache(self.root, max_size=self.max_size, min_free=0, part_size=MIB, **options)

    def wrong(self, promise: str, text: str) -> None:
        """Record a violation."""
        with open(self.wrongs, "ab", buffering=0) as file:
            file.write(f"{time.monotonic() - self.begun:.1f} s: {promise}: {text}\0".encode())

    @contextlib.contextmanager
    def no_error(self, what: str) -> Iterator[None]:
        """Record any exception of the body."""
        try:
            yield
        except Exception:
            self.wrong("errors", f"{what}: {traceback.format_exc()[-3000:]}")

    def fork(self, what: str, work: Callable[..., object], *args: object) -> int:
        """Fork a process that does some work without an error; returns its process id."""
        if (pid := os.fork()) == 0:
            status: Any = 1
            try:
                die_with_parent()
                with self.no_error(what):
                    work(*args)
                status = 0
            except SystemExit as exn:
                status = exn.code
            finally:
                os._exit(status)
        return pid

    def violations(self) -> list[str]:
        return self.wrongs.read_text().split("\0")[:-1]


def below(directory: Path, suffix: str = "") -> list[Path]:
    """Return the files below a directory, from which files may vanish."""
    return sorted(
        Path(where, name)
        for where, _, names in os.walk(directory)
        for name in names
        if name.endswith(suffix)
    )


def swept(root: Path, cache: Cache, **options: Any) -> list[Path]:
    """Clean a cache that no process uses; returns downloads and temporary files that are left."""
    for path in root.glob("v1/**/partial"):  # a cleaning keeps young leftovers
        age(path)
    with cache:
        cache.clean(**(options or {"orphans": True}))
    left = [path for kind in ("partial", "sessions") for path in root.glob(f"v1/**/{kind}/*")]
    return left + [path for path in below(root) if path.name.startswith(".")]


def end_stuck(pid: int) -> None:
    """Let faulthandler print the stack of a child, and kill the child."""
    os.kill(pid, signal.SIGUSR1)
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def check(run: Callable[[Path, int, float], Result], directory: Path) -> None:
    """Run a storm or a soak in a process of its own, and check that all promises held.

    The variable SEED repeats the faults of an earlier run.
    """
    seed = int(os.environ.get("SEED", random.randrange(1 << 31)))
    print(f"SEED={seed}")

    def work(parent: Parent) -> None:
        logging.disable()  # warnings are expected
        parent.say(run(directory.resolve(), seed, MINUTES * 60))

    with forked(work) as child:
        figures, wrong = child.hear(MINUTES * 60 + 900)
    for name, figure in figures.items():
        print(f"{name}: {figure:,}")
    assert not wrong, "\n\n".join(wrong[:20])
