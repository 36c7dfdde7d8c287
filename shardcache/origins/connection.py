"""Send HTTP requests to S3 and to web servers, over keep-alive connections.

llhttp (`httptools`) parses the headers and the chunks of responses. A body of a stated length
bypasses the parser. It is received with as few system calls as possible, because after each call
the thread has to wait for the interpreter lock: the socket blocks until the buffer is full
(MSG_WAITALL), also below TLS. The kernel wakes the thread no more often than needed (SO_RCVLOWAT).

A `Transport` may be used by all threads of the process that made it. A `Response` belongs to one
thread; only `Response.abort` may be called by others.
"""

from __future__ import annotations

import contextlib
import errno
import math
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
from functools import partial
from itertools import zip_longest
from queue import Empty
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from httptools import HttpParserError, HttpResponseParser

from shardcache import clock, threads
from shardcache.faults import ignoring, is_local_error, system_error
from shardcache.origins.base import ObjectInfo, TransientError, failure, receive

if TYPE_CHECKING:
    from shardcache.origins.tls import TLSStream

#: Bytes per second below which a connection counts as stalled: less than any link that could feed
#: training, and more than a peer sends to keep a connection alive.
_MIN_RATE = 8 * 1024
#: Seconds after which a read returns, even if its buffer is not full.
_SLICE = 1.0
#: Seconds to connect to a host; also the limit for the TLS handshake.
_CONNECT_TIMEOUT = 10.0
#: Seconds until the kernel probes an idle connection, by default two hours. AWS's NAT gateways
#: forget connections that were idle for 350 s.
_KEEPALIVE = 60
#: Limit of a head (status line and headers) in bytes, and bytes requested by one call.
_LONGEST_HEAD = 64 * 1024
_HEAD_AT_ONCE = 8 * 1024
_END_OF_HEAD = re.compile(rb"\n\r?\n")
#: RFC 9112 permits, and llhttp rejects, a Transfer-Encoding that overrides a Content-Length
#: (6.3), and lines that end with a bare LF (2.2).
_LENIENT = {"lenient_chunked_length": True, "lenient_optional_cr_before_lf": True}
_INTERIM = 16  # most responses (1xx) before the final one
_CHUNKS_AT_ONCE = 256 * 1024  # bytes of a chunked body requested by one call
_MAX_FRAMING = 1024 * 1024  # most bytes in a row of a chunked body that hold no data
#: Bytes that the kernel collects before it wakes a thread that receives a long body (SO_RCVLOWAT).
#: If each packet woke the thread, it would need a third more processor time.
_WAKE_AT = 512 * 1024

#: Seconds to connect to an address while there are others: more than any round trip takes.
_ADDRESS_TIMEOUT = 1.0
#: Seconds after a failure during which an address is tried last.
_AVOIDED = 60.0

_Address = tuple[int, Any]  # the address family, and the argument of `socket.connect`

#: Matches scheme, authority and path. `urlsplit` would change some paths.
_URL = re.compile(r"(https?)://([^/?#]+)([^#]*)", re.IGNORECASE)
_CONTROL = re.compile(r"[\r\n\0]")


class MalformedError(Exception):
    """A URL, a header or a response is malformed. No ValueError: signal handlers may raise that."""


def split_url(url: str) -> tuple[str, str, str]:
    """Return the scheme, authority and path of a URL; MalformedError if it is not http(s)."""
    match = _URL.match(url)
    if match is None:
        raise MalformedError("it is not the URL of a web server")
    scheme, authority, path = match.groups()
    return scheme.lower(), authority, path if path.startswith("/") else f"/{path}"


def basic_login(user: str) -> str:
    """Return an Authorization header for ``user``, the part of a URL before the ``@``."""
    return f"Basic {b64encode(unquote(user).encode()).decode()}"


def _proxy_of(server: str, proxies: Mapping[str, str] | None) -> tuple[str, str]:
    """Return the authority of the proxy for a server, or "", and the user in the proxy's URL."""
    if proxies is None:
        if not any(name.lower().endswith("_proxy") for name in os.environ):
            return "", ""
        from urllib.request import getproxies  # here: imports much of `email`

        proxies, address = getproxies(), _host_and_port(server)
        if any(_covers(entry, *address) for entry in re.split(r"[\s,]+", proxies.get("no", ""))):
            return "", ""
    if not (proxy := proxies.get(server.partition(":")[0])):
        return "", ""
    # Like curl, also accept "host:port" without a scheme.
    hop, authority, _ = split_url(proxy if "://" in proxy else f"http://{proxy}")
    if hop != "http":
        raise MalformedError("a proxy must be an http:// URL")
    user, _, authority = authority.rpartition("@")
    return authority, user


def _covers(entry: str, host: str, port: int) -> bool:
    """Return whether an entry of ``no_proxy`` covers a host; it may be a network or ``*``."""
    import ipaddress  # here: few programs have a proxy

    name, _, last = entry.rpartition(":")
    if not last.isdecimal() or (":" in name and not name.endswith("]")):  # an IPv6 address
        name, last = entry, str(port)
    if last != str(port):
        return False
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(name.strip("[]"), strict=False)
    except ValueError:
        domain = name.lower().lstrip("*.")
        return name == "*" or (domain != "" and f".{host}".rstrip(".").endswith(f".{domain}"))


def connect(host: str, port: int, timeout: float, failures: dict[_Address, float]) -> socket.socket:
    """Return a non-blocking socket that is connected to one of a host's addresses.

    ``timeout`` is in seconds, for the DNS lookup and again for all addresses together.
    ``failures`` has the time of the last failure of addresses; threads may share it. The type of
    an OSError is that of the last failure.
    """
    threads.refuse_patches()
    try:
        look_up = partial(_addresses, host, port, failures)
        addresses = threads.call(look_up, timeout, "shardcache-dns")
    except Empty:
        text = f"no address of {host} from DNS after {timeout:g} s"
        raise failure(TimeoutError, text) from None
    end = time.monotonic() + timeout
    failed: dict[_Address, OSError] = {}
    for address in addresses:
        if (left := end - time.monotonic()) <= 0:
            break
        family, sockaddr = address
        try:
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                sock.settimeout(left if address == addresses[-1] else min(left, _ADDRESS_TIMEOUT))
                if not (number := sock.connect_ex(sockaddr)):
                    stack.pop_all()
                    sock.setblocking(False)
                    return sock
        except system_error() as exn:  # no socket can be made
            if exn.errno in (errno.EMFILE, errno.ENFILE):  # not the address's fault
                raise
            number = exn.errno or 0
        if number == errno.EAGAIN:  # Python's code for a timeout
            number = errno.ETIMEDOUT
        failed[address] = OSError(number, os.strerror(number))
        failures[address] = clock.monotonic()
    reasons = ", ".join(f"{sockaddr[0]} ({exn.strerror})" for (_, sockaddr), exn in failed.items())
    tried = f"tried {len(failed)} of {len(addresses)} addresses: {reasons}"
    # A firewall may forbid one address of many. That error is final, so it is raised only if it
    # concerns all of them.
    kinds = sorted(map(type, failed.values()), key=lambda kind: kind is not PermissionError)
    raise failure(kinds[-1], f"no connection to {host}; {tried}")


def _addresses(host: str, port: int, failures: Mapping[_Address, float]) -> list[_Address]:
    """Look up a host's addresses, and return those that failed recently last.

    They are shuffled to spread the connections over them. IPv6 and IPv4 addresses alternate.
    """
    families: dict[int, list[_Address]] = {}  # the family that the system prefers is first
    for family, _, _, _, sockaddr in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        families.setdefault(family, []).append((family, sockaddr))
    for addresses in families.values():
        clock.randomness.shuffle(addresses)
    in_turn = [address for row in zip_longest(*families.values()) for address in row if address]
    oldest = clock.monotonic() - _AVOIDED
    return sorted(in_turn, key=lambda address: failures.get(address, oldest) > oldest)


class StaleError(ConnectionError):
    """A kept connection had ended before a response began. A new connection may work."""


class _Connection:
    """A socket that serves one request and its response at a time."""

    def __init__(
        self,
        sock: socket.socket,
        server: str,
        timeout: float,
        *,
        tls: TLSStream | None = None,
        prefix: str = "",
        login: Sequence[str] = (),
    ) -> None:
        self.socket = sock
        self.tls = tls  # encrypts what `socket` sends
        self.server = server  # scheme and authority
        # For requests through a proxy: the text before the path, and additional header lines.
        self.prefix, self.login = prefix, login
        self.pid = os.getpid()
        self.held = b""  # bytes received after the last head
        self._timeout = timeout
        self._slice = wait = min(_SLICE, timeout)
        self._spent, self.came = 0.0, 0  # seconds and bytes since the rate was last checked
        self._wakes_at = 1  # the value of SO_RCVLOWAT
        # The socket blocks, with a timeout of the kernel (SO_RCVTIMEO): Python's own timeouts would
        # add a `poll` to each call.
        sock.settimeout(None)
        pair = struct.pack("@ll", int(wait), max(1, int(wait % 1 * 1e6)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pair)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, request: bytes) -> _Message:
        """Send a request, receive the head of the final response and return it."""
        self._spent, self.came = 0.0, 0
        (self.tls or self.socket).sendall(request)
        for _ in range(_INTERIM):
            while (end := _END_OF_HEAD.search(self.held)) is None:
                if len(self.held) > _LONGEST_HEAD:
                    raise failure(ConnectionError, "the headers of the response do not end")
                before, self.held = self.held, b""
                self.held = before + self.receive_some(_HEAD_AT_ONCE)
            head, self.held = self.held[: end.end()], self.held[end.end() :]
            message = _Message()
            self.parser = HttpResponseParser(message)
            self.parser.set_dangerous_leniencies(**_LENIENT)
            self.parse(message, head)
            message.head_ended(self.parser.get_status_code())
            if message.status >= 200:
                return message
        raise failure(ConnectionError, "the server sends nothing but interim responses")

    def parse(self, message: _Message, data: bytes) -> None:
        """Pass received bytes to llhttp, which calls the methods of ``message``."""
        try:
            self.parser.feed_data(data)
        except HttpParserError as exn:
            if (raised := exn.__context__) is not None and not isinstance(raised, MalformedError):
                raise raised from None  # by a signal handler, in a method of `message`
            if not message.complete:
                raise failure(ConnectionError, f"the response is not HTTP: {exn}") from None
            message.keeps_alive = False

    def receive_some(self, most: int) -> bytes:
        """Return the next bytes, or b"" if the server sent nothing for `_slice` seconds."""
        if self.held:
            data, self.held = self.held, b""
            return data
        count = self._receive(view := memoryview(bytearray(most)), 0)
        if count == 0:
            raise failure(ConnectionResetError, "the server closed the connection")
        return bytes(view[: max(0, count)])

    def fill(self, view: memoryview, rest: int) -> int:
        """Fill ``view``, or part of it after `_slice` seconds; return the count, 0 if closed.

        ``rest`` is the known number of bytes that follow in the body.
        """
        got = min(len(view), len(self.held))
        view[:got], self.held = self.held[:got], self.held[got:]
        # The thread may only wait for bytes that will come, and part of the rest may have come:
        # `TLSStream` holds up to 256 KiB.
        wakes_at = _WAKE_AT if len(view) >= _WAKE_AT and rest >= 2 * _WAKE_AT else 1
        if wakes_at != self._wakes_at:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
            self._wakes_at = wakes_at
        started = time.monotonic()
        while got < len(view):
            count = self._receive(view[got:], socket.MSG_WAITALL)
            got += max(0, count)
            if count == 0 or (got and time.monotonic() - started >= self._slice):
                break
        return got

    def _receive(self, view: memoryview, flags: int) -> int:
        """Return the number of bytes received: 0 if closed, -1 if none came for `_slice` s."""
        started = time.monotonic()
        if self.tls is None:
            count = receive(self.socket, view, 0, flags)
        else:
            count = self.tls.recv_into(view, flags)
        self._spent += time.monotonic() - started
        self.came += max(0, count)
        if self._spent >= self._timeout:
            if self.came < self._spent * _MIN_RATE:
                raise failure(TimeoutError, f"only {self.came} bytes in {self._spent:.0f} s")
            self._spent, self.came = 0.0, 0
        return count


class _Message:
    """A response as llhttp reports it. To avoid a reference cycle, it does not know its parser."""

    status = 0
    complete = False
    keeps_alive = False

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}  # keyed by lower-case names
        self.unframed = bytearray()  # the contents of the chunks received

    def on_message_begin(self) -> None:
        if self.complete:
            raise MalformedError("bytes behind the response")

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def head_ended(self, status: int) -> None:
        """Note the status, and whether the server keeps the connection open."""
        self.status = status
        self.keeps_alive = "close" not in self.headers.get("connection", "").lower()

    def on_body(self, data: bytes) -> None:
        self.unframed += data

    def on_message_complete(self) -> None:
        self.complete = True


class Response:
    """A response whose body is being received; implements `base.Body`."""

    info: ObjectInfo
    start: int
    stop: int | None
    _connection: _Connection | None = None  # `close` may run before `__init__`

    def __init__(
        self,
        transport: Transport,
        connection: _Connection,
        message: _Message,
        *,
        url: str,
        secrets: Sequence[str],
        waited: float,
        bodiless: bool,
    ) -> None:
        self._transport, self._aborted, self._message = transport, False, message
        self.url, self.secrets = url, secrets  # as requested; as for `Transport.request`
        self.waited = waited
        self.status, self.headers = message.status, message.headers
        coding = self.headers.get("transfer-encoding", "").lower()
        length = "" if coding else self.headers.get("content-length", "")
        #: Content-Length in bytes, which llhttp has checked; None if it is missing.
        self.length = int(length) if length else None
        #: Bytes not yet read; None for chunks, and for a body that ends with the connection.
        self._left = self.length
        if bodiless or self.status in (204, 304):
            self._left, coding = 0, ""
        elif coding not in ("", "chunked"):
            raise failure(ConnectionError, f"the server uses the transfer coding {coding[:40]!r}")
        self._chunked = bool(coding)
        #: Whether the end of the body proves that no bytes are missing.
        self.proven = self._chunked or self._left is not None
        self._connection = connection

    def describe(self, info: ObjectInfo, start: int, stop: int | None) -> None:
        """Set the version of the object and the range of its bytes in the body."""
        self.info, self.start, self.stop = info, start, stop

    def readinto(self, buffer: memoryview) -> int:
        """Read the bytes of the next second into ``buffer``; return their number, 0 at the end."""
        connection = self._connection
        if connection is None or not buffer or self._left == 0:
            return 0
        try:
            if self._chunked:
                message, framing = self._message, 0
                while not message.unframed and not message.complete:
                    framing += len(data := connection.receive_some(_CHUNKS_AT_ONCE))
                    connection.parse(message, data)
                    if framing > _MAX_FRAMING and not message.unframed:
                        raise failure(ConnectionError, "the server sends chunks without data")
                count = min(len(buffer), len(message.unframed))
                buffer[:count] = message.unframed[:count]
                del message.unframed[:count]
            else:
                view = buffer if self._left is None else buffer[: self._left]
                rest = 0 if self._left is None else self._left - len(view)
                count = connection.fill(view, rest)
            if count == 0 and self._left is not None:
                text = f"the origin stopped {self._left} bytes before the end"
                raise failure(ConnectionError, text)
        except system_error() as exn:
            reason = "the read was cancelled" if self._aborted else f"the connection broke: {exn}"
            raise TransientError(reason, timed_out=isinstance(exn, TimeoutError)) from exn
        if self._left is not None:
            self._left -= count
        elif count == 0:
            self._left = 0
        return count

    def abort(self) -> None:
        self._aborted = True  # first, so that `close` gives no connection back from here on
        connection = self._connection
        # A forked child must not shut down its parent's connection.
        if connection is not None and connection.pid == os.getpid():
            with ignoring(OSError):
                connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Takes no lock, because the garbage collector may call this in any thread at any moment.
        connection, self._connection = self._connection, None
        if connection is not None:
            whole = self._left == 0 and self.proven and not self._aborted
            self._transport.take_back(connection, reusable=whole and self._message.keeps_alive)

    __del__ = close


class Transport:
    """The connections of one origin, and the settings to make more.

    Args:
        timeout: seconds below `_MIN_RATE` after which a connection counts as dead.
        proxies: the URL of the proxy for each scheme; None takes the proxies of the environment.
        trusted: path of a file or directory of certificates; False trusts every server; None trusts
            the certificates of the system and those that variables such as REQUESTS_CA_BUNDLE and
            SSL_CERT_FILE name; True as well, but without a variable those of botocore.
    """

    def __init__(
        self,
        *,
        timeout: float,
        proxies: Mapping[str, str] | None = None,
        trusted: str | bool | None = None,
    ) -> None:
        self._timeout, self._proxies, self._trusted = timeout, proxies, trusted
        self._failures: dict[_Address, float] = {}  # the argument of `connect`
        self._idle: dict[str, deque[_Connection]] = {}  # by server
        # Strong references to all open connections. Otherwise the garbage collector, when it
        # finalises a response in a cycle, could finalise the connection that `close` releases.
        self._open: set[_Connection] = set()
        self._most = math.inf  # the last argument of `limit_open`
        self.used = 0.0  #: when the last request was sent, on the monotonic clock
        # Not at exit: threads may still read, and other files may get the sockets' descriptors.
        weakref.finalize(self, _close, self._open).atexit = False

    def request(
        self,
        method: str,
        server: str,
        path: str,
        headers: Mapping[str, str],
        secrets: Sequence[str] = (),
    ) -> Response:
        """Send a request, and return the response after its head has been received.

        Args:
            server: scheme and authority without a user, in ASCII.
            path: path and query in ASCII, sent unchanged.
            headers: the request headers without Host.
            secrets: the secrets of the request, in all spellings; errors must not quote them.

        Raises:
            StaleError: the server had closed the kept connection.
            PermissionError: the proxy refuses to connect to the server, or demands a login.
            OSError: the connection failed, or no response came in time.
            MalformedError: the server, a header or the proxy's URL is malformed; nothing was sent.
        """
        self.used, kept = time.monotonic(), self._take(server)
        connection = kept or self._connect(server)
        try:
            lines = [f"{name}: {value}" for name, value in headers.items()]
            lines = [f"Host: {server.partition('://')[2]}", *lines, *connection.login]
            request = _head(method, f"{connection.prefix}{path}", lines)
            sent = time.monotonic()
            message = connection.exchange(request)
            return Response(
                self,
                connection,
                message,
                url=f"{server}{path}",
                secrets=secrets,
                waited=time.monotonic() - sent,
                bodiless=method == "HEAD",
            )
        except BaseException as exn:
            self.take_back(connection, reusable=False)
            # Not if a signal handler raised, or the request is wrong.
            if kept is not None and is_local_error(exn):
                # If the server or a NAT forgot this connection, it forgot the other idle ones as
                # well, and each of them would cost a request.
                with contextlib.suppress(IndexError):  # none is left
                    while True:
                        self.take_back(self._idle[server].pop(), reusable=False)
                # A server may close an idle connection at any moment (RFC 9112, 9.3.1).
                if isinstance(exn, ConnectionError) and connection.came == 0:
                    raise failure(StaleError, str(exn)) from None
            raise

    def _take(self, server: str) -> _Connection | None:
        """Return an idle connection that the server neither closed nor sent data on, or None."""
        idle = self._idle.get(server, ())
        while idle:
            with contextlib.suppress(IndexError):  # another thread took the last one
                connection, poller = idle.pop(), select.poll()
                poller.register(connection.socket, select.POLLIN)
                is_pending = connection.tls is not None and connection.tls.pending()
                if not (connection.held or is_pending or poller.poll(0)):
                    return connection
                self.take_back(connection, reusable=False)
        return None

    def limit_open(self, most: int) -> int:
        """Close idle connections while more than ``most`` are open, now and whenever one gets idle.

        Returns the number of open connections.
        """
        self._most = most
        for idle in list(self._idle.values()):
            with contextlib.suppress(IndexError):  # none is left
                while len(self._open) > most:
                    self.take_back(idle.popleft(), reusable=False)
        return len(self._open)

    def take_back(self, connection: _Connection, *, reusable: bool) -> None:
        """Keep a connection for the next request, or close it."""
        if reusable and connection in self._open and len(self._open) <= self._most:
            self._idle.setdefault(connection.server, deque()).append(connection)
        else:
            self._open.discard(connection)
            connection.socket.close()

    def via(self, server: str) -> str:
        """Return a phrase that names the proxy for a server, or "" without a proxy."""
        with contextlib.suppress(MalformedError):  # a request raises the same
            if proxy := _proxy_of(server, self._proxies)[0]:
                return f" through the proxy {proxy}"
        return ""

    def _connect(self, server: str) -> _Connection:
        scheme = server.partition(":")[0]
        host, port = _host_and_port(server)
        proxy, user = _proxy_of(server, self._proxies)
        login = [f"Proxy-Authorization: {basic_login(user)}"] if user else []
        timeout = min(self._timeout, _CONNECT_TIMEOUT)
        hop = _host_and_port(f"http://{proxy}") if proxy else (host, port)
        sock = connect(*hop, timeout, self._failures)
        try:
            if scheme == "https" and proxy:
                self._tunnel(sock, host, port, login)
            if scheme == "https":
                from shardcache.origins.tls import TLSStream  # here: plain HTTP needs no `ssl`

                tls = TLSStream(sock, host, self._trusted)
                connection = _Connection(sock, server, self._timeout, tls=tls)
                tls.handshake(timeout)
            else:
                prefix, lines = (server, login) if proxy else ("", [])
                connection = _Connection(sock, server, self._timeout, prefix=prefix, login=lines)
        except BaseException:
            sock.close()
            raise
        self._open.add(connection)
        return connection

    def _tunnel(self, sock: socket.socket, host: str, port: int, login: list[str]) -> None:
        """Make the proxy at the other end of a socket connect to a host."""
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        request = _head("CONNECT", target, [f"Host: {target}", *login])
        message = _Connection(sock, f"http://{target}", self._timeout).exchange(request)
        if not 200 <= message.status < 300:
            kind = PermissionError if message.status in (403, 407) else ConnectionError
            raise failure(kind, f"the proxy answered {message.status}")


def _close(connections: set[_Connection]) -> None:
    while connections:
        connections.pop().socket.close()


def _host_and_port(server: str) -> tuple[str, int]:
    try:
        parts = urlsplit(server)
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        (host or "").encode("idna")  # refuses parts that no name in DNS has
    except ValueError as exn:
        raise MalformedError(str(exn)) from exn
    if not host:
        raise MalformedError("it names no host")
    return host, port


def _head(method: str, target: str, lines: list[str]) -> bytes:
    first = f"{method} {target} HTTP/1.1"
    if any(map(_CONTROL.search, (first, *lines))):
        raise MalformedError("a line of the request holds a control character")
    try:
        return "\r\n".join([first, *lines, "", ""]).encode("latin-1")
    except UnicodeEncodeError as exn:
        raise MalformedError(f"a line of the request is not Latin-1: {exn.reason}") from None
