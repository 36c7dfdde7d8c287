"""Shards that describe themselves, and a web server for them in its own process."""

import ctypes
import random
import re
import signal
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray, RawValue

from tests.support.storetools import Parent, forked
from tests.support.tars import difference, labelled_tar
from tests.support.webservers import Scripted, answer, part_of

KIB, MIB = 1 << 10, 1 << 20
_STATED = re.compile(rb"\S+ version (\d{6}) offset ")
_CHUNK = 64 * KIB
#: Faults of a request, and the duration of a stall in seconds.
FAULTS, _STALL = ("refused", "cut off", "reset", "stalled"), 1.0


class Shards:
    """The shards of one seed: mostly of one block, some of two to five."""

    def __init__(self, count: int, seed: int) -> None:
        draw = random.Random(seed)
        spans = ((64 * KIB, 256 * KIB), (256 * KIB, MIB), (MIB, 5 * MIB))
        self.sizes = {
            f"shard-{number:04d}.tar": draw.randrange(*draw.choices(spans, (50, 25, 25))[0]) & ~511
            for number in range(count)
        }
        self.names = list(self.sizes)

    def data(self, name: str, version: int) -> bytes:
        """Return one version, a tar archive of one member; every other version has a new size."""
        return labelled_tar(name, version, self.sizes[name] + 512 * (version // 2 % 16))

    def examine(self, name: str, data: bytes) -> tuple[int, str | None]:
        """Return the version that the first line states, and the first fault of the bytes."""
        stated = _STATED.match(data, 512)  # after the header of the member
        version = int(stated[1]) if stated else 0
        return version, difference(data, self.data(name, version)) or None


class Origin(Shards):
    """The shards on a server. Processes that are forked later share its settings."""

    address: str

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.versions = RawArray("q", count)  # current versions
        self.fetches = RawArray("q", count)  # requests from the first byte
        self.rate = RawValue("d", 1e9)  # bytes per second of a connection
        self.faults = RawValue("q", 0)  # each fault hits 1 in this many requests; 0 for none
        self.faulty = RawArray("q", len(FAULTS))  # requests that each fault has hit
        self._guard = threading.Lock()

    @contextmanager
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
