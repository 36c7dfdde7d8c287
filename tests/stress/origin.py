"""Shards that say what they are, and a web server for them in a process of its own.

Every 64 bytes of a shard state its name, its version and the offset of their 4 KiB block, so a byte
of another shard, another version or another place, a hole and a lost tail are all seen.

``GET /name`` answers a shard's newest version, with ranges, If-Match and an ETag. ``PUT /name``
makes a new version, ``PUT /?rate=N`` sets the bytes per second of a connection, ``PUT /?faults=60``
refuses or cuts off two requests in sixty, ``GET /`` tells how often each shard was begun.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

from tests.support.tars import tar_of
from tests.support.webservers import Scripted, answer

KIB, MIB = 1 << 10, 1 << 20
_LINE, _BLOCK, _HEAD, _END = 64, 4096, 512, 1024
_STATED = re.compile(rb"(\S+) version (\d{6}) offset (\d{10}) \.*\n")
_CHUNK = 64 * KIB


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
        """One version: a tar archive with one member. Every other version has a new size."""
        size = self.sizes[name] + 512 * (version // 2 % 16)
        lines = (
            f"{name} version {version:06d} offset {at:010d} ".encode().ljust(_LINE - 1, b".")
            for at in range(0, size, _BLOCK)
        )
        blocks = b"".join((line + b"\n") * (_BLOCK // _LINE) for line in lines)
        member = f"{name}.v{version}.txt", blocks[_HEAD : size - _END]
        return tar_of([member], whole_records=False)

    def examine(self, name: str, data: bytes) -> tuple[int, str | None]:
        """The version that the first line states, and what is wrong with the bytes, or None."""
        stated = _STATED.match(data, _HEAD)
        if stated is None:
            return 0, f"{len(data)} bytes that begin with {data[:64]!r}"
        version = int(stated[2])
        expected = self.data(name, version)
        if data == expected:
            return version, None
        steps = range(0, max(len(data), len(expected)), _LINE)
        at = next(at for at in steps if data[at : at + _LINE] != expected[at : at + _LINE])
        what = f"{len(data)} of {len(expected)} bytes of version {version}"
        return version, f"{what}; at {at} stands {data[at : at + _LINE]!r}"


class _Server(Scripted):
    def __init__(self, shards: Shards) -> None:
        super().__init__(self._serve, most=sys.maxsize)
        self.shards, self.versions, self.fetches = shards, Counter(), Counter()
        self.rate, self.faults = 12e6, 0.0
        self._guard = threading.Lock()

    def _serve(self, head: str) -> Iterator[bytes]:
        method, name = re.match(r"(\w+) /(\S*)", head).groups()
        if method == "PUT":
            return self._obey(name)
        if not name:
            return iter([answer("200 OK", json.dumps(self.fetches).encode(), Connection=None)])
        return self._shard(name, head, whole=method == "GET")

    def _obey(self, order: str) -> Iterator[bytes]:
        if order.startswith("?"):
            name, _, value = order[1:].partition("=")
            setattr(self, name, float(value))
        else:
            self.versions[order] += 1
        yield answer("200 OK", Connection=None)

    def _shard(self, name: str, head: str, whole: bool) -> Iterator[bytes]:
        version = self.versions[name]
        data, etag = self.shards.data(name, version), f'"v{version}"'
        pinned = re.search(r"\r\nIf-Match: (\S+)", head)
        fault = random.randrange(int(self.faults)) if self.faults else None
        headers: dict[str, object] = {"ETag": etag, "Connection": None}
        if pinned and pinned[1] != etag:
            yield answer("412 Precondition Failed", **headers)
            return
        if fault == 0:
            yield answer("503 Slow Down", Retry_After=0, **headers)
            return
        start, status = 0, "200 OK"
        if asked := re.search(r"\r\nRange: bytes=(\d+)-(\d*)", head):
            start, size = int(asked[1]), len(data)
            data = data[start : int(asked[2] or size) + 1]
            if start >= size:
                yield answer("416 Range", Content_Range=f"bytes */{size}", **headers)
                return
            status = "206 Partial"
            headers["Content_Range"] = f"bytes {start}-{start + len(data) - 1}/{size}"
        if start == 0 and whole:
            with self._guard:
                self.fetches[name] += 1
        yield answer(status, Content_Length=len(data), **headers)
        for at in range(0, len(data) if whole else 0, _CHUNK):
            if fault == 1 and at >= len(data) // 2:
                raise ConnectionAbortedError
            yield data[at : at + _CHUNK]
            time.sleep(len(data[at : at + _CHUNK]) / self.rate)


def die_with_parent() -> None:
    """For a forked process: nobody is left to end it."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _run(shards: Shards, said: Any) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _Server(shards)
    said.send(server.url)
    server.serve_forever()


class Origin:
    """The server's other end, which ends it when it is closed."""

    def __init__(self, shards: Shards) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(shards, theirs), daemon=True)
        self._process.start()
        self.url = self._pipe.recv()

    def _ask(self, method: str, path: str) -> bytes:
        with urlopen(Request(self.url + path, method=method), timeout=60) as answer:
            return bytes(answer.read())

    def set(self, name: str, value: float) -> None:
        """``rate`` or ``faults``, from now on."""
        self._ask("PUT", f"/?{name}={value}")

    def replace(self, name: str) -> None:
        """Store the next version of a shard."""
        self._ask("PUT", f"/{name}")

    def fetches(self) -> dict[str, int]:
        """How often each shard was begun from its first byte."""
        return dict(json.loads(self._ask("GET", "/")))

    def close(self) -> None:
        self._process.kill()
        self._process.join()
