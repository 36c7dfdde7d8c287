"""Storms, soaks and crashes share an origin in a process of its own, a cache, and violations."""

import contextlib
import ctypes
import logging
import os
import random
import re
import signal
import ssl
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path
from typing import Any

from shardcache import Cache
from tests.support.storetools import Parent, age, forked
from tests.support.tars import difference, labelled_tar
from tests.support.webservers import Scripted, answer, part_of

#: The duration of a run.
MINUTES = float(os.environ.get("MINUTES", "1.5" if os.environ.get("FUZZ", "1") == "1" else "30"))

#: Figures of a run, and its violations.
Result = tuple[dict[str, int], list[str]]
KIB, MIB = 1 << 10, 1 << 20
_STATED = re.compile(rb"\S+ version (\d{6}) offset ")
_CHUNK = 64 * KIB
#: Faults of a request, and the duration of a stall in seconds.
FAULTS, _STALL = ("refused", "cut off", "reset", "stalled"), 1.0


class Origin:
    """Shards on a server: mostly of one block, some of two to five.

    Processes that are forked later share the settings.
    """

    address: str

    def __init__(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        spans = ((64 * KIB, 256 * KIB), (256 * KIB, MIB), (MIB, 5 * MIB))
        self.sizes = {
            f"shard-{number:04d}.tar": draw.randrange(*draw.choices(spans, (50, 25, 25))[0]) & ~511
            for number in range(count)
        }
        self.names = list(self.sizes)
        self.versions = RawArray("q", count)  # current versions
        self.fetches = RawArray("q", count)  # requests from the first byte
        self.rate = RawValue("d", 1e9)  # bytes per second of a connection
        self.faults = RawValue("q", 0)  # each fault hits 1 in this many requests; 0 for none
        self.faulty = RawArray("q", len(FAULTS))  # requests that each fault has hit
        self._guard = threading.Lock()

    def data(self, name: str, version: int) -> bytes:
        """Return one version, a tar archive of one member; every other version has a new size."""
        return labelled_tar(name, version, self.sizes[name] + 512 * (version // 2 % 16))

    def examine(self, name: str, data: bytes) -> tuple[int, str | None]:
        """Return the version that the first line states, and the first fault of the bytes."""
        stated = _STATED.match(data, 512)  # after the header of the member
        version = int(stated[1]) if stated else 0
        return version, difference(data, self.data(name, version)) or None

    @contextlib.contextmanager
    def serving(self, tls: ssl.SSLContext | None = None) -> Iterator[str]:
        """Serve from another process; yields the ``address``."""
        with forked(self._run, tls) as process:
            self.address = process.hear()
            yield self.address

    def _run(self, parent: Parent, tls: ssl.SSLContext | None) -> None:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        server = Scripted(self._answer, most=sys.maxsize)
        server.heads = deque(maxlen=0)  # a long run has many
        if tls is not None:
            server.use_tls(tls)
        parent.say(server.url)
        server.serve_forever()

    def _answer(self, head: str) -> Iterator[bytes]:
        method, name = re.match(r"(\w+) /(?:lab/)?(\S*)", head).groups()
        number = self.names.index(name)
        version = self.versions[number]
        pinned = re.search(r"\r\nIf-Match: (\S+)", head)
        drawn = random.randrange(self.faults.value) if self.faults.value else len(FAULTS)
        fault = dict(enumerate(FAULTS)).get(drawn)
        etag = f'"v{version}"'
        if pinned and pinned[1] != etag:
            yield answer("412 Precondition Failed", Connection=None)
            return
        if fault is not None:
            self.faulty[drawn] += 1
        if fault == "refused":
            yield answer("503 Slow Down", Retry_After=0, Connection=None)
            return
        stated, data = part_of(self.data(name, version), head, ETag=etag)
        yield stated
        if method == "HEAD":
            return
        if not re.search(r"\r\nRange: bytes=[1-9]", head):
            with self._guard:
                self.fetches[number] += 1
        middle = random.randrange(0, len(data), _CHUNK)
        for at in range(0, len(data), _CHUNK):
            if fault == "stalled" and at == middle:
                time.sleep(_STALL)
            elif fault is not None and at == middle:
                raise ConnectionResetError if fault == "reset" else ConnectionAbortedError
            yield data[at : at + _CHUNK]
            time.sleep(len(data[at : at + _CHUNK]) / self.rate.value)


def die_with_parent() -> None:
    """Let the kernel kill this forked process when its parent dies."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


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
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return pid

    def end_stuck(self, promise: str, pid: int) -> None:
        """Record that a child hangs, let faulthandler print its stack, and kill it."""
        self.wrong(promise, f"process {pid} is stuck; stderr has its stack")
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

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
    # A cleaning keeps young leftovers, and the notes of the job of this process.
    for path in [*root.glob("v1/**/partial"), *root.glob("v1/**/*.streamed")]:
        age(path)
    with cache:
        cache.clean(**(options or {"orphans": True}))
    left = [path for kind in ("partial", "sessions") for path in root.glob(f"v1/**/{kind}/*")]
    return left + [path for path in below(root) if path.name.startswith(".")]


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
