"""Processes that fork while they read: ``MINUTES=15 pytest tests/stress/test_soak.py``.

Four parents read from one cache, two over HTTP and plain S3, two over TLS. Each of their threads
opens streams, reads a part, and forks. Parent and child both read the same streams to the end. A
stream begins with an entry, with a download that it follows, or past the cache. Children also open
other shards and run pipelines. Some children are killed or stopped, the garbage collector closes
some streams, and one request in twenty fails. The main thread of each parent reads, too, while
alarms raise exceptions in its calls, after which it reads on with the same stream. The soak looks
for

* bytes: a wrong byte, or a stream that ends early or late;
* errors: any exception. For a `TransferError`, all attempts of a request would have to fail, which
  happens once in 10^11 requests;
* hangs: a child or a parent that does not end within `PATIENCE`;
* leaks: a parent that keeps more threads, descriptors or memory than after its warm-up;
* budget: entries and downloads that take more than ``max_size``;
* leftovers: other files than entries after the last cleaning.

The seed decides what each thread does, and the kernel decides when.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeVar

import pytest
import webdataset as wds

from shardcache import Cache
from tests.stress.harness import FAULTS, MIB, MINUTES, Result, Shared, below, check, swept
from tests.support.storetools import PATIENCE, descriptors, wait_until
from tests.support.tars import difference

_PARENTS, _THREADS, _STREAMS, _SHARDS = 4, 3, 4, 40
#: The share of the data that finds room: about a third of the streams go past the cache.
_ROOM = 0.35
#: Each of the four faults hits one request in eighty. The timeout is longer than a stall.
_FAULTS, _ATTEMPTS, _TIMEOUT = 80, 8, 15.0
#: Seconds of work between two measurements of a parent, and laps before the first that counts.
_LAP, _WARM_UP = 3.0, 3
#: The growth of a parent that counts as a leak. For HTTP and for S3, as many sockets may be idle as
#: were in use at once. Without a leak, memory grows by up to 3 MiB and varies by 2,000 blocks of
#: Python; a lost stream keeps 256 KiB and some 20 blocks.
_CONNECTIONS = 8
_SOCKETS = 2 * (_CONNECTIONS + _THREADS * _STREAMS)
#: An idle connection with TLS keeps 256 KiB of its own and as many of OpenSSL's.
_BUFFERS = 512 << 10
_GROWTH = {"sockets": _SOCKETS, "files": 0, "blocks": 6000, "memory": 8 * MIB}

#: Mean of the seconds until an alarm: a hit takes microseconds, a request milliseconds.
_ALARMS = (2e-5, 2e-4, 2e-3, 2e-2)


class Deadline(Exception):
    """Raised by the handler of an alarm."""


class Alarm(TimeoutError):
    """Raised by the handler of an alarm, without an errno, as programs do."""


T = TypeVar("T")
#: The name of a shard, and its stream.
Reading = tuple[str, BinaryIO]


class Soak(Shared):
    """The origin, the cache and the log that all processes share."""

    addresses: tuple[str, str]

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(directory, _SHARDS, seed)
        self.root, self.compared = directory / "cache", RawValue("q")  # bytes, roughly
        self.tars = {name: super(Soak, self).data(name, 0) for name in self.names}
        # Parents and transports see each shard under four URLs.
        self.max_size = int(4 * sum(map(len, self.tars.values())) * _ROOM)
        self.rate.value, self.faults.value = 20e6, _FAULTS

    def data(self, name: str, version: int) -> bytes:
        return self.tars[name]

    def cache_of(self, parent: int) -> Cache:
        options = {"connections": _CONNECTIONS, "attempts": _ATTEMPTS, "timeout": _TIMEOUT}
        options |= {"stale_after": 2.0, "lock_timeout": 30.0}
        options |= {"storage_options": {"key": "AK", "secret": "SK"}}
        return self.cache(endpoint_url=self.addresses[parent % 2], **options)

    def stored(self) -> dict[tuple[int, str], int]:
        """Bytes on disk of every entry and every download, by inode and key."""
        found = {}
        for path in below(self.root / "v1", ".tar"):
            leaving, key = re.search(r"/(evict\.)?([0-9a-f]{32})\b", str(path)).groups()
            if not leaving:  # the budget does not count an entry that a process removes
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    # A download whose last part came first has holes.
                    found[status.st_ino, key] = min(status.st_size, status.st_blocks * 512)
        return found

    def check(self, what: str, found: bytes, expected: bytes) -> None:
        if wrong := difference(found, expected):
            self.wrong("bytes", f"{what}: {wrong}")
        self.compared.value += len(found)


class Worker:
    """The work of one thread of a parent, or of a child that it forks."""

    def __init__(self, soak: Soak, cache: Cache, parent: int, seed: str) -> None:
        self.soak, self.cache, self.parent = soak, cache, parent
        self.draw, self.alarms, self.alarms_in_finalizers = random.Random(seed), 0, 0
        self.interrupted = ""  # the stack of the last alarm

    def work(self, end: float) -> None:
        while time.monotonic() < end:
            with self.soak.no_error("a parent"), contextlib.ExitStack() as stack:
                readings = [self._open() for _ in range(self.draw.randint(1, _STREAMS))]
                if self.draw.random() < 0.5:
                    stack.callback(self._reap, *self._fork(readings))
                self._finish(readings)
                if self.draw.random() < 0.2:
                    self._pipeline()

    def _url(self, name: str) -> str:
        return f"{self.draw.choice(('s3://lab', self.soak.addresses[self.parent % 2]))}/{name}"

    def _open(self) -> Reading:
        """Open a shard and read some of it, perhaps to the very end of an answer."""
        name = self.draw.choice(self.soak.names)
        reading = name, self.cache.open(self._url(name))
        self._read(reading, self.draw.choice((0, self.draw.randrange(2 * MIB), MIB)))
        return reading

    def _read(self, reading: Reading, most: int, call: Callable[..., Any] | None = None) -> int:
        """Read and compare; returns the number of bytes, or -1 if ``call`` returned None."""
        name, stream = reading
        at, data = stream.tell(), stream.read(most) if call is None else call(stream.read, most)
        if data is None:
            return -1
        self.soak.check(f"{stream.name} at {at}", data, self.soak.tars[name][at : at + most])
        return len(data)

    def _finish(self, readings: list[Reading]) -> None:
        """Read streams by turns, most of them to the end, and leave them."""
        stops = (1 << 30, 1 << 30, 1 << 30, MIB, self.draw.randrange(4 * MIB))
        unfinished = [(reading, self.draw.choice(stops)) for reading in readings]
        readings.clear()
        while unfinished:
            chosen = (name, stream), stop = self.draw.choice(unfinished)
            left = max(0, stop - stream.tell())
            if self._read((name, stream), min(self.draw.randrange(1, 600_000), left)):
                continue
            unfinished.remove(chosen)
            if self.draw.random() < 0.4:
                cycle: list[object] = [stream]
                cycle.append(cycle)
            else:
                self._leave(name, stream)
            if self.draw.random() < 0.05:
                gc.collect()

    def _leave(self, name: str, stream: BinaryIO) -> None:
        stream.close()
        if self.draw.random() < 0.3:
            self.cache.remove(self._url(name))  # so that other shards find room

    def be_interrupted(self, end: float) -> None:
        """Open and read in the main thread, while alarms raise."""
        name = self.soak.names[0]
        for start in ("s3://lab", self.soak.addresses[self.parent % 2]):
            self._finish([(name, self.cache.open(f"{start}/{name}"))])
        signal.signal(signal.SIGALRM, self._raise)
        sys.unraisablehook = self._drop
        while time.monotonic() < end:
            # An alarm may be late.
            with self.soak.no_error("an interrupted reader"), contextlib.suppress(Deadline, Alarm):
                name = self.draw.choice(self.soak.names)
                if (stream := self._alarmed(self.cache.open, self._url(name))) is not None:
                    while self._read(
                        (name, stream), self.draw.randrange(1, 600_000), self._alarmed
                    ):
                        pass
                    self._leave(name, stream)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # both refer to the cache
        sys.unraisablehook = sys.__unraisablehook__

    def _drop(self, _: object) -> None:
        self.alarms_in_finalizers += 1

    def _raise(self, _: int, frame: FrameType | None) -> None:
        # Python itself would keep the lock of `logging`, or of a module that is imported.
        if any(
            re.match("logging|importlib", f.f_globals["__name__"])
            for f, _ in traceback.walk_stack(frame)
        ):
            return
        self.alarms += 1
        # Without source lines, which `linecache` would keep: 45,000 blocks of memory.
        frames = [(f.f_code, line) for f, line in traceback.walk_stack(frame)][7::-1]
        self.interrupted = "".join(f"\n{c.co_filename}:{at} in {c.co_name}" for c, at in frames)
        raise self.draw.choice((Deadline, Alarm))

    def _alarmed(self, call: Callable[..., T], *args: object) -> T | None:
        """Return the result of a call, or None if the handler of an alarm raised."""
        alarms, dropped = self.alarms, self._dropped()
        try:
            signal.setitimer(
                signal.ITIMER_REAL, self.draw.expovariate(1 / self.draw.choice(_ALARMS))
            )
            result = call(*args)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except (Deadline, Alarm):
            return None
        # Python drops what `tell` raises in `BufferedReader(stream)`, and `close` in a finalizer.
        if (
            self.alarms > alarms
            and self._dropped() == dropped
            and not re.search(r"in (tell|close)\b", self.interrupted)
        ):
            self.soak.wrong("errors", f"lost in {self.interrupted}")
        return result

    def _dropped(self) -> list[int]:
        """Return how often this process has dropped an alarm, and a collection may have done so."""
        return [self.alarms_in_finalizers, *[each["collections"] for each in gc.get_stats()]]

    def _pipeline(self) -> None:
        """Compare the samples of some shards; leave half of the pipelines early."""
        names = self.draw.sample(self.soak.names, 3)
        urls = [self._url(name) for name in names]
        pipeline = self.cache.attach(wds.WebDataset(urls, shardshuffle=False))
        due = names[: self.draw.choice((1, 2, 3, 3, 3))]
        for name, sample in zip(due, pipeline, strict=len(due) == 3):
            (data,) = (value for field, value in sample.items() if field.endswith("txt"))
            self.soak.check(f"the sample of {name}", data, self.soak.tars[name][512:][: len(data)])

    def _fork(self, readings: list[Reading]) -> tuple[int, threading.Thread, int]:
        """Fork a child that reads the same streams; returns the arguments of `_reap`."""
        soon, later = self.draw.expovariate(4), self.draw.uniform(0, 3)
        fates = [], [(soon, signal.SIGKILL)], [(soon, signal.SIGSTOP), (later, signal.SIGCONT)]
        (fate,) = self.draw.choices(fates, (6, 2, 2))
        child = Worker(self.soak, self.cache, self.parent, f"{self.draw.random()}")
        pid = self.soak.fork("a child", child.be_child, readings)

        def disturb() -> None:
            for seconds, number in fate:
                time.sleep(seconds)
                os.kill(pid, number)

        thread = threading.Thread(target=disturb)
        thread.start()
        return pid, thread, -signal.SIGKILL if fate is fates[1] else 0

    def be_child(self, readings: list[Reading]) -> None:
        self._finish(readings)
        self._finish([self._open() for _ in range(self.draw.randrange(3))])
        if self.draw.random() < 0.3:
            self._pipeline()
        collector = threading.Thread(target=gc.collect)
        collector.start()
        collector.join()
        if self.draw.random() < 0.5:
            self.cache.close()

    def _reap(self, pid: int, disturbing: threading.Thread, expected: int) -> None:
        disturbing.join()
        end = time.monotonic() + PATIENCE
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
            time.sleep(0.01)
            if time.monotonic() > end:
                self.soak.end_stuck("hangs", pid)
                return
        if (code := os.waitstatus_to_exitcode(found[1])) not in (0, expected):
            self.soak.wrong("errors", f"a child ended with status {code}")


def be_parent(soak: Soak, number: int, end: float) -> None:
    """Read and fork in several threads, lap by lap, and measure this process after each."""
    before, measured = len(descriptors()), list[Counter[str]]()
    cache = soak.cache_of(number)
    while time.monotonic() < end:
        lap = f"{soak.seed}/{number}/{len(measured)}"
        workers = [Worker(soak, cache, number, f"{lap}/{thread}") for thread in range(_THREADS)]
        until = min(end, time.monotonic() + _LAP)
        threads = [threading.Thread(target=worker.work, args=(until,)) for worker in workers]
        for thread in threads:
            thread.start()
        Worker(soak, cache, number, f"{lap}/main").be_interrupted(until)
        for thread in threads:
            thread.join()
        measured.append(measure(_BUFFERS * (number % 2)))
    if len(measured) >= _WARM_UP + 6:
        first, last = measured[_WARM_UP : _WARM_UP + 3], measured[-3:]
        for what, most in _GROWTH.items():
            if min(lap[what] for lap in last) - max(lap[what] for lap in first) > most:
                soak.wrong("leaks", f"parent {number}, {what}: {[lap[what] for lap in measured]}")
    cache.close()
    del cache, workers, threads
    gc.collect()
    if len(left := descriptors()) > before:
        soak.wrong("leaks", f"parent {number} has closed its cache, and has {left}")


def measure(buffers: int) -> Counter[str]:
    """Wait until all other threads have ended, and count what this process still holds.

    ``buffers`` are the bytes that an idle connection keeps, which are not counted.
    """
    gc.collect()
    # Not `threading.active_count`, which counts threads that an alarm kept from starting.
    try:
        wait_until(lambda: len(os.listdir("/proc/self/task")) == 1)
    except AssertionError:
        faulthandler.dump_traceback()
        raise
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    sockets = sum("socket:" in each for each in descriptors())
    (memory,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    held = {"sockets": sockets, "files": len(descriptors()) - sockets}
    return Counter(
        held, blocks=sys.getallocatedblocks(), memory=int(memory) * 1024 - sockets * buffers
    )


def watch(soak: Soak, seconds: float) -> None:
    """Start the parents, and look at the budget until they have ended."""
    end = time.monotonic() + seconds
    parents = {soak.fork(f"parent {n}", be_parent, soak, n, end) for n in range(_PARENTS)}
    while parents and time.monotonic() < end + 2 * PATIENCE:
        time.sleep(0.1)
        first, second = soak.stored(), soak.stored()
        # Files in two listings in a row existed at the same time.
        total = sum(size for file, size in first.items() if file in second)
        if total > soak.max_size:
            soak.wrong("budget", f"{total} bytes on disk, and max_size is {soak.max_size}")
        for pid in list(parents):
            found, status = os.waitpid(pid, os.WNOHANG)
            parents.discard(found)
            if status:
                soak.wrong("errors", f"a parent ended with status {status}")
    for pid in parents:
        soak.end_stuck("hangs", pid)


@pytest.mark.timeout(MINUTES * 60 + 1800)
def test_a_soak_breaks_no_promise(authority, context, tmp_path):
    def run(directory: Path, seed: int, seconds: float) -> Result:
        warnings.simplefilter("ignore")  # of forks in processes with threads
        faulthandler.register(signal.SIGUSR1)
        m_arena_max = -8
        ctypes.CDLL(None).mallopt(m_arena_max, 1)  # see _GROWTH
        os.environ["SSL_CERT_FILE"] = os.environ["AWS_CA_BUNDLE"] = authority[0]
        soak = Soak(directory, seed)
        gc.freeze()  # collections are frequent and need not visit modules
        with soak.serving() as plain, soak.serving(context) as secure:
            soak.addresses = plain, secure
            watch(soak, seconds)
            with soak.no_error("the last cleaning"):
                if left := swept(soak.root, soak.cache()):
                    soak.wrong("leftovers", f"{[str(path) for path in left]}")
                for path in below(soak.root, ".tar"):
                    soak.check(f"the entry {path}", path.read_bytes(), soak.tars[path.name])
        requests = {f"requests {name}": n for name, n in zip(FAULTS, soak.faulty, strict=True)}
        return {"bytes compared": soak.compared.value, **requests}, soak.violations()

    check(run, tmp_path)
