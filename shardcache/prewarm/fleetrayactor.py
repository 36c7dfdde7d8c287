"""The part of a fleet that runs inside a Ray worker on each node.

`NodePrewarm` is made an actor that is pinned to its node. It starts the node's own ``shardcache
prewarm --member`` as a process, with the environment that Ray's worker has there: directory,
limits and credentials are the node's. Shards are handed to it on its standard input, since URLs
may be signed and command lines are there for everybody to see.

Ray calls its methods from several threads. What a member wrote is kept until it is acknowledged:
a call whose answer was lost on the network is made again and misses nothing.

Imports nothing of Ray, so that it is tested without.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NodePrewarm"]

#: Lines in one answer: some 100 kB.
_MOST = 500
#: Lines kept for a driver that does not ask; then the member has to wait.
_KEPT = 10_000


class NodePrewarm:
    """One node's prewarm, and what it writes."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._lines: list[tuple[str, str]] = []
        self._taken = 0
        self._stopped = False

    def start(self, options: Sequence[str], arguments: Sequence[str], specs: Sequence[str]) -> int:
        """Start ``shardcache OPTIONS prewarm ARGUMENTS`` for ``specs``; returns its pid."""
        ours, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shardcache", *options),
                    *("prewarm", "--member", "--tied-fd", str(ours), *arguments, "-f", "-"),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[ours],
                env=_environment(),
                text=True,
                encoding="utf-8",
                errors="backslashreplace",
                # Signals for Ray's worker, or for a terminal's group, are not for it.
                start_new_session=True,
            )
        except BaseException:
            os.close(theirs)
            raise
        finally:
            os.close(ours)
        # `theirs` stays open, in this process alone, for as long as it lives.
        readers = [
            threading.Thread(target=self._read, args=(kind, stream), daemon=True)
            for kind, stream in (("out", self._process.stdout), ("err", self._process.stderr))
        ]
        feeder = threading.Thread(target=self._feed, args=(list(specs),), daemon=True)
        for thread in (*readers, feeder):
            thread.start()
        threading.Thread(target=self._wait, args=(readers,), daemon=True).start()
        return self._process.pid

    def lines(self, seen: int, seconds: float) -> list[tuple[str, str]]:
        """What was written after the first ``seen`` lines: at once, or within ``seconds``.

        Pairs of "out" or "err" and a line; last comes "end" with the exit code.
        """
        end = time.monotonic() + seconds
        with self._changed:
            del self._lines[: max(0, seen - self._taken)]
            self._taken = max(self._taken, seen)
            self._changed.notify_all()
            while not self._lines and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._lines[:_MOST]

    def stop(self) -> None:
        """Ask the prewarm to end in order; it keeps what it has."""
        if self._process is not None and not self._stopped:
            self._stopped = True
            # Not SIGINT: Ray's workers ignore that one, and so does what they start.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def _feed(self, specs: list[str]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:  # it may be gone
            stream.writelines(f"{spec}\n" for spec in specs)

    def _read(self, kind: str, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self._put(kind, line.rstrip("\n"))

    def _wait(self, readers: Sequence[threading.Thread]) -> None:
        assert self._process is not None
        code = self._process.wait()
        for reader in readers:
            reader.join()
        self._put("end", str(code))

    def _put(self, kind: str, text: str) -> None:
        with self._changed:
            while len(self._lines) >= _KEPT:
                self._changed.wait()
            self._lines.append((kind, text))
            self._changed.notify_all()


def _environment() -> dict[str, str]:
    """The worker's own, in which the library is found where it was found here."""
    home = str(Path(__file__).resolve().parent.parent)
    paths = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    # At the end: a module of the library's directory must not hide another one.
    paths += [home] if home not in paths else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
