"""What a node's prewarm does for a fleet: the lines of `fleetlines`, and an end with its owner.

Under Ray a prewarm is the child of a worker that may be killed at any time; with ``--tied-fd`` it
holds the reading end of a pipe whose writing end that worker alone has. End of file there is a
SIGTERM here: what was fetched is kept, and a node never goes on for nobody.

`Member.telling` wraps what is told in the main thread; the thread that writes progress takes the
same lock, so that lines are whole. It starts with the plan, when all processes of the crew have
been forked: a process with threads does not fork.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from shardcache.cli.output import Console
from shardcache.cli.progress import Snapshot, Tally
from shardcache.nodes import Share
from shardcache.prewarm.report import Event, Planned
from shardcache.version import __version__

__all__ = ["Member", "progress_record"]

#: Seconds between two lines of progress: what people see as live, and 1 kB/s for eight nodes.
_EVERY = 1.0
#: Seconds that a fetch without an owner has to let go; longer than those of `warmrun`.
_FAREWELL = 60.0


class Member:
    """Speaks for this node while its context lasts.

    Args:
        console: writes JSON lines.
        directory: of the cache.
        share: this node's part of the shards, or None for all.
        tied_fd: see the module; None: nobody's child.
    """

    def __init__(
        self,
        console: Console,
        directory: os.PathLike[str],
        share: Share | None,
        tied_fd: int | None,
    ) -> None:
        self._console = console
        self._directory = os.fspath(directory)
        self._share = share
        self._tied = tied_fd
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._tally: Tally | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        share = self._share
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._line(
            "node",
            host=host,
            pid=os.getpid(),
            dir=self._directory,
            library_version=__version__,
            node_rank=None if share is None else share.node,
            node_count=None if share is None else share.count,
            ranks_per_node=None if share is None else share.ranks,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exn: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._quiet()

    def telling(self, tell: Callable[[Event], None]) -> Callable[[Event], None]:
        """``tell``, and the lines of progress."""

        def told(event: Event) -> None:
            with self._lock:
                tell(event)
            if isinstance(event, Planned):
                self._begin(event)
            elif self._tally is not None:
                self._tally.note(event)

        return told

    def end(self, code: int) -> int:
        """The last line, after the context; returns ``code``."""
        self._line("end", exit_code=code)
        return code

    def _begin(self, event: Planned) -> None:
        self._tally = Tally(event.plan)
        self._thread = threading.Thread(target=self._report, name="shardcache-member", daemon=True)
        self._thread.start()
        if self._tied is not None:
            # Not joined: it waits for the owner's end, which may be later than ours.
            threading.Thread(target=_watch, args=(self._tied,), name="owner", daemon=True).start()

    def _quiet(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _report(self) -> None:
        assert self._tally is not None
        last = False
        while not last:
            last = self._over.wait(_EVERY)
            self._line("progress", **progress_record(self._tally.snapshot(time.monotonic())))

    def _line(self, kind: str, **record: Any) -> None:
        with self._lock:
            self._console.line(kind, record)


def progress_record(snapshot: Snapshot) -> dict[str, Any]:
    """Where a run is, as raw values."""
    return {
        "done": snapshot.done,
        "total": snapshot.total,
        "done_bytes": snapshot.bytes_done,
        "total_bytes": snapshot.bytes_total,
        "estimated": snapshot.estimated,
        "bytes_per_second": round(snapshot.rate, 1),
        "checked": snapshot.checked,
        "cached": snapshot.cached,
        "failed": snapshot.failed,
    }


def _watch(fd: int) -> None:
    """Wait for the owner's end; then end, in order and if that does not help, at once."""
    while os.read(fd, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_FAREWELL)
    os.kill(os.getpid(), signal.SIGKILL)
