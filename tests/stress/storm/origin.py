"""The origin of a storm: a web server in a process of its own, slow and faulty on demand.

``GET /name`` answers a shard's newest version, with ranges, If-Match and an ETag; one request in
`_FAULTS` is refused or cut off. ``PUT /name`` makes a new version, ``PUT /?rate=N`` sets the bytes
per second of a connection, ``GET /`` tells how often each shard was begun from its first byte.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

from tests.stress.storm.plan import KIB, Storm

_FAULTS = 60
_CHUNK = 64 * KIB


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    storm: Storm
    versions: Counter[str]
    fetches: Counter[str]
    guard = threading.Lock()
    rate = 12e6
    faults = False

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        if not name:
            return self._answer(200, json.dumps(self.fetches).encode())
        if name not in self.storm.sizes:
            return self._answer(404)
        version = self.versions[name]
        data, etag = self.storm.data(name, version), f'"v{version}"'
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
        fault = random.randrange(_FAULTS) if self.faults else None
        if fault == 0:
            return self._answer(503, b"slow down", {"Retry-After": "0"})
        if start == 0 and self.command == "GET":
            with self.guard:
                self.fetches[name] += 1
        return self._answer(status, data[start:end], headers, cut=fault == 1)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        if self.path.startswith("/?"):
            for key, value in (part.split("=") for part in self.path[2:].split("&")):
                setattr(_Handler, key, float(value))
        else:
            with self.guard:
                self.versions[self.path.lstrip("/")] += 1
        self._answer(200)

    def _answer(
        self, status: int, body: bytes = b"", headers: Any = None, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        for at in range(0, len(body), _CHUNK):
            if cut and at >= len(body) // 2:
                self.close_connection = True
                return
            self.wfile.write(body[at : at + _CHUNK])
            time.sleep(len(body[at : at + _CHUNK]) / self.rate)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


def _serve(storm: Storm, said: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Handler.storm, _Handler.versions, _Handler.fetches = storm, Counter(), Counter()

    ThreadingHTTPServer.request_queue_size = 256
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.handle_error = lambda *_: None  # clients are killed all the time
    said.send(server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    said.poll(None)  # until the other end is closed


class Origin:
    """The server's other end; ends it when it is closed."""

    def __init__(self, storm: Storm) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(storm, theirs), daemon=True)
        self._process.start()
        self.url = f"http://127.0.0.1:{self._pipe.recv()}"

    def ask(self, method: str, path: str) -> bytes:
        with urlopen(Request(self.url + path, method=method), timeout=60) as answer:
            return bytes(answer.read())

    def fetches(self) -> dict[str, int]:
        return dict(json.loads(self.ask("GET", "/")))

    def close(self) -> None:
        self._process.kill()
        self._process.join()
