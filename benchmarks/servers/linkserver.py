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
does not outlive the process that started it. ``--log`` gets a line per answer, written whole.
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
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape

#: Bytes per ``sendfile`` on a paced connection: at 80 MB/s one every 3 ms, which a
#: sleeping thread can keep up with.
_CHUNK = 256 << 10
#: Bytes per ``sendfile`` where nothing is paced.
_WHOLE = 8 << 20
#: A thread that woke late may catch up on so much, no more: a link does not store its rate.
_BURST_SECONDS = 0.01
#: Most of a request's head; signed requests have some 1,500 bytes.
_HEAD_BYTES = 64 << 10
#: Larger objects are taken for multipart uploads in parts of so much, as the AWS command
#: line makes them: their ETag is no MD5, which some clients would compare.
_PART = 8 << 20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
#: As many keys as S3 puts into one page.
_PAGE = 1000
_XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
_XML_TYPE = {"Content-Type": "application/xml"}


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, fields and body: text of our own, or bytes ``start`` to ``stop`` of a file."""

    status: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    start: int = 0
    stop: int = 0

    def head(self) -> bytes:
        """Status line and fields."""
        length = len(self.body) or self.stop - self.start
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.fields.items()]
        lines += [f"Content-Length: {length}", "Server: link", "", ""]
        return "\r\n".join(lines).encode("latin-1")


def refused(status: int, code: str, **fields: str) -> Answer:
    """An error as S3 words it."""
    body = f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return Answer(status, {**_XML_TYPE, **fields}, body.encode())


def ranged(headers: Mapping[str, str], size: int, etag: str, modified: str) -> Answer:
    """The object, or the part of it that ``headers`` ask for."""
    if headers.get("if-match", etag).strip('"') not in ("*", etag.strip('"')):
        return refused(412, "PreconditionFailed")
    fields = {"Accept-Ranges": "bytes", "ETag": etag, "Last-Modified": modified}
    fields["Content-Type"] = "application/x-tar"
    span = _RANGE.fullmatch(headers.get("range", ""))
    if span is None or not (span[1] or span[2]):
        return Answer(200, fields, start=0, stop=size)
    if span[1]:
        start, stop = int(span[1]), min(size, int(span[2]) + 1 if span[2] else size)
    else:
        start, stop = max(0, size - int(span[2])), size
    if start >= stop:
        return refused(416, "InvalidRange", **{"Content-Range": f"bytes */{size}"})
    fields["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Answer(206, fields, start=start, stop=stop)


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
            large = found.st_size > _PART
            data = repr(row).encode() if large else path.read_bytes()
            mark = hashlib.md5(data, usedforsecurity=False).hexdigest()
            parts = f"-{-(-found.st_size // _PART)}" if large else ""
            self._etags[row] = f'"{mark}{parts}"'
        return self._etags[row]

    def serve(self, client: socket.socket) -> None:
        """Answer one connection's requests until it is closed."""
        due, pending = 0.0, b""
        with client, contextlib.suppress(ConnectionError, TimeoutError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                while b"\r\n\r\n" not in pending:
                    more = client.recv(_HEAD_BYTES)
                    if not more or len(pending) > _HEAD_BYTES:
                        return
                    pending += more
                head, _, pending = pending.partition(b"\r\n\r\n")
                received = time.monotonic()
                first, *lines = head.decode("latin-1").split("\r\n")
                method, target, *_ = (*first.split(" "), "", "")
                pairs = (line.partition(":") for line in lines)
                headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
                path = unquote(target.partition("?")[0]).lstrip("/")
                answer, file = self._find(method, path, target.partition("?")[2], headers)
                try:
                    time.sleep(max(0.0, self.delay - (time.monotonic() - received)))
                    client.sendall(answer.head() + (b"" if method == "HEAD" else answer.body))
                    if file is not None and method == "GET":
                        due = self._send(client, file, answer, due)
                finally:
                    if file is not None:
                        os.close(file)
                    if self.log is not None:
                        span = f"{answer.start} {answer.stop}"
                        os.write(self.log, f"{method} {answer.status} {span} {path}\n".encode())
                # A body of another method was not read, and must not pass for the next request.
                if (
                    method not in ("GET", "HEAD")
                    or headers.get("connection", "").lower() == "close"
                ):
                    return

    def _send(self, client: socket.socket, file: int, answer: Answer, due: float) -> float:
        """Send bytes of a file; returns when the next ones may be sent."""
        position = answer.start
        while position < answer.stop:
            count = min(_CHUNK if self.rate else _WHOLE, answer.stop - position)
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
    ) -> tuple[Answer, int | None]:
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
        return ranged(headers, found.st_size, self.etag(path, found), modified), file

    def _list(self, home: Path, query: Mapping[str, list[str]]) -> Answer:
        """One page of ListObjectsV2, or the location of a bucket; no delimiter is known."""
        if "location" in query:
            text = f"{_XML}<LocationConstraint>us-east-1</LocationConstraint>"
            return Answer(200, _XML_TYPE, text.encode())

        def asked(name: str) -> str:
            return query.get(name, [""])[0]

        after = asked("continuation-token") or asked("start-after") or asked("marker")
        limit = min(_PAGE, int(asked("max-keys") or _PAGE))
        shown = quote if asked("encoding-type") == "url" else escape
        every = (str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())
        keys = sorted(key for key in every if key.startswith(asked("prefix")) and key > after)
        rows = []
        for key in keys[:limit]:
            found = (home / key).stat()
            moment = datetime.fromtimestamp(found.st_mtime, UTC).isoformat(timespec="milliseconds")
            rows.append(
                f"<Contents><Key>{shown(key)}</Key><LastModified>{moment[:-6]}Z</LastModified>"
                f"<ETag>{escape(self.etag(home / key, found))}</ETag><Size>{found.st_size}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        token, more = "", len(keys) > limit
        if more:
            token = f"<NextContinuationToken>{escape(keys[limit - 1])}</NextContinuationToken>"
        body = (
            f"{_XML}<ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
            f"<Name>{escape(home.name)}</Name><Prefix>{shown(asked('prefix'))}</Prefix>"
            f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"{'<EncodingType>url</EncodingType>' if shown is quote else ''}"
            f"{''.join(rows)}</ListBucketResult>"
        )
        return Answer(200, _XML_TYPE, body.encode())


def _listen(port: int) -> socket.socket:
    server = socket.socket()
    # Several processes take their connections from one port.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    # A sender's congestion control is its own choice; BBR paces loopback to half its speed.
    with contextlib.suppress(OSError):
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    server.bind(("127.0.0.1", port))
    server.listen(1024)
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
    port, parent = server.getsockname()[1], os.getpid()
    for _ in range(arguments.processes - 1):
        if os.fork() == 0:
            server.close()
            server = _listen(port)
            break
    mode = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    log = os.open(arguments.log, mode, 0o600) if arguments.log else None
    link = Link(arguments.root, delay=arguments.delay, rate=arguments.rate, log=log)
    threading.Thread(target=_serve_for_ever, args=(server, link), daemon=True).start()
    if os.getpid() == parent:
        print(port, flush=True)
    # Every process holds the pipe's end, so each sees it close.
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
