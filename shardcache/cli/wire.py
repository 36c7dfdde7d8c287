"""The parts of HTTP/1.1 that a byte-for-byte relay needs: heads, and sockets to read them from.

Heads are kept as the bytes that came and only looked at: where the body ends,
whether the connection lives on, which status it is (RFC 9112). Sockets are
non-blocking and waited for together with the client's, so that nobody waits on
for a client that has hung up.

A `Channel` belongs to one thread, except for `Channel.cut`.
"""

from __future__ import annotations

import contextlib
import select
import socket
from typing import Literal

__all__ = ["Channel", "EndedError", "Framing", "Head"]

_HEAD_BYTES = 64 * 1024  # servers cap a head at 8 to 32 KiB; chunk lines are far shorter
# A half-closed client counts as gone, as it does for nginx. Linux only; elsewhere
# the reset that follows the next send tells.
_HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

#: Bytes of a body, or how else its end is found; None: it ends with the connection.
Framing = int | Literal["chunked"] | None


class EndedError(Exception):
    """One side hung up early, or what it said is not HTTP/1."""


class Head:
    """The head of a request or an answer: its bytes, and what they say."""

    __slots__ = ("fields", "raw", "start")

    def __init__(self, raw: bytes) -> None:
        lines = raw[:-4].decode("latin-1").split("\r\n")
        self.raw = raw
        self.start = lines[0].split(" ", 2)
        pairs = (line.partition(":") for line in lines[1:])
        self.fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if len(self.start) < 2 or "HTTP/1." not in lines[0]:
            raise EndedError("not HTTP/1")

    @property
    def status(self) -> int:
        """The status of an answer."""
        if not self.start[1].isdecimal():
            raise EndedError("not a status line")
        return int(self.start[1])

    @property
    def keeps_alive(self) -> bool:
        """True unless the sender ends the connection after this message."""
        modern = "HTTP/1.1" in (self.start[0], self.start[-1])
        return modern and "close" not in self.fields.get("connection", "").lower()

    def framing(self, default: int | None) -> Framing:
        """Bytes of the body or "chunked"; None: it ends with the connection."""
        if "chunked" in self.fields.get("transfer-encoding", "").lower():
            return "chunked"
        length = self.fields.get("content-length")
        if length is None:
            return default
        if not length.isdecimal():
            raise EndedError("not a length")
        return int(length)


class Channel:
    """A non-blocking socket, and what was read from it beyond a head."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        # Heads and bodies are sent separately: Nagle would wait for an ACK in between.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.rest = b""

    def wait(self, events: int, client: Channel | None) -> None:
        """Block until ready; EndedError if ``client`` hangs up meanwhile."""
        poller = select.poll()
        if client is not None:
            poller.register(client.sock, _HANGUP)
        if client is self:
            events |= _HANGUP
        poller.register(self.sock, events)
        ready = dict(poller.poll())
        if client is not None and ready.get(client.sock.fileno(), 0) & _HANGUP:
            raise EndedError("the client hung up")

    def sleep(self, seconds: float, wake: int = _HANGUP) -> bool:
        """Sleep; at once True when the other end hangs up, or one of the events ``wake``."""
        poller = select.poll()
        poller.register(self.sock, wake)
        return bool(poller.poll(seconds * 1000.0))

    def read_into(self, view: memoryview, client: Channel | None) -> int:
        """Read what there is, at least one byte; 0 at the end."""
        if self.rest:
            size = min(len(view), len(self.rest))
            view[:size] = self.rest[:size]
            self.rest = self.rest[size:]
            return size
        while True:
            try:
                return self.sock.recv_into(view)
            except BlockingIOError:
                self.wait(select.POLLIN, client)

    def until(self, mark: bytes, client: Channel | None) -> bytes:
        """Read up to and including ``mark``, which must come within 64 KiB."""
        chunk = memoryview(bytearray(16 * 1024))
        found = self.rest
        self.rest = b""
        while (end := found.find(mark)) < 0:
            size = self.read_into(chunk, client)
            found += chunk[:size]
            if not size or len(found) > _HEAD_BYTES:
                raise EndedError("no complete head")
        end += len(mark)
        self.rest = found[end:]
        return found[:end]

    def write(self, data: bytes, client: Channel | None) -> None:
        """Send all of ``data``, uncounted."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, client)

    def cut(self) -> None:
        """End both directions now; threads that wait for this socket wake up."""
        # Not close(): a forked child may hold the descriptor and keep the peer waiting.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
