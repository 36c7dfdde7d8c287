"""The state of one shard that this process brings into the cache.

Only the methods of `Download` change the state. Readers share a download through the table of the
process (`Downloads`). `docs/design.md` explains the states, and why the lock is reentrant.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from shardcache import clock, threads
from shardcache.errors import CacheFullError, FetchCancelledError, LockTimeoutError, ShardCacheError
from shardcache.urls import ShardURL

if TYPE_CHECKING:
    from shardcache.download.connections import Throttle
    from shardcache.origins.base import Body
    from shardcache.store.entry import OpenEntry
    from shardcache.store.partial import Partial

State = Enum("State", "WAITING RUNNING DONE FAILED CANCELLED")
#: How a shard was obtained.
Outcome: TypeAlias = Literal["hit", "coalesced", "linked", "fetched", "imported"]

#: Errors after which another reader may get the shard at once.
TEMPORARY = CacheFullError, LockTimeoutError, FetchCancelledError
#: The bytes of one request. If no more are missing, they arrive before a new download would begin.
_ALMOST_COMPLETE = 16 << 20


class Progress(NamedTuple):
    """The progress of a download at one moment."""

    size: int | None = None  # bytes of the shard, if known
    written: int = 0  # bytes in the partial, including resumed bytes
    received: int = 0  # bytes received over the network
    retries: int = 0  # repeated requests


@dataclass(eq=False, repr=False)
class Download:
    """The state of one shard that is brought into the cache. Safe between threads."""

    _table: Downloads
    shard: ShardURL
    listed: int | None = None  #: the size of the shard in a listing, which may be outdated
    outdated: frozenset[str] = frozenset()  #: versions to replace, even if they are cached
    throttle: Throttle | None = None  #: limits the bytes per second of this and other downloads
    #: Whether the reader can bypass the cache. For one that cannot, the disk is used even while it
    #: is paused, and `ProcessCache.fetch` makes the copies in upstreams.
    can_bypass: bool = False
    is_ahead: bool = False  #: whether no reader needs the shard yet, so the worker gives way
    file: Path | None = None  #: a file of this machine to import, if it is the object

    state: State = field(default=State.WAITING, init=False)
    #: The partial, written by this or another process; None if unknown.
    partial_path: Path | None = field(default=None, init=False)
    #: Number of changes of the state or of the bytes that can be read.
    changes: int = field(default=0, init=False)
    is_claimed: bool = field(default=False, init=False)  #: whether a thread is or was the worker
    is_waiting: bool = field(default=False, init=False)  #: whether another process has the lock
    #: Whether the worker has released the lock, the partial and the connections.
    ended: bool = field(default=False, init=False)
    readers: int = field(default=0, init=False)  #: readers that have joined and not left
    #: Whether it completes even if all readers leave.
    is_to_finish: bool = field(default=False, init=False)
    is_followed: bool = field(default=False, init=False)  #: whether a stream has joined
    is_upstream: bool = field(default=False, init=False)  #: whether an upstream sends the bytes
    #: How the shard is obtained, as far as that is known yet.
    outcome: Outcome = field(default="coalesced", init=False)
    size: int | None = field(default=None, init=False)  #: this and the next three: see `Progress`
    written: int = field(default=0, init=False)
    received: int = field(default=0, init=False)
    retries: int = field(default=0, init=False)
    _opened: OpenEntry | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _response: Body | None = field(default=None, init=False)
    _abort: Callable[[FetchCancelledError], None] | None = field(default=None, init=False)
    # Not a `Condition`: if a signal handler raises in its methods, it keeps or loses the lock.
    _waiters: dict[threads.Queue[None], Callable[[], bool]] = field(
        default_factory=dict, init=False
    )
    #: The process that made it. A forked child must not use any other member.
    pid: int = field(default_factory=os.getpid, init=False)

    # -- any thread --------------------------------------------------------------

    def join(self, *, finish: bool = False) -> Download:
        """Add a reader to the shard's running download, or to this one if none runs; return it.

        With ``finish``, the download is completed even if all readers leave.
        """
        key, running = self.shard.key, self._table.running
        with self._table.lock:
            while True:
                self.check()
                download = running.setdefault(key, self)
                download.readers += 1
                download.is_to_finish |= finish
                download.is_ahead &= self.is_ahead
                download.is_followed |= self.can_bypass
                if running.get(key) is download:
                    return download
                # The garbage collector closed the last other reader before, which cancelled it.
                download.leave()

    def progress(self) -> Progress:
        return Progress(self.size, self.written, self.received, self.retries)

    def wait(self, is_over: Callable[[], bool], seconds: float | None = None) -> float:
        """Block until ``is_over()``, called with the lock held. Return the seconds it took."""
        start, waiter = time.monotonic(), threads.Queue[None]()
        with self._table.lock:
            if is_over():
                return 0.0
            self._waiters[waiter] = is_over
        try:
            with contextlib.suppress(Empty):
                waiter.get(timeout=seconds)
        finally:
            with self._table.lock:
                del self._waiters[waiter]
        return time.monotonic() - start

    def result(self, *, is_leaving: bool = False) -> OpenEntry | None:
        """Return another handle of the entry, or raise the error that ended the download.

        Returns None while the download runs. The last reader that ``is_leaving`` takes the handle
        itself.
        """
        with self._table.lock:
            if self._error is not None:
                raise self._error
            if is_leaving and self.readers == 1:
                opened, self._opened = self._opened, None
                return opened
            return None if self._opened is None else self._opened.duplicate()

    def take_response(self) -> Body | None:
        """Return the open response that `keep` kept, or None. Only one caller gets it."""
        with self._table.lock:
            response, self._response = self._response, None
            return response

    def promote(self) -> bool:
        """Turn a download ahead into one that a reader waits for.

        Returns whether this download still serves the reader, even if it failed with an error of
        the origin, which a new download would only repeat.
        """
        with self._table.lock:
            self.is_ahead = False
            if self.state in (State.WAITING, State.RUNNING):
                return True
            if isinstance(self._error, ShardCacheError) and not isinstance(self._error, TEMPORARY):
                return True
            return self._opened is not None or self._response is not None

    def leave(self) -> None:
        """Remove one reader. The garbage collector may call this in any thread.

        The last reader cancels a running download, unless a reader asked to finish it or it is
        almost complete.
        """
        with self._table.lock:
            self.readers -= 1
            if self.readers:
                return
            left = _ALMOST_COMPLETE + 1 if self.size is None else self.size - self.written
            if self.ended:
                self._drop()
            elif not self.is_to_finish and left > _ALMOST_COMPLETE:
                self.cancel()

    def cancel(self) -> None:
        """Cancel the download, unless it has ended. The bytes that have arrived are kept.

        The worker ends at its next check. The garbage collector may call this.
        """
        with self._table.lock:
            if self.state in (State.WAITING, State.RUNNING):
                self._enter(State.CANCELLED)
            abort = self._abort
        if abort is not None:
            abort(self._cancelled())

    def cancel_unless_shared(self) -> None:
        with self._table.lock:
            if self.readers <= 1:
                self.cancel()

    # -- the worker and its threads ------------------------------------------------

    def claim(self) -> bool:
        """Make the calling thread the worker; return False if there is or was one."""
        with self._table.lock:
            was_claimed, self.is_claimed = self.is_claimed or self.ended, True
            return not was_claimed

    def note_waiting(self, partial_path: Path | None) -> None:
        """Note that another process downloads the shard, and into which partial, if known."""
        with self._table.lock:
            self.is_waiting = True
            if self.state is not State.WAITING or partial_path not in (None, self.partial_path):
                self.partial_path = partial_path or self.partial_path
                self._enter(State.WAITING)

    def note_running(
        self, partial: Partial, upstream: bool, abort: Callable[[FetchCancelledError], None]
    ) -> None:
        """Note that this process writes ``partial`` from now on. `cancel` will call ``abort``."""
        with self._table.lock:
            self._abort, self.is_waiting = abort, False
            self.partial_path, self.size = partial.path, partial.metadata.info.size
            self.written, self.is_upstream, self.outcome = partial.written, upstream, "fetched"
            self._enter(State.RUNNING)

    def note_bytes(self, received: int, partial: Partial | None = None) -> None:
        """Note bytes ``received`` since the last call, and that ``partial`` has more bytes."""
        with self._table.lock:
            self.received += received
            if partial is not None:
                self.written = partial.written  # with the lock held, so that it never falls
                self._notify()

    def note_retries(self, retries: int) -> None:
        """Note how many requests were repeated for the current version of the object."""
        self.retries = retries

    def note_outcome(self, opened: OpenEntry, outcome: Outcome) -> OpenEntry:
        """Note how the entry was obtained, and return it."""
        self.outcome = outcome
        return opened

    def give_way(self) -> None:
        """Cancel the download if it is still ahead of all readers, and raise like `check`."""
        with self._table.lock:
            if self.is_ahead:
                self.cancel()
        self.check()

    def keep(self, response: Body) -> None:
        """Keep the origin's first response, for a reader that streams a shard without room."""
        with self._table.lock:
            for old in (self.take_response(), None if self.readers else response):
                if old is not None:
                    old.close()
            self._response = response if self.readers else None

    def check(self) -> None:
        if self.state is State.CANCELLED:
            raise self._cancelled()

    def _cancelled(self) -> FetchCancelledError:
        text = "the download was cancelled; the bytes that have arrived are kept. Run it again."
        return FetchCancelledError(f"{self.shard}: {text}", url=str(self.shard))

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``. Raise FetchCancelledError as soon as the download is cancelled."""
        clock.nap(seconds, self.check)

    def end(self, opened: OpenEntry | None, error: BaseException | None = None) -> bool:
        """Note the entry or the error. Returns False if no reader is left to receive it."""
        with self._table.lock:
            self._opened, self._error, self.ended = opened, error, True
            self._abort = None  # it refers to the transfer, which refers to this download
            self._enter(State.FAILED if opened is None else State.DONE)
            has_readers = self.readers > 0
            if not has_readers:
                self._drop()
        return has_readers

    # -- called with the lock held -------------------------------------------------

    def _enter(self, state: State) -> None:
        if self.state is not State.CANCELLED:
            self.state = state
        if state not in (State.WAITING, State.RUNNING):
            running = self._table.running  # so that no further reader can join this download
            if running.get(self.shard.key) is self:
                del running[self.shard.key]
        self._notify()

    def _notify(self) -> None:
        self.changes += 1
        for waiter, is_over in self._waiters.items():
            if is_over():
                waiter.put(None)

    def _drop(self) -> None:
        """Release the entry, error and response, after the last reader has left."""
        opened, response = self._opened, self._response
        # An error would be part of a reference cycle through the traceback.
        self._opened = self._response = self._error = None
        if opened is not None:
            opened.close()
        if response is not None:
            response.close()


@dataclass(eq=False, repr=False)
class Downloads:
    """The table of the shared downloads of one process, at most one per shard."""

    #: Guards the table and its downloads.
    lock: contextlib.AbstractContextManager[bool] = field(default_factory=threading.RLock)
    #: By key; those that have ended are removed.
    running: dict[str, Download] = field(default_factory=dict)

    def unfinished(self) -> list[Download]:
        with self.lock:
            return list(self.running.values())

    def close(self) -> None:
        """Cancel the downloads that have no reader, even if a reader asked to finish them."""
        with self.lock:
            for download in self.unfinished():
                if not download.readers:
                    download.cancel()
