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
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

from tests.support.tars import tar_of

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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    shards: Shards
    versions: Counter[str]
    fetches: Counter[str]
    guard = threading.Lock()
    rate = 12e6
    faults = 0.0

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        if not name:
            return self._answer(200, json.dumps(self.fetches).encode())
        version = self.versions[name]
        data, etag = self.shards.data(name, version), f'"v{version}"'
        if self.headers.get("If-Match", etag) != etag:
            return self._answer(412)
        start, end = 0, len(data)
        status, headers = 200, {"ETag": etag, "Accept-Ranges": "bytes"}
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1 if last else end)
            if start >= len(data):
                return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(data)}"
        fault = random.randrange(int(self.faults)) if self.faults else None
        if fault == 0:
            return self._answer(503, b"slow down", {"Retry-After": "0"})
        if start == 0 and self.command == "GET":
            with self.guard:
                self.fetches[name] += 1
        return self._answer(status, data[start:end], headers, cut=fault == 1)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        if self.path.startswith("/?"):
            key, value = self.path[2:].split("=")
            setattr(_Handler, key, float(value))
        else:
            with self.guard:
                self.versions[self.path.lstrip("/")] += 1
        self._answer(200)

    def _answer(
        self, status: int, body: bytes = b"", headers: Any = None, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        for at in range(0, len(body) if self.command != "HEAD" else 0, _CHUNK):
            if cut and at >= len(body) // 2:
                self.close_connection = True
                return
            self.wfile.write(body[at : at + _CHUNK])
            time.sleep(len(body[at : at + _CHUNK]) / self.rate)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


def die_with_parent() -> None:
    """For a forked process: nobody is left to end it."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _serve(shards: Shards, said: Any) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Handler.shards, _Handler.versions, _Handler.fetches = shards, Counter(), Counter()
    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.handle_error = lambda *_: None  # clients are killed all the time
    said.send(server.server_address[1])
    server.serve_forever()


class Origin:
    """The server's other end, which ends it when it is closed."""

    def __init__(self, shards: Shards) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(shards, theirs), daemon=True)
        self._process.start()
        self.url = f"http://127.0.0.1:{self._pipe.recv()}"

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
