"""A forked process that fetches for a prewarm; see `crew`, whose module is its parent's side.

It fetches what comes over its lines until its parent says that it is to end, or is gone. Nothing
of its parent's is unwound in it, and what it logs is logged there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import logging.handlers
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from shardcache import threads
from shardcache.fetch.blocks import FetchStatus
from shardcache.forks import HANDLED
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.fetch.connections import Throttle

__all__ = ["CANCEL", "END", "FAREWELL", "live"]

logger = logging.getLogger(__name__)

#: Seconds between two looks for what a parent says, and at least between two reports of how
#: far a fetch is, by which the parent finds out how many are best at a time.
_TICK = 0.1
_REPORT = 0.01
#: Seconds that a process has to let go of its partials when its lines are closed.
FAREWELL = 5.0
#: What a parent says. To close a connection would not do: a thread that reads from it holds
#: it open.
CANCEL, END = "cancel", "end"
#: size, written, received, retries
_State = tuple[int | None, int, int, int]


def live(
    cache: Cache,
    control: Connection,
    lines: Sequence[Connection],
    foreign: Iterable[Connection],
    *,
    throttle: Throttle | None = None,
) -> NoReturn:
    """Be a member of a crew, in a process that was just forked with `HANDLED` blocked.

    Args:
        cache: where to.
        control: what the parent says, and is told by the log.
        lines: what it asks for comes over these, one shard after another.
        foreign: ends of others, which would not be closed as long as they are open here.
        throttle: how fast it may fetch, together with the others.
    """
    try:
        for handled in HANDLED:
            signal.signal(handled, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        for each in foreign:
            each.close()
        _serve(cache, control, lines, throttle)
    except BaseException:  # noqa: BLE001 - nothing of the parent's may be unwound here
        os.write(2, f"shardcache: {sys.exc_info()[1]!r}\n".encode())
        os._exit(1)
    os._exit(0)


def _serve(
    cache: Cache, control: Connection, lines: Sequence[Connection], throttle: Throttle | None
) -> None:
    _log_to(control)
    fetches = [_Fetches(cache, line, throttle) for line in lines]
    workers = [
        threads.start(each.run, f"shardcache-prewarm-{number}")
        for number, each in enumerate(fetches)
    ]
    while True:
        if control.poll(_TICK):
            try:
                word = control.recv()
            except (EOFError, OSError):  # the parent is gone
                break
            if word == END:
                break
            cache.cancel()
        for each in fetches:
            each.report()  # the last one may have come too soon after another
    end = time.monotonic() + FAREWELL
    while any(worker.is_alive() for worker in workers) and time.monotonic() < end:
        cache.cancel()  # again and again: a fetch may begin between two of these calls
        time.sleep(_TICK / 10)
    cache.close()


class _Fetches:
    """What comes over one line, one after another."""

    def __init__(self, cache: Cache, line: Connection, throttle: Throttle | None) -> None:
        self._cache = cache
        self._throttle = throttle
        self._line = line
        self._guard = threading.Lock()
        self._status: FetchStatus | None = None
        self._told: _State | None = None
        self._told_at = 0.0

    def run(self) -> None:
        """Fetch until the line is closed."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                shard, listed, outdated = self._line.recv()
                self._status = FetchStatus(
                    listed=listed,
                    outdated=outdated,
                    listener=self._moved,
                    throttle=self._throttle,
                )
                answer = self._fetch(shard, self._status)
                with self._guard:
                    state, self._status = _state(self._status), None
                    self._line.send((state, answer))

    def _fetch(self, shard: ShardURL, status: FetchStatus) -> Exception | tuple[int, str]:
        try:
            entry, how = self._cache.fetch_shard(shard, status)
        except Exception as exn:  # noqa: BLE001 - whoever asked gets it
            return _portable(exn)
        return entry.size, str(how)

    def _moved(self) -> None:
        """Tell how far the current one is, unless that was told just now."""
        if time.monotonic() - self._told_at >= _REPORT:
            self.report()

    def report(self) -> None:
        """Tell how far the current one is, if the parent does not know."""
        with self._guard, contextlib.suppress(OSError):  # the parent is gone
            if self._status is not None and (state := _state(self._status)) != self._told:
                self._told, self._told_at = state, time.monotonic()
                self._line.send((state, None))


def _state(status: FetchStatus) -> _State:
    return status.size, status.written, status.received, status.retries


def _portable(exn: Exception) -> Exception:
    """The error, or its text, if it does not survive the way."""
    try:
        if type(pickle.loads(pickle.dumps(exn))) is type(exn):  # noqa: S301 - our own
            return exn
    except Exception:  # noqa: BLE001 - whatever its class does
        logger.debug("cannot be sent: %r", exn)
    return OSError(errno.EIO, f"{type(exn).__name__}: {exn}")


class _Forward(logging.handlers.QueueHandler):
    """Sends records to the parent."""

    def __init__(self, control: Connection) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self._control = control

    def enqueue(self, record: logging.LogRecord) -> None:
        """See `logging.handlers.QueueHandler`; called by one thread at a time."""
        with contextlib.suppress(OSError):  # it is gone, and soon so are we
            self._control.send(record)


def _log_to(control: Connection) -> None:
    """Let all loggers log to the parent, who may be drawing on the terminal."""
    forward = _Forward(control)
    for each in _loggers():
        if each.handlers:
            each.handlers = [] if each.propagate else [forward]
    logging.root.handlers = [forward]


def _loggers() -> Iterator[logging.Logger]:
    known: dict[str, Any] = logging.root.manager.loggerDict
    return (each for each in list(known.values()) if isinstance(each, logging.Logger))
