"""Helper processes of a prewarm, so that its threads do not all share one interpreter.

One interpreter is the bottleneck for small shards. On loopback, with two cores shared with the
server, 2,000 shards of 100 KiB took 2.8 s with one process and 1.4 s with two, 256 of 4 MiB 1.05
and 0.67 s, 48 of 64 MiB 1.39 and 1.18 s (medians of 3, November 2026).

The owner forks its helpers before it starts threads. A helper waits for its task, and ends when
the task is done or the owner has died. `pool` defines the messages between the two.
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

#: Four interpreters can download faster than the network links of today's nodes.
_MOST = 4


def most_processes() -> int:
    """Return how many processes a prewarm may use: one if this process has threads already.

    A fork does not copy threads, so locks that they hold would stay locked in the child.
    """
    return 1 if threading.active_count() > 1 else min(_MOST, len(os.sched_getaffinity(0)))


class Helper:
    """A forked process that calls ``serve`` with its end of a channel."""

    def __init__(self, serve: Callable[[Channel], None]) -> None:
        self._channel, helpers_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_run, args=(serve, helpers_end, self._channel), daemon=True
        )
        self._process.start()
        helpers_end.close()

    def send(self, message: Any) -> None:
        """Send a message to the helper. Does nothing if the helper has died."""
        with suppress(OSError):
            self._channel.send(message)

    def messages(self) -> Iterator[Any]:
        """Yield the messages of the helper until it ends."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                yield self._channel.recv()

    def close(self) -> None:
        """Wait until the helper has ended. A helper without a task ends at once."""
        self.send(None)
        self._process.join()
        self._channel.close()


def _run(serve: Callable[[Channel], None], channel: Channel, owners_end: Channel) -> None:
    owners_end.close()  # otherwise the helper would not notice that its owner has died
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner sends a message to stop the helper
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # After an error the owner downloads the rest of the share, and meets the error itself.
    with suppress(Exception):
        serve(channel)
