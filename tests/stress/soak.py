"""``python -m tests.stress.soak --minutes 15``: processes that fork while they read.

Four parents read from one cache, two over HTTP and plain S3, two over TLS. Each of their threads
opens streams, reads a part, and forks. Parent and child both read the same streams to the end. A
stream begins with an entry, with a download that it follows, or past the cache. Children also open
other shards and run pipelines. Some children are killed or stopped, the garbage collector closes
some streams, and one request in twenty fails. The soak looks for

* bytes: a wrong byte, or a stream that ends early or late;
* errors: any exception. For a `TransferError`, all attempts of a request would have to fail, which
  happens once in 10^11 requests;
* hangs: a child or a parent that does not end within `PATIENCE`;
* leaks: a parent that keeps more threads, descriptors or memory than after its warm-up;
* budget: entries and downloads that take more than ``max_size``;
* leftovers: other files than entries after the last cleaning.

The seed decides what each thread does, and the kernel decides when. Exit 1 after a violation.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import os
import random
import re
import signal
import ssl
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import webdataset as wds

from shardcache import Cache
from tests.stress.origin import FAULTS, MIB, Origin, die_with_parent
from tests.stress.storm import below, end_stuck, leftovers
from tests.support.storetools import PATIENCE, age, descriptors, payload, wait_until
from tests.support.tars import tar_of
from tests.support.webservers import certificate

_PARENTS, _THREADS, _STREAMS = 4, 3, 4
#: A shard has 1 to 80 samples, so 0.1 to 8 MB. The size of a sample includes its header.
_SHARDS, _SAMPLE, _HEADER = 40, 100 * 1024, 512
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
_GROWTH = {"sockets": _SOCKETS, "files": 0, "blocks": 6000, "memory": 8 * MIB}


class WrongBytes(Exception):
    """A read gave other bytes than the origin has."""


class Soak(Origin):
    """The origin, the cache and the log that all processes share."""

    def __init__(self, directory: Path, seed: int) -> None:
        super().__init__(_SHARDS, seed)
        self.root, self.seed, self.begun = directory / "cache", seed, time.monotonic()
        self._log = directory / "log"
        self.samples = {
            name: int(80 ** random.Random(f"{seed}/{name}").random()) for name in self.names
        }
        self.tars = {}
        for number, (name, count) in enumerate(self.samples.items()):
            data = memoryview(payload(count * _SAMPLE, seed + number))
            samples = (data[at * _SAMPLE :][: _SAMPLE - _HEADER] for at in range(count))
            members = ((f"{at:04d}.bin", bytes(sample)) for at, sample in enumerate(samples))
            self.tars[name] = tar_of(members, whole_records=False)
        # Parents and transports see each shard under four URLs.
        self.max_size = int(4 * sum(map(len, self.tars.values())) * _ROOM)
        self.rate.value, self.faults.value = 20e6, _FAULTS

    def data(self, name: str, version: int) -> bytes:
        return self.tars[name]

    def cache(self, parent: int) -> Cache:
        return Cache(
            self.root,
            max_size=self.max_size,
            min_free=0,
            part_size=MIB,  # so that streams stop where an answer ends
            connections=_CONNECTIONS,
            attempts=_ATTEMPTS,
            timeout=_TIMEOUT,
            stale_after=2.0,
            lock_timeout=30.0,
            endpoint_url=self.addresses[parent % 2],
            storage_options={"key": "AK", "secret": "SK"},
        )

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

    def log(self, record: object) -> None:
        with open(self._log, "ab", buffering=0) as log:
            log.write(f"{json.dumps(record)}\n".encode())

    def wrong(self, promise: str, text: str) -> None:
        self.log([promise, f"{time.monotonic() - self.begun:.1f} s: {promise}: {text}"])

    @contextlib.contextmanager
    def no_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except WrongBytes as exn:
            self.wrong("bytes", f"{what}: {exn}")
        except Exception as exn:
            self.wrong("errors", f"{what}: {exn!r}\n{traceback.format_exc()[-3000:]}")

    def summary(self) -> tuple[Counter[str], list[list[str]]]:
        """Figures, and pairs of a promise and what broke it."""
        wrong, figures = [], Counter[str]()
        for name, count in zip(FAULTS, self.faulty, strict=True):
            figures[f"requests {name}"] = count
        for record in map(json.loads, self._log.read_text().splitlines()):
            if isinstance(record, list):
                wrong.append(record)
                continue
            for name, count in record.items():
                most = name.startswith(("longest", "most"))
                figures[name] = max(figures[name], count) if most else figures[name] + count
        return figures, wrong


def fork(soak: Soak, name: str, work: Callable[..., None], *args: object) -> int:
    """Fork a process that does some work; returns its process id."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            die_with_parent()
            with soak.no_error(name):
                work(*args)
            status = 0
        finally:
            os._exit(status)
    return pid


@dataclass(slots=True)
class Reading:
    """A stream, and how far it was read."""

    name: str
    stream: BinaryIO
    position: int = 0
    stop: int | None = None  # where its reader leaves it

    @property
    def is_stored(self) -> bool:
        return "://" not in str(self.stream.name)


class Worker:
    """The work of one thread of a parent, or of a child that it forks."""

    def __init__(self, soak: Soak, cache: Cache, parent: int, seed: str) -> None:
        self.soak, self.cache, self.parent = soak, cache, parent
        self.draw, self.counts = random.Random(seed), Counter[str]()

    def work(self, end: float) -> None:
        while time.monotonic() < end:
            with self.soak.no_error("a parent"), contextlib.ExitStack() as stack:
                readings = [self._open() for _ in range(self.draw.randint(1, _STREAMS))]
                if self.draw.random() < 0.5:
                    stack.callback(self._reap, *self._fork(readings))
                self._finish(readings)
                if self.draw.random() < 0.2:
                    self._pipeline()
        self.soak.log(self.counts)

    def _url(self, name: str) -> str:
        return f"{self.draw.choice(('s3://lab', self.soak.addresses[self.parent % 2]))}/{name}"

    def _open(self) -> Reading:
        """Open a shard and read some of it, perhaps to the very end of an answer."""
        name = self.draw.choice(self.soak.names)
        reading = Reading(name, self.cache.open(self._url(name)))
        where = "entries" if reading.is_stored else "downloads or the origin"
        self.counts[f"streams that begin with {where}"] += 1
        self._read(reading, self.draw.choice((0, self.draw.randrange(2 * MIB), MIB)))
        return reading

    def _read(self, reading: Reading, most: int) -> int:
        """Read and compare; returns the number of bytes."""
        begun, at = time.monotonic(), reading.position
        data, expected = reading.stream.read(most), self.soak.tars[reading.name][at : at + most]
        longest = max(self.counts["longest read, s"], time.monotonic() - begun)
        self.counts["longest read, s"] = longest
        if data != expected:
            pairs = zip([*data, None], [*expected, None], strict=False)
            right = next(at for at, (one, other) in enumerate(pairs) if one != other)
            found = {name: tar.find(data[right:][:16]) for name, tar in self.soak.tars.items()}
            raise WrongBytes(
                f"{reading.stream.name}: at {at} a read of {len(expected)} bytes gave {len(data)}, "
                f"of which {right} are right; the next ones stand in "
                f"{ {name: at for name, at in found.items() if at >= 0} }"
            )
        self.counts["reads"] += 1
        self.counts["bytes compared"] += len(data)
        reading.position += len(data)
        return len(data)

    def _finish(self, readings: list[Reading]) -> None:
        """Read streams by turns, most of them to the end, and leave them."""
        for reading in readings:
            reading.stop = self.draw.choice((None, None, None, MIB, self.draw.randrange(4 * MIB)))
        while readings:
            reading = self.draw.choice(readings)
            most = self.draw.randrange(1, 600_000)
            if reading.stop is not None:
                most = min(most, max(0, reading.stop - reading.position))
            if self._read(reading, most):
                continue
            where = "a file" if reading.is_stored else "the origin"
            self.counts[f"streams that end with {where}"] += 1
            readings.remove(reading)
            if self.draw.random() < 0.4:
                self.counts["streams dropped in a cycle"] += 1
                cycle: list[object] = [reading.stream]
                cycle.append(cycle)
            else:
                reading.stream.close()
            if self.draw.random() < 0.3:
                self.cache.remove(self._url(reading.name))  # so that other shards find room
            if self.draw.random() < 0.05:
                gc.collect()

    def _pipeline(self) -> None:
        """Compare the samples of three shards, or of some of them."""
        names = self.draw.sample(self.soak.names, 3)
        due = [(name, at) for name in names for at in range(self.soak.samples[name])]
        leaves = self.draw.random() < 0.5
        urls = [self._url(name) for name in names]
        pipeline = self.cache.attach(wds.WebDataset(urls, shardshuffle=False))
        self.counts["pipelines"] += 1
        for (name, at), sample in zip(due, pipeline, strict=True):
            data = memoryview(self.soak.tars[name])[at * _SAMPLE + _HEADER : (at + 1) * _SAMPLE]
            if sample["bin"] != bytes(data):
                raise WrongBytes(f"sample {at} of {name}")
            self.counts["bytes compared"] += len(data)
            if leaves and self.draw.random() < 0.05:
                self.counts["pipelines left"] += 1
                break

    def _fork(self, readings: list[Reading]) -> tuple[int, threading.Thread, int]:
        """Fork a child that reads the same streams; returns the arguments of `_reap`."""
        soon, later = self.draw.expovariate(4), self.draw.uniform(0, 3)
        fates = [], [(soon, signal.SIGKILL)], [(soon, signal.SIGSTOP), (later, signal.SIGCONT)]
        (fate,) = self.draw.choices(fates, (6, 2, 2))
        self.counts["forks"] += 1
        self.counts[f"children: {fate[0][1].name if fate else 'not disturbed'}"] += 1
        child = Worker(self.soak, self.cache, self.parent, f"{self.draw.random()}")
        pid = fork(self.soak, "a child", child.be_child, readings)
        thread = threading.Thread(target=disturb, args=(pid, fate))
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
        self.soak.log(self.counts)

    def _reap(self, pid: int, disturbing: threading.Thread, expected: int) -> None:
        disturbing.join()
        end = time.monotonic() + PATIENCE
        while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
            time.sleep(0.01)
            if time.monotonic() > end:
                self.soak.wrong("hangs", f"the child {pid}; stderr has its stack")
                end_stuck(pid)
                return
        if (code := os.waitstatus_to_exitcode(found[1])) not in (0, expected):
            self.soak.wrong("errors", f"a child ended with status {code}")


def disturb(pid: int, fate: list[tuple[float, int]]) -> None:
    """Send signals to a child that has not been reaped, each after some seconds."""
    for seconds, number in fate:
        time.sleep(seconds)
        os.kill(pid, number)


def be_parent(soak: Soak, number: int, end: float) -> None:
    """Read and fork in several threads, lap by lap, and measure this process after each."""
    before, measured = len(descriptors()), list[Counter[str]]()
    cache = soak.cache(number)
    while time.monotonic() < end:
        lap = f"{soak.seed}/{number}/{len(measured)}"
        workers = [Worker(soak, cache, number, f"{lap}/{thread}") for thread in range(_THREADS)]
        until = min(end, time.monotonic() + _LAP)
        threads = [threading.Thread(target=worker.work, args=(until,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        measured.append(measure())
    compare(soak, number, measured)
    cache.close()
    del cache, workers, threads
    gc.collect()
    if len(left := descriptors()) > before:
        soak.wrong("leaks", f"parent {number} has closed its cache, and has {left}")


def measure() -> Counter[str]:
    """Wait until all other threads have ended, and count what this process still holds."""
    gc.collect()
    wait_until(lambda: threading.active_count() == 1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    sockets = sum("socket:" in each for each in descriptors())
    (memory,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    held = {"sockets": sockets, "files": len(descriptors()) - sockets}
    return Counter(held, blocks=sys.getallocatedblocks(), memory=int(memory) * 1024)


def compare(soak: Soak, number: int, measured: list[Counter[str]]) -> None:
    """Compare what a parent held after its last laps with what it held after the warm-up."""
    first, last = measured[_WARM_UP : _WARM_UP + 3], measured[-3:]
    if len(measured) < _WARM_UP + 6:
        return
    grown = {k: min(m[k] for m in last) - max(m[k] for m in first) for k in _GROWTH}
    soak.log({f"most growth of {what}": max(0, more) for what, more in grown.items()})
    soak.log({"laps of parents": len(measured)})
    if any(grown[what] > most for what, most in _GROWTH.items()):
        soak.wrong("leaks", f"parent {number}: {[dict(each) for each in measured]}")


def watch(soak: Soak, seconds: float) -> None:
    """Start the parents, and look at the budget until they have ended."""
    end = time.monotonic() + seconds
    parents = {fork(soak, f"parent {n}", be_parent, soak, n, end) for n in range(_PARENTS)}
    while parents and time.monotonic() < end + 2 * PATIENCE:
        time.sleep(0.1)
        first, second = soak.stored(), soak.stored()
        # Files in two listings in a row existed at the same time.
        total = sum(size for file, size in first.items() if file in second)
        soak.log({"most of max_size, %": 100 * total / soak.max_size})
        if total > soak.max_size:
            soak.wrong("budget", f"{total} bytes on disk, and max_size is {soak.max_size}")
        for pid in list(parents):
            found, status = os.waitpid(pid, os.WNOHANG)
            parents.discard(found)
            if status:
                soak.wrong("errors", f"a parent ended with status {status}")
    for pid in parents:
        soak.wrong("hangs", f"the parent {pid}; stderr has its stack")
        end_stuck(pid)


def audit(soak: Soak) -> None:
    """Clean, and find entries and nothing else."""
    age(soak.root / "v1" / "partial")  # temporary files of killed children stay for a while
    with soak.no_error("the last cleaning"):
        with soak.cache(0) as cache:
            cache.clean(orphans=True)
        if left := leftovers(soak.root):
            soak.wrong("leftovers", f"{[str(path) for path in left]}")
        for path in below(soak.root, ".tar"):
            if path.read_bytes() != soak.tars[path.name]:
                soak.wrong("bytes", f"the entry {path}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stress.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    logging.disable()  # warnings are expected
    warnings.simplefilter("ignore")  # of forks in processes with threads
    faulthandler.register(signal.SIGUSR1)
    m_arena_max = -8
    ctypes.CDLL(None).mallopt(m_arena_max, 1)  # see _GROWTH
    with tempfile.TemporaryDirectory(prefix="shardcache-soak-") as directory:
        authority, key = certificate(Path(directory))
        os.environ["SSL_CERT_FILE"] = os.environ["AWS_CA_BUNDLE"] = authority
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(authority, key)
        soak = Soak(Path(directory).resolve(), given.seed)
        gc.freeze()  # collections are frequent and need not visit modules
        with soak.serving() as plain, soak.serving(tls) as secure:
            soak.addresses = plain, secure
            watch(soak, given.minutes * 60)
            audit(soak)
        figures, wrong = soak.summary()
    print("| | |\n|---|--:|")
    for name in sorted(figures):
        print(f"| {name} | {figures[name]:,.{0 if figures[name] % 1 == 0 else 1}f} |")
    print("", *(text for _, text in wrong[:20]), sep="\n\n")
    broken = ", ".join(f"{n} {name}" for name, n in Counter(each[0] for each in wrong).items())
    print(f"\nseed {given.seed}: {broken or 'all held'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
