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
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import TYPE_CHECKING

from shardcache.fetch.blocks import FetchStatus
from shardcache.forks import HANDLED, is_harmless, processors
from shardcache.prewarm.crewmember import CANCEL, END, FAREWELL, live
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.cache import Cache
    from shardcache.fetch.connections import Throttle

__all__ = ["Crew", "suitable"]

logger = logging.getLogger(__name__)

#: Unasked, no node forks more than this. Only up to two were measured.
_MOST = 8
#: Shards or bytes that a process is worth: with fewer, forks and an S3 client for each cost more
#: than they bring (16 x 64 MiB from a fast server took longer in two processes than in one).
_SHARDS_EACH = 32
_BYTES_EACH = 2 << 30


def suitable(shards: int, size: int) -> int:
    """How many processes suit so many shards of so many bytes; 1 where forking could do harm."""
    worth = max(shards // _SHARDS_EACH, size // _BYTES_EACH)
    return max(1, min(processors(), _MOST, worth)) if is_harmless() else 1


class _LostError(Exception):
    """The process at the other end is gone."""


class Crew:
    """See the module.

    Args:
        cache: where to; its ``connections`` are shared out.
        processes: how many; with 1 nothing is forked.
        lines: fetches at a time, of all together.
        throttle: how fast all of them may be together.
    """

    def __init__(
        self, cache: Cache, processes: int, lines: int, throttle: Throttle | None = None
    ) -> None:
        self._cache = cache
        self._wanted = processes
        self._lines = lines
        self._throttle = throttle
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
        mine = cache.with_connections(connections)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            for number in range(count):
                member = _Member(number, lines, self._members)
                self._members.append(member)
                pid = os.fork()
                if pid == 0:
                    ends = member.far_control, member.far_lines, member.foreign()
                    live(mine, *ends, throttle=self._throttle)
                member.begun(pid)
        except OSError as exn:  # a limit of processes, memory or files: those there are do it all
            if self._members and not self._members[-1].runs:
                self._members.pop().drop()
            logger.info("fetching with %d processes: %s", self.size, exn)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for member in self._members:  # after the last fork
            member.listen(self._log)

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
        how = member.end(FAREWELL)
        logger.warning(
            "a process that fetched shards was lost (%s); they are fetched by %d more",
            how,
            self.size,
        )

    def _log(self, record: logging.LogRecord) -> None:
        """Log what a process has to say; none says what another one said already."""
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            with self._guard:
                if text in self._said:
                    return
                self._said.add(text)
        own = logging.getLogger(record.name)
        if own.isEnabledFor(record.levelno):
            own.handle(record)

    def cancel(self) -> None:
        """Call off every fetch of these processes; see `Cache.cancel`."""
        with self._guard:  # they are not closed meanwhile
            for member in self._members:
                member.say(CANCEL)

    def close(self) -> None:
        """End the processes, and wait for them."""
        with self._guard:
            members, self._members = self._members, []
        for member in members:
            member.drop()
        end = time.monotonic() + FAREWELL
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
        self._listener: threading.Thread | None = None

    @property
    def runs(self) -> bool:
        """Whether it was forked, and has not been waited for."""
        return self._pid is not None

    def foreign(self) -> list[Connection]:
        """In the process itself: ends that are not its own."""
        return [near for one in (*self.others, self) for near in (one.control, *one.lines)]

    def begun(self, pid: int) -> None:
        """In the parent: it runs."""
        self._pid = pid
        for far in (self.far_control, *self.far_lines):
            far.close()

    def listen(self, log: Callable[[logging.LogRecord], None]) -> None:
        """Have a thread call ``log`` with all that it logs, until it has ended."""

        def run() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    log(self.control.recv())

        name = f"shardcache-crew-{self.number}"
        self._listener = threading.Thread(target=run, name=name, daemon=True)
        self._listener.start()

    def say(self, word: str) -> None:
        """See `crewmember.live`."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.send(word)

    def drop(self) -> None:
        """Let it end."""
        if self._pid is not None:
            self.say(END)
        for near in self.lines:
            near.close()
        if self._pid is None:
            for end in (self.control, self.far_control, *self.far_lines):
                end.close()

    def end(self, seconds: float) -> str:
        """Wait until it has ended, but not for ever, and all it said was logged; how it ended."""
        self.drop()
        how = self._wait(seconds)
        if self._listener is not None:
            self._listener.join(FAREWELL)
        if self._listener is None or not self._listener.is_alive():
            # Under a thread that reads from it, its number could become another file's.
            self.control.close()
        return how

    def _wait(self, seconds: float) -> str:
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
        line.send((shard, status.listed, status.outdated))
        while True:
            state, answer = line.recv()
            status.size, status.written, status.received, status.retries = state
            if answer is not None:
                found: Exception | tuple[int, str] = answer
                return found
    except (EOFError, OSError) as exn:
        raise _LostError from exn
