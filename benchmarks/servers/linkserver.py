"""An S3-shaped server as slow as a link: ``python -m benchmarks.servers.linkserver --root DIR``.

Serves the files of ``DIR/BUCKET/`` as objects: GET with Range and If-Match, HEAD and
ListObjectsV2, path-style, to anybody, whatever the signature. What makes it a link:

* ``--delay``: seconds from the end of a request to the first byte of its answer, every answer's;
* ``--rate``: bytes per second of one connection, over all of its answers.

Bytes go from the page cache to the socket by ``sendfile``, so with neither of the two it
outruns the clients. A connection has a thread, and the threads share nothing but the ETags:
any number of connections may be served at once. ``--processes`` share one port, where one
interpreter's lock would be the bottleneck (thousands of small requests per second).

The port is printed when it listens. The server ends when its standard input is closed, so it
does not outlive who started it. ``--log`` gets a line per answer, written whole.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qs, unquote

from benchmarks.servers.linkanswers import Answer, listing, ranged, refused

__all__ = ["BURST_SECONDS", "CHUNK", "Link", "Pace", "main"]

#: Bytes per ``sendfile`` on a paced connection: at 80 MB/s one every 3 ms, which a
#: sleeping thread can keep up with.
CHUNK = 256 << 10
#: Bytes per ``sendfile`` where nothing is paced.
_WHOLE = 8 << 20
#: A thread that woke late may catch up on so much, no more: a link does not store its rate.
BURST_SECONDS = 0.01
#: Most of a request's head; signed requests have some 1,500 bytes.
_HEAD_BYTES = 64 << 10
#: Larger objects are taken for multipart uploads in parts of so much, as the AWS command
#: line makes them: their ETag is no MD5, which some clients would compare.
_PART = 8 << 20
_BACKLOG = 1024


class Pace:
    """Lets ``rate`` bytes per second of one connection through; 0 lets everything through."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.chunk = CHUNK if rate else _WHOLE
        self._due = 0.0

    def wait(self, count: int) -> None:
        """Return when ``count`` more bytes may be sent."""
        if not self.rate:
            return
        now = time.monotonic()
        if self._due > now:
            time.sleep(self._due - now)
        self._due = max(self._due, now - BURST_SECONDS) + count / self.rate


class Link:
    """What every connection of a process shares.

    Args:
        root: directory of buckets.
        delay: seconds to the first byte.
        rate: bytes per second and connection, 0 for as fast as it goes.
        log: descriptor that gets a line per answer, or None.
    """

    def __init__(self, root: Path, *, delay: float, rate: float, log: int | None = None) -> None:
        self.root = root.resolve()
        self.delay = delay
        self.rate = rate
        self.log = log
        self._etags: dict[tuple[str, int, int], str] = {}

    def etag(self, path: Path, found: os.stat_result) -> str:
        """Quoted; another one whenever the file is another."""
        row = (str(path), found.st_size, found.st_mtime_ns)
        if row not in self._etags:
            if found.st_size > _PART:
                mark = hashlib.md5(repr(row).encode(), usedforsecurity=False).hexdigest()
                self._etags[row] = f'"{mark}-{-(-found.st_size // _PART)}"'
            else:
                mark = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
                self._etags[row] = f'"{mark}"'
        return self._etags[row]

    def serve(self, client: socket.socket) -> None:
        """Answer one connection's requests until it is closed."""
        pace = Pace(self.rate)
        with client, contextlib.suppress(ConnectionError, TimeoutError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pending = b""
            while (request := _read_head(client, pending)) is not None:
                head, pending = request
                if not self._answer(client, head, pace):
                    return

    def _answer(self, client: socket.socket, head: bytes, pace: Pace) -> bool:
        """Whether the connection goes on."""
        method, target, headers = _parse(head)
        begun = time.monotonic()
        answer, file = self._find(method, target, headers)
        try:
            time.sleep(max(0.0, self.delay - (time.monotonic() - begun)))
            body = b"" if method == "HEAD" else answer.body
            client.sendall(answer.head() + body)
            if file is not None and method == "GET":
                _send_file(client, file, answer.start, answer.stop, pace)
        finally:
            if file is not None:
                os.close(file)
            self._note(method, target, answer)
        # A body of another method was not read, and must not be taken for the next request.
        return method in ("GET", "HEAD") and headers.get("connection", "").lower() != "close"

    def _find(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> tuple[Answer, int | None]:
        raw, _, query = target.partition("?")
        bucket, _, key = unquote(raw).lstrip("/").partition("/")
        home = self.root / bucket
        if method not in ("GET", "HEAD"):
            return refused(405, "MethodNotAllowed"), None
        if not bucket or not home.is_dir():
            return refused(404, "NoSuchBucket"), None
        if not key:
            return listing(home, parse_qs(query, keep_blank_values=True), self.etag), None
        path = home / key
        try:
            if not path.resolve().is_relative_to(home):
                raise FileNotFoundError(path)
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return refused(404, "NoSuchKey"), None
        found = os.fstat(file)
        if not os.path.isfile(path):
            os.close(file)
            return refused(404, "NoSuchKey"), None
        modified = formatdate(found.st_mtime, usegmt=True)
        return ranged(headers, found.st_size, self.etag(path, found), modified), file

    def _note(self, method: str, target: str, answer: Answer) -> None:
        if self.log is not None:
            path = unquote(target.partition("?")[0]).lstrip("/")
            line = f"{method} {answer.status} {answer.start} {answer.stop} {path}\n"
            os.write(self.log, line.encode())


def _read_head(client: socket.socket, pending: bytes) -> tuple[bytes, bytes] | None:
    """The next request's head and what came behind it; None at the end."""
    while b"\r\n\r\n" not in pending:
        more = client.recv(_HEAD_BYTES)
        if not more or len(pending) > _HEAD_BYTES:
            return None
        pending += more
    head, _, rest = pending.partition(b"\r\n\r\n")
    return head, rest


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, *_ = (*first.split(" "), "", "")
    fields = (line.partition(":") for line in lines)
    return method, target, {name.strip().lower(): value.strip() for name, _, value in fields}


def _send_file(client: socket.socket, file: int, start: int, stop: int, pace: Pace) -> None:
    while start < stop:
        count = min(pace.chunk, stop - start)
        pace.wait(count)
        while count:
            sent = os.sendfile(client.fileno(), file, start, count)
            if not sent:
                raise ConnectionError("the object became shorter")
            start += sent
            count -= sent


def _listen(port: int) -> socket.socket:
    server = socket.socket()
    # Several processes take their connections from one port.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # A sender's congestion control is its own choice; BBR paces loopback to half its speed.
    with contextlib.suppress(OSError):
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    server.bind(("127.0.0.1", port))
    server.listen(_BACKLOG)
    return server


def _serve_for_ever(server: socket.socket, link: Link) -> None:
    while True:
        client, _ = server.accept()
        threading.Thread(target=link.serve, args=(client,), daemon=True).start()


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory of buckets")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds to the first byte")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes/s of one connection")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--log", type=Path, help="gets a line per answer")
    arguments = parser.parse_args()
    server = _listen(arguments.port)
    servers = [server]
    for _ in range(arguments.processes - 1):
        servers.append(_listen(server.getsockname()[1]))
    parent = os.getpid()
    for other in servers[1:]:
        if os.fork() == 0:
            server = other
            break
    for other in servers:
        if other is not server:
            other.close()
    mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    log = os.open(arguments.log, mode, 0o600) if arguments.log else None
    link = Link(arguments.root, delay=arguments.delay, rate=arguments.rate, log=log)
    threading.Thread(target=_serve_for_ever, args=(server, link), daemon=True).start()
    if os.getpid() == parent:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
    # Every process holds the pipe's end, so each sees it close.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
