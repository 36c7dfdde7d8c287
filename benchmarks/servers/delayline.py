"""A long line before a server: ``python -m benchmarks.servers.delayline --to PORT --delay 0.01``.

A TCP proxy that hands every byte on ``--delay`` seconds after it came, in both directions,
so that a request and its answer take at least twice as long. Connecting costs another round
trip, as a real handshake does: it is charged to the first bytes a client sends.

What it is not: it has no slow start, no loss and no limit of bandwidth but this process's own.
A direction holds up to `WINDOW` bytes, more than the window that Linux grows by default
(6 MiB), so the window bounds nobody below 1.6 GB/s and connection.

A connection has four threads that share nothing with other connections. The port is printed
when it listens; the proxy ends when its standard input is closed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
import time
from collections import deque

__all__ = ["WINDOW", "Line", "main"]

#: Bytes under way in one direction of one connection.
WINDOW = 16 << 20
#: Bytes per read: a thousandth of a second of the fastest clients.
_CHUNK = 1 << 20
_BACKLOG = 1024


class Line:
    """One direction: what is put in comes out ``delay`` seconds later, in order.

    One thread puts, another takes.
    """

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._abandoned = False
        self._changed = threading.Condition()

    def put(self, data: bytes, *, extra: float = 0.0) -> bool:
        """Add bytes, empty ones for the end; False once nobody takes them any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._held < WINDOW or self._abandoned)
            self._under_way.append((time.monotonic() + self.delay + extra, data))
            self._held += len(data)
            self._changed.notify_all()
            return not self._abandoned

    def take(self) -> bytes:
        """The next bytes, when they are due; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way)
            due, data = self._under_way[0]
        time.sleep(max(0.0, due - time.monotonic()))
        with self._changed:
            self._under_way.popleft()
            self._held -= len(data)
            self._changed.notify_all()
        return data

    def abandon(self) -> None:
        """Nobody takes any more: `put` returns False from now on."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()


def _fill(source: socket.socket, line: Line, extra: float) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            if not line.put(data, extra=extra):
                source.shutdown(socket.SHUT_RD)
                break
            extra = 0.0
    line.put(b"")


def _drain(line: Line, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := line.take():
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
        return
    line.abandon()


def _join(client: socket.socket, port: int, delay: float) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(client)
        server = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        threads = []
        for source, target, extra in ((client, server, 2 * delay), (server, client, 0.0)):
            # Its own segments are not to wait for each other, nor to be paced (BBR).
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            line = Line(delay)
            threads.append(threading.Thread(target=_fill, args=(source, line, extra), daemon=True))
            threads.append(threading.Thread(target=_drain, args=(line, target), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main() -> None:
    """Forward until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=int, required=True, help="port of the server")
    parser.add_argument("--delay", type=float, default=0.01, help="seconds each way")
    arguments = parser.parse_args()
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(_BACKLOG)

    def accept() -> None:
        while True:
            client, _ = listening.accept()
            given = (client, arguments.to, arguments.delay)
            threading.Thread(target=_join, args=given, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdout.write(f"{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
