"""A proxy in front of a real S3 server, which records requests and injects faults.

    client --> Proxy (the first `Rule` that matches fires its `Fault`) --> server

The proxy forwards requests unchanged, so their signatures stay valid; faults change responses. One
thread serves each connection; a proxy may be used from any thread.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, Self
from urllib.parse import unquote, urlsplit

from tests.support.storetools import wait_until
from tests.support.webservers import Connection, Scripted

#: Seconds between two pieces of a body whose rate is limited.
_TICK = 0.02


class Answer(NamedTuple):
    """A response in place of the server's."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one exchange."""

    name: str = "fault"  # in the record and in messages
    before: Callable[[], object] | None = None  # called first; may change objects on the server
    hang_up: Literal["", "close", "reset", "stall"] = ""  # instead of a response; reset is RST
    answer: Answer | None = None  # replaces the server's response
    headers: Mapping[str, str | None] = field(default_factory=dict)  # set these; None removes one
    body: Callable[[bytes], bytes] | None = None  # changes the payload, and the stated length
    cut: int | None = None  # bytes of payload, after which `how` ends the connection
    how: Literal["close", "reset", "stall"] = "close"
    rate: float | None = None  # payload bytes per second


_NONE = Fault(name="")


@dataclass
class Rule:
    """A fault, and the requests that meet it. None matches any value."""

    fault: Fault
    method: str | None = "GET"
    path: str | None = None  # bucket/key
    start: int | None = None  # first byte of the Range
    skip: int = 0  # matching requests to pass before the first fault
    times: int | None = 1  # requests to hit; None for all
    seen: int = 0  # matching requests so far
    fired: int = 0

    def fires(self, request: Request) -> bool:
        """Count a request; returns whether it meets the fault."""
        matches = (
            self.method in (None, request.method)
            and self.path in (None, request.path)
            and (self.start is None or (request.range or (0,))[0] == self.start)
        )
        self.seen += matches
        if not matches or self.seen <= self.skip or self.fired == self.times:
            return False
        self.fired += 1
        return True


@dataclass
class Request:
    """A recorded request, finished or in flight."""

    method: str
    path: str  # unquoted bucket/key
    range: tuple[int, int | None] | None  # (start, stop)
    reads_object: bool  # not a listing
    fault: str | None = None
    status: int = 0  # 0 without a response
    first: int | None = None  # offset in the object of the first byte of the response
    body_bytes: int = 0  # payload sent so far; at least what the client has read

    @property
    def is_object_fetch(self) -> bool:
        """Whether the response begins with byte 0 of the object: a resumed fetch counts once."""
        return self.method == "GET" and self.reads_object and self.ok and self.first == 0

    @property
    def ok(self) -> bool:
        return self.status in (200, 206)


class Proxy(Scripted):
    """A proxy, as a context manager; clients connect to its ``url``."""

    def __init__(self, s3: Any) -> None:
        super().__init__(lambda head: b"", most=sys.maxsize)
        self.RequestHandlerClass = _Exchange  # answers
        self.upstream = urlsplit(s3.endpoint_url)
        self.limit: int | None = None  # bytes to pass of each body
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._requests: list[Request] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(_TICK,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End all connections, as a server that stops, and wait until all are closed."""
        self.shutdown()
        # A forked child may hold the descriptor and with it the port.
        self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()
        for client in list(self.clients):
            with contextlib.suppress(OSError):  # already closed
                client.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: not self.clients)

    def requests(self) -> list[Request]:
        """Return the requests since the start, `reset` or `script`, in order of arrival."""
        return list(self._requests)

    def of(self, path: str, method: str = "GET") -> list[Request]:
        """Return the requests for one object."""
        return [r for r in self.requests() if (r.path, r.method) == (path, method)]

    def fetches(self) -> Counter[str]:
        """Return how many responses began with the first byte of each object, by bucket/key."""
        return Counter(r.path for r in self.requests() if r.is_object_fetch)

    def received(self) -> int:
        """Return the bytes of objects in successful responses."""
        return sum(r.body_bytes for r in self.requests() if r.reads_object and r.ok)

    def reset(self) -> None:
        """Forget all requests so far, also those in flight."""
        self._requests = []

    def script(self, *rules: Rule) -> None:
        """Set the rules, of which the first match wins, and forget all requests so far."""
        self._rules = list(rules)
        self.reset()

    def meet(self, request: Request) -> Fault:
        """Record a request; returns its fault."""
        with self._lock:
            fault = next((rule.fault for rule in self._rules if rule.fires(request)), _NONE)
            request.fault = fault.name or None
            self._requests.append(request)
        return fault

    def pause(self, after: int = 0) -> None:
        """Pause every current and later body after ``after`` bytes."""
        self.limit = after

    def resume(self) -> None:
        """Continue all bodies."""
        self.limit = None


class _Exchange(Connection):
    """Serves the requests of one connection."""

    server: Proxy

    def answer(self, head: str) -> Iterator[bytes]:
        first, *lines = head.rstrip().split("\r\n")
        method, target, _ = first.split(" ")
        pairs = (line.partition(":") for line in lines)
        given = [(name, value.strip()) for name, _, value in pairs]
        fields = {name.lower(): value for name, value in given}
        if fields.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        payload = self.rfile.read(int(fields.get("content-length", 0)))
        path = unquote(target.partition("?")[0]).removeprefix("/")
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", fields.get("range", ""))
        span = (int(found[1]), int(found[2]) + 1 if found[2] else None) if found else None
        request = Request(method, path, span, reads_object=bool(path.partition("/")[2]))
        fault = self.server.meet(request)
        if fault.before is not None:
            fault.before()
        if fault.hang_up:
            self._hang_up(fault.hang_up)
        answer = fault.answer or self._ask(method, target, given, payload)
        body = answer.body if fault.body is None else fault.body(answer.body)
        headers: dict[str, str | None] = {name.title(): value for name, value in answer.headers}
        if method != "HEAD" or fault.answer:
            headers["Content-Length"] = str(len(body))
        headers |= {name.title(): value for name, value in fault.headers.items()}
        sent = headers.get("Content-Range") or "bytes 0-"
        request.first = int(sent.split()[-1].partition("-")[0]) if sent[6:7].isdigit() else None
        request.status = answer.status
        stated = [f"HTTP/1.1 {answer.status} {answer.reason or '-'}"]
        stated += [f"{name}: {value}" for name, value in headers.items() if value is not None]
        yield "\r\n".join([*stated, "", ""]).encode("latin-1")
        if method != "HEAD":
            yield from self._pieces(request, body[: fault.cut], fault.rate)
        if fault.cut is not None:
            self._hang_up(fault.how)

    def _ask(self, method: str, target: str, headers: list, payload: bytes) -> Answer:
        """Forward the request; returns the server's response."""
        upstream = self.server.upstream
        connection = http.client.HTTPConnection(str(upstream.hostname), upstream.port, 60)
        with contextlib.closing(connection) as server:
            sent = {name: value for name, value in headers if name.lower() != "expect"}
            server.request(method, target, payload or None, sent)
            found = server.getresponse()
            hop = ("connection", "transfer-encoding")
            kept = [(n, v) for n, v in found.getheaders() if n.lower() not in hop]
            return Answer(found.status, kept, found.read(), found.reason)

    def _pieces(self, request: Request, data: bytes, rate: float | None) -> Iterator[bytes]:
        """Yield a body at a rate, and pause it at the proxy's limit."""
        view = memoryview(data)
        while view:
            room = len(view) if rate is None else max(1, int(rate * _TICK))
            if (limit := self.server.limit) is not None:
                room = min(room, max(0, limit - request.body_bytes))
            piece, view = view[:room], view[room:]
            request.body_bytes += len(piece)
            yield piece
            pause = _TICK if not piece else len(piece) / rate if rate else 0.0
            if pause and self._gone(pause):
                raise ConnectionAbortedError

    def _gone(self, seconds: float | None) -> bool:
        """Wait; returns whether the client hung up."""
        poller = select.poll()
        poller.register(self.connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        return bool(poller.poll(None if seconds is None else seconds * 1000.0))

    def _hang_up(self, how: str) -> NoReturn:
        """End the connection early."""
        if how == "stall":
            self._gone(None)
        raise ConnectionResetError if how == "reset" else ConnectionAbortedError
