"""Shards that a shell command writes: WebDataset's ``pipe:`` URLs.

Only for those who said ``allow_schemes=["pipe"]``: the command comes out of a
shard list and runs with this process's rights. Its output has no version and no
stated size: it is cached under the command's text, read in one go, and started
over when it breaks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from shardcache.origin import ObjectInfo, TransientError
from shardcache.urls import ShardURL

__all__ = ["PipeOrigin"]

#: Seconds that a command may take to end after its output did.
_END_SECONDS = 10.0


class PipeOrigin:
    """Runs ``pipe:`` commands; see `origin.Origin`."""

    pins = True  # there is nothing to describe again
    states_checksums = False

    def open(
        self, url: ShardURL, start: int, stop: int | None, pin: ObjectInfo | None = None
    ) -> PipeBody:
        """See `origin.Origin.open`."""
        return PipeBody(url.raw.partition(":")[2])

    def stat(self, url: ShardURL) -> ObjectInfo:
        """See `origin.Origin.stat`: nothing is known of what a command will write."""
        return ObjectInfo(size=None)


class PipeBody:
    """One run of a command; see `origin.Body`."""

    def __init__(self, command: str) -> None:
        self.info = ObjectInfo(size=None)
        self.start = 0
        self.stop: int | None = None
        self._process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that a whole pipeline can be ended
        )

    def readinto(self, buffer: memoryview) -> int:
        """See `origin.Body.readinto`; a command that fails fails at its end."""
        output = self._process.stdout
        assert output is not None
        try:
            count = os.readv(output.fileno(), [buffer])
        except (OSError, ValueError) as exn:  # ValueError: closed by `abort`
            raise TransientError(f"reading the command's output failed: {exn}") from exn
        if count == 0:
            try:
                status = self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired as exn:
                raise TransientError("the command closed its output and goes on") from exn
            if status != 0:
                raise TransientError(f"the command ended with status {status}")
        return count

    def abort(self) -> None:
        """See `origin.Body.abort`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """See `origin.Body.close`; a command that still runs is ended."""
        if self._process.poll() is None:
            self.abort()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait()
