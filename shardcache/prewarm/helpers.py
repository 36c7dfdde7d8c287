"""Further processes for one prewarm: the threads of each share an interpreter of their own.

One interpreter is the bottleneck of small shards. On loopback, two cores shared with the server,
2,000 x 100 KiB took 2.6 s with one process and 1.2 s with two, 256 x 4 MiB 0.84 and 0.62 s,
48 x 64 MiB 1.34 and 1.25 s (medians of 4, November 2026).

A helper is forked before its owner has threads. It waits for its task, and ends when its task is
done or its owner has died. `pool` says what the two tell each other.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["Channel", "Helper", "most_processes"]

Channel: TypeAlias = "Connection[Any, Any]"

#: More interpreters than this are faster than the links of today's nodes.
_MOST = 4


def most_processes() -> int:
    """How many processes a prewarm may use here: one where a fork would copy threads."""
    return 1 if threading.active_count() > 1 else min(_MOST, len(os.sched_getaffinity(0)))


class Helper:
    """A process that runs ``serve`` with its end of a channel."""

    def __init__(self, serve: Callable[[Channel], None]) -> None:
        self._channel, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_run, args=(serve, theirs, self._channel), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        """Tell the helper something, unless it has died."""
        with suppress(OSError):
            self._channel.send(message)

    def messages(self) -> Iterator[Any]:
        """What the helper sends, until it ends."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                yield self._channel.recv()

    def close(self) -> None:
        """Wait until the helper has ended; one without a task ends now."""
        self.send(None)
        self._process.join()
        self._channel.close()


def _run(serve: Callable[[Channel], None], channel: Channel, owners_end: Channel) -> None:
    owners_end.close()  # otherwise the owner's death would not be noticed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner says when to stop
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(Exception):  # the owner has died; or it does what is left, and says what is wrong
        serve(channel)
