"""Processes that fetch side by side for one prewarm.

    worker thread --- its line, a socket pair ---> thread of a forked process: Cache.fetch_shard

However many threads a Python process has, they take turns. Several processes bring small
shards, and those that a fast network brings, so many times faster, up to the processors there
are. They agree by the locks of the directory, as processes of any job do.

Each is a fork, so that it begins in milliseconds, with all that is imported. It fetches what
comes over its lines, and ends when they are closed, whatever became of its parent. What it
logs, its parent logs. One that is killed costs the bytes that were on their way: its shards
are fetched by the parent.

A `Crew` may be used by any number of threads, within its ``with`` block.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import logging.handlers
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from shardcache.blocks import FetchStatus
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache

__all__ = ["Crew", "suitable"]

logger = logging.getLogger(__name__)

#: More than this many were not seen to be of use: the disk or the network is the limit then.
_MOST = 8
#: Shards or bytes that a process is worth. It takes 50 to 100 ms until it fetches, in which one
#: process brings some 30 small shards, or 100 MB where the network is as fast as that.
_SHARDS_EACH = 32
_BYTES_EACH = 2 << 30
#: Bytes of memory beyond which a process is not forked unasked: the kernel copies 2 MB of page
#: tables per GB, while everything in the process waits.
_LARGE = 1 << 30
#: Seconds between two looks for what a parent says, and at least between two reports of how
#: far a fetch is, by which the parent finds out how many are best at a time.
_TICK = 0.1
_REPORT = 0.01
#: Seconds that a process has to let go of its partials when its lines are closed.
_FAREWELL = 5.0
#: Signals that the parent answers for all: Ctrl-C goes to every process of a terminal, and
#: what ends a job to every process of it. If the parent dies of one, they see that.
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: What a parent says. To close a connection would not do: a thread that reads from it holds
#: it open.
_CANCEL, _END = "cancel", "end"
#: size, written, received, retries
_State = tuple[int | None, int, int, int]


def suitable(shards: int, size: int) -> int:
    """How many processes suit so many shards of so many bytes; 1 where forking could do harm.

    A fork copies nothing of other threads but the locks that they hold at that moment.
    """
    worth = max(shards // _SHARDS_EACH, size // _BYTES_EACH)
    if sys.platform != "linux" or threading.active_count() > 1:
        return 1
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > _LARGE:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), _MOST, worth))


class _LostError(Exception):
    """The process at the other end is gone."""


class Crew:
    """See the module.

    Args:
        cache: where to; its ``connections`` are shared out.
        processes: how many; with 1 nothing is forked.
        lines: fetches at a time, of all together.
    """

    def __init__(self, cache: Cache, processes: int, lines: int) -> None:
        self._cache = cache
        self._wanted = processes
        self._lines = lines
        self._members: list[_Member] = []
        self._guard = threading.Lock()
        self._said: set[str] = set()

    @property
    def size(self) -> int:
        """How many processes fetch at the same time."""
        return max(1, len(self._members))

    def __enter__(self) -> Crew:
        if self._wanted > 1:
            self._fork()
        return self

    def _fork(self) -> None:
        cache, count = self._cache, self._wanted
        lines = -(-self._lines // count)
        connections = max(1, cache.config.connections // count)
        cache.prepare_here()  # or each would import and read it all anew
        # A signal between the fork and the child's first statement would find our handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            for number in range(count):
                member = _Member(number, lines, self._members)
                self._members.append(member)
                pid = os.fork()
                if pid == 0:
                    _be(member, cache.with_connections(connections), before)
                member.begun(pid)
        except OSError as exn:  # a limit of processes or of memory: those there are do it all
            self._members.pop().drop()
            logger.info("fetching with %d processes: %s", self.size, exn)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for member in self._members:  # after the last fork
            name = f"shardcache-crew-{member.number}"
            threading.Thread(target=self._listen, args=(member,), name=name, daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def fetch_shard(self, shard: ShardURL, status: FetchStatus) -> tuple[int, str]:
        """As `Cache.fetch_shard`, by whichever process has the least to do.

        Returns:
            The shard's size in bytes, and how it was had (`coordination.Outcome`).

        Raises:
            As `Cache.fetch_shard`.
        """
        while (taken := self._take()) is not None:
            member, line = taken
            try:
                answer = _ask(line, shard, status)
            except _LostError:
                self._lose(member)
                continue
            except BaseException:
                line.close()  # what it would answer is of no use to the next one
                raise
            with self._guard:
                member.idle.append(line)
            if isinstance(answer, Exception):
                raise answer
            return answer
        entry, how = self._cache.fetch_shard(shard, status)
        return entry.size, str(how)

    def _take(self) -> tuple[_Member, Connection] | None:
        with self._guard:
            member = max(self._members, key=lambda one: len(one.idle), default=None)
            if member is None or not member.idle:
                return None
            return member, member.idle.pop()

    def _lose(self, member: _Member) -> None:
        with self._guard:
            if member not in self._members:
                return
            self._members.remove(member)
        how = member.end(_FAREWELL)
        logger.warning(
            "a process that fetched shards was lost (%s); they are fetched by %d more",
            how,
            self.size,
        )

    def _listen(self, member: _Member) -> None:
        """Log what a process has to say; none says what another one said already."""
        while True:
            try:
                record = member.control.recv()
            except (EOFError, OSError):
                return
            text = record.getMessage()
            if record.levelno >= logging.WARNING:
                with self._guard:
                    if text in self._said:
                        continue
                    self._said.add(text)
            own = logging.getLogger(record.name)
            if own.isEnabledFor(record.levelno):
                own.handle(record)

    def cancel(self) -> None:
        """Call off every fetch of these processes; see `Cache.cancel`."""
        with self._guard:
            members = list(self._members)
        for member in members:
            with contextlib.suppress(OSError):  # it is gone
                member.control.send(_CANCEL)

    def close(self) -> None:
        """End the processes, and wait for them."""
        with self._guard:
            members, self._members = self._members, []
        for member in members:
            member.drop()
        end = time.monotonic() + _FAREWELL
        for member in members:
            member.end(max(0.0, end - time.monotonic()))


class _Member:
    """One process, as its parent sees it; made before the fork.

    Args:
        number: of the process.
        lines: how many it gets.
        others: those that were made before; their lines are none of its business.
    """

    def __init__(self, number: int, lines: int, others: list[_Member]) -> None:
        self.number = number
        self.others = list(others)
        self.control, self.far_control = Pipe()
        pairs = [Pipe() for _ in range(lines)]
        self.idle = [near for near, _ in pairs]
        self.lines = list(self.idle)
        self.far_lines = [far for _, far in pairs]
        self._pid: int | None = None

    def begun(self, pid: int) -> None:
        """In the parent: it runs."""
        self._pid = pid
        for far in (self.far_control, *self.far_lines):
            far.close()

    def close_near(self) -> None:
        """Close the parent's ends, in whichever process."""
        for near in (self.control, *self.lines):
            near.close()

    def drop(self) -> None:
        """Let it end, and close the parent's ends."""
        if self._pid is not None and not self.control.closed:
            with contextlib.suppress(OSError):  # it has ended
                self.control.send(_END)
        self.close_near()
        if self._pid is None:
            for far in (self.far_control, *self.far_lines):
                far.close()

    def end(self, seconds: float) -> str:
        """Wait until it has ended, but not for ever; how it did."""
        self.drop()
        if self._pid is None:
            return "never begun"
        end = time.monotonic() + seconds
        try:
            while True:
                pid, code = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    code = os.waitstatus_to_exitcode(code)
                    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
                if time.monotonic() >= end:
                    os.kill(self._pid, signal.SIGKILL)
                    os.waitpid(self._pid, 0)
                    return "it did not end"
                time.sleep(0.001)
        except ChildProcessError:  # somebody else waits for all children, or nobody has to
            return "unknown"
        finally:
            self._pid = None


def _ask(line: Connection, shard: ShardURL, status: FetchStatus) -> Exception | tuple[int, str]:
    """Have a shard fetched; the answer, or the error."""
    try:
        line.send((shard, status.listed))
        while True:
            state, answer = line.recv()
            status.size, status.written, status.received, status.retries = state
            if answer is not None:
                found: Exception | tuple[int, str] = answer
                return found
    except (EOFError, OSError) as exn:
        raise _LostError from exn


# -- in the forked process ---------------------------------------------------------


def _be(member: _Member, cache: Cache, mask: set[Any]) -> NoReturn:
    """Live as a member of the crew."""
    try:
        for handled in _HANDLED:
            signal.signal(handled, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each in (*member.others, member):
            each.close_near()
        _serve(member, cache)
    except BaseException:  # noqa: BLE001 - nothing of the parent's may be unwound here
        os.write(2, f"shardcache: {sys.exc_info()[1]!r}\n".encode())
        os._exit(1)
    os._exit(0)


def _serve(member: _Member, cache: Cache) -> None:
    control = member.far_control
    _log_to(control)
    fetches = [_Fetches(cache, line) for line in member.far_lines]
    threads = [threading.Thread(target=each.run, daemon=True) for each in fetches]
    for thread in threads:
        thread.start()
    while True:
        if control.poll(_TICK):
            try:
                word = control.recv()
            except (EOFError, OSError):  # the parent is gone
                break
            if word == _END:
                break
            cache.cancel()
        for each in fetches:
            each.report()  # the last one may have come too soon after another
    end = time.monotonic() + _FAREWELL
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        cache.cancel()  # again and again: a fetch may begin between two of these calls
        time.sleep(_TICK / 10)
    cache.close()


class _Fetches:
    """What comes over one line, one after another."""

    def __init__(self, cache: Cache, line: Connection) -> None:
        self._cache = cache
        self._line = line
        self._guard = threading.Lock()
        self._status: FetchStatus | None = None
        self._told: _State | None = None
        self._told_at = 0.0

    def run(self) -> None:
        """Fetch until the line is closed."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                shard, listed = self._line.recv()
                self._status = FetchStatus(listed=listed, listener=self._moved)
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
