"""Web servers on real sockets, whose responses a test chooses."""

import contextlib
import os
import re
import socket
import socketserver
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, MutableSequence
from typing import Any


class Scripted(socketserver.ThreadingTCPServer):
    """A server that responds with ``answer(request head)``, which may be an iterator of pieces.

    If a test sets ``refuse``, and ``refuse(head)`` is not empty, the server sends that instead.
    A connection ends after ``most`` responses, or when the iterator raises an OSError; a
    ConnectionResetError resets it. With ``close_notify``, the server announces the end in TLS.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer, most=1, *, close_notify=False) -> None:
        self.answer = answer
        self.refuse: Callable[[str], bytes | None] = lambda head: None
        self.most = most
        self.close_notify = close_notify
        self.heads: MutableSequence[str] = []
        self.clients: set[socket.socket] = set()  # of open connections
        self.scheme = "http"
        super().__init__(("127.0.0.1", 0), Connection)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Speak TLS with this certificate."""
        # Shake hands in the connection's thread, so that a failure does not stop the server.
        options = {"server_side": True, "do_handshake_on_connect": False}
        self.socket = context.wrap_socket(self.socket, **options)
        self.scheme = "https"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.clients.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        if self.close_notify and isinstance(request, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):  # either side may have closed it
                request.settimeout(0)  # do not wait for the client's close_notify
                request.unwrap()
        super().shutdown_request(request)
        self.clients.discard(request)


class Connection(socketserver.StreamRequestHandler):
    server: Scripted
    disable_nagle_algorithm = True

    def handle(self) -> None:
        try:
            for _ in range(self.server.most):
                head = ""
                while not head.endswith("\r\n\r\n"):
                    if not (line := self.rfile.readline()):
                        return
                    head += line.decode("latin-1")
                self.server.heads.append(head)
                response = self.answer(head)
                for piece in [response] if isinstance(response, bytes) else response:
                    self.wfile.write(piece)
        except ConnectionResetError:
            linger = struct.pack("@ii", 1, 0)  # 0 s: close() resets the connection
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            os.close(self.connection.detach())
        except OSError:
            pass  # the client may have gone

    def answer(self, head: str) -> bytes | Iterator[bytes]:
        return self.server.refuse(head) or self.server.answer(head)


def answer(status: str, body: bytes = b"", **headers: object) -> bytes:
    """Return a response; headers with the value None are left out."""
    headers = {"Content_Length": len(body), "ETag": '"v1"', "Connection": "close", **headers}
    stated = {name.replace("_", "-"): v for name, v in headers.items() if v is not None}
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in stated.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def part_of(data: bytes, head: str, **headers: object) -> tuple[bytes, bytes]:
    """Return head and body of a response: the requested range, or all data."""
    status, size = "200 OK", len(data)
    if found := re.search(r"\r\nRange: bytes=(\d+)-(\d*)", head):
        start = int(found[1])
        data = data[start : int(found[2] or size) + 1]
        status = "206 Partial"
        headers.setdefault("Content_Range", f"bytes {start}-{start + len(data) - 1}/{size}")
    return answer(status, **{"Connection": None, "Content_Length": len(data), **headers}), data


def listing(*keys: str, size: int = 1, more: str = "") -> bytes:
    """Return a page on which S3 lists objects of this size."""
    found = "".join(f"<Contents><Key>{key}</Key><Size>{size}</Size></Contents>" for key in keys)
    return f"<ListBucketResult>{found}{more}</ListBucketResult>".encode()


def store_of(data: bytes, *keys: str) -> Callable[[str], bytes]:
    """Return a function that responds as an S3 store; it has an object under every key."""

    def respond(head: str) -> bytes:
        if "list-type=2" in head:
            return answer("200 OK", listing(*keys, size=len(data)), Connection=None)
        stated, body = part_of(data, head)
        return stated if head.startswith("HEAD") else stated + body

    return respond


class Files(Scripted):
    """A server of ``files``, which honours ranges."""

    def __init__(self) -> None:
        super().__init__(self.file, most=100)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.held: dict[str, tuple[int, threading.Event]] = {}

    def hold(self, path: str, after: int) -> threading.Event:
        """Pause responses for a file after ``after`` bytes, until the returned event is set."""
        self.held[path] = after, threading.Event()
        return self.held[path][1]

    def file(self, head: str) -> bytes | Iterator[bytes]:
        method, path = re.split("[ ?]", head)[:2]
        if path in self.redirects:
            return answer("302 Found", Location=self.redirects[path])
        if path not in self.files:
            return answer("404 Not Found")
        stated, body = part_of(self.files[path], head, ETag=f'"{hash(self.files[path])}"')
        if method == "HEAD":
            return stated
        return self._paused(stated, body, *self.held[path]) if path in self.held else stated + body

    def _paused(self, head: bytes, body: bytes, after: int, event: threading.Event):
        yield head + body[:after]
        event.wait()
        yield body[after:]


@contextlib.contextmanager
def running(server: Scripted, tls: ssl.SSLContext | None = None) -> Iterator[Scripted]:
    """Serve in a background thread."""
    if tls is not None:
        server.use_tls(tls)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
