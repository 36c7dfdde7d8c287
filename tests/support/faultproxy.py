"""A proxy that stands before a real S3 server and breaks what passes, by a script.

    client --> FaultProxy (first matching `Rule` fires its `Fault`) --> server

Without a matching rule a request is passed on as it came: Host and
Authorization are the client's, so its signature stays valid. A fault that
changes the request (another range, another object, no If-Match) signs it anew
with the server's keys: the answer is the server's own, to another question.

Invariants:
    * A rule is counted when it fires, before the client sees any of it.
    * After `close` no thread, task or socket of the proxy is left.

The proxy runs in one thread of its own (asyncio); the server is asked from a
few more. `FaultProxy` may be used from any thread; rules are set while nothing
is in flight, or by a fault's own ``before``.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from shardcache.cli.demoserver import S3Server

__all__ = ["Answer", "Fault", "FaultProxy", "Request", "Rule"]

Headers = list[tuple[str, str]]
#: Payload is sent in pieces of this many seconds' worth when its rate is limited.
_TICK = 0.02
#: What SigV4 makes anew.
_NOT_PASSED_ON = ("host", "authorization", "x-amz-date", "x-amz-content-sha256")


class Answer(NamedTuple):
    """A response: the server's own, or one that a fault gives in its place."""

    status: int
    headers: Headers
    body: bytes
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong with one exchange; everything that is not set goes right."""

    name: str  # for the record and for messages
    before: Callable[[], object] | None = None  # called first; may change objects on the server
    delay: float = 0.0  # seconds before the first byte of the answer
    hang_up: Literal["", "close", "reset", "stall"] = ""  # instead of any answer; reset is RST
    strip: tuple[str, ...] = ()  # request headers that do not reach the server
    span: tuple[int, int] | None = None  # (start, stop) the server is asked for instead
    path: str | None = None  # bucket/key the server is asked for instead
    answer: Answer | None = None  # is given instead of asking the server
    headers: Mapping[str, str | None] = field(default_factory=dict)  # new ones; None removes
    body: Callable[[bytes], bytes] | None = None  # changes the payload, and its stated length
    lie: bool = False  # the stated length stays what the server said
    chunked: bool = False  # sent in chunks, without Content-Length
    extra: bytes = b""  # sent behind the answer
    cut: int | None = None  # bytes of payload after which the connection ends, by `how`
    how: Literal["close", "reset", "stall"] = "close"
    rate: float | None = None  # payload bytes per second
    leave: bool = False  # close the connection after a complete answer, unannounced

    @property
    def rewrites(self) -> bool:
        """Whether the server is asked something else than the client asked."""
        return bool(self.strip or self.span or self.path)


@dataclass
class Rule:
    """Which requests meet a fault."""

    fault: Fault
    method: str | None = "GET"  # None for any
    path: str | None = None  # their bucket/key, or None for any
    start: int | None = None  # first byte of their Range, or None for any
    skip: int = 0  # that many matching requests are left alone first
    times: int | None = 1  # how often it fires; None for always
    seen: int = 0  # matching requests so far
    fired: int = 0

    def fires(self, request: Request) -> bool:
        """Whether this request meets the fault; counts it."""
        matches = (
            self.method in (None, request.method)
            and self.path in (None, request.path)
            and (self.start is None or (request.span or (0,))[0] == self.start)
        )
        if not matches:
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.fired >= self.times):
            return False
        self.fired += 1
        return True

    def __str__(self) -> str:
        count = "always" if self.times is None else f"{self.times}x"
        return f"{self.fault.name} ({self.method} {self.start} +{self.skip} {count})"


@dataclass
class Request:
    """One request as the proxy saw it."""

    method: str
    path: str  # unquoted bucket/key
    span: tuple[int, int | None] | None  # range asked for, the second exclusive
    arrived: float  # when its head was complete, in seconds of the loop's clock
    fault: str | None = None  # the fault it met
    status: int = 0  # of the answer; 0 for none
    first: int | None = None  # offset in the object of the answer's first byte
    sent: int = 0  # bytes of payload handed over


_NONE = Fault(name="")


class _HungUp(Exception):
    """The connection is over."""


class FaultProxy:
    """See the module. Use as a context manager.

    Attributes:
        requests: all of them since `script`, in order of arrival.
        open: connections now.
    """

    def __init__(self, server: S3Server) -> None:
        self._keys = (server.access_key, server.secret_key)
        self._upstream = urlsplit(server.endpoint_url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faultproxy")
        self._askers = ThreadPoolExecutor(32, thread_name_prefix="faultproxy-ask")
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self._rules: list[Rule] = []
        self.requests: list[Request] = []
        self.open = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def endpoint_url(self) -> str:
        """Where clients connect."""
        return f"http://127.0.0.1:{self._port}"

    def script(self, *rules: Rule) -> None:
        """Set the rules, the first that matches wins, and forget all requests so far."""
        self._rules = list(rules)
        self.requests = []

    def of(self, path: str, method: str = "GET") -> list[Request]:
        """The requests for one object."""
        return [r for r in list(self.requests) if (r.path, r.method) == (path, method)]

    def fetches(self, path: str) -> int:
        """How often an object was begun: successful GETs that answer from its first byte."""
        return sum(r.status in (200, 206) and r.first == 0 for r in self.of(path))

    def listen(self) -> None:
        """Accept connections, at the same port as before."""
        self._run(self._listen())

    def refuse(self) -> None:
        """Refuse new connections until `listen`."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.call_soon_threadsafe(listener.close)
            self._run(asyncio.sleep(0))  # it is closed when this has run

    def cut(self) -> None:
        """End all connections, as a server that restarts does."""
        self._run(self._cut())

    def close(self) -> None:
        """Cut all connections and wait until nothing is left."""
        self.refuse()
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._askers.shutdown()

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)  # type: ignore[arg-type]

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        try:
            with contextlib.suppress(_HungUp, OSError, EOFError, asyncio.CancelledError):
                while True:
                    await self._exchange(reader, writer)
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        headers = [(n, v.strip()) for n, _, v in (line.partition(":") for line in head[1:])]
        fields = {name.lower(): value for name, value in headers}
        payload = await reader.readexactly(int(fields.get("content-length", "0")))
        path = unquote(urlsplit(target).path).lstrip("/")
        request = Request(method, path, _span(fields), self._loop.time())
        fault = next((r.fault for r in self._rules if r.fires(request)), _NONE)
        request.fault = fault.name or None
        self.requests.append(request)
        if fault.before is not None:
            await self._loop.run_in_executor(self._askers, fault.before)
        if fault.hang_up:
            await _finish(reader, writer, fault.hang_up)
        answer = fault.answer
        if answer is None:
            if fault.rewrites:
                target, headers = self._sign(method, target, headers, fault)
            answer = await self._loop.run_in_executor(
                self._askers, self._ask, method, target, headers, payload
            )
        if fault.delay:
            await asyncio.sleep(fault.delay)
        await _respond(reader, writer, request, _spoiled(answer, fault), fault)
        if fault.leave or fields.get("connection", "").lower() == "close":
            raise _HungUp

    def _sign(
        self, method: str, target: str, headers: Headers, fault: Fault
    ) -> tuple[str, Headers]:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        dropped = {*_NOT_PASSED_ON, *(name.lower() for name in fault.strip)}
        kept = {name: value for name, value in headers if name.lower() not in dropped}
        if fault.span is not None:
            kept["Range"] = f"bytes={fault.span[0]}-{fault.span[1] - 1}"
        target = f"/{fault.path}" if fault.path else target
        signed = AWSRequest(method, f"{self._upstream.geturl()}{target}", headers=kept)
        S3SigV4Auth(Credentials(*self._keys), "s3", "us-east-1").add_auth(signed)
        return target, [("Host", self._upstream.netloc), *signed.headers.items()]

    def _ask(self, method: str, target: str, headers: Headers, payload: bytes) -> Answer:
        host, port = self._upstream.hostname, self._upstream.port
        with contextlib.closing(http.client.HTTPConnection(str(host), port, 60)) as server:
            server.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                server.putheader(name, value)
            server.endheaders(payload)
            found = server.getresponse()
            hop = ("connection", "transfer-encoding")
            kept = [(n, v) for n, v in found.getheaders() if n.lower() not in hop]
            return Answer(found.status, kept, found.read(), found.reason)


def _span(fields: Mapping[str, str]) -> tuple[int, int | None] | None:
    text = fields.get("range", "")
    if not text.startswith("bytes="):
        return None
    first, _, last = text.removeprefix("bytes=").partition("-")
    return int(first), int(last) + 1 if last else None


def _spoiled(answer: Answer, fault: Fault) -> Answer:
    """The answer with the fault's changes; its Content-Length is decided here."""
    body = fault.body(answer.body) if fault.body is not None else answer.body
    changes = dict(fault.headers)
    if fault.chunked:
        changes |= {"Content-Length": None, "Transfer-Encoding": "chunked"}
    elif fault.answer is not None or (len(body) != len(answer.body) and not fault.lie):
        changes["Content-Length"] = str(len(body))
    changed = {name.lower() for name in changes}
    headers = [(n, v) for n, v in answer.headers if n.lower() not in changed]
    headers += [(name, value) for name, value in changes.items() if value is not None]
    return Answer(answer.status, headers, body, answer.reason or "-")


async def _respond(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: Request,
    answer: Answer,
    fault: Fault,
) -> None:
    lines = [f"HTTP/1.1 {answer.status} {answer.reason}", *(f"{n}: {v}" for n, v in answer.headers)]
    request.status = answer.status
    said = {n.lower(): v for n, v in answer.headers}.get("content-range", "bytes 0-")
    request.first = int(said.split()[-1].partition("-")[0]) if said[6:7].isdigit() else None
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    body = b"" if request.method == "HEAD" else answer.body
    view = memoryview(body)[: fault.cut]
    step = len(view) if fault.rate is None else max(1, int(fault.rate * _TICK))
    while view:
        piece, view = view[:step], view[step:]
        request.sent += len(piece)
        writer.write(b"%x\r\n%b\r\n" % (len(piece), bytes(piece)) if fault.chunked else piece)
        await writer.drain()
        if fault.rate is not None:
            await asyncio.sleep(len(piece) / fault.rate)
    if fault.cut is not None:
        await _finish(reader, writer, fault.how)
    writer.write((b"0\r\n\r\n" if fault.chunked and body else b"") + fault.extra)
    await writer.drain()


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, how: str) -> None:
    """End the connection before its time."""
    if how == "stall":
        await reader.read(1)  # until the client gives up
    if how == "reset":
        # Lingering for 0 seconds: close() then sends RST in place of FIN.
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    raise _HungUp
