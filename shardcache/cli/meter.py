"""A metering reverse proxy: who asked an S3 endpoint for what, to the byte.

`Meter` stands between clients and one plain-HTTP endpoint and passes every
byte on unchanged (`shardcache.cli.relay`). Not even ``Host`` is rewritten: SigV4
signs the Host a client sees, which is the meter's own, and the server checks
the Host it receives, so signatures stay valid although no key is known here.

Invariants:
    * Counters are never behind: what a client has received, `Meter.requests` counts.
    * When `Meter.pause` has returned, no body passes its limit until `resume`.
    * After `close` no thread and no socket of the meter is left.

Every public method may be called from any thread. A forked child must leave
the meter object of its parent alone, but may send requests to its endpoint.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import parse_qsl, unquote, urlsplit

from shardcache.cli.relay import Connection, Exchange, Gate
from shardcache.errors import ConfigError

__all__ = ["Meter", "ObjectTraffic", "RequestRecord", "traffic"]

_RETRY_SECONDS = 0.02
# Query parameters that leave a GET a read of the object itself; any other
# (acl, tagging, uploadId, partNumber, ...) asks for something else.
_READ_PARAMETERS = ("versionId", "x-id", "response-")
_SIGNATURE_PARAMETERS = ("X-Amz-", "AWSAccessKeyId", "Signature", "Expires")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the meter saw it, finished or still in flight.

    Attributes:
        method: the HTTP method.
        path: unquoted ``bucket/key``, without the query.
        range: what the Range header asked for, ``(start, stop)`` with ``stop``
            exclusive or None for "to the end"; ``(-n, None)`` for the last n bytes.
        status: status of the answer; 0 while, or because, there is none.
        body_bytes: bytes of the response body handed to the client's connection,
            without chunk framing. A client that hangs up may not have read them all.
        started: `time.monotonic` when the head of the request was complete.
        outcome: ``complete`` when the whole answer was handed over, ``aborted``
            when either side ended before that, ``open`` while in flight.
        reads_object: False for listings and sub-resources (``?acl``, ``?uploadId``).
    """

    method: str
    path: str
    range: tuple[int, int | None] | None
    status: int
    body_bytes: int
    started: float
    outcome: Literal["open", "complete", "aborted"]
    reads_object: bool

    @property
    def is_object_fetch(self) -> bool:
        """True for a successful GET whose answer begins with byte 0 of the object."""
        if self.method != "GET" or not self.reads_object:
            return False
        return self.status == 200 or (
            self.status == 206 and self.range is not None and self.range[0] == 0
        )


@dataclass(frozen=True, slots=True)
class ObjectTraffic:
    """What one object cost, summed over requests.

    Attributes:
        gets: GET requests, successful or not.
        object_fetches: how often the object was fetched. A fetch may be many
            ranges by many connections, so it is counted by who successfully
            asked for its first byte; a resumed fetch does not count twice.
        body_bytes: bytes of the object handed out by successful GETs.
        heads: HEAD requests, successful or not.
        failed: GET and HEAD requests answered with 4xx or 5xx, or aborted.
    """

    gets: int = 0
    object_fetches: int = 0
    body_bytes: int = 0
    heads: int = 0
    failed: int = 0


def traffic(records: Iterable[RequestRecord]) -> dict[str, ObjectTraffic]:
    """Sum GET and HEAD requests for objects by ``bucket/key``, in order of first use."""
    summed: dict[str, ObjectTraffic] = {}
    for record in records:
        if record.method not in ("GET", "HEAD") or not record.reads_object:
            continue
        so_far = summed.get(record.path, ObjectTraffic())
        is_get = record.method == "GET"
        summed[record.path] = ObjectTraffic(
            gets=so_far.gets + is_get,
            object_fetches=so_far.object_fetches + record.is_object_fetch,
            body_bytes=so_far.body_bytes
            + (record.body_bytes if is_get and record.status in (200, 206) else 0),
            heads=so_far.heads + (not is_get),
            failed=so_far.failed + (record.status >= 400 or record.outcome == "aborted"),
        )
    return summed


def _asked_range(header: str) -> tuple[int, int | None] | None:
    """The first range of a Range header; None where servers ignore it (RFC 9110, 14.2)."""
    unit, _, ranges = header.partition("=")
    first, dash, last = (part.strip() for part in ranges.partition(",")[0].partition("-"))
    digits = (first + last).isdecimal()
    if unit.strip().lower() != "bytes" or not dash or not digits:
        return None
    if not first:
        return -int(last), None
    return int(first), int(last) + 1 if last else None


def _record(exchange: Exchange) -> RequestRecord:
    raw_path, _, query = exchange.target.partition("?")
    path = unquote(raw_path).removeprefix("/")
    parameters = [name for name, _ in parse_qsl(query, keep_blank_values=True)]
    with exchange.lock:
        return RequestRecord(
            method=exchange.method,
            path=path,
            range=_asked_range(exchange.range_header),
            status=exchange.status,
            body_bytes=exchange.sent,
            started=exchange.started,
            outcome="aborted" if exchange.aborted else "complete" if exchange.complete else "open",
            reads_object=bool(path.partition("/")[2])
            and all(
                name.startswith(_READ_PARAMETERS + _SIGNATURE_PARAMETERS) for name in parameters
            ),
        )


class Meter:
    """A metering proxy on ``127.0.0.1``, running while its ``with`` block does.

    Args:
        endpoint_url: the ``http://host:port`` to pass requests on to.
        throttle: payload bytes per second and connection, in either direction;
            None for no limit. May be changed at any time.

    Raises:
        ConfigError: the endpoint is not plain HTTP, or the throttle not above 0.
    """

    def __init__(self, endpoint_url: str, *, throttle: float | None = None) -> None:
        parts = urlsplit(endpoint_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                "The meter passes plain HTTP on; the endpoint it was given is not http://. "
                "Give it one like http://127.0.0.1:9000.",
            )
        self._upstream = (parts.hostname, parts.port or 80)
        self._gate = Gate()
        self.throttle = throttle
        self._lock = threading.Lock()
        self._exchanges: list[Exchange] = []
        self._threads: dict[Connection, threading.Thread] = {}
        self._closing = False
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self.endpoint_url = ""
        """Where clients are to send requests; empty until the block is entered."""

    def __enter__(self) -> Self:
        self._listener = listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.endpoint_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        # Daemons, so that a forgotten meter cannot keep its process from ending.
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener,), name="meter-accept", daemon=True
        )
        self._acceptor.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exn: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def throttle(self) -> float | None:
        """Payload bytes per second and connection; None for no limit."""
        return self._gate.rate

    @throttle.setter
    def throttle(self, rate: float | None) -> None:
        if rate is not None and not rate > 0:
            raise ConfigError(f"throttle is {rate!r}. Give bytes per second above 0, or None.")
        self._gate.rate = rate

    def requests(self) -> list[RequestRecord]:
        """Every request since the start or the last `reset`, in order of arrival."""
        with self._lock:
            exchanges = list(self._exchanges)
        return [_record(exchange) for exchange in exchanges]

    def reset(self) -> None:
        """Forget all requests so far, also those in flight."""
        with self._lock:
            self._exchanges.clear()

    def summary(self) -> dict[str, ObjectTraffic]:
        """`traffic` of all requests since the start or the last `reset`."""
        return traffic(self.requests())

    def pause(self, after: int = 0) -> None:
        """Freeze every body, now and to come, once ``after`` bytes of it have passed.

        Heads still pass. Bodies that are further already stop where they are.
        """
        self._gate.limit = after
        with self._lock:
            exchanges = [c.exchange for c in self._threads if c.exchange is not None]
        for exchange in exchanges:
            # Whoever was sending under the old limit has finished when we get the lock.
            with exchange.lock:
                pass

    def resume(self) -> None:
        """Let bodies flow again."""
        self._gate.limit = None

    def close(self) -> None:
        """Cut every connection and wait until all threads have ended."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._closing = True
        # A connection wakes accept() on any system; shutdown() only does so on Linux.
        with contextlib.suppress(OSError):
            socket.create_connection(listener.getsockname(), timeout=1.0).close()
        if self._acceptor is not None:
            self._acceptor.join()
        # Before close(): a forked child may hold the descriptor and with it the port.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        with self._lock:
            threads = dict(self._threads)
        for connection in threads:
            connection.cut()
        for thread in threads.values():
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                client, _ = listener.accept()
                connection = Connection(client, self._upstream, self._gate, self._begin)
            except OSError:
                # Out of descriptors, or the client is gone again: the next may fare better.
                time.sleep(_RETRY_SECONDS)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="meter-connection", daemon=True
            )
            with self._lock:
                self._threads[connection] = thread
            thread.start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                del self._threads[connection]

    def _begin(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.append(exchange)
