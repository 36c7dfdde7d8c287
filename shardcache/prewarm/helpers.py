"""Further processes for one prewarm: the threads of each share an interpreter of their own.

    Helper (forked while there are no threads) -> begin: its share -> messages -> close

One interpreter is the bottleneck of small shards. On loopback, two cores shared with the server,
2,000 x 100 KiB took 2.6 s with one process and 1.2 s with two, 256 x 4 MiB 0.84 and 0.62 s,
48 x 64 MiB 1.34 and 1.25 s (medians of 4, November 2026).

What a helper does is a prewarm like any other. It ends when its owner closes the pipe or dies; an
owner whose helper dies does the rest of its share itself.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from shardcache import threads

__all__ = ["Channel", "Helper", "most_processes"]

#: More interpreters than this are faster than the links of today's nodes.
_MOST = 4


def most_processes() -> int:
    """How many processes a prewarm may use here: one where a fork would copy threads."""
    return 1 if threading.active_count() > 1 else min(_MOST, len(os.sched_getaffinity(0)))


#: Descriptors of this process that helpers wait on: no other helper may keep them open.
_ours: set[int] = set()


class Channel:
    """The helper's end: its task, what it sends, and whether it is to stop."""

    def __init__(self, task: BinaryIO, news: BinaryIO) -> None:
        self.stop = threading.Event()
        self._task = task
        self._news = news
        self._guard = threading.Lock()

    def task(self) -> Any:
        """What `Helper.begin` was given; EOFError if there is nothing to do."""
        task = pickle.load(self._task)  # noqa: S301 - from the process that forked this one
        threads.start(self._wait_for_end, "shardcache-prewarm-stop")
        return task

    def _wait_for_end(self) -> None:
        self._task.read(1)  # returns when the owner closes the pipe, or died
        self.stop.set()

    def send(self, *message: Any) -> None:
        """Tell the owner; OSError if it died."""
        with self._guard:
            pickle.dump(message, self._news)
            self._news.flush()


class _Forward(logging.Handler):
    """Logs where the owner logs: a terminal is written by one process."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        with suppress(OSError):
            self._channel.send("log", record)


class Helper:
    """A process that waits for its share of a prewarm; ``serve`` is what it runs."""

    def __init__(self, serve: Callable[[Channel], None]) -> None:
        task, ours = os.pipe()
        theirs, news = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                for descriptor in (*_ours, ours, theirs):
                    os.close(descriptor)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner says when to stop
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                channel = Channel(os.fdopen(task, "rb"), os.fdopen(news, "wb"))
                logging.getLogger("shardcache").handlers[:] = [_Forward(channel)]
                serve(channel)
                code = 0
            except (EOFError, OSError):
                code = 0  # no work, or no owner any more
            finally:
                os._exit(code)
        os.close(task)
        os.close(news)
        _ours.add(ours)
        self._task = os.fdopen(ours, "wb")
        self._news = os.fdopen(theirs, "rb")

    def begin(self, *task: Any) -> None:
        """Give it its share; OSError if it died."""
        pickle.dump(task, self._task)
        self._task.flush()

    def messages(self) -> Iterator[tuple[Any, ...]]:
        """What it sends, until it ends."""
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while True:
                message = pickle.load(self._news)  # noqa: S301 - from our own fork
                if message[0] == "log":
                    logging.getLogger(message[1].name).handle(message[1])
                else:
                    yield message

    def stop(self) -> None:
        """Let it end what it does."""
        if not self._task.closed:
            _ours.discard(self._task.fileno())
            with suppress(OSError):  # it died with its task in the buffer
                self._task.close()

    def close(self) -> None:
        """Let it end, and wait until it has."""
        self.stop()
        os.waitpid(self._pid, 0)
        self._news.close()
