"""One proxied HTTP/1.1 connection: heads and bodies passed on byte for byte.

A `Connection` serves one client socket in one thread over one upstream socket
of its own, request after request. Nothing is rewritten, so signatures over
Host and headers stay valid, and keep-alive, ``Connection: close``, chunked
bodies and ``Expect: 100-continue`` mean what the two ends agreed on (RFC 9112).

Invariants:
    * A payload byte is sent and counted under one lock: whoever takes
      `Exchange.lock` sees exactly the bytes handed over so far.
    * A client that hangs up ends its upstream request at once, also while a
      body is frozen or throttled; so does `cut`, from any thread.

`Connection.run` belongs to its own thread. `Gate` may be changed, and
`Exchange` be read under its lock, from any thread.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shardcache.cli.wire import Channel, EndedError, Framing, Head

__all__ = ["Connection", "Exchange", "Gate"]

# Server, meter and client on one core of a 2-core VM, loopback: 1.4 GB/s with 256 KiB,
# 1.6 with 512 KiB, 1.7 with 1 MiB. One buffer per connection, so the middle one.
_BUFFER_BYTES = 512 * 1024
_CONNECT_SECONDS = 10.0
_LINGER_SECONDS = 1.0  # Go's server, and so SeaweedFS, grants 0.5 s
# Granularity of pacing, and how soon a frozen body notices that it may go on.
_TICK_SECONDS = 0.02


class _UpstreamRefusedError(EndedError):
    """The server stopped reading; it may have said why."""


@dataclass(slots=True)
class Gate:
    """What bodies may do now. ``rate``: bytes per second and connection; None: no limit.

    ``limit``: bytes of each body that may pass; None: all.
    """

    rate: float | None = None
    limit: int | None = None

    def room(self, sent: int) -> int:
        """Bytes that a body of which ``sent`` have passed may send at once."""
        limit, rate = self.limit, self.rate
        room = _BUFFER_BYTES if limit is None else max(0, limit - sent)
        return room if rate is None else min(room, max(1, int(rate * _TICK_SECONDS)))


@dataclass(slots=True)
class Exchange:
    """One request and its answer, under way or done. Read it under ``lock``."""

    method: str
    target: str
    range_header: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    expected: int | None = None
    uploaded: int = 0
    sent: int = 0
    whole: bool = False
    aborted: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def complete(self) -> bool:
        """True once the whole answer has been handed over."""
        return self.whole or (self.expected is not None and self.sent >= self.expected)


class Connection:
    """One client connection and the upstream connection that serves it.

    Args:
        client: the accepted socket; closed when `run` returns.
        upstream: host and port of the server.
        gate: read before every send of payload.
        begin: called with each exchange before its request is passed on.
    """

    def __init__(
        self,
        client: socket.socket,
        upstream: tuple[str, int],
        gate: Gate,
        begin: Callable[[Exchange], None],
    ) -> None:
        self.exchange: Exchange | None = None
        self._client = Channel(client)
        self._server: Channel | None = None
        self._upstream = upstream
        self._gate = gate
        self._begin = begin
        self._due = 0.0
        self._was_cut = False
        # Guards the descriptors: `cut` must never meet one that was closed and reused.
        self._ending = threading.Lock()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def run(self) -> None:
        """Serve requests until one side ends; then close both sockets."""
        try:
            # An end is how keep-alive finishes; what it cut short says so in its exchange.
            with contextlib.suppress(EndedError, OSError):
                while self._client_speaks() and self._exchange_one():
                    pass
        finally:
            self.cut()
            with self._ending:
                for channel in self._channels():
                    channel.sock.close()

    def cut(self) -> None:
        """End both connections now. `run` then returns."""
        with self._ending:
            self._was_cut = True
            for channel in self._channels():
                channel.cut()

    def _channels(self) -> list[Channel]:
        return [self._client] if self._server is None else [self._client, self._server]

    def _client_speaks(self) -> bool:
        """Wait for the client's next bytes; False if the server ends first."""
        if self._client.rest:
            return True
        poller = select.poll()
        for channel in self._channels():
            poller.register(channel.sock, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        return self._server is None or self._server.sock.fileno() not in ready

    def _connect(self) -> Channel:
        if self._server is None:
            sock = socket.create_connection(self._upstream, timeout=_CONNECT_SECONDS)
            with self._ending:
                if self._was_cut:
                    sock.close()
                    raise EndedError("closing")
                self._server = Channel(sock)
        return self._server

    def _exchange_one(self) -> bool:
        """Pass on one request and its answer; True if the connection lives on."""
        request = Head(self._client.until(b"\r\n\r\n", None))
        method, target = request.start[:2]
        self.exchange = exchange = Exchange(method, target, request.fields.get("range", ""))
        self._begin(exchange)
        try:
            server = self._connect()
            server.write(request.raw, self._client)
            return self._converse(server, request, exchange)
        finally:
            with exchange.lock:
                exchange.aborted = not exchange.complete

    def _converse(self, server: Channel, request: Head, exchange: Exchange) -> bool:
        framing = request.framing(0)
        unsent = framing != 0
        refused = False
        # Clients give up waiting for "100 Continue" after about a second: whoever
        # speaks first decides.
        patient = "100-continue" in request.fields.get("expect", "").lower()
        while True:
            if unsent and not (patient and not self._client_speaks()):
                unsent = False
                try:
                    self._relay(self._client, server, framing, exchange)
                except _UpstreamRefusedError:
                    refused = True
            answer = Head(server.until(b"\r\n\r\n", self._client))
            if answer.status >= 200:
                break
            self._client.write(answer.raw, self._client)
            patient = False
        framing = answer.framing(None)
        if request.start[0] == "HEAD" or answer.status in (204, 304):
            framing = 0
        with exchange.lock:
            exchange.status = answer.status
            exchange.expected = framing if isinstance(framing, int) else None
        self._client.write(answer.raw, self._client)
        self._relay(server, self._client, framing, exchange)
        if refused:
            self._linger()
            return False
        return request.keeps_alive and answer.keeps_alive and framing is not None and not unsent

    def _linger(self) -> None:
        """Let a client that is still sending read its answer first (RFC 9112, 9.6)."""
        self._client.sock.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                if not self._client.sock.recv_into(self._buffer):
                    return
            self._client.sleep(_TICK_SECONDS, select.POLLIN)

    def _relay(
        self, source: Channel, target: Channel, framing: Framing, exchange: Exchange
    ) -> None:
        if framing != "chunked":
            self._payload(source, target, framing, exchange)
            if framing is None:
                exchange.whole = True
            return
        while True:
            line = source.until(b"\r\n", self._client)
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise EndedError("not a chunk") from None
            if size == 0:
                break
            target.write(line, self._client)
            self._payload(source, target, size, exchange)
            target.write(source.until(b"\r\n", self._client), self._client)
        last = line
        while line != b"\r\n":
            line = source.until(b"\r\n", self._client)
            last += line
        if target is self._client:
            # Before the send: a client that has seen the end finds it recorded.
            exchange.whole = True
        target.write(last, self._client)

    def _payload(
        self, source: Channel, target: Channel, left: int | None, exchange: Exchange
    ) -> None:
        while left is None or left > 0:
            room = len(self._buffer) if left is None else min(left, len(self._buffer))
            size = source.read_into(self._buffer[:room], self._client)
            if not size and left is None:
                return
            if not size:
                raise EndedError("short body")
            self._send(target, self._buffer[:size], exchange)
            left = None if left is None else left - size

    def _send(self, target: Channel, view: memoryview, exchange: Exchange) -> None:
        while view:
            self._pace()
            with exchange.lock:
                passed = exchange.sent if target is self._client else exchange.uploaded
                room = self._gate.room(passed)
                try:
                    size = target.sock.send(view[:room]) if room else 0
                except BlockingIOError:
                    size = 0
                except OSError as exn:
                    if target is self._client:
                        raise
                    raise _UpstreamRefusedError(str(exn)) from exn
                if target is self._client:
                    exchange.sent += size
                else:
                    exchange.uploaded += size
            if rate := self._gate.rate:
                self._due = max(self._due, time.monotonic()) + size / rate
            if room and not size:
                target.wait(select.POLLOUT, self._client)
            elif not room and self._client.sleep(_TICK_SECONDS):
                raise EndedError("the client hung up")
            view = view[size:]

    def _pace(self) -> None:
        while self._gate.rate and (delay := self._due - time.monotonic()) > 0:
            # In slices, so that a changed rate is noticed.
            if self._client.sleep(min(delay, 5 * _TICK_SECONDS)):
                raise EndedError("the client hung up")
