"""Serve files as S3 objects, as fast as a slow link: ``python -m benchmarks.servers.linkserver``.

Below ``--root``, each file ``BUCKET/KEY`` is an object: GET with Range and If-Match, HEAD and
ListObjectsV2, with path-style addresses. Signatures are not checked. Two options make it a link:

* ``--delay``: seconds from the end of a request to the first byte of its response
* ``--rate``: bytes per second of one connection, over all its responses

Bytes go from the page cache to the socket by ``sendfile``, so without these limits the server is
faster than its clients. Each connection has a thread. With ``--processes``, several interpreters
share one port, because one cannot serve thousands of small requests per second.

The server prints its port when it listens, and ends when its standard input is closed. So it does
not outlive the process that started it. ``--log`` gets one line per response.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

#: Bytes per ``sendfile`` with a rate. At 80 MB/s this is one every 3 ms, which a sleeping thread
#: can keep up with.
_CHUNK = 256 << 10
#: Bytes per ``sendfile`` without a rate.
_WHOLE = 8 << 20
#: Seconds that a thread which woke up late may catch up on. A link does not store unused bandwidth.
_BURST_SECONDS = 0.01
#: Limit for the head of a request. A signed request has some 1,500 bytes.
_HEAD_BYTES = 64 << 10
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
#: Keys per page, as in S3.
_PAGE = 1000
_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
_XML_TYPE = {"Content-Type": "application/xml"}


@dataclass(frozen=True, slots=True)
class Response:
    """A response whose body is ``body``, or bytes ``start`` to ``stop`` of a file."""

    status: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    start: int = 0
    stop: int = 0

    def head(self) -> bytes:
        """Return the status line and the header fields."""
        length = len(self.body) or self.stop - self.start
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.fields.items()]
        lines += [f"Content-Length: {length}", "Server: link", "", ""]
        return "\r\n".join(lines).encode("latin-1")


def refused(status: int, code: str, **fields: str) -> Response:
    """Return an error in the format of S3."""
    body = f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Response(status, {**_XML_TYPE, **fields}, body.encode())


def ranged(headers: Mapping[str, str], size: int, etag: str, modified: str) -> Response:
    """Return the object, or the range of it that ``headers`` request."""
    if headers.get("if-match", etag).strip('"') not in ("*", etag.strip('"')):
        return refused(412, "PreconditionFailed")
    fields = {"Accept-Ranges": "bytes", "ETag": etag, "Last-Modified": modified}
    fields["Content-Type"] = "application/x-tar"
    span = _RANGE.fullmatch(headers.get("range", ""))
    if span is None:
        return Response(200, fields, start=0, stop=size)
    start, stop = int(span[1]), min(size, int(span[2]) + 1 if span[2] else size)
    if start >= stop:
        return refused(416, "InvalidRange", **{"Content-Range": f"bytes */{size}"})
    fields["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Response(206, fields, start=start, stop=stop)


def etag(path: Path, status: os.stat_result) -> str:
    """Return a quoted ETag, which changes with the size or time of the file.

    It has the form of a multipart upload's, because clients compare any other ETag as an MD5.
    """
    identity = f"{path} {status.st_size} {status.st_mtime_ns}".encode()
    return f'"{hashlib.md5(identity, usedforsecurity=False).hexdigest()}-2"'


@dataclass(frozen=True, slots=True)
class Link:
    """Serves the connections of one process."""

    root: Path  # directory of buckets
    delay: float  # seconds to the first byte of a response
    rate: float  # bytes per second of each connection; 0 for no limit
    log: int | None  # descriptor that gets a line per response, or None

    def serve(self, client: socket.socket) -> None:
        """Respond to the requests of one connection until it is closed."""
        due, pending = 0.0, b""
        with client, contextlib.suppress(ConnectionError, TimeoutError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                while b"\r\n\r\n" not in pending:
                    more = client.recv(_HEAD_BYTES)
                    if not more or len(pending) > _HEAD_BYTES:
                        return
                    pending += more
                received = time.monotonic()
                head, _, pending = pending.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                method, target, *_ = (*first.split(" "), "", "")
                pairs = (line.partition(":") for line in lines)
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                name, _, query = target.partition("?")
                name = unquote(name).lstrip("/")
                response, file = self._find(method, name, query, headers)
                try:
                    time.sleep(max(0.0, self.delay - (time.monotonic() - received)))
                    client.sendall(response.head() + (b"" if method == "HEAD" else response.body))
                    if file is not None and method == "GET":
                        due = self._send(client, file, response, due)
                finally:
                    if file is not None:
                        os.close(file)
                    if self.log is not None:
                        span = f"{response.start} {response.stop}"
                        os.write(self.log, f"{method} {response.status} {span} {name}\n".encode())
                # The server does not read the body that another method may have.
                is_last = headers.get("connection", "").lower() == "close"
                if is_last or method not in ("GET", "HEAD"):
                    return

    def _send(self, client: socket.socket, file: int, response: Response, due: float) -> float:
        """Send bytes of a file, the first at ``due``, and return when the next ones may be sent."""
        position = response.start
        while position < response.stop:
            count = min(_CHUNK if self.rate else _WHOLE, response.stop - position)
            if self.rate:
                now = time.monotonic()
                time.sleep(max(0.0, due - now))
                due = max(due, now - _BURST_SECONDS) + count / self.rate
            end = position + count
            while position < end:
                sent = os.sendfile(client.fileno(), file, position, end - position)
                if not sent:
                    raise ConnectionError("the object became shorter")
                position += sent
        return due

    def _find(
        self, method: str, name: str, query: str, headers: Mapping[str, str]
    ) -> tuple[Response, int | None]:
        """Return the response, and the descriptor of the file that it serves."""
        bucket, _, key = name.partition("/")
        home = self.root / bucket
        if method not in ("GET", "HEAD"):
            return refused(405, "MethodNotAllowed"), None
        if not bucket or not home.is_dir():
            return refused(404, "NoSuchBucket"), None
        if not key:
            return self._list(home, parse_qs(query, keep_blank_values=True)), None
        path = home / key
        if not path.resolve().is_relative_to(home) or not path.is_file():
            return refused(404, "NoSuchKey"), None
        file = os.open(path, os.O_RDONLY)
        found = os.fstat(file)
        modified = formatdate(found.st_mtime, usegmt=True)
        return ranged(headers, found.st_size, etag(path, found), modified), file

    def _list(self, home: Path, query: Mapping[str, list[str]]) -> Response:
        """Return one page of ListObjectsV2. Keys are plain, and delimiters are not supported."""

        def option(name: str) -> str:
            return query.get(name, [""])[0]

        after = option("continuation-token") or option("start-after")
        limit = min(_PAGE, int(option("max-keys") or _PAGE))
        every = (str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
        keys = sorted(key for key in every if key.startswith(option("prefix")) and key > after)
        rows = []
        for key in keys[:limit]:
            found = (home / key).stat()
            modified = datetime.fromtimestamp(found.st_mtime, UTC).isoformat(
                timespec="milliseconds"
            )
            rows.append(
                f"<Contents><Key>{key}</Key><LastModified>{modified[:-6]}Z</LastModified>"
                f"<ETag>{escape(etag(home / key, found))}</ETag><Size>{found.st_size}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        token, more = "", len(keys) > limit
        if more:
            token = f"<NextContinuationToken>{keys[limit - 1]}</NextContinuationToken>"
        body = (
            f"{_XML}<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
            f"<Name>{home.name}</Name><Prefix>{option('prefix')}</Prefix>"
            f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"{''.join(rows)}</ListBucketResult>"
        )
        return Response(200, _XML_TYPE, body.encode())


def _listen(port: int) -> socket.socket:
    server = socket.socket()
    # Several processes accept connections from one port.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # BBR, which some systems have by default, paces loopback to half its speed.
    with contextlib.suppress(OSError):
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    server.bind(("127.0.0.1", port))
    server.listen(1024)
    return server


def _accept_forever(server: socket.socket, link: Link) -> None:
    while True:
        client, _ = server.accept()
        threading.Thread(target=link.serve, args=(client,), daemon=True).start()


def main() -> None:
    """Serve until standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory of buckets")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds to the first byte")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes/s of one connection")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--log", type=Path, help="file that gets a line per response")
    arguments = parser.parse_args()
    server = _listen(0)
    port, parent = server.getsockname()[1], os.getpid()
    for _ in range(arguments.processes - 1):
        if os.fork() == 0:
            server.close()
            server = _listen(port)
            break
    mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    log = os.open(arguments.log, mode, 0o600) if arguments.log else None
    link = Link(arguments.root.resolve(), arguments.delay, arguments.rate, log)
    threading.Thread(target=_accept_forever, args=(server, link), daemon=True).start()
    if os.getpid() == parent:
        print(port, flush=True)
    # All processes inherit the pipe, so each of them sees it close.
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
