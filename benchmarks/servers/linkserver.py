"""Serve files as S3 objects, as fast as a slow link.

A file ``BUCKET/KEY`` below the root is an object, for GET with a range and HEAD, with path-style
addresses. Signatures are not checked, and there are no listings.

Bytes go from the page cache to the socket by ``sendfile``, so a server without limits is faster
than its clients. Each connection has a thread. Several processes can share one port, because one
interpreter cannot serve thousands of small requests per second.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from email.utils import formatdate
from hashlib import md5
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import unquote

from tests.stress.harness import die_with_parent
from tests.support.storetools import Parent

#: Bytes per ``sendfile`` with a rate. At 80 MB/s this is one every 3 ms, which a sleeping thread
#: can keep up with.
_CHUNK = 256 << 10
#: Bytes per ``sendfile`` without a rate.
_WHOLE = 8 << 20
#: Seconds that a thread which woke up late may catch up on. A link does not store unused bandwidth.
_BURST_SECONDS = 0.01


class Link(ThreadingTCPServer):
    """The server of one process.

    Args:
        port: Port of 127.0.0.1, which processes share; 0 for a free one.
        root: Directory of buckets.
        delay: Seconds from a request to the first byte of its response.
        rate: Bytes per second of one connection, over all its responses; 0 for no limit.
        fetches: A shared number, to which each response that begins an object adds one.
    """

    allow_reuse_address = allow_reuse_port = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, root: Path, delay: float, rate: float, fetches: Any) -> None:
        self.root, self.delay, self.rate, self.fetches = root, delay, rate, fetches
        super().__init__(("127.0.0.1", port), _Connection)

    def server_bind(self) -> None:
        """Bind the socket to its port."""
        # BBR, which some systems have by default, paces loopback to half its speed.
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        super().server_bind()


class _Connection(BaseHTTPRequestHandler):
    server: Link
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    due = 0.0  # when the next byte may be sent

    def do_GET(self) -> None:
        first_byte = time.monotonic() + self.server.delay
        path = self.server.root / unquote(self.path.partition("?")[0]).lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            start, stop, status = 0, found.st_size, 200
            if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or ""):
                start, status = int(span[1]), 206
                stop = min(stop, int(span[2]) + 1 if span[2] else stop)
            if start > stop:
                self.send_error(416)
                return
            time.sleep(max(0.0, first_byte - time.monotonic()))
            # It has the form of a multipart upload's, because clients compare others as an MD5.
            identity = md5(f"{path} {found.st_mtime_ns}".encode(), usedforsecurity=False)
            self.send_response(status)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{identity.hexdigest()}-2"')
            self.send_header("Last-Modified", formatdate(found.st_mtime, usegmt=True))
            self.send_header("Content-Type", "application/x-tar")
            self.send_header("Content-Length", str(stop - start))
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{found.st_size}")
            self.end_headers()
            if self.command == "GET":
                if start == 0:
                    with self.server.fetches.get_lock():
                        self.server.fetches.value += 1
                self._send(file.fileno(), start, stop)

    do_HEAD = do_GET  # noqa: N815 - http.server looks for these names

    def _send(self, file: int, position: int, stop: int) -> None:
        """Send bytes of a file, as fast as the connection may."""
        while position < stop:
            count = min(_CHUNK if self.server.rate else _WHOLE, stop - position)
            if self.server.rate:
                now = time.monotonic()
                time.sleep(max(0.0, self.due - now))
                self.due = max(self.due, now - _BURST_SECONDS) + count / self.server.rate
            end = position + count
            while position < end:
                position += os.sendfile(self.connection.fileno(), file, position, end - position)

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client may have gone
            super().handle()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def serve(parent: Parent, *link: Any) -> None:
    """Serve a `Link` in a forked process; its first message is the port."""
    die_with_parent()
    with Link(*link) as server:
        parent.say(server.server_address[1])
        server.serve_forever()
