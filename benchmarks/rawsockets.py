"""The bound: what Python can move from sockets to files without any S3 at all.

A few threads, each with one kept connection, one buffer and a loop of ``recv_into`` and
``pwrite``. No signature, no retry, no checksum, no check of the version: nothing that fetches
shards for a training job may do so little, which is why it is a bound and no contestant.
"""

from __future__ import annotations

import os
import queue
import re
import socket
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["fetch"]

_BUFFER = 1 << 20
_CONTENT_RANGE = re.compile(rb"content-range: *bytes (\d+)-(\d+)/(\d+)", re.IGNORECASE)


@dataclass(slots=True)
class _File:
    url: str
    fd: int
    left: int = -1
    guard: threading.Lock = field(default_factory=threading.Lock)


_Part = tuple[_File, int]


class _Connection:
    """One kept connection and its buffer."""

    def __init__(self, url: str, authority: str | None) -> None:
        place = urlsplit(url)
        port = place.port or (443 if place.scheme == "https" else 80)
        self._host = f"{place.hostname}:{port}"
        self._socket = socket.create_connection((place.hostname, port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tls = place.scheme == "https"
        if self._tls:
            context = ssl.create_default_context(cafile=authority)
            self._socket = context.wrap_socket(self._socket, server_hostname=place.hostname)
        self._buffer = memoryview(bytearray(_BUFFER))

    def part(self, url: str, start: int, stop: int, fd: int) -> int:
        """Bring one range into the file; returns the size of the object."""
        place = urlsplit(url)
        target = place.path + (f"?{place.query}" if place.query else "")
        self._socket.sendall(
            f"GET {target} HTTP/1.1\r\nHost: {self._host}\r\n"
            f"Range: bytes={start}-{stop - 1}\r\n\r\n".encode()
        )
        filled, end = 0, -1
        while end < 0:
            count = self._socket.recv_into(self._buffer[filled:])
            if not count:
                raise ConnectionError("the server hung up in the middle of a head")
            filled += count
            end = bytes(self._buffer[:filled]).find(b"\r\n\r\n")
        head = bytes(self._buffer[:end])
        found = _CONTENT_RANGE.search(head)
        if not head.startswith(b"HTTP/1.1 206") or found is None:
            raise ConnectionError(head.split(b"\r\n")[0].decode("latin-1"))
        first, last, size = map(int, found.groups())
        self._body(fd, first, last + 1, self._buffer[end + 4 : filled])
        return size

    def _body(self, fd: int, position: int, stop: int, read: memoryview) -> None:
        position += os.pwrite(fd, read, position)
        filled = 0
        while position + filled < stop:
            count = self._socket.recv_into(
                self._buffer[filled:], min(_BUFFER - filled, stop - position - filled)
            )
            if not count:
                raise ConnectionError("the server hung up in the middle of a body")
            filled += count
            # TLS gives a record of 16 KiB at a time: worth a write when there are many.
            if not self._tls or filled == _BUFFER or position + filled == stop:
                position += os.pwrite(fd, self._buffer[:filled], position)
                filled = 0

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.close()


def fetch(
    urls: dict[str, Path], *, connections: int, part_size: int, authority: str | None = None
) -> None:
    """Bring objects into files.

    Args:
        urls: URL to file; all of one server.
        connections: threads, with a connection each.
        part_size: bytes per request; smaller objects take one request.
        authority: file of the authority to trust, for TLS.

    Raises:
        OSError: anything went wrong; nothing is tried again.
    """
    parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
    left = len(urls)
    guard = threading.Lock()
    failures: list[BaseException] = []

    def finish() -> None:
        for _ in range(connections):
            parts.put(None)

    def one(connection: _Connection, file: _File, start: int) -> bool:
        """Whether this was the object's last part."""
        size = connection.part(file.url, start, start + part_size, file.fd)
        with file.guard:
            if file.left < 0:
                rest = range(part_size, size, part_size)
                file.left = 1 + len(rest)
                for other in rest:
                    parts.put((file, other))
            file.left -= 1
            return file.left == 0

    def work() -> None:
        nonlocal left
        try:
            connection = _Connection(next(iter(urls)), authority)
            try:
                while (part := parts.get()) is not None:
                    if one(connection, *part):
                        os.close(part[0].fd)
                        with guard:
                            left -= 1
                            if not left:
                                finish()
            finally:
                connection.close()
        except BaseException as exn:  # noqa: BLE001 - raised by the thread that waits
            failures.append(exn)
            finish()

    for url, path in urls.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        parts.put((_File(url, fd), 0))
    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
