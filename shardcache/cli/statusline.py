"""How far a long command is, in one line: drawn anew on a terminal, else said now and then.

A thread of its own asks for the text and writes it to stderr, for as long as the context lasts.
The console decides whether and how: nothing when quiet or with ``--no-progress``.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from shardcache.cli.output import Console
from shardcache.units import format_clock

__all__ = ["Rate", "StatusLine", "share_done"]

#: Seconds between two lines where nothing can be redrawn: a log of an hour has 360.
LINE_EVERY = 10.0
REDRAW_EVERY = 0.2
#: Rates are of the last seconds: shorter jumps about, longer hides a stall.
_WINDOW = 8.0


class Rate:
    """How much comes per second, over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, now: float, total: int) -> float:
        """Note that ``total`` had come by ``now``; returns the rate."""
        samples = self._samples
        samples.append((now, total))
        while len(samples) > 2 and now - samples[0][0] > _WINDOW:
            samples.popleft()
        elapsed = now - samples[0][0]
        return max(0.0, (total - samples[0][1]) / elapsed) if elapsed > 0 else 0.0


class StatusLine:
    """See the module.

    Args:
        console: decides whether and how.
        text: the line, given `time.monotonic`; asked by a thread of its own.
    """

    def __init__(self, console: Console, text: Callable[[float], str]) -> None:
        self._console = console
        self._text = text
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="shardcache-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._console.progress:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._console.redraw("")

    def _show(self) -> None:
        live = self._console.live
        while not self._ended.wait(REDRAW_EVERY if live else LINE_EVERY):
            text = self._text(time.monotonic())
            if live:
                self._console.redraw(text)
            else:
                self._console.hint(text)


def share_done(done: int, total: int, rate: float, parts: Sequence[str]) -> str:
    """``28%, <parts>, ETA 0:03:50``.

    Args:
        done, total: of what tells how far it is.
        rate: of it, per second.
        parts: what else there is to say.
    """
    share = f"{done / total:.0%}" if total else "0%"
    left = (total - done) / rate if rate else math.inf
    return ", ".join([share, *parts, f"ETA {format_clock(left)}"])
