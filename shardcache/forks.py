"""A piece of work done by a forked process, for its answer.

    with Fork(lambda: ...) as fork:
        ...  # meanwhile
        answer = fork.answer()  # None: it came to nothing, and is to be done here

A fork begins in milliseconds, with all that is imported. It copies nothing of other threads but
the locks that they hold at that moment, so `is_harmless` is to be asked first.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

__all__ = ["HANDLED", "Fork", "is_harmless", "processors"]

#: Signals that the parent answers for all: Ctrl-C goes to every process of a terminal, and
#: what ends a job to every process of it.
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Bytes of memory beyond which a process is not forked unasked: the kernel copies 2 MB of page
#: tables per GB, while everything in the process waits.
_LARGE = 1 << 30
#: Before an answer stands how long it is, so that a part of it is not taken for all.
_LENGTH = 8


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def is_harmless(*, native: bool = False) -> bool:
    """Whether this process may be forked unasked.

    Args:
        native: whether threads that Python does not know of (of numpy, NCCL, RDMA) are
            objections, too.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    if native and len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - names are enough
        return False
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 <= _LARGE


class Fork:
    """A process that does one piece of work and ends. For one thread.

    Args:
        work: what it does; its parent gets what is returned.

    Raises:
        OSError: a limit of processes, memory or files.
    """

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._pids: list[int] = []
        near, far = os.pipe()
        self._near = io.FileIO(near)
        try:
            # A signal before the first statement of the child would find our handlers.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
            try:
                # In one piece: another thread may take the signal that is blocked in this one,
                # and an interrupt between the fork and a statement would lose the child.
                self._pids.extend(itertools.starmap(os.fork, [()]))
                if self._pids == [0]:
                    _live(work, far)
            finally:
                os.close(far)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exn: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def answer(self) -> bytes | None:
        """What the work came to; waits for it. None if it failed, or its process was killed."""
        sent = self._near.readall()
        length = int.from_bytes(sent[:_LENGTH], "big")
        return sent[_LENGTH:] if len(sent) == _LENGTH + length else None

    def close(self) -> None:
        """End the process, whatever it does."""
        self._near.close()
        if self._pids:
            pid = self._pids.pop()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                # Its number is not anybody else's before it was waited for; where all children
                # are waited for by others, who knows: then it is let be.
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)


def _live(work: Callable[[], bytes], far: int) -> NoReturn:
    """Do the work, in a process that was just forked with `HANDLED` blocked."""
    try:
        for handled in HANDLED:
            signal.signal(handled, signal.SIG_DFL)  # the parent sees it
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        answer = work()
        with open(far, "wb") as file:
            file.write(len(answer).to_bytes(_LENGTH, "big"))
            file.write(answer)
    except BaseException:  # noqa: BLE001 - the parent does it itself, and meets it there
        os._exit(1)
    os._exit(0)
