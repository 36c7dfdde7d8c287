"""SIGINT and SIGTERM of the command line: the first ends in order, the second at once.

Where a command can wind down by itself (`Signals.graceful`) the first signal
only sets `Signals.stop`. Elsewhere it raises in the main thread. Whatever is
cut short, partials stay and are resumed, so "at once" loses nothing but
unflushed output.

Handlers are installed in the main thread only, and put back at the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Signals", "TerminatedError"]

_CAUGHT = (signal.SIGINT, signal.SIGTERM)
#: By convention of shells: 130 and 143.
_EXIT_BASE = 128
#: A display that is redrawn hides the cursor (DECTCEM); nobody else brings it back.
_SHOW_CURSOR = b"\x1b[?25h"


class TerminatedError(KeyboardInterrupt):
    """SIGTERM arrived."""


class Signals:
    """What was asked of this process from outside.

    Attributes:
        stop: set by the first signal during `graceful`.
        received: the first signal, or None.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.received: int | None = None
        self._graceful = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _CAUGHT:
                # Started with SIGINT ignored (nohup, `&` in a script): so it stays.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exn: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int | None:
        """130 or 143 once a signal has come."""
        return None if self.received is None else _EXIT_BASE + self.received

    @contextlib.contextmanager
    def graceful(self) -> Iterator[None]:
        """Let the first signal only set `stop` while the context lasts."""
        self._graceful = True
        try:
            yield
        finally:
            self._graceful = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if os.isatty(2):
                with contextlib.suppress(OSError):
                    os.write(2, _SHOW_CURSOR)
            os._exit(_EXIT_BASE + number)
        self.received = number
        if self._graceful:
            self.stop.set()
        elif number == signal.SIGTERM:
            raise TerminatedError
        else:
            raise KeyboardInterrupt
