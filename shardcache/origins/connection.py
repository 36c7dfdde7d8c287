"""Requests over keep-alive connections, to S3 and to web servers.

A body is received by as few system calls as possible, for in Python the end of each is a wait for
the interpreter's lock: a plain socket blocks until a whole buffer is full (MSG_WAITALL), TLS gives
a record per call.

A `Transport` may be used by all threads of the process that made it. A `Response` belongs to one
thread, apart from `Response.abort`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import socket
import struct
import time
import weakref
from base64 import b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from shardcache.errors import ConfigError
from shardcache.origins.base import ObjectInfo, TransientError
from shardcache.threads import undivided

if TYPE_CHECKING:
    import ssl

#: Bytes per second under which a connection counts as stalled. Well under any
#: link that could feed training, well above a peer that only keeps alive.
_MIN_RATE = 8 * 1024
#: Seconds after which a read returns what has come, if anything has.
_SLICE = 1.0
#: Seconds for a connection to be made, and for the handshake of TLS.
_CONNECT_TIMEOUT = 10.0
#: Bytes of a head, and received at once with it.
_LONGEST_HEAD = 64 * 1024
_HEAD_AT_ONCE = 8 * 1024

#: Scheme, server and path. Not by `urlsplit`, which changes some paths.
_URL = re.compile(r"(https?)://([^/?#]+)([^#]*)")
_STATUS = re.compile(r"HTTP/1\.([0-9]) ([0-9]{3})(?: (.*))?\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?\Z")
_CONTROL = re.compile(r"[\r\n\0]")


def split_url(url: str) -> tuple[str, str, str]:
    """Scheme, server and path (ValueError: it is no URL of a web server)."""
    found = _URL.match(url)
    if found is None:
        raise ValueError("it is no URL of a web server")
    scheme, place, path = found.groups()
    return scheme, place, path if path.startswith("/") else f"/{path}"


def basic_login(user: str) -> str:
    """The part of a URL before an ``@`` as the value of a header."""
    return f"Basic {b64encode(unquote(user).encode()).decode()}"


def content_length(headers: Mapping[str, str]) -> int | None:
    """What Content-Length says, if that is a length."""
    text = headers.get("content-length", "")
    # As many digits as 64 bits need: Python refuses to read numbers of thousands.
    return int(text) if text.isdecimal() and len(text) < 20 else None


class _Connection:
    """One socket."""

    #: What a proxy wants before the path, and further lines of the head.
    prefix: str = ""
    login: Sequence[str] = ()

    def __init__(self, sock: socket.socket, timeout: float, *, secure: bool = False) -> None:
        self.socket = sock
        self.held = b""  # bytes of the body that came with the head
        self._timeout = timeout
        self._slice = wait = min(_SLICE, timeout)
        self._spent, self._came = 0.0, 0  # since the rate was looked at: seconds and bytes
        self._flags = 0 if secure else socket.MSG_WAITALL
        # A time-out of Python's means a non-blocking socket, and a poll per call.
        sock.settimeout(wait if secure else None)
        pair = struct.pack("@ll", int(wait), max(1, int(wait % 1 * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pair)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End it; another thread must not be using it."""
        self.socket.close()

    def abort(self) -> None:
        """Let a blocked call of another thread return."""
        with contextlib.suppress(OSError):
            # Not the method of TLS sockets: that makes them hand over what is encrypted.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def is_idle(self) -> bool:
        """Whether no byte and no end came since the last answer."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        return not self.held and not poller.poll(0)

    def ask(self, request: bytes) -> str:
        """Send a request: the head of its answer."""
        self._spent, self._came = 0.0, 0
        self.socket.sendall(request)
        head = self.up_to(b"\r\n\r\n").decode("latin-1")
        self._spent, self._came = 0.0, 0
        return head

    def up_to(self, end: bytes) -> bytes:
        """What comes before ``end``, which is passed over."""
        while end not in self.held:
            if len(self.held) > _LONGEST_HEAD:
                raise ConnectionError("it sent a head without an end")
            view = memoryview(bytearray(_HEAD_AT_ONCE))
            count = self._receive(view, 0)
            if count == 0:
                raise ConnectionResetError("it closed the connection")
            self.held += view[: max(0, count)]
        found, _, self.held = self.held.partition(end)
        return found

    def fill(self, view: memoryview) -> int:
        """Receive until ``view`` is full, or for a second; 0 at the end."""
        got = min(len(view), len(self.held))
        view[:got], self.held = self.held[:got], self.held[got:]
        begun = time.monotonic()
        while got < len(view):
            count = self._receive(view[got:], self._flags)
            got += max(0, count)
            if count == 0 or (got and time.monotonic() - begun >= self._slice):
                break
        return got

    def _receive(self, view: memoryview, flags: int) -> int:
        """Bytes that came; 0 at the end, -1 where a slice of time brought none.

        A `TimeoutError` means too few bytes in the last ``timeout`` seconds spent here.
        """
        begun = time.monotonic()
        try:
            count = self.socket.recv_into(view, 0, flags)
        except (BlockingIOError, TimeoutError):
            count = -1
        self._spent += time.monotonic() - begun
        self._came += max(0, count)
        if self._spent >= self._timeout:
            if self._came < self._spent * _MIN_RATE:
                raise TimeoutError(f"only {self._came} bytes in {self._spent:.0f} s")
            self._spent, self._came = 0.0, 0
        return count


_Idle = deque[_Connection]


class Response:
    """An answer, and its body on the way in; see `base.Body`."""

    info: ObjectInfo  # as `start` and `stop` set by `http.checked`
    start: int
    stop: int | None

    def __init__(
        self, connection: _Connection, idle: _Idle, request: bytes, *, bodiless: bool
    ) -> None:
        asked = time.monotonic()
        first, *lines = connection.ask(request).split("\r\n")
        self.waited = time.monotonic() - asked
        status = _STATUS.match(first)
        if status is None:
            raise ConnectionError("what it sends is not HTTP")
        self.status, self.reason = int(status[2]), status[3] or ""
        self.headers: dict[str, str] = {}  # by names in lower case
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self._connection: _Connection | None = connection
        self._idle, self._aborted = idle, False
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        #: Bytes to come: of the body, or of a chunk; None where the connection's end is the body's.
        self._left = None if self._chunked else content_length(self.headers)
        if bodiless or self.status in (204, 304):
            self._left, self._chunked = 0, False
        # What may follow the last chunk is not read.
        closing = "close" in self.headers.get("connection", "").lower() or status[1] == "0"
        self._reusable = self._left is not None and not closing

    def readinto(self, buffer: memoryview) -> int:
        """See `base.Body.readinto`; it takes what comes within a second."""
        connection = self._connection
        if connection is None or not buffer or (self._left == 0 and not self._chunked):
            return 0
        try:
            if self._chunked and not self._left:
                self._left = self._next_chunk(connection)
                self._chunked = self._left > 0
                if not self._chunked:
                    return 0
            count = connection.fill(buffer if self._left is None else buffer[: self._left])
            if count == 0 and self._left is not None:
                raise ConnectionError(f"the origin stopped {self._left} bytes before the end")
        except OSError as exn:
            reason = "the read was called off" if self._aborted else f"the connection broke: {exn}"
            raise TransientError(reason, timed_out=isinstance(exn, TimeoutError)) from exn
        if self._left is not None:
            self._left -= count
        elif count == 0:
            self._left = 0
        return count

    def _next_chunk(self, connection: _Connection) -> int:
        """Bytes of the chunk that comes next; 0 behind the last."""
        if self._left is not None and connection.up_to(b"\r\n"):
            raise ConnectionError("a chunk is longer than it said")
        size = _CHUNK.match(connection.up_to(b"\r\n"))
        if size is None:
            raise ConnectionError("it sent no size of a chunk")
        return int(size[1], 16)

    def abort(self) -> None:
        """See `base.Body.abort`."""
        self._aborted, self._reusable = True, False
        if (connection := self._connection) is not None:
            connection.abort()

    def close(self) -> None:
        """Give the connection back, or end it when bytes are left.

        Takes no lock: the garbage collector may call it, in the midst of anything.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._reusable and self._left == 0:
            self._idle.append(connection)
        else:
            connection.close()


class Transport:
    """The connections of one client.

    Args:
        timeout: seconds without enough bytes before a connection counts as dead.
        proxies: URLs by scheme; None for those of the environment.
        trusted: file of certificates; None for the system's (SSL_CERT_FILE), False for anybody's.
    """

    def __init__(
        self,
        *,
        timeout: float,
        proxies: Mapping[str, str] | None = None,
        trusted: str | bool | None = None,
    ) -> None:
        self._timeout = timeout
        self._proxies = proxies
        self._trusted = trusted
        self._idle: dict[tuple[str, str], _Idle] = {}  # by scheme and server
        weakref.finalize(self, _close_all, self._idle)

    def request(self, method: str, url: str, headers: Mapping[str, str]) -> Response:
        """Ask for a URL in ASCII without a user part, whose path is sent as it is.

        Raises:
            PermissionError: a proxy wants a login.
            OSError: the connection failed, or there was no answer in time.
            ValueError: this is no URL, or a header spans lines.
            ConfigError: there are no certificates to trust.
        """
        scheme, place, target = split_url(url)
        idle = self._idle.get((scheme, place))
        if idle is None:
            idle = self._idle.setdefault((scheme, place), deque())
        connection = _take(idle) or self._connect(scheme, place)
        lines = [f"Host: {place}", *(f"{name}: {value}" for name, value in headers.items())]
        try:
            request = _head(method, f"{connection.prefix}{target}", [*lines, *connection.login])
            return Response(connection, idle, request, bodiless=method == "HEAD")
        except (OSError, ValueError):
            connection.close()
            raise

    def _proxy(self, scheme: str, host: str) -> tuple[tuple[str, int] | None, list[str]]:
        """The proxy on the way to a host, if any, and the header lines that it wants."""
        proxy = None
        if self._proxies is not None:
            proxy = self._proxies.get(scheme)
        elif any(name.lower().endswith("_proxy") for name in os.environ):
            from urllib.request import getproxies, proxy_bypass  # here: it brings half of `email`

            proxy = None if proxy_bypass(host) else getproxies().get(scheme)
        if not proxy:
            return None, []
        # As curl takes it, "host:port" is a proxy too.
        hop, place, _ = split_url(proxy if "://" in proxy else f"http://{proxy}")
        if hop != "http":
            raise ValueError("a proxy must be an http:// URL")
        user, at, place = place.rpartition("@")
        login = [f"Proxy-Authorization: {basic_login(user)}"] if at else []
        return _host_and_port(hop, place), login

    def _connect(self, scheme: str, place: str) -> _Connection:
        host, port = _host_and_port(scheme, place)
        proxy, login = self._proxy(scheme, host)
        timeout = min(self._timeout, _CONNECT_TIMEOUT)
        sock = socket.create_connection(proxy or (host, port), timeout=timeout)
        connection = _Connection(sock, self._timeout)
        if scheme == "http":
            if proxy:
                connection.prefix, connection.login = f"http://{place}", login
            return connection
        try:
            if proxy:
                target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                request = _head("CONNECT", target, [f"Host: {target}", *login])
                response = Response(connection, deque(), request, bodiless=True)
                if not 200 <= response.status < 300:
                    kind = PermissionError if response.status in (403, 407) else ConnectionError
                    raise kind(f"the proxy answered {response.status} {response.reason}")
            sock.settimeout(timeout)
            secure = self._tls.wrap_socket(sock, server_hostname=host)
            return _Connection(secure, self._timeout, secure=True)
        except (OSError, ConfigError):
            connection.close()
            raise

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        with undivided():  # a fork
            import ssl  # here: what a server without TLS takes no time for

            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if self._trusted is False:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            elif isinstance(self._trusted, str):
                try:
                    context.load_verify_locations(cafile=self._trusted)
                except OSError as exn:
                    raise ConfigError(
                        "the certificates to trust are not where AWS_CA_BUNDLE or verify say "
                        f"({exn.strerror or type(exn).__name__}). Correct the path."
                    ) from None
            else:
                context.load_default_certs()
            return context


def _take(idle: _Idle) -> _Connection | None:
    """A kept connection that seems to be alive."""
    with contextlib.suppress(IndexError):
        while not (connection := idle.pop()).is_idle():
            connection.close()
        return connection
    return None


def _close_all(kept: dict[tuple[str, str], _Idle]) -> None:
    for idle in kept.values():
        while idle:
            idle.pop().close()


def _host_and_port(scheme: str, place: str) -> tuple[str, int]:
    parts = urlsplit(f"{scheme}://{place}")
    if not parts.hostname:
        raise ValueError("it names no host")
    return parts.hostname, parts.port or (443 if scheme == "https" else 80)


def _head(method: str, target: str, lines: list[str]) -> bytes:
    first = f"{method} {target} HTTP/1.1"
    if any(_CONTROL.search(line) for line in (first, *lines)):
        raise ValueError("a line of the request holds a control character")
    return "\r\n".join([first, *lines, "", ""]).encode("latin-1")
